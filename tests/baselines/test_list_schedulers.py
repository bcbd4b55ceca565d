"""List schedulers, and the placements of experts."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from simdev.analysis.levels import b_level
from simdev.baselines import _list, fused_runs, heft, m_sct, m_topo, peft
from simdev.baselines._units import choices
from simdev.errors import Unsupported
from simdev.placers.budget import Budget
from simdev.placers.registry import find_placer, graph_path, load_workload, workloads
from simdev.placers.testing import random_problem
from simdev.problem.costs import CostTable
from simdev.problem.graph import GraphBuilder
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Device, DeviceKind, Link, Topology, load_topology
from simdev.sim import simulate_many

# list schedulers on graphs computed by hand, on the papers' own examples and on Baechi's published profile


DATA = Path(os.environ.get("SIMDEV_DATA", Path(__file__).parents[3] / "shared" / "data"))
GNMT = DATA / "baechi" / "gnmt_v2_l4_b128_s40_forward.json"


def machine(devices, memory_bytes=1 << 40):
    """Equal devices that all reach one another."""
    kind = DeviceKind("unit", memory_bytes, {"f32": 1e12}, 1e12, granularity=1)
    names = [f"d{number}" for number in range(devices)]
    links = [Link((a, b), 10**9, 0) for i, a in enumerate(names) for b in names[:i]]
    return Topology("machine", tuple(Device(name, kind) for name in names), tuple(links))


def problem_of(durations, edges, devices, *, memory_bytes=1 << 40, groups=None, persistent=None, sizes=None):
    """``durations`` per op: a number, or one per device. ``edges``: (from, to): transfer time, one tensor each."""
    n = len(durations)
    builder = GraphBuilder("hand-made")
    for op in range(n):
        builder.op(f"op{op}", "mm", group=(groups or {}).get(op), persistent_bytes=(persistent or {}).get(op, 0))
    order = sorted(edges)
    for source, target in order:
        builder.connect(builder.tensor(source, (sizes or {}).get((source, target), 1)), target)
    rows = np.array([[d if np.isscalar(d) else d[k] for d in durations] for k in range(devices)], np.int64)
    pairs = np.where(np.eye(devices, dtype=bool), -1, 0).astype(np.int32)
    transfer = np.array([[edges[edge] for edge in order]], np.int64).reshape(1, -1)
    costs = CostTable(rows, np.arange(devices, dtype=np.int32), transfer, pairs, np.zeros(n, np.int64))
    return Problem(builder.build(), machine(devices, memory_bytes), costs)


def place(entry, problem, evaluations=0, seed=0):
    spec, params = find_placer(entry)
    budget = Budget(problem, evaluations=evaluations)
    return spec.place(problem, rng=np.random.default_rng(seed), budget=budget, **params).devices


def test_m_etf_starts_ops_as_early_as_it_can():
    # 0 -> {1, 2}: 1 (the longer) stays on 0's device, 2 would wait there until 30 and can start elsewhere at 12.
    problem = problem_of([10, 20, 15], {(0, 1): 2, (0, 2): 2}, 2)
    devices = place("m-etf", problem)
    assert devices[0] == devices[1] != devices[2]


def test_m_etf_stays_where_communication_is_slow():
    problem = problem_of([10, 20, 15], {(0, 1): 50, (0, 2): 50}, 2)
    assert len(set(place("m-etf", problem))) == 1


def test_m_etf_respects_memory():
    # All in a chain with dear transfers, but a device holds only two of the four.
    problem = problem_of(
        [10] * 4, {(0, 1): 99, (1, 2): 99, (2, 3): 99}, 2, memory_bytes=250, persistent={op: 100 for op in range(4)}
    )
    devices = place("m-etf", problem)
    assert sorted(np.bincount(devices).tolist()) == [2, 2]
    assert simulate_many(problem, devices[None]).overflow_bytes[0] == 0


def test_m_etf_keeps_groups_together():
    problem = problem_of([10, 20, 15, 5], {(0, 1): 2, (0, 2): 2}, 2, groups={1: "g", 2: "g"})
    devices = place("m-etf", problem)
    assert devices[1] == devices[2]


def test_fused_runs_goes_depth_first_along_the_longer_branch():
    problem = problem_of([10, 5, 20, 1, 1], {(0, 1): 1, (0, 2): 1, (1, 3): 1, (2, 4): 1}, 2)
    table = _list.tables(problem, forward_only=False)
    below = b_level(problem.graph, problem.costs.op_ns[0], problem.costs.transfer_ns[0])
    assert fused_runs.depth_first(problem.graph, table, below).tolist() == [0, 2, 4, 1, 3]


def test_fused_runs_cuts_where_communication_is_least():
    problem = problem_of([1] * 4, {(0, 1): 9, (1, 2): 1, (2, 3): 9}, 2, persistent={0: 5})
    table, order = _list.tables(problem, forward_only=False), np.arange(4)

    def runs(most, limit=1 << 40):
        return fused_runs.cheapest_runs(problem.graph, table, order, problem.costs.transfer_ns[0], most, limit).tolist()

    assert runs(1) == [0, 1, 2, 3, 4]
    assert runs(2) == runs(3) == [0, 2, 4]
    assert runs(4) == [0, 4]
    assert runs(4, 5) == [0, 1, 4]  # op 0 keeps five bytes and has an output: it stands alone


def test_fused_runs_cuts_are_the_best_of_all_cuts():
    rng = np.random.default_rng(3)
    for _ in range(30):
        edges = {(a, b): int(rng.integers(1, 20)) for a in range(7) for b in range(a + 1, 7) if rng.random() < 0.4}
        problem = problem_of([1] * 7, edges, 2)
        table, most = _list.tables(problem, forward_only=False), int(rng.integers(1, 5))
        found = fused_runs.cheapest_runs(
            problem.graph, table, np.arange(7), problem.costs.transfer_ns[0], most, 1 << 40
        ).tolist()

        def cost(runs, edges=edges):
            run_of = np.repeat(np.arange(len(runs) - 1), np.diff(runs))
            return sum(ns for (a, b), ns in edges.items() if run_of[a] != run_of[b])

        cuts = [[0, *(at for at in range(1, 7) if bits >> at & 1), 7] for bits in range(0, 128, 2)]
        assert max(np.diff(found)) <= most
        assert cost(found) == min(cost(runs) for runs in cuts if max(np.diff(runs)) <= most)


def test_fused_runs_fuses_what_an_earliest_start_tears_apart():
    # Op 1 starts earlier on the idle device, and then op 3 waits for a tensor from one side or the other.
    problem = problem_of([10, 1, 1, 1], {(0, 3): 100, (1, 2): 1, (2, 3): 100}, 2)
    assert len(set(place("fused-runs[most=1]", problem))) == 2
    assert len(set(place("fused-runs", problem))) == 1


def test_fused_runs_respects_memory_and_groups():
    edges = {(0, 1): 99, (1, 2): 99, (2, 3): 99}
    problem = problem_of([10] * 4, edges, 2, memory_bytes=250, persistent={op: 100 for op in range(4)})
    devices = place("fused-runs", problem)
    assert sorted(np.bincount(devices).tolist()) == [2, 2]
    assert simulate_many(problem, devices[None]).overflow_bytes[0] == 0
    problem = problem_of([10] * 4, {(0, 1): 1, (2, 3): 1}, 2, groups={1: "g", 3: "g"})
    for entry in ("fused-runs", "fused-runs[most=1]"):
        devices = place(entry, problem)
        assert devices[1] == devices[3]


def test_one_channel_serves_a_device():
    # Two equal tensors leave op 0 at 10; the second starts when the first has arrived.
    problem = problem_of([10, 1, 1], {(0, 1): 5, (0, 2): 5}, 2)
    table = _list.tables(problem, forward_only=False)
    state = _list.new_state(table, np.full(2, 1 << 40))
    kernels, channel = _list.kernels(), np.zeros(2, np.int64)
    kernels.commit(table, state, channel, 0, 0, 0)
    kernels.commit(table, state, channel, 1, 1, 15)
    assert kernels.arrival(table, state, channel, 2, 1) == 20
    assert kernels.arrival(table, state, channel[:0], 2, 1) == 15  # without contention
    assert kernels.arrival(table, state, channel, 2, 0) == 10  # at home


def test_memory_of_a_tensor_is_freed_with_its_last_reader():
    problem = problem_of([1, 1, 1], {(0, 1): 1, (1, 2): 1}, 2, sizes={(0, 1): 100, (1, 2): 30})
    table = _list.tables(problem, forward_only=False)
    state = _list.new_state(table, np.full(2, 1 << 40))
    kernels, none = _list.kernels(), np.zeros(0, np.int64)
    kernels.commit(table, state, none, 0, 0, 0)
    assert state.used.tolist() == [100, 0]
    assert kernels.need_bytes(table, state, 1, 1) == 130  # a copy of the input and the output
    kernels.commit(table, state, none, 1, 1, 2)
    assert state.used.tolist() == [0, 30]


def test_favourite_child_is_on_the_critical_path():
    # 0 feeds 1 (20) and 2 (5), both feed 3: only one edge out of 0 and one into 3 can be free, and the program frees
    # those of the long branch.
    problem = problem_of([1, 20, 5, 1], {(0, 1): 3, (0, 2): 3, (1, 3): 3, (2, 3): 3}, 2)
    favourite = m_sct.favourites(problem.graph, np.ones(4, bool), problem.costs.op_ns[0], problem.costs.transfer_ns[0])
    assert favourite.tolist() == [1, 3, -1, -1]


def test_program_value_of_a_fork():
    # Two equal children: one pays, the other not; solved by hand, w = 1 + 4 + 10 = 15 needs x = 1 on one edge.
    paid = m_sct.solve(np.array([1, 10, 10]), np.array([0, 0]), np.array([1, 2]), np.array([4, 4]))
    assert paid.sum() == pytest.approx(1)


def test_m_sct_keeps_a_chain_together():
    problem = problem_of([5] * 6, {(op, op + 1): 1 for op in range(5)}, 3)
    assert len(set(place("m-sct", problem))) == 1


def test_m_sct_uses_all_devices_for_independent_chains():
    edges = {(3 * chain + op, 3 * chain + op + 1): 4 for chain in range(3) for op in range(2)}
    devices = place("m-sct", problem_of([5] * 9, edges, 3)).reshape(3, 3)
    assert (devices == devices[:, :1]).all() and set(devices[:, 0]) == {0, 1, 2}


# The example of Topcuoglu et al. 2002 (figure 3, table 1): its HEFT schedule ends at 80.
HEFT_COSTS = [(14, 16, 9), (13, 19, 18), (11, 13, 19), (13, 8, 17), (12, 13, 10), (13, 16, 9), (7, 15, 11),
              (5, 11, 14), (18, 12, 20), (21, 7, 16)]  # fmt: skip
HEFT_EDGES = {(0, 1): 18, (0, 2): 12, (0, 3): 9, (0, 4): 11, (0, 5): 14, (1, 7): 19, (1, 8): 16, (2, 6): 23,
              (3, 7): 27, (3, 8): 23, (4, 8): 13, (5, 7): 15, (6, 9): 17, (7, 9): 11, (8, 9): 13}  # fmt: skip
# The example of Arabnejad and Barbosa 2014 (figure 1): PEFT ends at 122, HEFT at 133.
PEFT_COSTS = [(22, 21, 36), (22, 18, 18), (32, 27, 43), (7, 10, 4), (29, 27, 35), (26, 17, 24), (14, 25, 30),
              (29, 23, 36), (15, 21, 8), (13, 16, 33)]  # fmt: skip
PEFT_EDGES = {(0, 1): 17, (0, 2): 31, (0, 3): 29, (0, 4): 13, (0, 5): 7, (1, 7): 3, (1, 8): 30, (2, 6): 16,
              (3, 7): 11, (3, 8): 7, (4, 8): 57, (5, 7): 5, (6, 9): 9, (7, 9): 42, (8, 9): 7}  # fmt: skip


def makespan(problem, lookahead=False):
    table = _list.tables(problem, forward_only=False)
    state = _list.new_state(table, np.full(problem.topology.n_devices, 1 << 40))
    cost, order = np.zeros((0, 0), np.int64), heft.upward_order(problem, table)
    if lookahead:
        _, transfer = _list.mean_costs(problem, table.allowed)
        cost = _list.kernels().optimistic_costs(table, transfer // problem.topology.n_devices)
        order = peft.ready_order(problem.graph, table, cost.sum(axis=0))
    return _list.kernels().earliest_finish_first(table, state, order, cost)


def test_heft_on_its_papers_example():
    problem = problem_of(HEFT_COSTS, HEFT_EDGES, 3)
    table = _list.tables(problem, forward_only=False)
    # Ranks of table 1: 108, 77, 80, 80, 69, 63.3, 42.7, 35.7, 44.3, 14.7.
    assert heft.upward_order(problem, table).tolist() == [0, 2, 3, 1, 4, 5, 8, 6, 7, 9]
    assert makespan(problem) == 80


def test_peft_on_its_papers_example():
    problem = problem_of(PEFT_COSTS, PEFT_EDGES, 3)
    assert makespan(problem) == 133
    assert makespan(problem, lookahead=True) == 122


def test_gaps_are_found_and_filled():
    kernels = _list.kernels()
    start, end = np.array([0, 60, 0]), np.array([30, 1 << 62, 0])  # free from 0 to 30 and from 60 on
    assert kernels._first_gap(end, 2, 5, 25, start) == 0
    assert kernels._first_gap(end, 2, 6, 25, start) == 1
    assert kernels._fill(start, end, 2, 0, 5, 30) == 2
    assert start[:2].tolist() == [0, 60] and end[0] == 5
    assert kernels._fill(start, end, 2, 1, 70, 80) == 3
    assert start.tolist() == [0, 60, 80] and end[:2].tolist() == [5, 70]
    assert kernels._fill(start, end, 3, 1, 60, 70) == 2
    assert start[:2].tolist() == [0, 80]


def test_m_topo_fills_to_the_cap():
    # Six ops of 100 bytes on three devices: cap 200 + 100, so three, three and none.
    problem = problem_of([1] * 6, {}, 3, persistent=dict.fromkeys(range(6), 100))
    assert m_topo.cap(np.full(6, 100), np.full(6, 100), 3) == 300
    assert place("m-topo", problem).tolist() == [0, 0, 0, 1, 1, 1]


def test_ops_with_one_reader_are_coplaced():
    # 0 -> 1 -> 2, 3; only 0 has a single reader.
    problem = problem_of([1] * 4, {(0, 1): 1, (1, 2): 1, (1, 3): 1}, 2)
    assert _list.tables(problem, forward_only=True).label.tolist() == [0, 0, 1, 2]
    assert _list.tables(problem, forward_only=False).label.tolist() == [0, 1, 2, 3]


def test_coplaced_ops_fit_half_a_device():
    problem = problem_of(
        [1] * 4, {(op, op + 1): 1 for op in range(3)}, 2, memory_bytes=400, persistent=dict.fromkeys(range(4), 90)
    )
    assert _list.tables(problem, forward_only=True).label.tolist() == [0, 0, 1, 1]


def test_round_robin_takes_turns():
    assert place("round-robin", problem_of([1] * 5, {}, 3)).tolist() == [0, 1, 2, 0, 1]


def test_random_is_uniform():
    counts = np.bincount(place("random", problem_of([1] * 3000, {}, 3)), minlength=3)
    assert counts.min() > 900 and counts.sum() == 3000


def gnmt():
    """Baechi's measured GNMT forward graph on four devices with its linear transfer cost."""
    if not GNMT.is_file():
        pytest.skip("needs Baechi's GNMT profile (chiragcshetty/baechi_tf, tmp/cost.pkl as JSON)")
    nodes = json.loads(GNMT.read_text())["nodes"]
    builder, number = GraphBuilder("gnmt"), {node["name"]: i for i, node in enumerate(nodes)}
    for node in nodes:
        builder.op(
            node["name"],
            "mm" if node["compute_us"] else "constant",
            persistent_bytes=node["persistent_bytes"] or 0,
            workspace_bytes=node["temp_bytes"] or 0,
        )
    outputs = {}
    for node in nodes:
        for text in node["inputs"]:
            name, _, index = text.lstrip("^").partition(":")
            key = (number[name], -1 if text.startswith("^") else int(index or 0))
            if key not in outputs:
                sizes = nodes[key[0]]["output_bytes"] or []
                outputs[key] = builder.tensor(key[0], sizes[key[1]] if 0 <= key[1] < len(sizes) else 0)
            builder.connect(outputs[key], number[node["name"]])
    graph = builder.build()
    duration = {node["name"]: max(1, round(1000 * (node["compute_us"] or 0))) for node in nodes}
    row = np.array([[duration[name] for name in graph.op_names]], np.int64)
    transfer = 134_000 + np.ceil(0.1754 * graph.tensor_bytes).astype(np.int64)
    pairs = np.where(np.eye(4, dtype=bool), -1, 0).astype(np.int32)
    costs = CostTable(row, np.zeros(4, np.int32), transfer[None], pairs, np.zeros(graph.n_ops, np.int64))
    return Problem(graph, machine(4, 8 << 30), costs)


def test_baechi_profile():
    """Published: compute times sum to 115 875 us, critical path 78 687 us; two measured ops (4 us) are no nodes."""
    problem = gnmt()
    durations = problem.costs.op_ns[0]
    assert abs(durations[durations > 1].sum() / 1000 - 115_875) <= 4
    assert abs(b_level(problem.graph, durations).max() / 1000 - 78_687) <= 5
    bound = b_level(problem.graph, durations).max()
    names = ("single-gpu", "m-etf", "m-etf[scope=step]", "m-sct", "heft", "min-cut")
    steps = simulate_many(problem, np.stack([place(name, problem) for name in names])).step_ns
    assert steps[0] == durations.sum()
    assert steps.min() >= bound
    assert steps[2] < steps[0]  # without co-placement m-ETF gains, in spite of 134 us a transfer


def test_backward_ops_follow_their_forward_ops():
    """Two forward ops on two devices, with the tensors that their gradients read; nothing else says where these go."""
    builder = GraphBuilder("pair")
    source = builder.op("x", "input", outputs=[4096])
    first = builder.op("first", "mm", inputs=builder.outputs(source), outputs=[4096], layer="a")
    second = builder.op("second", "_softmax", inputs=builder.outputs(first), outputs=[4096], layer="a")
    back = builder.op(
        "back", "_softmax_backward_data", inputs=builder.outputs(second), outputs=[4096], phase="backward", layer="a"
    )
    builder.op(
        "back2",
        "mm",
        inputs=[*builder.outputs(back), *builder.outputs(source)],
        outputs=[4096],
        phase="backward",
        layer="a",
    )
    lost = builder.op("lost", "add", inputs=builder.outputs(back), outputs=[4096], phase="backward", layer="b")
    graph = builder.build()
    problem = Problem.build(graph, load_topology("p100x2"))
    allowed = choices(problem)
    devices = _list.follow_forward(problem, np.array([-1, 1, 2, -1, -1, -1]), allowed)
    # The softmax's gradient reads its output; mm's gradient reads what "first" read; the last is where its input is.
    assert devices.tolist() == [1, 1, 2, 2, 1, 2] and lost == 5


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("kernel", ["start", "start, favourites", "finish"])
def test_schedules_are_possible(seed, kernel):
    """Inputs arrive before an op starts, a device runs one op at a time, groups stay together, all is placed."""
    problem = random_problem(np.random.default_rng(seed), max_ops=60, rules=Rules())
    graph, costs = problem.graph, problem.costs
    table = _list.tables(problem, forward_only=False)
    state = _list.new_state(table, np.full(problem.topology.n_devices, 10**5))
    if kernel == "finish":
        order = heft.upward_order(problem, table)
        end = _list.kernels().earliest_finish_first(table, state, order, np.zeros((0, 0), np.int64))
    else:
        favourite = np.full(graph.n_ops, -1, np.int64)
        if "favourites" in kernel:
            duration, transfer = _list.mean_costs(problem, table.allowed)
            favourite = m_sct.favourites(graph, table.scope, duration, transfer)
        order = np.arange(graph.n_ops, dtype=np.int64)
        end = _list.kernels().earliest_start_first(table, state, order, favourite)
    ops = np.flatnonzero(table.scope)
    device = state.unit_device[graph.unit_of_op]
    assert (state.start[ops] >= 0).all() and (device[ops] >= 0).all()
    assert np.array_equal(state.finish[ops] - state.start[ops], costs.device_op_ns[device[ops], ops])
    assert end == state.finish[ops].max(initial=0)
    for edge in range(graph.n_edges):
        source, reader, tensor = graph.edge_source[edge], graph.consumers[edge], graph.edge_tensor[edge]
        if table.scope[reader]:
            route = costs.pair_class[device[source], device[reader]]
            delay = 0 if device[source] == device[reader] else costs.transfer_ns[route, tensor]
            assert state.start[reader] >= state.finish[source] + delay - (table.lazy[source] and delay == 0)
    for number in range(problem.topology.n_devices):
        mine = ops[device[ops] == number]
        mine = mine[np.argsort(state.start[mine], kind="stable")]
        assert (state.start[mine][1:] >= state.finish[mine][:-1]).all()


# expert


def chain(family, layers):
    """One op per layer name, each reading the one before; table layers hold as many MiB as their number + 1."""
    builder, last = GraphBuilder(family or "captured", {"family": family} if family else {}), []
    for number, layer in enumerate(layers):
        size = (int(layer[5:]) + 1) << 20 if layer.startswith("table") else 0
        op = builder.op(
            f"op{number}", "mm", inputs=last, flops=10**6, outputs=[1024], layer=layer, persistent_bytes=size
        )
        last = builder.outputs(op)
    return builder.build()


def expert(graph, topology="p100x4"):
    problem = Problem.build(graph, load_topology(topology))
    spec, _ = find_placer("expert")
    return spec.place(problem, rng=np.random.default_rng(0), budget=Budget(problem)).devices.tolist()


def test_inception_is_cut_into_contiguous_stages():
    layers = ["stem.0", "mixed.0", "mixed.1", "mixed.2", "mixed.7", "aux.0", "mixed.8", "head.0"]
    # Two layers a device; aux counts with mixed.7, which it reads, and comes before mixed.8.
    assert expert(chain("inception", layers)) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_transformer_layers_keep_together_with_embedding_first_and_softmax_last():
    layers = ["embedding"] + [f"layer{i}.{part}" for i in range(4) for part in ("attention", "norm")] + ["softmax"]
    devices = expert(chain("gpt2", layers))
    assert devices == sorted(devices) and devices[0] == 1 and devices[-1] == 4
    for i in range(4):
        assert devices[1 + 2 * i] == devices[2 + 2 * i]


def test_cells_stay_whole_and_the_auxiliary_head_goes_with_its_neighbour():
    layers = ["stem.0", "cell.0.current", "cell.0.block", "cell.1.current", "cell.1.block", "aux.0", "cell.2", "head.0"]
    # Seven layers with a place, in four stages by the middle of each cell; aux reads cell 1.
    assert expert(chain("nasnet", layers)) == [1, 2, 2, 3, 3, 3, 4, 4]


def test_wavenet_is_cut_along_its_stacks():
    layers = ["input"] + [f"stack.{s}.{i}.filter" for s in range(2) for i in range(3)] + ["head.1"]
    assert expert(chain("wavenet", layers)) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_cells_are_whole_and_wavenet_follows_its_stacks():
    cells = ["stem"] + [f"cell.{i}.block.0.0" for i in range(10)] + ["aux.0", "head.0"]
    devices = expert(chain("nasnet", cells))
    assert devices[:11] == sorted(devices[:11]) and set(devices) == {1, 2, 3, 4}
    assert devices[11] == devices[10]  # aux goes with what it reads
    layers = [f"stack.{s}.{i}.filter" for s in range(4) for i in range(9)]
    assert expert(chain("wavenet", layers)) == [1 + s for s in range(4) for _ in range(9)]


@pytest.mark.parametrize("name", workloads())
def test_every_shipped_workload_has_a_rule(name):
    if not graph_path(name).is_file():
        pytest.skip(f"the graph of {name} is not shipped")
    graph = load_workload(name)
    devices = np.array(expert(graph))
    load = np.bincount(devices, graph.op_flops.astype(float), minlength=5)
    assert set(devices) <= {1, 2, 3, 4} and len(set(devices)) > 1
    assert load.max() < 0.9 * load.sum() or name.startswith("dlrm")  # whose tables hold the bytes, not the FLOPs


def test_each_lstm_layer_has_its_device():
    layers = ["embedding", "layer0", "layer1", "softmax"]
    assert expert(chain("rnnlm", layers)) == [1, 1, 2, 2]


def test_encoder_and_decoder_have_devices_of_their_own_where_there_are_enough():
    layers = [
        "encoder.embedding",
        "encoder.layer0",
        "encoder.layer1",
        "decoder.embedding",
        "decoder.attention.query",
        "decoder.layer0",
        "decoder.layer1",
        "softmax",
    ]
    assert expert(chain("nmt", layers)) == [1, 1, 2, 3, 4, 3, 4, 4]
    assert expert(chain("nmt", layers), "p100x2") == [1, 1, 2, 1, 2, 1, 2, 2]


def test_deep_lstm_layers_share_devices_in_order():
    layers = [f"encoder.layer{i}" for i in range(8)] + [f"decoder.layer{i}" for i in range(8)]
    assert expert(chain("nmt", layers)) == 2 * [1, 1, 2, 2, 3, 3, 4, 4]


def test_tables_are_spread_by_size():
    # Sizes 1..5: 5 to the first, 4, 3, 2 to the others, then 1 beside 2; the rest on the first.
    layers = [f"table{i}" for i in range(5)] + ["bottom.0", "interaction", "top.0"]
    assert expert(chain("dlrm", layers)) == [4, 4, 3, 2, 1, 1, 1, 1]


def test_ops_of_unknown_layers_go_with_their_neighbours():
    assert expert(chain("rnnlm", ["layer0", "layer1", "", ""])) == [1, 2, 2, 2]


def test_a_captured_model_is_cut_between_the_members_of_its_lists():
    layers = ["wte", *(f"h.{number}.{part}" for number in range(8) for part in ("attn", "mlp")), "head"]
    graph = chain(None, layers)
    assert expert(graph, "p100x4") == [1, *(1 + number // 2 for number in range(8) for _ in range(2)), 4]
    with pytest.raises(Unsupported, match="member of a list"):
        expert(chain(None, ["a", "b"]))


def test_unknown_family_is_unsupported():
    with pytest.raises(Unsupported, match="family 'perceptron'"):
        expert(chain("perceptron", ["a", "b"]))
