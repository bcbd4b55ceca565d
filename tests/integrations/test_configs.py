"""The configurations that ``simdev plan --write`` writes. Each is loaded by its framework's own classes where the
framework is installed, and what they say is compared with the plan, over drawn plans."""

import ast
import functools
import re
import types
from collections import Counter
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import pytest

from simdev.errors import UnknownName, Unsupported
from simdev.integrations.configs import find_writer, other_targets, targets
from simdev.integrations.configs.settings import DEEPSEEK_V3, HUB_MODELS, Settings, settings_of
from simdev.parallel import Mesh, find_model, load_cluster
from simdev.parallel.framework import find_framework
from simdev.parallel.orders import SCHEDULES
from simdev.planners import Choice, Job
from simdev.planners.job import RECOMPUTE

DRAWN = 200


def make_job(model, cluster="dgx-h100[nodes=4]", batch=256, framework="eager", recomputes=RECOMPUTE, **changes):
    found, parameters = find_model(model)
    parameters = find_framework(framework).parameters_of(found.name, parameters, model)
    return Job(
        found,
        {**parameters, **changes},
        load_cluster(cluster),
        batch,
        framework=framework,
        schedules=SCHEDULES,
        recomputes=recomputes,
        ids=(model, cluster),
    )


MY_MODEL = """
import torch
from simdev import TrainingStep

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, x):
        return self.blocks(x)

def make_step():
    model = Model()
    loss = lambda model, x: model(x).square().mean()
    return TrainingStep(model, (torch.ones(16, 32),), loss, torch.optim.AdamW(model.parameters()))
"""
JOBS = {
    "llama3-8b": lambda: make_job("llama3-8b"),
    "llama3-8b, long": lambda: make_job("llama3-8b", length=32_768),
    "llama3-8b, compiled": lambda: make_job("llama3-8b", framework="compiled"),
    "llama3-8b, every second": lambda: make_job("llama3-8b", recomputes=("every-2", "every-3")),
    "llama3-70b": lambda: make_job("llama3-70b", "dgx-h100[nodes=8]", 1024),
    "deepseek-v3": lambda: make_job("deepseek-v3", "dgx-h100[nodes=8]"),
    "deepseek-v2lite": lambda: make_job("deepseek-v2lite", "dgx-h100"),
    "mixtral-8x7b": lambda: make_job("mixtral-8x7b"),
    "gpt-1.3b": lambda: make_job("gpt-1.3b", "dgx-a100"),
    "gpt-18.4b": lambda: make_job("gpt-18.4b", "dgx-a100[nodes=2]", sequence_parallel="yes"),
    "gpt-18.4b, nemo": lambda: make_job("gpt-18.4b", "dgx-a100[nodes=2]", framework="nemo"),
    "llama3-8b, nemo": lambda: make_job("llama3-8b", framework="nemo"),
    "small": lambda: make_job("small", "dgx-a100", 32),
}


@functools.cache
def plans_of(name):
    job = JOBS[name]()
    return job, list(job.choices())


def drawn_plans(seed):
    """(job, choice) of random jobs, drawn from all of their plans."""
    rng = np.random.default_rng(seed)
    names = list(JOBS)
    while True:
        job, found = plans_of(names[rng.integers(len(names))])
        yield job, found[rng.integers(len(found))]


def executed(text):
    """The module that a Python configuration is."""
    module = types.ModuleType("written")
    exec(compile(text, "written.py", "exec"), module.__dict__)
    return module


def choice(microbatch=1, recompute="none", schedule="1f1b", layers=(), reduce_each=None, stages_per_rank=1, **sizes):
    each = "pp" not in sizes if reduce_each is None else reduce_each
    return Choice(Mesh(sizes), microbatch, recompute, schedule, stages_per_rank, layers, reduce_each=each)


def test_every_target_is_found_by_its_presence():
    assert targets() == sorted(targets()) and {"torchtitan", "transformers", "megatron"} <= set(targets())
    with pytest.raises(UnknownName, match="did you mean 'megatron'"):
        find_writer("megatrn")


@pytest.mark.parametrize("target", targets())
def test_a_plan_with_several_meshes_is_refused(target):
    job = make_job("gpt-1.3b", "dgx-a100")
    stages = (Mesh({"dp_replicate": 4}), Mesh({"tp": 4}))
    with pytest.raises(Unsupported, match="several"):
        find_writer(target)(job, Choice(Mesh({"pp": 2}), 4, stage_meshes=stages))


REFUSED = [
    ("transformers", "llama3-8b", choice(dp_replicate=4, dp_shard=8, reduce_each=False), "dp_replicate"),
    ("transformers", "llama3-8b", choice(dp_shard=16, tp=2), "sequence parallelism"),
    ("transformers", "gpt-18.4b, plain", choice(dp_replicate=2, tp=8, reduce_each=False), "tp"),
    ("transformers", "small", choice(dp_shard=8), "no model small"),
    ("accelerate", "llama3-8b", choice(dp_shard=16, tp=2), "sequence parallelism"),
    ("accelerate", "llama3-8b, every second", choice(dp_shard=32, recompute="every-2"), "every n-th layer"),
    ("accelerate", "llama3-8b, bfloat16", choice(dp_shard=32), "weights=bfloat16"),
    ("accelerate", "gpt-18.4b, nemo", choice(dp_replicate=16, reduce_each=False), "distributed optimizer"),
    ("deepspeed", "llama3-8b, compiled", choice(dp_shard=32), "torch.compile"),
    ("deepspeed", "small", choice(dp_replicate=8), "with the last microbatch"),
    ("torchtitan", "llama3-8b, every second", choice(dp_shard=32, recompute="every-2"), "every n-th layer"),
    ("megatron", "llama3-8b, compiled", choice(dp_shard=32), "torch.compile"),
    ("megatron", "mixtral, DeepEP", choice(dp_shard=4, ep=8), "dispatch=tokens"),
    ("transformers", "llama3-8b", choice(pp=2, dp_shard=16), "pp=2"),
    ("transformers", "llama3-8b", choice(recompute="selective", dp_shard=32), "selective"),
    ("transformers", "deepseek-v3", choice(dp_shard=2, ep=16, tp=2), "ep and tp"),
    ("accelerate", "mixtral-8x7b", choice(dp_shard=4, ep=8), "ep=8"),
    ("accelerate", "gpt-1.3b", choice(recompute="full", dp_replicate=8, reduce_each=False), "recompute"),
    ("deepspeed", "llama3-8b, long", choice(dp_shard=8, cp=4), "cp=4"),
    ("deepspeed", "llama3-8b", choice(dp_replicate=2, dp_shard=16), "dp_replicate"),
    ("deepspeed", "llama3-8b", choice(dp_shard=32, reduce_each=False), "after each microbatch"),
    ("torchtitan", "llama3-8b", choice(dp_shard=32, reduce_each=False), "after each microbatch"),
    ("torchtitan", "mixtral-8x7b", choice(dp_shard=32), "no configuration"),
    ("torchtitan", "deepseek-v3", choice(dp_shard=4, ep=8, tp=2), "ep and tp"),
    ("megatron", "llama3-8b", choice(pp=2, dp_shard=16), "dp_shard and pp"),
    ("megatron", "small", choice(dp_shard=8), "no arguments"),
    ("megatron", "gpt-1.3b", choice(pp=4, dp_replicate=2, layers=(7, 6, 5, 6), reduce_each=False), "7/6/5/6"),
    ("megatron", "gpt-1.3b", choice(pp=4, dp_replicate=2, schedule="gpipe", reduce_each=False), "gpipe"),
]


MORE = {
    "gpt-18.4b, plain": lambda: make_job("gpt-18.4b", "dgx-a100[nodes=2]"),
    "llama3-8b, bfloat16": lambda: make_job("llama3-8b", weights="bfloat16"),
    "mixtral, DeepEP": lambda: make_job("mixtral-8x7b", framework="automodel"),
}


@pytest.mark.parametrize("target, model, refused, part", REFUSED)
def test_a_part_that_a_target_cannot_say_is_refused_by_name(target, model, refused, part):
    if not refused.reduce_each:
        pytest.importorskip("torch")  # the model is asked whether it reduces gradients after each microbatch
    with pytest.raises(Unsupported, match=part):
        find_writer(target)({**JOBS, **MORE}[model](), refused)


@pytest.mark.slow
def test_other_targets_are_those_that_write_the_plan(tmp_path):
    """``simdev plan --write`` names them where one refuses."""
    assert other_targets("transformers", make_job("llama3-8b"), choice(pp=2, dp_shard=16)) == ["torchtitan"]
    assert "pytorch" not in other_targets("megatron", make_job("small"), choice(dp_shard=8))  # not in the user's code
    pytest.importorskip("torch")
    (tmp_path / "my_model.py").write_text(MY_MODEL, encoding="utf-8")
    job = make_job(f"{tmp_path}/my_model.py:make_step", "dgx-a100", 16)
    assert "pytorch" in other_targets("transformers", job, choice(dp_shard=8))


def test_megatron_is_told_of_heads_that_are_normed_and_have_a_size_of_their_own():
    pytest.importorskip("torch")
    text = find_writer("megatron")(make_job("qwen3-moe-30b-a3b"), choice(dp_shard=4, ep=8))
    assert "--kv-channels 128 " in text and "--qk-layernorm " in text and "--num-experts 128 " in text


@pytest.mark.parametrize(
    "target, package",
    [
        ("accelerate", "accelerate"),
        ("deepspeed", "deepspeed"),
        ("megatron", "megatron-core"),
        ("torchtitan", "torchtitan"),
        ("transformers", "transformers"),
    ],
)
def test_a_file_names_the_release_that_is_tested(target, package):
    try:
        found = version(package)
    except PackageNotFoundError:
        pytest.skip(f"without the package {package}")
    named = import_module(find_writer(target).__module__).RELEASE.rpartition(" ")[2]
    assert f"{found}.".startswith(f"{named}."), f"tests run with {found}: name it in RELEASE and in docs/pages/plan.md"


@pytest.mark.slow
def test_shipped_models_have_their_class_in_transformers():
    """By its name, with the blocks and the tensor-parallel plan that are said of it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from simdev.parallel.capture.blocks import lists_of_blocks

    for found in (*HUB_MODELS.values(), DEEPSEEK_V3):
        cls = getattr(transformers, found.name)
        config = cls.config_class()
        few = {"num_hidden_layers": 2, "n_layers": 2, "n_layer": 2, "n_routed_experts": 8, "num_local_experts": 8}
        for name, value in {**few, "num_experts": 8}.items():
            if hasattr(config, name):
                setattr(config, name, value)
        with torch.device("meta"):
            (blocks,) = lists_of_blocks(cls(config))
        assert (blocks.name, type(blocks.modules[0]).__name__) == (found.blocks, found.block)
        assert bool(config.base_model_tp_plan) == found.divides, found


def test_blocks_of_a_module_of_the_users_are_named(tmp_path):
    """FSDP2 wraps them, also where gathered parameters stay until the backward pass, and DeepSpeed recomputes them."""
    torch = pytest.importorskip("torch")
    (tmp_path / "my_model.py").write_text(MY_MODEL, encoding="utf-8")
    job = make_job(f"{tmp_path}/my_model.py:make_step[reshard_after_forward=false]", "dgx-a100", 16)
    plan = choice(dp_shard=8, recompute="full", reduce_each=False, microbatch=2)
    text = find_writer("accelerate")(job, plan)
    assert "transformer_cls_names_to_wrap=['Block']" in text and "reshard_after_forward=False" in text
    with pytest.raises(Unsupported, match="reshard_after_forward"):
        find_writer("deepspeed")(job, plan)
    with pytest.raises(Unsupported, match="no model"):
        find_writer("transformers")(job, plan)
    job = make_job(f"{tmp_path}/my_model.py:make_step", "dgx-a100", 16)
    module = executed(find_writer("deepspeed")(job, choice(dp_shard=8, recompute="full", microbatch=2)))
    assert module.RECOMPUTED == ["Block"]
    with pytest.raises(ValueError, match="no block of a class among"):
        module.prepare(torch.nn.Sequential())


def test_megatron_gets_one_queue_where_it_demands_it():
    """Megatron-LM refuses ``tp`` and ``cp`` without this variable, and Megatron-FSDP with it."""
    pytest.importorskip("torch")
    job = JOBS["gpt-18.4b"]()
    assert "\nCUDA_DEVICE_MAX_CONNECTIONS=1 torchrun" in find_writer("megatron")(job, choice(tp=8, pp=2))
    assert "\ntorchrun" in find_writer("megatron")(job, choice(dp_replicate=16, reduce_each=False))
    assert "\ntorchrun" in find_writer("megatron")(JOBS["llama3-8b"](), choice(dp_shard=16, tp=2))


# What the files say -----------------------------------------------------------------------------------------------


def read_torchtitan(text, job):
    activation_checkpoint = pytest.importorskip("torchtitan.distributed.activation_checkpoint")
    from torchtitan.distributed.parallel_dims import ParallelDims

    config = executed(text).plan()
    kinds = {"FullAC": "full", "SelectiveAC": "selective"}
    policy = config.activation_checkpoint
    recompute = "none" if policy is None else kinds[type(policy).__qualname__.split(".")[0]]
    assert policy is None or isinstance(policy, activation_checkpoint.ActivationCheckpointing.Config)
    config.__post_init__()  # torchtitan's own checks, which its command makes once more
    training, p = config.training, config.parallelism
    assert training.disable_cuda_graphs or config.compile.enable
    ParallelDims.from_config(p, job.ranks)  # which refuses degrees that do not multiply to the ranks
    ep = p.expert_parallel_degree
    assert p.data_parallel_shard_degree * p.context_parallel_degree * p.tensor_parallel_degree % ep == 0
    sizes = {
        "dp_replicate": p.data_parallel_replicate_degree,
        "dp_shard": p.data_parallel_shard_degree // ep,
        "ep": ep,
        "cp": p.context_parallel_degree,
        "tp": p.tensor_parallel_degree,
        "pp": p.pipeline_parallel_degree,
    }
    replicas = p.data_parallel_replicate_degree * p.data_parallel_shard_degree
    accumulated, rest = divmod(training.global_batch_size, training.local_batch_size * replicas)
    assert rest == 0
    pipeline = p.pipeline_parallel_degree > 1
    microbatch = p.pipeline_parallel_microbatch_size if pipeline else training.local_batch_size
    dense = sum(not hasattr(layer, "moe") or layer.moe is None for layer in config.model_spec.model.layers)
    stages = p.module_fqns_per_model_part or []
    layers = [sum(name.startswith("layers.") for name in stage) for stage in stages]
    if pipeline and dense < len(config.model_spec.model.layers):
        layers[0] -= dense
    if pipeline:
        assert [name for stage in stages for name in stage] == [
            "tok_embeddings", *(f"layers.{n}" for n in range(len(config.model_spec.model.layers))), "norm", "lm_head"
        ]  # fmt: skip
    from torch.distributed.pipelining.schedules import get_schedule_class

    from simdev.integrations.configs import torchtitan

    schedule = (
        {name: ours for ours, name in torchtitan.SCHEDULES.items()}[p.pipeline_parallel_schedule] if pipeline else ""
    )
    assert not pipeline or get_schedule_class(p.pipeline_parallel_schedule)
    several = not pipeline and accumulated > 1 and sizes["dp_shard"] > 1
    return Settings(
        job.ranks, Mesh({a: n for a, n in sizes.items() if n > 1}), training.global_batch_size, training.seq_len,
        microbatch, training.local_batch_size // microbatch if pipeline else accumulated, schedule, tuple(layers),
        recompute, several, "mixed" if training.dtype == "float32" else "bfloat16",
        splits_tokens=p.enable_sequence_parallel, compiled=config.compile.enable,
    )  # fmt: skip


def read_transformers(text, job, monkeypatch):
    pytest.importorskip("transformers.distributed")
    pytest.importorskip("accelerate")
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    module = executed(text)
    d, a = module.distributed, module.arguments
    d._validate_mesh_config()
    assert d.efsdp_size * d.ep_size == d.fsdp_size * d.tp_size
    sizes = {
        "dp_shard": d.fsdp_size // d.ep_size,
        "ep": d.ep_size,
        "tp": d.tp_size,
        "dp_replicate": d.dp_replicate_size,
    }
    if d.fsdp_size == d.tp_size == 1:
        sizes["dp_replicate"] = job.ranks  # plain DDP: the Trainer replicates on all ranks
    mesh = Mesh({axis: size for axis, size in sizes.items() if size > 1})
    each = a.accelerator_config.gradient_accumulation_kwargs["sync_each_batch"]
    steps, microbatch = a.gradient_accumulation_steps, a.per_device_train_batch_size
    precision = "mixed" if a.bf16 else "mixed-float16" if a.fp16 else "float32"
    assert not (a.bf16 and not d.fsdp_mixed_precision)
    every = (a.activation_checkpointing_kwargs or {}).get("every_n_layers")
    assert a.activation_checkpointing == (every is not None) and str(module.DTYPE) == "torch.float32"
    recompute = {None: "none", 1: "full"}.get(every, f"every-{every}")
    if d.fsdp_size > 1:
        (blocks,) = d.fsdp_plan
        assert blocks.endswith(".*") and d.fsdp_plan[blocks] == "free_full_weight"
    batch = microbatch * steps * mesh.replicas
    return Settings(
        mesh.ranks, mesh, batch, module.LENGTH, microbatch, steps, "", (), recompute, each, precision,
        compiled=a.torch_compile,
    )  # fmt: skip


def read_accelerate(text, job, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.setattr(accelerate, "Accelerator", lambda **arguments: types.SimpleNamespace(**arguments))
    module = executed(text)
    found = module.accelerator()
    p, sharding = getattr(found, "parallelism_config", None), getattr(found, "fsdp_plugin", None)
    sizes = {"dp_replicate": job.ranks}
    if p is not None:
        assert p.total_size == job.ranks
        sizes = {axis: getattr(p, f"{axis}_size") for axis in ("dp_replicate", "dp_shard", "tp", "cp")}
    mesh = Mesh({axis: size for axis, size in sizes.items() if size > 1})
    assert (sharding is not None) == (mesh["dp_shard"] > 1)
    if sharding is not None:
        assert sharding.fsdp_version == 2
        assert sharding.transformer_cls_names_to_wrap or job.model.name == "small"
        policy = sharding.mixed_precision_policy
        assert (policy is None) == (found.mixed_precision == "no")
        assert policy is None or "bfloat16 torch.float32" == f"{policy.param_dtype} {policy.reduce_dtype}"[6:]
    plugin = found.gradient_accumulation_plugin
    recompute = "full" if sharding is not None and sharding.activation_checkpointing else "none"
    precision = {"bf16": "mixed", "fp16": "mixed-float16", "no": "float32"}[found.mixed_precision]
    batch = module.MICROBATCH * plugin.num_steps * mesh.replicas
    return Settings(
        mesh.ranks, mesh, batch, module.LENGTH, module.MICROBATCH, plugin.num_steps, "", (), recompute,
        plugin.sync_each_batch, precision, sharding is None or sharding.reshard_after_forward,
        compiled=found.dynamo_backend == "inductor",
    )  # fmt: skip


def read_deepspeed(text, job, monkeypatch):
    config = pytest.importorskip("deepspeed.runtime.config")
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    module = executed(text)
    tp = module.CONFIG["tensor_parallel"]["autotp_size"]
    unit = types.SimpleNamespace(get_data_parallel_world_size=lambda: job.ranks // tp)
    found = config.DeepSpeedConfig(module.CONFIG, mpu=unit)
    assert found.zero_optimization_stage in (0, 3)
    sizes = {"tp": tp, "dp_shard" if found.zero_optimization_stage else "dp_replicate": job.ranks // tp}
    mesh = Mesh({axis: size for axis, size in sizes.items() if size > 1})
    steps = found.gradient_accumulation_steps
    precision = (
        "mixed" if found.bfloat16_config.enabled else "mixed-float16" if found.float16_config.enabled else "float32"
    )
    recompute = "full" if "apply_activation_checkpointing" in text else "none"
    each = found.zero_optimization_stage == 3 and steps > 1
    assert str(found.communication_data_type) == ("torch.float16" if precision == "mixed-float16" else "torch.float32")
    return Settings(
        mesh.ranks, mesh, found.train_batch_size, module.LENGTH, found.train_micro_batch_size_per_gpu, steps, "", (),
        recompute, each, precision,
    )  # fmt: skip


MEGATRON_NAMES = {  # arguments whose field of TransformerConfig has another name
    "num-experts": "num_moe_experts", "disable-bias-linear": "add_bias_linear", "swiglu": "gated_linear_unit",
    "norm-epsilon": "layernorm_epsilon", "recompute-num-layers": "recompute_num_layers",
    "no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
    "decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
}  # fmt: skip
ELSEWHERE = {  # arguments of Megatron-LM's training loop and of its model class
    "seq-length", "max-position-embeddings", "micro-batch-size", "global-batch-size", "optimizer", "ckpt-format",
    "tokenizer-type", "vocab-size", "make-vocab-size-divisible-by", "rotary-base", "position-embedding-type",
    "untie-embeddings-and-output-weights", "group-query-attention", "num-layers-per-virtual-pipeline-stage",
    "multi-latent-attention", "use-megatron-fsdp", "data-parallel-sharding-strategy",
    "num-distributed-optimizer-instances", "outer-dp-sharding-strategy", "use-distributed-optimizer",
    "overlap-grad-reduce", "overlap-param-gather", "grad-reduce-in-bf16",
}  # fmt: skip


def megatron_arguments(text):
    words = text.replace("\\\n", " ").split("pretrain_gpt.py", 1)[1]
    found = {}
    for part in filter(None, map(str.strip, re.split(r"\s--", words))):
        key, _, value = part.partition(" ")
        value = value.strip().strip("'")
        try:
            found[key] = ast.literal_eval(value) if value else True
        except (ValueError, SyntaxError):
            found[key] = value
    return found


def megatron_config(a):
    """Megatron-Core's configuration, as Megatron-LM makes it of its arguments."""
    transformer = pytest.importorskip("megatron.core.transformer")
    from dataclasses import fields

    import torch

    ours = {MEGATRON_NAMES.get(key, key.replace("-", "_")): value for key, value in a.items() if key not in ELSEWHERE}
    latent = "multi-latent-attention" in a
    kind = transformer.MLATransformerConfig if latent else transformer.TransformerConfig
    known = {field.name for field in fields(kind)}
    assert set(ours) <= known, set(ours) - known
    if latent:
        ours.setdefault("q_lora_rank", None)  # an argument that is not given is None, whatever the field's default
    for name in {"add_bias_linear", "gradient_accumulation_fusion"} & set(ours):  # arguments that turn a field off
        ours[name] = False
    if "moe_layer_freq" in ours:
        ours["moe_layer_freq"] = eval(ours["moe_layer_freq"])  # as Megatron-LM does
        assert len(ours["moe_layer_freq"]) == a["num-layers"]
    if "num-layers-per-virtual-pipeline-stage" in a:
        per = a["num-layers-per-virtual-pipeline-stage"]
        ours["virtual_pipeline_model_parallel_size"] = a["num-layers"] // per // a["pipeline-model-parallel-size"]
    return kind(**ours, pipeline_dtype=torch.bfloat16)


def read_megatron(text, job):
    pytest.importorskip("megatron.core.transformer")
    from megatron.core.distributed import DistributedDataParallelConfig

    a = megatron_arguments(text)
    config = megatron_config(a)
    sharding = {key.replace("-", "_"): a[key] for key in ("use-megatron-fsdp", "data-parallel-sharding-strategy",
                "num-distributed-optimizer-instances", "outer-dp-sharding-strategy", "use-distributed-optimizer",
                "overlap-grad-reduce", "overlap-param-gather") if key in a}  # fmt: skip
    shards = DistributedDataParallelConfig(**sharding, grad_reduce_in_fp32="grad-reduce-in-bf16" not in a)
    pp, tp, cp = (getattr(config, f"{name}_parallel_size") for name in ("pipeline_model", "tensor_model", "context"))
    ep, data = config.expert_model_parallel_size, job.ranks // (pp * tp * cp)
    assert (config.expert_tensor_parallel_size or 1) == tp or "num-experts" not in a
    replicate = shards.num_distributed_optimizer_instances if shards.use_megatron_fsdp else data // ep
    sizes = {"pp": pp, "tp": tp, "cp": cp, "ep": ep, "dp_replicate": replicate, "dp_shard": data // ep // replicate}
    mesh = Mesh({axis: size for axis, size in sizes.items() if size > 1})
    microbatches, rest = divmod(a["global-batch-size"], a["micro-batch-size"] * data)
    assert rest == 0
    virtual = config.virtual_pipeline_model_parallel_size or 1
    stages = [config.num_layers // (pp * virtual)] * (pp * virtual)
    first, last = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    if pp > 1 and (first or last):
        middle = pp - bool(first) - bool(last)
        rest = config.num_layers - (first or 0) - (last or 0)
        stages = [*[first] * bool(first), *([rest // middle] * middle if middle else []), *[last] * bool(last)]
    dense = sum(not kind for kind in config.moe_layer_freq) if isinstance(config.moe_layer_freq, list) else 0
    if pp > 1:
        stages[0] -= dense
    several = mesh["dp_shard"] > 1 and microbatches > 1 and pp == 1
    whole = mesh.replicas == 1 and cp == 1 and "use-megatron-fsdp" not in a
    return Settings(
        mesh.ranks, mesh, a["global-batch-size"], a["seq-length"], a["micro-batch-size"], microbatches,
        ("interleaved" if virtual > 1 else "1f1b") if pp > 1 else "", tuple(stages) if pp > 1 else (),
        "full" if config.recompute_granularity == "full" else "none", several,
        "mixed-float16" if config.fp16 else "bfloat16" if whole else "mixed", splits_tokens=config.sequence_parallel,
        distributed_optimizer="use-distributed-optimizer" in a and not shards.use_megatron_fsdp,
        main_gradient_bytes=4 if shards.grad_reduce_in_fp32 else 2,
    )  # fmt: skip


READERS = {
    "torchtitan": read_torchtitan,
    "transformers": read_transformers,
    "accelerate": read_accelerate,
    "deepspeed": read_deepspeed,
    "megatron": read_megatron,
}


@pytest.mark.parametrize("target", READERS)
def test_the_file_says_the_plan(target, monkeypatch):
    """Plans are drawn until 200 are written. Each says the plan; the others are refused with a reason."""
    pytest.importorskip("torch")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    write, plans, said = find_writer(target), drawn_plans(1), Counter()
    more = {"monkeypatch": monkeypatch} if target in ("accelerate", "deepspeed", "transformers") else {}
    while said.total() < DRAWN:
        job, drawn = next(plans)
        try:
            text = write(job, drawn)
        except Unsupported:
            continue
        found = READERS[target](text, job, **more)
        assert found == settings_of(job, drawn, builds=("megatron",)), text
        said[found.schedule] += 1
    pipelines = {"torchtitan": set(SCHEDULES), "megatron": {"1f1b", "interleaved"}}
    assert set(said) == {"", *pipelines.get(target, ())}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, sizes",
    [("llama3-8b", {"pp": 2, "dp_shard": 16}), ("deepseek-v2lite", {"dp_shard": 2, "ep": 4})],
)
def test_torchtitans_command_takes_the_file(model, sizes, tmp_path, monkeypatch):
    manager = pytest.importorskip("torchtitan.config").ConfigManager()
    plan = choice(**sizes, recompute="full", microbatch=2)
    name = f"train_plan_{model.partition('-')[0]}"
    (tmp_path / f"{name}.py").write_text(find_writer("torchtitan")(JOBS[model](), plan), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = manager.parse_args(["--module", name, "--config", "plan"])
    assert config.parallelism.pipeline_parallel_degree == plan.mesh["pp"]


@pytest.mark.parametrize(
    "model",
    [
        "llama3-8b",
        "deepseek-v2lite",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("llama3-70b", "deepseek-v3", "qwen3-moe-30b-a3b", "qwen3-32b")
        ),
        pytest.param("gpt-oss-120b", marks=pytest.mark.long),
    ],
)
def test_torchtitans_model_is_ours(model):
    """The configuration that is named has as many parameters as the model that was planned."""
    pytest.importorskip("torchtitan.trainer")
    import torch

    from simdev.graphs.parallel_model import Part
    from simdev.parallel.capture.stage import capture_stage

    job = JOBS[model]() if model in JOBS else make_job(model)
    config = executed(find_writer("torchtitan")(job, choice(dp_shard=job.ranks))).plan()
    with torch.device("meta"):
        theirs = sum(p.numel() for p in config.model_spec.model.build().parameters())
    whole = Mesh({"dp_shard": 2}), Part(job.layers)
    stage = capture_stage(job.model, {**job.parameters, "microbatch": 1}, *whole, order="FB")
    assert theirs == 2 * stage.parameters


@pytest.mark.parametrize(
    "model",
    [
        "gpt-1.3b",
        "llama3-8b",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("llama3-70b", "mixtral-8x7b", "qwen3-moe-30b-a3b", "deepseek-v2lite", "deepseek-v3")
        ),
    ],
)
def test_megatrons_model_is_ours(model, monkeypatch):
    """Megatron-Core builds a model with as many parameters as the model that was planned."""
    gpt = pytest.importorskip("megatron.core.models.gpt")
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import dot_product_attention, multi_latent_attention
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from simdev.graphs.parallel_model import Part
    from simdev.parallel.capture.stage import capture_stage

    job = JOBS[model]() if model in JOBS else make_job(model)
    axis = "dp_replicate" if model.startswith("gpt") else "dp_shard"
    a = megatron_arguments(find_writer("megatron")(job, choice(**{axis: job.ranks}, reduce_each=axis == "dp_shard")))
    whole = Mesh({axis: 2}), Part(job.layers)
    stage = capture_stage(job.model, {**job.parameters, "microbatch": 1}, *whole, order="FB")
    planned = stage.parameters * (2 if axis == "dp_shard" else 1)
    if model.startswith("gpt"):  # the captured program adds most biases within fused kernels, and keeps none of them
        planned += 6 * a["hidden-size"] * a["num-layers"]
    config = megatron_config(a)
    config.moe_grouped_gemm, config.use_cpu_initialization, config.perform_initialization = False, True, False

    # What asks for a GPU, or for Transformer Engine, while a model is built has no parameters.
    monkeypatch.setattr("torch.cuda.Stream", lambda *_, **__: None)
    monkeypatch.setattr("torch.cuda.current_device", lambda: torch.device("meta"))
    monkeypatch.setattr(multi_latent_attention, "TELinear", torch.nn.Bilinear)
    attention = dot_product_attention.DotProductAttention
    monkeypatch.setattr(attention, "__init__", lambda self, *_, **__: torch.nn.Module.__init__(self))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        with torch.device("meta"):
            built = gpt.GPTModel(
                config, get_gpt_decoder_block_spec(config, use_transformer_engine=False), a["vocab-size"] + 1,
                a["max-position-embeddings"], position_embedding_type=a["position-embedding-type"],
                share_embeddings_and_output_weights="untie-embeddings-and-output-weights" not in a,
            )  # fmt: skip
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    assert sum(p.numel() for p in built.parameters()) == planned
