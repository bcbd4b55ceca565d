"""What a plan decides, in words that every training framework can be asked for."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from simdev.errors import Unsupported
from simdev.parallel.capture.blocks import lists_of_blocks
from simdev.parallel.hugging_face import TransformersModel
from simdev.parallel.mesh import AXES, Mesh
from simdev.parallel.plain import PlainModel
from simdev.planners import Choice, Job


@dataclass(frozen=True)
class HubModel:
    """A model as transformers has it: the class, the class of the block that repeats, the list of these blocks, and
    whether the class has a tensor-parallel plan."""

    name: str
    block: str
    blocks: str
    divides: bool = True


# The shipped models that transformers has, too. DeepSeek's class depends on the size (:func:`hub_model`).
HUB_MODELS = {
    "bert": HubModel("BertForPreTraining", "BertLayer", "bert.encoder.layer", divides=False),
    "deepseek": HubModel("DeepseekV2ForCausalLM", "DeepseekV2DecoderLayer", "model.layers"),
    "gpt": HubModel("GPT2LMHeadModel", "GPT2Block", "transformer.h", divides=False),
    "llama3": HubModel("LlamaForCausalLM", "LlamaDecoderLayer", "model.layers"),
    "mixtral": HubModel("MixtralForCausalLM", "MixtralDecoderLayer", "model.layers"),
    "mpt": HubModel("MptForCausalLM", "MptBlock", "transformer.blocks", divides=False),
    "qwen3-moe": HubModel("Qwen3MoeForCausalLM", "Qwen3MoeDecoderLayer", "model.layers"),
    "vit": HubModel("ViTForImageClassification", "ViTLayer", "vit.layers", divides=False),
    # which transformers builds where it is installed
    "gpt-oss-120b": HubModel("GptOssForCausalLM", "GptOssDecoderLayer", "model.layers"),
    "qwen3-8b": HubModel("Qwen3ForCausalLM", "Qwen3DecoderLayer", "model.layers"),
    "qwen3-32b": HubModel("Qwen3ForCausalLM", "Qwen3DecoderLayer", "model.layers"),
    "qwen3-235b-a22b": HubModel("Qwen3MoeForCausalLM", "Qwen3MoeDecoderLayer", "model.layers"),
}
DEEPSEEK_V3 = HubModel("DeepseekV3ForCausalLM", "DeepseekV3DecoderLayer", "model.layers")
SPLIT_TOKENS = ("deepseek", "llama3", "mixtral", "qwen3-moe")  # shipped models with sequence parallelism along tp
# Parameters that are no part of a configuration: what each choice says, kernels, and what tokens do to routers.
FREE = ("recompute", "norm", "gate", "update", "sequence_parallel")


@dataclass(frozen=True)
class Settings:
    """Everything that a configuration has to say about a plan.

    ``ranks`` GPUs form ``mesh``. A step has ``batch`` sequences in ``microbatches`` microbatches of ``microbatch``
    sequences on each replica: accumulated, or sent through the pipeline in the order of ``schedule`` (empty without a
    pipeline). ``stage_layers`` is the number of layers on each stage, virtual stages included. ``recompute`` is
    ``none``, ``selective``, ``full`` or ``every-N``. ``reduce_each``: gradients are reduced after each microbatch.

    ``precision`` is that of the model on this mesh (:data:`simdev.graphs.parallel_model.PRECISIONS`).
    ``reshard_after_forward``: the gathered parameters of a block are freed after its forward pass. ``splits_tokens``:
    the ranks of ``tp`` divide the tokens between layers (sequence parallelism). ``compiled``: the job's framework
    runs under ``torch.compile``. ``distributed_optimizer``: replicas divide the optimizer's state.
    ``main_gradient_bytes``: what a replica of it keeps of each gradient. ``gathered``: shards are gathered once in a
    step, and parameters stay gathered until the last backward pass.
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
    reshard_after_forward: bool = True
    splits_tokens: bool = False
    compiled: bool = False
    distributed_optimizer: bool = False
    main_gradient_bytes: int = 4
    gathered: bool = False


def settings_of(
    job: Job, choice: Choice, titan: bool = False, builds: tuple[str, ...] = (), any_precision: bool = False
) -> Settings:
    """The settings of a plan. Raises :class:`Unsupported` for stages with meshes of their own, for pipelines that
    reduce gradients after each microbatch, and for a model that is built in another way than its defaults say
    (``weights=bfloat16``) unless in one of ``builds``, which no framework's configuration can express; unless for
    torchtitan, for stages without a layer; and :class:`InvalidInput` for a choice that does not suit the job, also by
    its data types unless ``any_precision``."""
    for name, value in job.parameters.items():
        usual = job.model.defaults.get(name)
        if isinstance(value, str) and name not in FREE and value not in (usual, *builds):
            message = f"--write cannot say {name}={value} of {job.name}"
            raise Unsupported(f"{message}: it writes {name}={usual}")
    if choice.stage_meshes:
        raise Unsupported(f"configurations have one mesh for all stages, and the plan {choice} has several")
    plan, pipeline = job.plan(choice, any_precision), choice.mesh["pp"] > 1
    if pipeline and choice.reduce_each:
        raise Unsupported(
            f"no framework's pipeline reduces gradients after each microbatch, and the plan {choice} does"
        )
    if not titan and not min(part.layers for part in plan.parts):
        raise Unsupported(f"only --write torchtitan can say that a stage has no layer, as in the plan {choice}")
    several = plan.microbatches > 1 and choice.mesh.replicas > 1 and not pipeline
    each = several and choice.reduce_each
    if several and not each and choice.mesh["dp_shard"] > 1:
        each = not job.may_reduce_each(choice)  # the model's own code does; asking it needs PyTorch
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
        reduce_each=each,
        precision=job.model.precision(choice.mesh),
        reshard_after_forward=bool(job.parameters.get("reshard_after_forward", True)),
        splits_tokens=choice.mesh["tp"] > 1
        and (job.model.name in SPLIT_TOKENS or job.parameters.get("sequence_parallel") == "yes"),
        # A framework with a distributed optimizer is Megatron-Core, whose kernels are fused by hand.
        compiled=job.software.fused and not job.software.distributed_optimizer,
        distributed_optimizer=job.software.distributed_optimizer and choice.mesh["dp_replicate"] > 1,
        main_gradient_bytes=plan.main_gradient_bytes,
        gathered=plan.gathered,
    )


def hub_model(job: Job) -> HubModel | None:
    """The model of a job as transformers has it; None if it has none."""
    built = job.model.function
    if isinstance(built, TransformersModel):
        blocks = lists_of_blocks(built.build())
        block = type(blocks[0].modules[0]).__name__ if blocks else ""
        return HubModel(built.name, block, blocks[0].name, "tp" in built.axes) if blocks else None
    if job.model.name == "deepseek" and job.parameters["experts"] == 256:
        return DEEPSEEK_V3
    return HUB_MODELS.get(job.model.name)


def block_classes(job: Job) -> list[str]:
    """The names of the classes whose modules are sharded and recomputed one by one; empty if simdev does not know."""
    built = job.model.function
    if isinstance(built, PlainModel):
        return built.block_classes
    found = hub_model(job)
    return [found.block] if found else []


def refuse(settings: Settings, where: str, *axes: str) -> None:
    """Raise :class:`Unsupported` if the plan uses one of ``axes``."""
    used = [f"{axis}={settings.mesh[axis]}" for axis in axes if settings.mesh[axis] > 1]
    if used:
        raise Unsupported(f"{where} cannot say {', '.join(used)} of this plan")


def refuse_parts(settings: Settings, where: str, *known: str) -> None:
    """Raise :class:`Unsupported` for a part of the plan beside its mesh that is not among ``known``."""
    parts = {
        "sequence parallelism": settings.splits_tokens and "the ranks of tp divide the tokens between layers",
        "reshard_after_forward": not settings.reshard_after_forward and "gathered parameters stay until the backward",
        "reshard=never": settings.gathered and "parameters stay gathered until the last backward pass",
        "torch.compile": settings.compiled and "its framework compiles the model",
        "a distributed optimizer": settings.distributed_optimizer and "replicas divide the optimizer's state",
        "every n-th layer": settings.recompute.startswith("every") and f"recompute={settings.recompute}",
    }
    for part, why in parts.items():
        if why and part not in known:
            raise Unsupported(f"{where} cannot say {part} of this plan ({why})")


def refuse_precision(settings: Settings, where: str, *known: str) -> None:
    """Raise :class:`Unsupported` unless the plan's precision is one of ``known``."""
    if settings.precision not in known:
        raise Unsupported(f"{where} cannot say the precision of this plan ({settings.precision})")


def header(job: Job, choice: Choice, release: str, run: str) -> str:
    """The first lines of a configuration: for which release it was written, which plan it holds, how to run it."""
    plan = f"{choice}, for {job.name}, {job.batch} sequences in a step, planned with --framework {job.framework}"
    text = f"For {release}. Plan: {plan}."
    lines = [*textwrap.wrap(text, 118, break_long_words=False, break_on_hyphens=False), run]
    return "".join(f"# {line}\n" for line in lines)


def torchrun(job: Job, script: str) -> str:
    """The command that starts ``script`` on every node."""
    gpus = min(job.ranks, job.cluster.gpus)
    nodes = max(1, job.ranks // gpus)
    return f"torchrun --nnodes {nodes} --nproc-per-node {gpus} {script}"
