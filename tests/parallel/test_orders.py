import pytest

from simdev.errors import InvalidInput, UnknownName, Unsupported
from simdev.parallel.orders import pipeline_order
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


@pytest.mark.parametrize("name", ["interleaved", "looped-bfs"])
def test_schedules_with_several_stages_run_to_the_end(name):
    pytest.importorskip("torch.distributed.pipelining.schedules")
    orders = pipeline_order(name, 4, 8, 2)
    done = execution_order(orders, 8)
    assert len(done) == sum(map(len, orders)) and {action[1] for _, action in done} == set(range(8))


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


@pytest.mark.parametrize("name", ["zero-bubble", "zbv"])
def test_schedules_that_split_backward_passes_say_so(name):
    with pytest.raises(Unsupported, match=f"{name}.*gradients of inputs and of weights.*interleaved"):
        pipeline_order(name, 2, 4, 2)
