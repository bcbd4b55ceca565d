"""The costs of PipeDream's planner (Narayanan et al. 2019) with equally many replicas on all stages. A stage takes the
larger of its time with the exchange of its parameters, and of the activations that enter or leave it.

The published dynamic program itself, with replicas per stage, is :func:`simdev.exact.pipedream.plan`.
"""

import numpy as np

from simdev.baselines.parallel._stages import best_by_stages
from simdev.planners import planner


@planner(
    "pipedream-uniform",
    version=1,
    family="dynamic",
    source="Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019, section 3.1",
    departures=(
        "all stages have the same number of replicas, because a plan has one mesh",
        "1F1B with one flush per step, so that parameters are exchanged once per step and stored once; PipeDream "
        "exchanges them after each minibatch and keeps several versions",
        "microbatch and recomputation are the least; the paper's minibatch is given",
    ),
)
def pipedream_uniform(job, *, rng, budget):
    choices = [
        choice
        for choice in job.choices()
        if choice.mesh["tp"] == 1 and choice.microbatch == min(job.microbatches) and choice.recompute == "none"
    ]

    def stage_ns(known):
        largest = np.maximum(known.sent_ns, np.concatenate([[0.0], known.sent_ns[:-1]]))
        return np.maximum(known.of("pass_ns") + known.exchange_ns, 2 * largest[:, None])

    def in_progress(known):
        return np.minimum(np.arange(known.stages, 0, -1), known.microbatches)

    return best_by_stages("pipedream-uniform", job, budget, choices, stage_ns, in_progress)
