"""The bench in three steps: plan the runs, execute each in a process of its own, write what they found.

The results of a folder live in its journal; ``results.csv``, ``leaderboard.csv``, ``ranking.csv`` and ``curves.csv``
are written from it. A bench that was stopped, however rudely, goes on where it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, TimeoutError, wait
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from simdev.analysis.levels import check_feasible
from simdev.bench.journal import Results
from simdev.bench.plan import BUDGETS, Run, parse_budget, parse_rules
from simdev.bench.provenance import circumstances
from simdev.bench.rows import Row
from simdev.bench.stored import keep_machine, kept_graph, ships
from simdev.bench.workers import Limits, cores, death, environment, limit_process, result, running, worker_pool
from simdev.errors import Infeasible, InvalidInput, SimdevError, Unsupported
from simdev.placers import registry
from simdev.placers.budget import Budget
from simdev.problem.graph_file import load_graph, save_graph
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.problem.topology import load_topology


@dataclass(frozen=True)
class Instance:
    """A workload on a topology as found now. ``graph_file`` is set where the graph does not ship with simdev."""

    workload: str
    topology: str
    rules: str
    fingerprint: str
    cost_hash: str
    n_ops: int
    graph_file: str | None = None
    bound_ns: int | None = None
    bound_method: str = ""

    @property
    def problem(self) -> tuple[str, str, str]:
        """What a lower bound belongs to."""
        return self.fingerprint, self.cost_hash, self.rules


@dataclass(frozen=True)
class Outcome:
    """A finished run: its row, the placement if there is one, the anytime curve (evaluations, seconds, step ns)."""

    row: Row
    placement: Placement | None = None
    curve: tuple[tuple[int, float, int], ...] = ()


Submit = Callable[[Run, Instance], Future]  # the future of an Outcome


class Observer:
    """Told how the bench goes on; the command line draws it. Every method may be left as it is."""

    def note(self, text: str) -> None:
        """A step that takes a while begins."""

    def tick(self, done: int, total: int, running: list[str]) -> None:
        """A few times a second."""

    def row(self, done: int, total: int, row: Row) -> None:
        """A run is finished and in the journal."""


def load_problem(workload: str, topology: str, rules: str, graph_file: str | None = None) -> Problem:
    """The problem that a row names."""
    graph = load_graph(graph_file) if graph_file else registry.load_workload(workload)
    return Problem.build(graph, load_topology(topology), rules=parse_rules(rules))


def execute(run: Run, instance: Instance, problem: Problem | None = None) -> Outcome:
    """Place and simulate, here and now, without limits. What a placer raises becomes the row's status. ``problem``
    is the run's, if it is loaded already."""
    from simdev.sim import simulate

    spec, params = registry.find_placer(run.entry)
    blank = blank_row(run, instance, spec.version)
    missing = [package for package in spec.needs if find_spec(package) is None]
    if missing:
        return Outcome(replace(blank, status="skipped", error=f"needs the package {missing[0]}"))
    try:
        problem = problem or load_problem(run.workload, run.topology, run.rules, instance.graph_file)
        check_feasible(problem)
    except Infeasible as error:
        return Outcome(replace(blank, status="infeasible", error=one_line(error)))
    evaluations, seconds = parse_budget(run.budget)
    budget = Budget(problem, evaluations=evaluations, seconds=seconds)
    started = time.monotonic()
    try:
        placement = spec.place(problem, rng=np.random.default_rng(run.entropy), budget=budget, **params)
        taken = time.monotonic() - started
        row = score(blank, problem, placement, simulate(problem, placement))
    except Unsupported as error:
        return Outcome(replace(blank, status="skipped", error=one_line(error)))
    except MemoryError as error:
        return Outcome(replace(blank, status="memory", error=one_line(error)))
    except (Exception, SystemExit) as error:  # a placer may raise anything: it is a row, not the end of the bench
        text = one_line(error) if isinstance(error, SimdevError) else f"{type(error).__name__}: {one_line(error)}"
        return Outcome(replace(blank, status="error", error=text))
    row = replace(row, evaluations=budget.used, place_seconds=round(taken, 3))
    return Outcome(row, placement, tuple(budget.curve))


def blank_row(run: Run, instance: Instance, placer_version: int) -> Row:
    """A row with what is known before the run."""
    return Row(
        workload=run.workload, topology=run.topology, rules=run.rules, placer=run.placer, version=placer_version,
        params=run.params, budget=run.budget, seed=run.seed, fingerprint=instance.fingerprint,
        cost_hash=instance.cost_hash, status="error", lower_bound_ns=instance.bound_ns,
        bound_method=instance.bound_method,
    )  # fmt: skip


def score(blank: Row, problem: Problem, placement: Placement, schedule) -> Row:
    """``blank`` with what the schedule of ``placement`` says. An infeasible run has no step time, but a simulated
    one."""
    return replace(
        blank,
        status="ok",
        feasible=bool(schedule.feasible),
        step_ns=int(schedule.step_ns) if schedule.feasible else None,
        simulated_ns=int(schedule.step_ns),
        overflow=overflow_text(problem, schedule),
        peak_memory_bytes=int(schedule.peak_bytes.max()),
        comm_bytes=int(schedule.comm_bytes),
        placement=placement.hash,
    )


def overflow_text(problem: Problem, schedule) -> str:
    """``gpu0:123456 gpu1:42``: by how many bytes each device ran over."""
    names = [device.name for device in problem.topology.devices]
    return " ".join(f"{names[d]}:{int(schedule.overflow_bytes[d])}" for d in np.flatnonzero(schedule.overflow_bytes))


def bench(
    runs: list[Run],
    out: str | os.PathLike,
    *,
    jobs: int | None = None,
    limits: Limits | None = None,
    retry: bool = False,
    observer: Observer | None = None,
    backend: Callable[[int, Limits], contextlib.AbstractContextManager[Submit]] | None = None,
) -> list[Row]:
    """Execute what the folder ``out`` does not hold yet, ``jobs`` at a time; return the rows of ``runs``.

    ``backend`` says where (default: :func:`local_backend`). Runs that failed are rows too, and run again only with
    ``retry``. Raises :class:`InvalidInput` where the folder cannot be written or another bench writes to it. On
    KeyboardInterrupt what is finished is written first.
    """
    out, observer = Path(out), observer or Observer()
    limits = limits or Limits(BUDGETS["quick"].seconds, BUDGETS["quick"].memory_bytes)
    jobs = max(1, jobs or cores())
    with locked(out), environment():
        results = Results(out)
        try:
            observer.note("loading and compiling")
            instances = _instances(runs, results, jobs, limits, retry, observer)
            todo = [run for run in runs if not _held(results.row(run.key), run, instances[run.instance], retry)]
            for run in set(runs) - set(todo):
                results.rebound(run.key, instances[run.instance].bound_ns, instances[run.instance].bound_method)
            if todo:
                _warm_placers(todo, limits, observer)
            with (backend or local_backend)(jobs, limits) as submit:
                _execute_all(todo, instances, results, submit, limits, observer, len(runs))
        finally:
            if results.rows:
                results.write()
            results.close()
    wanted = {run.key for run in runs}
    return [row for row in results.rows if row.key in wanted]


def _held(row: Row | None, run: Run, instance: Instance, retry: bool) -> bool:
    """Whether a row is this run's, made from the same graph and costs by the same placer version."""
    if row is None or (retry and row.status != "ok"):
        return False
    spec, _ = registry.find_placer(run.entry)
    return (row.fingerprint, row.cost_hash, row.version) == (instance.fingerprint, instance.cost_hash, spec.version)


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Make the folder and hold its lock. The kernel lets go of it when the process ends, however it ends."""
    try:
        (out / "placements").mkdir(parents=True, exist_ok=True)
        file = open(out / ".lock", "a")
    except OSError as error:
        raise InvalidInput(f"cannot be written ({error.strerror or error})", source=out) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidInput("another bench is writing to this folder", source=out) from None
        yield


def _instances(runs, results, jobs, limits, retry, observer) -> dict[tuple, Instance]:
    """Load every workload on every topology, and bound those that have no bound yet, in worker processes."""
    from pebble import ProcessExpired

    names = sorted({run.instance for run in runs})
    found = {}
    pool = worker_pool(jobs)
    with running(pool):
        futures = {name: pool.schedule(_find_instance, (*name, str(results.out))) for name in names}
        for name, future in futures.items():
            found[name] = result(future, name[0])
            observer.note(f"loaded {name[0]} on {name[1]}")
        pending = {}
        for name, instance in found.items():
            if not instance.cost_hash:
                continue
            known = results.bounds.get(instance.problem)
            if known is None or (retry and known[0] is None):
                future = pool.schedule(_bound, (instance, limits), timeout=limits.seconds)
                pending[future] = name
            else:
                found[name] = replace(instance, bound_ns=known[0], bound_method=known[1])
        for future, name in pending.items():
            try:
                ns, method = future.result()
            except TimeoutError:
                ns, method = None, "timeout"
            except (MemoryError, ProcessExpired):
                ns, method = None, "memory"
            except Exception as error:  # no bound is a gap in the board, not the end of the bench
                ns, method = None, "error"
                observer.note(f"no bound for {name[0]} on {name[1]}: {type(error).__name__}: {one_line(error)}")
            found[name] = replace(found[name], bound_ns=ns, bound_method=method)
            results.add_bound(found[name].problem, ns, method)
            observer.note(f"bounded {name[0]} on {name[1]}")
    return found


def _find_instance(workload: str, topology: str, rules: str, out: str) -> Instance:
    graph = registry.load_workload(workload)
    try:
        cost_hash = Problem.build(graph, load_topology(topology), rules=parse_rules(rules)).costs.hash
    except Infeasible:  # an op without a kernel anywhere has no cost
        cost_hash = ""
    keep_machine(topology, Path(out))
    graph_file = None
    if not ships(workload):
        path = kept_graph(Path(out), graph.fingerprint)
        if not path.is_file():
            path.parent.mkdir(exist_ok=True)
            save_graph(graph, path)
        graph_file = str(path)
    return Instance(workload, topology, rules, graph.fingerprint, cost_hash, graph.n_ops, graph_file)


def _bound(instance: Instance, limits: Limits) -> tuple[int, str]:
    from simdev.analysis.levels import lower_bound

    limit_process(limits)
    bound = lower_bound(load_problem(instance.workload, instance.topology, instance.rules, instance.graph_file))
    return int(bound.ns), str(bound.method)


def _warm_placers(runs: list[Run], limits: Limits, observer: Observer) -> None:
    """Run each placer once on a tiny problem, one after the other: workers that compile the same function at the
    same time would spoil each other's cache."""
    entries = sorted({run.entry for run in runs})
    pool = worker_pool(1, tasks=0)
    with running(pool):
        for entry in entries:
            observer.note(f"warming up {entry}")
            with contextlib.suppress(Exception, SystemExit):  # what is wrong with it will be told by its rows
                pool.schedule(_warm_placer, (entry, limits), timeout=min(60, limits.seconds)).result()


def _warm_placer(entry: str, limits: Limits) -> None:
    from simdev.bench.warm import tiny_problem

    limit_process(limits)
    spec, params = registry.find_placer(entry)
    problem = tiny_problem()
    spec.place(problem, rng=np.random.default_rng(0), budget=Budget(problem, evaluations=20), **params)


@contextlib.contextmanager
def local_backend(jobs: int, limits: Limits) -> Iterator[Submit]:
    """Execute in processes of this machine, ``jobs`` at a time."""
    pool = worker_pool(jobs)
    with running(pool):
        yield lambda run, instance: pool.schedule(_execute_limited, (run, instance, limits), timeout=limits.seconds)


def _execute_all(todo, instances, results, submit, limits, observer, total) -> None:
    """Execute the largest graphs first, and write each row as it comes."""
    done = total - len(todo)
    order = sorted(todo, key=lambda run: (-instances[run.instance].n_ops, run))
    futures = {submit(run, instances[run.instance]): run for run in order}
    while futures:
        finished, _ = wait(futures, timeout=0.25, return_when=FIRST_COMPLETED)
        for future in finished:
            run = futures.pop(future)
            outcome = _outcome(future, run, instances[run.instance], limits)
            results.add(outcome.row, outcome.placement, outcome.curve)
            done += 1
            observer.row(done, total, outcome.row)
        observer.tick(done, total, [str(run) for future, run in futures.items() if future.running()])


def _outcome(future, run: Run, instance: Instance, limits: Limits) -> Outcome:
    from pebble import ProcessExpired

    try:
        return future.result()
    except TimeoutError:
        status, error = "timeout", f"longer than {limits.seconds:g} s"
    except MemoryError as raised:
        status, error = "memory", one_line(raised)
    except ProcessExpired as raised:
        status, error = ("memory" if raised.exitcode == -9 else "error"), death(raised.exitcode)
    except Exception as raised:
        status, error = "error", f"{type(raised).__name__}: {one_line(raised)}"
    spec, _ = registry.find_placer(run.entry)
    return Outcome(replace(blank_row(run, instance, spec.version), status=status, error=error, **circumstances()))


def _execute_limited(run: Run, instance: Instance, limits: Limits) -> Outcome:
    limit_process(limits)
    outcome = execute(run, instance)
    return replace(outcome, row=replace(outcome.row, **circumstances()))


def one_line(error: BaseException) -> str:
    """The message of an exception on one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]
