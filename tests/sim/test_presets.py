"""Other simulators' rules, on graphs whose answers are computed by hand."""

import numpy as np
import pytest

from simdev.errors import UnknownName
from simdev.placers.testing import random_problem
from simdev.problem.costs import CostTable, transfer_durations
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.problem.topology import Device, DeviceKind, Link, Topology
from simdev.sim import simulate, validate
from simdev.sim.presets import PRESETS, step_ns, under

KIND = DeviceKind("k", 1 << 30, {"f32": 1.0}, 1.0)
MB = 7_600_000  # 1,000 us on Placeto's bus


def build(edges, ns, sizes, devices=3, host=False):
    """Ops of ``ns``; ``edges`` maps an op to its readers; ``sizes`` the bytes of its one tensor."""
    builder = GraphBuilder("g")
    for op in range(len(ns)):
        builder.op(f"op{op}", "mm")
    for op, readers in edges.items():
        tensor = builder.tensor(op, sizes[op])
        for reader in readers:
            builder.connect(tensor, reader)
    graph = builder.build()
    names = [f"d{number}" for number in range(devices)]
    topology = Topology(
        "t",
        tuple(Device(name, KIND, host and name == "d0") for name in names),
        tuple(Link((name, "s"), 10**9, 500) for name in names),
        ("s",),
    )
    transfer, pair = transfer_durations(graph.tensor_bytes, topology)
    costs = CostTable(np.array([ns]), np.zeros(devices, np.int32), transfer, pair, np.zeros(len(ns), np.int64))
    return Problem(graph, topology, costs)


def times(problem, devices, preset):
    """Step time and op starts; both engines agree and the schedule obeys the rules."""
    inner, placed = under(problem, Placement(np.array(devices)), preset)
    fast, slow = (simulate(inner, placed, engine=engine) for engine in ("fast", "reference"))
    assert np.array_equal(fast.op_start, slow.op_start) and fast.step_ns == slow.step_ns
    validate(inner, placed, fast)
    assert step_ns(problem, Placement(np.array(devices)), preset) == fast.step_ns
    return fast.step_ns


def test_placeto_a_chain_over_two_devices_costs_its_ops_and_its_bytes():
    problem = build({0: [1]}, [1000, 2000], {0: MB})
    assert (
        times(
            problem,
            [
                0,
                1,
            ],
            "placeto",
        )
        == 1000 + 1_000_000 + 2000
    )


def test_placeto_a_device_is_closed_for_5_7_us_after_each_op():
    problem = build({}, [1000, 2000, 3000], {})
    assert times(problem, [0, 0, 0], "placeto") == 1000 + 5700 + 2000 + 5700 + 3000
    assert times(problem, [0, 1, 2], "placeto") == 3000


def test_placeto_one_transfer_feeds_all_devices():
    problem = build({0: [1, 2]}, [1000, 2000, 2000], {0: MB})
    assert times(problem, [0, 1, 2], "placeto") == 1000 + 1_000_000 + 2000


def test_placeto_the_next_transfer_waits_25_us_and_nothing_waits_to_receive():
    problem = build({0: [2], 1: [3]}, [1000, 1000, 2000, 2000], {0: MB, 1: MB})
    # both send from one device: the second op ends at 7,700, the bus is free at 1,001,000 + 25,000
    assert times(problem, [0, 0, 1, 2], "placeto") == 1000 + 1_000_000 + 25_000 + 1_000_000 + 2000
    # two devices send to one: side by side, then two ops in turn
    assert times(problem, [0, 1, 2, 2], "placeto") == 1000 + 1_000_000 + 2000 + 5700 + 2000


def test_placeto_ops_cost_what_they_cost_on_an_accelerator():
    problem = build({}, [1000], {}, host=True)
    old = problem.costs
    ns, row = np.array([[9000], [1000]]), np.array([0, 1, 1])
    costs = CostTable(ns, row, old.transfer_ns, old.pair_class, old.dispatch_ns)
    assert times(Problem(problem.graph, problem.topology, costs), [0], "placeto") == 1000


def test_baechi_both_directions_share_a_device_channel():
    ns_per_byte, latency = 0.1754, 134_000
    size = 10_000_000
    one = latency + round(size * ns_per_byte)
    problem = build({0: [2], 1: [3]}, [1000, 1000, 2000, 2000], {0: size, 1: size})
    # 0 -> 1 and 1 -> 0 at once: in turn, as both hold both channels
    assert times(problem, [0, 1, 1, 0], "baechi") == pytest.approx(1000 + 2 * one + 2000, abs=20)
    # 0 -> 1 and 2 -> 2: one transfer
    assert times(problem, [0, 2, 1, 2], "baechi") == pytest.approx(1000 + one + 2000, abs=20)


def test_load_is_the_largest_sum_of_ops_and_crossings():
    problem = build({0: [1, 2]}, [1000, 2000, 3000], {0: 4000})
    cross = 1000 + 4000  # two links of 500 ns, 1 GB/s
    assert times(problem, [0, 1, 1], "load") == 2000 + 3000 + cross
    assert times(problem, [0, 0, 0], "load") == 6000
    assert times(problem, [0, 1, 2], "load") == 3000 + cross


def test_load_a_host_bears_no_crossings():
    problem = build({0: [1]}, [9000, 1000], {0: 4000}, host=True)
    assert times(problem, [0, 1], "load") == 9000
    assert times(problem, [1, 0], "load") == 9000 + 5000


def test_ideal_links_do_not_queue():
    problem = build({0: [2], 1: [3]}, [1000, 1000, 2000, 2000], {0: 10**6, 1: 10**6})
    devices = [0, 0, 1, 1]
    one = 1000 + 10**6
    assert simulate(problem, Placement(np.array(devices))).step_ns == 1000 + 2 * one + 2000
    assert times(problem, devices, "ideal-links") == 1000 + one + 2000 + 2000


def test_another_name_is_refused():
    problem = build({}, [1], {})
    with pytest.raises(UnknownName, match="placeto"):
        step_ns(problem, Placement(np.array([0])), "placet")


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("seed", range(6))
def test_both_engines_agree_on_random_problems(preset, seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng)
    for _ in range(20):
        units = rng.integers(problem.topology.n_devices, size=problem.graph.n_units)
        placement = Placement(units[problem.graph.unit_of_op].astype(np.int32))
        try:
            placement.check(problem)
        except ValueError:
            continue
        times(problem, placement.devices, preset)
        return
