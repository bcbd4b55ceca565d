"""The configurations that ``simdev plan --write`` writes, read by each project's own parser where it is installed."""

import json
import tomllib
from dataclasses import replace

import pytest

from simdev.errors import UnknownName, Unsupported
from simdev.integrations.training_config import find_writer
from simdev.parallel import Mesh, find_model, load_cluster
from simdev.planners import Choice, Job


@pytest.fixture(scope="module")
def job():
    model, parameters = find_model("llama3-70b")
    return Job(model, parameters, load_cluster("dgx-h100[nodes=8]"), 1024, name="llama3-70b on dgx-h100[nodes=8]")


def choice(microbatch=2, recompute="full", schedule="1f1b", layers=(), **sizes):
    return Choice(Mesh(sizes), microbatch, recompute, schedule, 1, layers, reduce_each="pp" not in sizes)


def test_torchtitan(job):
    pytest.importorskip("torch")  # asks the model when it reduces gradients
    found = tomllib.loads(find_writer("torchtitan")(job, choice(pp=2, dp_shard=4, tp=8, recompute="selective")))
    assert found["model"] == {"name": "llama3", "flavor": "70B"}
    smaller = job.with_changes(parameters={**job.parameters, "width": 4096})
    assert '"70B"' not in find_writer("torchtitan")(smaller, choice(dp_shard=64))
    assert found["parallelism"]["pipeline_parallel_degree"] == 2
    assert found["parallelism"]["data_parallel_shard_degree"] == 4
    training = found["training"]
    assert training["global_batch_size"] == 1024 == training["local_batch_size"] * 4  # four replicas, no accumulation
    assert found["parallelism"]["pipeline_parallel_microbatch_size"] == 2
    with pytest.raises(Unsupported, match="layers"):
        find_writer("torchtitan")(job, choice(pp=2, dp_shard=4, tp=8, layers=(41, 39)))


def test_torchtitan_knows_every_key(job):
    job_config = pytest.importorskip("torchtitan.config.job_config")
    from dataclasses import fields

    found = tomllib.loads(find_writer("torchtitan")(job, choice(pp=2, dp_shard=4, tp=8, recompute="selective")))
    tables = {field.name: field.default_factory for field in fields(job_config.JobConfig)}
    for table, values in found.items():
        known = {field.name for field in fields(tables[table])}
        assert set(values) <= known, table
        tables[table](**values)


def megatron_arguments(text):
    return dict(
        (word.split() + [True])[:2]
        for word in text.replace("\\\n", "\n").replace("--", "").splitlines()
        if word.strip()
    )


def test_megatron(job):
    found = megatron_arguments(find_writer("megatron")(job, choice(pp=2, dp_shard=4, tp=8)))
    assert found["tensor-model-parallel-size"] == "8" and found["pipeline-model-parallel-size"] == "2"
    assert found["global-batch-size"] == "1024" and found["micro-batch-size"] == "2"
    assert found["recompute-granularity"] == "full" and found["use-distributed-optimizer"] is True
    uneven = megatron_arguments(find_writer("megatron")(job, choice(pp=4, dp_shard=2, tp=8, layers=(21, 20, 20, 19))))
    assert uneven["decoder-first-pipeline-num-layers"] == "21"
    assert uneven["decoder-last-pipeline-num-layers"] == "19"
    with pytest.raises(Unsupported, match="gpipe"):
        find_writer("megatron")(job, choice(pp=2, dp_shard=4, tp=8, schedule="gpipe"))


def test_accelerate_reads_its_file(job, tmp_path):
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    path = tmp_path / "config.yaml"
    path.write_text(find_writer("accelerate")(job, choice(dp_replicate=2, dp_shard=4, tp=8)))
    found = load_config_from_file(str(path))
    assert found.num_processes == 64 and found.num_machines == 8 and found.mixed_precision == "bf16"
    known = {action.dest for action in launch_command_parser()._actions}
    assert set(found.fsdp_config) | set(found.parallelism_config) <= known
    assert found.parallelism_config["parallelism_config_dp_shard_size"] == 4


def test_trainer_reads_fsdp(job, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    found = json.loads(find_writer("fsdp")(job, choice(dp_shard=64)))
    assert found["gradient_accumulation_steps"] == 8
    assert found["accelerator_config"]["gradient_accumulation_kwargs"]["sync_each_batch"] is True
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **found)
    assert arguments.per_device_train_batch_size == 2 and arguments.fsdp_config["activation_checkpointing"] is True
    with pytest.raises(Unsupported, match="torchtitan"):
        find_writer("fsdp")(job, choice(dp_shard=8, tp=8))


def test_deepspeed(job):
    pytest.importorskip("torch")  # asks the model when it reduces gradients
    found = json.loads(find_writer("deepspeed")(job, choice(dp_shard=64)))
    assert found["zero_optimization"]["stage"] == 3
    each = found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"]
    assert found["train_batch_size"] == each * 64  # what DeepSpeed asserts
    with pytest.raises(Unsupported, match="DeepSpeed"):
        find_writer("deepspeed")(job, choice(pp=2, dp_shard=32))


def test_deepspeed_reads_its_file(job, tmp_path):
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    found = json.loads(find_writer("deepspeed")(job, choice(microbatch=1, dp_shard=64)))
    found |= {"train_batch_size": found["gradient_accumulation_steps"]}  # a world of one rank
    assert DeepSpeedConfig(found).zero_optimization_stage == 3


@pytest.mark.parametrize("framework", ["torchtitan", "deepspeed"])
def test_a_plan_that_keeps_whole_gradients_is_refused_where_they_are_reduced(job, framework):
    pytest.importorskip("torch")
    with pytest.raises(Unsupported, match="after each microbatch"):
        find_writer(framework)(job, replace(choice(dp_shard=64), reduce_each=False))


@pytest.mark.parametrize("framework", ["torchtitan", "megatron", "accelerate", "deepspeed", "fsdp"])
def test_no_configuration_gives_each_stage_a_mesh(job, framework):
    own = Choice(Mesh({"pp": 2}), 8, stage_meshes=(Mesh({"dp_shard": 8, "tp": 4}), Mesh({"dp_shard": 4, "tp": 8})))
    with pytest.raises(Unsupported, match=f"{framework} configurations have one mesh for all stages"):
        find_writer(framework)(job, own)


def test_an_unknown_framework_is_named():
    with pytest.raises(UnknownName, match="torchtitan"):
        find_writer("torchtitn")
