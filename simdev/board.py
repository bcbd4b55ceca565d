"""The table at the end of a bench: placers by workloads, a table for each topology."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from simdev.leaderboard import Score, leaderboard, ranking, scores
from simdev.rows import Row, entry_id

Table = tuple[str, list[str], list[list[str]]]


def board(rows: Iterable[Row]) -> list[Table]:
    """Title, header and lines for each topology, rule set and budget: step times in ms, the best marked, and the
    speed-up over the placer ``single-gpu`` in brackets."""
    rows = list(rows)
    places = {(line["rules"], line["budget"], line["placer"], line["params"]): line for line in ranking(rows)}
    groups: dict[tuple, dict[tuple, dict[str, Score]]] = {}
    for score in scores(rows):
        row = score.row
        table = groups.setdefault((row.topology, row.rules, row.budget), {})
        table.setdefault((row.placer, row.params), {})[row.workload] = score
    return [_table(*key, table, places) for key, table in sorted(groups.items())]


def _table(topology, rules, budget, table, places) -> Table:
    workloads = sorted({workload for by_workload in table.values() for workload in by_workload})
    times = {w: [s[w].step_ns for s in table.values() if w in s and s[w].step_ns is not None] for w in workloads}
    best = {w: min(found) for w, found in times.items() if found}
    single = table.get(("single-gpu", "{}"), {})
    order = sorted(table, key=lambda entry: int(places[rules, budget, *entry]["place"]))
    lines = []
    for entry in order:
        cells = [_board_cell(table[entry].get(w), best.get(w), single.get(w)) for w in workloads]
        mean = places[rules, budget, *entry]["geomean_ratio_to_best"]
        lines.append([_name(entry), *cells, f"{float(mean):.3f}"])
    return f"{topology}, {budget}, rules {rules}", ["placer", *workloads, "mean"], lines


LEGEND = (
    "Step time in ms (speed-up over single-gpu), * best. Mean: geometric mean of the ratio to the best over all "
    "workloads and machines, at most 10 each; a run without a score counts 10."
)


def _board_cell(score: Score | None, best: int | None, single: Score | None) -> str:
    if score is None or score.step_ns is None:
        return cell(None if score is None else score.row)
    mark = "*" if score.step_ns == best else ""
    speedup = f" ({single.step_ns / score.step_ns:.2f}x)" if single and single.step_ns else ""
    return f"{mark}{_milliseconds(score.step_ns)}{speedup}"


def cell(row: Row | None) -> str:
    """A row in one word or number."""
    if row is None:
        return ""
    if row.step_time_s is not None:
        return f"{_milliseconds(row.step_time_s)} ms"
    return "OOM" if row.status == "ok" else row.status


def failures(rows: Iterable[Row]) -> list[str]:
    """A line for each run that was skipped or failed, with the reason; equal reasons of a placer are told once."""
    told: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.status != "ok":
            told.setdefault((row.entry, row.status, row.error), []).append(row.workload)
    return [f"{entry}: {status} on {', '.join(on)}: {why}" for (entry, status, why), on in sorted(told.items())]


def headline(rows: list[Row], out: Path) -> str:
    """One sentence: how many runs ended how, and where the files are."""
    counts: dict[str, int] = {}
    for line in leaderboard(rows):
        counts[line["status"]] = counts.get(line["status"], 0) + 1
    told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    return f"\n{len(rows)} runs ({told}); results.csv, leaderboard.csv, ranking.csv and placements are in {out}"


def _milliseconds(ns: int) -> str:
    """At least four digits."""
    value = ns / 1e6
    return f"{value:.{1 if value >= 100 else 2 if value >= 10 else 3}f}"


def _name(entry: tuple[str, str]) -> str:
    return entry_id(entry[0], json.loads(entry[1]))
