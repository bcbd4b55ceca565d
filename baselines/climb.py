"""A climb by single random moves: the control that every searching placer has to beat."""

from __future__ import annotations

import numpy as np

from simdev.baselines._search import starts
from simdev.baselines._units import choices
from simdev.baselines._walk import Walk
from simdev.placers.placer import placer
from simdev.problem.placement import Placement

MISSES = 1000  # draws without a move after which the climb ends


@placer("climb", version=2, family="search", searches=True, source="a control, not a published method")
def climb(problem, *, rng, budget):
    """Start with all units on one device, and move one random unit to one random device at a time.

    If one device cannot hold them all, the start is a contiguous split over all devices, by time or, where a device has
    no room for the parameters of its part, by parameters as well. A move that does not make the placement worse is
    kept: fewer bytes over memory count first, then the step time. Units move to accelerators, and also to hosts as long
    as the placement does not fit. Nothing else is tried.
    """
    allowed, hosts = choices(problem), choices(problem, hosts=True)
    devices, split = starts(problem, allowed, room=True)
    if not budget.open:
        return Placement.of_units(problem, devices)
    score = budget.evaluate(devices[problem.graph.unit_of_op])
    if not score.fits and budget.open:
        other = budget.evaluate(split[problem.graph.unit_of_op])
        devices, score = (split, other) if other < score else (devices, score)
    walk = Walk(problem, budget, devices, score)
    best, misses = walk.devices, 0  # draws in a row without a device to go to
    while budget.open and misses < MISSES:
        unit = int(rng.integers(problem.graph.n_units))
        possible = (allowed if walk.score.fits else hosts)[:, unit]
        options = np.flatnonzero(possible & (np.arange(len(possible)) != walk.devices[unit]))
        misses = 0 if len(options) else misses + 1
        if misses:
            continue
        target = int(rng.choice(options))
        below = walk.score.step_ns + 1 if walk.score.fits else None
        before = walk.score
        if walk.move(np.array([unit]), np.array([target]), below=below) <= before:
            walk.accept()
            best = walk.devices if walk.score < before else best
        else:
            walk.undo()
    return Placement.of_units(problem, best)
