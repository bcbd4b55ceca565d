"""PipeDream's planner (Narayanan et al. 2019) with replicas for each stage: a dynamic program over contiguous layers
makes the slowest stage as quick as possible. A stage takes the larger of its passes with the exchange of its
parameters, and of the activations that enter or leave it (section 3.1). Neither tensor parallelism nor recomputation
is used.

The published program itself, with its tables, is :func:`simdev.exact.pipedream.plan`.
"""

import numpy as np

from simdev.baselines.planners._stages import bottleneck_plan, first_that_fits, in_progress, pipelines
from simdev.planners import planner


@planner(
    "pipedream",
    version=1,
    family="dynamic",
    source="Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019, section 3.1",
    departures=(
        "1F1B with one flush per step, so that parameters are exchanged once per step and stored once; PipeDream "
        "exchanges them after each minibatch and keeps several versions",
        "the replicas of a stage divide each microbatch; in PipeDream they take whole minibatches in turn",
        "the sequences of a microbatch are enumerated; the paper's minibatch is given",
        "one level of machines: links between stages are those between neighbouring stages of the same size",
    ),
)
def pipedream(job, *, rng, budget):
    plan = bottleneck_plan(stage_ns, in_progress)
    return first_that_fits("pipedream", job, budget, pipelines(job, budget, tensor=False, recompute=False), plan)


def stage_ns(pipeline, option, last):
    """The larger of the passes with the share of what a step adds, and of a border in both directions."""
    costs = pipeline.costs[option]
    return np.maximum(costs.pass_ns[last] + costs.step_ns[last] / pipeline.microbatches, 2 * pipeline.sent_ns[option])
