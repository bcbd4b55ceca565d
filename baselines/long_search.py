"""Long search: for large budgets, from the constructive placers or from the best placements of a result folder."""

from __future__ import annotations

from simdev.baselines._coarse import Coarse, Fine
from simdev.baselines._guided import search_from
from simdev.baselines._members import constructed
from simdev.placers.placer import placer
from simdev.placers.starts import stored_starts


@placer(
    "long-search",
    version=12,
    family="search",
    searches=True,
    defaults={"starts": "", "climbs": 3, "coarse": True},
    source="moves along the critical path after Grabowski, Wodecki, Computers & Operations Research 31(11), 2004",
)
def long_search(problem, *, rng, budget, starts, climbs, coarse):
    """Place groups of ops with half of the budget, improve the result and the ``climbs`` best starts with a third of
    the rest, and then the best placement of all by late acceptance; see ``local-search`` and ``late-acceptance``.

    The starts are the placements of the constructive placers or, if ``starts`` names result folders with ``+`` between
    them, the best placements that each folder holds for the same graph and costs, under any rules.

    The coarse search (without ``coarse`` there is none) puts each group of the best start on one device and anneals. A
    group is the ops of a layer and phase that produce gradients of one weight, or those that do not; large groups have
    eight parts. With less than 1000 evaluations, there is neither a coarse search nor late acceptance.

    Afterwards, a move takes units to another device: any unit, a module, a run of ops, a layer with its forward,
    backward and update ops, what a layer does in one phase, units that are connected, units around an op or a transfer
    of the critical path or around a tensor that is cut, two groups or layers that change places, or a run of what a
    group does on one device. Single moves, from the best start and from one device, compete with the other moves. What
    has gained more lately is drawn more often. A move that makes nothing worse is taken. After 600 evaluations without
    a new best, a few moves are taken blindly. Every device is open: a fiftieth of the moves at first goes to hosts, and
    hosts may take units that they run at most five times slower at any time; while the placement does not fit, layers
    that need much memory and little time, such as embedding tables, go there like anywhere. Under the default rules,
    the simulator computes only what a move changes. If the placement brings its order of ops (rules ``priority``), a
    third of the moves shift ops in the order. Each start is then tried with the order by longest paths and with the
    order that ``fifo`` follows. If the parameters nearly fill the memory, there is no late acceptance. These moves then
    go on, half of the time by annealing, because only they exchange units of two devices.
    """
    stored = (found for folder in starts.split("+") for found in stored_starts(folder, problem))
    given = stored if starts else constructed(problem, rng, budget.microbatches)
    return search_from(problem, budget, rng, given, climbs, Fine, Coarse if coarse else None, fresh=not starts)
