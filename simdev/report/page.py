"""The leaderboard as one HTML page that needs no network and no other file."""

from __future__ import annotations

import base64
import json
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np

from simdev.bench import plan_rows, rows, stored
from simdev.bench.gaps import Times, known_times
from simdev.bench.objective import parse_objective
from simdev.bench.rows import Row, entry_id
from simdev.errors import InvalidInput, SimdevError
from simdev.files import write_text
from simdev.problem.placement_file import placement_file, stored_placement
from simdev.report.explain import Explanation

BINS = 240  # time steps in the picture of a schedule
SCHEDULES = 2  # pictures for each case: those of its best runs
TRACKS = ["step,", "throughput", "plans"]  # the first words of the tracks, in their order on the page
CHANNELS = 4  # only the busiest channels are drawn


def write_page(folders: Sequence[str | os.PathLike], out: str | os.PathLike) -> None:
    """Write one page for the result folders ``folders`` to ``out``: boards of placers (``results.csv``) and of planners
    (``plans.csv``). Raises :class:`InvalidInput` if a folder cannot be read or has no rows."""
    # "<" cannot end the script element early once it is escaped
    text = json.dumps(page_data([Path(folder) for folder in folders]), separators=(",", ":")).replace("<", "\\u003c")
    parts = {name: (files("simdev.report") / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")}
    page = (files("simdev.report") / "page.html").read_text(encoding="utf-8")
    page = page.replace("@STYLE@", parts["page.css"].strip()).replace("@SCRIPT@", parts["page.js"].strip())
    write_text(out, page.replace("@DATA@", text))


def page_data(folders: Sequence[Path]) -> dict:
    """The content of the page as a dictionary for JSON; times are in ns, memory is in bytes."""
    cases: dict[str, dict] = {}
    lines: list[dict] = []
    for folder in folders:
        others = [other for other in folders if other != folder and (other / "results.csv").is_file()]
        there = {type(row) for row in plan_rows.read_folder(folder)}
        found = _placements(folder, others) if Row in there else {}
        found |= _plans(folder) if plan_rows.PlanRow in there else {}
        if not found:
            raise InvalidInput("holds no row", source=folder)
        for name, (case, mine) in found.items():
            key = name if len(folders) == 1 else f"{folder.name}: {name}"
            cases[key] = case
            lines += [{"case": key, **line} for line in mine]
    fits = sum(line["step"] is not None for line in lines)
    entries = {line["placer"] for line in lines}
    summary = f"{len(lines)} runs of {len(entries)} placers and planners on {len(cases)} cases, {fits} of which fit."
    tracks = sorted({case["track"] for case in cases.values()}, key=_place_of_track)
    return {"summary": summary, "tracks": tracks, "cases": cases, "rows": lines}


def _place_of_track(name: str) -> tuple[int, str]:
    """Tracks stand in the order of :data:`TRACKS`; objectives that simdev does not know come last."""
    first = name.partition(" ")[0]
    return TRACKS.index(first) if first in TRACKS else len(TRACKS), name


def track(row: Row) -> str:
    """What rows are ranked by: rows of different objectives, or orders of ready ops, are never compared."""
    if row.objective != "step":
        return row.objective.replace("/", " ")
    order = row.rules.split("/")[0]
    return "step, ops in order of arrival" if order == "fifo" else f"step, order {order}"


def _placements(folder: Path, others: Sequence[Path]) -> dict[str, tuple[dict, list[dict]]]:
    """The cases of a board of placers, each with its rows. Results of the boards ``others`` are known, too."""
    try:
        known = known_times(folder, others)
    except SimdevError:  # a folder lacks a graph, a machine or a placement: gaps are not divided
        known = {}
    cases: dict[str, list[Row]] = defaultdict(list)
    for row in rows.read_rows(folder / "results.csv"):
        end = "" if row.objective == "step" else f", {row.objective}"
        cases[f"{row.workload}, {row.topology}, {row.rules}{end}"].append(row)
    return {name: (_case(folder, mine, known), [_row(row) for row in mine]) for name, mine in cases.items()}


def _plans(folder: Path) -> dict[str, tuple[dict, list[dict]]]:
    """The cases of a board of planners, each with its rows."""
    cases: dict[str, list[plan_rows.PlanRow]] = defaultdict(list)
    for row in plan_rows.read_plan_rows(folder):
        cases[f"{row.model}, {row.cluster}, {row.batch}"].append(row)
    found = {}
    for name, mine in cases.items():
        first = mine[0]
        widest = max((row for row in mine if row.bound_ns), key=lambda row: row.bounded == "any meshes", default=None)
        whose = " with one mesh for all stages" if widest is None or widest.bounded == "one mesh" else ""
        case: dict[str, object] = {
            "board": folder.name,
            "workload": first.model,
            "topology": first.cluster,
            "track": "plans",
            "known": None,
            "rules": f"{first.batch} sequences a step, host {first.framework}",
            "ops": None,
            "best": min((row.step_ns for row in mine if row.step_ns is not None), default=None),
            "bound": widest.bound_ns if widest else None,
            "method": f"no plan of this model on this cluster{whose} is faster",
            "gantts": [],
            "note": "",
            "placement": None,
        }
        found[name] = case, [_plan_row(row) for row in mine]
    return found


def _plan_row(row: plan_rows.PlanRow) -> dict:
    return {
        "placer": row.planner if row.params == "{}" else entry_id(row.planner, json.loads(row.params)),
        "family": "planner",
        "status": row.error or row.status,
        "step": row.step_ns,
        "evaluations": row.evaluations,
        "seconds": row.plan_seconds,
        "peak": row.peak_bytes,
        "seed": row.seed,
        "plan": str(row.choice) if row.plan else "",
    }


def _row(row: Row) -> dict:
    spec = stored.registered_placer(row)
    return {
        "placer": row.entry,
        "family": spec.family if spec else "other",
        "status": "out of memory" if row.status == "ok" and not row.feasible else row.status,
        "step": row.step_ns,
        "evaluations": row.evaluations,
        "seconds": row.place_seconds,
        "peak": row.peak_memory_bytes,
        "seed": row.seed,
    }


def _case(folder: Path, mine: list[Row], known: Mapping[tuple, Times]) -> dict:
    scored = sorted((row for row in mine if row.step_ns is not None), key=lambda row: (row.step_ns, row.key))
    first = mine[0]
    ops, pictures, download, note = None, [], None, ""
    try:
        problem = stored.stored_problem(folder, first)
        ops = problem.graph.n_ops
        download = _download(folder, problem, scored[0]) if scored else None
        pictures = [_gantt(folder, problem, row) for row in scored[:SCHEDULES]]
    except SimdevError as error:  # the folder lacks the graph, machine or placement: show the row only
        note = str(error)
    times = known.get((first.workload, first.topology, first.rules, first.objective))
    return {
        "board": folder.name,
        "workload": first.workload,
        "topology": first.topology,
        "known": times and [times.relaxed_ns, times.best_ns],
        "track": track(first),
        "rules": first.rules,
        "ops": ops,
        "best": scored[0].step_ns if scored else None,
        "bound": max((row.lower_bound_ns for row in mine if row.lower_bound_ns), default=None),
        "method": max(mine, key=lambda row: row.lower_bound_ns or 0).bound_method,
        "gantts": pictures,
        "note": note,
        "placement": download,
    }


def _download(folder: Path, problem, row: Row) -> dict:
    """The placement file of a row, compressed, for the page's download."""
    text = stored_placement(folder, row.placement).to_json(problem)
    name = re.sub(r"[^\w.-]+", "-", f"{row.workload}-{row.topology}-{row.entry}.json")
    return {"name": name, "content": base64.b64encode(zlib.compress(text.encode(), 9)).decode("ascii")}


def _gantt(folder: Path, problem, row: Row) -> dict:
    """The load of each device and of the busiest channels in each of :data:`BINS` parts of the step, as digits 0 to
    9."""
    placement = stored_placement(folder, row.placement)
    placement.check(problem, source=placement_file(folder, row.placement))
    explanation = Explanation(*parse_objective(row.objective).run(problem, placement))
    s = explanation.schedule
    lanes = []
    for device, name in enumerate(explanation.device_names):
        mine = explanation.device == device
        lanes.append(
            _lane(name, s.op_start[mine], s.op_finish[mine], s.step_ns, int(explanation.topology.slots[device]), 0)
        )
    links = [
        _lane(explanation.channel_name(channel), s.transfer_start[users], s.transfer_finish[users], s.step_ns, 1, 1)
        for channel, users in explanation.channel_users.items()
    ]
    busiest = sorted(links, key=lambda lane: -lane[2])[:CHANNELS]
    return {"placer": row.entry, "step": int(s.step_ns), "lanes": lanes + busiest}


def _lane(name: str, begin: np.ndarray, end: np.ndarray, step_ns: int, slots: int, link: int) -> list:
    edges = np.linspace(0, step_ns, BINS + 1)
    order_begin, order_end = np.sort(begin), np.sort(end)

    def covered(sorted_times: np.ndarray) -> np.ndarray:
        """For each edge, the sum of ``edge - time`` over all times before it."""
        count = np.searchsorted(sorted_times, edges)
        return count * edges - np.concatenate([[0], np.cumsum(sorted_times)])[count]

    busy = np.diff(covered(order_begin) - covered(order_end)) / max(1, step_ns) * BINS / slots
    digits = np.clip(np.ceil(np.clip(busy, 0, 1) * 9 - 1e-9), 0, 9).astype(int)
    total = float((end - begin).sum() / max(1, step_ns) / slots)
    return [name, "".join(map(str, digits.tolist())), round(min(total, 1.0), 4), link]
