"""Local search: hill climbing with the simulator as the judge."""

from __future__ import annotations

import numpy as np

from simdev.baselines._climb import Neighbourhood, climb
from simdev.baselines._guided import search_from
from simdev.baselines._order import ordered
from simdev.baselines._search import Incumbent, starts
from simdev.baselines._units import choices
from simdev.placers.placer import placer
from simdev.problem.placement import Placement


@placer("local-search", version=2, family="search", searches=True)
def local_search(problem, *, rng, budget):
    """Start from the better of a single device and a contiguous split, and take every move that is not worse.

    A move takes an op, a module, or a run of ops in topological order to another device, with the parameters that they
    read first. Placements are compared by bytes over memory, then by step time. If the placement brings its order of
    ops (rules ``priority``), the moves are those of ``long-search``.
    """
    allowed = choices(problem)
    begin = starts(problem, allowed)
    if ordered(problem) and budget.open:
        return search_from(problem, budget, rng, [Placement.of_units(problem, devices) for devices in begin], 1)
    best = Incumbent(problem, budget, begin[0])
    if budget.open:
        scores = best.evaluate(np.stack(begin))
        climb(best, Neighbourhood(problem, allowed), rng, best.devices, min(scores), budget.share(1))
    return Placement.of_units(problem, best.devices)
