"""Step times after moves equal those of full runs, bit for bit, over random walks."""

import numpy as np
import pytest
from drawn import machine, problem

from simdev.errors import InvalidInput
from simdev.placers.registry import load_workload
from simdev.placers.testing import random_placement, random_problem, training_graph
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import load_topology
from simdev.sim import Simulator, simulate


def walk(rng, simulator, moves):
    """Random moves, taken back, kept or piled up; returns how many were possible."""
    problem, made = simulator.problem, 0
    for _ in range(moves):
        unit, device = int(rng.integers(problem.graph.n_units)), int(rng.integers(problem.topology.n_devices))
        before = simulator.placement.hash
        try:
            step = simulator.move(unit, device)
        except InvalidInput:
            assert simulator.placement.hash == before
            continue
        made += 1
        full = simulate(problem, simulator.placement)
        assert step == simulator.step_ns == full.step_ns
        if rng.random() < 0.3:
            assert np.array_equal(simulator.peak_bytes, full.peak_bytes)
            assert simulator.overflow_bytes == full.overflow_bytes.sum()
        end = rng.random()
        if end < 0.3:
            simulator.accept()
        elif end < 0.8:
            simulator.undo()
            full = simulate(problem, simulator.placement)
            assert simulator.step_ns == full.step_ns
            assert np.array_equal(simulator.peak_bytes, full.peak_bytes)
    return made


def test_walks_on_random_problems():
    made = windows = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        rules = Rules(contention=str(rng.choice(["fifo", "none"]))) if seed % 3 else None
        problem = random_problem(rng, max_ops=int(rng.choice([25, 60, 200])), rules=rules)
        simulator = Simulator(problem, random_placement(rng, problem))
        made += walk(rng, simulator, 15)
        windows += int(simulator._work.tally["windows"][0]) if simulator._windows else 0
    assert made > 400 and windows > 100


def test_walks_that_need_late_channels_and_early_sends():
    """Two drawn walks whose answers depend on when a channel becomes free again, and on the later of two tensors that
    an op receives before the part that a move repeats."""
    for seed in (11, 12):
        rng = np.random.default_rng(seed)
        if seed % 4:
            rules = Rules(contention=str(rng.choice(["fifo", "none"])), order=str(rng.choice(["fifo", "fifo"])))
            problem = random_problem(rng, max_ops=int(rng.choice([10, 25, 60, 200])), rules=rules)
            placement = random_placement(rng, problem)
        else:
            machine = str(rng.choice(["p100x4", "k80x4", "p100x2-v100x2", "v100x8-dgx1", "h100x16"]))
            graph = training_graph(rng, int(rng.choice([4, 8, 16])))
            problem = Problem.build(graph, load_topology(machine))
            placement = Placement(rng.integers(1, 5, graph.n_ops))
        simulator = Simulator(problem, placement)
        for _ in range(25):
            unit, device = int(rng.integers(problem.graph.n_units)), int(rng.integers(problem.topology.n_devices))
            try:
                step = simulator.move(unit, device)
            except InvalidInput:
                continue
            assert step == simulate(problem, simulator.placement).step_ns
            end = rng.random()
            if end < 0.3:
                simulator.accept()
            elif end < 0.8:
                simulator.undo()


def test_a_reader_waits_for_a_parameter_that_moves_to_its_device():
    """A parameter (1 ns, 500 bytes) is on device 0, another op (100 ns, 1 byte) on device 2. Device 1 reads both, and
    executes nine ops of 2 ns. The parameter arrives after 1 + 10 + 500 ns, the other tensor after 100 + 10 + 1 ns. When
    the parameter moves to device 1, only the second one counts."""
    b = GraphBuilder("parameter")
    parameter = b.op("parameter", "op", outputs=[500])
    other = b.op("other", "op", outputs=[1])
    last = b.outputs(b.op("reader", "op", inputs=[*b.outputs(parameter), *b.outputs(other)], outputs=[1]))
    for number in range(8):
        last = b.outputs(b.op(f"o{number}", "op", inputs=last, outputs=[1]))
    given = problem(b, machine(3), [1, 100] + [2] * 9)
    simulator = Simulator(given, Placement(np.array([0, 2] + [1] * 9)))
    assert simulator.step_ns == 511 + 18
    assert simulator.move(0, 1) == 111 + 18 == simulate(given, simulator.placement).step_ns
    assert simulator._work.tally["full_runs"][0] == 0


@pytest.mark.parametrize("how", ["random", "contiguous"])
def test_walks_on_a_training_graph(how):
    rng = np.random.default_rng(3)
    problem = Problem.build(training_graph(rng, 40), load_topology("p100x4"))
    n = problem.graph.n_ops
    devices = rng.integers(1, 5, n) if how == "random" else 1 + np.arange(n) * 4 // n
    simulator = Simulator(problem, Placement(devices))
    assert walk(rng, simulator, 150) == 150
    assert simulator._work.tally["full_runs"][0] < 10, "moves were full runs"


def some(seed=0, rules=None):
    rng = np.random.default_rng(seed)
    problem = Problem.build(training_graph(rng, 8), load_topology("p100x4"), rules=rules)
    return rng, problem, Simulator(problem, Placement(rng.integers(1, 5, problem.graph.n_ops)))


@pytest.mark.parametrize("rules", [Rules(), Rules(order="priority"), Rules(runtime="eager")])
def test_moves_tried_one_by_one(rules):
    rng, problem, simulator = some(1, rules)
    units, devices = rng.integers(0, problem.graph.n_units, 30), rng.integers(1, 5, 30)
    before = simulator.placement.hash
    steps = simulator.try_moves(units, devices)
    assert steps.dtype == np.int64 and simulator.placement.hash == before
    for unit, device, step in zip(units, devices, steps, strict=True):
        assert simulator.move(unit, device) == step
        simulator.undo()


def test_the_answer_is_exact_below_the_limit_and_else_a_bound_not_below_it():
    rng, problem, simulator = some(2)
    limit, exact = simulator.step_ns, 0
    for _ in range(100):
        unit, device = int(rng.integers(problem.graph.n_units)), int(rng.integers(1, 5))
        answer = simulator.move(unit, device, below=limit)
        true = simulate(problem, simulator.placement).step_ns
        assert answer == true if true < limit else limit <= answer <= true
        assert simulator.step_ns == true
        exact += true < limit
        simulator.undo()
    assert 0 < exact < 100


@pytest.mark.parametrize("unit, device, message", [(-1, 1, "no unit"), (10**6, 1, "no unit"), (0, 5, "no device")])
def test_moves_that_break_the_contract(unit, device, message):
    _, _, simulator = some()
    with pytest.raises(InvalidInput, match=message):
        simulator.move(unit, device)
    with pytest.raises(InvalidInput, match=message):
        simulator.try_moves([0, unit], [1, device])
    with pytest.raises(InvalidInput, match="as many units"):
        simulator.try_moves([0, 1], [1])


@pytest.mark.parametrize("together", [1, 3])
def test_parameters_and_their_readers_move(together):
    rng = np.random.default_rng(5)
    problem = Problem.build(training_graph(rng, 40), load_topology("p100x4"))
    graph = problem.graph
    devices = 1 + np.arange(graph.n_ops) * 4 // graph.n_ops
    readers = np.unique(graph.inputs[graph.op_persistent_bytes[graph.tensor_producer[graph.inputs]] > 0])
    for tensor in readers[:200]:  # at first with the parameters beside their first readers
        producer = graph.tensor_producer[tensor]
        devices[producer] = devices[graph.consumers[graph.consumer_ptr[tensor]]]
    simulator = Simulator(problem, Placement(devices))
    parameters = np.flatnonzero(np.diff(graph.input_ptr) == 0)
    near = np.unique(graph.consumers[np.isin(graph.edge_source, parameters)])
    for turn in range(120):
        ops = rng.choice(parameters if turn % 2 else near, together, replace=False)
        targets = rng.integers(1, 5, together)
        step = simulator.move(graph.unit_of_op[ops], targets)
        assert step == simulate(problem, simulator.placement).step_ns
        simulator.accept() if turn % 5 == 0 else simulator.undo()
        simulator._work.tally["given_up"] = simulator._work.tally["pause"] = 0
    assert simulator._work.tally["full_runs"][0] < 10, "moves were full runs"


def test_units_that_stay_where_they_are_change_nothing():
    rng = np.random.default_rng(4)
    problem = Problem.build(training_graph(rng, 12), load_topology("p100x4"))
    simulator = Simulator(problem, Placement(rng.integers(1, 5, problem.graph.n_ops)))
    stay = simulator.placement.devices[np.unique(problem.graph.unit_of_op, return_index=True)[1]]
    assert set(simulator.try_moves(np.arange(problem.graph.n_units), stay)) == {simulator.step_ns}


def test_a_walk_on_a_captured_graph():
    rng = np.random.default_rng(6)
    problem = Problem.build(load_workload("inception-v3"), load_topology("k80x4"))
    usable, first = np.array(problem.topology.accelerators), np.unique(problem.graph.unit_of_op, return_index=True)[1]
    devices = usable[first * len(usable) // problem.graph.n_ops]
    simulator = Simulator(problem, Placement.of_units(problem, devices))
    assert walk(rng, simulator, 80) > 60


def test_several_units_move_at_once():
    rng, problem, simulator = some(3)
    units, devices = rng.choice(problem.graph.n_units, 6, replace=False), rng.integers(1, 5, 6)
    step = simulator.move(units, devices)
    of_unit = simulator.placement.devices[np.unique(problem.graph.unit_of_op, return_index=True)[1]]
    assert np.array_equal(of_unit[units], devices)
    assert step == simulate(problem, simulator.placement).step_ns
    simulator.undo()
    for unit, device in zip(units, devices, strict=True):
        last = simulator.move(unit, device)
    assert last == step
