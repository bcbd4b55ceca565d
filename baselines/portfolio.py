"""Portfolio: the best of the constructive placers, improved by local search, all from one budget."""

from __future__ import annotations

import numpy as np

from simdev.baselines._climb import Neighbourhood, climb
from simdev.baselines._guided import search_from
from simdev.baselines._members import constructed
from simdev.baselines._order import ordered
from simdev.baselines._search import Incumbent, starts
from simdev.baselines._units import choices
from simdev.placers.placer import placer
from simdev.placers.score import Score
from simdev.problem.placement import Placement

CLIMBS = 3


@placer("portfolio", version=2, family="search", searches=True)
def portfolio(problem, *, rng, budget):
    """Evaluate the placement of each constructive placer, most promising first, then climb from the best.

    The climb uses the moves of ``local-search``: each of the three best placements gets a sixth of the remaining
    budget, and the best of all the rest. If no placement fits, or if the placement brings its order of ops, the moves
    are those of ``long-search``. A member gets no evaluations of its own, so members that check memory with the
    simulator skip that check. Members that cannot handle the problem, or are not installed, are left out.
    """
    if ordered(problem):
        return search_from(problem, budget, rng, constructed(problem, rng), CLIMBS)
    allowed = choices(problem)
    best = Incumbent(problem, budget, starts(problem, allowed)[0])
    tried: dict[Score, np.ndarray] = {}  # for equal scores, the first placement
    unit_first = np.unique(problem.graph.unit_of_op, return_index=True)[1]
    for found in constructed(problem, rng) if budget.open else ():
        devices = found.devices[unit_first]
        tried.setdefault(best.evaluate(devices[None])[0], devices)
        if not budget.open:
            break
    if best.score is not None and budget.open and not best.score.fits:
        begin = (Placement.of_units(problem, devices) for _, devices in sorted(tried.items()))
        return search_from(problem, budget, rng, begin, CLIMBS)
    neighbourhood, share = Neighbourhood(problem, allowed), budget.share(2 * CLIMBS)
    for score in sorted(tried)[:CLIMBS]:
        climb(best, neighbourhood, rng, tried[score], score, share)
    if best.score is not None:
        climb(best, neighbourhood, rng, best.devices, best.score, budget.share(1))
    return Placement.of_units(problem, best.devices)
