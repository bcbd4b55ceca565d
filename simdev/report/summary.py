"""The tables at the end of a bench: one for each topology, with a line for each placer and a column for each
workload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from simdev.bench.rows import Row, entry_id
from simdev.bench.score import ranking, scores
from simdev.errors import counted

Table = tuple[str, list[str], list[list[str]]]


def board(rows: Iterable[Row]) -> list[Table]:
    """A table for each topology, rule set and budget: title, header and lines.

    A cell holds the step time in ms, a star if it is the best of its workload, and in brackets the speed-up over the
    placer ``single-gpu``.
    """
    rows = list(rows)
    places = {(line["rules"], line["objective"], line["budget"], line["placer"]): line for line in ranking(rows)}
    groups = scores(rows).groupby(["topology", "rules", "objective", "budget"])
    return [
        _table(topology, rules, objective, budget, table, places)
        for (topology, rules, objective, budget), table in groups
    ]


def _table(topology, rules, objective, budget, table, places) -> Table:
    workloads = sorted(set(table["workload"]))
    cells = {(line.placer, line.params, line.workload): line for line in table.itertuples()}
    best = table.groupby("workload")["step_ns"].min()
    entries = {(line.placer, line.params) for line in table.itertuples()}
    lines = []
    order = list(places)
    for entry in sorted(entries, key=lambda entry: order.index((rules, objective, budget, entry_id(*entry)))):
        found = [_board_cell(cells.get((*entry, w)), best[w], cells.get(("single-gpu", "{}", w))) for w in workloads]
        place = places[rules, objective, budget, entry_id(*entry)]
        lines.append([entry_id(*entry), *found, f"{float(place['geomean_ratio_to_best']):.3f}", place["cases"]])
    if objective == "plan":
        return f"{topology}, {budget}, host {rules}", ["planner", *workloads, "mean", "cases"], lines
    judged = "" if objective == "step" else f", {objective}"
    return f"{topology}, {budget}, rules {rules}{judged}", ["placer", *workloads, "mean", "cases"], lines


LEGEND = (
    "Time in ms of a step or of one query (latency), or in the steady state of a microbatch (throughput) or a query "
    "(serve); speed-up over single-gpu in brackets; * best. Mean: geometric mean "
    "of the ratio to the best over the cases that the placer ran, at most 10 each; a run without a score counts 10."
)

PLAN_LEGEND = (
    "Step time in ms, * best. Mean: geometric mean of the ratio to the best over the jobs that the planner ran, at "
    "most 10 each; a run without a plan that fits counts 10. Planners that ran fewer jobs come last."
)


def _board_cell(line, best, single) -> str:
    if line is None:
        return ""
    if pd.isna(line.step_ns):
        return "OOM" if line.status == "oom" else line.status
    mark = "*" if line.step_ns == best else ""
    speedup = f" ({single.step_ns / line.step_ns:.2f}x)" if single and not pd.isna(single.step_ns) else ""
    return f"{mark}{_milliseconds(line.step_ns)}{speedup}"


def cell(row: Row | None) -> str:
    """The result of a row as one number or word, for a cell of a table."""
    if row is None:
        return ""
    if row.step_ns is not None:
        return f"{_milliseconds(row.step_ns)} ms"
    return "OOM" if row.status == "ok" else row.status


def failures(rows: Iterable[Row]) -> list[str]:
    """A line for each run that was skipped or failed, with the reason; equal reasons of a placer share a line."""
    found: dict[tuple[str, str, str], Counter[str]] = {}
    for row in rows:
        if row.status != "ok":
            found.setdefault((row.entry, row.status, row.error), Counter())[row.workload] += 1
    lines = []
    for (entry, status, why), counts in sorted(found.items()):
        on = [name if count == 1 else f"{name} ({count} runs)" for name, count in counts.items()]
        lines.append(f"{entry}: {status} on {', '.join(on)}: {why}")
    return lines


def headline(rows: list[Row], out: Path) -> str:
    """One sentence with the number of runs by status and the folder of the files."""
    counts = Counter("oom" if row.status == "ok" and not row.feasible else row.status for row in rows)
    text = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    kinds = {row.objective == "plan" for row in rows}
    files = ["results.csv, leaderboard.csv, ranking.csv and placements"] * (False in kinds)
    files += ["plans.csv, and plans.md, which shows each plan,"] * (True in kinds)
    return f"\n{counted(len(rows), 'run')} ({text}); {' and '.join(files)} are in {out}"


def _milliseconds(ns: int) -> str:
    """At least four digits."""
    value = ns / 1e6
    return f"{value:.{1 if value >= 100 else 2 if value >= 10 else 3}f}"
