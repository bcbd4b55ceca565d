"""Meshes and pipeline schedules."""

import numpy as np
import pytest
from drawn import two_streams

from simdev.errors import InvalidInput, UnknownName
from simdev.parallel import Host, Plan, find_model, load_cluster, orders, unroll
from simdev.parallel.against_flow import ops_against_flow
from simdev.parallel.capture import kept
from simdev.parallel.mesh import Mesh, parse_mesh
from simdev.parallel.orders import SCHEDULES, pipeline_order, stage_rank
from simdev.parallel.passes import PIPELINE, STEP, pass_names, shortest_order
from simdev.parallel.plan import prepare, simulate_plan, simulate_program
from simdev.parallel.stragglers import make_unroller, parse_slow
from simdev.parallel.unroll import execution_order
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.problem.topology import load_topology
from simdev.sim import validate
from simdev.sim.pipeline import simulate_pipeline

# mesh


def test_a_mesh_is_parsed_and_counted():
    mesh = parse_mesh("dp_shard=8, tp=4,pp=2")
    assert (mesh.ranks, mesh.stage_ranks, mesh.replicas) == (64, 32, 8)
    assert mesh["dp_replicate"] == 1 and mesh.inner == (("dp_shard", 8), ("tp", 4))


@pytest.mark.parametrize("text", ["", "tp", "tp=0", "tp=2,tp=4", "tp=x", "rows=2", "tp=8,dp_shard=10000000"])
def test_bad_meshes_are_refused(text):
    with pytest.raises(InvalidInput, match="mesh"):
        parse_mesh(text)


def test_the_lines_of_an_axis_are_its_communicators():
    mesh = Mesh({"dp_shard": 2, "tp": 3})
    assert mesh.lines(["tp"]).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert mesh.lines(["dp_shard"]).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert sorted(mesh.lines(["dp_shard", "tp"])[0].tolist()) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("axes", [("tp",), ("dp_shard",), ("dp_shard", "tp")])
def test_a_communicator_names_its_axes(axes):
    mesh = Mesh({"dp_shard": 2, "tp": 3})
    assert all(mesh.axes_of(line) == axes for line in mesh.lines(axes))


def test_ranks_of_expert_parallelism_hold_different_tokens():
    assert Mesh({"dp_replicate": 3, "dp_shard": 2, "ep": 4, "tp": 5}).replicas == 24


# steps as problems: what cannot be unrolled is one sentence


def test_a_step_with_too_many_ops_says_what_to_do(monkeypatch):
    monkeypatch.setattr(unroll, "MAX_OPS", 3)
    with pytest.raises(InvalidInput, match="more than 3 ops, the most that are simulated: simulate it folded"):
        two_streams(10, 10, 2)
    monkeypatch.setattr(unroll, "MAX_OPS", 2)
    with pytest.raises(InvalidInput, match="simulate fewer microbatches"):
        two_streams(10, 10, 1)


def test_an_action_without_work_is_named():
    from simdev.parallel import load_cluster
    from simdev.parallel.costs.timing import Host, Prices, make_template
    from simdev.parallel.program import Segment

    cluster = load_cluster("dgx-h100")
    empty = make_template(Segment("forward", ()), cluster, Mesh({}), 0, Host(), Prices(cluster))
    with pytest.raises(InvalidInput, match="F3.0 has no work"):
        unroll.Unroller([Mesh({})] * 4, True).add(3, ("F", 3, 0), empty, [])


# every schedule, with context, expert and tensor parallelism: folded and unfolded steps, both engines and the


COMMON = "width=64,heads=4,kv_heads=2,vocabulary=256,length=64"
LLAMA, MIXTRAL = f"llama3-8b[{COMMON},hidden=128]", f"mixtral-8x7b[{COMMON},hidden=32,experts=8,active=2]"
ONE = [("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1)]
TWO = [("interleaved", 2), ("looped-bfs", 2), ("zero-bubble", 2), ("zbv", 2), ("dualpipe-v", 2)]
MESHES = [(LLAMA, "dp_shard=2,cp=2,pp=2"), (MIXTRAL, "dp_shard=2,ep=2,pp=2"), (MIXTRAL, "ep=2,tp=2,pp=2")]


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Captured stages, shared by the schedules of a model; kept for this file alone."""
    pytest.importorskip("torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield {}


def test_no_schedule_is_left_out():
    assert {name for name, _ in (*ONE, *TWO)} == set(SCHEDULES)


@pytest.mark.parametrize("entry, mesh", MESHES, ids=["cp", "ep", "ep-tp"])
@pytest.mark.parametrize("schedule, stages", (*ONE, *TWO))
def test_all_ways_to_simulate_agree(known, entry, mesh, schedule, stages):
    spec, parameters = find_model(entry)
    parameters["layers"] = 2 * stages
    host = Host(3000, 2000, 1000, 9000, 4000)
    plan = Plan(spec, parameters, load_cluster("dgx-h100"), parse_mesh(mesh), 4, schedule, stages, host)
    program = prepare(plan, known=known.setdefault(entry, {}))
    folded, unfolded = simulate_program(program), simulate_program(program, unfolded=True)
    reference = simulate_program(program, unfolded=True, engine="reference")
    assert folded.step_ns == unfolded.step_ns == reference.step_ns
    assert np.array_equal(unfolded.schedule.op_start, reference.schedule.op_start)
    assert np.array_equal(folded.compute_ns, unfolded.compute_ns)
    validate(unfolded.unrolled.problem, unfolded.unrolled.placement, unfolded.schedule)


# orders


def test_1f1b_by_hand():
    first, second = pipeline_order("1f1b", 2, 3)
    assert [a[0] + str(a[2]) for a in first] == ["F0", "F1", "B0", "F2", "B1", "B2"]
    assert [a[0] + str(a[2]) for a in second] == ["F0", "B0", "F1", "B1", "F2", "B2"]


def test_gpipe_does_all_forward_work_first():
    for actions in pipeline_order("gpipe", 3, 4):
        assert [action[0] for action in actions] == ["F"] * 4 + ["B"] * 4


@pytest.mark.parametrize("name, kind", [("1f1b", "Schedule1F1B"), ("gpipe", "ScheduleGPipe")])
@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (4, 8), (4, 5)])
def test_orders_are_those_of_pytorch(name, kind, ranks, microbatches):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = object.__new__(getattr(schedules, kind))
    theirs._num_stages, theirs._n_microbatches, theirs.pp_group_size = ranks, microbatches, ranks
    order = theirs._get_pipeline_order()
    for rank, actions in enumerate(pipeline_order(name, ranks, microbatches)):
        expected = [
            ("F" if a.computation_type.name == "FORWARD" else "B", a.stage_index, a.microbatch_index)
            for a in order[rank]
            if a is not None and a.is_compute_op
        ]
        if (
            name == "1f1b" and rank == ranks - 1
        ):  # PyTorch lists the last rank's forward passes from 1 on; it runs them from 0
            expected = [(what, stage, m - (what == "F")) for what, stage, m in expected]
        assert list(actions) == expected


@pytest.mark.parametrize(
    "ranks, microbatches, stages", [(2, 2, 2), (2, 4, 1), (2, 8, 3), (4, 3, 2), (4, 8, 2), (4, 6, 3), (8, 64, 4)]
)
def test_interleaved_orders_are_those_of_pytorch(ranks, microbatches, stages):
    pytest.importorskip("torch.distributed.pipelining.schedules")
    found = pipeline_order("interleaved", ranks, microbatches, stages)
    assert found == orders._pytorch("interleaved", ranks, microbatches, stages)


@pytest.mark.parametrize("name", ["interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipe-v"])
def test_schedules_with_several_stages_run_to_the_end(name):
    pytest.importorskip("torch.distributed.pipelining.schedules")
    orders = pipeline_order(name, 4, 8, 2)
    done = execution_order(orders, 8)
    assert len(done) == sum(map(len, orders)) and {action[1] for _, action in done} == set(range(8))


@pytest.mark.parametrize("name, stages", [("zero-bubble", 1), ("zero-bubble", 2), ("zbv", 2), ("dualpipe-v", 2)])
def test_split_schedules_compute_both_halves_of_each_backward_pass_once(name, stages):
    pytest.importorskip("torch.distributed.pipelining.schedules")
    orders = pipeline_order(name, 4, 8, stages)
    actions = [action for rank in orders for action in rank]
    assert len(set(actions)) == len(actions)
    every = {(stage, microbatch) for stage in range(4 * stages) for microbatch in range(8)}
    assert {a[1:] for a in actions if a[0] == "F"} == every
    assert {a[1:] for a in actions if a[0] in "BI"} == {a[1:] for a in actions if a[0] in "BW"} == every
    for rank, mine in enumerate(orders):
        assert {stage_rank(name, 4, a[1]) for a in mine} == {rank}


def test_an_order_of_pytorch_is_kept_and_asked_for_once(tmp_path, monkeypatch):
    pytest.importorskip("torch.distributed.pipelining.schedules")
    monkeypatch.setenv(kept.APART, str(tmp_path / "captures"))
    made = pipeline_order.__wrapped__("zero-bubble", 4, 8, 2)
    monkeypatch.setattr(orders, "_pytorch", lambda *numbers: pytest.fail("asked again"))
    assert pipeline_order.__wrapped__("zero-bubble", 4, 8, 2) == made
    (file,) = (tmp_path / "captures").iterdir()
    file.write_bytes(file.read_bytes()[:-20])
    monkeypatch.setattr(orders, "_pytorch", lambda *numbers: ((("F", 0, 0),),))
    assert pipeline_order.__wrapped__("zero-bubble", 4, 8, 2) == ((("F", 0, 0),),), "a damaged file was trusted"


def test_a_v_shaped_schedule_turns_at_the_last_rank():
    assert [stage_rank("zbv", 3, stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [stage_rank("interleaved", 3, stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]


def test_ranks_that_wait_for_each_other_are_named():
    orders = ((("F", 0, 0), ("B", 0, 0), ("F", 0, 1)), (("F", 1, 1), ("B", 1, 1), ("F", 1, 0), ("B", 1, 0)))
    with pytest.raises(InvalidInput, match=r"rank 0 at B0.0 waits for B1.0; rank 1 at F1.1 waits for F0.1"):
        execution_order(orders, 2)


def test_bad_schedules_are_refused():
    with pytest.raises(UnknownName, match="did you mean"):
        pipeline_order("1f1", 2, 2)
    with pytest.raises(InvalidInput, match="microbatches"):
        pipeline_order("1f1b", 2, 0)
    with pytest.raises(InvalidInput, match="one stage"):
        pipeline_order("gpipe", 2, 2, 2)

    with pytest.raises(InvalidInput, match="two stages"):
        pipeline_order("zbv", 2, 4)
    with pytest.raises(InvalidInput, match="at least 8, got 6"):
        pipeline_order("dualpipe-v", 4, 6, 2)


def test_an_action_that_no_rank_executes_is_named():
    orders = ((("F", 0, 0), ("B", 0, 0)), (("F", 1, 0),))
    with pytest.raises(InvalidInput, match=r"rank 0 at B0.0 waits for B1.0, which no rank executes"):
        execution_order(orders, 2)


# against_flow


def two_stages():
    """A mask that belongs to no layer is read by the first of two stages."""
    b = GraphBuilder("masked")
    mask = b.op("mask", "mul", outputs=[64], flops=10)
    first = b.op("first", "mm", inputs=b.outputs(mask), outputs=[1 << 20], flops=10**10, layer="first")
    second = b.op("second", "mm", inputs=b.outputs(first), outputs=[1 << 20], flops=10**10, layer="second")
    back = b.op(
        "back", "mm", inputs=b.outputs(second), outputs=[1 << 20], flops=10**10, phase="backward", layer="second"
    )
    b.op("end", "mm", inputs=b.outputs(back), outputs=[64], flops=10**10, phase="backward", layer="first")
    return Problem.build(b.build(), load_topology("p100x2"))


def place(problem, mask):
    where = {"mask": mask, "first": 1, "second": 2, "back": 2, "end": 1}
    return Placement(np.array([where[name] for name in problem.graph.op_names]))


def test_an_op_on_a_later_stage_than_its_reader_is_named():
    problem = two_stages()
    (found,) = ops_against_flow(problem, place(problem, 2), (1, 2))
    assert (found.op, found.layer, found.stage, found.reader, found.reader_stage) == ("mask", "", 1, "first", 0)
    assert ops_against_flow(problem, place(problem, 1), (1, 2)) == []


def test_it_costs_time_in_1f1b():
    problem = two_stages()
    good, bad = (simulate_pipeline(problem, place(problem, mask), 16, "1f1b") for mask in (1, 2))
    assert bad.total_ns > 1.2 * good.total_ns


# slow ranks: few simulated ranks do what all of them do


TINY = "llama3-8b[width=64,heads=4,kv_heads=2,hidden=128,vocabulary=256,length=32]"
pytestmark = pytest.mark.usefixtures("own_captures")


def plan_of(mesh, host=None):
    """A layer for each stage."""
    spec, parameters = find_model(TINY)
    parameters["layers"] = parse_mesh(mesh)["pp"]
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


# passes


def test_passes_are_named_by_what_ran_before_them():
    """By hand: the second backward pass finds nothing gathered, and takes the record of the first forward pass."""
    assert pass_names("FFBB", False) == (
        ("forward", "after start"),
        ("forward", "after forward"),
        ("backward first", "after forward, ahead"),
        ("backward last", "after backward ahead, of the first record"),
    )
    assert pass_names("FFBB", True)[-1] == ("backward last", "after backward, without a record")


@pytest.mark.parametrize(
    "order, short",
    [
        ("FB", "FB"),
        ("FB" * 100, STEP),
        ("F" * 8 + "BF" * 50 + "B" * 8, PIPELINE),
        ("F" * 9 + "B" * 9, PIPELINE),
        ("FFBB" * 16, "FFBBFFBBFFBB"),
    ],
)
def test_a_short_order_has_all_passes(order, short):
    assert shortest_order(order) == short
    for forgets in (False, True):
        assert set(pass_names(order, forgets)) <= set(pass_names(short, forgets))
