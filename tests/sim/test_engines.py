"""The two engines agree bit for bit on random problems, alone and in batches, compiled and not."""

import os
import subprocess
import sys

import numpy as np
import pytest

from simdev.errors import UnknownName
from simdev.placers.testing import assert_same_schedule, random_placement, random_problem
from simdev.problem.placement import Placement
from simdev.problem.problem import CONTENTIONS, ORDERS, RUNTIMES, Rules
from simdev.sim import simulate, simulate_many

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
    code = "import test_engines as t\nfor seed in range(60): t.agree(seed)"
    env = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join([_root(), os.path.dirname(__file__)])}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, cwd=_root())


def _root():
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
