"""What a plan decides, in words that every training framework can be asked for."""

from __future__ import annotations

from dataclasses import dataclass

from simdev.errors import Unsupported
from simdev.parallel.mesh import AXES, Mesh
from simdev.planners import Choice, Job

# The block that repeats, in Hugging Face's implementation of the model; models that are not listed have none there.
BLOCKS = {
    "bert": "BertLayer",
    "llama3": "LlamaDecoderLayer",
    "mixtral": "MixtralDecoderLayer",
    "mpt": "MptBlock",
    "qwen3-moe": "Qwen3MoeDecoderLayer",
    "vit": "ViTLayer",
}


@dataclass(frozen=True)
class Settings:
    """Everything that a configuration has to say about a plan.

    ``ranks`` GPUs form ``mesh``. A step has ``batch`` sequences in ``microbatches`` microbatches of ``microbatch``
    sequences on each replica: accumulated, or sent through the pipeline in the order of ``schedule`` (empty without a
    pipeline). ``stage_layers`` is the number of layers on each stage, virtual stages included. ``recompute`` is
    ``none``, ``selective`` or ``full``. ``reduce_each``: gradients are reduced after each microbatch.

    ``precision`` is that of the model on this mesh (:data:`simdev.graphs.parallel_model.PRECISIONS`).
    """

    ranks: int
    mesh: Mesh
    batch: int
    length: int
    microbatch: int
    microbatches: int
    schedule: str = ""
    stage_layers: tuple[int, ...] = ()
    recompute: str = "none"
    reduce_each: bool = False
    precision: str = "mixed"


def settings_of(job: Job, choice: Choice, titan: bool = False) -> Settings:
    """The settings of a plan. Raises :class:`Unsupported` for stages with meshes of their own and for pipelines that
    reduce gradients after each microbatch, which no framework's configuration can express; unless for torchtitan, for
    parameters that stay gathered and stages without a layer; and :class:`InvalidInput` for a choice that does not suit
    the job."""
    if choice.stage_meshes:
        raise Unsupported(f"configurations have one mesh for all stages, and the plan {choice} has several")
    plan, pipeline = job.plan(choice), choice.mesh["pp"] > 1
    if pipeline and choice.reduce_each:
        raise Unsupported(
            f"no framework's pipeline reduces gradients after each microbatch, and the plan {choice} does"
        )
    if plan.gathered and not (titan and pipeline):
        raise Unsupported(
            f"--write cannot say that parameters stay gathered (reshard=never), and the plan {choice} does"
        )
    if not titan and not min(part.layers for part in plan.parts):
        raise Unsupported(f"only --write torchtitan can say that a stage has no layer, as in the plan {choice}")
    several = plan.microbatches > 1 and choice.mesh["dp_shard"] > 1 and not pipeline
    return Settings(
        ranks=job.ranks,
        mesh=Mesh({axis: choice.mesh[axis] for axis in AXES if choice.mesh[axis] > 1}),
        batch=job.batch,
        length=int(job.parameters["length"]),
        microbatch=choice.microbatch,
        microbatches=plan.microbatches,
        schedule=choice.schedule if pipeline else "",
        stage_layers=tuple(part.layers for part in plan.parts) if pipeline else (),
        recompute=choice.recompute,
        reduce_each=several and (choice.reduce_each or not job.may_reduce_each(choice)),
        precision=job.model.precision(choice.mesh),
    )


def refuse(settings: Settings, where: str, *axes: str) -> None:
    """Raise :class:`Unsupported` if the plan uses one of ``axes``."""
    used = [f"{axis}={settings.mesh[axis]}" for axis in axes if settings.mesh[axis] > 1]
    if used:
        raise Unsupported(f"{where} cannot say {', '.join(used)} of this plan; try --write torchtitan or pytorch")


def refuse_precision(settings: Settings, where: str, *known: str) -> None:
    """Raise :class:`Unsupported` unless the plan's precision is one of ``known``."""
    if settings.precision not in known:
        raise Unsupported(f"{where} cannot say the precision of this plan ({settings.precision})")


def header(job: Job, choice: Choice, release: str, run: str) -> str:
    """The first lines of a configuration: for which release it was written, which plan it holds, how to run it."""
    return (
        f"# {release}\n# Plan: {choice}, for {job.name or job.model.name}, {job.batch} sequences in a step.\n# {run}\n"
    )


def torchrun(job: Job, script: str) -> str:
    """The command that starts ``script`` on every node."""
    gpus = min(job.ranks, job.cluster.gpus)
    nodes = max(1, job.ranks // gpus)
    return f"torchrun --nnodes {nodes} --nproc-per-node {gpus} {script}"
