"""Simulates the plans of one job. Captured stages, timed segments and prices are shared by all plans of the job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

from simdev.parallel.hosts import find_scale
from simdev.parallel.plan import PlanProgram, PlanReport, peak_bytes, prepare, simulate_program
from simdev.parallel.timing import Prices
from simdev.planners.bounds import plan_bound_ns
from simdev.planners.job import Choice, Job
from simdev.planners.outcome import Outcome


class Evaluator:
    """What plans of ``job`` do. ``workers`` processes simulate batches of plans; their number changes no result."""

    def __init__(self, job: Job, workers: int = 1):
        self.job, self.workers = job, workers
        self.prices = Prices(job.cluster, scale=find_scale(job.framework))
        self.known: dict[tuple, object] = {}  # captured stages and timed segments
        self._pool: ProcessPoolExecutor | None = None

    def program(self, choice: Choice) -> PlanProgram:
        """The captured and timed stages of a choice. Raises :class:`InvalidInput` if it does not suit the job."""
        return prepare(self.job.plan(choice), self.prices, known=self.known)

    def sibling(self, job: Job) -> Evaluator:
        """An evaluator of the same model on another cluster or with another batch, which shares what is captured."""
        other = Evaluator(job)
        other.known = {key: value for key, value in self.known.items() if key[0] == "stage"}
        return other

    def report(self, choice: Choice, engine: str = "fast") -> PlanReport:
        """The whole simulation of a choice, with its schedule."""
        return simulate_program(self.program(choice), engine=engine)

    def outcome(self, choice: Choice, always: bool = False, engine: str = "fast") -> Outcome:
        """The figures of a choice. A plan that does not fit is simulated only with ``always``."""
        program = self.program(choice)
        peak = peak_bytes(program)
        over = int(np.maximum(peak - self.job.cluster.kind.memory_bytes, 0).sum())
        figures = choice, over, tuple(peak.tolist()), plan_bound_ns(program)
        if over and not always:
            return Outcome(choice, None, *figures[1:])
        report = simulate_program(program, engine=engine)
        times = (tuple(values.tolist()) for values in (report.compute_ns, report.exposed_ns, report.bubble_ns))
        return Outcome(choice, report.step_ns, *figures[1:], *times)

    def outcomes(self, choices: Iterable[Choice]) -> Iterator[Outcome]:
        """:meth:`outcome` of each choice, in order."""
        choices = list(choices)
        if self.workers < 2 or len(choices) < 2:
            yield from map(self.outcome, choices)
            return
        if self._pool is None:
            context = get_context("spawn")
            self._pool = ProcessPoolExecutor(self.workers, context, _begin, (self.job,))
        yield from self._pool.map(_outcome, choices)

    def close(self) -> None:
        """End the worker processes, if there are any."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_) -> None:
        self.close()


_EVALUATOR: list[Evaluator] = []  # of a worker process


def _begin(job: Job) -> None:
    _EVALUATOR[:] = [Evaluator(job)]


def _outcome(choice: Choice) -> Outcome:
    return _EVALUATOR[0].outcome(choice)
