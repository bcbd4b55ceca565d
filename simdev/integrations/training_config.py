"""Configurations of training frameworks that run a plan: torchtitan, Megatron-LM, Accelerate, DeepSpeed, and the FSDP
arguments of Hugging Face's Trainer.

Each writer raises :class:`Unsupported` where its framework has no setting for something that the plan decides.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from simdev.errors import UnknownName, Unsupported
from simdev.planners import Choice, Job

Writer = Callable[[Job, Choice], str]

# The framework's name -> what it calls schedules.
TORCHTITAN_SCHEDULES = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "looped-bfs": "LoopedBFS",
    "zero-bubble": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble", "dualpipe": "DualPipeV",
}  # fmt: skip


def find_writer(name: str) -> Writer:
    """The writer of a framework's configuration. Raises :class:`UnknownName`."""
    if name not in WRITERS:
        raise UnknownName("configuration", name, WRITERS)

    def write(job: Job, choice: Choice) -> str:
        if choice.stage_meshes:
            raise Unsupported(f"{name} configurations have one mesh for all stages, and the plan {choice} has several")
        return WRITERS[name](job, choice)

    return write


def torchtitan(job: Job, choice: Choice) -> str:
    """TOML of torchtitan (``torchtitan/config/job_config.py``). With a pipeline, the local batch is what a pipeline
    processes in a step; without, microbatches accumulate gradients."""
    mesh, plan = choice.mesh, job.plan(choice)
    local = choice.microbatch * (plan.microbatches if mesh["pp"] > 1 else 1)
    sizes = (name for name, values in job.model.sizes.items() if values.items() <= dict(job.parameters).items())
    flavour = next(sizes, "").upper()  # none for a model of other sizes: it needs a flavour of its own
    parallelism = {
        "data_parallel_replicate_degree": mesh["dp_replicate"],
        "data_parallel_shard_degree": mesh["dp_shard"],
        "tensor_parallel_degree": mesh["tp"],
        "context_parallel_degree": mesh["cp"],
        "expert_parallel_degree": mesh["ep"],
        "pipeline_parallel_degree": mesh["pp"],
    }
    if mesh["pp"] > 1:
        parallelism["pipeline_parallel_schedule"] = TORCHTITAN_SCHEDULES[choice.schedule]
        parallelism["pipeline_parallel_microbatch_size"] = choice.microbatch
        parallelism["pipeline_parallel_layers_per_stage"] = -(-job.layers // (mesh["pp"] * choice.stages_per_rank))
    checkpoint = {"mode": choice.recompute}
    if choice.recompute == "selective":
        checkpoint["selective_ac_option"] = "op"
    _even(choice, "torchtitan")
    _reduces_each(job, choice, "torchtitan")
    return _toml(
        {
            "model": {"name": job.model.name, **({"flavor": flavour} if flavour else {})},
            "training": {
                "local_batch_size": local,
                "global_batch_size": job.batch,
                "seq_len": int(job.parameters["length"]),
            },
            "parallelism": parallelism,
            "activation_checkpoint": checkpoint,
        }
    )


def megatron(job: Job, choice: Choice) -> str:
    """Command-line arguments of Megatron-LM (``megatron/training/arguments.py``)."""
    mesh, p = choice.mesh, job.parameters
    if choice.schedule not in ("1f1b", "interleaved"):
        raise Unsupported(f"Megatron-LM has no schedule {choice.schedule!r}")
    arguments: dict[str, object] = {
        "num-layers": job.layers,
        "hidden-size": p.get("width"),
        "num-attention-heads": p.get("heads"),
        "seq-length": p["length"],
        "micro-batch-size": choice.microbatch,
        "global-batch-size": job.batch,
        "tensor-model-parallel-size": mesh["tp"],
        "pipeline-model-parallel-size": mesh["pp"],
        "context-parallel-size": mesh["cp"],
        "expert-model-parallel-size": mesh["ep"],
    }
    if mesh["tp"] > 1:
        arguments["sequence-parallel"] = True
    if choice.stages_per_rank > 1:
        per_stage, rest = divmod(job.layers, mesh["pp"] * choice.stages_per_rank)
        if rest:
            raise Unsupported("Megatron-LM needs the same number of layers on each virtual stage")
        arguments["num-layers-per-virtual-pipeline-stage"] = per_stage
    arguments |= _megatron_stages(choice)
    if choice.recompute == "full":
        arguments |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    elif choice.recompute == "selective":
        arguments["recompute-granularity"] = "selective"
    if mesh["dp_shard"] > 1:
        arguments["use-torch-fsdp2" if mesh["pp"] == 1 else "use-distributed-optimizer"] = True
    words = [f"--{key}" if value is True else f"--{key} {value}" for key, value in arguments.items() if value]
    return " \\\n".join([*words, "--bf16"]) + "\n"


def _megatron_stages(choice: Choice) -> dict[str, object]:
    layers = choice.stage_layers
    if not layers or len(set(layers)) == 1:
        return {}
    if len(set(layers[1:-1])) > 1 or (len(layers) == 2):
        raise Unsupported(f"Megatron-LM has no arguments for stages of {'/'.join(map(str, layers))} layers")
    found = {}
    if layers[0] != layers[1]:
        found["decoder-first-pipeline-num-layers"] = layers[0]
    if layers[-1] != layers[1]:
        found["decoder-last-pipeline-num-layers"] = layers[-1]
    return found


def accelerate(job: Job, choice: Choice) -> str:
    """YAML for ``accelerate launch --config_file`` with FSDP 2 (Accelerate 1.10 and later for ``tp``)."""
    _no_pipeline(choice, "Accelerate")
    mesh = choice.mesh
    sizes = {f"parallelism_config_{axis}_size": mesh[axis] for axis in ("dp_replicate", "dp_shard", "tp", "cp")}
    document = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if mesh["dp_shard"] > 1 else "MULTI_GPU",
        "num_machines": max(1, job.ranks // job.cluster.gpus),
        "num_processes": job.ranks,
        "mixed_precision": "bf16",
    }
    if mesh["dp_shard"] > 1:
        document["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            "fsdp_activation_checkpointing": choice.recompute != "none",
        }
    if mesh["tp"] > 1 or mesh["cp"] > 1 or mesh["dp_replicate"] > 1:
        document["parallelism_config"] = sizes
    each = ", sync_each_batch=True" if choice.reduce_each else ""
    steps = f"gradient_accumulation_steps={job.plan(choice).microbatches}{each}"
    return f"# per-device batch {choice.microbatch}, {steps}\n" + _yaml(document)


def deepspeed(job: Job, choice: Choice) -> str:
    """JSON of DeepSpeed: ZeRO stage 3 where parameters are sharded, stage 0 where they are not, MiCS for groups."""
    _no_pipeline(choice, "a DeepSpeed configuration (stages are set in code, by PipelineModule)")
    _reduces_each(job, choice, "ZeRO")
    mesh = choice.mesh
    zero: dict[str, object] = {"stage": 3 if mesh["dp_shard"] > 1 else 0}
    if mesh["dp_shard"] > 1 and mesh["dp_replicate"] > 1:
        zero["mics_shard_size"] = mesh["dp_shard"]
    document = {
        "train_batch_size": job.batch,
        "train_micro_batch_size_per_gpu": choice.microbatch,
        "gradient_accumulation_steps": job.plan(choice).microbatches,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    if mesh["tp"] > 1:
        document["tensor_parallel"] = {"autotp_size": mesh["tp"]}
    if choice.recompute != "none":
        document["activation_checkpointing"] = {"partition_activations": False}
    return json.dumps(document, indent=2) + "\n"


def fsdp(job: Job, choice: Choice) -> str:
    """JSON with arguments of Hugging Face's ``TrainingArguments`` that shard the model with FSDP."""
    _no_pipeline(choice, "FSDP")
    mesh = choice.mesh
    if mesh["tp"] > 1 or mesh["dp_shard"] == 1:
        raise Unsupported(f"the plan {choice} is not FSDP alone; try --write torchtitan")
    document = {
        "per_device_train_batch_size": choice.microbatch,
        "gradient_accumulation_steps": job.plan(choice).microbatches,
        "bf16": True,
        "fsdp": "hybrid_shard auto_wrap" if mesh["dp_replicate"] > 1 else "full_shard auto_wrap",
        "fsdp_config": {"activation_checkpointing": choice.recompute != "none"},
    }
    if choice.reduce_each:
        document["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    return json.dumps(document, indent=2) + "\n"


WRITERS: dict[str, Writer] = {
    "torchtitan": torchtitan,
    "megatron": megatron,
    "accelerate": accelerate,
    "deepspeed": deepspeed,
    "fsdp": fsdp,
}


def _no_pipeline(choice: Choice, where: str) -> None:
    if choice.mesh["pp"] > 1 or choice.mesh["ep"] > 1:
        raise Unsupported(f"{where} has no settings for {choice.mesh}; try --write torchtitan or megatron")


def _reduces_each(job: Job, choice: Choice, where: str) -> None:
    if job.may_reduce_each(choice) and not choice.reduce_each:
        raise Unsupported(f"{where} reduces sharded gradients after each microbatch, and the plan {choice} does not")


def _even(choice: Choice, where: str) -> None:
    if len(set(choice.stage_layers)) > 1:
        counts = "/".join(map(str, choice.stage_layers))
        raise Unsupported(f"{where} has no setting for stages of {counts} layers")


def _toml(document: dict) -> str:
    lines = []
    for table, values in document.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""]
    return "\n".join(lines)


def _yaml(document: dict, indent: str = "") -> str:
    lines = []
    for key, value in document.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{key}:\n{_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {json.dumps(value) if not isinstance(value, str) else value}\n")
    return "".join(lines)
