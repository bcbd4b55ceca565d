"""Spreading at random and in turn, which any placer should beat."""

from __future__ import annotations

import numpy as np

from simdev.baselines._units import choices
from simdev.placers.placer import placer
from simdev.problem.placement import Placement


@placer("random", version=1, family="spread", memory_aware=False)
def random_placement(problem, *, rng, budget):
    """Each placement unit on a device drawn uniformly from the accelerators that support it."""
    allowed = choices(problem)
    count = allowed.sum(axis=0)
    turn = rng.integers(0, count)
    return Placement.of_units(problem, _nth_allowed(allowed, turn))


@placer("round-robin", version=1, family="spread", memory_aware=False)
def round_robin(problem, *, rng, budget):
    """Placement units in topological order on the accelerators in turn, skipping those that do not support the unit."""
    allowed = choices(problem)
    return Placement.of_units(problem, _nth_allowed(allowed, np.arange(allowed.shape[1]) % allowed.sum(axis=0)))


def _nth_allowed(allowed, turn):
    return np.argmax(np.cumsum(allowed, axis=0) == turn + 1, axis=0)
