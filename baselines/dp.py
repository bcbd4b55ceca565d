"""The contiguous optimum of the largest load, by dynamic programming over ideals."""

from __future__ import annotations

from simdev.baselines._load import place_by_load
from simdev.errors import Unsupported
from simdev.exact.contract import contract
from simdev.exact.dp import contiguous_split, linear_split
from simdev.exact.merge import merge_cheapest, merge_dominated
from simdev.placers.placer import placer

SOURCE = "Tarnawski et al., NeurIPS 2020, section 5"
TARGETS = (1600, 800, 400, 300, 200, 150, 100, 75, 50, 35, 20, 12)  # classes left when there are too many ideals


@placer("dp", version=2, family="exact", searches=True, defaults={"ideals": 40_000}, source=SOURCE)
def dp(problem, *, rng, budget, ideals):
    """Contiguous stages of least largest load: the best throughput of a pipeline, not the best step time.

    Classes that an optimal split keeps together are merged first. While more than ``ideals`` ideals remain, the
    cheapest neighbours are merged too, which may lose the optimum. The result is the better of that split and the best
    split of a linear order of all classes, and the row's ``proof`` names it: ``optimal``, ``coarsened`` or ``linear``.
    The seed has no effect.
    """

    def solve(load):
        classes = contract(load)
        finest = linear_split(load, classes)
        coarse = merge_dominated(classes)
        for target in (coarse.n_classes, *(t for t in TARGETS if t < coarse.n_classes)):
            try:
                found = contiguous_split(load, merge_cheapest(coarse, target), ideals)
            except Unsupported:
                continue
            if finest.largest < found.largest:
                return finest, "linear"
            return found, "optimal" if target == coarse.n_classes else f"coarsened to {target} classes"
        return finest, "linear"

    return place_by_load(problem, budget, solve)


@placer("dpl", version=1, family="exact", searches=True, source=f"{SOURCE} (DPL)")
def dpl(problem, *, rng, budget):
    """Contiguous stages of least largest load along one depth-first order of all classes. The seed has no effect."""
    return place_by_load(problem, budget, lambda load: (linear_split(load, contract(load)), "linear"))
