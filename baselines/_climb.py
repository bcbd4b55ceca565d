"""Hill climbing by moves of one unit, of a module's units, or of a run of units, to another device."""

from __future__ import annotations

import numpy as np

from simdev.baselines._search import Record, draw_device, first_of_unit, module_groups, weight_of_unit
from simdev.problem import Problem

MISSES = 20  # proposals in a row that change nothing before giving up a turn


class Neighbourhood:
    """Draws neighbours of a unit placement. The scale of a move is drawn first: a module at some depth of the module
    tree, a run of neighbouring units in topological order, or one unit."""

    def __init__(self, problem: Problem, allowed: np.ndarray):
        self.allowed, self.modules = allowed, module_groups(problem)
        self.order = np.argsort(first_of_unit(problem), kind="stable")
        self.rank = np.empty_like(self.order)
        self.rank[self.order] = np.arange(len(self.order))
        self.cumulative = np.cumsum(weight_of_unit(problem))

    def draw(self, rng: np.random.Generator, devices: np.ndarray) -> np.ndarray | None:
        """A neighbour of ``devices`` int32 ``(units,)``, or None where none was found."""
        for _ in range(MISSES):
            pivot = int(np.searchsorted(self.cumulative, rng.random() * self.cumulative[-1], side="right"))
            units = self._around(rng, min(pivot, len(devices) - 1), devices)
            target = draw_device(rng, self.allowed, units, int(devices[units[0]]))
            if target >= 0:
                neighbour = devices.copy()
                neighbour[units] = target
                return neighbour
        return None

    def _around(self, rng, pivot: int, devices: np.ndarray) -> np.ndarray:
        """The units that move with ``pivot``: those of its module or run that are on its device."""
        scale = int(rng.integers(len(self.modules) + 2))
        if scale < len(self.modules):
            members = np.flatnonzero(self.modules[scale] == self.modules[scale][pivot])
        elif scale == len(self.modules):
            length = 2 ** int(rng.integers(1, max(2, len(devices).bit_length())))
            low = max(0, int(self.rank[pivot]) - int(rng.integers(length)))
            members = self.order[low : low + length]
        else:
            return np.array([pivot])
        members = members[devices[members] == devices[pivot]]
        return members if len(members) else np.array([pivot])


def climb(record: Record, neighbourhood: Neighbourhood, rng: np.random.Generator) -> None:
    """Spend what is left of the budget on moves from ``record.best``; equal or better ones are taken."""
    if record.value is None and record.budget.left:
        record.evaluate(record.best[None])
    current, value = record.best, record.value
    while record.budget.left:
        neighbour = neighbourhood.draw(rng, current)
        if neighbour is None:
            return
        found = record.evaluate(neighbour[None])[0]
        if found <= value:
            current, value = neighbour, found
