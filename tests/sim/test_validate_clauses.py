"""One bad schedule for each clause of the validator. Each breaks one rule and is consistent otherwise, so that no other
clause can reject it. The links of the machine take 10 ns and 1 ns per byte."""

from dataclasses import replace

import numpy as np
import pytest
from drawn import chain, machine, problem

from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Rules
from simdev.sim import InvalidSchedule, simulate, validate


def pair(rules=None, size=5):
    """o0 on d0 (0 to 3) sends 5 bytes (3 to 18) to o1 on d1 (18 to 22)."""
    return problem(chain(size, 5), machine(), [3, 4], rules=rules), Placement(np.array([0, 1]))


def two_sends(rules=None):
    """o0 (0 to 2) and o1 (2 to 4) on d0 send 10 bytes each to c0 and c1 (1 ns) on d1: 2 to 22, then 22 to 42."""
    b = GraphBuilder("two sends")
    makers = [b.op(f"o{i}", "op", outputs=[10]) for i in range(2)]
    for i, maker in enumerate(makers):
        b.op(f"c{i}", "op", inputs=b.outputs(maker))
    return problem(b, machine(), [2, 2, 1, 1], rules=rules), Placement(np.array([0, 0, 1, 1]))


def three_ready(rules=None, priority=None, slots=1):
    """Three ops of 2 ns without inputs on one device: 0 to 2, 2 to 4, 4 to 6."""
    b = GraphBuilder("three")
    for i in range(3):
        b.op(f"o{i}", "op")
    return problem(b, machine(1, slots=slots, host=True), [2, 2, 2], rules=rules), Placement(np.zeros(3, int), priority)


def rejected(case, message, **change):
    """The good schedule passes; with ``change``, it is rejected by the clause with this message."""
    p, placement = case
    good = simulate(p, placement)
    validate(p, placement, good)
    for name, value in change.items():
        if not np.isscalar(value):
            change[name] = np.array(value, getattr(good, name).dtype)
    with pytest.raises(InvalidSchedule, match=message):
        validate(p, placement, replace(good, **change))


def test_the_schedules_drawn_here():
    for case, op_start, transfer_start in ((pair(), [0, 18], [3]), (two_sends(), [0, 2, 22, 42], [2, 22])):
        schedule = simulate(*case)
        assert schedule.op_start.tolist() == op_start and schedule.transfer_start.tolist() == transfer_start
    assert simulate(*three_ready()).op_start.tolist() == [0, 2, 4]


def test_shapes():
    rejected(pair(), "R6: op_start has shape", op_start=[0])
    rejected(pair(), "R6: transfer_finish has shape", transfer_finish=[18, 18])
    rejected(pair(), "R6: peak_bytes has shape", peak_bytes=[5])


def test_durations():
    rejected(pair(), "starts before time 0", op_start=[-1, 18], op_finish=[2, 22])
    rejected(pair(), "does not run for its duration", op_finish=[3, 21], step_ns=21)


def test_transfers_that_must_be_and_that_must_not_be():
    rejected(pair(), "names a tensor or device", transfer_tensor=[7])
    rejected(pair(), "names a tensor or device", transfer_target=[2])
    twice = dict(transfer_tensor=[0, 0], transfer_source=[0, 0], transfer_target=[1, 1])
    rejected(pair(), "sent twice, or", **twice, transfer_start=[3, 18], transfer_finish=[18, 33], step_ns=33)
    nothing = {f"transfer_{name}": [] for name in ("tensor", "source", "target", "start", "finish")}
    rejected(pair(), "is not sent to device 1", **nothing, comm_bytes=0)
    more = dict(transfer_tensor=[0, 1], transfer_source=[0, 1], transfer_target=[1, 0])
    rejected(pair(), "where nothing reads it", **more, transfer_start=[3, 22], transfer_finish=[18, 37], step_ns=37)
    rejected(pair(), "sent from another device", transfer_source=[1])
    rejected(pair(), "comm_bytes", comm_bytes=6)


def test_inputs():
    rejected(pair(), "starts before its inputs are there", op_start=[0, 17], op_finish=[3, 21], step_ns=21)


def test_when_a_transfer_may_start():
    rejected(pair(), "starts before its request", transfer_start=[2], transfer_finish=[17])
    rejected(pair(), "does not take its duration", transfer_finish=[17])
    late = dict(transfer_start=[4], transfer_finish=[19], op_start=[0, 19], op_finish=[3, 23], step_ns=23)
    rejected(pair(), "starts later than its channels allow", **late)
    second = dict(transfer_start=[2, 23], transfer_finish=[22, 43], op_start=[0, 2, 22, 43], op_finish=[2, 4, 23, 44])
    rejected(two_sends(), "starts later than its channels allow", **second, step_ns=44)
    rejected(pair(Rules(contention="none")), "waits for nothing", **late)
    rejected(pair(Rules(contention="fair")), "waits under fair contention", **late)


def test_an_overlap_on_a_channel():
    """The second transfer starts after the first has started, and before it has ended."""
    overlap = dict(transfer_start=[2, 21], transfer_finish=[22, 41])
    rejected(
        two_sends(), "overlaps on a channel", **overlap, op_start=[0, 2, 22, 41], op_finish=[2, 4, 23, 42], step_ns=42
    )
    early = dict(transfer_start=[2, 4], transfer_finish=[22, 24])
    rejected(
        two_sends(), "overlaps on a channel", **early, op_start=[0, 2, 22, 24], op_finish=[2, 4, 23, 25], step_ns=25
    )


def test_a_transfer_that_overtakes():
    swapped = dict(transfer_start=[24, 4], transfer_finish=[44, 24])
    rejected(two_sends(), "overtakes", **swapped, op_start=[0, 2, 44, 24], op_finish=[2, 4, 45, 25], step_ns=45)


def test_flows():
    fair = Rules(contention="fair")
    soon = dict(transfer_finish=[13], op_start=[0, 13], op_finish=[3, 17], step_ns=17)
    rejected(pair(fair), "faster than the latency", **soon)
    late = dict(transfer_finish=[19], op_start=[0, 19], op_finish=[3, 23], step_ns=23)
    rejected(pair(fair), "ends later than its share allows", **late)
    soon = dict(transfer_finish=[17], op_start=[0, 17], op_finish=[3, 21], step_ns=21)
    rejected(pair(fair), "does not end when its bytes are through", **soon)
    empty = dict(transfer_finish=[14], op_start=[0, 14], op_finish=[3, 18], step_ns=18)
    rejected(pair(fair, size=0), "control edge that does not take the latency", **empty)


def test_eager():
    """The host issues and runs the three ops inline."""
    case = three_ready(Rules(runtime="eager"))
    rejected(case, "before its issue or out of order", op_start=[0, 1, 4], op_finish=[2, 3, 6])
    rejected(case, "later than issue, inputs and order allow", op_start=[0, 2, 5], op_finish=[2, 4, 7], step_ns=7)


def test_slots():
    rejected(three_ready(), "without a free slot", op_start=[0, 1, 4], op_finish=[2, 3, 6])
    rejected(three_ready(slots=2), "without a free slot", op_start=[0, 0, 1], op_finish=[2, 2, 3], step_ns=3)
    rejected(three_ready(), "although its device has a free slot", op_start=[0, 2, 5], op_finish=[2, 4, 7], step_ns=7)
    rejected(three_ready(), "although its device has a free slot", op_start=[1, 3, 5], op_finish=[3, 5, 7], step_ns=7)
    idle = dict(op_start=[0, 2, 2], op_finish=[2, 4, 4], step_ns=4)
    rejected(three_ready(slots=2), "although its device has a free slot", **idle)


def test_order():
    swapped = dict(op_start=[2, 0, 4], op_finish=[4, 2, 6])
    rejected(three_ready(), r"in its turn at 0 ns \(fifo\)", **swapped)
    rejected(three_ready(Rules("program")), "out of program order", **swapped)
    by_priority = three_ready(Rules("priority"), priority=np.array([3, 1, 2]))
    assert simulate(*by_priority).op_start.tolist() == [0, 4, 2]
    rejected(by_priority, r"in its turn at 2 ns \(priority\)", op_start=[0, 2, 4], op_finish=[2, 4, 6])


def test_totals():
    rejected(pair(), "step_ns is 23", step_ns=23)


def test_memory():
    """o0 makes 5 bytes on d0 until they are sent; d1 has the copy and 5 bytes of o1."""
    assert simulate(*pair()).peak_bytes.tolist() == [5, 10]
    rejected(pair(), "the peak of device 'd0' is given as 6", peak_bytes=[6, 10])
    rejected(pair(), "the overflow of device 'd1' is given as 1", overflow_bytes=[0, 1])
    rejected(pair(), "overflow_op of device 'd0' is not op -1", overflow_op=[0, -1])
    small = problem(chain(5, 5), machine(memory=9), [3, 4]), Placement(np.array([0, 1]))
    schedule = simulate(*small)
    assert schedule.overflow_bytes.tolist() == [0, 1] and schedule.overflow_op.tolist() == [-1, 1]
    rejected(small, "the overflow of device 'd1' is given as 0", overflow_bytes=[0, 0])
    rejected(small, "overflow_op of device 'd1' is not op 1", overflow_op=[-1, 0])
