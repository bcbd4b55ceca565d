"""The bound from transfers: hand-worked cases, and never above a feasible placement of a thousand small problems."""

import itertools

import numpy as np
import pytest

from simdev.analysis import lower_bound, lower_bounds
from simdev.errors import InvalidInput
from simdev.graph import GraphBuilder
from simdev.placement import Placement
from simdev.problem import Problem
from simdev.sim import simulate
from simdev.testing import random_problem
from simdev.topology import Device, DeviceKind, Link, Topology


def rig(count, memory=1 << 20):
    kind = DeviceKind("gpu", memory, {"f32": 1e9}, 1e12, granularity=1)
    links = tuple(Link((f"d{a}", f"d{b}"), 10**9, 0) for a in range(count) for b in range(a + 1, count))
    return Topology("rig", tuple(Device(f"d{i}", kind) for i in range(count)), links)


def fan(size, width=3, flops=100, parameters=0, count=2):
    """One op feeds ``width`` ops of ``flops`` ns; its tensor takes ``size`` ns to send."""
    b = GraphBuilder("fan")
    root = b.op("root", "mm", outputs=[size], flops=10)
    for i in range(width):
        b.op(f"leaf{i}", "mm", inputs=b.outputs(root), flops=flops, persistent_bytes=parameters)
    return Problem.build(b.build(), rig(count))


def stay(problem):
    return next(bound.ns for bound in lower_bounds(problem) if bound.method == "stay or send")


def test_what_is_dear_to_send_stays():
    # Together: 10 + 300. A leaf elsewhere: 10 + size + 100, more than that from size 200 on.
    assert stay(fan(size=1000)) == 310
    assert stay(fan(size=201)) == 310
    # At 150 a leaf may leave: no step below 10 + 150 + 100; without sending anything it would be 310.
    assert stay(fan(size=150)) == 260
    assert stay(fan(size=1)) == lower_bound(fan(size=1)).ns <= 210


def test_the_best_placement_meets_the_bound():
    for size in (1, 150, 201, 1000):
        problem = fan(size)
        steps = [
            simulate(problem, Placement(np.array(devices))).step_ns for devices in itertools.product(range(2), repeat=4)
        ]
        assert stay(problem) <= min(steps)
        assert stay(problem) == min(steps) or size == 1


def test_memory_forces_to_send():
    # Three leaves of 400 KB do not fit on a device of 1 MiB with each other: one must leave, however dear.
    assert stay(fan(size=1000, parameters=400_000)) == 10 + 1000 + 100


def test_more_sets_than_devices_share_one():
    # Three chains of two ops, nothing sent below 200 ns: on two devices one takes two chains.
    b = GraphBuilder("chains")
    for name in "abc":
        first = b.op(f"{name}0", "mm", outputs=[1000], flops=50)
        b.op(f"{name}1", "mm", inputs=b.outputs(first), flops=50)
    assert stay(Problem.build(b.build(), rig(2))) == 200


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_never_above_a_feasible_placement(seed):
    rng, better, met = np.random.default_rng(seed), 0, 0
    while met < 350:
        problem = random_problem(rng, max_ops=7)
        devices, units = problem.topology.n_devices, problem.graph.n_units
        bounds = {bound.method: bound.ns for bound in lower_bounds(problem)}
        every = devices**units
        if every <= 64:
            trials = itertools.product(range(devices), repeat=units)
        else:
            trials = [*rng.integers(0, devices, (40, units)), *np.tile(np.arange(devices)[:, None], (1, units))]
        for trial in trials:
            placement = Placement.of_units(problem, np.array(trial))
            try:
                placement.check(problem)
            except InvalidInput:
                continue
            run = simulate(problem, placement)
            if run.feasible:
                assert max(bounds.values()) <= run.step_ns, (bounds, problem.rules)
        met += 1
        better += bounds["stay or send"] > max(ns for name, ns in bounds.items() if name != "stay or send")
    assert better > 30
