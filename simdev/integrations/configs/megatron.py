"""Megatron-LM: the arguments of the whole model and of the plan."""

from __future__ import annotations

from simdev.errors import Unsupported
from simdev.integrations.configs.settings import Settings, header, refuse_parts, refuse_precision, settings_of, torchrun
from simdev.planners import Choice, Job

RELEASE = "Megatron-LM with Megatron-Core 0.16"
Arguments = dict[str, object]


def write(job: Job, choice: Choice) -> str:
    """A shell command. Parameters that are sharded are Megatron-FSDP's (``optim_grads_params``), which has no pipeline;
    without ``dp_shard``, replicas keep whole parameters, and whole optimizer states unless the job's framework divides
    these among them, as the plan does. The data, the learning rate and the number of steps are the user's."""
    settings, mesh = settings_of(job, choice, builds=("megatron",)), choice.mesh
    if job.model.name not in MODELS:
        raise Unsupported(f"Megatron-LM has no arguments for the model {job.model.name}; it has {', '.join(MODELS)}")
    refuse_parts(settings, "Megatron-LM", "sequence parallelism", "a distributed optimizer")
    refuse_precision(settings, "Megatron-LM", "mixed", "mixed-float16", "bfloat16")
    if settings.schedule not in ("", "1f1b", "interleaved"):
        raise Unsupported(f"Megatron-LM has no schedule {settings.schedule!r}")
    if settings.recompute == "selective":
        raise Unsupported("Megatron-LM's selective recomputation drops other tensors than this plan (selective)")
    sharded = mesh["dp_shard"] > 1
    if sharded and mesh["pp"] > 1:
        raise Unsupported("Megatron-FSDP shards no parameters of pipeline stages, and this plan does (dp_shard and pp)")
    if sharded and settings.microbatches > 1 and not settings.reduce_each:
        raise Unsupported(f"Megatron-FSDP reduces gradients after each microbatch, and the plan {choice} does not")
    if not sharded and settings.reduce_each:
        raise Unsupported(f"Megatron-LM reduces gradients with the last microbatch, and the plan {choice} with each")
    if job.model.name == "deepseek" and job.parameters["experts"] not in ROUTERS:
        raise Unsupported(f"simdev does not know how DeepSeek routes to {job.parameters['experts']} experts")
    arguments: Arguments = MODELS[job.model.name](dict(job.parameters))
    arguments |= {
        "seq-length": settings.length,
        "max-position-embeddings": settings.length,
        "micro-batch-size": settings.microbatch,
        "global-batch-size": settings.batch,
        "tensor-model-parallel-size": mesh["tp"],
        "sequence-parallel": settings.splits_tokens,
        "context-parallel-size": mesh["cp"],
        "pipeline-model-parallel-size": mesh["pp"],
        **_stages(settings, int(job.parameters.get("dense", 0))),
        "bf16": settings.precision != "mixed-float16",
        "fp16": settings.precision == "mixed-float16",
        "optimizer": "adam",
    }
    if mesh["ep"] > 1 or "num-experts" in arguments:
        arguments |= {"expert-model-parallel-size": mesh["ep"], "expert-tensor-parallel-size": mesh["tp"]}
    if settings.recompute == "full":
        arguments |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    if sharded:  # what Megatron-FSDP's guide requires
        arguments |= {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": "optim_grads_params"}
        arguments |= {"no-gradient-accumulation-fusion": True, "ckpt-format": "fsdp_dtensor"}
        if mesh["dp_replicate"] > 1:
            arguments |= {"num-distributed-optimizer-instances": mesh["dp_replicate"]}
            arguments["outer-dp-sharding-strategy"] = "no_shard"
    arguments |= {
        "use-distributed-optimizer": sharded or settings.distributed_optimizer,
        "overlap-grad-reduce": mesh.replicas > 1,  # communication beside computation, as the plan was simulated
        "overlap-param-gather": sharded or settings.distributed_optimizer,
        "grad-reduce-in-bf16": settings.main_gradient_bytes == 2,
    }
    words = [
        f"--{key}" if value is True else f"--{key} {value}" for key, value in arguments.items() if value is not False
    ]
    # Megatron-LM demands this where ranks divide a layer or a sequence, and forbids it beside Megatron-FSDP.
    one_queue = not sharded and mesh["tp"] * mesh["cp"] > 1
    start = "CUDA_DEVICE_MAX_CONNECTIONS=1 " * one_queue + torchrun(job, "pretrain_gpt.py")
    run = "Add your data (--data-path, --tokenizer-type), --lr and --train-iters."
    return header(job, choice, RELEASE, run) + " \\\n  ".join([start, *words]) + "\n"


def _stages(settings: Settings, dense: int) -> Arguments:
    """Arguments for the layers of each stage; ``dense`` layers are part of the first one."""
    layers = [count + (dense if not number else 0) for number, count in enumerate(settings.stage_layers)]
    ranks = settings.mesh["pp"]
    if not layers:
        return {}
    virtual = len(layers) // ranks
    if virtual > 1:
        if len(set(layers)) > 1:
            raise Unsupported(f"Megatron-LM needs the same number of layers on each virtual stage, not {layers}")
        return {"num-layers-per-virtual-pipeline-stage": layers[0]}
    if len(set(layers)) == 1:
        return {}
    if len(layers) > 2 and len(set(layers[1:-1])) > 1:
        raise Unsupported(f"Megatron-LM has no arguments for stages of {'/'.join(map(str, layers))} layers")
    middle = layers[1] if len(layers) > 2 else None
    found: Arguments = {}
    if layers[0] != middle:
        found["decoder-first-pipeline-num-layers"] = layers[0]
    if layers[-1] != middle:
        found["decoder-last-pipeline-num-layers"] = layers[-1]
    return found


def _gpt(p: dict) -> Arguments:
    """GPT as the SC 2021 paper trains it: learned positions, LayerNorm, GELU, biases, one embedding for both ends."""
    return {
        "num-layers": p["layers"],
        "hidden-size": p["width"],
        "ffn-hidden-size": 4 * p["width"],
        "num-attention-heads": p["heads"],
        "normalization": "LayerNorm",
        "norm-epsilon": 1e-5,
        "position-embedding-type": "learned_absolute",
        "attention-dropout": 0.1,
        "hidden-dropout": 0.1,
        **_vocabulary(p),
    }


def _llama(p: dict) -> Arguments:
    return {
        "num-layers": p["layers"],
        "hidden-size": p["width"],
        "ffn-hidden-size": p["hidden"],
        "num-attention-heads": p["heads"],
        "group-query-attention": True,
        "num-query-groups": p["kv_heads"],
        "rotary-base": 500_000,
        "norm-epsilon": 1e-5,
        **_gated(p),
    }


def _mixtral(p: dict) -> Arguments:
    experts = {"num-experts": p["experts"], "moe-router-topk": p["active"], "moe-ffn-hidden-size": p["hidden"]}
    return {**_llama(p), "rotary-base": 1_000_000, **experts, **_EXPERTS, "moe-router-score-function": "softmax"}


def _qwen3_moe(p: dict) -> Arguments:
    return {**_mixtral(p), "norm-epsilon": 1e-6, "kv-channels": p["head"], "qk-layernorm": True}


def _deepseek(p: dict) -> Arguments:
    layers = p["layers"] + p["dense"]
    return {
        "num-layers": layers,
        "hidden-size": p["width"],
        "ffn-hidden-size": p["dense_hidden"],
        "num-attention-heads": p["heads"],
        "multi-latent-attention": True,
        "qk-layernorm": True,  # of the small queries, keys and values
        "rotary-base": 10_000,
        "rope-type": "rope",  # the models were trained at this length before YaRN
        "norm-epsilon": 1e-6,
        **({"q-lora-rank": p["query_rank"]} if p["query_rank"] else {}),
        "kv-lora-rank": p["rank"],
        "qk-head-dim": p["head"],
        "qk-pos-emb-head-dim": p["rotated"],
        "v-head-dim": p["head"],
        **_gated(p),
        "num-experts": p["experts"],
        "moe-router-topk": p["active"],
        "moe-ffn-hidden-size": p["hidden"],
        "moe-shared-expert-intermediate-size": p["shared"] * p["hidden"],
        "moe-layer-freq": f"'([0]*{p['dense']}+[1]*{p['layers']})'",
        **_EXPERTS,
        **ROUTERS[p["experts"]],
    }


_EXPERTS: Arguments = {
    "moe-grouped-gemm": True,
    "moe-token-dispatcher-type": "alltoall",
    "moe-router-load-balancing-type": "none",  # the planned step has no loss of the routers
}
_GROUPS = {"moe-router-num-groups": 8, "moe-router-topk-scaling-factor": 16.0, "moe-router-group-topk": 3}
_SOFTMAX = {"moe-router-score-function": "softmax", "moe-router-pre-softmax": True}
ROUTERS: dict[int, Arguments] = {  # of DeepSeek-V2-Lite, -V2 and -V3, by the number of experts: their config.json
    64: _SOFTMAX,
    160: {**_SOFTMAX, **_GROUPS},
    256: {
        "moe-router-score-function": "sigmoid",
        "moe-router-enable-expert-bias": True,
        **_GROUPS,
        "moe-router-topk-scaling-factor": 2.5,
        "moe-router-group-topk": 4,
    },
}


def _gated(p: dict) -> Arguments:
    """What the decoders with RMSNorm and SwiGLU share."""
    return {
        "swiglu": True,
        "normalization": "RMSNorm",
        "position-embedding-type": "rope",
        "disable-bias-linear": True,
        "untie-embeddings-and-output-weights": True,
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        **_vocabulary(p),
    }


def _vocabulary(p: dict) -> Arguments:
    return {"tokenizer-type": "NullTokenizer", "vocab-size": p["vocabulary"] - 1, "make-vocab-size-divisible-by": 1}


MODELS = {"deepseek": _deepseek, "gpt": _gpt, "llama3": _llama, "mixtral": _mixtral, "qwen3-moe": _qwen3_moe}
