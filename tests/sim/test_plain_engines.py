"""The engines agree with each other bit for bit, and with two simulators that are written for reading alone."""

import os
import subprocess
import sys

import numpy as np
import pytest
from plain_simulator import pipeline_plainly, simulate_plainly

from simdev.errors import InvalidInput, UnknownName
from simdev.placers.testing import assert_same_schedule, random_costs, random_placement, random_problem, random_topology
from simdev.problem.costs import CostTable
from simdev.problem.graph import GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import CONTENTIONS, ORDERS, RUNTIMES, Problem, Rules
from simdev.sim import simulate, simulate_many
from simdev.sim.pipeline import ORDERS as PIPELINE_ORDERS
from simdev.sim.pipeline import simulate_pipeline

# MODEL.md is complete: a simulator written from its text alone agrees with the engines in every field


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


def without_some_copies(rng, graph, devices, of):
    """Devices and ``replicated``: some units have no copies, and are on any device of their stage."""
    copies = rng.random(graph.n_units) < 0.5
    there = np.array([rng.choice(np.flatnonzero(of == of[device])) for device in range(len(of))])
    replicated = copies[graph.unit_of_op]
    return np.where(replicated, devices, there[devices]), replicated


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
        devices, of, replicated = random_placement(rng, problem).devices, None, None
        free = np.setdiff1d(np.arange(topology.n_devices), devices)
        if rng.random() < 0.6 and len(free):
            of = np.arange(topology.n_devices)
            of[free] = rng.choice(np.unique(devices), len(free))
            if rng.random() < 0.5:
                devices, replicated = without_some_copies(rng, graph, devices, of)
        placement = Placement(devices, replica_of=of, replicated=replicated)
        placement.check(problem)
    except InvalidInput:
        return None
    return problem, placement, int(rng.integers(1, 8)), str(rng.choice(PIPELINE_ORDERS))


def compare(seeds):
    """Compare the package with the plain pipeline; return how many there were, how many of them with replicas, and how
    many of these with ops without copies."""
    made = replicas = partly = 0
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
        replicas += drawn[1].replica_of is not None
        partly += drawn[1].replicated is not None and not drawn[1].replicated.all()
    return made, replicas, partly


@pytest.mark.parametrize("block", range(4))
def test_the_text_decides_every_field_of_a_pipeline(block):
    made, replicas, partly = compare(range(100 * block, 100 * block + 100))
    assert made > 60 and replicas > 15 and partly > 5


@pytest.mark.long
@pytest.mark.parametrize("block", range(10))
def test_ten_thousand_pipelines(block):
    """1,000 in each block: as many seeds as that takes."""
    made, seed = 0, 10_000 * (block + 1)
    while made < 1000:
        made += compare([seed])[0]
        seed += 1
    assert seed < 10_000 * (block + 2)


VARIANTS = [Rules(p, c, "dataflow") for p in ORDERS for c in CONTENTIONS] + [
    Rules("fifo", c, "eager") for c in CONTENTIONS
]


def agree(seed, rules=None, max_ops=25):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, max_ops=max_ops, rules=rules)
    placement = random_placement(rng, problem)
    schedule = simulate(problem, placement)
    assert_same_schedule(schedule, simulate(problem, placement, engine="reference"))
    return problem, placement, schedule


@pytest.mark.parametrize("rules", VARIANTS, ids=lambda rules: "-".join(vars(rules).values()))
def test_engines_agree(rules):
    for seed in range(40):
        agree(seed, rules)


@pytest.mark.slow
def test_engines_agree_on_many_and_larger_graphs():
    for seed in range(1000, 2500):
        agree(seed, max_ops=60)


def test_the_random_problems_have_every_feature():
    seen = set()
    for seed in range(150):
        problem, placement, schedule = agree(seed)
        graph, topology, n_devices = problem.graph, problem.topology, problem.topology.n_devices
        features = {
            "runs out of memory": not schedule.feasible,
            "overflow has an op": (schedule.overflow_op >= 0).any(),
            "transfers": len(schedule.transfer_tensor) > 3,
            "shared route": max(map(len, topology.routes.values()), default=0) > 1,
            "zero bytes sent": (graph.tensor_bytes[schedule.transfer_tensor] == 0).any(),
            "persistent tensor sent": graph.tensor_persistent[schedule.transfer_tensor].any(),
            "result sent": graph.tensor_result[schedule.transfer_tensor].any(),
            "group of several": graph.n_units < graph.n_ops,
            "several outputs": graph.n_tensors > graph.n_ops,
            "several slots": topology.slots.max() > 1,
            "no kernel somewhere": (problem.costs.op_ns < 0).any(),
            "no route somewhere": len(topology.routes) < n_devices * (n_devices - 1),
            "all devices used": n_devices > 2 and len(np.unique(placement.devices)) == n_devices,
        }
        seen |= {name for name, found in features.items() if found}
        missing = set(features) - seen
    assert not missing


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_batch_equals_one_by_one_on_any_number_of_threads(runtime):
    rng = np.random.default_rng(5)
    problem = random_problem(rng, max_ops=60, rules=Rules(runtime=runtime))
    rows = [random_placement(rng, problem).devices for _ in range(7)]
    batch = simulate_many(problem, np.array(rows))
    for threads in (2, 3, 50):
        again = simulate_many(problem, np.array(rows), threads=threads)
        for name in ("step_ns", "peak_bytes", "overflow_bytes"):
            assert np.array_equal(getattr(batch, name), getattr(again, name))
    for row, devices in enumerate(rows):
        schedule = simulate(problem, Placement(devices))
        assert schedule.step_ns == batch.step_ns[row]
        assert np.array_equal(schedule.peak_bytes, batch.peak_bytes[row])
        assert schedule.overflow_bytes.sum() == batch.overflow_bytes[row]
    assert len(simulate_many(problem, np.empty((0, problem.graph.n_ops), int)).step_ns) == 0


def test_unknown_engine():
    rng = np.random.default_rng(0)
    problem = random_problem(rng)
    with pytest.raises(UnknownName, match="fast"):
        simulate(problem, random_placement(rng, problem), engine="fastt")


def test_importing_simdev_sim_does_not_import_numba():
    code = "import sys, simdev.sim, simdev.placers.testing; assert not {'numba', 'simpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=_root())


def test_engines_agree_without_the_compiler():
    code = "import test_plain_engines as t\nfor seed in range(60): t.agree(seed)"
    env = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join([_root(), os.path.dirname(__file__)])}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, cwd=_root())


def _root():
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
