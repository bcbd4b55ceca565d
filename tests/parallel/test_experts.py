"""Mixtures of experts: exchanges along ``ep``, balanced products, sharding of the rest."""

from collections import Counter

import pytest

from simdev.errors import InvalidInput
from simdev.graphs.parallel_model import Part
from simdev.parallel import Plan, find_model, load_cluster, parse_mesh, simulate_plan
from simdev.parallel.capture import capture_stage

pytest.importorskip("torch")
COMMON = "width=64,heads=4,hidden=32,experts=8,active=2,vocabulary=256,length=64"
MIXTRAL = f"mixtral-8x7b[{COMMON},layers=2,kv_heads=2]"
DEEPSEEK = f"deepseek-v3[{COMMON},layers=2,dense=1,query_rank=16,dense_hidden=128,rank=16,head=16,rotated=8,shared=1]"


@pytest.fixture(scope="module", autouse=True)
def captures(tmp_path_factory):
    """Captures are kept for this file alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def forward_of(entry, mesh):
    model, parameters = find_model(entry)
    return capture_stage(model, parameters, parse_mesh(mesh), Part(2), False)


def collectives(segment):
    return Counter((call.kind, call.axes, call.payload_bytes) for call in segment.calls if call.is_collective)


@pytest.mark.parametrize("entry, dense", [(MIXTRAL, 0), (DEEPSEEK, 1)])
def test_tokens_are_exchanged_and_come_back(entry, dense):
    program = forward_of(entry, "dp_shard=2,ep=4")
    found = collectives(program.forward)
    rows = 64 * 2 * 64 * 2  # tokens, experts for each, width, bytes
    assert found["all_to_all", ("ep",), rows] == 2 * 2
    assert sum(n for (kind, axes, _), n in found.items() if axes == ("dp_shard", "ep")) == 3 + dense
    assert found["all_gather", ("dp_shard",), 3 * 2 * 64 * 32 * 2] == 2  # two of eight experts on each rank
    products = [call for call in program.forward.calls if call.kind == "bmm"]
    assert [call.signature for call in products[::3]] == ["bmm(bf16[2,64,64],bf16[2,64,32])->bf16[2,64,32]"] * 2
    assert all(call.flops == 2 * 128 * 64 * 32 for call in products)
    assert not any("grouped" in call.kind for s in (program.forward, *program.backward) for call in s.calls)


def test_a_rank_with_fewer_experts_than_shards_pads_none():
    program = forward_of(MIXTRAL, "dp_shard=4,ep=8")
    assert collectives(program.forward)["all_gather", ("dp_shard",), 3 * 1 * 64 * 32 * 2] == 2


def test_replicas_reduce_gradients():
    program = forward_of(MIXTRAL, "dp_replicate=2")
    assert not collectives(program.forward)
    assert {key[:2] for key in collectives(program.backward[3])} == {("all_reduce", ("dp_replicate",))}


@pytest.mark.parametrize("entry", [MIXTRAL, DEEPSEEK])
def test_flops_are_those_of_the_formula(entry):
    model, parameters = find_model(entry)
    program = forward_of(entry, "dp_shard=2")
    counted = sum(c.flops for s in (program.forward, program.backward[3]) for c in s.calls if c.kind in ("mm", "bmm"))
    attention = 12 * (2 if "mixtral" in entry else 3) * 64 * 64 * 64 * (1 if "mixtral" in entry else (24 + 16) / 2 / 16)
    assert counted == pytest.approx(model.flops(parameters) - attention, rel=1e-9)


def test_a_plan_with_experts_and_a_pipeline():
    model, parameters = find_model(DEEPSEEK)
    plan = Plan(model, parameters, load_cluster("dgx-h100"), parse_mesh("ep=4,pp=2"), 4)
    folded, unfolded = simulate_plan(plan), simulate_plan(plan, unfolded=True)
    assert folded.step_ns == unfolded.step_ns and (folded.exposed_ns > 0).all()
    assert plan.sequences == 16  # each rank of ep has tokens of its own


@pytest.mark.parametrize(
    "entry, mesh, message",
    [
        (MIXTRAL, "ep=16", "experts: 8 does not divide by 16"),
        (MIXTRAL.replace("length=64", "length=33"), "ep=2", "length: 66 rows .* do not divide by 8"),
        (DEEPSEEK.replace("active=2", "active=9"), "ep=2", "active: 9 of 8 experts"),
        (MIXTRAL, "tp=2", "tp: mixtral is not parallelised along it"),
        (DEEPSEEK.replace("]", ",recompute=selective]"), "ep=2", "unknown recompute 'selective'"),
    ],
)
def test_what_does_not_divide_is_refused(entry, mesh, message):
    model, parameters = find_model(entry)
    with pytest.raises(InvalidInput, match=message):
        Plan(model, parameters, load_cluster("dgx-h100"), parse_mesh(mesh))
