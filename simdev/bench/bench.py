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
from typing import Any

from simdev.bench.estimate import TimeLeft
from simdev.bench.journal import Results
from simdev.bench.matrix import BUDGETS
from simdev.bench.plan_rows import as_row
from simdev.bench.provenance import dirty
from simdev.bench.rows import Row
from simdev.bench.run import PLACING
from simdev.bench.work import RunOutcome, Unsuccessful, Work, one_line
from simdev.bench.workers import Limits, Pool, WorkerDied, cores, environment, interrupts_held, result, running
from simdev.errors import InvalidInput, SimdevError
from simdev.files import sweep

Submit = Callable[[Any, Any], Future]  # a run and its instance to the future of a RunOutcome
Backend = Callable[[Limits, Work], contextlib.AbstractContextManager[Submit]]
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
        """A run is finished and in the journal. Of a planner's run it is :func:`simdev.bench.plan_rows.as_row`."""


def bench(
    runs: list,
    out: str | os.PathLike,
    *,
    work: Work = PLACING,
    jobs: int | None = None,
    limits: Limits | None = None,
    retry: bool = False,
    observer: Observer | None = None,
    backend: Backend | None = None,
) -> list:
    """Execute the runs that the folder ``out`` does not hold yet, ``jobs`` at a time; return the rows of ``runs``.

    ``work`` says whether they are runs of placers (:func:`simdev.bench.matrix.plan`, :class:`Row`) or of planners
    (:func:`simdev.bench.plan_matrix.plan_jobs`, :class:`simdev.bench.plan_rows.PlanRow`). ``backend`` executes them
    elsewhere (:func:`simdev.bench.dask_cluster.dask_backend`); by default each has a process on this machine. Failed
    runs are rows too; they are executed again only with ``retry``. Raises :class:`InvalidInput` if the folder cannot be
    written or another bench writes to it, and :class:`Incomplete` if the backend lost runs. On KeyboardInterrupt, and
    on any error, the tables of all finished runs are written first.
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
            with running(pool), (backend or _here(pool))(limits, work) as submit:
                session = _Session(runs, work, results, pool, submit, jobs, limits, retry, observer)
                session.run()
            if not session.lost:
                results.pack()
        finally:
            results.write()
            results.close()
    if session.lost:
        what = f"{len(session.lost)} of {len(runs)} runs were lost ({session.lost[0]})"
        raise Incomplete(f"{out}: {what}: the same command executes them")
    wanted = {run.key for run in runs}
    return [row for row in (*results.rows, *results.plans) if row.key in wanted]


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
    """The backend that executes each run in a worker of ``pool``; runs of a kind share one (:meth:`Work.kind`)."""

    @contextlib.contextmanager
    def backend(limits: Limits, work: Work) -> Iterator[Submit]:
        yield lambda run, instance: pool.schedule(
            work.execute_shared if work.kind(run) else work.execute_limited,
            (run, instance, limits),
            timeout=limits.seconds,
            rank=work.rank(run, instance),
            kind=work.kind(run),
        )

    return backend


class _Session:
    """One call of :func:`bench`. Every task is a future with a function that takes it when it is done.

    An instance is loaded, then bounded; a solver (a placer or a planner) is warmed up, one at a time, because processes
    that compile the same function at the same time would spoil each other's cache. A run starts as soon as its instance
    has a bound and its solver is warm, while others are still warming up. Solvers that do not search come first,
    because most of them compile nothing and end in a moment; learned placers come last.
    """

    def __init__(
        self, runs, work: Work, results: Results, pool: Pool, submit: Submit, jobs: int, limits: Limits, retry, observer
    ):
        self.runs, self.work, self.results, self.pool, self.submit = set(runs), work, results, pool, submit
        self.jobs, self.limits, self.retry, self.observer = jobs, limits, retry, observer
        self.pending: dict[Future, tuple[str, Callable[[Future], None]]] = {}
        self.instances: dict[tuple, Any] = {}
        self.waiting: set = set()
        self.cold: set[str] = set()
        self.warm: set[str] = set()
        self.lost: list[str] = []
        self.done, self.warming = 0, False
        self.estimate = TimeLeft(limits)
        self.began: dict[str, float] = {}  # by title: when a running task was first seen

    def run(self) -> None:
        with interrupts_held() as deliver:  # an interruption comes between two rows, never within one
            self._run(deliver)

    def _run(self, deliver: Callable[[], None]) -> None:
        for name in sorted({run.instance for run in self.runs}):
            self._start(
                self.pool.schedule(self.work.load, (name, str(self.results.out)), rank=(0,)),
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
            deliver()

    def _start(self, future: Future, title: str, then: Callable[[Future], None]) -> None:
        self.pending[future] = title, then

    def _loaded(self, name: tuple, future: Future) -> None:
        instance = self.instances[name] = result(future, name[0])
        for run in self.runs:
            if run.instance == name and not self._held(run):
                self.estimate.expect(run, instance.n_ops, self.work.order(run.entry)[:2])
                if run.entry not in self.warm:
                    self.cold.add(run.entry)
        known = self.results.bounds.get(instance.problem)
        if not self.work.bounded(instance):
            self._bounded(name, None, "", keep=False)
        elif known is None or (self.retry and known[0] is None):
            # One machine after another, so that the jobs of a model do not capture the same stages at the same time.
            rank = (0, name[1])
            task = self.pool.schedule(self.work.bound, (instance, self.limits), timeout=self.limits.seconds, rank=rank)
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

    def _held(self, run) -> bool:
        """Whether the folder has the row of this run, and it is still what the run would give."""
        row = self.results.row(run.key)
        if row is None or (self.retry and row.status != "ok"):
            return False
        return self.work.holds(row, self.instances[run.instance])

    def _warm_next(self) -> None:
        """Warm up the next solver: run it on a tiny problem, so that what it compiles is on the disk."""
        if self.warming or not self.cold:
            return
        entry = min(self.cold, key=self.work.order)
        self.cold.remove(entry)
        self.warming = True
        if not self.work.needs_warm_up(entry):
            self._warmed(entry)
            return
        rank = (0,) if self.jobs > 1 else (2,)  # beside the runs of other solvers, or after them
        limit = min(WARM_UP_S, self.limits.seconds)
        task = self.pool.schedule(self.work.warm_up, (entry, self.limits), timeout=limit, rank=rank)
        self._start(task, f"warming up {entry}", lambda future: self._warmed(entry))

    def _warmed(self, entry: str) -> None:
        """A solver that failed to warm up is run all the same: its rows say what is wrong with it."""
        self.warm.add(entry)
        self.warming = False
        self._release()
        self._warm_next()

    def _release(self) -> None:
        ready = sorted(run for run in self.waiting if run.entry in self.warm)
        self.waiting.difference_update(ready)
        for run in sorted(ready, key=lambda run: self.work.rank(run, self.instances[run.instance])):
            task = self.submit(run, self.instances[run.instance])
            self._start(task, str(run), lambda future, run=run: self._finished(run, future))

    def _finished(self, run, future: Future) -> None:
        try:
            outcome = self._outcome(run, future)
        except Lost as error:
            self.lost.append(one_line(error))
            self.estimate.forget(run)
            return
        self.results.add(outcome.row, outcome.placement, outcome.curve)
        self.done += 1
        row = as_row(outcome.row)
        self.estimate.learn(run, row)
        self.observer.row(self.done, len(self.runs), row)

    def _outcome(self, run, future: Future) -> RunOutcome:
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
        return self.work.failed(run, self.instances[run.instance], status, error)
