"""The largest load by integer programming: contiguous stages, or any split."""

from __future__ import annotations

import numpy as np

from simdev.baselines._load import place_by_load
from simdev.exact.contract import contract
from simdev.exact.dp import Split, linear_split
from simdev.exact.merge import merge_cheapest, merge_dominated
from simdev.exact.throughput import best_split_of
from simdev.placers.placer import placer


@placer(
    "ip-throughput",
    version=3,
    family="exact",
    repeatable=False,
    searches=True,
    defaults={"contiguous": False, "seconds": 20.0, "classes": 60, "solver": "auto"},
    needs=("ortools",),
    source="Tarnawski et al., NeurIPS 2020, section 4",
)
def ip_throughput(problem, *, rng, budget, contiguous, seconds, classes, solver):
    """Find the split of least largest load, ``contiguous`` or any (default). It optimises throughput, not step time.

    Larger graphs are merged to ``classes`` classes: merges that lose nothing come first, then the cheapest neighbours,
    which may lose the optimum. The best linear split is the start. ``solver`` is highs, scip, cp-sat, gurobi or auto
    (Gurobi if there is a licence, HiGHS otherwise). It stops after ``seconds``: a row without a proof by then need not
    repeat on another host.
    """

    def solve(load):
        fine = contract(load)
        merged_free = merge_dominated(fine)
        few = merge_cheapest(merged_free, classes)
        start = linear_split(load, few)
        found = best_split_of(
            load,
            few,
            contiguous=contiguous,
            seconds=min(seconds, 0.5 * budget.seconds),
            solver=solver,
            start=start.processor,
            seed=int(rng.integers(2**31)),
        )
        split, linear = Split(np.asarray(found.processor), found.largest, 0, 0), linear_split(load, fine)
        if linear.largest < split.largest:
            return linear, "linear"
        merged = f"coarsened to {few.n_classes} classes, " if few.n_classes < merged_free.n_classes else ""
        return split, merged + ("optimal" if found.status == "optimal" else f"gap {found.gap:.1%}")

    return place_by_load(problem, budget, solve)
