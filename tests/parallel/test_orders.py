import pytest

from simdev.errors import InvalidInput, UnknownName
from simdev.parallel.orders import pipeline_order, stage_rank
from simdev.parallel.unroll import execution_order


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
