"""torchtitan: a Python module with a function that returns its trainer's configuration."""

from __future__ import annotations

from simdev.errors import Unsupported
from simdev.integrations.configs.settings import (
    Settings,
    header,
    refuse_parts,
    refuse_precision,
    settings_of,
    torchrun,
)
from simdev.parallel import find_model
from simdev.planners import Choice, Job

RELEASE = "torchtitan 0.3.0"
SCHEDULES = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "looped-bfs": "LoopedBFS",
    "zero-bubble": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble", "dualpipe-v": "DualPipeV",
}  # fmt: skip
RECOMPUTE = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}
# The model and its size -> torchtitan's module and function.
CONFIGURATIONS = {
    ("llama3", "8b"): ("llama3", "llama3_8b"),
    ("llama3", "70b"): ("llama3", "llama3_70b"),
    ("llama3", "405b"): ("llama3", "llama3_405b"),
    ("deepseek", "v2lite"): ("deepseek_v3", "deepseek_v3_16b"),
    ("deepseek", "v3"): ("deepseek_v3", "deepseek_v3_671b"),
    ("qwen3-moe", "30b-a3b"): ("qwen3", "qwen3_30b_a3b"),
}
OF_TRANSFORMERS = {"qwen3-32b": ("qwen3", "qwen3_32b"), "gpt-oss-120b": ("gpt_oss", "gpt_oss_120b")}


FREE = ("length", "microbatch", "recompute", "norm", "imbalance")  # no part of the model


def write(job: Job, choice: Choice) -> str:
    """A module for ``python -m torchtitan.train --module FILE --config plan``. The model is one that torchtitan has;
    its attention is torchtitan's own (FlexAttention). With a pipeline, the local batch is what a pipeline processes in
    a step; without one, microbatches accumulate gradients, which FSDP reduces after each of them."""
    settings = settings_of(job, choice, titan=True)
    module, function = _configuration(job)
    stays = ["reshard=never"] if settings.mesh["pp"] > 1 else []  # PyTorch's stages keep them after backward passes
    refuse_parts(settings, "torchtitan", "torch.compile", "sequence parallelism", *stays)
    refuse_precision(settings, "torchtitan", "mixed", "bfloat16")
    mesh, pipeline = settings.mesh, settings.mesh["pp"] > 1
    if mesh["ep"] > 1 and mesh["tp"] > 1:
        raise Unsupported("torchtitan 0.3 does not divide experts over tp, and this plan does (ep and tp)")
    if mesh.replicas > 1 and settings.microbatches > 1 and not pipeline and not settings.reduce_each:
        raise Unsupported(f"torchtitan reduces gradients after each microbatch, and the plan {choice} does not")
    values: dict[str, object] = {
        "training.local_batch_size": settings.microbatch * (settings.microbatches if pipeline else 1),
        "training.global_batch_size": settings.batch,
        "training.seq_len": settings.length,
        "training.dtype": "float32" if settings.precision == "mixed" else "bfloat16",
        "training.mixed_precision_param": "bfloat16",
        "training.mixed_precision_reduce": "float32",
        "training.enable_cpu_offload": False,
        # torchtitan refuses graphs of pipelines and of exchanged tokens; without a compiler, the host issues kernels.
        "training.disable_cuda_graphs": pipeline or mesh["ep"] > 1 or not settings.compiled,
        "parallelism.data_parallel_replicate_degree": mesh["dp_replicate"],
        "parallelism.data_parallel_shard_degree": mesh["dp_shard"] * mesh["ep"],  # experts take their ranks from it
        "parallelism.fsdp_reshard_after_forward": choice.reshard,
        "parallelism.tensor_parallel_degree": mesh["tp"],
        "parallelism.enable_sequence_parallel": settings.splits_tokens,
        "parallelism.context_parallel_degree": mesh["cp"],
        "parallelism.context_parallel_load_balancer": "headtail",
        "parallelism.expert_parallel_degree": mesh["ep"],
        "parallelism.pipeline_parallel_degree": mesh["pp"],
    }
    if pipeline:
        values |= {
            "parallelism.pipeline_parallel_schedule": SCHEDULES[settings.schedule],
            "parallelism.pipeline_parallel_microbatch_size": settings.microbatch,
            "parallelism.module_fqns_per_model_part": _stages(settings, _layers(job)),
        }
    values |= {"compile.enable": settings.compiled, "compile.components": ["model", "loss"]}
    body = [f"    config.{name} = {value!r}" for name, value in values.items()]
    body.append(f"    config.activation_checkpoint = {RECOMPUTE[settings.recompute]}")
    policy = {"selective": "SelectiveAC", "full": "FullAC"}.get(settings.recompute)
    lines = [
        *([f"from torchtitan.distributed.activation_checkpoint import {policy}"] if policy else []),
        f"from torchtitan.models.{module}.config_registry import {function}",
        *["", "", "def plan():", f"    config = {function}()", *body, "    return config"],
    ]
    command = torchrun(job, "-m torchtitan.train --module train_plan --config plan")
    return header(job, choice, RELEASE, f"As train_plan.py: {command}") + "\n".join(lines) + "\n"


def _configuration(job: Job) -> tuple[str, str]:
    """torchtitan's module and function for the model and all of its sizes."""
    sizes = {key: value for key, value in job.parameters.items() if key not in FREE}
    for (name, size), found in CONFIGURATIONS.items():
        if job.model.name == name:
            whole = job.model.parameters(size, {})
            if sizes == {key: value for key, value in whole.items() if key not in FREE}:
                return found
    name = job.model.name
    if name in OF_TRANSFORMERS and job.model.identity == find_model(name)[0].identity:  # no field was changed
        return OF_TRANSFORMERS[name]
    known = ", ".join([*("-".join(key) for key in CONFIGURATIONS), *OF_TRANSFORMERS])
    raise Unsupported(
        f"torchtitan has no configuration that simdev knows of {name} with these sizes; of {known} it has"
    )


def _layers(job: Job) -> int:
    """Transformer blocks before those that repeat: DeepSeek's first ones have no experts."""
    return int(job.parameters.get("dense", 0))


def _stages(settings: Settings, before: int) -> list[list[str]]:
    """The modules of each stage, by torchtitan's names."""
    stages, begin = [], 0
    for number, count in enumerate(settings.stage_layers):
        end = begin + count + (before if number == 0 else 0)
        modules = [f"layers.{layer}" for layer in range(begin, end)]
        first = ["tok_embeddings"] if number == 0 else []
        last = ["norm", "lm_head"] if number == len(settings.stage_layers) - 1 else []
        stages.append([*first, *modules, *last])
        begin = end
    return stages
