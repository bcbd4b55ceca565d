"""Portfolio: the best of the constructive placers, improved by local search, all from one budget."""

from __future__ import annotations

from simdev.baselines._guided import search_from
from simdev.baselines._members import constructed, copied
from simdev.placers.placer import placer

CLIMBS = 3


@placer("portfolio", version=6, family="search", searches=True)
def portfolio(problem, *, rng, budget):
    """Evaluate the placement of each constructive placer, most promising first, then improve the best ones.

    A contiguous split over all devices is evaluated, too. If a score is the steady time of microbatches, the pipelines
    of ``dpl`` and ``pipedream`` (without replicas) come first, because the other members shorten one step. Before them,
    data parallelism and the first candidate of ``hybrid`` are evaluated: one of these is the answer if the search does
    not beat it, but no move changes it. The search and its moves are those of ``local-search``, from the three best
    placements without replicas. A member gets no evaluations of its own, so members that check memory with the
    simulator skip that check. Members that cannot handle the problem, or are not installed, are left out.
    """
    for placement in copied(problem, rng, budget.microbatches):
        if budget.open:
            budget.evaluate_placement(placement)
    found = search_from(problem, budget, rng, constructed(problem, rng, budget.microbatches), CLIMBS)
    best = budget.best_placement
    return best if best is not None and best.replica_of is not None else found
