"""Verification: recompute every row of a result folder from its stored placement and compare all cells.

A placement does not show how many evaluations found it, or why a placer failed. Those cells are checked by the digest
of the row, by rules that the cells of a row must obey, and by ``rerun``, which executes the placer again: it must give
the same row.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import TimeoutError
from dataclasses import replace
from pathlib import Path

import numpy as np

from simdev.analysis.bounds import Bound
from simdev.analysis.feasible import check_feasible
from simdev.bench import held, provenance, rows, stored, workers
from simdev.bench.check import Check, Difference, compare
from simdev.bench.inventory import BOUND_FAILURES, file_differences
from simdev.bench.matrix import Run, parse_budget, repeatable
from simdev.bench.objective import parse_objective
from simdev.bench.plan_rows import PLANS, PlanRow
from simdev.bench.plan_verify import check_plan, impossible
from simdev.bench.plan_verify import title as plan_title
from simdev.bench.release import faults
from simdev.bench.rows import RESULTS, Row
from simdev.bench.run import Instance, execute, score
from simdev.bench.submission import unpacked
from simdev.bench.work import one_line
from simdev.bench.workers import Limits
from simdev.errors import Infeasible, InvalidInput, SimdevError, UnknownName, shortened
from simdev.parallel.capture import kept
from simdev.placers import registry
from simdev.placers.placer import PlacerSpec
from simdev.problem.placement_file import placement_file, stored_placement
from simdev.problem.problem import Problem

# The cells that are empty in the row of a run without a placement.
UNSCORED = {
    **dict.fromkeys(("feasible", "step_ns", "simulated_ns", "peak_memory_bytes", "comm_bytes", "evaluations")),
    **dict.fromkeys(("overflow", "placement", "proof"), ""),
}


TASKS = 8  # rows that one process checks; rows of the same problem share one lower bound
_BOUNDS: dict[tuple, Bound] = {}  # by problem, for this process; rows are sorted by problem


def verify(
    folder: str | os.PathLike,
    *,
    engine: str = "reference",
    sample: int | None = None,
    rerun: bool = False,
    placers: Iterable[str] = (),
    jobs: int | None = None,
    limits: Limits | None = None,
    resume: str | os.PathLike | None = None,
    on_row: Callable[[int, int, str, list[Difference]], None] = lambda *_: None,
    on_skip: Callable[[str, str], None] = lambda *_: None,
    on_rows: Callable[[list[Row | PlanRow]], None] = lambda _: None,
    on_note: Callable[[str], None] = lambda _: None,
) -> list[Difference]:
    """Recompute the rows of a result folder or a submission (:mod:`simdev.bench.submission`), look at every file of it,
    and return the differences.

    The list is empty if everything holds. A file that is not checked is a difference, unless it is text or a picture
    for readers; ``on_note`` gets a sentence on each such file, and on columns that cannot be recomputed. No code that a
    row names is executed, and no path in a row is opened. ``on_rows`` gets all rows of the folder.

    ``engine`` simulates placements and plans, and the validator checks each schedule of a placement. If ``sample`` is
    given, that many evenly spaced rows are checked. ``rerun`` also executes the placer or planner of each row again,
    provided that the same result can be expected; for every other row, ``on_skip`` gets the title of the row and the
    reason. Placers, planners and models from the user's own files are executed only if ``placers`` names them
    (``my_placers.py:name``). ``resume`` names a file that keeps which rows hold, so that an interrupted verification
    checks only the others; it begins anew if the folder, the code, a version or a setting has changed, and it is
    refused together with ``placers``, whose code may change unseen. ``limits`` apply to each row (default:
    :data:`simdev.bench.check.LIMITS`, and ``PLAN_LIMITS`` for planners); a rerun adds the time limit of the row's
    budget. Raises :class:`InvalidInput` if the folder cannot be read.
    """
    folder = Path(folder)
    named = frozenset(registry.parse_id(entry)[0] for entry in placers)
    check = Check(engine, rerun, named, folder.is_file(), limits)
    if resume is not None and named:
        raise InvalidInput(
            "--resume cannot see whether code of your own has changed: leave out --placer", source=resume
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept.apart())  # what a rank executes is captured anew, not read from the user's cache
        inside = stack.enter_context(unpacked(folder)) if check.foreign else folder
        if not inside.is_dir():
            raise InvalidInput("No such file or directory", source=folder)
        known = stack.enter_context(contextlib.closing(held.KnownRows(resume, inside, check)))
        return _verify(inside, check, known, sample, jobs, on_row, on_skip, on_rows, on_note)


def _verify(folder: Path, check: Check, known, sample, jobs, on_row, on_skip, on_rows, on_note) -> list[Difference]:
    found = [
        row
        for schema in (RESULTS, PLANS)
        if (folder / schema.file).is_file()
        for row in schema.read(folder / schema.file, check_digest=False)
    ]
    on_rows(found)
    differences = [Difference(name, "", "", sentence) for name, sentence in faults(folder)]
    differences += digest_differences(folder) + file_differences(folder, found, on_note, rerun=check.rerun)
    chosen = found if sample is None else [found[i] for i in _evenly(len(found), sample)]
    if len(chosen) < len(found):
        on_note(f"{len(found) - len(chosen)} of {len(found)} rows: --sample leaves them out")
    chosen = [row for kind in (Row, PlanRow) for row in sorted((r for r in chosen if isinstance(r, kind)), key=_key)]
    for row in chosen:
        if known.reason(row):
            on_skip(title(row), known.reason(row))
    left = [row for row in chosen if known.reason(row) is None]
    if len(left) < len(chosen):
        on_note(f"{len(chosen) - len(left)} of {len(chosen)} rows again: they hold, as {known.path} says")
    pool = workers.worker_pool(max(1, jobs or workers.cores()), tasks=TASKS)
    with workers.environment(), workers.running(pool):
        futures = [_schedule(pool, folder, row, check) for row in left]
        try:
            for done, (row, future) in enumerate(zip(left, futures, strict=True), 1):
                wrong, skipped = _answer(row, future, check)
                differences += wrong
                if not wrong:
                    known.add(row, skipped)
                if skipped:
                    on_skip(title(row), skipped)
                on_row(done, len(left), title(row), wrong)
        except BaseException:  # rows that ended before an earlier one
            for row, future in zip(left, futures, strict=True):
                if future is not None and future.done() and not future.cancelled() and not future.exception():
                    wrong, skipped = future.result()
                    if not wrong:
                        known.add(row, skipped)
            raise
    return differences


def _key(row: Row | PlanRow) -> tuple:
    return row.key


def _schedule(pool, folder: Path, row: Row | PlanRow, check: Check):
    """The future of a row, or None if its budget cannot be read; :func:`_senseless` reports that error. Rows of one
    job share a process, because they share captures."""
    with contextlib.suppress(InvalidInput):
        kind = "" if isinstance(row, Row) else f"{row.model} on {row.cluster}"
        task = folder, row, check, os.environ[kept.APART]
        return pool.schedule(_check_limited, task, timeout=check.of(row).seconds, kind=kind)
    return None


def _check_limited(folder: Path, row: Row | PlanRow, check: Check, captures: str) -> tuple[list[Difference], str]:
    """:func:`check_row` or :func:`check_plan` in a worker. Its fork server may be older than this verification, so
    that ``captures``, the folder of this verification's own, is not yet in its environment."""
    os.environ[kept.APART] = captures
    workers.limit_process(check.of(row))
    return (check_row if isinstance(row, Row) else check_plan)(folder, row, check)


def _answer(row: Row | PlanRow, future, check: Check) -> tuple[list[Difference], str]:
    """The differences of a row, and why it was not run again. If its worker died, only this row is at fault."""
    try:
        return future.result() if future is not None else (_senseless(row), "")
    except SimdevError as error:
        text = str(error)
    except TimeoutError:
        text = f"no answer within {check.of(row).seconds:g} s"
    except MemoryError:
        text = f"needs more than {check.of(row).memory_bytes / 2**30:g} GiB"
    except Exception as error:
        text = f"{type(error).__name__}: {one_line(error)}"
    return [Difference(title(row), "", "", text)], ""


def check_row(folder: Path, row: Row, check: Check) -> tuple[list[Difference], str]:
    """The differences of one row, and the reason if a requested rerun was skipped. Only placers that are registered or
    named by ``check`` are run, and no file outside ``folder`` is read."""
    wrong = _impossible(row)
    if wrong:
        return wrong, ""
    spec = _spec(row, check)
    version = min(row.version, spec.version) if spec else row.version  # an older placer's placement still counts
    try:
        problem = stored.stored_problem(folder, row)
        if row.status == "infeasible":
            check_feasible(problem)
    except Infeasible as error:
        fresh = replace(row, **UNSCORED, status="infeasible", error=one_line(error), version=version)
        return _compare(row, fresh), ""
    if row.status == "infeasible":
        return [Difference(title(row), "status", row.status, "a placement may exist")], ""
    fresh = replace(row, fingerprint=problem.graph.fingerprint, cost_hash=problem.costs.hash, version=version)
    fresh = _bounded(fresh, problem)
    fresh = _scored(fresh, problem, folder, check.engine) if row.status == "ok" else replace(fresh, **UNSCORED)
    skipped = _why_not_again(row, spec, check) if check.rerun else ""
    if check.rerun and not skipped:
        instance = Instance(
            row.workload,
            row.topology,
            row.rules,
            fresh.fingerprint,
            fresh.cost_hash,
            problem.graph.n_ops,
            None,
            fresh.lower_bound_ns,
            fresh.bound_method,
            row.objective,
        )
        fresh = execute(Run(*row.key), instance, problem).row
    return _compare(row, fresh), skipped


def _why_not_again(row: Row, spec: PlacerSpec | None, check: Check) -> str:
    """Why a rerun of the placer could give another row or is not allowed; empty if the rerun is possible."""
    if spec is None:
        return "its placer is not registered here"
    if row.version < spec.version:
        return f"made by version {row.version} of its placer, which is at version {spec.version}"
    if row.status not in ("ok", "skipped", "error"):
        return f"its status is {row.status}"
    if not repeatable(row.budget):
        return "its budget is not a number of evaluations"
    if not spec.repeatable:
        return "its placer may stop by the clock"
    defaults = {name: spec.defaults.get(name, "") for name in ("policy", "starts")}
    given = json.loads(row.params)
    if any(given.get(name, default) != default for name, default in defaults.items()):  # paths, which are not opened
        return "its policy or its starts are not part of simdev"
    if spec.same_processor:
        differs = shortened(provenance.differing_processor(row.machine, provenance.machine()), 200)
        if differs:
            return f"different processor ({differs}): its placer learns in floating point"
    return ""


def _senseless(row: Row | PlanRow) -> list[Difference]:
    """The cells of a row that no run gives, whatever its placement or plan."""
    return _impossible(row) if isinstance(row, Row) else impossible(row)


def _impossible(row: Row) -> list[Difference]:
    """The cells of a row that are impossible for every placement."""
    evaluations = parse_budget(row.budget).evaluations
    if row.status == "ok" and (row.evaluations is None or not 0 <= row.evaluations <= evaluations):
        return [Difference(title(row), "evaluations", str(row.evaluations), f"at most {evaluations}")]
    if row.status != "ok" and not row.error:
        return [Difference(title(row), "error", "", "a reason")]
    return []


def _bounded(row: Row, problem: Problem) -> Row:
    """The row with the lower bound of the problem. If the row says that the bound failed, it stays empty."""
    if row.bound_method in BOUND_FAILURES:
        return replace(row, lower_bound_ns=None)
    key = problem.graph.fingerprint, problem.costs.hash, row.rules, row.objective
    if key not in _BOUNDS:
        _BOUNDS[key] = parse_objective(row.objective).lower_bound(problem)
    bound = _BOUNDS[key]
    return replace(row, lower_bound_ns=int(bound.ns), bound_method=str(bound.method))


def _scored(row: Row, problem: Problem, folder: Path, engine: str) -> Row:
    """The row with the score of its stored placement, simulated by ``engine`` and accepted by the validator."""
    placement = stored_placement(folder, row.placement)
    placement.check(problem, source=placement_file(folder, row.placement))
    found = parse_objective(row.objective).simulate(problem, placement, engine=engine, valid=True)
    return replace(score(row, problem, placement, found), error="")


def _spec(row: Row, check: Check) -> PlacerSpec | None:
    """The placer of a row, or None if it is code from a file that the user did not name. Raises :class:`UnknownName` if
    a row of the user's own folder names a placer that does not exist."""
    own = ".py:" in row.placer
    if row.placer in check.named if own else row.placer in registry.placers():
        return registry.find_placer(row.entry)[0]
    if own or check.foreign:
        return None
    raise UnknownName("placer", row.placer, registry.placers())


def title(row: Row | PlanRow) -> str:
    """The run of the row as printable text."""
    return shortened(str(Run(*row.key)), 300) if isinstance(row, Row) else plan_title(row)


def _compare(stored: Row, fresh: Row) -> list[Difference]:
    return compare(title(stored), stored.cells(), fresh.cells(), rows.EXACT)


def digest_differences(folder: Path) -> list[Difference]:
    """Rows whose cells do not match the digest written with them."""
    wrong = []
    for schema in (RESULTS, PLANS):
        path = folder / schema.file
        for _, cells, row in schema.lines(path) if path.is_file() else ():
            if row.digest != cells["digest"]:
                wrong.append(Difference(title(row), "digest", cells["digest"], row.digest))
    return wrong


def _evenly(count: int, sample: int) -> list[int]:
    if sample < 1:
        raise InvalidInput(f"{sample} is not a number of rows", source="sample")
    return sorted(set(np.linspace(0, count - 1, min(sample, count)).round().astype(int).tolist()))
