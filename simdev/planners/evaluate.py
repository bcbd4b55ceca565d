"""Simulates the plans of one job. Captured stages, timed segments and prices are shared by all plans of the job."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

import numpy as np

from simdev.errors import SimdevError
from simdev.parallel.capture.stage import captured, is_kept
from simdev.parallel.costs.reserved import RECORDED, is_recorded, record_stage, recordings_of, reserved_bytes
from simdev.parallel.orders import round_of
from simdev.parallel.plan import Plan, PlanProgram, PlanReport, captures_of, peak_bytes, prepare, simulate_program
from simdev.parallel.unroll import TooManyOps
from simdev.planners.bounds import plan_bound_ns
from simdev.planners.estimate import Estimate, captures_are_kept, estimated_bytes, estimates, group_of
from simdev.planners.job import Choice, Job, SharedByPlans
from simdev.planners.outcome import Outcome
from simdev.user_file import is_user_module

RECORDING = 5  # arguments of a recording; a capture has eight
# New objects after which the garbage collector runs inside ``with Evaluator(...)``. Programs consist of hundreds of
# thousands of calls that live as long as the evaluator: to search them for garbage takes a sixth of a search.
SELDOM = 100_000
# Seconds of work that a batch must have left for further processes to start: each takes 2 to 3 s of a processor to load
# PyTorch and to learn what this one knows.
PAYS_S = 10.0
HOPELESS = 1.3  # estimated memory over the capacity, from which a plan is not even captured


class WorkersLost(SimdevError):
    """A process or computer that simulated plans has ended: this says nothing about the plans."""


class Evaluator(SharedByPlans):
    """What plans of ``job`` do. ``workers`` processes, this one among them, or those of an ``executor`` capture and
    simulate batches of plans; their number changes no result. Further processes start with the first batch that needs
    captures of more than :data:`PAYS_S` seconds: where there are fewer, to share what is timed saves more than a second
    process does."""

    def __init__(self, job: Job, workers: int = 1, executor: Executor | None = None):
        super().__init__(job)
        local = is_user_module(job.model.function.__module__)  # from a user's file: known here alone
        self.workers = 1 if local else max(workers, 2 if executor else 1)
        self._whole: dict[Choice, Outcome] = {}  # of steps that were simulated with all their microbatches
        self._captured: set[tuple] = set()  # arguments of recordings and captures that were made
        self._executor, self._own = executor, executor is None

    def program(self, choice: Choice) -> PlanProgram:
        """The captured and timed stages of a choice. Raises :class:`InvalidInput` if it does not suit the job."""
        plan = self.job.plan(choice)
        for key in self._recordings(plan):
            if key not in self._captured and not is_recorded(*key):
                record_stage(*key)
            self._captured.add(key)
        return prepare(plan, self.prices, known=self.known)

    def _recordings(self, plan: Plan) -> list[tuple]:
        """The recordings of allocations that also capture the programs of a plan, where reserved memory decides."""
        return recordings_of(plan) if self.job.memory == "reserved" else []

    def sibling(self, job: Job) -> Evaluator:
        """An evaluator of the same model on another cluster or with another batch, which shares what is captured."""
        other = Evaluator(job)
        shared = "stage", "few", "allocations", "replayed"
        other.known = {key: value for key, value in self.known.items() if key[0] in shared}
        return other

    def report(self, choice: Choice, engine: str = "fast") -> PlanReport:
        """The whole simulation of a choice, with its schedule."""
        return simulate_program(self.program(choice), engine=engine)

    def outcome(self, choice: Choice, always: bool = False, engine: str = "fast", exact: bool = True) -> Outcome:
        """The figures of a choice. A plan that does not fit is simulated only with ``always``.

        Without ``exact``, a step of many microbatches is extrapolated from three steps of few (:func:`extrapolated`),
        which is much quicker. So is a step of more ops than a simulation may hold; if it reaches no steady state, it
        has no step time and counts as a plan that does not fit.
        """
        if exact and engine == "fast" and choice in self._whole:  # a search often ends with such a plan
            return self._whole[choice]
        program = self.program(choice)
        peak = peak_bytes(program)
        reserved = self.reserved(program.plan, peak)
        held = np.asarray(reserved or peak, np.int64)
        over = int(np.maximum(held - self.job.cluster.kind.memory_bytes, 0).sum())
        figures = choice, over, tuple(peak.tolist()), plan_bound_ns(program)
        if over and not always:
            return Outcome(choice, None, *figures[1:], reserved_bytes=reserved)
        steady = None if exact else extrapolated(program)
        whole = steady is None
        if whole:
            try:
                steady = _times(simulate_program(program, engine=engine))
            except TooManyOps:
                whole = False
                steady = next((found for warm in WARM if (found := extrapolated(program, warm)) is not None), None)
        if steady is None:
            return Outcome(choice, None, *figures[1:], reserved_bytes=reserved)
        step, compute, exposed = int(steady[0]), steady[1 : 1 + len(peak)], steady[1 + len(peak) :]
        idle = (step - compute - exposed).tolist()
        times = tuple(compute.tolist()), tuple(exposed.tolist()), tuple(idle)
        outcome = Outcome(choice, step, *figures[1:], *times, reserved_bytes=reserved)
        if whole and engine == "fast":
            self._whole[choice] = outcome
        return outcome

    def hopeless(self, choice: Choice) -> Outcome | None:
        """An outcome without figures of time for a choice that is estimated to need more than :data:`HOPELESS` times
        the memory that there is, at its microbatch or at a smaller one; None for any other. Tests of the cost model
        allow estimates to be a quarter too large, so that such a plan does not fit."""
        capacity = self.job.cluster.kind.memory_bytes
        sizes = {min(self.job.microbatches), choice.microbatch} if not choice.stage_meshes else ()
        for size in sorted(sizes):
            smaller = replace(choice, microbatch=size)
            if size > choice.microbatch or not self.job.valid(smaller):
                continue
            peak = estimated_bytes(self, smaller)
            if peak > HOPELESS * capacity:
                return Outcome(choice, None, peak - capacity, (peak,) * choice.mesh["pp"])
        return None

    def reserved(self, plan: Plan, peak: np.ndarray) -> tuple[int, ...]:
        """Reserved memory with NCCL's buffers of each pipeline rank; empty where it decides nothing: the job is judged
        by allocated memory, allocated memory alone is too much, or at most half of the capacity."""
        capacity = self.job.cluster.kind.memory_bytes
        if self.job.memory == "allocated" or not capacity / 2 < peak.max() <= capacity:
            return ()
        found = reserved_bytes(plan, self.known)
        return tuple(one.total for one in found) if found else ()

    def outcomes(self, choices: Iterable[Choice]) -> Iterator[Outcome]:
        """:meth:`outcome` of each choice, in order, without ``exact``."""
        choices = list(choices)
        if self.workers < 2 or len(choices) < 2:
            yield from (self.outcome(choice, exact=False) for choice in choices)
            return
        needed = {key: None for choice in choices if self.job.valid(choice) for key in self._captures(choice)}
        if missing := [key for key in needed if not _is_kept(key)]:
            list(self._answers(_prepare, missing, _prepare))  # each once, before workers need the same
        self._captured.update(needed)
        if self._executor is None:
            yield from (self.outcome(choice, exact=False) for choice in choices)
        else:
            yield from self._answers(partial(_outcome, self.job), choices, partial(self.outcome, exact=False))

    def _captures(self, choice: Choice) -> list[tuple]:
        """The recordings, or else captures, that a choice needs and that were not asked for before."""
        plan = self.job.plan(choice)
        recordings = self._recordings(plan)
        recorded = {(mesh, part) for _, _, mesh, _, part in recordings}
        captures = (key for key in captures_of(plan) if key[4] not in RECORDED or key[2:4] not in recorded)
        return [key for key in (*recordings, *captures) if key not in self._captured]

    def estimates(self, choices: Iterable[Choice]) -> Iterator[Estimate]:
        """Quick estimates of choices; those that cannot fit because a smaller microbatch does not fit are left out."""
        groups: dict[tuple, list[Choice]] = {}
        for choice in choices:
            groups.setdefault(group_of(choice), []).append(choice)
        tasks = [sorted(group, key=lambda choice: choice.microbatch) for group in groups.values()]
        here = self._executor is None and all(captures_are_kept(self.job, task[0]) for task in tasks)
        if self.workers < 2 or len(tasks) < 2 or here:
            found: Iterator = (estimates(self, task) for task in tasks)
        else:
            found = self._answers(partial(_estimates, self.job), tasks, lambda task: list(estimates(self, task)))
        yield from (one for task in found for one in task if one is not None)

    def _answers(self, function: Callable, tasks: Iterable, here: Callable) -> Iterator:
        """What the workers answer to ``function`` of each task, in order. Of processes of its own there is one fewer
        than workers. They start when tasks like those so far would take more than :data:`PAYS_S` seconds; until then
        tasks are done ``here``. So are later ones that none has begun while an answer is due, the last ones first.
        Raises :class:`WorkersLost` if a worker has ended."""
        asked: list[Future] = []
        try:
            if not self._own:
                yield from self._pool().map(function, tasks)
                return
            given, own, done, spent = list(tasks), {}, 0, 0.0
            while self._executor is None and spent * len(given) <= PAYS_S * done:
                if not given:
                    return
                loaded, began = "torch" in sys.modules, time.monotonic()
                answer = here(given.pop(0))
                if loaded:  # a task that loads PyTorch says nothing of the others
                    done, spent = done + 1, spent + time.monotonic() - began
                yield answer
            asked += [self._pool().submit(function, task) for task in given]
            for number, answer in enumerate(asked):
                while number not in own and not answer.done():
                    behind = (n for n in range(len(asked) - 1, number - 1, -1) if n not in own)
                    last = next((n for n in behind if asked[n].cancel()), None)
                    if last is None:
                        break
                    own[last] = here(given[last])
                yield own.pop(number) if number in own else answer.result()
        except BrokenExecutor:
            raise WorkersLost("a process that simulated plans has ended (out of memory?); captures are kept") from None
        finally:
            for answer in asked:
                answer.cancel()

    def _pool(self) -> Executor:
        if self._executor is None:
            self._executor = ProcessPoolExecutor(self.workers - 1, get_context("spawn"))
        return self._executor

    def close(self) -> None:
        """End the worker processes, if there are any; an executor that was given stays open."""
        if self._executor is not None and self._own:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None

    def __enter__(self) -> Evaluator:
        self._thresholds = gc.get_threshold()
        gc.set_threshold(SELDOM, *self._thresholds[1:])
        return self

    def __exit__(self, *_) -> None:
        gc.set_threshold(*self._thresholds)
        self.close()


_EVALUATORS: dict[str, Evaluator] = {}  # of a worker process, by job
_LOCK = threading.RLock()  # PyTorch has one process group, and a worker may have several threads


def _evaluator(job: Job) -> Evaluator:
    name = repr(job)
    if name not in _EVALUATORS:
        _EVALUATORS.clear()  # the captures of another job may be large
        _EVALUATORS[name] = Evaluator(job)
    return _EVALUATORS[name]


def _is_kept(key: tuple) -> bool:
    return (is_recorded if len(key) == RECORDING else is_kept)(*key)


def _prepare(key: tuple) -> None:
    """Record or capture a stage: kept on disk; not in memory, where nobody asks for it."""
    with _LOCK:
        (record_stage if len(key) == RECORDING else captured.__wrapped__)(*key)


def _outcome(job: Job, choice: Choice) -> Outcome:
    with _LOCK:
        return _evaluator(job).outcome(choice, exact=False)


def _estimates(job: Job, choices: list[Choice]) -> list[Estimate | None]:
    with _LOCK:
        return list(estimates(_evaluator(job), choices))


WARM = (3, 8)  # microbatches for each pipeline rank, after which a steady state is looked for


def extrapolated(program: PlanProgram, warm: int = 3) -> np.ndarray | None:
    """int64: step time, then compute time and exposed communication of each pipeline rank, for the microbatches of the
    program's plan, from simulations of few, ``warm`` for each pipeline rank; None if that cannot be had.

    A pipeline in its steady state repeats itself: each further round of microbatches adds the same times. Three
    simulations, the second with one round more than the first and the third with four more, show whether the steady
    state is reached: the third must have added four times as much step time as the second. Exposed communication
    may take longer to become steady than the step time, and is then slightly off.
    """
    plan = program.plan
    ranks = plan.mesh["pp"]
    one = round_of(plan.schedule, ranks)
    first = plan.microbatches % one + one * -(-max(warm * ranks + 2, 6) // one)
    rounds, rest = divmod(plan.microbatches - first, one)
    if rest or rounds < 8:
        return None
    times = [
        _times(simulate_program(replace(program, plan=replace(plan, microbatches=first + n * one)))) for n in (0, 1, 4)
    ]
    added = times[1] - times[0]
    if times[2][0] - times[0][0] != 4 * added[0]:
        return None
    return times[0] + rounds * added


def _times(report: PlanReport) -> np.ndarray:
    return np.concatenate([[report.step_ns], report.compute_ns, report.exposed_ns]).astype(np.int64)
