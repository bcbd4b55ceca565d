"""Data parallelism as in PyTorch's DistributedDataParallel (Li et al. 2020): every rank holds the whole model.

The microbatch is the largest that fits, with as little recomputation as possible.
"""

from simdev.baselines.planners._fit import first_fit, mesh
from simdev.errors import Unsupported
from simdev.planners import Choice, planner


@planner(
    "ddp",
    version=1,
    family="default",
    source="Li et al., PyTorch Distributed, VLDB 2020",
    searches=True,
    departures=("the paper chooses no microbatch: the largest that fits is taken",),
)
def ddp(job, *, rng, budget):
    if "dp_replicate" not in job.model.axes:
        raise Unsupported(f"ddp: {job.model.name} has no axis dp_replicate")
    whole = mesh(job, axis="dp_replicate")
    sizes = sorted(job.microbatches, reverse=True)
    choices = (Choice(whole, size, recompute) for recompute in job.known_recomputes for size in sizes)
    return first_fit(job, budget, choices, "ddp")
