"""Hybrid parallelism of Tarnawski et al. 2020: a dynamic program over contiguous layers, each stage with replicas of
its own, minimises the largest load; a load is the time of the stage and of its transfers (section 5 and appendix).
Neither tensor parallelism nor recomputation is used.
"""

from simdev.baselines.planners._stages import bottleneck_plan, first_that_fits, pipelines, with_borders
from simdev.planners import planner


@planner(
    "dp-hybrid",
    version=1,
    family="dynamic",
    source="Tarnawski et al., Efficient Algorithms for Device Placement of DNN Graph Operators, NeurIPS 2020, "
    "section 5 and appendix (replication)",
    departures=(
        "states are prefixes of the layers; the paper's are ideals of an op graph, and its devices may also be CPUs",
        "the replicas of a stage divide each microbatch; in the paper they take samples in turn",
        "as in the paper, a stage's memory holds one microbatch; where the captured program then does not fit, the "
        "limit is lowered",
        "the sequences of a microbatch are enumerated",
    ),
)
def dp_hybrid(job, *, rng, budget):
    plan = bottleneck_plan(with_borders, lambda stages, microbatches: 1)
    return first_that_fits("dp-hybrid", job, budget, pipelines(job, budget, tensor=False, recompute=False), plan)
