"""Mixtures of experts: exchanges along ``ep``, balanced products, sharding of the rest."""

from collections import Counter
from types import SimpleNamespace

import pytest

from simdev.errors import InvalidInput
from simdev.graphs.parallel_model import Part
from simdev.graphs.routing import Routing
from simdev.parallel import Plan, find_model, load_cluster, parse_mesh, simulate_plan
from simdev.parallel.capture.stage import capture_stage
from simdev.parallel.costs.timing import Prices
from simdev.parallel.typed_plan import TypedPlan

pytest.importorskip("torch")
COMMON = "width=64,heads=4,hidden=32,experts=8,active=2,vocabulary=256,length=64"
MIXTRAL = f"mixtral-8x7b[{COMMON},layers=2,kv_heads=2]"
QWEN = f"qwen3-moe-30b-a3b[{COMMON},layers=2,kv_heads=2,head=32]"
DEEPSEEK = f"deepseek-v3[{COMMON},layers=2,dense=1,query_rank=16,dense_hidden=128,rank=16,head=16,rotated=8,shared=1]"
pytestmark = pytest.mark.usefixtures("own_captures")


def forward_of(entry, mesh):
    model, parameters = find_model(entry)
    return capture_stage(model, parameters, parse_mesh(mesh), Part(2), "FB")


def collectives(segment):
    return Counter((call.kind, call.axes, call.payload_bytes) for call in segment.calls if call.is_collective)


@pytest.mark.parametrize("entry, dense", [(MIXTRAL, 0), (QWEN, 0), (DEEPSEEK, 1)])
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


def test_more_shards_than_experts_pad_none():
    few, many = (forward_of(MIXTRAL, f"dp_shard={ranks}") for ranks in (2, 32))
    router = 2 * (32 - 8) * 64  # of two layers: FSDP pads the rows of the router, as it would pad the experts
    assert many.parameters * 32 - router == few.parameters * 2


def test_replicas_reduce_gradients():
    program = forward_of(MIXTRAL, "dp_replicate=2")
    assert not collectives(program.forward)
    assert {key[:2] for key in collectives(program.backward[3])} == {("all_reduce", ("dp_replicate",))}


@pytest.mark.parametrize("entry, layers, head", [(MIXTRAL, 2, 16), (QWEN, 2, 32), (DEEPSEEK, 3, (24 + 16) / 2)])
def test_flops_are_those_of_the_formula(entry, layers, head):
    model, parameters = find_model(entry)
    program = forward_of(entry, "dp_shard=2")
    counted = sum(c.flops for s in (program.forward, program.backward[3]) for c in s.calls if c.kind in ("mm", "bmm"))
    attention = 12 * layers * 4 * head * 64 * 64
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
        (DEEPSEEK.replace("hidden=32", "hidden=24"), "dp_shard=16", "hidden: the 24 rows of an expert .* 16 shards"),
        (MIXTRAL, "cp=2", "cp: mixtral is not parallelised along it"),
        (MIXTRAL.replace("kv_heads=2", "kv_heads=1"), "tp=2", "kv_heads: 1 does not divide by 2"),
        (MIXTRAL.replace("]", ",imbalance=3]"), "ep=2", "imbalance: expected 1 .balanced. to 2 .*, got 3.0"),
        (DEEPSEEK.replace("]", ",imbalance=0.5]"), "ep=2", "imbalance: expected 1"),
        (DEEPSEEK.replace("]", ",imbalance=1.5]"), "tp=2", "imbalance: expected 1 .balanced. to 1"),
        (DEEPSEEK.replace("]", ",recompute=selective]"), "ep=2", "unknown recompute 'selective'"),
        (QWEN.replace("]", ",dispatch=deepep]"), "ep=2", "unknown dispatch 'deepep'"),
        (MIXTRAL.replace("]", ",gate=even]"), "ep=2", "unknown gate 'even'"),
    ],
)
def test_what_does_not_divide_is_refused(entry, mesh, message):
    model, parameters = find_model(entry)
    with pytest.raises(InvalidInput, match=message):
        Plan(model, parameters, load_cluster("dgx-h100"), parse_mesh(mesh))


@pytest.mark.parametrize("entry, shared", [(MIXTRAL, 0), (QWEN, 0), (DEEPSEEK, 1)])
def test_experts_and_tensor_parallelism_divide_each_expert(entry, shared):
    alone, both = forward_of(entry, "dp_shard=2,ep=2"), forward_of(entry, "dp_shard=2,ep=2,tp=2")

    def products(program):
        return [c for s in (program.forward, program.backward[3]) for c in s.calls if c.kind == "bmm"]

    assert 2 * sum(c.flops for c in products(both)) == sum(c.flops for c in products(alone))
    assert products(both)[0].signature == "bmm(bf16[4,32,64],bf16[4,64,16])->bf16[4,32,16]"
    exchanged = [{key: n for key, n in collectives(p.forward).items() if key[1] == ("ep",)} for p in (alone, both)]
    assert exchanged[0] == exchanged[1]  # each rank of tp exchanges the whole rows
    along = [call.kind for call in both.forward.calls if call.axes == ("tp",)]
    layers = 2 + (1 if "deepseek" in entry else 0)
    assert along.count("all_gather") >= 2 * layers and along.count("reduce_scatter") >= 2 * layers


@pytest.mark.parametrize("size, count", [("30b-a3b", 30_532_122_624), ("235b-a22b", 235_093_634_560)])
def test_qwen_has_the_published_number_of_parameters(size, count):
    model, parameters = find_model(f"qwen3-moe-{size}")
    stage = model.function(SimpleNamespace(mesh_dim_names=()), Part(parameters["layers"]), **parameters)
    assert sum(parameter.numel() for parameter in stage.module.parameters()) == count


def test_heads_are_normed_on_their_own_rank():
    alone, divided = forward_of(QWEN, "dp_shard=2"), forward_of(QWEN, "dp_shard=2,tp=2")
    norms = [[c.signature for c in p.forward.calls if "[1,64,4,32]" in c.signature] for p in (alone, divided)]
    assert norms[0] and not norms[1]  # two of four heads of queries on each rank
    gradients = collectives(divided.backward[3])  # each rank has a part of the gradients of two norms in two layers
    assert gradients["all_reduce", ("tp",), 32 * 2] == 2 * 2


@pytest.mark.parametrize(
    "experts, active, ways, gate, ranks",
    [
        (8, 1, 4, "uniform", 1),
        (4, 2, 2, "uniform", 2 - 2 / 6),  # both on one rank in two of six pairs
        (8, 8, 8, "uniform", 8),
        (128, 8, 8, "consecutive", 1),  # sixteen experts on a rank
        (256, 8, 64, "consecutive", 2),  # four experts on a rank
        (8, 3, 4, "consecutive", 2),  # 0-2, 3-5, 6-0, 1-3, 4-6, 7-1, 2-4, 5-7: two each
        (9, 2, 3, "consecutive", 1 + 1 / 3),  # of nine pairs, 2-3, 8-0 and 5-6 lie on two ranks
    ],
)
def test_the_ranks_that_a_token_is_sent_to(experts, active, ways, gate, ranks):
    assert Routing(experts, active, gate).parts_of_a_token(ways) == pytest.approx(ranks)


@pytest.mark.parametrize("entry", [MIXTRAL, QWEN, DEEPSEEK])
def test_a_token_is_sent_once_to_each_rank(entry):
    pairs, tokens = (forward_of(entry.replace("]", f",dispatch={name}]"), "ep=4") for name in ("pairs", "tokens"))
    # Two of eight experts, two on each of four ranks: a token meets 4 (1 - 15 / 28) ranks, so 29.7 of 64 go to each.
    sent = 4 * 30 * 64 * 2
    assert collectives(tokens.forward)["all_to_all", ("ep",), sent] == 2 * 2
    assert collectives(tokens.backward[3])["all_to_all", ("ep",), sent] == 2 * 2
    products = [[c.signature for c in p.forward.calls if c.kind == "bmm"] for p in (pairs, tokens)]
    assert products[0] == products[1]
    near = forward_of(entry.replace("]", ",dispatch=tokens,gate=consecutive,imbalance=1.5]"), "ep=4")
    assert collectives(near.forward)["all_to_all", ("ep",), 4 * 24 * 64 * 2] == 2 * 2  # 64 tokens to one of 4 ranks


def test_a_plan_in_python_sends_tokens_as_the_command_does():
    entry = DEEPSEEK.replace("experts=8", "experts=16").replace("length=64", "length=4096,microbatch=8")
    entry = entry.replace("]", ",dispatch=tokens,gate=consecutive]")
    typed = TypedPlan(entry, "dgx-h100", "ep=16")
    python, command, whole = (
        simulate_plan(typed.plan, prices, slowdown=1.0).step_ns
        for prices in (None, typed.prices(), Prices(typed.plan.cluster))
    )
    assert python == command < whole  # without routing, each rank gets its copy over the network


def test_the_busiest_rank_gets_its_share_of_the_rows():
    balanced, uneven = (forward_of(MIXTRAL.replace("]", f",imbalance={x}]"), "ep=4") for x in ("1.0", "1.5"))
    signatures = [next(c.signature for c in p.forward.calls if c.kind == "bmm") for p in (balanced, uneven)]
    assert signatures == [
        "bmm(bf16[2,64,64],bf16[2,64,32])->bf16[2,64,32]",
        "bmm(bf16[2,96,64],bf16[2,64,32])->bf16[2,96,32]",
    ]
    largest = [
        max(size for (kind, *_, size) in collectives(p.forward) if kind == "all_to_all") for p in (balanced, uneven)
    ]
    assert largest[1] == 1.5 * largest[0]
    sent = [collectives(p.forward) for p in (balanced, uneven)]
    assert sum(n for (kind, *_), n in sent[0].items() if kind == "all_to_all") == sum(
        n for (kind, *_), n in sent[1].items() if kind == "all_to_all"
    )
