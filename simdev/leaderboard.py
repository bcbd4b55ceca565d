"""The leaderboard: what follows from the raw rows. Derived only, never edited.

A run without a score (out of memory, skipped, failed, missing) counts as :data:`CAP` times the best known step time,
and so does every slower one: leaving a run out, or failing it, improves no mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from simdev.errors import InvalidInput
from simdev.rows import Row, read_rows, seconds_text, write_csv

CAP = 10.0
LEADERBOARD = (
    "workload", "topology", "rules", "budget", "placer", "version", "params", "runs", "solved", "status",
    "step_time_s", "best_step_time_s", "lower_bound_s", "bound_method", "gap", "best_known_s", "ratio_to_best",
    "speedup_vs_single_gpu", "speedup_vs_expert", "rank",
)  # fmt: skip
RANKING = (
    "rules", "budget", "place", "placer", "version", "params", "instances", "solved", "wins", "mean_rank",
    "geomean_ratio_to_best",
)  # fmt: skip


@dataclass(frozen=True)
class Score:
    """One placer (with its parameters and budget) on one instance, over its seeds."""

    rows: tuple[Row, ...]

    @property
    def row(self) -> Row:
        """The run of (lower) median step time; runs without a score come last."""
        return self._ordered[(len(self.rows) - 1) // 2]

    @property
    def best_ns(self) -> int | None:
        return self._ordered[0].step_time_s

    @property
    def step_ns(self) -> int | None:
        return self.row.step_time_s

    @property
    def status(self) -> str:
        """``ok``, ``oom`` or what kept the median run from a score."""
        return "oom" if self.row.status == "ok" and not self.row.feasible else self.row.status

    @property
    def instance(self) -> tuple[str, str, str]:
        return self.row.workload, self.row.topology, self.row.rules

    @property
    def entry(self) -> tuple[str, str, int, str]:
        return self.row.budget, self.row.placer, self.row.version, self.row.params

    @property
    def _ordered(self) -> list[Row]:
        return sorted(self.rows, key=lambda row: (row.step_time_s is None, row.step_time_s or 0, row.seed))


def scores(rows: Iterable[Row]) -> list[Score]:
    """Rows by instance and placer, sorted."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((row.workload, row.topology, row.rules, row.budget, row.placer, row.params), []).append(row)
    return [Score(tuple(groups[key])) for key in sorted(groups)]


def leaderboard(rows: Iterable[Row]) -> list[dict[str, str]]:
    """The table of ``leaderboard.csv``: a line for each placer on each instance."""
    found = scores(rows)
    best, single, expert = best_known(found), _reference(found, "single-gpu"), _reference(found, "expert")
    ranks = rank(found)
    return [_line(score, best, single, expert, ranks) for score in found]


def _line(score: Score, best: dict, single: dict, expert: dict, ranks: dict) -> dict[str, str]:
    row, step = score.row, score.step_ns
    bound, known = row.lower_bound_s, best.get(score.instance)
    return {
        "workload": row.workload, "topology": row.topology, "rules": row.rules, "budget": row.budget,
        "placer": row.placer, "version": str(row.version), "params": row.params, "runs": str(len(score.rows)),
        "solved": str(sum(run.step_time_s is not None for run in score.rows)), "status": score.status,
        "step_time_s": seconds_text(step), "best_step_time_s": seconds_text(score.best_ns),
        "lower_bound_s": seconds_text(bound), "bound_method": row.bound_method,
        "gap": _quotient(step, bound, lambda value: value - 1), "best_known_s": seconds_text(known),
        "ratio_to_best": _quotient(step, known),
        "speedup_vs_single_gpu": _quotient(single.get(score.instance), step),
        "speedup_vs_expert": _quotient(expert.get(score.instance), step),
        "rank": str(ranks.get((score.instance, score.entry), "")),
    }  # fmt: skip


def ranking(rows: Iterable[Row]) -> list[dict[str, str]]:
    """The table of ``ranking.csv``: a line for each placer over all instances of a rule set and budget.

    Every placer is held to every instance on which any placer ran; see the module's head for what is missing.
    """
    found = scores(rows)
    best, ranks = best_known(found), rank(found)
    instances: dict[tuple, set] = {}
    entries: dict[tuple, dict] = {}
    for score in found:
        group = score.row.rules, score.row.budget
        instances.setdefault(group, set()).add(score.instance)
        entries.setdefault((*group, score.entry), {})[score.instance] = score
    lines = []
    for (rules, budget, entry), by_instance in entries.items():
        todo = instances[rules, budget]
        last = sum(1 for key in entries if key[:2] == (rules, budget))
        places = [ranks.get((instance, entry), last) for instance in todo]
        logs = [math.log(_capped_ratio(by_instance.get(instance), best.get(instance))) for instance in sorted(todo)]
        lines.append({
            "rules": rules, "budget": budget, "placer": entry[1], "version": str(entry[2]), "params": entry[3],
            "instances": str(len(todo)),
            "solved": str(sum(score.step_ns is not None for score in by_instance.values())),
            "wins": str(places.count(1)), "mean_rank": f"{sum(places) / len(places):.2f}",
            "geomean_ratio_to_best": f"{math.exp(math.fsum(logs) / len(logs)):.4f}",
        })  # fmt: skip
    lines.sort(key=lambda line: (line["rules"], line["budget"], float(line["geomean_ratio_to_best"]), line["placer"],
                                 line["params"]))  # fmt: skip
    counts: dict[tuple, int] = {}
    for line in lines:
        group = line["rules"], line["budget"]
        counts[group] = counts.get(group, 0) + 1
        line["place"] = str(counts[group])
    return lines


def best_known(found: Iterable[Score]) -> dict[tuple, int]:
    """The least step time in ns of any run on each instance."""
    best: dict[tuple, int] = {}
    for score in found:
        if score.best_ns is not None:
            best[score.instance] = min(best.get(score.instance, score.best_ns), score.best_ns)
    return best


def rank(found: Iterable[Score]) -> dict[tuple, int]:
    """Place of each scored placer on each instance within its budget; equal times share the better place."""
    groups: dict[tuple, list[Score]] = {}
    for score in found:
        if score.step_ns is not None:
            groups.setdefault((score.instance, score.row.budget), []).append(score)
    return {
        (score.instance, score.entry): 1 + sum(other.step_ns < score.step_ns for other in group)
        for group in groups.values()
        for score in group
    }


def write(out: Path, rows: list[Row]) -> None:
    """Write ``leaderboard.csv`` and ``ranking.csv`` of a result folder."""
    write_csv(out / "leaderboard.csv", LEADERBOARD, leaderboard(rows))
    write_csv(out / "ranking.csv", RANKING, ranking(rows))


def compare(left: Path, right: Path) -> list[dict[str, str]]:
    """Run by run, what changed from the result folder ``left`` to ``right``: only runs that differ in score, status or
    problem. ``change`` is the step time of ``right`` over that of ``left``, minus one."""
    before, after = ({row.key: row for row in read_rows(folder / "results.csv")} for folder in (left, right))
    if not before.keys() & after.keys():
        raise InvalidInput(f"has no run in common with {right}", source=left)
    lines = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        verdict = _verdict(old, new)
        if verdict == "same":
            continue
        lines.append({
            "workload": key[0], "topology": key[1], "placer": (old or new).entry, "budget": key[5],
            "seed": str(key[6]), "before": _shown(old), "after": _shown(new),
            "change": _quotient(new and new.step_time_s, old and old.step_time_s, lambda value: value - 1),
            "verdict": verdict,
        })  # fmt: skip
    return lines


def _verdict(old: Row | None, new: Row | None) -> str:
    if old is None or new is None:
        return "only after" if old is None else "only before"
    if (old.fingerprint, old.cost_hash) != (new.fingerprint, new.cost_hash):
        return "another problem"
    if old.step_time_s != new.step_time_s:
        if old.step_time_s is None or new.step_time_s is None:
            return "worse" if new.step_time_s is None else "better"
        return "worse" if new.step_time_s > old.step_time_s else "better"
    if old.status != new.status:
        return f"{old.status} -> {new.status}"
    return "same" if old.placement == new.placement else "another placement"


def _shown(row: Row | None) -> str:
    if row is None:
        return ""
    if row.step_time_s is not None:
        return seconds_text(row.step_time_s)
    return "oom" if row.status == "ok" else row.status


def _reference(found: Iterable[Score], placer: str) -> dict[tuple, int]:
    """Step time of a baseline without parameters on each instance where it has one, the least over budgets."""
    times: dict[tuple, int] = {}
    for score in found:
        if score.row.placer == placer and score.row.params == "{}" and score.step_ns is not None:
            times[score.instance] = min(times.get(score.instance, score.step_ns), score.step_ns)
    return times


def _capped_ratio(score: Score | None, best: int | None) -> float:
    """Geometric mean over the seeds of step time over the best known, each at most :data:`CAP`."""
    if score is None or best is None:
        return CAP
    ratios = [CAP if row.step_time_s is None else min(CAP, row.step_time_s / best) for row in score.rows]
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))


def _quotient(above: int | None, below: int | None, change: Callable[[float], float] = float) -> str:
    return f"{change(above / below):.4f}" if above is not None and below else ""
