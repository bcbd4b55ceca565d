"""The rules that people follow without a search of plans: data parallelism, with whole or with sharded replicas, and
the rule of Megatron-LM."""

from simdev.baselines.planners._rules import fully_sharded, megatron_rule, replicated
from simdev.planners import planner


@planner(
    "ddp",
    version=1,
    family="default",
    source="Li et al., PyTorch Distributed, VLDB 2020",
    searches=True,
    departures=("the paper chooses no microbatch: the largest that fits is taken",),
)
def ddp(job, *, rng, budget):
    """Data parallelism as in PyTorch's DistributedDataParallel (Li et al. 2020): every rank holds the whole model. The
    microbatch is the largest that fits, with as little recomputation as possible."""
    return replicated(job, budget)


@planner(
    "fsdp",
    version=2,
    family="default",
    source="Zhao et al., PyTorch FSDP, VLDB 2023",
    searches=True,
    departures=("the paper chooses no microbatch: the largest that fits is taken",),
)
def fsdp(job, *, rng, budget):
    """Fully sharded data parallelism over all ranks (Zhao et al. 2023), the default of many training scripts. The
    microbatch is the largest that fits, with as little recomputation as possible. Gradients are reduced after each
    microbatch, as FSDP does unless it is asked not to."""
    return fully_sharded(job, budget)


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
    """The rule of Megatron-LM (Narayanan et al. 2021, section 3): tensor parallelism up to the accelerators of a node,
    then pipeline stages until the model fits, data parallelism with all other ranks (takeaways 1 and 2), and the
    microbatch that takes the least time (takeaway 3). Activations are recomputed (section 3.5)."""
    return megatron_rule(job, budget)
