"""The contiguous optimum of the largest load, by dynamic programming over ideals."""

from __future__ import annotations

from simdev.baselines._load import place_by_load
from simdev.errors import Unsupported
from simdev.exact.contract import contract
from simdev.exact.dp import TooManyPairs, contiguous_split, linear_split
from simdev.exact.merge import merge_cheapest, merge_dominated
from simdev.placers.placer import placer

SOURCE = "Tarnawski et al., NeurIPS 2020, section 5"
TARGETS = (1600, 800, 400, 300, 200, 150, 100, 75, 50, 35, 20, 12)  # classes left when there are too many ideals
LARGEST = 0.6  # part of the pairs left that one try may visit


@placer(
    "dp", version=3, family="exact", searches=True, defaults={"ideals": 40_000, "pairs": 250_000_000}, source=SOURCE
)
def dp(problem, *, rng, budget, ideals, pairs):
    """Contiguous stages of least largest load: the best throughput of a pipeline, not the best step time.

    Classes that an optimal split keeps together are merged first. While more than ``ideals`` ideals remain, or the
    program visits too many pairs of nested ideals, the cheapest neighbours are merged too, which may lose the optimum.
    All tries together visit at most ``pairs``, which takes about 20 seconds; a try that uses up six tenths of those
    left gives way to one with fewer classes. The result is the better of that split and the best split of a linear
    order of all classes, and the row's ``proof`` names it: ``optimal``, ``coarsened`` or ``linear``. The seed has no
    effect.
    """
    left = pairs

    def solve(load):
        nonlocal left
        classes = contract(load)
        finest = linear_split(load, classes)
        coarse = merge_dominated(classes)
        for target in (coarse.n_classes, *(t for t in TARGETS if t < coarse.n_classes)):
            try:
                found = contiguous_split(load, merge_cheapest(coarse, target), ideals, int(LARGEST * left))
            except TooManyPairs as error:
                left = max(0, left - error.pairs)
                continue
            except Unsupported:
                continue
            left -= found.pairs
            if finest.largest < found.largest:
                return finest, "linear"
            return found, "optimal" if target == coarse.n_classes else f"coarsened to {target} classes"
        return finest, "linear"

    return place_by_load(problem, budget, solve)


@placer("dpl", version=1, family="exact", searches=True, source=f"{SOURCE} (DPL)")
def dpl(problem, *, rng, budget):
    """Contiguous stages of least largest load along one depth-first order of all classes. The seed has no effect."""
    return place_by_load(problem, budget, lambda load: (linear_split(load, contract(load)), "linear"))
