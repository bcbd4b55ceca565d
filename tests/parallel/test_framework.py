"""Frameworks: ids, releases and variants, what they change, and files that are refused. Shipped clusters: boards with a
device file use it, and a precision without a rate is refused."""

from dataclasses import replace

import numpy as np
import pytest

from simdev.errors import InvalidInput, UnknownName, Unsupported
from simdev.parallel import Mesh, Prices, find_model, load_cluster
from simdev.parallel.costs.collectives import collective_ns
from simdev.parallel.costs.float8 import Float8
from simdev.parallel.costs.overlap import beside_collectives
from simdev.parallel.framework import find_framework, framework_names
from simdev.parallel.program import COMPUTE, Call, Segment
from simdev.parallel.typed_plan import TypedPlan
from simdev.problem.opcost.device import calibration_names
from simdev.problem.topology import load_topology, topology_names


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


def test_factors_of_the_rest_are_those_of_every_other_class(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text('description = "ours"\n[factors]\ngemm = 1.1\nattention = 1.5\nrest = 1.2\n')
    scale = find_framework(str(path)).scale
    assert (scale["gemm"], scale["attention"], scale["norm"], scale["elementwise"]) == (1.1, 1.5, 1.2, 1.2)


def test_llm_foundry_has_the_attention_of_its_benchmarks_and_no_other_factor():
    for name, attention in (("llm-foundry", 1.69), ("llm-foundry[2023.10]", 1.69), ("llm-foundry[2023.10,flash]", 1)):
        scale = find_framework(name).scale
        assert scale["attention"] == attention and {scale[kind] for kind in scale if kind != "attention"} == {1}
    early_stop = [find_framework(f"llm-foundry{part}").parameters["mpt"]["early_stop"] for part in ("", "[2023.10]")]
    assert early_stop == ["no", "yes"]  # PyTorch 1.13 and 2.1


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


def test_kernels_beside_collectives_are_slower_unless_host_times_were_fitted_to_whole_runs():
    fitted = {name for name in framework_names() if find_framework(name).slowdown == 1}
    assert fitted == {"megatron"}
    assert all(find_framework(name).slowdown == 1.189 for name in framework_names() if name not in fitted)


def test_a_plan_has_the_slowdown_of_its_framework_unless_another_one_is_given():
    assert TypedPlan("small", "dgx-a100", "dp_shard=2", framework="compiled").plan.slowdown == 1.189
    assert TypedPlan("small", "dgx-a100", "dp_shard=2", framework="megatron").plan.slowdown == 1
    usual, slow = 1.189, {3: 2.0}
    assert beside_collectives(usual, None, {}) == 1.189
    assert beside_collectives(usual, 1.0, {}) == 1
    assert beside_collectives(usual, 1.4, {}) == 1.4
    assert beside_collectives(usual, None, slow) == 1  # the overlap of one rank stands for that of all
    for given, ranks in ((1.4, slow), (0.9, {}), (11, {})):
        with pytest.raises(InvalidInput, match="slowdown"):
            beside_collectives(usual, given, ranks)


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
        ('description = "x"\nmain_gradient_bytes = 3', "main_gradient_bytes: expected 2 or 4, got 3"),
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
    from simdev.parallel.costs.reserved import reserved_bytes
    from simdev.parallel.plan import prepare, resident_bytes

    found = {}
    small = "llama3-8b[width=64,layers=3,heads=4,kv_heads=2,hidden=128,vocabulary=256,length=32]"
    for replicas in (1, 2, 4):
        typed = TypedPlan(small, "dgx-h100", f"tp=2,dp_replicate={replicas}", 2, framework="nemo")
        program = prepare(typed.plan, typed.prices())
        (stage,) = program.stages
        found[replicas] = resident_bytes(typed.plan, stage) / stage.parameters, program.finish[0].work_ns
    assert [memory for memory, _ in found.values()] == [16, 10, 7]  # 2 + 2 + 12 / replicas bytes a parameter
    assert found[4][1] <= -(-found[1][1] // 4) + 1
    allocated = [
        reserved_bytes(replace(typed.plan, main_gradient_bytes=size))[0].allocated - size * stage.parameters
        for size in (2, 4)
    ]
    assert allocated[0] == pytest.approx(allocated[1], abs=512)  # the allocator's rounding


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


PRODUCT = "mm(bf16[4096,4096],bf16[4096,4096])->bf16[4096,4096]"


@pytest.mark.parametrize("name", topology_names())
def test_a_board_that_has_a_device_file_uses_it(name):
    for device in load_topology(name).devices:
        board = device.kind.name.partition("-")[0]
        if board in calibration_names():
            assert device.kind.calibrated == board, f"{name}: {device.kind.name}"


def priced(cluster, signature, **options):
    call = Call(COMPUTE, signature.partition("(")[0], signature, 2 * 4096**3, 2**26, 2**25)
    return Prices(load_cluster(cluster), **options).of(Segment("F", (call,)), Mesh({}), 0)[0]


def test_fp8_is_quicker_on_b200_and_refused_on_a100():
    half, eight = priced("dgx-b200", PRODUCT), priced("dgx-b200", PRODUCT, float8=Float8())
    assert 50_000 < half < 120_000  # 137 GFLOP at 2,250 TFLOP/s take 61 us
    assert eight < half < priced("dgx-h100", PRODUCT)
    with pytest.raises(Unsupported, match=r"dgx-a100: no rate for products in f8; a100-sxm4-80gb has .*bf16"):
        priced("dgx-a100", PRODUCT, float8=Float8())


def test_bf16_is_refused_on_a_board_that_multiplies_in_f16_alone():
    assert priced("v100x8-dgx1", "mm(f16[4096,4096],f16[4096,4096])->f16[4096,4096]") > 0
    with pytest.raises(Unsupported, match="no rate for products in bf16.*one, such as dgx-a100"):
        priced("v100x8-dgx1", "mm(bf16[4096,4096],bf16[4096,4096])->bf16[4096,4096]")


def test_nodes_of_h200():
    for name, gpus in (("h200x4", 4), ("dgx-h200", 8)):
        cluster = load_cluster(f"{name}[nodes=2]")
        assert (cluster.gpus, cluster.nodes, cluster.kind.calibrated) == (gpus, 2, "h200")


def all_reduce_gb_per_s(cluster, ranks, size=1 << 33):
    """Bytes that each rank's links carry, over the time (``busbw`` of nccl-tests)."""
    taken_ns = collective_ns("all_reduce", size, np.arange(ranks), load_cluster(cluster))
    return 2 * (ranks - 1) / ranks * size / taken_ns


def test_a_rack_of_gb200_is_one_domain_of_72():
    cluster = load_cluster("gb200-nvl72[nodes=2]")
    assert (cluster.gpus, cluster.nodes) == (72, 2)
    assert 600 < all_reduce_gb_per_s("gb200-nvl72", 8) < 811  # measured on two trays with 16 GB: 811
    assert 600 < all_reduce_gb_per_s("gb200-nvl72", 72) < 811
    small = [collective_ns("all_gather", 2048, np.arange(ranks), cluster) for ranks in (4, 8, 72)]
    assert small == [
        11_900,
        11_900 + 4 * 600,
        11_900 + 68 * 600,
    ]  # the table's 11.9 us, and a step for each further rank
    half, eight = (priced("gb200-nvl72", PRODUCT, **options) for options in ({}, {"float8": Float8()}))
    assert eight < half < priced("dgx-b200", PRODUCT)


def test_all_links_of_an_mi300x_carry_an_all_reduce():
    for ranks, links in ((2, 1), (4, 3), (8, 7)):  # AMD: 48 GB/s a link; RCCL carries 0.92 of it
        assert all_reduce_gb_per_s("mi300x8", ranks) == pytest.approx(48 * 0.92 * links, rel=0.01)
    assert load_cluster("mi300x8").kind.calibrated == "mi300x"
