"""Sweeps of single moves between the group moves of a search: the simulator tries many at once, each at a fraction of a
full run (:class:`simdev.sim.Simulator`)."""

from __future__ import annotations

import numpy as np

from simdev.baselines._climb import Neighbourhood
from simdev.baselines._search import SearchState
from simdev.placers.budget import Budget
from simdev.placers.score import Score
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem

BATCH = 32  # single moves in one call
TURN = 256  # evaluations of group moves between two sweeps
FEWEST, MOST = 64, 2048  # single moves in a sweep


def pays(problem: Problem) -> bool:
    """Whether single moves are cheaper than full runs: under the default order, on devices of one slot."""
    rules = problem.rules
    default = rules.order == "fifo" and rules.contention != "fair" and rules.runtime == "dataflow"
    return default and bool((problem.topology.slots == 1).all())


class Sweep:
    """Turns of single moves, the longer the more they gain.

    After every :data:`TURN` evaluations of group moves, a sweep is due. If a single move gains more than a group move,
    on average, the next sweep is twice as long, else half as long. A single move takes from a tenth of the time of a
    full run (``inception-v3``) to about as much (``nmt``).
    """

    def __init__(self, problem: Problem, around: Neighbourhood, budget: Budget, rng: np.random.Generator):
        self.problem, self.around, self.budget, self.rng = problem, around, budget, rng
        self.length, self.next = TURN, budget.used + TURN
        self.before_ns, self.gained_ns = -1, 0  # the best step time, and what group moves gained since the last sweep

    def due(self, best: SearchState) -> bool:
        """Whether a sweep follows now; ``best`` is the best state of the search so far."""
        if self.before_ns < 0:
            self.before_ns = best.score.step_ns
        if self.budget.used < self.next or not best.score.fits:
            return False
        self.gained_ns = self.before_ns - best.score.step_ns
        self.before_ns = best.score.step_ns
        return True

    def settle(self, best: SearchState) -> None:
        """Set the length of the next sweep. ``best``: the best state after this sweep."""
        gained_ns = self.before_ns - best.score.step_ns
        better = gained_ns * TURN > self.gained_ns * self.length
        self.length = min(MOST, 2 * self.length) if better else max(FEWEST, self.length // 2)
        self.before_ns, self.next = best.score.step_ns, self.budget.used + TURN

    def run(self, state: SearchState, last: float) -> SearchState:
        """The state after single moves from ``state``, up to ``last`` evaluations. Of each batch, the fastest placement
        is taken if it is not slower and fits."""
        if not state.score.fits:
            return state
        from simdev.sim import Simulator

        unit_of_op, stop = self.problem.graph.unit_of_op, min(last, self.budget.used + self.length)
        simulator = Simulator(self.problem, Placement(state.devices[unit_of_op]))
        while self.budget.open and self.budget.used < stop:
            units, targets = self._draw(state.devices)
            if not len(units):
                return state
            step_ns = self.budget.try_moves(simulator, units, targets, below=state.score.step_ns + 1)
            chosen = int(np.argmin(step_ns))
            if step_ns[chosen] > state.score.step_ns:
                continue
            simulator.move(int(units[chosen]), int(targets[chosen]))
            if simulator.overflow_bytes:
                simulator.undo()
                continue
            simulator.accept()
            devices = state.devices.copy()
            devices[units[chosen]] = targets[chosen]
            state = state._replace(devices=devices, score=Score(int(step_ns[chosen]), 0))
            self.budget.note(state.score, devices[unit_of_op], None)
        return state

    def _draw(self, devices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Up to :data:`BATCH` units, drawn by their time, each with another device that may take it."""
        units = np.array([self.around.pivot(self.rng) for _ in range(BATCH)])
        targets = self.rng.integers(len(self.around.allowed), size=BATCH)
        useful = self.around.allowed[targets, units] & (targets != devices[units])
        return units[useful], targets[useful]
