"""The costs and the memory of Piper (Tarnawski, Narayanan, Phanishayee 2021) with the same degrees on all stages: the
slowest stage is as quick as possible, and the memory holds all microbatches in progress.

The published dynamic program itself, with degrees per stage, is :func:`simdev.exact.piper.piper`.
"""

import numpy as np

from simdev.baselines.parallel._stages import best_by_stages
from simdev.planners import planner


@planner(
    "piper-uniform",
    version=1,
    family="dynamic",
    source="Tarnawski et al., Piper: Multidimensional Planner for DNN Parallelization, NeurIPS 2021, section 4",
    departures=(
        "all stages have the same data and tensor degrees, because a plan has one mesh; the dynamic program divides "
        "the layers",
        "recomputation is the same for all layers, so the knapsack is an enumeration",
        "the microbatch is enumerated too",
    ),
)
def piper_uniform(job, *, rng, budget):
    def stage_ns(known):
        return known.of("pass_ns") + known.border_ns + known.exchange_ns

    def in_progress(known):
        return np.minimum(np.arange(known.stages, 0, -1), known.microbatches)

    return best_by_stages("piper-uniform", job, budget, job.choices(), stage_ns, in_progress)
