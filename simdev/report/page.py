"""The leaderboard as one HTML page that needs no network. Pictures and placements lie beside it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

import numpy as np

from simdev.bench import plan_rows, stored
from simdev.bench.gaps import Times, known_times
from simdev.bench.objective import parse_objective
from simdev.bench.rows import Row
from simdev.errors import InvalidInput, SimdevError
from simdev.files import write_text
from simdev.problem.placement_file import placement_file, stored_placement
from simdev.report.explain import Explanation

BINS = 240  # time steps in the picture of a schedule
CHANNELS = 4  # only the busiest channels are drawn
# What a board compares: the tab, and the question that it answers. The first one that a page holds is shown first.
TRACKS = {
    "step": ("One step", "Which placement makes one training step shortest? Ops of a device run in order of arrival."),
    "order": ("One step, own order", "As one step, but the placer also chooses the order of the ops of each device."),
    "pace": ("Pipelines", "Which placement passes most microbatches through a pipeline in a second?"),
    "latency": ("One query", "Which placement answers one query soonest? Forward ops only."),
    "serve": ("A stream of queries", "Which placement serves most queries in a second?"),
    "plan": ("Whole training jobs", "Which mesh, microbatch, recomputation and schedule make a large job fastest?"),
}
BASELINES = ("single-gpu", "expert", "megatron", "fsdp", "heft")  # the first that ran is what the best is set against


def write_page(folders: Sequence[str | os.PathLike], out: str | os.PathLike) -> None:
    """Write one page for the result folders ``folders`` to ``out``: boards of placers (``results.csv``) and of planners
    (``plans.csv``). Pictures and placements of a case are files of the folder ``OUT.cases`` beside the page, which are
    loaded when the case is opened; without them the page shows everything else. Raises :class:`InvalidInput` if a
    folder cannot be read or has no rows."""
    out = Path(out)
    data = page_data([Path(folder) for folder in folders])
    beside = out.with_name(f"{out.stem}.cases")
    data["beside"] = quote(beside.name)
    for number, case in enumerate(data.get("cases", {}).values()):
        more = {"gantts": case.pop("gantts"), "placement": case.pop("placement")}
        case["file"] = number if more["gantts"] else None
        if more["gantts"]:
            beside.mkdir(exist_ok=True)
            write_text(beside / f"{number}.js", f"simdevCase({number},{_json(more)});\n")
    parts = {name: (files("simdev.report") / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")}
    page = (files("simdev.report") / "page.html").read_text(encoding="utf-8")
    page = page.replace("@STYLE@", parts["page.css"].strip()).replace("@SCRIPT@", parts["page.js"].strip())
    write_text(out, page.replace("@DATA@", _json(data)))


def _json(content: dict) -> str:
    """JSON that cannot end a script element early: "<" is escaped."""
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")


def page_data(folders: Sequence[Path]) -> dict:
    """The content of the page as a dictionary for JSON; times are in ns, memory is in bytes."""
    cases: dict[str, dict] = {}
    lines: list[dict] = []
    placers: dict[str, dict] = {}
    for folder in folders:
        others = [other for other in folders if other != folder and (other / "results.csv").is_file()]
        read = plan_rows.read_folder(folder)
        if not read:
            raise InvalidInput("holds no row", source=folder)
        plans = {plan_rows.as_row(row).key: row for row in read if isinstance(row, plan_rows.PlanRow)}
        found = [plan_rows.as_row(row) for row in read]
        names = _cases(folder, found, others, len(folders) > 1, cases)
        lines += _lines(found, names, plans)
        for row in sorted(found, key=lambda row: row.utc):
            placers[row.entry] = _placer(row)
    fits = sum(line["step"] is not None for line in lines)
    runs = sum(line["runs"] for line in lines)
    summary = (
        f"{runs} runs of {len(placers)} placers and planners on {len(cases)} cases; {fits} of the {len(lines)} pairs "
        "of a placer and a case fit."
    )
    tracks = sorted({case["track"] for case in cases.values()}, key=_place_of_track)
    about = [{"name": name, "label": _label(name), "question": _question(name)} for name in tracks]
    return {"summary": summary, "tracks": about, "cases": cases, "rows": lines, "placers": placers}


def track(row: Row) -> str:
    """What rows are ranked by: rows of different objectives, or orders of ready ops, are never compared."""
    if row.objective == "plan":
        return "plan"
    if row.objective != "step":
        return row.objective.replace("throughput/", "pace ", 1).replace("/", " ")
    order = row.rules.split("/")[0]
    return {"fifo": "step", "priority": "order"}.get(order, f"step, order {order}")


def _place_of_track(name: str) -> tuple[int, str]:
    """Tracks stand in the order of :data:`TRACKS`; objectives that simdev does not know come last."""
    first = name.partition(" ")[0]
    return list(TRACKS).index(first) if first in TRACKS else len(TRACKS), name


def _label(name: str) -> str:
    first, _, rest = name.partition(" ")
    if first == "pace" and rest:
        schedule, _, microbatches = rest.partition(" ")
        return f"{TRACKS[first][0]}: {schedule}, {microbatches} microbatches"
    if first == "serve" and rest:
        return f"{TRACKS[first][0]}: {rest} queries"
    return TRACKS[name][0] if name in TRACKS else name


def _question(name: str) -> str:
    return TRACKS.get(name.partition(" ")[0], ("", ""))[1]


def _cases(
    folder: Path, found: list[Row], others: Sequence[Path], several: bool, cases: dict[str, dict]
) -> dict[tuple, str]:
    """Add the cases of a board to ``cases``. Results of the boards ``others`` are known, too. Returns their names."""
    known: Mapping[tuple, Times] = {}
    if any(row.objective != "plan" for row in found):
        with contextlib.suppress(SimdevError):  # a folder lacks a graph, machine or placement: gaps are not divided
            known = known_times(folder, others)
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in found:
        groups[row.case].append(row)
    names = {}
    for key, mine in groups.items():
        workload, topology, rules, objective = key
        name = f"{workload}, {topology}, {rules}" + ("" if objective == "step" else f", {objective}")
        names[key] = f"{folder.name}: {name}" if several else name
        cases[names[key]] = _plan_case(folder, mine) if objective == "plan" else _case(folder, mine, known)
    return names


def _lines(found: list[Row], names: Mapping[tuple, str], plans: Mapping[tuple, plan_rows.PlanRow]) -> list[dict]:
    """A line for each placer and budget on each case, its seeds merged: :func:`simdev.bench.score.scores`."""
    from simdev.bench.score import scores  # it imports pandas

    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in found:
        groups[(*row.case, row.budget, row.placer, row.params)].append(row)
    lines = []
    for line in scores(found).to_dict("records"):
        case = line["workload"], line["topology"], line["rules"], line["objective"]
        mine = groups[(*case, line["budget"], line["placer"], line["params"])]
        step = None if _absent(line["step_ns"]) else int(line["step_ns"])
        shown = next((row for row in mine if row.step_ns == step), mine[0])
        plan = plans.get(shown.key)
        lines.append(
            {
                "case": names[case],
                "placer": shown.entry,
                "budget": line["budget"],
                "status": "out of memory" if line["status"] == "oom" else (plan and plan.error) or line["status"],
                "step": step,
                "best": None if _absent(line["best_ns"]) else int(line["best_ns"]),
                "runs": int(line["runs"]),
                "log": round(float(line["log_ratio"]), 6),
                "rank": None if _absent(line["rank"]) else int(line["rank"]),
                "evaluations": _middle([row.evaluations for row in mine]),
                "seconds": _middle([row.place_seconds for row in mine]),
                "cpu": _middle([row.cpu_seconds for row in mine]),
                "peak": shown.peak_memory_bytes,
                **({"plan": str(plan.choice) if plan.plan else ""} if plan else {}),
            }
        )
    return lines


def _absent(value: object) -> bool:
    import pandas

    return bool(pandas.isna(value))


def _middle(values: list) -> float | None:
    """The median (of an even number, the lower one of the two in the middle)."""
    there = sorted(value for value in values if value is not None)
    return there[(len(there) - 1) // 2] if there else None


def _placer(row: Row) -> dict:
    """What is said about a placer or planner: family, paper, year, code, version and the date of its newest row."""
    if row.objective == "plan":
        from simdev.planners import planners

        spec: object = planners().get(row.placer)
        family = "planner"
    else:
        spec = placer = stored.registered_placer(row)
        family = placer.family if placer else "other"
    source = getattr(spec, "source", "") or ""
    own = "" if source.startswith(("after", "a control", "an extension")) else re.sub(r"arXiv:\S+", "", source)
    years = re.findall(r"\b(?:19|20)\d\d\b", own)
    module = getattr(getattr(spec, "function", None), "__module__", "")
    code = module.replace("simdev.baselines", "baselines").replace(".", "/") + ".py" if module else ""
    return {
        "family": family,
        "paper": source,
        "year": years[0] if years else "",
        "code": f"{code}, version {row.version}" if code else f"version {row.version}",
        "date": row.utc[:10],
    }


def _plan_case(folder: Path, mine: list[Row]) -> dict:
    bounded = [row for row in mine if row.lower_bound_ns]
    widest = max(bounded, key=lambda row: row.bound_method == plan_rows.ANY_MESHES, default=None)
    whose = "" if widest and widest.bound_method == plan_rows.ANY_MESHES else " with one mesh for all stages"
    return {
        "board": folder.name,
        "workload": mine[0].workload,
        "topology": mine[0].topology,
        "track": "plan",
        "known": None,
        "rules": f"host {mine[0].rules}",
        "ops": None,
        "best": min((row.step_ns for row in mine if row.step_ns is not None), default=None),
        "bound": widest.lower_bound_ns if widest else None,
        "method": f"no plan of this model on this cluster{whose} is faster",
        "gantts": [],
        "note": "",
        "placement": None,
    }


def _case(folder: Path, mine: list[Row], known: Mapping[tuple, Times]) -> dict:
    scored = sorted((row for row in mine if row.step_ns is not None), key=lambda row: (row.step_ns, row.key))
    first = mine[0]
    ops, pictures, download, note = None, [], None, ""
    try:
        problem = stored.stored_problem(folder, first)
        ops = problem.graph.n_ops
        download = _download(folder, problem, scored[0]) if scored else None
        against = [row for name in BASELINES for row in scored if row.entry == name][:1]
        pictures = [
            _gantt(folder, problem, row) for row in [*scored[:1], *(row for row in against if row != scored[0])]
        ]
    except SimdevError as error:  # the folder lacks the graph, machine or placement: show the row only
        note = str(error)
    times = known.get(first.case)
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
