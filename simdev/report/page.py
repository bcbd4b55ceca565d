"""The leaderboard as one HTML page that needs no network and no other file."""

from __future__ import annotations

import base64
import json
import os
import re
import zlib
from collections import defaultdict
from importlib.resources import files
from pathlib import Path

import numpy as np

from simdev.bench import rows, stored
from simdev.bench.objective import parse_objective
from simdev.bench.rows import Row
from simdev.errors import InvalidInput, SimdevError
from simdev.files import write_text
from simdev.report.explain import Explanation

BINS = 240  # time steps in the picture of a schedule
SCHEDULES = 2  # pictures for each case: those of its best runs
CHANNELS = 4  # only the busiest channels are drawn


def write_page(folder: str | os.PathLike, out: str | os.PathLike) -> None:
    """Write the page of a result folder to ``out``. Raises :class:`InvalidInput` if the folder cannot be read or has no
    rows."""
    folder = Path(folder)
    found = rows.read_rows(folder / "results.csv")
    if not found:
        raise InvalidInput("holds no row", source=folder / "results.csv")
    # "<" cannot end the script element early once it is escaped
    text = json.dumps(page_data(folder, found), separators=(",", ":")).replace("<", "\\u003c")
    parts = {name: (files("simdev.report") / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")}
    page = (files("simdev.report") / "page.html").read_text(encoding="utf-8")
    page = page.replace("@STYLE@", parts["page.css"].strip()).replace("@SCRIPT@", parts["page.js"].strip())
    write_text(out, page.replace("@DATA@", text))


def page_data(folder: Path, found: list[Row]) -> dict:
    """The content of the page as a dictionary for JSON; times are in ns, memory is in bytes."""
    cases: dict[str, list[Row]] = defaultdict(list)
    for row in found:
        judged = "" if row.objective == "step" else f", {row.objective}"
        cases[f"{row.workload}, {row.topology}, {row.rules}{judged}"].append(row)
    fits = sum(row.step_ns is not None for row in found)
    placers, budgets = {row.entry for row in found}, sorted({row.budget for row in found})
    return {
        "folder": folder.name,
        "summary": f"{len(found)} runs of {len(placers)} placers on {len(cases)} cases, {fits} of which fit; budget "
        + ", ".join(budgets)
        + ".",
        "tracks": sorted({track(row) for row in found}),
        "cases": {name: _case(folder, mine) for name, mine in cases.items()},
        "rows": [_row(name, row) for name, mine in cases.items() for row in mine],
    }


def track(row: Row) -> str:
    """Rows of different tracks are never ranked against each other: they follow different orders of ready ops."""
    return f"order {row.rules.split('/')[0]}"


def _row(case: str, row: Row) -> dict:
    spec = stored.registered_placer(row)
    return {
        "case": case,
        "placer": row.entry,
        "family": spec.family if spec else "other",
        "status": "out of memory" if row.status == "ok" and not row.feasible else row.status,
        "step": row.step_ns,
        "evaluations": row.evaluations,
        "seconds": row.place_seconds,
        "peak": row.peak_memory_bytes,
        "seed": row.seed,
    }


def _case(folder: Path, mine: list[Row]) -> dict:
    scored = sorted((row for row in mine if row.step_ns is not None), key=lambda row: (row.step_ns, row.key))
    first = mine[0]
    ops, pictures, download, note = None, [], None, ""
    try:
        problem = stored.stored_problem(folder, first)
        ops = problem.graph.n_ops
        pictures = [_gantt(folder, problem, row) for row in scored[:SCHEDULES]]
        download = _download(folder, problem, scored[0]) if scored else None
    except SimdevError as error:  # the folder lacks the graph, machine or placement: show the row only
        note = str(error)
    return {
        "workload": first.workload,
        "topology": first.topology,
        "track": track(first),
        "rules": first.rules,
        "ops": ops,
        "best": scored[0].step_ns if scored else None,
        "bound": first.lower_bound_ns,
        "method": first.bound_method,
        "gantts": pictures,
        "placement": download,
        "note": note,
    }


def _download(folder: Path, problem, row: Row) -> dict:
    """The placement file of a row, compressed, for the page's download."""
    text = rows.stored_placement(folder, row.placement).to_json(problem)
    name = re.sub(r"[^\w.-]+", "-", f"{row.workload}-{row.topology}-{row.entry}.json")
    return {"name": name, "content": base64.b64encode(zlib.compress(text.encode(), 9)).decode("ascii")}


def _gantt(folder: Path, problem, row: Row) -> dict:
    """The load of each device and of the busiest channels in each of :data:`BINS` parts of the step, as digits 0 to
    9."""
    placement = rows.stored_placement(folder, row.placement)
    placement.check(problem, source=rows.placement_path(folder, row.placement))
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
