"""The rule of Megatron-LM (Narayanan et al. 2021, section 3): tensor parallelism up to the accelerators of a node, then
pipeline stages until the model fits, data parallelism with all other ranks (takeaways 1 and 2), and the microbatch that
takes the least time (takeaway 3). Activations are recomputed (section 3.5).
"""

from simdev.baselines.planners._rules import megatron_rule
from simdev.planners import planner


@planner(
    "megatron",
    version=1,
    family="rule",
    source="Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021, section 3",
    searches=True,
    departures=(
        "the microbatch is chosen by simulation, not by equation 1 with measured passes",
        "replicas are sharded (dp_shard) where the model can be, as with today's distributed optimizer",
        "1F1B without interleaving",
    ),
)
def megatron(job, *, rng, budget):
    return megatron_rule(job, budget)
