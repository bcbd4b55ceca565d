"""What a bench judges placements by: the time of one training step, the latency of one query, or the steady time per
microbatch or per query of a pipeline."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from simdev.analysis.bounds import Bound, lower_bound
from simdev.analysis.steady import steady_bound
from simdev.errors import InvalidInput, UnknownName
from simdev.problem.graph import PHASES, ComputationGraph
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.sim.schedule import Outcomes, Schedule

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEDULES = ("gpipe", "1f1b")
MOST = 1024  # microbatches: the unrolled graph has that many copies of every op


@dataclass(frozen=True, eq=False)
class Steady:
    """A pipeline as a row shows it: ``step_ns`` is the steady time per microbatch, rounded up; ``comm_bytes`` counts
    all microbatches; ``peak_bytes`` and ``overflow_bytes`` int64 ``(D,)``."""

    step_ns: int
    peak_bytes: np.ndarray
    overflow_bytes: np.ndarray
    comm_bytes: int

    @property
    def feasible(self) -> bool:
        """True if the peak of every device fits in its memory."""
        return not self.overflow_bytes.any()


@dataclass(frozen=True)
class Objective:
    """The time of one step, or, if there are ``microbatches``, their steady time under a pipeline ``schedule``.

    With ``inference``, the graph holds forward ops only: the step is one query, and its time is the latency. The
    microbatches are then a stream of queries that all wait from the start, so that the pipeline is full; each device
    takes them in their order. The steady time per query is the inverse of the rate at which the placement serves.
    """

    schedule: str = ""
    microbatches: int = 0
    inference: bool = False

    def check(self, rules: Rules) -> None:
        """Raise :class:`InvalidInput` unless a pipeline can run under ``rules``; it has an order of its own (R10)."""
        if self.microbatches and (rules.order != "fifo" or rules.runtime != "dataflow"):
            raise InvalidInput(
                f"throughput has the order of its schedule and the runtime dataflow, not {rules.order}/{rules.runtime}",
                source="rules",
            )

    def check_graph(self, graph: ComputationGraph) -> None:
        """Raise :class:`InvalidInput` if a query is asked for, and the graph holds backward or update work."""
        later = np.flatnonzero(graph.op_phase != PHASES.index("forward"))
        if self.inference and len(later):
            what = f"op {graph.op_names[later[0]]!r} belongs to the phase {PHASES[graph.op_phase[later[0]]]!r}"
            raise InvalidInput(
                f"latency and serve need a graph of forward ops only; {what} (simdev list workloads shows those that "
                "end in -inference, -prefill or -decode)",
                source=graph.name,
            )

    def run(self, problem: Problem, placement: Placement) -> tuple[Problem, Placement, Schedule, str, int]:
        """What is simulated, as :class:`simdev.report.explain.Explanation` takes it: the problem itself or the graph of
        all microbatches, and then what passes through the pipeline, and the score."""
        from simdev.sim import simulate
        from simdev.sim.pipeline import simulate_pipeline

        if not self.microbatches:
            return problem, placement, simulate(problem, placement), "", 0
        report = simulate_pipeline(problem, placement, self.microbatches, self.schedule)
        what = "queries" if self.inference else "microbatches"
        return report.problem, report.placement, report.schedule, what, math.ceil(report.steady_ns)

    def simulate(
        self, problem: Problem, placement: Placement, *, engine: str = "fast", valid: bool = False
    ) -> Schedule | Steady:
        """The result of a placement. If ``valid`` is true, the validator checks its schedule."""
        from simdev.sim import simulate, validate
        from simdev.sim.pipeline import simulate_pipeline

        self.check_graph(problem.graph)
        if not self.microbatches:
            schedule = simulate(problem, placement, engine=engine)
            if valid:
                validate(problem, placement, schedule)
            return schedule
        report = simulate_pipeline(problem, placement, self.microbatches, self.schedule, engine=engine)
        if valid:
            validate(report.problem, report.placement, report.schedule)
        steady_ns, sent = math.ceil(report.steady_ns), int(report.schedule.comm_bytes)
        return Steady(steady_ns, report.peak_bytes, report.overflow_bytes, sent)

    @property
    def simulate_many(self) -> Callable[..., Outcomes] | None:
        """The simulator of a placer's budget; None stands for :func:`simdev.sim.simulate_many`."""
        return self._steady_of_each if self.microbatches else None

    def _steady_of_each(
        self, problem: Problem, devices: np.ndarray, *, priority=None, below=None, **copies
    ) -> Outcomes:
        """A pipeline has priorities of its own, and it is not stopped early, so ``priority`` and ``below`` do not
        matter. ``copies``: ``replica_of`` and ``replicated`` of all rows."""
        found = [self.simulate(problem, Placement(row, **copies)) for row in np.asarray(devices)]
        return Outcomes(
            np.array([one.step_ns for one in found], np.int64),
            np.array([one.peak_bytes for one in found], np.int64),
            np.array([one.overflow_bytes.sum() for one in found], np.int64),
        )

    def lower_bound(self, problem: Problem) -> Bound:
        """A score that no placement beats."""
        return steady_bound(problem) if self.microbatches else lower_bound(problem)


def parse_objective(text: str) -> Objective:
    """The objective that a row names: ``step``, ``latency``, ``throughput/SCHEDULE/MICROBATCHES`` or
    ``serve/QUERIES``."""
    if text in ("step", "latency"):
        return Objective(inference=text == "latency")
    kind, _, rest = text.partition("/")
    schedule, _, count = rest.rpartition("/")
    if (
        kind not in ("throughput", "serve")
        or not (count.isascii() and count.isdigit() and len(count) < 8 and count[0] != "0")
        or (kind == "serve" and schedule)
    ):
        raise UnknownName("objective", text, ["step", "latency", "throughput/1f1b/32", "serve/32"])
    if kind == "throughput" and schedule not in SCHEDULES:
        raise UnknownName("schedule", schedule, SCHEDULES, source="objective")
    if not 3 <= int(count) <= MOST:
        what = "queries" if kind == "serve" else "microbatches"
        raise InvalidInput(f"expected 3 to {MOST} {what}, got {count}", source="objective")
    # Without backward work no microbatch waits for another: both schedules of a pipeline are the same one.
    return Objective(schedule or SCHEDULES[0], int(count), kind == "serve")
