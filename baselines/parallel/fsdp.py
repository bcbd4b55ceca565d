"""Fully sharded data parallelism over all ranks (Zhao et al. 2023), the default of many training scripts.

The microbatch is the largest that fits, with as little recomputation as possible. Gradients are reduced after each
microbatch, as FSDP does unless it is asked not to.
"""

from dataclasses import replace

from simdev.baselines.parallel._fit import first_fit, mesh
from simdev.errors import Unsupported
from simdev.planners import Choice, planner


@planner(
    "fsdp",
    version=2,
    family="default",
    source="Zhao et al., PyTorch FSDP, VLDB 2023",
    departures=("the paper chooses no microbatch: the largest that fits is taken",),
)
def fsdp(job, *, rng, budget):
    if "dp_shard" not in job.model.axes:
        raise Unsupported(f"fsdp: {job.model.name} has no axis dp_shard")
    sizes = sorted(job.microbatches, reverse=True)
    plain = (Choice(mesh(job), size, recompute) for recompute in job.known_recomputes for size in sizes)
    choices = (replace(choice, reduce_each=job.may_reduce_each(choice)) for choice in plain)
    return first_fit(job, budget, choices, "fsdp")
