"""What a placer is, and the budget that it spends.

A placer is one function in one file of ``baselines/``::

    @placer("round-robin", version=1, family="heuristic")
    def round_robin(problem, *, rng, budget):
        ...
        return Placement(devices)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from simdev.errors import BudgetExhausted, InvalidInput, UnknownName
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem

if TYPE_CHECKING:
    from simdev.sim.schedule import Outcomes

SHELF: dict[str, PlacerSpec] = {}


@dataclass(frozen=True)
class PlacerSpec:
    """A registered placer.

    ``memory_aware`` is False for placers that ignore memory by design; their infeasible rows are kept as such.
    ``repeatable`` is False for placers whose solver may stop by the clock: another machine may place otherwise.
    ``same_processor`` is True for placers that compute in floating point with compiled vector code (JAX, BLAS):
    another model of processor may round otherwise, and the search then takes another way.
    ``searches`` is True where the placer spends evaluations of the simulator. ``defaults`` are its parameters
    (``name[param=value]``). ``needs`` names optional packages; without them the run is skipped with the reason.
    ``learner(problems, **params)`` makes what ``simdev train`` trains, for placers that learn a policy.
    """

    name: str
    version: int
    family: str
    function: Callable[..., Placement]
    memory_aware: bool = True
    repeatable: bool = True
    same_processor: bool = False
    searches: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    source: str = ""
    learner: Callable | None = None

    def place(self, problem: Problem, *, rng: np.random.Generator, budget: Budget, **params) -> Placement:
        """Run the placer and check what it returns; where the end of the budget cuts it short, the best it found.

        Raises :class:`Unsupported` where it cannot handle the problem, and :class:`BudgetExhausted` where it had found
        nothing that fits.
        """
        for key in params:
            if key not in self.defaults:
                raise UnknownName("parameter", key, self.defaults, source=f"placer {self.name}")
        try:
            placement = self.function(problem, rng=rng, budget=budget, **{**self.defaults, **params})
        except BudgetExhausted:
            if budget.best is None:
                raise
            placement = Placement(budget.best)
        if not isinstance(placement, Placement):
            raise InvalidInput(f"returned {type(placement).__name__}, expected Placement", source=f"placer {self.name}")
        placement.check(problem, source=f"placer {self.name}")
        return placement


def placer(
    name: str,
    *,
    version: int,
    family: str,
    memory_aware: bool = True,
    repeatable: bool = True,
    same_processor: bool = False,
    searches: bool = False,
    defaults: Mapping[str, object] | None = None,
    needs: tuple[str, ...] = (),
    source: str = "",
    learner: Callable | None = None,
) -> Callable[[Callable[..., Placement]], Callable[..., Placement]]:
    """Register a placer under ``name``. ``source`` cites the paper (section) or library that it follows."""

    def register(function):
        if name in SHELF and SHELF[name].function.__module__ != function.__module__:
            raise InvalidInput(f"placer {name!r} is registered twice", source=function.__module__)
        SHELF[name] = PlacerSpec(
            name=name, version=version, family=family, function=function, memory_aware=memory_aware,
            repeatable=repeatable, same_processor=same_processor, searches=searches, defaults=dict(defaults or {}), needs=tuple(needs), source=source,
            learner=learner,
        )  # fmt: skip
        return function

    return register


class Budget:
    """Simulator evaluations (deterministic) and seconds (a safety net) that a placer may spend, with its anytime curve.

    ``curve`` lists ``(evaluations, seconds, step_ns)`` at each improvement of the best feasible placement; ``best`` is
    that placement's devices, or None. ``simulate`` stands in for :func:`simdev.sim.simulate_many` (here by default).
    """

    def __init__(
        self,
        problem: Problem,
        *,
        evaluations: int = 0,
        seconds: float = float("inf"),
        simulate: Callable[..., Outcomes] | None = None,
    ):
        self.problem, self.evaluations, self.seconds = problem, int(evaluations), float(seconds)
        self.simulate = simulate
        self.used, self.curve, self.best, self.best_step_ns = 0, [], None, None
        self._started = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the budget was granted."""
        return time.monotonic() - self._started

    @property
    def left(self) -> int:
        """Evaluations left; 0 once the seconds are over."""
        return max(0, self.evaluations - self.used) if self.elapsed < self.seconds else 0

    def evaluate(self, devices: np.ndarray, *, below: int | None = None) -> tuple[int, int]:
        """Simulate one placement, ``devices`` int ``(n,)``: ``(step_ns, overflow_bytes)``.

        ``overflow_bytes`` is the sum over devices of bytes above capacity: 0 is feasible. Compare placements by
        ``(overflow_bytes, step_ns)``. Where ``step_ns`` is neither ``below`` nor better than the best feasible one, it
        may be -1: not worked out, in half of the time. Raises :class:`BudgetExhausted` when nothing is left.
        """
        step_ns, overflow = self.evaluate_many(np.asarray(devices)[None], below=below)
        return int(step_ns[0]), int(overflow[0])

    def evaluate_many(self, devices: np.ndarray, *, below: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Simulate a batch, ``devices`` int ``(k, n)``: int64 ``step_ns (k,)`` and ``overflow_bytes (k,)``.

        A batch larger than what is left is cut to it: compare ``len`` of the answer.
        """
        from simdev.sim import simulate_many  # floor 3, imported late so that reading a placer costs no JIT

        devices = np.asarray(devices)[: self.left]
        if not len(devices):
            raise BudgetExhausted(f"the budget is used up after {self.used} evaluations")
        if below is not None:  # what may be the best needs its memory
            below = None if self.best_step_ns is None else max(below, self.best_step_ns)
        outcome = (self.simulate or simulate_many)(self.problem, devices, below=below)
        for row in np.flatnonzero(outcome.overflow_bytes == 0):
            if self.best_step_ns is None or outcome.step_ns[row] < self.best_step_ns:
                self.best_step_ns, self.best = int(outcome.step_ns[row]), devices[row].astype(np.int32)
                self.curve.append((self.used + int(row) + 1, self.elapsed, self.best_step_ns))
        self.used += len(devices)
        return outcome.step_ns, outcome.overflow_bytes
