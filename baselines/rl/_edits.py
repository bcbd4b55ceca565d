"""Edits of a placement of groups: a set of groups that belong together moves to another device."""

from __future__ import annotations

import numpy as np

from simdev.analysis.levels import fastest_durations
from simdev.baselines._search import module_groups
from simdev.baselines._units import fastest_ns
from simdev.baselines.rl._grouped import GroupedProblem

MISSES = 20  # draws without an edit after which draw_edit() gives up
EVEN = 0.3  # share of the uniform distribution among the devices that an edit draws from


class Edits:
    """Draws edits of the placements of one problem.

    An edit has one of three sizes, drawn first: a group alone, the groups of a module of the source model at some
    depth, or a run of groups in running order; with ``wide=False`` always a group alone. The groups of the set that
    are on the device of the drawn group move; those that may not go to the new device stay.
    """

    def __init__(self, grouped: GroupedProblem, wide: bool = True):
        self.count = grouped.n_groups
        self.allowed = grouped.inputs.allowed[: self.count]
        self.modules = _modules(grouped) if wide else []
        self.runs = wide and self.count > 2
        self.free = np.flatnonzero(self.allowed.sum(axis=1) > 1)

    def draw(
        self, rng: np.random.Generator, actions: np.ndarray, preference: np.ndarray | None = None
    ) -> tuple[np.ndarray, int] | None:
        """Groups int ``(k,)`` of ``actions`` int ``(G,)``, and their new device; None if no edit was found.

        The device is drawn from the mean over the groups of ``preference``, log-probabilities float ``(G, D)``, mixed
        with the uniform distribution; without a preference, uniformly.
        """
        for _ in range(MISSES if len(self.free) else 0):
            pivot = int(rng.choice(self.free))
            groups = self._around(rng, pivot)
            groups = groups[actions[groups] == actions[pivot]]
            chance = self._chance(groups, pivot, actions, preference)
            device = int(np.searchsorted(np.cumsum(chance), rng.random() * chance.sum(), side="right"))
            groups = groups[self.allowed[groups, device]]
            if len(groups):
                return groups, device
        return None

    def _around(self, rng: np.random.Generator, pivot: int) -> np.ndarray:
        size = int(rng.integers(1 + len(self.modules) + self.runs))
        if size == 0:
            return np.array([pivot])
        if size <= len(self.modules):
            label = self.modules[size - 1]
            return np.flatnonzero(label == label[pivot])
        length = 2 ** int(rng.integers(1, self.count.bit_length()))
        low = max(0, pivot - int(rng.integers(length)))
        return np.arange(low, min(self.count, low + length))

    def _chance(self, groups, pivot, actions, preference) -> np.ndarray:
        """float ``(D,)``: how often each device is drawn; never the one where the groups are."""
        other = self.allowed[pivot].astype(float)
        other[actions[pivot]] = 0.0
        even = other / other.sum()
        if preference is None:
            return even
        mean = np.where(other > 0, preference[groups].mean(axis=0), -np.inf)
        wanted = np.exp(mean - mean.max()) * other
        return EVEN * even + (1 - EVEN) * wanted / wanted.sum()


def _modules(grouped: GroupedProblem) -> list[np.ndarray]:
    """Labels int ``(G,)`` of the groups at each depth of the module tree at which some groups share a module.

    The module of a group is that of its longest unit.
    """
    time = fastest_ns(grouped.problem)
    order = np.lexsort((np.arange(len(time)), -time, grouped.group))
    longest = order[np.searchsorted(grouped.group[order], np.arange(grouped.n_groups))]
    labels = [module[longest] for module in module_groups(grouped.problem)]
    return [label for label in labels if 1 < len(np.unique(label)) < grouped.n_groups]


def first_placements(grouped: GroupedProblem) -> np.ndarray:
    """int32 ``(2, G)``: all groups on one device; then an even share of the time, in running order, for each.

    The device is the one that may take most groups, and of those the fastest. Padding is included.
    """
    allowed, count = grouped.inputs.allowed, grouped.n_groups
    many = allowed[:count].sum(axis=0)
    speed = grouped.inputs.devices[:, 1]
    best = min(np.flatnonzero(many == many.max()), key=lambda device: (speed[device], device))
    single = np.where(allowed[:, best], best, np.argmax(allowed, axis=1))
    stages = len(grouped.devices)
    op_group = grouped.group[grouped.problem.graph.unit_of_op]
    time = np.bincount(op_group, fastest_durations(grouped.problem).astype(float), count)
    middle = (np.cumsum(time) - time / 2) / max(1.0, time.sum())
    even = single.copy()
    stage = np.minimum(stages - 1, (middle * stages).astype(int))
    fits = allowed[np.arange(count), stage]
    even[:count][fits] = stage[fits]
    return np.stack([single, even]).astype(np.int32)
