"""A descent over whole modules and groups: few evaluations that move much."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from simdev.baselines._search import groups, modules, rank_of_unit, units_by_group
from simdev.baselines._units import fastest_ns
from simdev.placers.score import Score
from simdev.problem.problem import Problem

PART = 6  # a search gives the descent one in so many of its evaluations


def descended(
    problem: Problem,
    allowed: np.ndarray,
    devices: np.ndarray,
    score: Score,
    score_of: Callable[[np.ndarray], Score | None],
) -> tuple[np.ndarray, Score]:
    """Unit devices int32 ``(units,)`` and their score, after each module, and then each group of units that do the same
    work for a layer, was tried on every accelerator, longest first; a shorter step is kept at once.

    ``devices``, ``score``: where the descent begins. It ends when a whole round of modules and then of groups keeps
    nothing, or when ``score_of`` answers None. Units stay where ``allowed`` bool ``(D, units)`` forbids a device.
    """
    rank, work = rank_of_unit(problem), fastest_ns(problem)
    targets = problem.topology.accelerators or tuple(np.flatnonzero(allowed.any(axis=1)).tolist())
    for units, ptr in (modules(problem, rank), units_by_group(groups(problem, rank)[0], rank)):
        sets = [units[first:stop] for first, stop in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True)]
        sets.sort(key=lambda members: -int(work[members].sum()))
        place = kept = 0  # the set that is tried, and the one after which nothing was kept for a round
        while place < kept + len(sets):
            members = sets[place % len(sets)]
            for device in targets:
                moving = members[allowed[device, members] & (devices[members] != device)]
                if not len(moving):
                    continue
                moved = devices.copy()
                moved[moving] = device
                found = score_of(moved)
                if found is None:
                    return devices, score
                if found < score:
                    devices, score, kept = moved, found, place
            place += 1
    return devices, score
