"""The facts of the pages: every figure that comes from a board is written by this program, and so is every picture.

``python docs/facts.py`` names what is stale; ``--write`` brings it up to date. A fact stands in the source of a page
between two comments, which no reader sees. The first one says how it is computed, in the words of :data:`FACTS`::

    <!-- = ms standard nmt p100x4 heft -->2,004<!-- . -->

A table is a fact whose comments stand on lines of their own. The first lines of a table, its head, stay as they are
written: they choose the columns. Pictures are those of :data:`PICTURES`; a picture holds the sentence that it was drawn
from (:func:`simdev.report.timeline.sentence`). Notebooks name the boards that they read, with a digest of each.
"""

from __future__ import annotations

import argparse
import csv
import functools
import hashlib
import json
import math
import re
import shlex
import statistics
import struct
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
BOARDS = ROOT / "leaderboard"
PAGES = [ROOT / "README.md", ROOT / "simdev" / "exact" / "README.md", *sorted((ROOT / "docs" / "pages").rglob("*.md"))]
COMMAND = "python docs/facts.py --write"
FACT = re.compile(r"(<!-- = (?P<text>[^>]+?) -->)(?P<shown>.*?)(<!-- \. -->)", re.DOTALL)
HEAD = 2  # lines of a table that are written by hand: the columns, and the rule below them
PICTURES = {
    "docs/pages/inception-v3-p100x4.png": "view leaderboard/standard -w inception-v3 -t p100x4 --before single-gpu",
}


@functools.cache
def board(name: str) -> list:
    """The rows of a board; ``BOARD:ORDER`` means those under one order of ops, ``BOARD:BUDGET`` those of a budget."""
    from simdev.bench.plan_rows import as_row, read_folder

    name, _, part = name.partition(":")
    found = [as_row(row) for row in read_folder(BOARDS / name)]
    return [row for row in found if not part or part in (row.rules.split("/")[0], row.budget)]


@functools.cache
def lines(name: str) -> dict[tuple[str, str, str], dict[str, str]]:
    """The lines of ``leaderboard.csv``, by workload, machine and placer."""
    from simdev.bench import score

    return {(line["workload"], line["topology"], line["placer"]): line for line in score.leaderboard(board(name))}


@functools.cache
def ranking(name: str) -> dict[str, dict[str, str]]:
    """The lines of ``ranking.csv``, by placer, in their order."""
    from simdev.bench import score

    return {line["placer"]: line for line in score.ranking(board(name))}


@functools.cache
def gaps(name: str) -> list[float]:
    """The gap of the best run of each case to its proven lower bound, as a share."""
    best: dict[tuple[str, str], int] = {}
    bound: dict[tuple[str, str], int] = {}
    for row in board(name):
        case = row.workload, row.topology
        bound[case] = max(bound.get(case, 0), row.lower_bound_ns or 0)
        if row.step_ns is not None:
            best[case] = min(best.get(case, row.step_ns), row.step_ns)
    return [best[case] / bound[case] - 1 for case in sorted(best) if bound[case]]


def milliseconds(seconds: str, status: str = "") -> str:
    """Four digits; in place of a missing time, its status."""
    value = float(seconds or "nan") * 1e3
    return status.upper() if value != value else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def time_of(line: dict[str, str]) -> str:
    return line["step_time_s"] or line["microbatch_time_s"]


def percent(share: float) -> str:
    """As much of a share as a sentence needs: 62 %, 7.2 %, 0.1 %."""
    value = 100 * share
    return f"{value:.0f} %" if value >= 10 else f"{value:.1f} %"


def ms(name: str, workload: str, topology: str, placer: str) -> str:
    """The step time of a placer, in ms: the median over its seeds."""
    line = lines(name)[workload, topology, placer]
    return milliseconds(time_of(line), line["status"])


def best_ms(name: str, workload: str, topology: str) -> str:
    """The shortest step time of any run, in ms."""
    times = [row.step_ns for row in board(name) if (row.workload, row.topology) == (workload, topology) and row.step_ns]
    return milliseconds(str(min(times) / 1e9))


def ratio(name: str, placer: str) -> str:
    """The geometric mean of a placer's ratio to the best known times."""
    return f"{float(ranking(name)[placer]['geomean_ratio_to_best']):.3f}"


def above(name: str, placer: str) -> str:
    """How much longer a placer's steps are than the best known ones, on average."""
    return percent(float(ranking(name)[placer]["geomean_ratio_to_best"]) - 1)


def fit(name: str, placer: str) -> str:
    """How many of a placer's cases have a placement that fits."""
    return f"{ranking(name)[placer]['solved']}/{ranking(name)[placer]['cases']}"


def shorter(name: str, placer: str, than: str) -> str:
    """How much shorter the steps of a placer are than those of another, on average over the cases of both."""
    first, second = ranking(name)[placer], ranking(name)[than]
    if first["cases"] != second["cases"]:
        raise ValueError(f"{placer} and {than} ran other cases of {name}")
    return percent(1 - float(first["geomean_ratio_to_best"]) / float(second["geomean_ratio_to_best"]))


def medians(name: str, placer: str) -> dict[tuple[str, str], float]:
    """The step time of a placer in each of its cases, ms: the median over its seeds."""
    return {key[:2]: 1e3 * float(time_of(line)) for key, line in lines(name).items() if key[2] == placer}


def shorter_than_on(name: str, other: str, placer: str) -> str:
    """How much shorter a placer's medians are on one board than on another, on average over the cases."""
    mine, theirs = medians(name, placer), medians(other, placer)
    return percent(1 - math.exp(statistics.mean(math.log(mine[case] / theirs[case]) for case in mine)))


def better_than_on(name: str, other: str, placer: str) -> str:
    """In how many cases a placer's median is shorter on one board than on another."""
    mine, theirs = medians(name, placer), medians(other, placer)
    return str(sum(mine[case] < theirs[case] for case in mine))


def furthest_behind(name: str, control: str, *placers: str) -> str:
    """How much longer a placer's median is than that of ``control`` in the worst case of any of ``placers``."""
    base = medians(name, control)
    return percent(max(ns / base[case] - 1 for placer in placers for case, ns in medians(name, placer).items()))


def above_records(name: str, placer: str) -> str:
    """How much longer a placer's medians are than the records of ``best-known`` for the same cases, on average."""
    records = {(row.workload, row.topology, row.rules): row.step_ns for row in board("best-known")}
    rules = {row.rules for row in board(name) if row.entry == placer}
    logs = [
        math.log(1e9 * float(time_of(line)) / records[case[0], case[1], rule])
        for case, line in lines(name).items()
        for rule in rules
        if case[2] == placer
    ]
    return percent(math.exp(statistics.mean(logs)) - 1)


def wins(name: str, placer: str, over: str) -> str:
    """In how many cases a placer's median is shorter than that of another."""
    mine = {key[:2]: time_of(line) for key, line in lines(name).items() if key[2] == placer}
    other = {key[:2]: time_of(line) for key, line in lines(name).items() if key[2] == over}
    return str(sum(float(mine[case] or "inf") < float(other[case] or "inf") for case in mine.keys() & other.keys()))


def first(name: str) -> str:
    """The placer in the first place."""
    return f"`{next(iter(ranking(name)))}`"


def gap(name: str, workload: str, topology: str) -> str:
    """How far the best known step time of a case is above its proven lower bound at most, rounded up to 0.1 %."""
    mine = [row for row in board(name) if (row.workload, row.topology) == (workload, topology)]
    best = min(row.step_ns for row in mine if row.step_ns)
    return f"{math.ceil(1000 * (best / max(row.lower_bound_ns or 0 for row in mine) - 1)) / 10:.1f} %"


def gain(name: str, workload: str, topology: str) -> str:
    """The largest part of the best known step time of a case that a better placement could still save."""
    mine = [row for row in board(name) if (row.workload, row.topology) == (workload, topology)]
    best = min(row.step_ns for row in mine if row.step_ns)
    return percent(1 - max(row.lower_bound_ns or 0 for row in mine) / best)


def within(name: str, share: str) -> str:
    """How many cases are at most so many per cent above their bound."""
    return str(sum(gap <= float(share) / 100 for gap in gaps(name)))


def middle_gap(name: str) -> str:
    """The median gap of a board."""
    return percent(statistics.median(gaps(name)))


def largest_gap(name: str) -> str:
    return percent(max(gaps(name)))


def count(name: str, what: str) -> str:
    """The number of rows, cases, placers, workloads or machines of a board."""
    rows = board(name)
    found = {
        "rows": rows,
        "cases": {(row.workload, row.topology) for row in rows},
        "placers": {row.entry for row in rows},
        "workloads": {row.workload for row in rows},
        "machines": {row.topology for row in rows},
    }
    return f"{len(found[what]):,}"


def registered(what: str) -> str:
    """How many placers, planners, workloads or models ship with simdev."""
    from simdev.placers import registry

    if what == "placers":
        return str(len(registry.placers()))
    if what == "workloads":
        return str(len(registry.workloads()))
    from simdev.planners import planners

    return str(len(planners()))


def plans(paper: str, what: str) -> str:
    """Of the measured plans whose source names ``paper`` (or a model): how many there are, the most GPUs of one, the
    mean error of the simulated step time, the largest one, or the simulated ``seconds`` of the first."""
    rows = [line for line in published_plans() if paper in line["source"]]
    errors = [abs(float(line["simulated_s"]) / float(line["measured_s"]) - 1) for line in rows]
    found = {
        "rows": str(len(rows)),
        "gpus": f"{max(int(line['gpus']) for line in rows):,}",
        "error": percent(sum(errors) / len(errors)),
        "largest": percent(max(errors)),
        "seconds": f"{float(rows[0]['simulated_s']):.1f}",
    }
    return found[what]


@functools.cache
def published_plans() -> list[dict[str, str]]:
    """The lines of the table of published plans."""
    with open(BOARDS / "fidelity" / "published-plans.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def plan_errors(*rows: str) -> str:
    """The error of each of these rows of the published plans, with its sign: +1.0, -2.8 %."""
    found = {line["row"].partition(" (")[0].removeprefix("row "): line for line in published_plans()}
    errors = [float(found[row]["simulated_s"]) / float(found[row]["measured_s"]) - 1 for row in rows]
    return ", ".join(f"{100 * error:+.1f}" for error in errors) + " %"


def control(name: str, what: str, text: str = "") -> str:
    """Of the control of a set of training runs: its mean ``error``, or the ``rows`` that have one, over the models
    whose source has ``text``. Published plans are those in their table."""
    with open(BOARDS / "fidelity" / "controls.csv", encoding="utf-8", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["set"] == name and text in line["source"]]
    if name == "published-plans":
        simulated = {line["source"] for line in published_plans()}
        lines = [line for line in lines if line["source"] in simulated]
    rows = sum(int(line["rows"]) for line in lines)
    error = sum(float(line["error"]) * int(line["rows"]) for line in lines) / rows
    return {"rows": str(rows), "error": percent(error)}[what]


def fidelity(goal: str, what: str, group: str = "") -> str:
    """Of the shipped report on fidelity: how many ``rows`` a goal has in groups with this text, or their mean
    ``error``."""
    with open(BOARDS / "fidelity" / "cases.csv", encoding="utf-8", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["goal"] == goal and group in line["group"]]
    errors = [abs(float(line["error"])) for line in lines]
    return {"rows": str(len(errors)), "error": percent(sum(errors) / len(errors))}[what]


@functools.cache
def groups() -> dict[str, tuple[str, str]]:
    """Of the shipped report on fidelity: the mean error of each group in per cent, and how many cases it has. The key
    has the group's goal before it: ``F3 v100``."""
    with open(BOARDS / "fidelity" / "groups.csv", encoding="utf-8", newline="") as file:
        return {
            f"{line['goal']} {line['group']}".strip(): (f"{100 * float(line['error']):.1f} %", line["cases"])
            for line in csv.DictReader(file)
            if line["error"]
        }


def left_out(kind: str, which: str) -> str:
    """The ``least`` or the ``most`` error of ops of a kind, over boards, if a whole table is left out of their fit."""
    pick = {"least": min, "most": max}[which]
    mine = [error for name, (error, _) in groups().items() if name.startswith(f"{kind} with one table left out")]
    return pick(mine, key=lambda error: float(error.rstrip(" %")))


def cost_report(what: str) -> str:
    """Of the report on placers before and after calibration: the pairs of placers that are ``changed``, the rank
    ``correlation``, the ``cases``, how many have the ``same`` best placer, or the mean ``regret``."""
    text = " ".join((BOARDS / "calibration" / "README.md").read_text(encoding="utf-8").split())
    found = re.search(
        r"placers \((?P<changed>[\d.]+ %)\) trade places; the best placer is the same in (?P<same>\d+) of "
        r"(?P<cases>\d+) cases; the mean Kendall correlation of the ranks is (?P<correlation>[\d.]+), and the mean "
        r"regret (?P<regret>[\d.]+ %)",
        text,
    )
    assert found, "leaderboard/calibration/README.md has another sentence"
    return found[what]


def measured_plans(what: str) -> str:
    """Of the report on plans that ran on real cores: the mean ``error``, that with collectives ``amid`` work, the
    ``largest`` error, the ``regret``, or Kendall's ``tau``."""
    text = (BOARDS / "measured" / "plans" / "report.md").read_text(encoding="utf-8")
    found = dict(re.findall(r"^- (.+): ([\d.]+)$", text, re.MULTILINE))
    if what == "tau":
        return found["Kendall's tau"]
    named = {"error": "mean error", "amid": "mean error with collectives amid work", "largest": "largest error"}
    return percent(float(found[named.get(what, what)]))


@functools.cache
def reports(name: str) -> dict[tuple[str, str], dict[str, str]]:
    """The tables of a reproduced paper: the cells of each line, by table and line."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    with open(BOARDS / "reproduced" / name / "tables.csv", encoding="utf-8", newline="") as file:
        for cell in csv.DictReader(file):
            found.setdefault((cell["table"], cell["line"]), {})[cell["column"]] = cell["value"]
    return found


def reported(name: str, table: str, column: str, *where: str) -> str:
    """A cell of a reproduced paper's report, without its interval. ``where`` is ``COLUMN=VALUE`` and chooses the
    line; it has to choose one."""
    wanted = dict(pair.split("=", 1) for pair in where)
    mine = [line for (of, _), line in reports(name).items() if of == table and wanted.items() <= line.items()]
    if len(mine) != 1:
        raise KeyError(f"{len(mine)} lines of {name}, {table} have {wanted}")
    return mine[0][column].partition(" [")[0]


def reported_less(name: str, table: str, column: str, key: str, first: str, than: str) -> str:
    """How much less a cell of a report is in the line whose ``key`` is ``first`` than in that of ``than``."""
    mine, other = (float(reported(name, table, column, f"{key}={of}").replace(",", "")) for of in (first, than))
    return percent(1 - mine / other)


def policy(what: str) -> str:
    """Of the report on Mirhoseini et al.: the ``least`` and the ``most`` that the policy's steps are shorter than the
    best baseline's on NMT and Inception, and how much ``longer`` they are on RNNLM at most."""
    baselines = ("single-cpu", "single-gpu", "scotch", "min-cut", "expert")
    shares: dict[bool, list[float]] = {False: [], True: []}
    for (name, _), line in reports("mirhoseini").items():
        if name == "table1-dataflow":
            best = min(float(line[of].replace(",", "")) for of in baselines if line[of] != "OOM")
            mine = float(line["colocrl[hosts=true]"].partition(" [")[0].replace(",", ""))
            shares[line["workload"] == "rnnlm"].append(1 - mine / best)
    return {
        "least": percent(min(shares[False])),
        "most": percent(max(shares[False])),
        "longer": percent(-min(shares[True])),
    }[what]


def signs(what: str) -> str:
    """Of the report on Mirhoseini et al.: how many findings of the paper there are (``all``), or hold under a machine:
    the name of a column."""
    lines = [line for (name, _), line in reports("mirhoseini").items() if name == "signs"]
    return str(len(lines) if what == "all" else sum(line[what] == "yes" for line in lines))


def needed(name: str, placer: str, workload: str, topology: str) -> str:
    """The evaluations after which a placer reaches the target that the report on Placeto has for a case: the mean over
    its seeds."""
    case = f"case={workload} on {topology}"
    target = float(reported("placeto", "evaluations", "target, ms", case, "placer=placeto").replace(",", ""))
    wanted = {"workload": workload, "topology": topology, "placer": placer}
    reached: dict[str, int] = {}
    with open(BOARDS / name / "curves.csv", encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if wanted.items() <= line.items() and float(line["step_time_s"] or "inf") * 1e3 <= target:
                reached.setdefault(line["seed"], int(line["evaluations"]))
    seeds = {row.seed for row in board(name) if (row.workload, row.topology, row.entry) == (workload, topology, placer)}
    if len(reached) != len(seeds):
        raise ValueError(f"{placer} does not reach {target} ms on {workload} with every seed")
    return f"{statistics.mean(reached.values()):.0f}"


def alike(name: str, placer: str, other: str) -> str:
    """In how many cases the placements of two placers take the same time."""
    mine = {key[:2]: time_of(line) for key, line in lines(name).items() if key[2] == placer}
    others = {key[:2]: time_of(line) for key, line in lines(name).items() if key[2] == other}
    return str(sum(time != "" and time == others.get(case) for case, time in mine.items()))


def ops(workload: str) -> str:
    """The number of ops of a workload's graph."""
    import simdev

    return f"{simdev.load_workload(workload).n_ops:,}"


def splits(what: str) -> str:
    """Of the report on Tarnawski et al.: how many ``graphs`` it has; the ``least`` and the ``most`` that the best
    contiguous split has less load than the published one; on how many graphs a free split is ``better``, and by how
    much at most (``gain``); the ``least-latency`` and the ``most-latency`` below greedy filling, where they differ."""
    load = [line for (table, _), line in reports("tarnawski").items() if table == "throughput"]
    latency = [line for (table, _), line in reports("tarnawski").items() if table == "latency"]
    expert = [1 - float(line["contiguous"]) / float(line["expert"]) for line in load if line["expert"]]
    free = [1 - float(line["free"]) / float(line["contiguous"]) for line in load]
    greedy = [1 - float(line["one call"]) / float(line["greedy"]) for line in latency]
    greedy = [share for share in greedy if share > 0.0001]
    return {
        "graphs": str(len(load)),
        "least": percent(min(expert)),
        "most": percent(max(expert)),
        "better": str(sum(share > 0.00001 for share in free)),
        "gain": percent(max(free)),
        "least-latency": percent(min(greedy)),
        "most-latency": percent(max(greedy)),
    }[what]


def slower(name: str, placer: str, what: str) -> str:
    """How much longer the steps of a planner's plans are than the best known ones, over the jobs where its plan fits:
    in the ``median``, or at ``most``, as a share; the ``factor`` at most; or in ``fits`` of how many jobs."""
    best, mine = _best(name), {}
    for row in board(name):
        if row.entry == placer:
            mine[row.workload, row.topology] = row.step_ns
    shares = [step / best[job] - 1 for job, step in mine.items() if step is not None]
    return {
        "median": percent(statistics.median(shares)),
        "most": percent(max(shares)),
        "factor": f"{max(shares) + 1:.1f}",
        "fits": f"{len(shares)} of {len(mine)}",
    }[what]


def alone(name: str, placer: str) -> str:
    """In how many cases nobody else reaches the best known step of a placer."""
    best = _best(name)
    reach: dict[tuple[str, str], set[str]] = {}
    for row in board(name):
        case = row.workload, row.topology
        if row.step_ns == best.get(case):
            reach.setdefault(case, set()).add(row.entry)
    return str(sum(found == {placer} for found in reach.values()))


def best_of(name: str, placer: str) -> str:
    """In how many cases a placer has the best known step, alone or with others."""
    best = _best(name)
    found = {
        (row.workload, row.topology)
        for row in board(name)
        if row.entry == placer and row.step_ns is not None and row.step_ns == best[row.workload, row.topology]
    }
    return str(len(found))


def smallest_gap(name: str) -> str:
    return percent(min(gaps(name)))


def preset(name: str, what: str) -> str:
    """Of the report on other simulators' rules: the rank ``correlation`` of a preset with the full rules, the ``cost``
    of trusting it, or in how many cases its favourite is the ``best`` placement."""
    text = (BOARDS / "physics" / "README.md").read_text(encoding="utf-8")
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    head = next(cells for cells in table if cells[0] == "rules")
    line = dict(zip(head, next(cells for cells in table if cells[0] == name), strict=True))
    return {
        "correlation": f"{float(line['Kendall']):.2f}",
        "cost": percent(float(line["regret %"]) / 100),
        "best": line["same best"].partition("/")[0],
        "cases": line["same best"].partition("/")[2],
    }[what]


def _best(name: str) -> dict[tuple[str, str], int]:
    best: dict[tuple[str, str], int] = {}
    for row in board(name):
        if row.step_ns is not None:
            case = row.workload, row.topology
            best[case] = min(best.get(case, row.step_ns), row.step_ns)
    return best


def planned(head: list[str], name: str, model: str, cluster: str) -> list[str]:
    """Lines of a table of planners on one job: who found a plan, the plan, its step time in seconds, and how much
    longer that is than the shortest one. Planners of one plan share a line."""
    from simdev.bench.plan_rows import read_folder

    mine = [row for row in read_folder(BOARDS / name) if (row.model, row.cluster) == (model, cluster)]
    plans: dict[tuple[int, str], list[str]] = {}
    for row in mine:
        if row.step_ns is not None:
            plans.setdefault((row.step_ns, str(row.choice)), []).append(f"`{row.entry}`")
    best = min(step for step, _ in plans)
    longer = {step: percent(step / best - 1) if step > best else "" for step, _ in plans}
    return [
        f"| {', '.join(sorted(names))} | `{plan}` | {step / 1e9:.3f} | {longer[step]} |".replace("|  |", "| |")
        for (step, plan), names in sorted(plans.items())
    ]


def bounds(head: list[str], name: str) -> list[str]:
    """Lines of a table whose columns are machines: the shortest step time of a workload in ms, the highest proven
    lower bound, and the gap between them."""
    _, _, *topologies, _ = (cell.strip() for cell in head[0].split("|"))
    best = _best(name)
    bound: dict[tuple[str, str], int] = {}
    for row in board(name):
        case = row.workload, row.topology
        bound[case] = max(bound.get(case, 0), row.lower_bound_ns or 0)
    found = []
    for workload in sorted({case[0] for case in best}):
        cells = [
            f"{best[case] / 1e6:,.0f} / {bound[case] / 1e6:,.0f}, {100 * (best[case] / bound[case] - 1):.1f} %"
            for case in ((workload, topology) for topology in topologies)
        ]
        found.append(f"| {workload} | {' | '.join(cells)} |")
    return found


def table(head: list[str], name: str, topology: str, which: str = "all") -> list[str]:
    """Lines of a table whose columns are workloads on ``topology``, best placer first, then the proven lower bounds.
    ``which`` is ``all``, or the names of the placers that are shown, with commas between them."""
    _, _, *workloads, _, _, _ = (cell.strip() for cell in head[0].split("|"))
    found = []
    for placer in _shown(ranking(name), which):
        cells = [ms(name, workload, topology, placer) for workload in workloads]
        found.append(f"| `{placer}` | {' | '.join([*cells, ratio(name, placer), fit(name, placer)])} |")
    bounds = [milliseconds(lines(name)[workload, topology, placer]["lower_bound_s"]) for workload in workloads]
    return [*found, f"| proven lower bound | {' | '.join(bounds)} | | |"]


def _shown(placers: Iterable[str], which: str) -> list[str]:
    """The placers of a table in their order: ``all``, or the names in ``which``, with commas between them."""
    placers = list(placers)
    if which == "all":
        return placers
    if missing := set(which.split(",")) - set(placers):
        raise ValueError(f"no rows of {sorted(missing)}")
    return [placer for placer in placers if placer in which.split(",")]


def machines(head: list[str], name: str, which: str = "all") -> list[str]:
    """Lines of a table whose columns are machines: the mean ratio to the best on each."""
    _, _, _, *topologies, _, _ = (cell.strip() for cell in head[0].split("|"))
    placers = _shown(ranking(name), which)
    return [f"| `{placer}` | {' | '.join(_by_machine(name, placer, topologies))} |" for placer in placers]


def tracks(head: list[str], name: str) -> list[str]:
    """Lines of a table: how much longer each placer's steps are than the records, and the cases that it ran."""
    by_ratio = sorted(ranking(name), key=lambda placer: float(ranking(name)[placer]["geomean_ratio_to_best"]))
    by_place = sorted(by_ratio, key=lambda placer: -int(ranking(name)[placer]["cases"]))
    return [
        f"| `{placer}` | {ranking(name)[placer]['version']} | {above_records(name, placer)} | {fit(name, placer)} |"
        for placer in by_place
    ]


def inference(head: list[str], name: str, objective: str, which: str = "all") -> list[str]:
    """Lines of a table whose columns are machines: the mean ratio to the best of each placer under one objective, and
    the cases that fit."""
    from simdev.bench import score

    _, _, _, *topologies, _, _ = (cell.strip() for cell in head[0].split("|"))
    mine = [row for row in board(name) if row.objective == objective]
    each = [
        {line["placer"]: line for line in score.ranking(row for row in mine if row.topology == topology)}
        for topology in topologies
    ]
    found = []
    every = {line["placer"]: line for line in score.ranking(mine)}
    for line in (every[placer] for placer in _shown(every, which)):
        cells = [f"{float(part[line['placer']]['geomean_ratio_to_best']):.3f}" for part in each]
        mean = f"{float(line['geomean_ratio_to_best']):.3f}"
        found.append(f"| `{line['placer']}` | {mean} | {' | '.join(cells)} | {line['solved']}/{line['cases']} |")
    return found


@functools.cache
def _machine(name: str, topology: str) -> dict[str, dict[str, str]]:
    """The lines of the ranking on one machine, by placer."""
    from simdev.bench import score

    return {line["placer"]: line for line in score.ranking(row for row in board(name) if row.topology == topology)}


def _by_machine(name: str, placer: str, topologies: list[str]) -> list[str]:
    cells = [ratio(name, placer)]
    for topology in topologies:
        if placer in (mine := _machine(name, topology)):
            cells.append(f"{float(mine[placer]['geomean_ratio_to_best']):.3f}")
    return [*cells, fit(name, placer)]


def pipelines(head: list[str], name: str, which: str = "all") -> list[str]:
    """Lines of a table of steady times per microbatch, in ms, and the mean ratio to the bound where the placement
    fits."""
    _, _, *workloads, _, _ = (cell.strip() for cell in head[0].split("|"))
    found, bounds = [], []
    for placer in _shown(ranking(name), which):
        mine = [next(line for key, line in lines(name).items() if key[::2] == (w, placer)) for w in workloads]
        logs = [math.log(float(time_of(line)) / float(line["lower_bound_s"])) for line in mine if time_of(line)]
        mean = math.exp(sum(logs) / len(logs))
        cells = [milliseconds(time_of(line), line["status"]) for line in mine]
        found.append((mean, f"| `{placer}` | {' | '.join(cells)} | {mean:.2f} ({len(logs)} of {len(mine)}) |"))
        bounds = [milliseconds(line["lower_bound_s"]) for line in mine]
    return [*(line for _, line in sorted(found)), f"| proven lower bound | {' | '.join(bounds)} | |"]


KERNELS = {  # rows of the table of kernels: the group of each board
    "whole models, training step or inference (cases)": "F3 {}",
    "the same cases, as if the device were unknown": "F4 {} from ",
    "matrix products, held-out shapes": "F5 gemm {}",
    "convolutions, held-out shapes": "F5 conv {}",
    "elementwise, softmax, layer norm, held-out shapes": "F5 other {}",
}


def kernels(head: list[str]) -> list[str]:
    """Lines of a table whose columns are boards: the mean errors of f32 kernels and models in the shipped report."""
    _, _, *boards, _ = (cell.strip().lower() for cell in head[0].split("|"))
    found = []
    for label, group in KERNELS.items():
        cells = []
        for board in boards:
            named = group.format(board)
            mine = [
                shown
                for name, shown in groups().items()
                if name == named or " from" in named and name.startswith(named)
            ]
            error, cases = mine[0] if mine else ("", "")
            cells.append(f"{error} ({cases})" if error and "(cases)" in label else error)
        found.append(f"| {label} | {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return found


FACTS: dict[str, Callable[..., str]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        ms, best_ms, ratio, above, above_records, fit, shorter,
        shorter_than_on, better_than_on, furthest_behind, wins, first, gap, gain, within, middle_gap, largest_gap,
        count, registered, plans, slower, alone, best_of, smallest_gap, preset, fidelity,
        left_out, cost_report, measured_plans, reported, reported_less, splits, plan_errors, control, policy, signs,
        needed, alike, ops,
    )
}  # fmt: skip
TABLES: dict[str, Callable[..., list[str]]] = {
    function.__name__: function
    for function in (table, machines, tracks, pipelines, bounds, inference, kernels, planned)
}


def refreshed(text: str) -> tuple[str, list[str]]:
    """A page with every fact computed again, and a sentence for each that was stale. Raises :class:`KeyError` for a
    fact that nobody computes, or of a run that the board lacks."""
    stale = []

    def fresh(found: re.Match) -> str:
        name, *arguments = shlex.split(found["text"])
        shown = found["shown"]
        if name in TABLES:
            head = shown.strip("\n").split("\n")[:HEAD]
            wanted = "\n".join(["", *head, *TABLES[name](head, *arguments), ""])
        else:
            wanted = FACTS[name](*arguments)
        if wanted != shown:
            stale.append(f"{found['text']}: {shown.strip()[:40]!r} is now {wanted.strip()[:40]!r}")
        return f"{found[1]}{wanted}{found[4]}"

    return FACT.sub(fresh, text), stale


def picture_sentence(path: Path) -> str:
    """The sentence that a picture (PNG) of simdev holds: what it shows, with its figures. Empty if there is none."""
    data, at = path.read_bytes(), 8
    while at + 8 <= len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        if kind == b"tEXt" and content.startswith(b"Description\0"):
            return content.partition(b"\0")[2].decode("latin-1")
        at += 12 + size
    return ""


def expected_sentence(command: str) -> str:
    """The sentence of the picture that a ``simdev view --before`` command draws today, from the rows of its board
    (:func:`simdev.report.timeline.sentence`)."""
    _, folder, _, workload, _, topology, _, before = shlex.split(command)
    mine = [row for row in board(Path(folder).name) if (row.workload, row.topology) == (workload, topology)]
    old = min((row for row in mine if row.entry == before), key=lambda row: (row.step_ns, row.key))
    new = min((row for row in mine if row.step_ns is not None), key=lambda row: (row.step_ns, row.key))
    return f"{workload} on {topology}: {old.entry} {old.step_ns} ns, {new.entry} {new.step_ns} ns"


def stale_pictures() -> list[str]:
    """The pictures that show another step than their board holds."""
    return [
        name
        for name, command in PICTURES.items()
        if not (ROOT / name).is_file() or picture_sentence(ROOT / name) != expected_sentence(command)
    ]


def read_boards(path: Path) -> dict[str, str]:
    """The folders of ``leaderboard/`` that a notebook reads, each with a digest (16 hex digits) of its tables; the
    device files of the machines that it names, each with a digest; and the placers that it names, each with its
    version."""
    from simdev.placers import registry
    from simdev.problem.costs import calibration_of
    from simdev.problem.opcost.device import SHELF, calibration_names
    from simdev.problem.topology import load_topology, topology_names

    source = "".join("".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"])
    found = {}
    for name in sorted(set(re.findall(r"leaderboard/\w+", source))):
        tables = [*(ROOT / name).rglob("*.csv")] if (ROOT / name).is_dir() else []
        digest = hashlib.sha256(b"".join(table.read_bytes() for table in sorted(tables)))
        found[name] = digest.hexdigest()[:16]
    machines = [name for name in topology_names() if re.search(rf"""["']{re.escape(name)}["'\[]""", source)]
    kinds = [kind for name in machines for kind in load_topology(name).kinds if kind.calibrated]
    for name in sorted({calibration_of(kind).name for kind in kinds} & {*calibration_names()}):
        file = tomllib.loads((SHELF / f"{name}.toml").read_text(encoding="utf-8"))
        del file["notes"]  # which change no cost
        found[f"{name}.toml"] = hashlib.sha256(json.dumps(file).encode()).hexdigest()[:16]
    named = {name for name in registry.placers() if re.search(rf"""["']{name}\b""", source)}
    return found | {name: f"version {registry.placers()[name].version}" for name in sorted(named)}


def stale_notebooks() -> list[Path]:
    """The notebooks whose stored outputs come from other tables, or other versions of a placer, than there are now."""
    found = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        kept = json.loads(path.read_text(encoding="utf-8"))["metadata"].get("simdev", {})
        if kept != read_boards(path):
            found.append(path)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="bring pages, pictures and notebooks up to date")
    parser.add_argument("--pages", action="store_true", help="only the pages and pictures, not the notebooks")
    options = parser.parse_args()
    wrong = 0
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        fresh, stale = refreshed(text)
        for sentence in stale:
            print(f"{path.relative_to(ROOT)}: {sentence}")
        if options.write and fresh != text:
            path.write_text(fresh, encoding="utf-8")
        wrong += len(stale)
    for name in stale_pictures():
        print(f"{name}: shows another step than the board")
        if options.write:
            arguments = [*shlex.split(PICTURES[name]), "-o", name]
            subprocess.run([sys.executable, "-m", "simdev", *arguments], cwd=ROOT, check=True)
        wrong += 1
    for path in [] if options.pages else stale_notebooks():
        print(f"{path.relative_to(ROOT)}: its outputs come from other tables or versions")
        if options.write:
            subprocess.run([sys.executable, ROOT / "notebooks" / "store_outputs.py", path], check=True)
        wrong += 1
    if wrong and not options.write:
        print(f"{wrong} facts are stale: {COMMAND}")
    return 1 if wrong and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())
