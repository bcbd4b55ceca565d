"""Hill climbing by moves of an op, of a module, or of a run of ops to another device."""

from __future__ import annotations

import numpy as np

from simdev.baselines._search import Incumbent, atoms, draw_device, first_of_unit, module_groups, weight_of_unit
from simdev.placers.budget import Share
from simdev.placers.score import Score
from simdev.problem.problem import Problem

MISSES = 20  # draws without a move after which draw() gives up


class Neighbourhood:
    """Draws neighbours of a unit placement.

    The scale of a move is drawn first: a module at some depth of the module tree, a run of neighbours in topological
    order, or one unit. Parameters move with the unit that reads them first.
    """

    def __init__(self, problem: Problem, allowed: np.ndarray):
        self.allowed, self.modules, self.atoms = allowed, module_groups(problem), atoms(problem)
        self.order = np.argsort(first_of_unit(problem), kind="stable")
        self.rank = np.empty_like(self.order)
        self.rank[self.order] = np.arange(len(self.order))
        self.cumulative = np.cumsum(weight_of_unit(problem))

    def draw(self, rng: np.random.Generator, devices: np.ndarray) -> np.ndarray | None:
        """A neighbour of ``devices`` int32 ``(units,)``, or None if no move was found."""
        for _ in range(MISSES):
            pivot = self.pivot(rng)
            units = self.members(rng, pivot, devices)
            target = draw_device(rng, self.allowed, units, int(devices[units[0]]))
            if target >= 0:
                neighbour = devices.copy()
                neighbour[units] = target
                return neighbour
        return None

    def pivot(self, rng: np.random.Generator) -> int:
        """A unit, drawn by its time."""
        pivot = int(np.searchsorted(self.cumulative, rng.random() * self.cumulative[-1], side="right"))
        return min(pivot, len(self.cumulative) - 1)

    def members(self, rng: np.random.Generator, pivot: int, devices: np.ndarray) -> np.ndarray:
        """The units that move with ``pivot``: those of its module or run that are on its device."""
        scale = int(rng.integers(len(self.modules) + 2))
        if scale < len(self.modules):
            members = np.flatnonzero(self.modules[scale] == self.modules[scale][pivot])
        elif scale == len(self.modules):
            length = 2 ** int(rng.integers(1, max(2, len(devices).bit_length())))
            low = max(0, int(self.rank[pivot]) - int(rng.integers(length)))
            members = self.order[low : low + length]
        else:
            members = np.array([pivot])
        members = self._whole_atoms(members)
        return members[devices[members] == devices[pivot]]

    def _whole_atoms(self, units: np.ndarray) -> np.ndarray:
        """``units`` and all units that always move with them, each once."""
        moving = np.zeros(len(self.atoms), bool)
        moving[self.atoms[units]] = True
        return np.flatnonzero(moving[self.atoms])


def climb(
    incumbent: Incumbent,
    neighbourhood: Neighbourhood,
    rng: np.random.Generator,
    start: np.ndarray,
    score: Score,
    share: Share,
) -> None:
    """Spend ``share`` of the budget on moves from ``start``, a unit placement with ``score``.

    Each move that does not make the placement worse is taken. The climb ends earlier if no move can be drawn.
    """
    budget, current = incumbent.budget, start
    last, end = budget.used + share.evaluations, budget.elapsed + share.seconds
    while budget.open and budget.used < last and budget.elapsed < end:
        neighbour = neighbourhood.draw(rng, current)
        if neighbour is None:
            return
        found = incumbent.evaluate(neighbour[None], below=score.step_ns + 1 if score.fits else None)[0]
        if found <= score:
            current, score = neighbour, found
