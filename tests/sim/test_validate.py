"""The validator: each clause of the model refuses a schedule that breaks it."""

from dataclasses import replace

import numpy as np
import pytest
from drawn import chain, machine, problem

from simdev.placers.testing import assert_same_schedule, random_placement, random_problem
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import CONTENTIONS, ORDERS, Problem, Rules
from simdev.sim import InvalidSchedule, simulate, validate
from simdev.sim.schedule import Schedule

# the validator accepts what the engines make and rejects everything else


def cases(count, first=0, rules=None):
    for seed in range(first, first + count):
        rng = np.random.default_rng(seed)
        p = random_problem(rng, rules=rules)
        placement = random_placement(rng, p)
        yield rng, p, placement, simulate(p, placement)


def differs(a, b):
    try:
        assert_same_schedule(a, b)
    except AssertionError:
        return True
    return False


def test_accepts_what_the_engines_make():
    for _, p, placement, schedule in cases(250):
        validate(p, placement, schedule)


def tamper(rng, schedule):
    """``schedule`` with one number changed, or one op, transfer or everything moved in time, or a transfer lost."""
    arrays = {name: getattr(schedule, name).copy() for name in Schedule.ARRAYS}
    kind = rng.choice(["number", "op", "transfer", "late", "lost", "total"])
    transfers = len(schedule.transfer_tensor)
    if kind == "number":
        name = rng.choice([name for name in Schedule.ARRAYS if len(arrays[name])])
        arrays[name][rng.integers(len(arrays[name]))] += rng.choice([-1, 1])
    elif kind == "op":
        op, shift = rng.integers(len(schedule.op_start)), rng.choice([-1, 1])
        arrays["op_start"][op] += shift
        arrays["op_finish"][op] += shift
    elif kind == "late":
        for name in ("op_start", "op_finish", "transfer_start", "transfer_finish"):
            arrays[name] += 1
        return replace(schedule, **arrays, step_ns=schedule.step_ns + 1)
    elif kind == "total":
        return replace(schedule, **arrays, comm_bytes=schedule.comm_bytes + 1)
    elif transfers and kind == "transfer":
        which, shift = rng.integers(transfers), rng.choice([-1, 1])
        arrays["transfer_start"][which] += shift
        arrays["transfer_finish"][which] += shift
    elif transfers:
        gone = rng.integers(transfers)
        arrays |= {name: np.delete(array, gone) for name, array in arrays.items() if name.startswith("transfer")}
    else:
        return replace(schedule, **arrays, step_ns=schedule.step_ns + 1)
    return replace(schedule, **arrays)


@pytest.mark.parametrize("contention", CONTENTIONS)
@pytest.mark.parametrize("runtime", ["dataflow", "eager"])
def test_rejects_every_tampered_schedule(contention, runtime):
    for rng, p, placement, schedule in cases(60, rules=Rules("fifo", contention, runtime)):
        for _ in range(4):
            with pytest.raises(InvalidSchedule):
                validate(p, placement, tamper(rng, schedule))


def test_rejects_the_schedule_of_other_rules():
    """Consistent in itself, but not what these rules make of the placement."""
    variants = [Rules(policy, contention) for policy in ORDERS for contention in CONTENTIONS] + [Rules(runtime="eager")]
    rejected = 0
    for rng, p, placement, schedule in cases(120, rules=Rules()):
        other = Problem(p.graph, p.topology, p.costs, variants[rng.integers(1, len(variants))])
        if differs(schedule, simulate(other, placement)):
            rejected += 1
            with pytest.raises(InvalidSchedule):
                validate(other, placement, schedule)
    assert rejected > 40


@pytest.mark.parametrize(
    "change, rule",
    [
        ({"op_start": [0, 19], "op_finish": [3, 23], "step_ns": 23}, "R2"),
        ({"op_start": [0, 17], "op_finish": [3, 21], "step_ns": 21}, "R1"),
        ({"op_finish": [4, 22]}, "R1"),
        ({"transfer_start": [2], "transfer_finish": [17]}, "R4"),
        ({"transfer_finish": [17]}, "R4"),
        ({"transfer_target": [0]}, "R3"),
        ({"step_ns": 21}, "R6"),
        ({"peak_bytes": [5, 9]}, "R7"),
        ({"overflow_op": [0, -1]}, "R8"),
    ],
)
def test_names_the_rule(change, rule):
    p = problem(chain(5, 5), machine(), [3, 4])
    placement = Placement(np.array([0, 1]))
    good = simulate(p, placement)
    assert good.op_start.tolist() == [0, 18] and good.peak_bytes.tolist() == [5, 10]
    change = {
        key: value if np.isscalar(value) else np.array(value, getattr(good, key).dtype) for key, value in change.items()
    }
    with pytest.raises(InvalidSchedule) as error:
        validate(p, placement, replace(good, **change))
    assert error.value.rule == rule


# one bad schedule for each clause of the validator. Each breaks one rule and is consistent otherwise, so that no other


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
