"""The validator accepts what the engines make and rejects everything else."""

from dataclasses import replace

import numpy as np
import pytest
from drawn import chain, machine, problem

from simdev.placers.testing import assert_same_schedule, random_placement, random_problem
from simdev.problem.placement import Placement
from simdev.problem.problem import CONTENTIONS, ORDERS, Problem, Rules
from simdev.sim import InvalidSchedule, simulate, validate
from simdev.sim.schedule import Schedule


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
