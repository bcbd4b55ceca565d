"""Corners of the kernels that small random problems seldom reach."""

from functools import cache

import numpy as np
import pytest
from drawn import machine, problem

from simdev.errors import InvalidInput
from simdev.placers.testing import (
    assert_same_schedule,
    random_costs,
    random_placement,
    random_problem,
    random_topology,
    training_graph,
)
from simdev.problem.costs import CostTable, transfer_durations
from simdev.problem.graph import ComputationGraph, GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Device, DeviceKind, Link, Topology
from simdev.sim import inputs, simulate, simulate_many, validate
from simdev.sim.inputs import problem_arrays
from simdev.sim.kernels.state import FAIR_LOOP, FIFO_LOOP, GENERAL_LOOP, IN_ORDER_LOOP, PRIORITY_LOOP


@cache
def sorters():
    """Ways into ``sort_pairs`` and ``sort_by`` from Python."""
    from numba import njit

    from simdev.sim.kernels.heap import sort_by, sort_pairs

    return (
        njit(lambda key, item, first, stop: sort_pairs(key, item, first, stop)),
        njit(lambda time, order, spare, first, stop: sort_by(time, order, spare, first, stop)),
    )


@pytest.mark.parametrize("shape", ["random", "reversed", "sorted", "equal", "far", "merged"])
def test_pairs_and_numbers_are_sorted_whatever_their_order(shape):
    sort_pairs, sort_by = sorters()
    rng = np.random.default_rng(1)
    for length in (0, 1, 2, 16, 17, 33, 500):
        key = {
            "random": rng.integers(0, 50, length),
            "reversed": np.arange(length)[::-1],
            "sorted": np.arange(length),
            "equal": np.zeros(length, int),
            "far": np.roll(np.arange(length), length // 2),
            "merged": np.arange(length) % 7 * 1000 + np.arange(length),
        }[shape].astype(np.int64)
        item = rng.permutation(length).astype(np.int64)
        around = np.array([99, -99])
        keys, items = np.concatenate([around, key, around]), np.concatenate([around, item, around])
        sort_pairs(keys, items, 2, 2 + length)
        order = np.lexsort((item, key))
        assert np.array_equal(keys, np.concatenate([around, key[order], around]))
        assert np.array_equal(items, np.concatenate([around, item[order], around]))
        numbers = np.concatenate([[7, 7], np.arange(length), [7, 7]]).astype(np.uint32)
        sort_by(key, numbers, np.zeros(length, np.uint32), 2, 2 + length)
        assert np.array_equal(key[numbers[2:-2]], np.sort(key)) and np.array_equal(numbers[[0, 1, -2, -1]], [7] * 4)
        assert np.array_equal(np.sort(numbers[2:-2]), np.arange(length))


def agree(p, devices, **kw):
    placement = Placement(np.asarray(devices), **kw)
    schedule = simulate(p, placement)
    assert_same_schedule(schedule, simulate(p, placement, engine="reference"))
    validate(p, placement, schedule)
    return schedule


def test_ops_that_become_ready_long_before_those_already_known():
    # 200 readers far away are known to be ready at 1000 and later when a local chain becomes ready op by op.
    b = GraphBuilder("far and near")
    source = b.op("source", "op", outputs=[990, 0])
    far, near = b.outputs(source)
    for i in range(200):
        b.op(f"far{i}", "op", inputs=[far], outputs=[i])
    for i in range(300):
        near = b.outputs(b.op(f"near{i}", "op", inputs=[near], outputs=[0]))[0]
    rng = np.random.default_rng(0)
    p = problem(b, machine(2), rng.integers(1, 4, 501).tolist())
    schedule = agree(p, [0] + [1] * 200 + [0] * 300)
    assert schedule.transfer_finish[0] > 1000 > schedule.op_start[400]


def wide(rng, n):
    b, tensors = GraphBuilder("wide"), []
    for op in range(n):
        count = min(int(rng.integers(0, 3)), len(tensors))
        reads = [tensors[i] for i in rng.choice(len(tensors), count, replace=False)] if count else []
        handle = b.op(f"op{op}", "op", inputs=reads, workspace_bytes=int(rng.integers(9)))
        tensors += [b.tensor(handle, int(rng.integers(0, 2000))) for _ in range(int(rng.integers(1, 3)))]
    return b.build()


@pytest.mark.parametrize("contention", ["fifo", "none", "fair"])
@pytest.mark.parametrize("runtime", ["dataflow", "eager"])
def test_wide_graphs_with_long_queues(contention, runtime):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        graph, topology = wide(rng, 300), random_topology(rng)
        p = Problem(graph, topology, random_costs(rng, graph, topology), Rules("fifo", contention, runtime))
        agree(p, random_placement(rng, p).devices)


def test_the_general_kernel_agrees_with_the_one_for_the_default_rules(monkeypatch):
    compared = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        p = random_problem(rng, max_ops=60, rules=Rules(contention=str(rng.choice(["fifo", "none"]))))
        placement = random_placement(rng, p)
        compared += problem_arrays(p).loop == FIFO_LOOP
        schedule = simulate(p, placement)
        monkeypatch.setitem(inputs._CACHE, p, problem_arrays(p)._replace(loop=GENERAL_LOOP))
        assert_same_schedule(schedule, simulate(p, placement))
    assert compared > 50


def test_times_too_large_for_a_key_take_the_general_kernel():
    b = GraphBuilder("slow")
    x = b.outputs(b.op("x", "op", outputs=[3]))
    b.op("y", "op", inputs=x)
    b.op("z", "op", inputs=x)
    p = problem(b, machine(2), [1 << 50, 1 << 40, 5])
    assert problem_arrays(p).loop == GENERAL_LOOP
    assert problem_arrays(problem(b, machine(2), [1, 1, 1])).loop == FIFO_LOOP
    assert agree(p, [0, 1, 1]).step_ns == (1 << 50) + 13 + (1 << 40) + 5


RULES = [Rules(), Rules("priority"), Rules("program"), Rules(runtime="eager"), Rules(contention="fair")]


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "-".join(vars(rules).values()))
def test_a_key_of_as_many_bits_as_the_ops_need_changes_nothing(rules, monkeypatch):
    monkeypatch.setattr(inputs, "SHIFT", 1)
    widths = set()
    for seed in range(25):
        p = random_problem(np.random.default_rng(seed), max_ops=60, rules=rules)
        placement = random_placement(np.random.default_rng(seed), p)
        schedule = simulate(p, placement)
        kernels = problem_arrays(p)
        widths.add(kernels.shift)
        assert_same_schedule(schedule, simulate(p, placement, engine="reference"))
    assert len(widths) > 1 and max(widths) <= 7


@cache
def more_ops_than_20_bits_number():
    """2^20 + 5,000 ops: op ``v`` makes one tensor, which op ``v + 2`` and a later one read."""
    n = (1 << 20) + 5_000
    op = np.arange(n, dtype=np.int64)
    readers = np.stack([op + 2, op + 3 + op % 97], axis=1)
    kept = readers < n
    zeros = np.zeros(n, np.int64)
    return ComputationGraph(
        "large", ("op",), ("",), ("",), ("op",) * n, zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros, op % 3,
        zeros - 1, op, op % 5 * 7, zeros > 0, op % 11 == 0, np.append(0, np.cumsum(kept.sum(axis=1))), readers[kept],
    )  # fmt: skip


@pytest.mark.parametrize(
    "rules",
    [RULES[2], *(pytest.param(rules, marks=pytest.mark.long) for rules in RULES if rules.order != "program")],
    ids=lambda rules: "-".join(vars(rules).values()),
)
def test_a_graph_of_more_than_a_million_ops(rules):
    graph, topology = more_ops_than_20_bits_number(), machine(3, memory=400_000, host=True)
    n, rng = graph.n_ops, np.random.default_rng(0)
    costs = CostTable(
        rng.integers(1, 40, (1, n)), np.zeros(3, np.int32), *transfer_durations(graph.tensor_bytes, topology),
        np.full(n, 3, np.int64),
    )  # fmt: skip
    p = Problem(graph, topology, costs, rules)
    moved = rng.random(n) < 0.01
    placement = Placement(np.where(moved, rng.integers(0, 3, n), np.arange(n) * 3 // n), rng.permutation(n))
    schedule = simulate(p, placement)
    kernels = problem_arrays(p)
    assert kernels.shift == (2 if rules.order == "program" or rules.runtime == "eager" else 21)
    assert kernels.loop != GENERAL_LOOP and (schedule.overflow_op >= 0).any()
    inputs._CACHE[p] = kernels._replace(loop=GENERAL_LOOP)
    assert_same_schedule(schedule, simulate(p, placement))
    if rules.order != "program":
        validate(p, placement, schedule)


def test_a_cost_table_faster_than_the_links_does_not_hide_long_flows():
    # The table says 1 ns. At 10 MB/s, 8 GiB take 14 minutes; at 1 kB/s, more ns than a key holds.
    b = GraphBuilder("slow link")
    x = b.outputs(b.op("x", "op", outputs=[8 << 30]))
    b.op("y", "op", inputs=x)
    slow = Topology("slow", machine(2, memory=1 << 40).devices, (Link(("d0", "d1"), 10**7, 10),))
    graph, one = b.build(), np.array([[1, 1]])
    costs = CostTable(
        one, np.zeros(2, np.int32), np.array([[1]]), np.array([[-1, 0], [0, -1]], np.int32), np.zeros(2, np.int64)
    )
    p = Problem(graph, slow, costs, Rules(contention="fair"))
    assert agree(p, [0, 1]).step_ns == 12 + (8 << 30) * 100
    assert problem_arrays(p).loop == FAIR_LOOP
    assert problem_arrays(Problem(graph, slow, costs)).loop == FIFO_LOOP
    slower = Topology("slower", slow.devices, (Link(("d0", "d1"), 10**3, 10),))
    p = Problem(graph, slower, costs, Rules(contention="fair"))
    assert problem_arrays(p).loop == GENERAL_LOOP and agree(p, [0, 1]).step_ns == 12 + (8 << 30) * 10**6


def test_fair_flows_that_outlast_the_count_of_work_served():
    # 8 GiB at 1 GB/s is 8.6 s; small tensors follow each other on the same pair the while.
    b = GraphBuilder("long flow")
    big = b.outputs(b.op("big", "op", outputs=[8 << 30]))
    b.op("reader", "op", inputs=big)
    last = []
    for i in range(40):
        last = b.outputs(b.op(f"small{i}", "op", inputs=last, outputs=[1 << 27]))
    p = problem(b, machine(2, memory=1 << 40), [1] * 42, rules=Rules(contention="fair"))
    devices = [0, 1] + [i % 2 for i in range(40)]
    agree(p, devices)


def test_extreme_priorities():
    b = GraphBuilder("priorities")
    for i in range(4):
        b.op(f"o{i}", "op")
    p = problem(b, machine(1), [1] * 4, rules=Rules(order="priority"))
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    assert agree(p, [0] * 4, priority=np.array([low, 0, high, low])).op_start.tolist() == [2, 1, 0, 3]


def test_a_graph_without_tensors_and_a_machine_without_links():
    b = GraphBuilder("bare")
    b.op("o", "op")
    for contention in ("fifo", "none", "fair"):
        p = problem(b, machine(1), [7], rules=Rules(contention=contention))
        assert agree(p, [0]).step_ns == 7


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.uint64])
def test_batches_of_any_integer_type_and_layout(dtype):
    b = GraphBuilder("pair")
    x = b.outputs(b.op("x", "op", outputs=[3]))
    b.op("y", "op", inputs=x)
    p = problem(b, machine(2), [2, 3])
    rows = np.asfortranarray(np.array([[0, 0], [0, 1], [1, 1]], dtype))
    rows.setflags(write=False)
    assert simulate_many(p, rows).step_ns.tolist() == [5, 18, 5]
    assert simulate_many(p, rows[::-1]).step_ns.tolist() == [5, 18, 5]


@pytest.mark.parametrize(
    "rows, message",
    [
        (np.array([[0, -1]]), "device -1"),
        (np.array([[0, 0], [0, 300]]), "placement 1.*device 300"),
        (np.array([[0, 0, 0]]), r"\(k, 2\)"),
        (np.array([0, 0]), r"\(k, 2\)"),
        (np.array([[0.0, 1.0]]), "float64"),
        (np.array([[1, 0]]), "no kernel"),
    ],
)
def test_batches_that_break_the_contract(rows, message):
    b = GraphBuilder("pair")
    x = b.outputs(b.op("x", "op", outputs=[3]))
    b.op("y", "op", inputs=x)
    p = problem(b, machine(2), [2, 3])
    row = np.array([0, 1], np.int32)
    costs = CostTable(np.array([[2, 3], [-1, 3]]), row, p.costs.transfer_ns, p.costs.pair_class, p.costs.dispatch_ns)
    with pytest.raises(InvalidInput, match=message):
        simulate_many(Problem(p.graph, p.topology, costs), rows)


def test_groups_and_routes_are_checked_in_batches():
    b = GraphBuilder("group")
    x = b.outputs(b.op("x", "op", outputs=[3], group="g"))
    b.op("y", "op", inputs=x, group="g")
    with pytest.raises(InvalidInput, match="colocation group"):
        simulate_many(problem(b, machine(2), [2, 3]), np.array([[0, 1]]))
    b = GraphBuilder("islands")
    x = b.outputs(b.op("x", "op", outputs=[3]))
    b.op("y", "op", inputs=x)
    with pytest.raises(InvalidInput, match="no route"):
        simulate_many(problem(b, machine(2, links=[]), [2, 3]), np.array([[0, 0], [0, 1]]))


@pytest.mark.parametrize("rules", [Rules(), Rules(order="priority")])
def test_memory_of_slow_placements_may_be_left_out(rules):
    rng = np.random.default_rng(3)
    p = random_problem(rng, max_ops=60, rules=rules)
    rows = np.stack([random_placement(rng, p).devices for _ in range(12)])
    full = simulate_many(p, rows)
    below = int(np.median(full.step_ns))
    some = simulate_many(p, rows, below=below)
    known = full.step_ns < below
    assert np.array_equal(some.step_ns, full.step_ns) and 0 < known.sum() < len(rows)
    assert np.array_equal(some.peak_bytes, np.where(known[:, None], full.peak_bytes, -1))
    assert np.array_equal(some.overflow_bytes, np.where(known, full.overflow_bytes, -1))
    assert np.array_equal(some.known, known) and full.known.all()
    assert np.array_equal(some.fits, known & (full.overflow_bytes == 0))


@pytest.mark.parametrize("rules", [("priority", "dataflow"), ("program", "dataflow"), ("fifo", "eager")], ids="-".join)
def test_other_rules_on_devices_of_one_slot(rules):
    rng, seen, (policy, runtime) = np.random.default_rng(11), 0, rules
    while seen < 60:
        rules = Rules(policy, str(rng.choice(["fifo", "none"])), runtime)
        p = random_problem(rng, max_ops=int(rng.choice([5, 25, 120])), rules=rules)
        kernels = problem_arrays(p)
        if kernels.loop not in (PRIORITY_LOOP, IN_ORDER_LOOP):
            continue
        placement = random_placement(rng, p)
        general = Problem(p.graph, p.topology, p.costs, rules)
        inputs._CACHE[general] = kernels._replace(loop=GENERAL_LOOP)
        schedule = simulate(p, placement)
        assert_same_schedule(schedule, simulate(general, placement))
        assert_same_schedule(schedule, simulate(p, placement, engine="reference"))
        seen += 1


def test_fair_contention_under_the_usual_rules():
    rng, seen = np.random.default_rng(12), 0
    while seen < 60:
        rules = Rules(contention="fair")
        p = random_problem(rng, max_ops=int(rng.choice([5, 25, 120])), rules=rules)
        if problem_arrays(p).loop != FAIR_LOOP:
            continue
        placement = random_placement(rng, p)
        general = Problem(p.graph, p.topology, p.costs, rules)
        inputs._CACHE[general] = problem_arrays(p)._replace(loop=GENERAL_LOOP)
        schedule = simulate(p, placement)
        assert_same_schedule(schedule, simulate(general, placement))
        assert_same_schedule(schedule, simulate(p, placement, engine="reference"))
        seen += 1


def test_senders_that_share_no_channel_with_others():
    # Three devices behind a switch wait for each other's sends to the third; d3 has a link of its own to each.
    rng = np.random.default_rng(7)
    pairs = [("d0", "s"), ("d1", "s"), ("d2", "s"), ("d3", "d0"), ("d3", "d1"), ("d3", "d2")]
    kind = DeviceKind("gpu", 1 << 30, {"f32": 1e12}, 1e11)
    devices = tuple(Device(f"d{i}", kind) for i in range(4))
    topology = Topology("three and one", devices, tuple(Link(pair, 10**9, 10) for pair in pairs), ("s",))
    for graph in (training_graph(rng, 12), wide(rng, 200)):
        for policy in ("fifo", "program"):
            p = Problem(graph, topology, random_costs(rng, graph, topology), Rules(policy))
            assert problem_arrays(p).alone.tolist() == [False, False, False, True]
            for _ in range(5):
                agree(p, rng.integers(0, 4, graph.n_units)[graph.unit_of_op])
    free = Problem(graph, topology, p.costs, Rules(contention="none"))
    assert problem_arrays(free).alone.all()


def test_channels_that_need_not_be_waited_for():
    # d0 is behind two switches in a row: what is on the one link between them has passed, or will pass, the other.
    kind = DeviceKind("gpu", 1 << 30, {"f32": 1e12}, 1e11)
    pairs = [("d0", "s"), ("s", "t"), ("t", "d1"), ("t", "d2")]
    devices = tuple(Device(f"d{i}", kind) for i in range(3))
    topology = Topology("row", devices, tuple(Link(pair, 10**9, 10) for pair in pairs), ("s", "t"))
    ptr, route = topology.route_csr
    even_ptr, even = inputs._even_routes(ptr, route)
    assert np.diff(ptr).tolist() == [0, 3, 3, 3, 0, 2, 3, 2, 0] and set(np.diff(even_ptr).tolist()) == {2}
    for pair in np.flatnonzero(np.diff(ptr)):
        assert set(even[even_ptr[pair] : even_ptr[pair + 1]]) < set(route[ptr[pair] : ptr[pair + 1]]) or pair in (5, 7)


@pytest.mark.parametrize("devices", [16, 17, 40, 64, 65, 130])
def test_many_devices(devices):
    rng = np.random.default_rng(devices)
    graph = training_graph(rng, 15)
    kind = DeviceKind("gpu", 1 << 30, {"f32": 1e12}, 1e11)
    topology = Topology(
        "wide",
        tuple(Device(f"d{i}", kind) for i in range(devices)),
        tuple(Link((f"d{i}", "switch"), 10**9, 1000) for i in range(devices)),
        ("switch",),
    )
    costs = random_costs(rng, graph, topology)
    for policy in ("fifo", "priority", "program"):
        p = Problem(graph, topology, costs, Rules(policy))
        for reach in (2, devices):
            agree(p, rng.integers(0, reach, graph.n_units)[graph.unit_of_op])
            agree(p, (devices - 1 - rng.integers(0, reach, graph.n_units))[graph.unit_of_op])


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "-".join(vars(rules).values()))
def test_problems_without_any_size_have_no_memory(rules):
    b = GraphBuilder("weightless")
    x = b.op("x", "op")
    y = b.op("y", "op")
    b.control(x, y)
    assert agree(problem(b, machine(2, memory=0, host=True), [3, 4], rules=rules), [0, 1]).peak_bytes.tolist() == [0, 0]


def test_large_problems_have_arrays_of_the_same_types_as_small_ones():
    """Else each kernel is compiled again for them. NumPy reuses large temporary arrays, in the order that they have."""
    kinds = [DeviceKind(name, 1 << 30, {"f32": 1e9}, 1e9, granularity=grain) for name, grain in (("a", 1), ("b", 512))]
    devices = tuple(Device(kind.name, kind) for kind in kinds)
    topology = Topology("two kinds", devices, (Link(("a", "b"), 10**9, 1000),))
    found = []
    for n in (4, 20_000):
        builder = GraphBuilder("wide")
        for number in range(n):
            builder.op(f"op{number}", "relu", flops=1, outputs=[4])
        arrays = problem_arrays(Problem.build(builder.build(), topology))
        assert len(np.unique(arrays.granule)) == 2
        found.append([(a.dtype, a.ndim, a.flags.c_contiguous) for a in arrays if isinstance(a, np.ndarray)])
    assert found[0] == found[1] and all(in_order for *_, in_order in found[0])
