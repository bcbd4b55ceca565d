"""Verification: every row of a result folder computed anew from its stored placement, and compared cell by cell.

What a placement cannot tell (how many evaluations found it, why a placer failed) is covered by the row's digest, by
what the row says about itself, and by ``rerun``: executing the placer again, which must give the same row.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from simdev.analysis.levels import Bound, check_feasible
from simdev.bench import rows, workers
from simdev.bench import run as bench
from simdev.bench import score as leaderboard
from simdev.bench.plan import Run, parse_budget
from simdev.bench.rows import Row
from simdev.bench.submission import unpacked
from simdev.errors import Infeasible, InvalidInput, SimdevError
from simdev.placers import registry
from simdev.problem.problem import Problem
from simdev.problem.topology import topology_names

# What a run without a placement leaves empty.
UNSCORED = {
    **dict.fromkeys(("feasible", "step_ns", "simulated_ns", "peak_memory_bytes", "comm_bytes", "evaluations")),
    **dict.fromkeys(("overflow", "placement"), ""),
}


_BOUNDS: dict[tuple, Bound] = {}  # of the problems that this process has met: the rows of one follow one another


@dataclass(frozen=True)
class Difference:
    """A cell that does not hold what it should. ``column`` is empty where the whole row is at fault."""

    row: str
    column: str
    stored: str
    found: str

    def __str__(self) -> str:
        if not self.column:
            return f"{self.row}: {self.found}"
        return f"{self.row}: {self.column}: {self.stored or 'empty'!s}, recomputed {self.found or 'empty'!s}"


def verify(
    folder: str | os.PathLike,
    *,
    engine: str = "reference",
    sample: int | None = None,
    rerun: bool = False,
    jobs: int | None = None,
    on_row: Callable[[int, int, str, list[Difference]], None] = lambda *_: None,
) -> list[Difference]:
    """All differences between a result folder (or a submission, see :mod:`simdev.bench.submission`) and what its placements
    give now; empty if it holds. No code of a submission is run.

    ``engine`` simulates (the validator checks its schedule too); ``sample`` takes that many rows, drawn evenly;
    ``rerun`` also executes the repeatable placers of rows with an ``evaluations`` budget again. Raises
    :class:`InvalidInput` for a folder that cannot be read.
    """
    folder = Path(folder)
    if folder.is_file():
        with unpacked(folder) as inside:
            return _verify(inside, engine, sample, rerun, jobs, on_row, foreign=True)
    return _verify(folder, engine, sample, rerun, jobs, on_row, foreign=False)


def _verify(folder: Path, engine, sample, rerun, jobs, on_row, foreign: bool) -> list[Difference]:
    found = rows.read_rows(folder / "results.csv", check_digest=False)
    differences = digest_differences(folder) + _tables(folder, found)
    chosen = found if sample is None else [found[i] for i in _evenly(len(found), sample)]
    chosen = sorted(chosen, key=lambda row: row.key)
    pool = workers.worker_pool(max(1, jobs or workers.cores()), tasks=8)
    with workers.environment(), workers.running(pool):
        futures = [pool.schedule(check_row, (folder, row, engine, rerun, foreign)) for row in chosen]
        for done, (row, future) in enumerate(zip(chosen, futures, strict=True), 1):
            try:
                wrong = future.result()
            except SimdevError as error:
                wrong = [Difference(title(row), "", "", str(error))]
            except Exception as error:  # a worker that died says nothing about the other rows
                wrong = [Difference(title(row), "", "", f"{type(error).__name__}: {bench.one_line(error)}")]
            differences += wrong
            on_row(done, len(chosen), title(row), wrong)
    return differences


def check_row(folder: Path, row: Row, engine: str, rerun: bool, foreign: bool = False) -> list[Difference]:
    """Differences of one row. Of a ``foreign`` row nothing is run but what comes with simdev, and no file is read
    outside ``folder``."""
    wrong = _own_words(row)
    if wrong:
        return wrong
    spec = _spec(row, rerun, foreign)
    if foreign:
        _check_kept(folder, row)
    version = spec.version if spec else row.version
    try:
        problem = bench.stored_problem(folder, row)
        if row.status == "infeasible":
            check_feasible(problem)
    except Infeasible as error:
        return _compare(
            row, replace(row, **UNSCORED, status="infeasible", error=bench.one_line(error), version=version)
        )
    if row.status == "infeasible":
        return [Difference(title(row), "status", row.status, "a placement may exist")]
    fresh = replace(row, fingerprint=problem.graph.fingerprint, cost_hash=problem.costs.hash, version=version)
    fresh = _bounded(fresh, problem)
    fresh = _scored(fresh, problem, folder, engine) if row.status == "ok" else replace(fresh, **UNSCORED)
    if (
        rerun
        and spec
        and spec.repeatable
        and row.status in ("ok", "skipped", "error")
        and row.budget.startswith("evaluations=")
    ):
        instance = bench.Instance(
            row.workload, row.topology, row.rules, fresh.fingerprint, fresh.cost_hash, problem.graph.n_ops,
            None if bench.ships(row.workload) else bench.kept_files(folder, row)[0],
            fresh.lower_bound_ns, fresh.bound_method,
        )  # fmt: skip
        fresh = bench.execute(Run(*row.key), instance).row
    return _compare(row, fresh)


def _own_words(row: Row) -> list[Difference]:
    """What a row says that cannot be, whatever the placement."""
    evaluations, _ = parse_budget(row.budget)
    if row.status == "ok" and (row.evaluations is None or not 0 <= row.evaluations <= evaluations):
        return [Difference(title(row), "evaluations", str(row.evaluations), f"at most {evaluations}")]
    if row.status != "ok" and not row.error:
        return [Difference(title(row), "error", "", "a reason")]
    return []


def _bounded(row: Row, problem: Problem) -> Row:
    """The row with the lower bound of the problem, unless it says that finding one failed."""
    if row.bound_method in ("timeout", "memory", "error"):
        return replace(row, lower_bound_ns=None)
    key = problem.graph.fingerprint, problem.costs.hash, row.rules
    if key not in _BOUNDS:
        from simdev.analysis.levels import lower_bound

        _BOUNDS[key] = lower_bound(problem)
    bound = _BOUNDS[key]
    return replace(row, lower_bound_ns=int(bound.ns), bound_method=str(bound.method))


def _scored(row: Row, problem: Problem, folder: Path, engine: str) -> Row:
    """The row with what its stored placement gives, simulated by ``engine`` and accepted by the validator."""
    from simdev.sim import simulate, validate

    placement = rows.stored_placement(folder, row.placement)
    placement.check(problem, source=rows.placement_path(folder, row.placement))
    schedule = simulate(problem, placement, engine=engine)
    validate(problem, placement, schedule)
    return replace(bench.score(row, problem, placement, schedule), error="")


def _spec(row: Row, rerun: bool, foreign: bool):
    """The row's placer, or None where that is code of somebody's own that need not, or must not, be run."""
    own = ".py:" in row.placer
    if own and (foreign or not rerun) or foreign and row.placer not in registry.placers():
        return None
    return registry.find_placer(row.entry)[0]


def _check_kept(folder: Path, row: Row) -> None:
    """Refuse a foreign row that would need a file from outside its submission."""
    graph, machine = bench.kept_files(folder, row)
    if graph is None and not bench.ships(row.workload):
        raise InvalidInput("the graph is not in the submission", source=row.workload)
    if machine is None and row.topology not in topology_names():
        raise InvalidInput("the machine is not in the submission", source=row.topology)


def title(row: Row) -> str:
    """The row in words."""
    return str(Run(*row.key))


def _compare(stored: Row, fresh: Row) -> list[Difference]:
    left, right = stored.cells(), fresh.cells()
    return [
        Difference(title(stored), name, left[name], right[name]) for name in rows.EXACT if left[name] != right[name]
    ]


def digest_differences(folder: Path) -> list[Difference]:
    """Rows whose cells do not match the digest written with them."""
    path, wrong = folder / "results.csv", []
    for line, cells in rows.read_csv(path, rows.COLUMNS):
        row = rows.parse_row(cells, path, line)
        if row.digest != cells["digest"]:
            wrong.append(Difference(title(row), "digest", cells["digest"], row.digest))
    return wrong


def _tables(folder: Path, found: list[Row]) -> list[Difference]:
    """Lines of the derived tables that do not follow from the rows."""
    wrong = []
    for name, columns, table in (
        ("leaderboard.csv", leaderboard.LEADERBOARD, leaderboard.leaderboard(found)),
        ("ranking.csv", leaderboard.RANKING, leaderboard.ranking(found)),
    ):
        stored = [cells for _, cells in rows.read_csv(folder / name, columns)]
        if len(stored) != len(table):
            wrong.append(Difference(name, "lines", str(len(stored)), str(len(table))))
            continue
        for number, (left, right) in enumerate(zip(stored, table, strict=True), 2):
            wrong += [
                Difference(f"{name} line {number}", column, left[column], right[column])
                for column in columns
                if left[column] != right[column]
            ]
    return wrong


def _evenly(count: int, sample: int) -> list[int]:
    if sample < 1:
        raise InvalidInput(f"{sample} is not a number of rows", source="sample")
    return sorted(set(np.linspace(0, count - 1, min(sample, count)).round().astype(int).tolist()))
