"""The simulator: how long a training step takes under a placement, and whether it fits in memory.

MODEL.md states the rules; two engines follow them, the compiled one (``fast``) and the readable one (``reference``),
and a validator checks finished schedules. :func:`simulate` and :func:`simulate_many` run placements, :class:`Simulator`
evaluates small moves.
"""

from __future__ import annotations

import numpy as np

from simdev.errors import InvalidInput, UnknownName
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.sim.schedule import Outcomes, Schedule
from simdev.sim.simulator import Simulator
from simdev.sim.validate import InvalidSchedule, validate

__all__ = ["ENGINES", "InvalidSchedule", "Outcomes", "Schedule", "Simulator", "simulate", "simulate_many", "validate"]

ENGINES = ("fast", "reference")


def simulate(problem: Problem, placement: Placement, *, engine: str = "fast") -> Schedule:
    """Simulate one step of ``problem`` under ``placement``.

    The two engines agree bit for bit: ``fast`` is compiled, ``reference`` is written to be read. Raises
    :class:`InvalidInput` if the placement breaks its contract (see :meth:`Placement.check`) or has replicas, which need
    microbatches (:func:`simdev.sim.pipeline.simulate_pipeline`), and :class:`UnknownName` for another engine.
    """
    if placement.replica_of is not None:
        raise InvalidInput("replicas need a pipeline of microbatches", source="placement", field="replica_of")
    if engine == "fast":
        from simdev.sim.fast import simulate_fast

        return simulate_fast(problem, placement)
    if engine == "reference":
        from simdev.sim.reference import simulate_reference

        return simulate_reference(problem, placement)
    raise UnknownName("engine", engine, ENGINES)


def simulate_many(
    problem: Problem,
    devices: np.ndarray,
    *,
    priority: np.ndarray | None = None,
    threads: int | None = None,
    below: int | None = None,
) -> Outcomes:
    """Simulate ``k`` placements, ``devices`` int ``(k, n)``, in ``threads`` threads (default: one).

    Computing memory doubles the cost. Pass ``below`` (ns) to skip it for placements whose step time is not less: their
    rows of the result are unknown (see :class:`Outcomes`). The result does not depend on ``threads``. ``priority`` int
    ``(k, n)``, which matters only under the order ``priority``, gives each placement its priorities (default: b-levels,
    R2). Raises :class:`InvalidInput`, which names the first placement that breaks its contract.
    """
    from simdev.sim.fast import simulate_many_fast

    return simulate_many_fast(problem, devices, threads, below, priority)
