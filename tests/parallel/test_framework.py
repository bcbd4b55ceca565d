"""Frameworks: ids, releases and variants, what they change, and files that are refused."""

import pytest

from simdev.errors import InvalidInput, UnknownName
from simdev.parallel import find_model, load_cluster
from simdev.parallel.framework import find_framework, framework_names
from simdev.parallel.typed_plan import TypedPlan


def test_every_shipped_framework_says_what_it_is_and_compiled_ones_have_a_host_that_is_never_late():
    names = framework_names()
    assert {"eager", "compiled", "torchtitan", "llm-foundry", "megatron", "nemo", "fms-fsdp", "automodel"} <= set(names)
    assert all(find_framework(name).description for name in names)
    for name in ("compiled", "fms-fsdp", "torchtitan[compiled]"):
        assert find_framework(name).fused and find_framework(name).host.idle
    assert not find_framework("eager").fused and not find_framework("eager").host.idle


def test_a_release_takes_the_newest_table_that_is_not_newer_and_parts_add_up():
    factors = {release: find_framework(f"nemo[{release}]").scale for release in ("23.11", "24.7", "24.08", "25.09")}
    assert factors["23.11"] == factors["24.7"] == {}
    assert factors["24.08"] == factors["25.09"] and factors["25.09"]["attention"] == 0.6
    assert find_framework("torchtitan").parameters == {}
    assert find_framework("torchtitan[2024.12]").parameters["llama3"]["norm"] == "composed"
    assert find_framework("torchtitan[2024.12,compiled]").parameters["llama3"]["norm"] == "fused"


def test_factors_of_the_rest_are_those_of_every_other_class():
    scale = find_framework("llm-foundry").scale
    assert (scale["gemm"], scale["attention"], scale["norm"], scale["elementwise"]) == (1.138, 1.738, 1.177, 1.177)


def test_a_framework_changes_defaults_and_leaves_what_is_typed():
    framework = find_framework("torchtitan[2024.12]")
    for entry, norm in (
        ("llama3-8b", "composed"),
        ("llama3-8b[norm=fused]", "fused"),
        ("llama3-8b[length=64]", "composed"),
    ):
        model, parameters = find_model(entry)
        assert framework.parameters_of(model.name, parameters, entry)["norm"] == norm
    model, parameters = find_model("gpt-3.6b")
    assert framework.parameters_of(model.name, parameters, "gpt-3.6b") == parameters


@pytest.mark.parametrize("entry", ["mixtral-8x7b", "qwen3-moe-30b-a3b", "deepseek-v3"])
def test_automodel_sends_a_token_once_to_a_rank_whatever_the_model(entry):
    model, parameters = find_model(entry)
    found = [
        find_framework(f"automodel{part}").parameters_of(model.name, parameters, entry) for part in ("", "[experts]")
    ]
    assert [(one["dispatch"], one["gate"]) for one in found] == [("tokens", "uniform"), ("tokens", "consecutive")]


def test_sends_are_those_of_the_framework():
    cluster = load_cluster("dgx-a100")
    assert find_framework("megatron[vtrain-node]").on(cluster).send_bytes_per_s == 14_000_000_000
    assert find_framework("megatron").on(cluster) is cluster


def test_a_file_of_the_user_serves_by_its_path(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text('description = "ours"\nfused = true\n[host]\nforward_us = 1.5\n[release."1.2"]\nfused = false\n')
    assert find_framework(str(path)).host.forward_ns == 1500 and find_framework(str(path)).fused
    assert not find_framework(f"{path}[2]").fused


@pytest.mark.parametrize(
    "text, message",
    [
        ("fused = true", "description: missing"),
        ('description = "x"\nfast = true', "fast"),
        ('description = "x"\n[host]\nforward_ms = 1', "forward_ms"),
        ('description = "x"\n[factors]\ngem = 1.1', "gem"),
        ('description = "x"\n[factors]\ngemm = 0.0', "from 0.1 to 10"),
        ('description = "x"\n[release.new]\nfused = true', "release: expected numbers"),
    ],
)
def test_wrong_files_name_the_field(tmp_path, text, message):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=message):
        find_framework(str(path))


@pytest.mark.parametrize("entry", ["torchtian", "torchtitan[fast]", "nemo[new]"])
def test_unknown_names_are_named(entry):
    with pytest.raises(UnknownName):
        find_framework(entry)


def test_replicas_divide_the_state_of_a_distributed_optimizer():
    pytest.importorskip("torch")
    from simdev.parallel.plan import prepare, resident_bytes

    found = {}
    small = "llama3-8b[width=64,layers=3,heads=4,kv_heads=2,hidden=128,vocabulary=256,length=32]"
    for replicas in (1, 2, 4):
        typed = TypedPlan(small, "dgx-h100", f"tp=2,dp_replicate={replicas}", 2, framework="nemo")
        program = prepare(typed.plan, typed.prices())
        (stage,) = program.stages
        found[replicas] = resident_bytes(typed.plan, stage) / stage.parameters, program.finish[0].work_ns
    assert [memory for memory, _ in found.values()] == [18, 12, 9]  # 6 + 12 / replicas bytes a parameter
    assert found[4][1] <= -(-found[1][1] // 4) + 1


def test_arguments_leave_out_defaults():
    typed = TypedPlan("gpt-3.6b", "dgx-a100", "tp=8", 4, framework="megatron", stages_per_rank=1)
    assert typed.arguments == [
        "gpt-3.6b",
        "dgx-a100",
        "--mesh",
        "tp=8",
        "--microbatches",
        "4",
        "--framework",
        "megatron",
    ]
