"""The loads of Tarnawski et al. 2020 with equally many replicas on all stages (hybrid parallelism): the largest load of
a stage, its transfers included, divided among its replicas.
"""

import numpy as np

from simdev.baselines.parallel._stages import best_by_stages
from simdev.planners import planner


@planner(
    "dp-hybrid-uniform",
    version=1,
    family="dynamic",
    source="Tarnawski et al., Efficient Algorithms for Device Placement of DNN Graph Operators, NeurIPS 2020, "
    "section 5 and appendix (replication)",
    departures=(
        "all stages have the same number of replicas, because a plan has one mesh",
        "the memory of a stage holds one microbatch, as in the paper; plans whose captured program does not fit are "
        "skipped",
        "the microbatch is enumerated; recomputation is not part of the paper and is the least",
    ),
)
def dp_hybrid_uniform(job, *, rng, budget):
    choices = [choice for choice in job.choices() if choice.mesh["tp"] == 1 and choice.recompute == "none"]

    def stage_ns(known):
        return known.of("pass_ns") + known.border_ns + known.exchange_ns

    return best_by_stages("dp-hybrid-uniform", job, budget, choices, stage_ns, lambda known: np.ones(known.stages))
