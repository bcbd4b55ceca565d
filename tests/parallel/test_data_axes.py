"""The axes along which ranks hold different tokens: replicas, shards, parts of a sequence."""

from collections import Counter

import pytest

from simdev.errors import InvalidInput
from simdev.graphs.parallel_model import Part
from simdev.parallel import Plan, find_model, load_cluster, parse_mesh, simulate_plan
from simdev.parallel.capture.stage import capture_stage
from simdev.parallel.passes import STEP
from simdev.parallel.typed_plan import TypedPlan

pytest.importorskip("torch")
LLAMA = "llama3-8b[width=64,layers=2,heads=8,kv_heads=2,hidden=128,vocabulary=256,length=64]"
MPT = "mpt-125m[width=64,layers=2,heads=4,vocabulary=256,length=64]"
pytestmark = pytest.mark.usefixtures("own_captures")


def capture(entry, mesh, order="FB"):
    model, parameters = find_model(entry)
    return capture_stage(model, parameters, parse_mesh(mesh), Part(2), order)


def collectives(segment):
    return Counter((call.kind, "+".join(call.axes)) for call in segment.calls if call.is_collective)


@pytest.mark.parametrize("entry", [LLAMA, MPT])
def test_replicas_alone_reduce_gradients_once_a_step(entry):
    program = capture(entry, "dp_replicate=2", order=STEP)
    reduced = ("all_reduce", "dp_replicate")
    assert not collectives(program.forward)
    assert collectives(program.backward[program.LAST]) == {reduced: 3}  # two layers and the rest
    further = collectives(program.backward[program.FURTHER])
    assert further == ({reduced: 3} if "mpt" in entry else {})  # MPT's recipe reduces with every microbatch


def test_metrics_of_the_loss_are_computed_when_activations_are_gone():
    """Composer computes them after the backward pass; in the forward pass, fifteen of llm-foundry's published jobs were
    said not to fit."""
    entry = MPT.replace("vocabulary=256", "vocabulary=512,train_metrics=2,loss=fused")
    wide = 64 * 512  # tokens and vocabulary
    program = capture(entry, "dp_shard=2")
    last = program.backward[program.LAST]
    forward, backward = (
        [call for call in part.calls if "64,512]" in call.signature] for part in (program.forward, last)
    )
    made = [call.kind for call in forward if call.bytes_written >= 2 * wide]
    assert made == ["mm"]  # the logits alone: no probabilities
    later = [call.kind for call in backward]
    assert later.count("_log_softmax") == 2 and later.count("_softmax") == 1
    assert later.index("_softmax") < later.index("_log_softmax")
    assert all("f32[" in call.signature for call in backward if call.kind == "_log_softmax")
    norms = [n for n, call in enumerate(last.calls) if call.kind == "native_layer_norm_backward"]
    metrics = [n for n, call in enumerate(last.calls) if call.kind == "_log_softmax"]
    assert len(norms) == 5 and max(norms) < min(metrics)  # behind the backward passes of all layers


@pytest.mark.parametrize("mesh", ["tp=2", "dp_shard=2,tp=2", "cp=2,tp=2"])
def test_kernels_wait_for_the_collective_that_makes_their_input(mesh):
    calls = capture(LLAMA, mesh).forward.calls
    reduced = [n for n, c in enumerate(calls) if c.axes == ("tp",)]
    waits = [n for n, c in enumerate(calls) if c.stream == "compute" and "tp" in dict(c.waits)]
    assert len(reduced) == len(waits) > 5
    assert all(issue < wait for issue, wait in zip(reduced, waits, strict=True))


def test_replicas_reduce_what_tensor_parallel_ranks_have():
    """Parameters that ``tp`` divides, which are DTensors, and whole ones, which are not, go through one all-reduce."""
    finish = capture("small[width=64,layers=2,vocabulary=128,length=16]", "dp_replicate=2,tp=2").finish
    (call,) = (call for call in finish.calls if call.is_collective)
    layer, ends = 12 * 64 * 64 // 2 + 2 * 2 * 64, 2 * 64 + 2 * 128 * 64
    assert (call.kind, call.stream, call.payload_bytes) == ("all_reduce", "dp_replicate", 4 * (2 * layer + ends))


def test_a_sequence_split_between_ranks():
    program, whole = capture(LLAMA, "dp_shard=2,cp=2"), capture(LLAMA, "dp_shard=4")
    found = collectives(program.forward)
    assert found == {("all_gather", "dp_shard+cp"): 3, ("all_gather", "cp"): 2}
    assert collectives(program.backward[3])["all_to_all", "cp"] == 2 * 2  # gradients of keys and values

    def products(one):
        return sum(c.flops for s in (one.forward, one.backward[3]) for c in s.calls if c.kind in ("mm", "bmm"))

    assert 2 * products(program) == products(whole)
    assert program.parameters == whole.parameters


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_attention_is_split_where_it_is_recomputed_too(recompute):
    program = capture(LLAMA.replace("]", f",recompute={recompute}]"), "cp=2,tp=2")
    again = [c for c in program.backward[3].calls if c.kind == "_scaled_dot_product_flash_attention"]
    assert len(again) == (2 * 2 if recompute == "full" else 0)
    kinds = Counter(call.kind for call in program.backward[3].calls)
    assert not any("for_cpu" in kind for kind in kinds)


def test_a_plan_with_context_parallelism():
    model, parameters = find_model(LLAMA)
    plan = Plan(model, parameters, load_cluster("dgx-h100"), parse_mesh("dp_shard=2,cp=2,tp=2"), 2)
    report = simulate_plan(plan)
    assert report.step_ns == simulate_plan(plan, unfolded=True).step_ns
    assert plan.sequences == 2 * 2


def test_a_sequence_that_does_not_divide_is_refused():
    model, parameters = find_model(LLAMA.replace("length=64", "length=72"))
    with pytest.raises(InvalidInput, match="length: 72 does not divide into two pieces for each of 8 ranks"):
        Plan(model, parameters, load_cluster("dgx-h100"), parse_mesh("cp=8"))


TINY = "width=64,layers=2,heads=4,hidden=128,length=32,microbatch=2"


@pytest.mark.parametrize("entry", [f"bert-large[{TINY},vocabulary=256]", f"vit-22b[{TINY},classes=256]"])
def test_encoders_are_reduced_twice_a_layer_and_direction(entry):
    program = capture(entry, "dp_shard=2,tp=2")
    assert collectives(program.forward) == {("all_reduce", "tp"): 2 * 2, ("all_gather", "dp_shard"): 2 + 1}
    assert collectives(program.backward[3])["all_reduce", "tp"] == 2 * 2
    program = capture(entry, "dp_shard=2")
    model, parameters = find_model(entry)
    products = sum(c.flops for s in (program.forward, program.backward[3]) for c in s.calls if "mm" in c.kind)
    attention = 12 * 2 * 64 * 32 * 32
    assert products == pytest.approx(2 * (model.flops(parameters) - attention), rel=0.02)


def test_replicas_and_halves_of_backward_passes():
    program = capture_stage(*find_model(LLAMA), parse_mesh("dp_replicate=2"), Part(2, first=False), STEP, True)
    assert collectives(program.finish) == {("all_reduce", "dp_replicate"): 3}
    assert not any(collectives(half) for half in program.split)


def test_one_rank_trains_in_bfloat16_without_fsdp():
    program = capture(LLAMA, "dp_shard=1")
    kinds = {call.kind for segment in (program.forward, program.backward[3], program.finish) for call in segment.calls}
    assert not kinds & {"chunk_cat", "split_with_sizes_copy"}
    assert all("f32[64,64]->bf16" not in call.signature for call in program.forward.calls)


def test_sequence_parallel_gpt_gathers_before_and_scatters_after_products():
    """Two layers: each gathers and scatters twice; the loss gathers once; backward passes do the reverse, and gather
    the input of each product again. Attention alone is recomputed."""
    entry = "gpt-1.3b[width=64,layers=2,heads=4,vocabulary=256,length=64,{}]"
    whole = capture(entry.format("recompute=none"), "tp=2")
    divided = capture(entry.format("recompute=selective,sequence_parallel=yes"), "tp=2")
    assert collectives(whole.forward) == {("all_reduce", "tp"): 2 * 2 + 1 + 3}  # the embedding, and three in the loss
    assert collectives(divided.forward) == {
        ("all_gather", "tp"): 2 * 2 + 1,
        ("reduce_scatter", "tp"): 2 * 2,
        ("all_reduce", "tp"): 1 + 3,
    }
    assert collectives(divided.backward[3]) == {
        ("all_gather", "tp"): 2 * (2 + 2) + 1 + 1,  # inputs again, gradients of scatters; the loss; the embedding
        ("reduce_scatter", "tp"): 2 * 2 + 1,
    }

    def flops(program):
        return sum(call.flops for call in program.backward[3].calls)

    scores = 2 * 2 * (2 * 64 * 64 * 16)  # two layers, two heads: the product whose result is needed again
    assert flops(divided) - flops(whole) == pytest.approx(scores, rel=0.01)


def test_megatrons_llama_keeps_the_tokens_of_its_rank_and_computes_its_loss_in_place():
    entry = LLAMA.replace("vocabulary=256", "vocabulary=65536").replace("]", ",build={}]")
    ours, megatron = (capture(entry.format(build), "tp=2") for build in ("torchtitan", "megatron"))
    assert collectives(megatron.forward) == {
        ("all_gather", "tp"): 2 * 2 + 1,
        ("reduce_scatter", "tp"): 2 * 2 + 1,  # two in each layer, and the embedding
        ("all_reduce", "tp"): 3,
    }
    assert collectives(megatron.backward[3]) == {
        ("all_gather", "tp"): 2 * (2 + 2) + 1 + 1,
        ("reduce_scatter", "tp"): 2 * 2 + 1,
    }
    products = [sum(c.flops for c in one.forward.calls if c.kind == "mm") for one in (ours, megatron)]
    assert products[0] == products[1]
    logits = 64 * 32768  # tokens, and this rank's half of the vocabulary
    peak = megatron.forward.peak_bytes / logits
    assert peak == pytest.approx(2 + 4, rel=0.02)  # in bfloat16, and in float32, which become the exponents
    assert ours.forward.peak_bytes / logits > 8


def test_gradients_of_a_gathered_input_are_reduced_apart_in_kempnerforge():
    entry = LLAMA.replace("]", ",build={}]")
    usual, apart = (capture(entry.format(build), "tp=2") for build in ("torchtitan", "kempnerforge"))
    assert (
        collectives(apart.forward)["all_gather", "tp"] == collectives(usual.forward)["all_gather", "tp"] + 1
    )  # logits
    more = (
        collectives(apart.backward[3])["reduce_scatter", "tp"] - collectives(usual.backward[3])["reduce_scatter", "tp"]
    )
    assert more == 2 * 3


def test_a_recomputed_layer_of_mpt_runs_to_its_end_before_pytorch_2_1():
    def products(early_stop):
        entry = MPT.replace("]", f",recompute=full,early_stop={early_stop}]")
        return sum(call.kind == "mm" for call in capture(entry, "dp_shard=2").backward[0].calls)

    assert products("no") - products("yes") == 2  # the last product of each layer


def test_only_a_rank_with_traffic_beside_its_kernels_pays_for_it():
    def steps(mesh):
        typed = TypedPlan(LLAMA, "dgx-h100", mesh, framework="torchtitan[compiled]")
        return [simulate_plan(typed.plan, typed.prices(), slowdown=factor).step_ns for factor in (None, 1.0)]

    assert len(set(steps("tp=1"))) == 1  # one GPU
    assert len(set(steps("tp=2"))) == 1  # each collective of tensor parallelism is waited for
    slowed, alone = steps("dp_shard=2")
    assert slowed > alone
