"""What a placer may spend: simulations, or seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from simdev.errors import BudgetExhausted, InvalidInput
from simdev.placers.score import Score
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem

if TYPE_CHECKING:
    from simdev.sim.schedule import Outcomes
    from simdev.sim.simulator import Simulator


@dataclass(frozen=True)
class Share:
    """A part of a budget: a number of evaluations and of seconds, each infinite if the budget does not limit it."""

    evaluations: float
    seconds: float


class Budget:
    """Simulates placements for a placer, until its evaluations or its seconds are used up.

    A budget of ``evaluations`` gives the same result on every machine; one of ``seconds`` does not. Search like this,
    which is right for both kinds::

        while budget.open:
            score = budget.evaluate(devices)

    A placer may set ``proof`` to a few words on how good its result is by its own model (``optimal``, ``gap 3.1%``);
    they become a cell of the row. ``best_placement`` is the fastest placement that fits, of all that were evaluated,
    ``best`` its devices, ``best_priority`` the priorities that it was evaluated with (None for the default ones), and
    ``best_step_ns`` its step time; all are None if none has fitted. ``curve`` lists ``(evaluations, seconds,
    step_ns)`` at each improvement of ``best``; ``used`` counts the evaluations.

    ``microbatches`` says what a score means: 0, the time of one step; otherwise, the steady time per microbatch when
    that many microbatches share a step. Only then may a placement have replicas (:attr:`Placement.replica_of`).

    By default there are no evaluations. ``evaluations=math.inf`` leaves the limit to ``seconds``, which are those of
    ``clock``: with ``time.process_time``, of the processors. ``simulate`` replaces
    :func:`simdev.sim.simulate_many`, which it must equal in arguments and results.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        evaluations: float = 0,
        seconds: float = math.inf,
        simulate: Callable[..., Outcomes] | None = None,
        microbatches: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.problem, self.evaluations, self.seconds = problem, evaluations, float(seconds)
        self.microbatches = microbatches
        self.simulate = simulate
        self.used = 0
        self.proof = ""
        self.curve: list[tuple[int, float, int]] = []
        self.best_placement: Placement | None = None
        self.best_step_ns: int | None = None
        self._clock, self._started = clock, clock()
        self._promised = False  # whether `open` or `left` has said that there is an evaluation

    @property
    def best(self) -> np.ndarray | None:
        """Devices of the best placement so far, int32 ``(n,)``."""
        return None if self.best_placement is None else self.best_placement.devices

    @property
    def best_priority(self) -> np.ndarray | None:
        """Priorities of the best placement so far, int64 ``(n,)``; None for the default ones."""
        return None if self.best_placement is None else self.best_placement.priority

    @property
    def elapsed(self) -> float:
        """Seconds since the budget was granted."""
        return self._clock() - self._started

    @property
    def open(self) -> bool:
        """True while there is an evaluation left. The next evaluation then succeeds, even if the time runs out."""
        return self.left > 0

    @property
    def left(self) -> float:
        """Number of evaluations left, a whole number; ``math.inf`` while only the seconds are limited."""
        left = max(0, self.evaluations - self.used) if self.elapsed < self.seconds else 0
        self._promised = left > 0
        return left

    def share(self, parts: int) -> Share:
        """One of ``parts`` equal shares of what is left, for placers that divide a budget among several searches."""
        left = self.left
        evaluations = left if left == math.inf else int(left) // parts
        return Share(evaluations, max(0.0, self.seconds - self.elapsed) / parts)

    def apart(self, problem: Problem, evaluations: float, parts: float) -> Budget:
        """A budget of ``evaluations`` for another problem, such as a merged one, on the same clock, and of one in
        ``parts`` of the seconds that are left. What it spends are no evaluations of this budget."""
        seconds = max(0.0, self.seconds - self.elapsed) / parts
        whole = evaluations if evaluations == math.inf else int(evaluations)
        return Budget(problem, evaluations=whole, seconds=seconds, microbatches=self.microbatches, clock=self._clock)

    def evaluate(self, devices: np.ndarray, *, priority: np.ndarray | None = None, below: int | None = None) -> Score:
        """Simulate one placement, ``devices`` int ``(n,)``: the device number of each op.

        ``priority`` int ``(n,)`` matters under the order ``priority`` only (see :class:`Placement`).

        Computing memory takes about half of the time. Pass ``below`` (ns) to skip it for placements that are neither
        faster than ``below`` nor faster than ``best``: their ``overflow_bytes`` may be None. Raises
        :class:`BudgetExhausted` if nothing is left.
        """
        priorities = None if priority is None else np.asarray(priority)[None]
        return self.evaluate_many(np.asarray(devices)[None], priority=priorities, below=below)[0]

    def evaluate_many(
        self, devices: np.ndarray, *, priority: np.ndarray | None = None, below: int | None = None
    ) -> list[Score]:
        """Simulate a batch, ``devices`` and ``priority`` int ``(k, n)``: a score for each row, in order.

        If fewer than ``k`` evaluations are left, only the first rows are simulated: compare ``len`` of the result.
        ``below`` and the errors are those of :meth:`evaluate`.
        """
        return self._scores(devices, priority, below, {})

    def evaluate_placement(self, placement: Placement) -> Score:
        """Simulate one placement with all that it says, replicas included: one evaluation.

        Raises :class:`BudgetExhausted` if nothing is left, and :class:`InvalidInput` if the placement breaks its
        contract or has replicas without microbatches.
        """
        copies: dict[str, Any] = {}
        if placement.replica_of is not None:
            copies = {"replica_of": placement.replica_of, "replicated": placement.replicated}
            if not self.microbatches:
                raise InvalidInput("replicas need microbatches", source="placement", field="replica_of")
        priority = None if placement.priority is None else placement.priority[None]
        return self._scores(placement.devices[None], priority, None, copies)[0]

    def _scores(self, devices: np.ndarray, priority: np.ndarray | None, below: int | None, copies: dict) -> list[Score]:
        """:meth:`evaluate_many`; ``copies``: ``replica_of`` and ``replicated`` of all rows, if there are replicas."""
        from simdev.sim import simulate_many  # imported late: reading a placer must not load the compiler

        left = self.evaluations - self.used if self._promised else self.left
        self._promised = False
        devices = np.asarray(devices)
        devices = devices[: int(min(left, len(devices)))]
        if not len(devices):
            raise BudgetExhausted(f"the budget is used up after {self.used} evaluations")
        if below is not None:  # a placement that may be the new best needs its memory
            below = None if self.best_step_ns is None else max(below, self.best_step_ns)
        given: dict[str, Any] = {} if priority is None else {"priority": np.asarray(priority)[: len(devices)]}
        outcome = (self.simulate or simulate_many)(self.problem, devices, below=below, **given, **copies)
        scores = [
            Score(step_ns, overflow if overflow >= 0 else None)
            for step_ns, overflow in zip(outcome.step_ns.tolist(), outcome.overflow_bytes.tolist(), strict=True)
        ]
        for row, score in enumerate(scores):
            self.used += 1
            self.note(score, devices[row], None if priority is None else priority[row], **copies)
        return scores

    def try_moves(self, simulator: Simulator, units: np.ndarray, devices: np.ndarray, *, below: int) -> np.ndarray:
        """The step times, int64 ``(k,)``, after each of ``k`` moves of one unit by itself, ``units`` and ``devices``
        int ``(k,)``: an evaluation each.

        The placement in ``simulator`` stays as it is. A step time is exact if it is less than ``below`` (ns); else it
        is a lower bound of at least ``below``. Memory is not computed. If fewer than ``k`` evaluations are left, only
        the first moves are tried. Raises :class:`BudgetExhausted` if nothing is left.
        """
        left = self.evaluations - self.used if self._promised else self.left
        self._promised = False
        tried = int(min(left, len(units)))
        if not tried:
            raise BudgetExhausted(f"the budget is used up after {self.used} evaluations")
        self.used += tried
        return simulator.try_moves(units[:tried], devices[:tried], below=below)

    def move(self, simulator: Simulator, units: np.ndarray, devices: np.ndarray, *, below: int | None = None) -> Score:
        """Move one unit, or several at once, in ``simulator``, which is one evaluation: the score of the placement with
        all moves that are not yet accepted.

        If the step time is ``below`` (ns) or more, and not less than that of ``best``, it may be any lower bound of at
        least ``below``, and the memory is not computed. Under a search for throughput, where a score is no step time,
        use :meth:`evaluate`. Raises :class:`BudgetExhausted` if nothing is left.
        """
        if not (self._promised or self.left):
            raise BudgetExhausted(f"the budget is used up after {self.used} evaluations")
        self._promised = False
        self.used += 1
        if below is None:
            step_ns = simulator.move(units, devices)
            score = Score(step_ns, simulator.overflow_bytes)
        else:
            below = below if self.best_step_ns is None else max(below, self.best_step_ns)
            step_ns = simulator.move(units, devices, below=below)
            score = Score(step_ns, simulator.overflow_bytes if step_ns < below else None)
        if score.fits and (self.best_step_ns is None or step_ns < self.best_step_ns):
            priority = simulator.placement.priority
            self.note(score, simulator.placement.devices, priority)
        return score

    def spend(self, evaluations: int) -> None:
        """Count ``evaluations`` that the caller has made by itself, in compiled code, at most :attr:`left` of them. The
        caller passes the best placement that it found to :meth:`note`."""
        self.used += evaluations
        self._promised = False

    def note(self, score: Score, devices: np.ndarray, priority: np.ndarray | None, **copies: np.ndarray | None) -> None:
        """Keep the placement if it is the best so far; ``copies``: its ``replica_of`` and ``replicated``."""
        if score.fits and (self.best_step_ns is None or score.step_ns < self.best_step_ns):
            self.best_step_ns, self.best_placement = score.step_ns, Placement(devices, priority, **copies)
            self.curve.append((self.used, self.elapsed, score.step_ns))
