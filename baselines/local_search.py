"""Local search: hill climbing with the simulator as the judge."""

from __future__ import annotations

from simdev.baselines._guided import Grouped, Guided, search_from
from simdev.baselines._order import ordered
from simdev.baselines._search import starts
from simdev.baselines._units import choices
from simdev.placers.placer import placer
from simdev.problem.placement import Placement


@placer("local-search", version=8, family="search", searches=True)
def local_search(problem, *, rng, budget):
    """Improve a single device and a contiguous split with room for parameters by moves, and then the best result.

    The search and its moves are those of ``long-search``, without the placements of other placers, without the search
    by groups and without annealing. If there is an evaluation for each unit (a quarter of one, if less than 1000 are
    left), single moves compete with the other moves: from one device, they get an eighth of the budget. Single moves
    draw each unit once, long ones rather early, before any unit is drawn again. A third of the rest is a race, in which
    the better half of the searches stays in each round. The best placement gets what is left, in eight parts; a search
    that gains less than 0.1 % in its part gives way to the next one. No placement is simulated twice. A search of few
    units thus tries all single moves, then pairs of moves, and ends when it finds nothing new. Moves after which a
    device has too little memory for its parameters are drawn again. If the placement brings its order of ops (rules
    ``priority``), all moves are of groups, and half of what the race leaves is annealing.
    """
    begin = [Placement.of_units(problem, devices) for devices in starts(problem, choices(problem), room=True)]
    return search_from(problem, budget, rng, begin, 2, Grouped if ordered(problem) else Guided)
