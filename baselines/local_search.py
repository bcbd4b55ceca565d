"""Local search: hill climbing with the simulator as the judge."""

from __future__ import annotations

from simdev.baselines._guided import search_from
from simdev.baselines._search import starts
from simdev.baselines._units import choices
from simdev.placers.placer import placer
from simdev.problem.placement import Placement


@placer("local-search", version=3, family="search", searches=True)
def local_search(problem, *, rng, budget):
    """Improve a single device and a contiguous split by moves, and then the better result.

    The search and its moves are those of ``long-search``, without the placements of other placers and without the
    search by groups. A single device and the split get a quarter of the budget each.
    """
    begin = [Placement.of_units(problem, devices) for devices in starts(problem, choices(problem))]
    return search_from(problem, budget, rng, begin, 2)
