"""Meshes and first fits, shared by planners that follow a rule."""

from __future__ import annotations

from collections.abc import Iterable

from simdev.errors import Unsupported
from simdev.parallel.mesh import Mesh
from simdev.planners import Choice, Job, PlanBudget


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
