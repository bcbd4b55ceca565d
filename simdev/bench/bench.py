"""The bench: executes every run of a plan that a result folder does not hold yet.

The results of a folder live in its journal; ``results.csv``, ``leaderboard.csv``, ``ranking.csv`` and ``curves.csv``
are written from it. If a bench is interrupted, even by a crash, the same call resumes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, TimeoutError, wait
from dataclasses import replace
from pathlib import Path

from simdev.bench.estimate import TimeLeft
from simdev.bench.journal import Results
from simdev.bench.matrix import BUDGETS, Run
from simdev.bench.provenance import circumstances, dirty
from simdev.bench.rows import Row
from simdev.bench.run import (
    Instance,
    RunOutcome,
    Unsuccessful,
    blank_row,
    execute_limited,
    execute_shared,
    find_bound,
    find_instance,
    one_line,
)
from simdev.bench.run import warm_placer as warm_one
from simdev.bench.workers import Limits, Pool, WorkerDied, cores, environment, result, running
from simdev.errors import InvalidInput, SimdevError
from simdev.files import sweep
from simdev.placers import registry

Submit = Callable[[Run, Instance], Future]  # the future of a RunOutcome
Backend = Callable[[Limits], contextlib.AbstractContextManager[Submit]]
WARM_UP_S = 60.0


class Lost(Exception):
    """Raised by the future of a run that a backend could not execute: it says nothing about the run."""


class Incomplete(SimdevError):
    """Some runs were lost, for instance with the scheduler of a cluster. The same bench executes them again."""


class Observer:
    """Receives the progress of a bench; the command line draws it. A subclass overrides what it needs."""

    def note(self, text: str) -> None:
        """A step that takes a while begins, or something deserves a warning."""

    def tick(self, done: int, total: int, running: list[str], left_s: float | None = None) -> None:
        """Called a few times a second: finished runs, all runs, what is running, estimated seconds left (if known)."""

    def row(self, done: int, total: int, row: Row) -> None:
        """A run is finished and in the journal."""


def bench(
    runs: list[Run],
    out: str | os.PathLike,
    *,
    jobs: int | None = None,
    limits: Limits | None = None,
    retry: bool = False,
    observer: Observer | None = None,
    backend: Backend | None = None,
) -> list[Row]:
    """Execute the runs that the folder ``out`` does not hold yet, ``jobs`` at a time; return the rows of ``runs``.

    ``backend`` executes them elsewhere (:func:`simdev.bench.dask_cluster.dask_backend`); by default each has a process
    on this machine. Failed runs are rows too; they are executed again only with ``retry``. Raises
    :class:`InvalidInput` if the folder cannot be written or another bench writes to it, and :class:`Incomplete` if the
    backend lost runs. On KeyboardInterrupt, and on any error, the tables of all finished runs are written first.
    """
    out, observer = Path(out), observer or Observer()
    limits = limits or Limits(BUDGETS["quick"].seconds, BUDGETS["quick"].memory_bytes)
    jobs = max(1, jobs or cores())
    with locked(out), environment():
        results = Results(out)
        try:
            if dirty():
                observer.note(dirty())
            observer.note("starting the workers; the first bench after an installation compiles the simulator")
            pool = Pool(jobs)
            with running(pool), (backend or _here(pool))(limits) as submit:
                session = _Session(runs, results, pool, submit, jobs, limits, retry, observer)
                session.run()
            if not session.lost:
                results.pack()
        finally:
            if results.rows:
                results.write()
            results.close()
    if session.lost:
        what = f"{len(session.lost)} of {len(runs)} runs were lost ({session.lost[0]})"
        raise Incomplete(f"{out}: {what}: the same command executes them")
    wanted = {run.key for run in runs}
    return [row for row in results.rows if row.key in wanted]


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Make the folder and hold its lock. The kernel releases the lock when the process ends, however it ends."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / ".lock", "a")
    except OSError as error:
        raise InvalidInput(f"cannot be written ({error.strerror or error})", source=out) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidInput("another bench is writing to this folder", source=out) from None
        sweep(out)  # left by a bench that was killed while it held the lock
        yield


def _here(pool: Pool) -> Backend:
    """The backend that executes each run in a worker of ``pool``.

    Runs of a placer that needs JAX share a process in turn, because tracing the networks and loading their
    programs takes seconds. A run gives the same result alone. If one fails, the next has a fresh process.
    """

    @contextlib.contextmanager
    def backend(limits: Limits) -> Iterator[Submit]:
        yield lambda run, instance: pool.schedule(
            execute_shared if _needs_jax(run) else execute_limited,
            (run, instance, limits),
            timeout=limits.seconds,
            rank=_rank(run, instance),
            kind=run.entry if _needs_jax(run) else "",
        )

    return backend


def _rank(run: Run, instance: Instance) -> tuple:
    """Of the runs that wait, those that probably take longest start first, so that no long one is left for the end.

    The runs of a placer that needs JAX take turns, because they share a process.
    """
    spec, _ = registry.find_placer(run.entry)
    return (1, spec.learner is None, not spec.searches, run.entry if _needs_jax(run) else "", -instance.n_ops)


def _needs_jax(run: Run) -> bool:
    return "jax" in registry.find_placer(run.entry)[0].needs


class _Session:
    """One call of :func:`bench`. Every task is a future with a function that takes it when it is done.

    An instance is loaded, then bounded; a placer is warmed up, one at a time, because processes that compile the same
    function at the same time would spoil each other's cache. A run starts as soon as its instance has a bound and its
    placer is warm, while other placers are still warming up. Placers that do not search come first, because most of
    them compile nothing and end in a moment; learned placers come last.
    """

    def __init__(self, runs, results: Results, pool: Pool, submit: Submit, jobs: int, limits: Limits, retry, observer):
        self.runs, self.results, self.pool, self.submit, self.jobs = set(runs), results, pool, submit, jobs
        self.limits, self.retry, self.observer = limits, retry, observer
        self.pending: dict[Future, tuple[str, Callable[[Future], None]]] = {}
        self.instances: dict[tuple, Instance] = {}
        self.waiting: set[Run] = set()
        self.cold: set[str] = set()
        self.warm: set[str] = set()
        self.lost: list[str] = []
        self.done, self.warming = 0, False
        self.estimate = TimeLeft(limits)
        self.began: dict[str, float] = {}  # by title: when a running task was first seen

    def run(self) -> None:
        for name in sorted({run.instance for run in self.runs}):
            self._start(
                self.pool.schedule(find_instance, (*name, str(self.results.out)), rank=(0,)),
                f"loading {name[0]} on {name[1]}",
                lambda future, name=name: self._loaded(name, future),
            )
        while self.pending:
            finished, _ = wait(self.pending, timeout=0.25, return_when=FIRST_COMPLETED)
            for future in finished:
                self.pending.pop(future)[1](future)
            running = [title for future, (title, _) in self.pending.items() if future.running()]
            now = time.monotonic()
            self.began = {title: self.began.get(title, now) for title in running}
            left = self.estimate.seconds_left(self.jobs, {title: now - begin for title, begin in self.began.items()})
            self.observer.tick(self.done, len(self.runs), running, left)

    def _start(self, future: Future, title: str, then: Callable[[Future], None]) -> None:
        self.pending[future] = title, then

    def _loaded(self, name: tuple, future: Future) -> None:
        instance = self.instances[name] = result(future, name[0])
        for run in self.runs:
            if run.instance == name and not self._held(run):
                self.estimate.expect(run, instance.n_ops)
                if run.entry not in self.warm:
                    self.cold.add(run.entry)
        known = self.results.bounds.get(instance.problem)
        if not instance.cost_hash:
            self._bounded(name, None, "", keep=False)
        elif known is None or (self.retry and known[0] is None):
            task = self.pool.schedule(find_bound, (instance, self.limits), timeout=self.limits.seconds, rank=(0,))
            self._start(task, f"bound of {name[0]} on {name[1]}", lambda future: self._bound(name, future))
        else:
            self._bounded(name, *known, keep=False)
        self._warm_next()

    def _bound(self, name: tuple, future: Future) -> None:
        ns, method = None, ""
        try:
            ns, method = future.result()
        except TimeoutError:
            method = "timeout"
        except (MemoryError, WorkerDied):
            method = "memory"
        except Exception as error:  # no bound is a gap in the board, not the end of the bench
            method = "error"
            self.observer.note(f"no bound for {name[0]} on {name[1]}: {type(error).__name__}: {one_line(error)}")
        self._bounded(name, ns, method, keep=True)

    def _bounded(self, name: tuple, ns: int | None, method: str, *, keep: bool) -> None:
        self.instances[name] = replace(self.instances[name], bound_ns=ns, bound_method=method)
        if keep:
            self.results.add_bound(self.instances[name].problem, ns, method)
        for run in sorted(run for run in self.runs if run.instance == name):
            if self._held(run):
                self.results.rebound(run.key, ns, method)
                self.done += 1
            else:
                self.waiting.add(run)
        self._release()

    def _held(self, run: Run) -> bool:
        """Whether the folder has the row of this run, made from the same graph and costs by the same placer version."""
        row, instance = self.results.row(run.key), self.instances[run.instance]
        if row is None or (self.retry and row.status != "ok"):
            return False
        spec, _ = registry.find_placer(run.entry)
        return (row.fingerprint, row.cost_hash, row.version) == (instance.fingerprint, instance.cost_hash, spec.version)

    def _warm_next(self) -> None:
        """Warm up the next placer: run it on a tiny problem, so that what it compiles is on the disk."""
        if self.warming or not self.cold:
            return
        entry = min(self.cold, key=_warm_order)
        self.cold.remove(entry)
        self.warming = True
        if not _needs_warm_up(entry):
            self._warmed(entry)
            return
        rank = (0,) if self.jobs > 1 else (2,)  # beside the runs of other placers, or after them
        limit = min(WARM_UP_S, self.limits.seconds)
        task = self.pool.schedule(warm_one, (entry, self.limits), timeout=limit, rank=rank)
        self._start(task, f"warming up {entry}", lambda future: self._warmed(entry))

    def _warmed(self, entry: str) -> None:
        """A placer that failed to warm up is run all the same: its rows say what is wrong with it."""
        self.warm.add(entry)
        self.warming = False
        self._release()
        self._warm_next()

    def _release(self) -> None:
        ready = sorted(run for run in self.waiting if run.entry in self.warm)
        self.waiting.difference_update(ready)
        for run in sorted(ready, key=lambda run: _rank(run, self.instances[run.instance])):
            task = self.submit(run, self.instances[run.instance])
            self._start(task, str(run), lambda future, run=run: self._finished(run, future))

    def _finished(self, run: Run, future: Future) -> None:
        try:
            outcome = self._outcome(run, future)
        except Lost as error:
            self.lost.append(one_line(error))
            self.estimate.forget(run)
            return
        self.results.add(outcome.row, outcome.placement, outcome.curve)
        self.done += 1
        self.estimate.learn(run, outcome.row)
        self.observer.row(self.done, len(self.runs), outcome.row)

    def _outcome(self, run: Run, future: Future) -> RunOutcome:
        try:
            return future.result()
        except Lost:
            raise
        except Unsuccessful as raised:
            return raised.outcome
        except TimeoutError:
            status, error = "timeout", f"longer than {self.limits.seconds:g} s"
        except MemoryError as raised:
            status, error = "memory", one_line(raised)
        except WorkerDied as raised:
            status, error = ("memory" if raised.exitcode == -9 else "error"), one_line(raised)
        except Exception as raised:
            status, error = "error", f"{type(raised).__name__}: {one_line(raised)}"
        spec, _ = registry.find_placer(run.entry)
        row = blank_row(run, self.instances[run.instance], spec.version)
        return RunOutcome(replace(row, status=status, error=error, **circumstances()))


def _needs_warm_up(entry: str) -> bool:
    """Learned placers need none: what JAX compiles depends on the graph, and its cache is safe to share."""
    spec, _ = registry.find_placer(entry)
    return spec.learner is None


def _warm_order(entry: str) -> tuple:
    spec, _ = registry.find_placer(entry)
    return (spec.learner is not None, spec.searches, entry)
