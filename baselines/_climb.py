"""Hill climbing by moves of an op, of a module, or of a run of ops to another device."""

from __future__ import annotations

import numpy as np

from simdev.baselines._search import Record, atoms, draw_device, first_of_unit, module_groups, weight_of_unit
from simdev.problem.problem import Problem

MISSES = 20  # proposals in a row that change nothing before giving up a turn


class Neighbourhood:
    """Draws neighbours of a unit placement. The scale of a move is drawn first: a module at some depth of the module
    tree, a run of neighbours in topological order, or one unit, each with the parameters that it reads first."""

    def __init__(self, problem: Problem, allowed: np.ndarray):
        self.allowed, self.modules, self.atoms = allowed, module_groups(problem), atoms(problem)
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
            members = np.array([pivot])
        members = self._whole_atoms(members)
        return members[devices[members] == devices[pivot]]

    def _whole_atoms(self, units: np.ndarray) -> np.ndarray:
        """``units`` and what moves with them, each once."""
        moving = np.zeros(len(self.atoms), bool)
        moving[self.atoms[units]] = True
        return np.flatnonzero(moving[self.atoms])


def climb(
    record: Record, neighbourhood: Neighbourhood, rng: np.random.Generator, start: np.ndarray, value, most: int
) -> None:
    """Spend ``most`` evaluations on moves from ``start``, which has ``value``; equal or better ones are taken."""
    current = start
    for _ in range(most):
        neighbour = neighbourhood.draw(rng, current) if record.budget.left else None
        if neighbour is None:
            return
        overflow, step_ns = value
        found = record.evaluate(neighbour[None], below=step_ns + 1 if overflow == 0 else None)[0]
        if found <= value:
            current, value = neighbour, found
