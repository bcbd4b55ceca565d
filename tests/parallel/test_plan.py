import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from simdev.errors import InvalidInput
from simdev.graphs.parallel_model import Part
from simdev.parallel import Host, Plan, find_model, load_cluster, parse_mesh
from simdev.parallel.capture.stage import _capture, capture_stage, captured
from simdev.parallel.passes import STEP
from simdev.parallel.plan import prepare, simulate_program
from simdev.parallel.typed_plan import TypedPlan
from simdev.sim import validate

pytest.importorskip("torch")
TINY = "llama3-8b[width=64,layers=5,heads=4,kv_heads=2,hidden=128,vocabulary=256,length=32]"
EAGER = Host(3000, 2000, 1000, 9000, 4000)
pytestmark = pytest.mark.usefixtures("own_captures")


def plan_of(mesh, microbatches=4, model=TINY, host=EAGER, **more):
    spec, parameters = find_model(model)
    return Plan(spec, parameters, load_cluster("dgx-h100"), parse_mesh(mesh), microbatches, host=host, **more)


@pytest.fixture(scope="module")
def program():
    return prepare(plan_of("dp_shard=2,tp=2,pp=2"))


def test_repeated_layers_are_the_captured_ones():
    spec, parameters = find_model(TINY)
    mesh = parse_mesh("dp_shard=2,tp=2")
    stretched = capture_stage(spec, parameters, mesh, Part(5))
    whole = captured(spec, tuple(sorted(parameters.items())), mesh, Part(5), STEP)
    for ours, theirs in zip(stretched.backward, whole.backward, strict=True):
        assert ours.calls == theirs.calls and ours.live_bytes == theirs.live_bytes
    assert stretched.forward.calls == whole.forward.calls
    assert [c.live_bytes for c in stretched.forward.calls] == [c.live_bytes for c in whole.forward.calls]
    assert stretched.resident_bytes == whole.resident_bytes and stretched.parameters == whole.parameters


def test_a_thread_that_samples_frames_changes_no_capture():
    spec, parameters = find_model("gpt-1.3b[width=64,layers=2,heads=4,length=64,vocabulary=128]")
    how = spec, parameters, parse_mesh("tp=2"), Part(2), (STEP, False, False, False)
    quiet, ended, main = _capture(*how), threading.Event(), threading.get_ident()

    def sample():  # as the profiler of a Dask worker does
        while not ended.is_set():
            frame = sys._current_frames()[main]
            ended.wait(0.001)
            del frame

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        assert [_capture(*how) for _ in range(3)] == [quiet] * 3
    finally:
        ended.set()
        thread.join()


def test_fsdp_gathers_each_layer_and_prefetches_backward(program):
    stage = program.stages[0]
    gathers = [call for call in stage.forward.calls if call.stream == "dp_shard"]
    assert len(gathers) == 3 + 1 and {call.kind for call in gathers} == {"all_gather"}
    last = [call.kind for call in stage.backward[stage.LAST].calls if call.stream == "dp_shard"]
    assert last.count("reduce_scatter") == 3 + 1
    further = [call.kind for call in stage.backward[stage.FURTHER].calls if call.stream == "dp_shard"]
    assert "reduce_scatter" not in further
    assert last.index("reduce_scatter") > 1  # the next layer's gather is issued before the first scatter


def test_tensor_parallel_products_have_local_shapes(program):
    shapes = {call.signature for call in program.stages[0].forward.calls if call.kind == "mm"}
    assert "mm(bf16[32,64],bf16[64,64])->bf16[32,64]" in shapes  # hidden 128 on two ranks
    assert not any("128" in text for text in shapes)


def test_folded_unfolded_merged_and_both_engines_agree(program):
    folded = simulate_program(program)
    unfolded = simulate_program(program, unfolded=True)
    single = simulate_program(prepare(program.plan, merge=False))
    reference = simulate_program(program, engine="reference")
    assert folded.step_ns == unfolded.step_ns == single.step_ns == reference.step_ns
    assert np.array_equal(folded.compute_ns, unfolded.compute_ns)
    slower = simulate_program(program, slowdown=1.189)
    assert slower.step_ns == simulate_program(program, unfolded=True, slowdown=1.189).step_ns > folded.step_ns
    found = unfolded.unrolled
    validate(found.problem, found.placement, unfolded.schedule)


@pytest.mark.parametrize("mesh", ["dp_replicate=2,dp_shard=2,tp=2,pp=2", "tp=2,pp=4", "dp_shard=16,tp=2,pp=2"])
def test_folded_and_unfolded_agree_on_larger_meshes(mesh):
    stages = parse_mesh(mesh)["pp"]
    program = prepare(plan_of(mesh, model=TINY.replace("layers=5", f"layers={stages}")))
    assert simulate_program(program).step_ns == simulate_program(program, unfolded=True).step_ns


def test_without_a_host_the_step_is_not_longer(program):
    quick = simulate_program(prepare(plan_of("dp_shard=2,tp=2,pp=2", host=Host())))
    assert quick.step_ns < simulate_program(program).step_ns


def test_the_first_stage_of_1f1b_holds_more_activations_than_the_last():
    program = prepare(plan_of("pp=4", microbatches=8, model=TINY.replace("layers=5", "layers=4")))
    one, gpipe = simulate_program(program), simulate_program(prepare(plan_of("pp=4", 8, schedule="gpipe")))
    assert one.peak_bytes[1] > one.peak_bytes[2]
    assert gpipe.peak_bytes[1] > one.peak_bytes[1]


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_shard=2,tp=2"])
def test_selective_recomputation_runs_every_second_product_and_no_attention_again(mesh):
    counts, live = {}, {}
    for recompute in ("none", "selective", "selective-read", "full"):
        spec, parameters = find_model(TINY.replace("layers=5", f"layers=2,recompute={recompute}"))
        stage = capture_stage(spec, parameters, parse_mesh(mesh), Part(2, False, False), order="FB")
        kinds = [call.kind for call in stage.backward[stage.ONLY].calls]
        attention = sum("attention" in kind and "backward" not in kind for kind in kinds)
        counts[recompute] = kinds.count("mm"), attention
        live[recompute] = stage.forward.live_bytes
    products = counts["none"][0]
    assert products == 2 * 2 * 7 and counts["none"][1] == 0
    assert counts["selective"] == counts["selective-read"] == (products + 2 * 3, 0)
    assert counts["full"] == (products + 2 * 6, 2)  # PyTorch stops before a layer's last product: nothing needs it
    assert live["full"] < live["selective"] < live["none"]
    product = 2 * 32 * 64  # bytes of the last one's result, which its reduce-scatter halves
    unread = product + (product // 2 if "tp" in mesh else 0)
    assert live["selective"] - live["selective-read"] == 2 * unread


def test_a_compiled_framework_keeps_no_product_that_nothing_reads():
    typed = {
        "model": TINY.replace("layers=5", "layers=5,recompute=selective"),
        "cluster": "dgx-h100",
        "mesh": "dp_shard=8",
    }
    kinds = {}
    for framework in ("torchtitan", "torchtitan[compiled]", "kempnerforge", "kempnerforge[eager]"):
        kinds[framework] = TypedPlan(**typed, framework=framework).plan.parameters_of(0)["recompute"]
    assert kinds == {
        "torchtitan": "selective",
        "torchtitan[compiled]": "selective-read",
        "kempnerforge": "selective-read",
        "kempnerforge[eager]": "selective",
    }


def test_a_rank_may_have_several_stages():
    spec, parameters = find_model(TINY.replace("layers=5", "layers=4"))
    plan = Plan(spec, parameters, load_cluster("dgx-h100"), parse_mesh("pp=2"), 4, "interleaved", 2, EAGER)
    program = prepare(plan)
    assert len(program.stages) == 4
    report = simulate_program(program)
    single = sum(t.work_ns for t in program.forward[::2]) * 4
    assert report.step_ns > single and (report.bubble_ns > 0).all()


@pytest.mark.parametrize("mesh, schedule, stages", [("pp=2", "zero-bubble", 1), ("dp_shard=2,tp=2,pp=2", "zbv", 2)])
def test_split_backward_passes_folded_and_unfolded_agree(mesh, schedule, stages):
    model = TINY.replace("layers=5", f"layers={2 * stages}")
    program = prepare(plan_of(mesh, model=model, schedule=schedule, stages_per_rank=stages))
    folded, unfolded = simulate_program(program), simulate_program(program, unfolded=True)
    assert folded.step_ns == unfolded.step_ns == simulate_program(program, engine="reference").step_ns
    validate(unfolded.unrolled.problem, unfolded.unrolled.placement, unfolded.schedule)
    last = program.stages[-1]
    halves, whole = last.split, last.backward[1]
    flops = [sum(call.flops for call in segment.calls) for segment in (halves[2], halves[5], whole)]
    assert flops[0] + flops[1] == pytest.approx(flops[2], rel=0.01) and min(flops) > 0.3 * flops[2]
    first = program.stages[0]  # no input needs a gradient: the second half is the whole backward pass
    assert not first.split[0].calls and first.split[5].calls == first.backward[1].calls
    first, second, *_ = (a.live_bytes + b.live_bytes for a, b in zip(last.split[:3], last.split[3:6], strict=True))
    live = (
        (last.first_forward or last.forward).live_bytes
        + first
        + last.forward.live_bytes
        + second
        + last.finish.live_bytes
    )
    assert live == 0  # all that a step of two microbatches allocates is freed at its end


def test_a_split_program_gathers_parameters_once_and_reduces_gradients_at_the_end():
    program = prepare(plan_of("dp_shard=2,pp=2", model=TINY.replace("layers=5", "layers=4"), schedule="zero-bubble"))
    stage = program.stages[1]

    assert collectives(stage.first_forward) == ["all_gather"] * 3
    assert not collectives(stage.forward) and not any(map(collectives, stage.split))
    assert collectives(stage.finish) == ["reduce_scatter"] * 3


def equal_times(schedule, ranks, microbatches, stages_per_rank=1):
    """A plan whose forward passes and both halves of whose backward passes take the same time."""
    from dataclasses import replace as changed
    from types import SimpleNamespace

    from simdev.parallel.costs.timing import Prices, make_template
    from simdev.parallel.plan import PlanProgram
    from simdev.parallel.program import Call, Segment

    count = ranks * stages_per_rank
    model = TINY.replace("layers=5", f"layers={count}")
    plan = plan_of(f"pp={ranks}", microbatches, model, Host(), schedule=schedule, stages_per_rank=stages_per_rank)
    one = make_template(
        Segment("forward", (Call("compute", "mm", "mm"),)), plan.cluster, plan.mesh, 0, Host(), Prices(plan.cluster)
    )

    def taking(ns):
        return changed(one, ns=np.array([ns], np.int64))

    unit = 1_000_000_000 // stages_per_rank
    usual = {"F": "forward", "B": "backward further"}
    stage = SimpleNamespace(output_bytes=1, resident_bytes=0, named=lambda order: [usual[letter] for letter in order])
    times = [tuple(map(taking, times)) for times in ((unit,), (2 * unit,) * 4, (unit,) * 6, (1,))]
    whole = [tuple([value] * count) for value in (times[0][0], times[1], times[2], times[3][0])]
    passes = {"forward": times[0][0], "backward first": times[1][0], "backward further": times[1][0]}
    return PlanProgram(plan, (stage,) * count, *whole, passes=(passes,) * count)


@pytest.mark.parametrize("ranks, microbatches", [(2, 8), (4, 8), (4, 16)])
def test_with_equal_halves_bubbles_shrink_as_published(ranks, microbatches):
    """Qi et al. 2024, table 2: with F = I = W = 1, the bubble is 3 (p - 1) for 1F1B and p - 1 for ZB-H1. With ZB-V no
    rank is idle between its first and its last action; the last rank begins p - 1 stages of half a unit later."""
    work = 3 * microbatches
    expected = {("1f1b", 1): 3 * (ranks - 1), ("zero-bubble", 1): ranks - 1}
    for (schedule, stages), bubble in expected.items():
        report = simulate_program(equal_times(schedule, ranks, microbatches, stages))
        assert report.step_ns / 1e9 == pytest.approx(work + bubble, rel=1e-4)
    report = simulate_program(equal_times("zbv", ranks, microbatches, 2))
    assert report.step_ns / 1e9 - work == pytest.approx((ranks - 1) / 2, rel=1e-3)


def collectives(segment):
    return [call.kind for call in segment.calls if call.is_collective]


@pytest.mark.parametrize("each", [False, True])
def test_parameters_that_stay_are_gathered_once_in_a_step(each):
    """Two layers and what is around them: three all-gathers in the first forward pass alone. Gradients are reduced by
    the last backward pass (ZeRO 1) or by each (ZeRO 2)."""
    plan = plan_of("dp_shard=2,pp=2", model=TINY.replace("layers=5", "layers=4"), reshard="never", reduce_each=each)
    program = prepare(plan)
    for stage in program.stages:
        first, further, last, _ = stage.backward
        assert collectives(stage.first_forward) == ["all_gather"] * 3 and not collectives(stage.forward)
        reduced = [["reduce_scatter"] * 3 if each else []] * 2 + [["reduce_scatter"] * 3]
        assert list(map(collectives, (first, further, last))) == reduced
    again = prepare(replace(plan, reshard="always"))
    assert simulate_program(program).peak_bytes[1] > simulate_program(again).peak_bytes[1]
    folded, unfolded = (simulate_program(program, unfolded=u) for u in (False, True))
    assert folded.step_ns == unfolded.step_ns
    validate(unfolded.unrolled.problem, unfolded.unrolled.placement, unfolded.schedule)


def test_the_ends_of_a_pipeline_may_be_light():
    """Five layers on six stages: the head is alone. On seven, the embedding is, too."""
    kinds = [(p.layers, p.first, p.last) for p in plan_of("pp=6").parts]
    assert kinds == [(1, True, False), *[(1, False, False)] * 4, (0, False, True)]
    light = plan_of("pp=7")
    assert [part.layers for part in light.parts] == [0, 1, 1, 1, 1, 1, 0]
    given = plan_of("pp=2", schedule="interleaved", stages_per_rank=2, stage_layers=(0, 2, 3, 0))
    assert given.parts[0] == Part(0, True, False) and given.parts[3] == Part(0, False, True)
    report = simulate_program(prepare(given))
    whole = simulate_program(prepare(plan_of("pp=1")))
    assert sum(p.parameters for p in prepare(given).stages) == prepare(plan_of("pp=1")).stages[0].parameters
    assert report.step_ns < whole.step_ns
    with pytest.raises(InvalidInput, match="but the ends"):
        plan_of("pp=3", stage_layers=(3, 0, 2)).parts  # noqa: B018  raises


def test_parameters_that_stay_are_gathered_before_activations_arrive():
    """With four stages, the first forward pass of the last one waits for three others, its gathers for nothing."""
    program = prepare(plan_of("dp_shard=2,pp=4", 4, TINY.replace("layers=5", "layers=4"), Host(), reshard="never"))
    report = simulate_program(program)
    unrolled, schedule = report.unrolled, report.schedule
    action = unrolled.actions.index(("F", 3, 0))
    mine = unrolled.action == action
    assert (
        schedule.op_start[mine & unrolled.is_communication].min()
        < schedule.op_finish[unrolled.action == unrolled.actions.index(("F", 0, 0))].max()
    )


def test_every_second_layer_is_recomputed():
    """Four layers of which two are recomputed: half of the FLOPs that recomputing all adds."""
    spec, parameters = find_model(TINY.replace("layers=5", "layers=4"))

    def flops(recompute):
        given = {**parameters, "recompute": recompute}
        part = spec.part(given, 4)
        program = capture_stage(spec, given, parse_mesh("dp_shard=2"), part, order="FB")
        return sum(call.flops for call in program.backward[3].calls)

    none, second, every = map(flops, ("none", "every-2", "full"))
    assert none < second < every and 2 * (second - none) == every - none


def test_figures_add_up(program):
    report = simulate_program(program)
    assert np.array_equal(report.compute_ns + report.exposed_ns + report.bubble_ns, np.full(2, report.step_ns))
    assert (report.bubble_ns >= 0).all() and (report.exposed_ns >= 0).all()
    assert [sum(one.values()) for one in report.kernel_ns] == report.compute_ns.tolist()
    assert all(one["gemm"] and one["attention"] for one in report.kernel_ns)
    assert report.plan.sequences == 8
    assert report.tokens_per_s == pytest.approx(8 * 32 / (report.step_ns / 1e9))


@pytest.mark.parametrize(
    "mesh, message",
    [
        ("tp=8", "heads: 4 does not divide by 8"),
        ("pp=8", "leave a stage without work"),
        ("ep=2", "not parallelised along it"),
        ("dp_shard=12", "do not fill nodes of 8"),
    ],
)
def test_plans_that_cannot_be_are_refused(mesh, message):
    with pytest.raises(InvalidInput, match=message):
        prepare(plan_of(mesh))


@pytest.mark.parametrize("text", ["tp=²", "tp=" + "9" * 5000, "tp=-1", "tp=1.5", "=8", ""])
def test_sizes_that_are_no_numbers_are_one_sentence(text):
    with pytest.raises(InvalidInput, match="expected AXIS=SIZE|unknown mesh axis") as found:
        parse_mesh(text)
    assert len(str(found.value)) < 300
    with pytest.raises(InvalidInput):
        load_cluster(f"dgx-h100[nodes={'9' * 5000}]")


@pytest.mark.parametrize("change, message", [("width=65", "width: 65 does not"), ("kv_heads=3", "heads: 4 does not")])
def test_heads_that_do_not_divide_are_named(change, message):
    key = change.partition("=")[0]
    entry = TINY.replace({"width": "width=64", "kv_heads": "kv_heads=2"}[key], change)
    with pytest.raises(InvalidInput, match=message):
        plan_of("dp_shard=2", model=entry)


def test_unknown_models_and_sizes_are_named():
    for entry, message in (("llama4", "did you mean"), ("llama3-9b", "size"), ("llama3-8b[width=x]", "width")):
        with pytest.raises(InvalidInput, match=message):
            find_model(entry)
