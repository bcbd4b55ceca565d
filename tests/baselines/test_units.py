"""Helpers of placers: units, coarser graphs, clusters and sums."""

import os
import subprocess
import sys

import numpy as np
import pytest
from test_list_schedulers import place, problem_of

from simdev.baselines import _coarse, _guided, _list, _search, _units, critical_path
from simdev.baselines._units import choices
from simdev.errors import Unsupported
from simdev.placers.budget import Budget
from simdev.placers.registry import graph_path, load_workload
from simdev.problem.costs import CostTable
from simdev.problem.graph import GraphBuilder
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Device, DeviceKind, Link, Topology, load_topology
from simdev.sim import simulate_many

# where a placement unit may go, and what placers read off a problem


def problem(op_ns, routed=None, groups=None):
    """Two ops, a tensor between them; a host (device 0) and two accelerators; ``op_ns`` per device."""
    builder = GraphBuilder("pair")
    first = builder.op("first", "mm", outputs=[100], group=(groups or [None, None])[0])
    builder.op("second", "mm", inputs=builder.outputs(first), group=(groups or [None, None])[1])
    kind = DeviceKind("kind", 1 << 30, {"f32": 1e12}, 1e12)
    devices = tuple(Device(name, kind, host=name == "cpu") for name in ("cpu", "a", "b"))
    topology = Topology("three", devices, (Link(("cpu", "a"), 10**9, 0), Link(("cpu", "b"), 10**9, 0)))
    pairs = np.where(np.eye(3, dtype=bool), -1, 0) if routed is None else np.array(routed)
    costs = CostTable(np.array(op_ns), np.arange(3), np.array([[7]]), pairs.astype(np.int32), np.zeros(2, np.int64))
    return Problem(builder.build(), topology, costs)


def test_accelerators_only_unless_hosts_are_asked_for():
    here = problem([[5, 5], [1, 1], [1, 1]])
    assert _units.choices(here).T.tolist() == [[False, True, True]] * 2
    assert _units.choices(here, hosts=True).all()


def test_host_serves_what_no_accelerator_supports():
    assert _units.choices(problem([[5, 5], [1, -1], [1, -1]])).T.tolist() == [[False, True, True], [True, False, False]]


def test_a_group_needs_a_device_for_all_its_ops():
    allowed = _units.choices(problem([[5, 5], [1, -1], [-1, 1]], groups=["g", "g"]))
    assert allowed.T.tolist() == [[True, False, False]]


def test_devices_without_a_route_are_not_mixed():
    apart = [[-1, 0, -1], [0, -1, -1], [-1, -1, -1]]  # only cpu and a reach each other
    assert _units.choices(problem([[5, 5], [1, 1], [1, 1]], routed=apart)).T.tolist() == [[False, True, False]] * 2


def test_no_devices_together_support_all():
    apart = [[-1, -1, -1]] * 3
    with pytest.raises(Unsupported, match="reach"):
        _units.choices(problem([[5, -1], [-1, 1], [5, -1]], routed=apart))


def test_traffic_counts_a_tensor_once_per_reading_unit():
    builder = GraphBuilder("fan")
    first = builder.op("first", "mm", outputs=[100])
    for name in ("x", "y"):
        builder.op(name, "mm", inputs=builder.outputs(first), group="readers")
    kind = DeviceKind("kind", 1 << 30, {"f32": 1e12}, 1e12)
    fan = Problem.build(builder.build(), Topology("one", (Device("d", kind),)))
    ptr, neighbour, size = _units.unit_adjacency(fan)
    assert ptr.tolist() == [0, 1, 2] and neighbour.tolist() == [1, 0] and size.tolist() == [100, 100]


def test_misplaced_units_go_where_least_is_to_do():
    here = problem([[5, 5], [3, 3], [3, 3]])
    allowed = _units.choices(here)
    assert _units.move_to_allowed(here, np.array([0, 1]), allowed).tolist() == [2, 1]


def test_shrunk_weights_stay_positive_and_small():
    weights = _units.shrunk(np.array([0, 10**12, 10**12]))
    assert weights[0] == 1 and weights.sum() <= (1 << 30) + 3 and weights[1] == weights[2]


# the coarse search: groups of ops that do the same work, and what it finds that moves of single ops do not


STEPS, MB = 20, 1 << 20


def recurrent():
    """A layer that runs ``STEPS`` steps back in time and adds up the gradients of its weight."""
    b = GraphBuilder("recurrent")
    weight = b.op("w", "parameter", persistent_bytes=3 * MB, layer="lstm")
    tensor = b.tensor(weight, 2 * MB, persistent=True)
    state = b.outputs(b.op("x", "op", outputs=[64], layer="lstm"))
    total = None
    for step in range(STEPS):
        state = b.outputs(
            b.op(f"dx{step}", "mm", inputs=[*state, tensor], outputs=[64], flops=10**9, phase="backward", layer="lstm")
        )
        part = b.op(f"dw{step}", "mm", inputs=state, outputs=[2 * MB], flops=10**9, phase="backward", layer="lstm")
        if total is not None:
            part = b.op(
                f"sum{step}", "add", inputs=[total, *b.outputs(part)], outputs=[2 * MB], phase="backward", layer="lstm"
            )
        total = b.outputs(part)[0]
    b.op("adam", "adam", inputs=[total], phase="update", layer="lstm", group="w")
    return Problem.build(b.build(), load_topology("p100x4"))


def test_gradients_of_a_weight_are_a_group_of_their_own_in_parts():
    problem = recurrent()
    around = _coarse.Groups(problem, choices(problem))
    names, unit = problem.graph.op_names, problem.graph.unit_of_op
    kind = np.array([name.rstrip("0123456789") for name in names])
    group, part = around.group[unit], around.part[unit]
    assert set(group[kind == "dw"]) == set(group[kind == "sum"]) and len(set(group[kind == "dw"])) == 1
    assert set(group[kind == "dx"]).isdisjoint(group[kind == "dw"])
    numbers = part[kind == "dx"]
    assert (np.diff(numbers) >= 0).all() and len(set(numbers)) == numbers[-1] - numbers[0] + 1 == _coarse.PARTS
    assert around.reader[unit[names.index("w")]] == unit[names.index("dx0")]


def test_groups_are_moved_whole():
    problem, rng = recurrent(), np.random.default_rng(0)
    search = _coarse.Coarse(problem, choices(problem), Budget(problem, evaluations=1), rng)
    around, devices = search.around, search._even(rng.integers(1, 5, problem.graph.n_units).astype(np.int32))
    for _ in range(300):
        for part in range(int(around.part.max()) + 1):
            assert len(set(devices[(around.part == part) & (around.reader == np.arange(len(devices)))])) <= 1
        devices = around.draw(rng, devices)


def test_hosts_take_what_they_do_not_do_too_slowly():
    if not graph_path("rnnlm").is_file():
        pytest.skip("the graph of rnnlm is not shipped")
    problem = Problem.build(load_workload("rnnlm"), load_topology("k80x4"), rules=Rules("priority"))
    search = _coarse.Coarse(problem, choices(problem), Budget(problem, evaluations=1), np.random.default_rng(0))
    host, accelerator = problem.unit_op_ns[0], problem.unit_op_ns[1]
    assert not choices(problem)[0].any() and np.array_equal(search.near[0], host <= _coarse.SLOWER * accelerator)
    assert search.near[0].mean() > 0.5 and search.near[1:].all()


def test_whole_groups_find_what_single_ops_do_not():
    """Both layers of rnnlm take equally long; a quarter of the weights' gradients must leave both devices."""
    if not graph_path("rnnlm").is_file():
        pytest.skip("the graph of rnnlm is not shipped")
    problem = Problem.build(load_workload("rnnlm"), load_topology("k80x4"), rules=Rules("priority"))
    allowed, found = choices(problem), {}
    for kind in (_coarse.Coarse, _guided.Guided):
        budget = Budget(problem, evaluations=1500)
        search = kind(problem, allowed, budget, np.random.default_rng(1))
        start = search.state(_search.starts(problem, allowed)[1])
        found[kind.__name__] = search.improve(start, budget.share(1)).score.step_ns
    assert found["Coarse"] < 0.97 * found["Guided"], found  # at 1,500 evaluations 0.962


# dominant sequence clustering on forks, joins and chains, where its answer is optimal and easy to work out


def clusters(durations, edges):
    problem = problem_of(durations, edges, 2)
    table = _list.tables(problem, forward_only=False)
    return critical_path.dominant_sequence_clusters(
        problem.graph, table, problem.costs.op_ns[0], problem.costs.transfer_ns[0]
    ).tolist()


def test_chain_is_one_cluster():
    assert clusters([1, 2, 3], {(0, 1): 1, (1, 2): 1}) == [0, 0, 0]


def test_fork_keeps_the_longer_child():
    # The first child starts at 2 at home. The second would start there at 7, elsewhere at 2 + 4 = 6.
    assert clusters([2, 5, 3], {(0, 1): 4, (0, 2): 4}) == [0, 0, 1]


def test_fork_with_slow_transfers_is_one_cluster():
    assert clusters([2, 5, 3], {(0, 1): 6, (0, 2): 6}) == [0, 0, 0]


def test_join_follows_the_later_parent():
    assert clusters([3, 10, 1], {(0, 2): 4, (1, 2): 4}) == [1, 0, 0]


def test_group_stays_in_one_cluster():
    problem = problem_of([2, 5, 3], {(0, 1): 4, (0, 2): 4}, 2, groups={1: "g", 2: "g"})
    table = _list.tables(problem, forward_only=False)
    found = critical_path.dominant_sequence_clusters(
        problem.graph, table, problem.costs.op_ns[0], problem.costs.transfer_ns[0]
    )
    assert found[1] == found[2]


def test_clusters_are_spread_over_devices():
    edges = {(2 * chain, 2 * chain + 1): 50 for chain in range(4)}
    devices = place("critical-path", problem_of([10] * 8, edges, 2)).reshape(4, 2)
    assert (devices[:, 0] == devices[:, 1]).all()
    assert np.bincount(devices[:, 0]).tolist() == [2, 2]


def test_memory_moves_clusters():
    # Ops tied by dear transfers would all go to one device; it holds two of the four.
    problem = problem_of([10] * 4, {}, 2, memory_bytes=250, persistent={op: 100 for op in range(4)})
    devices = place("critical-path", problem)
    assert simulate_many(problem, devices[None]).overflow_bytes[0] == 0


# what a learned placer computes does not depend on how many cores the machine has


SUMS = """
import hashlib, os, sys
if sys.argv[1] == "pinned":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy as np
from simdev.baselines.rl._jax import jax, jnp

draw = np.random.default_rng(0)
x, w = (draw.standard_normal(shape).astype(np.float32) for shape in ((400, 300), (300, 200)))

def loss(w):
    hidden = jnp.tanh(x @ w)
    return (jax.nn.softmax(hidden @ hidden.T).sum(axis=0) ** 2).sum() + hidden.sum() * jnp.exp(hidden).mean()

value, gradient = jax.jit(jax.value_and_grad(loss))(w)
print(hashlib.sha256(np.asarray(value).tobytes() + np.asarray(gradient).tobytes()).hexdigest())
"""


def sums(tmp_path, cores, pinned):
    environment = {**os.environ, "NPROC": str(cores), "XDG_CACHE_HOME": str(tmp_path / f"cache{cores}{pinned}")}
    environment.pop("XLA_FLAGS", None)  # optimised as for users
    command = [sys.executable, "-c", SUMS, "pinned" if pinned else ""]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=1800).stdout


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_sums_are_the_same_on_one_core_and_on_many(tmp_path):
    assert len({sums(tmp_path, 1, pinned=True), sums(tmp_path, 2, pinned=False), sums(tmp_path, 16, pinned=False)}) == 1
