"""Pipelined microbatches: worked by hand, and against the rules they are made of."""

import numpy as np
import pytest
from drawn import machine, problem

from simdev.errors import InvalidInput, UnknownName
from simdev.placers.testing import assert_same_schedule, random_costs, random_placement, random_topology, training_graph
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Device, DeviceKind, Link, Topology
from simdev.sim import simulate, validate
from simdev.sim.pipeline import simulate_pipeline


def line(n_devices, memory=10**9):
    """Devices in a row, joined by links that take 1 ns for a control edge."""
    kind = DeviceKind("toy", memory, {"f32": 1e9}, 1e9, granularity=1)
    links = tuple(Link((f"d{i}", f"d{i + 1}"), 10**12, 1) for i in range(n_devices - 1))
    hosts = [Device(f"d{i}", kind, host=True) for i in range(n_devices)]  # hosts pass transfers on
    return Topology("line", tuple(hosts), links)


def stages(n_stages, forward=2, backward=2, size=0, update=False):
    """Forward f0 -> f1 ..., backward in reverse reading the forward's tensors; a parameter and an update per stage."""
    b, durations, placed, last, kept = GraphBuilder("stages"), [], [], [], []

    def add(name, kind, ns, stage, **rest):
        durations.append(ns)
        placed.append(stage)
        return b.op(name, kind, **rest)

    weights = []
    if update:
        for i in range(n_stages):
            weights.append(add(f"w{i}", "parameter", 1, i, persistent_bytes=100))
            b.tensor(weights[-1], 100, persistent=True)
    for i in range(n_stages):
        reads = last + (b.outputs(weights[i]) if update else [])
        last = b.outputs(add(f"f{i}", "op", forward, i, inputs=reads, outputs=[size]))
        kept.append(last)
    grads = []
    for i in reversed(range(n_stages)):
        out = [size, 7] if update else [size]
        made = b.outputs(add(f"b{i}", "op", backward, i, inputs=last + kept[i], outputs=out, phase="backward"))
        last = made[:1]
        grads.append((i, made[-1]))
    if update:
        for i, grad in grads:
            add(f"u{i}", "sgd", 1, i, inputs=[grad, *b.outputs(weights[i])], phase="update")
    return b, durations, placed


def pipeline(n_stages, microbatches, order, rules=None, **kw):
    b, durations, placed = stages(n_stages, **kw)
    p = problem(b, line(n_stages), durations, rules=rules)
    return simulate_pipeline(p, Placement(np.array(placed)), microbatches, order), p


def times(report, name):
    return [
        (int(report.schedule.op_start[i]), int(report.schedule.op_finish[i]))
        for i, op in enumerate(report.problem.graph.op_names)
        if op.split("#")[0] == name
    ]


def test_gpipe_two_stages_by_hand():
    report, _ = pipeline(2, 3, "gpipe")
    assert times(report, "f0") == [(0, 2), (2, 4), (4, 6)]
    assert times(report, "f1") == [(3, 5), (5, 7), (7, 9)]
    assert times(report, "b1") == [(10, 12), (12, 14), (14, 16)]  # after the flush, 9 to 10
    assert times(report, "b0") == [(13, 15), (15, 17), (17, 19)]
    assert report.total_ns == 19 and report.stages == (0, 1)
    assert report.steady_ns == 4.0  # 2 ns forward and 2 ns backward


def test_1f1b_two_stages_by_hand():
    report, _ = pipeline(2, 3, "1f1b")
    assert times(report, "f0") == [(0, 2), (2, 4), (11, 13)]
    assert times(report, "f1") == [(3, 5), (8, 10), (14, 16)]
    assert times(report, "b1") == [(5, 7), (10, 12), (16, 18)]
    assert times(report, "b0") == [(8, 10), (13, 15), (19, 21)]
    assert report.total_ns == 21
    assert report.bubble_fraction == pytest.approx(1 - (12 + 12 + 3) / 42)  # three barriers of 1 ns


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_long_pipelines_approach_the_largest_load(order):
    report, p = pipeline(4, 40, order, forward=1000, backward=2000)
    assert 3000 <= report.steady_ns < 3030
    assert report.total_ns >= 40 * 3000


def test_1f1b_keeps_fewer_activations_than_gpipe():
    gpipe, _ = pipeline(3, 8, "gpipe", forward=50, backward=50, size=1000)
    one, _ = pipeline(3, 8, "1f1b", forward=50, backward=50, size=1000)
    assert np.all(one.peak_bytes <= gpipe.peak_bytes) and one.peak_bytes[0] < gpipe.peak_bytes[0] / 2


@pytest.mark.parametrize("order, n_stages", [("1f1b", 2), ("1f1b", 4)])
def test_1f1b_limits_what_is_under_way(order, n_stages):
    report, _ = pipeline(n_stages, 9, order, forward=30, backward=70)
    for stage in range(n_stages):
        begun, ended = times(report, f"f{stage}"), times(report, f"b{stage}")
        for m in range(9):
            under_way = sum(ended[k][1] > begun[m][0] for k in range(m + 1))
            assert under_way <= n_stages - stage


def test_updates_run_once_and_gradients_share_a_buffer():
    report, p = pipeline(2, 4, "gpipe", update=True, forward=20, backward=20)
    names = report.problem.graph.op_names
    assert sum(name.startswith("u") for name in names) == 2 and sum(name.startswith("w") for name in names) == 2
    assert sum("accumulate" in name for name in names) == 6
    last_backward = max(finish for _, finish in times(report, "b0"))
    assert times(report, "u0")[0][0] >= last_backward
    # 100 bytes of weights and one buffer of 7, plus one gradient on its way into it.
    assert report.peak_bytes[0] == 114


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize("contention", ["fifo", "none", "fair"])
def test_the_unrolled_run_obeys_the_rules(order, contention):
    report, _ = pipeline(3, 5, order, Rules(contention=contention), update=True, size=3000)
    validate(report.problem, report.placement, report.schedule)
    assert_same_schedule(report.schedule, simulate(report.problem, report.placement, engine="reference"))


def test_a_graph_without_backward_flows_through():
    b = GraphBuilder("inference")
    x = b.op("x", "op", outputs=[0])
    b.op("y", "op", inputs=b.outputs(x))
    report = simulate_pipeline(problem(b, line(2), [4, 4]), Placement(np.array([0, 1])), 6, "1f1b")
    assert report.total_ns == 4 * 7 + 1 and report.steady_ns == 4.0


def test_one_microbatch_takes_the_step_and_the_flushes():
    b, durations, placed = stages(2)
    p = problem(b, line(2), durations)
    plain = simulate(p, Placement(np.array(placed)))
    assert simulate_pipeline(p, Placement(np.array(placed)), 1, "1f1b").total_ns == plain.step_ns
    assert simulate_pipeline(p, Placement(np.array(placed)), 1, "gpipe").total_ns == plain.step_ns + 1


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_random_steps_keep_the_order_of_their_pipeline(order):
    done = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        graph, topology = training_graph(rng, int(rng.integers(1, 4))), random_topology(rng)
        try:
            costs = random_costs(rng, graph, topology)
        except InvalidInput:
            continue  # links too slow for a tensor
        p = Problem(graph, topology, costs, Rules(contention=str(rng.choice(["fifo", "none", "fair"]))))
        count = int(rng.integers(1, 6))
        report = simulate_pipeline(p, random_placement(rng, p), count, order)
        validate(report.problem, report.placement, report.schedule)
        assert_same_schedule(report.schedule, simulate(report.problem, report.placement, engine="reference"))
        run, schedule, depth = report.problem.graph, report.schedule, len(report.stages)
        moving = np.array([kind not in ("input", "parameter", "barrier") for kind in run.kinds])[run.op_kind]
        for number, device in enumerate(report.stages):
            here = moving & (report.microbatch >= 0) & (report.placement.devices == device)
            forward, backward = here & (run.op_phase == 0), here & (run.op_phase == 1)
            if order == "gpipe":
                assert schedule.op_start[backward].min() >= schedule.op_finish[forward].max()
            for m in range(depth - number, count if order == "1f1b" else 0):
                before = backward & (report.microbatch == m - (depth - number))
                after = forward & (report.microbatch == m)
                assert schedule.op_start[after].min() >= schedule.op_finish[before].max()
            done += 1
    assert done > 20


def test_bad_input():
    b, durations, placed = stages(2)
    p, placement = problem(b, line(2), durations), Placement(np.array(placed))
    with pytest.raises(UnknownName, match="1f1b"):
        simulate_pipeline(p, placement, 2, "1f1")
    with pytest.raises(InvalidInput, match="microbatches"):
        simulate_pipeline(p, placement, 0)
    with pytest.raises(InvalidInput, match="dataflow"):
        simulate_pipeline(Problem(p.graph, p.topology, p.costs, Rules(runtime="eager")), placement, 2)


def replicated(n_stages, widths, microbatches, order="1f1b", **kw):
    """Stages on teams of ``widths`` devices: stage i begins where the devices of stage i - 1 end."""
    b, durations, placed = stages(n_stages, **kw)
    first = np.cumsum([0, *widths])
    p = problem(b, line(int(first[-1])), durations)
    of = np.repeat(first[:-1], widths)
    placement = Placement(first[np.array(placed)], replica_of=of)
    return simulate_pipeline(p, placement, microbatches, order), p, placement


def test_replicas_take_the_microbatches_in_turn():
    report, _, _ = replicated(1, [2], 4, "gpipe", forward=20, backward=20)
    assert times(report, "f0") == [(0, 20), (0, 20), (20, 40), (20, 40)]  # microbatches 0, 1, 2, 3
    assert times(report, "b0") == [(41, 61), (41, 61), (61, 81), (61, 81)]  # after each device's flush
    assert report.stages == (0,) and report.steady_ns == 20.0 and report.exchange_ns == 0
    assert report.placement.devices[report.microbatch == 1].tolist() == [1, 1]


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_a_replicated_stage_is_as_fast_as_its_share(order):
    alone, _ = pipeline(2, 24, order, forward=1000, backward=2000)
    report, _, _ = replicated(2, [3, 1], 24, order, forward=1000, backward=2000)
    assert 3000 <= report.steady_ns < 3030 and 3000 <= alone.steady_ns < 3030  # the second stage limits both
    report, _, _ = replicated(2, [2, 2], 24, order, forward=1000, backward=2000)
    assert 1500 <= report.steady_ns < 1530


def test_1f1b_limits_what_is_in_flight_on_each_replica():
    report, _, _ = replicated(2, [2, 1], 9, forward=30, backward=70)
    begun, ended = times(report, "f0"), times(report, "b0")
    # Three devices from the first stage on, of which it has two: at most two in flight on each, and two where it can.
    mine = [range(m % 2, m + 1, 2) for m in range(9)]
    in_flight = [sum(ended[k][1] > begun[m][0] for k in mine[m]) for m in range(9)]
    assert max(in_flight) == 2 and in_flight[6] == 2


def test_replicas_add_up_their_gradients_before_the_update():
    report, _, _ = replicated(1, [2], 4, update=True, forward=20, backward=20)
    run, schedule = report.problem.graph, report.schedule
    names = list(run.op_names)
    assert sum(name.startswith("w0") for name in names) == 2 and sum(name.startswith("u0") for name in names) == 2
    assert sum("accumulate" in name for name in names) == 2  # the first two microbatches have a device each
    sums = [op for op, name in enumerate(names) if name.endswith("/sum")]
    assert sorted(report.placement.devices[sums].tolist()) == [0, 1]
    sent = run.tensor_bytes[schedule.transfer_tensor]
    assert sorted(sent[sent > 0].tolist()) == [4, 4, 4, 4]  # halves of 7 bytes: out to be added up, and back
    updates = [op for op, name in enumerate(names) if name.startswith("u0")]
    assert schedule.op_start[updates].min() >= schedule.op_finish[sums].max()
    assert report.exchange_ns > 0 and report.steady_ns == 20.0 + report.exchange_ns / 4
    assert report.peak_bytes.min() >= 100  # each replica holds the weights


def test_a_table_on_one_device_serves_the_copies_of_the_rest():
    """A table of 100 bytes on the replica, whose look-ups feed the copies of a layer on both devices of the team; its
    gradient returns to the table's device, is accumulated there, and needs no exchange."""
    b = GraphBuilder("hybrid")
    table = b.op("table", "parameter", outputs=[100], persistent_bytes=100)
    x = b.op("x", "op", inputs=b.outputs(table), outputs=[3])
    w = b.op("w", "parameter", outputs=[5], persistent_bytes=5)
    y = b.op("y", "op", inputs=[*b.outputs(x), *b.outputs(w)], outputs=[3])
    back = b.op("back", "op", inputs=b.outputs(y), outputs=[3], phase="backward")
    g = b.op("g", "op", inputs=b.outputs(back), outputs=[7], phase="backward")
    b.op("u", "sgd", inputs=b.outputs(g), phase="update")
    p = problem(b, machine(2), [1, 4, 1, 20, 40, 6, 1])
    placement = Placement(
        np.array([1, 1, 0, 0, 0, 1, 1]), replica_of=np.zeros(2, int), replicated=np.array([0, 0, 1, 1, 1, 0, 0])
    )
    report = simulate_pipeline(p, placement, 6, "1f1b")
    names, devices = list(report.problem.graph.op_names), report.placement.devices
    on = {name: int(device) for name, device in zip(names, devices, strict=True)}
    assert report.stages == (0,) and {on[f"x#{m}"] for m in range(6)} == {1} == {on[f"g#{m}"] for m in range(6)}
    assert [on[f"y#{m}"] for m in range(6)] == [0, 1, 0, 1, 0, 1]
    held = report.problem.graph.op_persistent_bytes
    assert {name: int(held[op]) for op, name in enumerate(names) if held[op]} == {"table": 100, "w": 5, "w~1": 5}
    assert report.exchange_ns == 0 and not any("split" in name for name in names)
    assert report.steady_ns >= 30 + 10  # half of the layer, and all of the table's work, on the table's device
    begun, ended = (
        dict(zip(names, when, strict=True)) for when in (report.schedule.op_start, report.schedule.op_finish)
    )
    assert all(begun[f"x#{m}"] > ended[f"g#{m - 2}"] for m in range(2, 6))  # each device has one microbatch in progress


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_random_replicas_obey_the_rules(order):
    done = 0
    for seed in range(90):
        rng = np.random.default_rng(seed)
        graph, topology = training_graph(rng, int(rng.integers(1, 6))), random_topology(rng)
        try:
            costs = random_costs(rng, graph, topology)
            p = Problem(graph, topology, costs, Rules(contention=str(rng.choice(["fifo", "none", "fair"]))))
            devices = random_placement(rng, p).devices
            of = np.arange(topology.n_devices)
            free = np.setdiff1d(of, devices)
            of[free] = rng.choice(np.unique(devices), len(free))
            placement = Placement(devices, replica_of=of)
            placement.check(p)
        except InvalidInput:
            continue
        count = int(rng.integers(1, 8))
        report = simulate_pipeline(p, placement, count, order)
        validate(report.problem, report.placement, report.schedule)
        assert_same_schedule(report.schedule, simulate(report.problem, report.placement, engine="reference"))
        done += (of != np.arange(topology.n_devices)).any()
    assert done > 15


def test_replicas_without_microbatches_are_refused():
    b, durations, _ = stages(1)
    p = problem(b, line(2), durations)
    with pytest.raises(InvalidInput, match="replica_of: replicas need a pipeline"):
        simulate(p, Placement(np.zeros(2, int), replica_of=np.zeros(2, int)))


def test_what_the_backward_phase_changes_has_no_copies():
    """A table that its backward op changes in place, as a fused optimiser does: each copy would hold another table."""
    b = GraphBuilder("fused")
    table = b.op("table", "parameter", outputs=[0], persistent_bytes=100, group="table")
    x = b.op("x", "op", inputs=b.outputs(table), outputs=[1])
    y = b.op("y", "op", inputs=b.outputs(x), outputs=[1], phase="backward")
    b.op("change", "op", inputs=b.outputs(y), phase="backward", group="table")
    p = problem(b, machine(2), [1, 4, 4, 2])
    assert p.graph.updated_in_backward.tolist() == [True, False, False, True]
    copied = {"devices": np.zeros(4, int), "replica_of": np.zeros(2, int)}
    with pytest.raises(InvalidInput, match="replicated: op 'table' is one of a colocation group .* would differ"):
        simulate_pipeline(p, Placement(**copied), 4, "1f1b")
    report = simulate_pipeline(p, Placement(**copied, replicated=np.array([0, 1, 1, 0])), 4, "1f1b")
    assert report.placement.devices[[name.startswith("change") for name in report.problem.graph.op_names]].max() == 0
    b.op("u", "sgd", inputs=b.outputs(y), phase="update", group="table")
    assert not b.build().updated_in_backward.any()


def gradient_on_a_team(r, microbatches, size=7, **costs):
    """A backward op whose gradient an update reads, on one team of ``r`` devices; links of 10 ns and 1 ns per byte."""
    b = GraphBuilder("gradient")
    x = b.op("x", "input", outputs=[0])
    made = b.op("b", "op", inputs=b.outputs(x), outputs=[size], persistent_bytes=100, phase="backward")
    b.op("u", "sgd", inputs=b.outputs(made), phase="update")
    p = problem(b, machine(r), [1, 20, 1])
    for name, value in costs.items():
        object.__setattr__(p.costs, name, np.array(value))
    return simulate_pipeline(p, Placement(np.zeros(3, int), replica_of=np.zeros(r, int)), microbatches, "1f1b")


def took(report, part):
    """Bytes and duration of each transfer of the ops whose names end with ``part``."""
    graph, schedule = report.problem.graph, report.schedule
    made = [graph.op_names[op].endswith(part) for op in graph.tensor_producer[schedule.transfer_tensor]]
    size = graph.tensor_bytes[schedule.transfer_tensor]
    return list(
        zip(size[made].tolist(), (schedule.transfer_finish - schedule.transfer_start)[made].tolist(), strict=True)
    )


def test_parts_of_a_gradient_are_rounded_up():
    report = gradient_on_a_team(3, 3)
    assert took(report, "/split") == [(3, 13)] * 6  # 7 bytes in three parts: 10 ns and a third of 7 ns
    assert took(report, "/sum") == [(3, 13)] * 6
    report = gradient_on_a_team(2, 2)
    assert took(report, "/split") == [(4, 14)] * 2
    assert took(gradient_on_a_team(2, 2, size=8), "/split") == [(4, 14)] * 2


def test_a_part_of_a_tensor_that_takes_less_than_the_latency_takes_as_long():
    assert took(gradient_on_a_team(2, 2, transfer_ns=[[10, 4]]), "/split") == [(4, 4)] * 2


def test_the_exchange_by_hand():
    """Two replicas, a microbatch each: the input until 1, backward until 21, splits until 22, halves until 36, sums
    until 37, sums are sent until 51, updates until 52."""
    report = gradient_on_a_team(2, 2)
    assert times(report, "x") == [(0, 1)] * 2 and times(report, "b") == [(1, 21)] * 2
    assert times(report, "b~0/split") == [(21, 22)] and times(report, "b~1/sum") == [(36, 37)]
    assert report.total_ns == 52 and report.exchange_ns == 30 and report.steady_ns == 52 + 30 / 2


def test_persistent_bytes_of_a_moved_op_are_held_once_on_each_device():
    """The backward op holds 100 bytes; its copies of microbatches 0 and 1 are the first on their devices."""
    report = gradient_on_a_team(2, 6)
    held = report.problem.graph.op_persistent_bytes
    names = report.problem.graph.op_names
    assert {names[op]: int(held[op]) for op in np.flatnonzero(held)} == {"b#0": 100, "b#1": 100}
    # The buffer of 7 bytes; while it is split and added up, parts of 4 bytes: out, in, the sum, and the other sum.
    assert report.peak_bytes.min() >= 107 and report.peak_bytes.max() < 200


@pytest.mark.parametrize("microbatches, steady", [(15, 2.0), (13, 2.0), (9, 2.0)])
def test_the_distance_is_taken_over_whole_periods_of_the_teams(microbatches, steady):
    """Stages on two and on three devices: completions come in pairs, 4 ns apart. Six microbatches are a period; over
    seven, of 15, the distance would be 16 / 7."""
    b = GraphBuilder("inference")
    x = b.op("x", "op", outputs=[0])
    b.op("y", "op", inputs=b.outputs(x))
    placement = Placement(np.array([0, 2]), replica_of=np.array([0, 0, 2, 2, 2]))
    report = simulate_pipeline(problem(b, machine(5), [4, 1]), placement, microbatches)
    done = [finish for _, finish in times(report, "y")]
    assert done == [15 + m // 2 * 4 for m in range(microbatches)]
    assert report.steady_ns == steady
