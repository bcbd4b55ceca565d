from collections import Counter

import numpy as np
import pytest

from simdev import Problem, load_topology, simulate_many
from simdev.errors import UnknownName
from simdev.graphs.random_graphs import FAMILIES, GradientTape, family_graph, family_split
from simdev.placers.registry import load_workload
from simdev.problem.graph import PHASES


def _kinds(graph, phase):
    return Counter(graph.kinds[kind] for kind in graph.op_kind[graph.op_phase == PHASES.index(phase)])


def test_tape_differentiates_a_linear_layer():
    tape = GradientTape("linear")
    x = tape.input("x", 2, 3)
    weights = tape.weight("f", "weight", 3, 4), tape.weight("f", "bias", 4)
    y = tape.op("addmm", "f", [x], (2, 4), flops=48, weights=weights)
    graph = tape.build(tape.op("cross_entropy", "loss", [y], (1,)))
    assert _kinds(graph, "forward") == {"input": 1, "parameter": 2, "addmm": 1, "cross_entropy": 1}
    # The input needs no gradient: one product for the weight, one sum for the bias.
    assert _kinds(graph, "backward") == {"cross_entropy_backward": 1, "mm": 1, "sum": 1}
    assert _kinds(graph, "update") == {"sgd": 2}
    assert graph.op_persistent_bytes.sum() == 2 * 4 * (3 * 4 + 4)
    product = [op for op in range(graph.n_ops) if graph.kinds[graph.op_kind[op]] == "mm"][0]
    assert graph.op_flops[product] == 48
    assert graph.tensor_bytes[graph.output_ptr[product]] == 4 * 3 * 4


def test_tape_sums_the_gradients_of_a_value_read_twice_and_joins_those_of_views():
    tape = GradientTape("shared")
    x = tape.input("x", 2, 8)
    y = tape.op("addmm", "f", [x], (2, 8), flops=1, weights=(tape.weight("f", "weight", 8, 8),))
    left, right = tape.view(y, 2, 4), tape.view(y, 2, 4)
    z = tape.op("mul", "g", [tape.op("tanh", "g", [left], (2, 4)), tape.op("sigmoid", "g", [right], (2, 4))], (2, 4))
    z = tape.op("add", "g", [z, tape.op("tanh", "h", [z], (2, 4))], (2, 4))
    graph = tape.build(tape.op("mean", "loss", [z], (1,)))
    assert _kinds(graph, "backward") == {
        "div": 1,
        "tanh_backward": 2,
        "add": 1,
        "mul": 2,
        "sigmoid_backward": 1,
        "cat": 1,
        "mm": 1,
    }


def test_update_and_its_gradient_stay_with_the_parameter():
    graph = family_graph("inception", 1)
    for op in np.flatnonzero(graph.op_phase == PHASES.index("update")):
        tensors = graph.inputs[graph.input_ptr[op] : graph.input_ptr[op + 1]]
        assert {graph.op_group[producer] for producer in graph.tensor_producer[tensors]} == {graph.op_group[op]}


@pytest.mark.parametrize("family", FAMILIES)
def test_members_differ_repeat_and_run(family):
    graphs = [family_graph(family, seed) for seed in range(3)]
    assert len({graph.fingerprint for graph in graphs}) == 3
    assert family_graph(family, 2).fingerprint == graphs[2].fingerprint
    for graph in graphs:
        updates = graph.op_phase == PHASES.index("update")
        assert updates.sum() == (graph.op_persistent_bytes > 0).sum()
        problem = Problem.build(graph, load_topology("p100x4"))
        assert simulate_many(problem, np.ones((1, graph.n_ops), np.int32)).step_ns[0] > 1_000_000
        # Backward costs more than forward and no more than three times as much.
        flops = [graph.op_flops[graph.op_phase == phase].sum() for phase in (0, 1)]
        assert 1.5 * flops[0] < flops[1] < 3 * flops[0]


def test_a_member_is_a_workload_id():
    assert load_workload("nasnet-family[seed=5]").fingerprint == family_graph("nasnet", 5).fingerprint
    with pytest.raises(UnknownName, match="nasnet"):
        load_workload("nasnat-family[seed=5]")


def test_split_is_disjoint_complete_and_repeats():
    train, test = family_split("nmt", 32)
    assert (len(train), len(test)) == (26, 6) and sorted(train + test) == list(range(32))
    assert (train, test) == family_split("nmt", 32)
    with pytest.raises(UnknownName, match="inception"):
        family_split("inceptio")
    with pytest.raises(UnknownName, match="inception"):
        family_graph("inceptio", 0)
