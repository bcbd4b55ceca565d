"""The rule of Megatron-LM (Narayanan et al. 2021, section 3): tensor parallelism up to the accelerators of a node, then
pipeline stages until the model fits, data parallelism with all other ranks (takeaways 1 and 2), and the microbatch that
takes the least time (takeaway 3). Activations are recomputed (section 3.5).
"""

from simdev.baselines.parallel._fit import first_fit, mesh
from simdev.planners import Choice, planner


@planner(
    "megatron",
    version=1,
    family="rule",
    source="Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021, section 3",
    departures=(
        "the microbatch is chosen by simulation, not by equation 1 with measured passes",
        "replicas are sharded (dp_shard) where the model can be, as with today's distributed optimizer",
        "1F1B without interleaving",
    ),
)
def megatron(job, *, rng, budget):
    recompute = job.known_recomputes[-1]
    smallest = min(job.microbatches)
    ladder = [mesh(job, tp, pp) for tp, pp in sizes(job)]
    fitting = first_fit(job, budget, (Choice(m, smallest, recompute) for m in ladder), "megatron").mesh
    choices = [Choice(fitting, size, recompute) for size in job.microbatches]
    budget.evaluate_many([choice for choice in choices if job.valid(choice)])
    return min(outcome for choice, outcome in budget.tried.items() if choice.mesh == fitting).choice


def sizes(job):
    """``(tp, pp)`` from the least model parallelism to the most."""
    tensor = [tp for tp in range(1, job.cluster.gpus + 1) if job.ranks % tp == 0 and job.cluster.gpus % tp == 0]
    tensor = tensor if "tp" in job.model.axes else [1]
    usable = [tp for tp in tensor if job.valid(Choice(mesh(job, tp), min(job.microbatches))) or tp == 1]
    widest = max(usable)
    yield from ((tp, 1) for tp in usable)
    for pp in range(2, job.layers + 1):
        if job.ranks % (widest * pp) == 0:
            yield widest, pp
