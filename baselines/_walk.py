"""A placement that a search changes move by move, with the exact score after each move."""

from __future__ import annotations

import numpy as np

from simdev.placers.budget import Budget
from simdev.placers.score import Score
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem


def cheap(problem: Problem) -> bool:
    """Whether moves of a few units are cheaper than full runs: under the default order, on devices of one slot."""
    rules = problem.rules
    default = rules.order == "fifo" and rules.contention != "fair" and rules.runtime == "dataflow"
    return default and bool((problem.topology.slots == 1).all())


class Walk:
    """Unit ``devices`` int32 ``(units,)`` and their ``score``. Each :meth:`move` is one evaluation; :meth:`accept` or
    :meth:`undo` follows it.

    If moves are :func:`cheap` and a score is the time of one step, the simulator computes only what a move changes;
    otherwise each move is a full run.
    """

    def __init__(self, problem: Problem, budget: Budget, devices: np.ndarray, score: Score):
        self.budget, self.unit_of_op = budget, problem.graph.unit_of_op
        self.devices, self.score = np.array(devices, np.int32), score
        self._moved: tuple[np.ndarray, Score] | None = None
        self._simulator = None
        if budget.simulate is None and cheap(problem):
            from simdev.sim import Simulator

            self._simulator = Simulator(problem, Placement(self.devices[self.unit_of_op]))

    def move(self, units: np.ndarray, targets: np.ndarray, *, below: int | None = None) -> Score:
        """The score after ``units`` int ``(k,)`` moved to ``targets`` int ``(k,)``. ``below``: see
        :meth:`Budget.evaluate`."""
        moved = self.devices.copy()
        moved[units] = targets
        if self._simulator is None:
            score = self.budget.evaluate(moved[self.unit_of_op], below=below)
        else:
            score = self.budget.move(self._simulator, units, targets, below=below)
        self._moved = moved, score
        return score

    def accept(self) -> None:
        """Keep the move."""
        assert self._moved is not None
        (self.devices, self.score), self._moved = self._moved, None
        if self._simulator is not None:
            self._simulator.accept()

    def undo(self) -> None:
        """Take the move back."""
        self._moved = None
        if self._simulator is not None:
            self._simulator.undo()
