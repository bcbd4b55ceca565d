"""The engines agree with two simulators that are written for reading alone."""

import numpy as np
import pytest
from plain_pipeline import pipeline_plainly
from plain_simulator import simulate_plainly

from simdev.errors import InvalidInput
from simdev.placers.testing import random_costs, random_placement, random_problem, random_topology
from simdev.problem.costs import CostTable
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import CONTENTIONS, Problem, Rules
from simdev.sim import simulate
from simdev.sim.pipeline import ORDERS, simulate_pipeline

# mODEL.md is complete: a simulator written from its text alone agrees with the engines in every field


@pytest.mark.parametrize("block", range(4))
def test_the_text_decides_every_field_of_a_schedule(block):
    for seed in range(50 * block, 50 * block + 50):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng)
        placement = random_placement(rng, problem)
        schedule = simulate(problem, placement)
        for name, expected in simulate_plainly(problem, placement).items():
            found = getattr(schedule, name)
            found = found.tolist() if isinstance(found, np.ndarray) else found
            assert found == expected, f"seed {seed}, {problem.rules}: {name}"


# R10 is complete: pipelines that are unrolled from its text alone agree with the package in every field


PHASES = ["forward"] * 3 + ["backward"] * 3 + ["update"]


def random_step(rng, max_ops):
    """A graph of all phases, mostly in their order, with everything that R10 names: given ops, control edges, flags."""
    b, tensors, n = GraphBuilder("step"), [], int(rng.integers(1, max_ops + 1))
    phases = [PHASES[i] for i in sorted(rng.integers(0, len(PHASES), n).tolist())]
    if rng.random() < 0.2:
        rng.shuffle(phases)
    for v, phase in enumerate(phases):
        kind = str(rng.choice(["op", "input", "parameter", "constant"], p=[0.7, 0.1, 0.15, 0.05]))
        count = 0 if kind == "parameter" else min(int(rng.integers(0, 4)), len(tensors))
        reads = [tensors[i] for i in rng.choice(len(tensors), count, replace=False)] if count else []
        held = int(rng.integers(1, 30)) if rng.random() < 0.3 else 0
        work = int(rng.integers(0, 30)) if rng.random() < 0.3 else 0
        op = b.op(f"o{v}", kind, inputs=reads, persistent_bytes=held, workspace_bytes=work, phase=phase)
        for _ in range(int(rng.choice([0, 1, 1, 2]))):
            size = 0 if rng.random() < 0.2 else int(rng.integers(1, 40))
            tensors.append(b.tensor(op, size, persistent=rng.random() < 0.1, result=rng.random() < 0.1))
    return b.build()


def random_pipeline(seed, max_ops=10):
    """``(problem, placement, microbatches, order)``; None if the drawn one is not possible."""
    rng = np.random.default_rng(seed)
    graph, topology = random_step(rng, max_ops), random_topology(rng)
    try:
        costs = random_costs(rng, graph, topology)
        if rng.random() < 0.2:
            gaps = rng.integers(0, 9, graph.n_ops)
            rows = costs.op_ns, costs.device_row, costs.transfer_ns, costs.pair_class, costs.dispatch_ns
            costs = CostTable(*rows, gaps)
        problem = Problem(graph, topology, costs, Rules(contention=str(rng.choice(CONTENTIONS))))
        devices, of = random_placement(rng, problem).devices, None
        free = np.setdiff1d(np.arange(topology.n_devices), devices)
        if rng.random() < 0.6 and len(free):
            of = np.arange(topology.n_devices)
            of[free] = rng.choice(np.unique(devices), len(free))
        placement = Placement(devices, replica_of=of)
        placement.check(problem)
    except InvalidInput:
        return None
    return problem, placement, int(rng.integers(1, 8)), str(rng.choice(ORDERS))


def compare(seeds):
    """Compare the package with the plain pipeline; return how many there were, and how many with replicas."""
    made = replicated = 0
    for seed in seeds:
        drawn = random_pipeline(seed)
        if drawn is None:
            continue
        try:
            report = simulate_pipeline(*drawn)
        except InvalidInput:
            continue  # forward work that waits for backward work, or backward work that waits for an update
        plain, where = pipeline_plainly(*drawn), f"seed {seed}, {drawn[3]}, {drawn[2]} microbatches"
        for name, expected in plain.pop("schedule").items():
            found = getattr(report.schedule, name)
            found = found.tolist() if isinstance(found, np.ndarray) else found
            assert found == expected, f"{where}: {name}"
        assert report.placement.devices.tolist() == plain.pop("devices"), where
        assert report.steady_ns == pytest.approx(float(plain.pop("steady_ns")), rel=1e-12), where
        for name, expected in plain.items():
            assert getattr(report, name) == expected, f"{where}: {name}"
        made += 1
        replicated += drawn[1].replica_of is not None
    return made, replicated


@pytest.mark.parametrize("block", range(4))
def test_the_text_decides_every_field_of_a_pipeline(block):
    made, replicated = compare(range(100 * block, 100 * block + 100))
    assert made > 60 and replicated > 15


@pytest.mark.long
@pytest.mark.parametrize("block", range(10))
def test_ten_thousand_pipelines(block):
    """1,000 in each block: as many seeds as that takes."""
    made, seed = 0, 10_000 * (block + 1)
    while made < 1000:
        made += compare([seed])[0]
        seed += 1
    assert seed < 10_000 * (block + 2)
