"""Plans whose stages have meshes of their own."""

import numpy as np
import pytest

from simdev.errors import InvalidInput
from simdev.parallel import Host, Plan, find_model, load_cluster, parse_mesh
from simdev.parallel.capture.reshard import Slice, reshard_ns, slice_of
from simdev.parallel.mesh import Mesh
from simdev.parallel.plan import prepare, simulate_program
from simdev.sim import validate

TINY = "gpt-3.6b[width=128,layers=4,heads=4,length=64,vocabulary=256,microbatch=4]"
EAGER = Host(3000, 2000, 1000, 9000, 4000)
pytestmark = pytest.mark.usefixtures("own_captures")


def plan_of(*meshes, model=TINY, cluster="dgx-a100", microbatches=4, **more):
    pytest.importorskip("torch")
    spec, parameters = find_model(model)
    stages = tuple(Mesh({}) if mesh == "one" else parse_mesh(mesh) for mesh in meshes)
    whole = Mesh({"pp": len(stages)})
    return Plan(spec, parameters, load_cluster(cluster), whole, microbatches, stage_meshes=stages, **more)


@pytest.mark.parametrize(
    "meshes, more",
    [
        (("tp=4", "dp_replicate=2,tp=2"), {"host": EAGER}),
        (("dp_replicate=4", "tp=2", "one"), {"stage_layers": (2, 1, 1), "stage_recompute": ("full", "none", "none")}),
        (("dp_replicate=4,tp=2", "dp_replicate=2,tp=4"), {"cluster": "dgx-a100[nodes=2]"}),
        (("one", "dp_replicate=2"), {"schedule": "gpipe"}),
    ],
)
def test_folded_unfolded_and_both_engines_agree(meshes, more):
    program = prepare(plan_of(*meshes, **more))
    folded, every = simulate_program(program), simulate_program(program, unfolded=True)
    assert folded.unrolled.copies == (1,) * len(meshes)
    assert every.unrolled.copies == tuple(mesh.ranks for mesh in program.plan.stage_meshes)
    reference = simulate_program(program, unfolded=True, engine="reference")
    assert folded.step_ns == every.step_ns == reference.step_ns
    for name in ("compute_ns", "exposed_ns", "bubble_ns"):
        assert np.array_equal(getattr(folded, name), getattr(every, name))
    validate(every.unrolled.problem, every.unrolled.placement, every.schedule)
    slower = simulate_program(program, slowdown=1.189)
    assert slower.step_ns == simulate_program(program, unfolded=True, slowdown=1.189).step_ns


@pytest.mark.parametrize("inner", ["dp_replicate=2,tp=2", "tp=4"])
def test_stages_with_equal_meshes_are_the_plan_with_one_mesh(inner):
    own = plan_of(inner, inner, host=EAGER)
    replicas = parse_mesh(inner).replicas
    spec, parameters = find_model(TINY)
    parameters["microbatch"] = 4 // replicas
    plan = Plan(spec, parameters, own.cluster, parse_mesh(f"pp=2,{inner}"), 4, host=EAGER)
    assert plan.sequences == own.sequences and plan.flops == own.flops and plan.ranks == own.ranks
    one, other = simulate_program(prepare(plan)), simulate_program(prepare(own))
    assert one.step_ns == other.step_ns and np.array_equal(one.peak_bytes, other.peak_bytes)
    assert one.summary()["mfu"] == other.summary()["mfu"]


def test_recomputation_of_one_stage_changes_its_memory_alone():
    none, first = (
        simulate_program(prepare(plan_of("tp=2", "tp=2", stage_recompute=kinds)))
        for kinds in (("none", "none"), ("full", "none"))
    )
    assert first.peak_bytes[0] < none.peak_bytes[0] and first.peak_bytes[1] == none.peak_bytes[1]
    assert first.compute_ns[0] > none.compute_ns[0] and first.compute_ns[1] == none.compute_ns[1]


def test_a_slow_rank_slows_its_stage():
    program = prepare(plan_of("tp=2", "dp_replicate=2,tp=2"))
    alone, slow = simulate_program(program), simulate_program(program, slow={5: 3.0})
    assert slow.unrolled.copies == (2, 4) and slow.step_ns > alone.step_ns
    with pytest.raises(InvalidInput, match="no rank 6"):
        simulate_program(program, slow={6: 2.0})


def test_pieces_that_one_rank_sends_or_receives_follow_one_another():
    cluster = load_cluster("dgx-a100")
    rate, latency = cluster.node_bytes_per_s, cluster.node_latency_ns
    size = 1 << 26

    def taken(share):
        return pytest.approx(latency + share * size / rate * 1e9, abs=2)

    four, two, one = Slice(4, 4, size // 4), Slice(2, 2, size // 2), Slice(1, 1, size)
    copies = Slice(4, 1, size)  # tensor parallelism: each rank has all of it
    assert reshard_ns(four, one, 0, 4, cluster) == taken(1)
    assert reshard_ns(one, four, 0, 1, cluster) == taken(1)
    assert reshard_ns(four, two, 0, 4, cluster) == reshard_ns(two, four, 0, 2, cluster) == taken(1 / 2)
    assert reshard_ns(copies, two, 0, 4, cluster) == taken(1 / 2)
    assert reshard_ns(two, copies, 0, 2, cluster) == taken(2)  # four ranks take a half from each of two
    assert reshard_ns(one, one, 0, 8, load_cluster("dgx-a100[nodes=2]")) > 2 * size / rate * 1e9


def test_slices_follow_from_the_model():
    pytest.importorskip("torch")
    model, parameters = find_model(TINY)
    parameters["microbatch"] = 2
    assert slice_of(model, parameters, parse_mesh("dp_replicate=2,tp=2")) == Slice(4, 2, 64 * 2 * 128 * 2)
    llama, sizes = find_model("llama3-8b[width=64,layers=4,heads=4,kv_heads=2,hidden=128,vocabulary=256,length=32]")
    found = slice_of(llama, sizes, parse_mesh("dp_shard=4,tp=2"))
    assert found.ranks == 8 and found.slices in (4, 8) and found.size * found.slices == 4 * 32 * 64 * 2


@pytest.mark.parametrize(
    "meshes, more, message",
    [
        (("tp=2", "dp_replicate=3"), {}, "4 sequences do not divide among 3 replicas of stage 1"),
        (("tp=2", "pp=2"), {}, "a mesh for each"),
        (("tp=2", "tp=4,dp_replicate=2"), {"cluster": "dgx-a100[nodes=1]"}, "the mesh has 10 ranks"),
        (("tp=2", "dp_shard=2"), {}, "not parallelised along it"),
        (("tp=8",), {}, "heads: 4 does not divide by 8"),
        (("tp=2", "tp=4"), {"stage_recompute": ("full",)}, "one for each of 2 stages"),
    ],
)
def test_stages_that_cannot_be_are_refused(meshes, more, message):
    with pytest.raises(InvalidInput, match=message):
        plan_of(*meshes, **more)
