"""Slow ranks: few simulated ranks do what all of them do."""

import pytest

from simdev.errors import InvalidInput
from simdev.parallel import Host, Plan, find_model, load_cluster, parse_mesh
from simdev.parallel.plan import prepare, simulate_plan, simulate_program
from simdev.parallel.stragglers import make_unroller, parse_slow
from simdev.sim import validate

TINY = "llama3-8b[width=64,layers=4,heads=4,kv_heads=2,hidden=128,vocabulary=256,length=32]"


@pytest.fixture(scope="module", autouse=True)
def captures(tmp_path_factory):
    """Captures are kept for this file alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def plan_of(mesh, host=None):
    spec, parameters = find_model(TINY)
    return Plan(spec, parameters, load_cluster("dgx-h100"), parse_mesh(mesh), 4, host=host or Host())


@pytest.mark.parametrize(
    "mesh, slow, copies",
    [
        ("dp_shard=4,tp=2,pp=2", {0: 3.0}, 4),
        ("dp_shard=4,tp=2,pp=2", {13: 1.5}, 4),
        ("dp_replicate=2,dp_shard=4,pp=2", {3: 2.0, 9: 1.1}, 6),
        ("pp=4", {2: 1.7}, 1),
    ],
)
@pytest.mark.parametrize("host", [Host(), Host(3000, 2000, 1000, 9000)])
def test_few_ranks_stand_for_all(mesh, slow, copies, host):
    pytest.importorskip("torch")
    program = prepare(plan_of(mesh, host))
    few, every = simulate_program(program, slow=slow), simulate_program(program, slow=slow, unfolded=True)
    assert set(few.unrolled.copies) == {copies} and set(every.unrolled.copies) == {program.plan.mesh.stage_ranks}
    reference = simulate_program(program, slow=slow, engine="reference")
    assert few.step_ns == every.step_ns == reference.step_ns > simulate_program(program).step_ns
    validate(few.unrolled.problem, few.unrolled.placement, few.schedule)


def test_the_step_is_as_slow_as_the_slowest_where_all_wait_for_it():
    pytest.importorskip("torch")
    plan = plan_of("tp=2")
    alone, one, all_slow = (simulate_plan(plan, slow=slow) for slow in ({}, {1: 4.0}, {0: 4.0, 1: 4.0}))
    assert alone.step_ns < one.step_ns == pytest.approx(all_slow.step_ns, rel=0.02)
    assert one.compute_ns[0] == alone.compute_ns[0] and one.bubble_ns[0] > alone.bubble_ns[0]


def test_a_factor_of_one_changes_nothing():
    pytest.importorskip("torch")
    program = prepare(plan_of("dp_shard=2,tp=2,pp=2"))
    assert simulate_program(program, slow={5: 1.0}).step_ns == simulate_program(program).step_ns


def test_a_large_mesh_needs_two_ranks_for_each_axis():
    unroller = make_unroller([parse_mesh("dp_shard=128,tp=8")] * 16, False, {5000: 1.2})
    assert set(unroller.copies) == {4} and sum((f > 1).sum() for f in unroller.factors) == 1


@pytest.mark.parametrize(
    "texts, message",
    [
        (["3"], "expected RANK=FACTOR"),
        (["x=2"], "expected RANK=FACTOR"),
        (["3=fast"], "expected RANK=FACTOR"),
        (["3=2", "3=2"], "rank 3 is given twice"),
        (["8=2"], "no rank 8 in a mesh of 8 ranks"),
        (["-1=2"], "no rank -1"),
        (["1=0.5"], "from 1 to 100, got 0.5"),
        (["1=nan"], "from 1 to 100, got nan"),
        (["1=inf"], "from 1 to 100, got inf"),
    ],
)
def test_slow_ranks_that_cannot_be_are_refused(texts, message):
    with pytest.raises(InvalidInput, match=message):
        make_unroller([parse_mesh("dp_shard=8")], False, parse_slow(texts))


def test_slow_ranks_and_a_slowdown_exclude_each_other():
    with pytest.raises(InvalidInput, match="exclude each other"):
        simulate_plan(plan_of("dp_shard=2"), slow={0: 2.0}, slowdown=1.2)
