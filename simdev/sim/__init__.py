"""The simulator: how long a step takes under a placement, and whether it fits (the rules are in MODEL.md)."""

from __future__ import annotations

import numpy as np

from simdev.errors import UnknownName
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.sim.schedule import Outcomes, Schedule
from simdev.sim.simulator import Simulator
from simdev.sim.validate import InvalidSchedule, validate

__all__ = ["ENGINES", "InvalidSchedule", "Outcomes", "Schedule", "Simulator", "simulate", "simulate_many", "validate"]

ENGINES = ("fast", "reference")


def simulate(problem: Problem, placement: Placement, *, engine: str = "fast") -> Schedule:
    """Simulate one step of ``problem`` under ``placement``.

    Both engines follow MODEL.md and agree bit for bit: ``fast`` is compiled, ``reference`` is written to be read.
    Raises :class:`InvalidInput` where the placement breaks its contract (see :meth:`Placement.check`).
    """
    if engine == "fast":
        from simdev.sim.fast import simulate_fast

        return simulate_fast(problem, placement)
    if engine == "reference":
        from simdev.sim.reference import simulate_reference

        return simulate_reference(problem, placement)
    raise UnknownName("engine", engine, ENGINES)


def simulate_many(
    problem: Problem, devices: np.ndarray, *, threads: int | None = None, below: int | None = None
) -> Outcomes:
    """Simulate ``k`` placements, ``devices`` int ``(k, n)``, in ``threads`` threads (default one).

    The answer does not depend on ``threads``. Under the ``priority`` policy the priorities are the default ones. Memory
    takes half of the time: where the step time, in ns, is not ``below``, it is not worked out and given as -1.
    Raises :class:`InvalidInput` naming the first placement that breaks its contract.
    """
    from simdev.sim.fast import simulate_many_fast

    return simulate_many_fast(problem, devices, threads, below)
