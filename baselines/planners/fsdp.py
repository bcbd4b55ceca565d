"""Fully sharded data parallelism over all ranks (Zhao et al. 2023), the default of many training scripts.

The microbatch is the largest that fits, with as little recomputation as possible. Gradients are reduced after each
microbatch, as FSDP does unless it is asked not to.
"""

from simdev.baselines.planners._rules import fully_sharded
from simdev.planners import planner


@planner(
    "fsdp",
    version=2,
    family="default",
    source="Zhao et al., PyTorch FSDP, VLDB 2023",
    searches=True,
    departures=("the paper chooses no microbatch: the largest that fits is taken",),
)
def fsdp(job, *, rng, budget):
    return fully_sharded(job, budget)
