"""The plans of people's rules, shared by the planners of these rules and by planners that start from them; meshes and
first fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from simdev.errors import Unsupported
from simdev.parallel.mesh import Mesh
from simdev.planners import Choice, Job, PlanBudget


def replicated(job: Job, budget: PlanBudget) -> Choice:
    """Whole replicas, with the least recomputation and then the largest microbatch that fit. Raises
    :class:`Unsupported` for a model without the axis, and if nothing fits."""
    return first_fit(job, budget, _alike(job, "dp_replicate", "ddp"), "ddp")


def fully_sharded(job: Job, budget: PlanBudget) -> Choice:
    """The same with parameters that are sharded over all ranks, and gradients that are reduced after each
    microbatch."""
    choices = (replace(choice, reduce_each=job.may_reduce_each(choice)) for choice in _alike(job, "dp_shard", "fsdp"))
    return first_fit(job, budget, choices, "fsdp")


def _alike(job: Job, axis: str, what: str) -> Iterator[Choice]:
    """Data parallelism along ``axis`` over all ranks: the least recomputation and the largest microbatch first."""
    if axis not in job.model.axes:
        raise Unsupported(f"{what}: {job.model.name} has no axis {axis}")
    sizes = sorted(job.microbatches, reverse=True)
    yield from (Choice(mesh(job, axis=axis), size, kind) for kind in job.known_recomputes for size in sizes)


def megatron_rule(job: Job, budget: PlanBudget) -> Choice:
    """Tensor parallelism up to a node, then stages until the model fits, then the quickest microbatch. Raises
    :class:`Unsupported` if nothing fits."""
    if not job.known_recomputes:
        raise Unsupported(f"megatron: {job.model.name} knows none of the kinds of recomputation that may be chosen")
    recompute = job.known_recomputes[-1]
    smallest = min(job.microbatches)
    ladder = [mesh(job, tp, pp) for tp, pp in _sizes(job)]
    fitting = first_fit(job, budget, (Choice(m, smallest, recompute) for m in ladder), "megatron").mesh
    choices = [choice for size in job.microbatches if job.valid(choice := Choice(fitting, size, recompute))]
    return min(budget.evaluate_many(choices)).choice


def _sizes(job: Job) -> Iterator[tuple[int, int]]:
    """``(tp, pp)`` from the least model parallelism to the most."""
    tensor = [tp for tp in range(1, job.cluster.gpus + 1) if job.ranks % tp == 0 and job.cluster.gpus % tp == 0]
    tensor = tensor if "tp" in job.model.axes else [1]
    usable = [tp for tp in tensor if job.valid(Choice(mesh(job, tp), min(job.microbatches))) or tp == 1]
    widest = max(usable)
    yield from ((tp, 1) for tp in usable)
    for pp in range(2, job.layers + 1):
        if job.ranks % (widest * pp) == 0:
            yield widest, pp


def data_axis(job: Job) -> str:
    """The axis along which the model's replicas stand: sharded where the model can be."""
    return "dp_shard" if "dp_shard" in job.model.axes else "dp_replicate"


def mesh(job: Job, tp: int = 1, pp: int = 1, axis: str | None = None) -> Mesh:
    """All ranks of the job: ``tp`` tensor-parallel ranks, ``pp`` stages, and data parallelism with what is left."""
    sizes = {"pp": pp, axis or data_axis(job): job.ranks // (tp * pp), "tp": tp}
    return Mesh({name: size for name, size in sizes.items() if size > 1})


def first_fit(job: Job, budget: PlanBudget, choices: Iterable[Choice], what: str) -> Choice:
    """The first choice that suits the job and fits in memory. Raises :class:`Unsupported` if none does."""
    least = None
    for choice in choices:
        if not job.valid(choice):
            continue
        outcome = budget.evaluate(choice)
        if outcome.fits:
            return choice
        least = min(least or outcome, outcome)
    if least is None:
        raise Unsupported(f"{what}: no such plan divides {job.batch} sequences and the model among {job.ranks} ranks")
    raise Unsupported(f"{what}: no plan fits; {least.choice} lacks {least.overflow_bytes / 2**30:.1f} GiB")
