"""The latency model: calls by hand, the optimum by enumeration, the published figures."""

import itertools
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from test_dp import load_problem

from simdev.exact.latency import (
    best_latency,
    critical_path,
    greedy_split,
    linear_split,
    path_bound,
    split_latency,
)
from simdev.exact.load import processor_loads, read_load_problem

DATA = Path(os.environ.get("SIMDEV_DATA", Path(__file__).parents[3] / "shared" / "data")) / "dnn-partitioning"
published = pytest.mark.skipif(not DATA.is_dir(), reason="SIMDEV_DATA names no folder with dnn-partitioning")


def test_a_call_waits_for_all_its_inputs_and_gives_all_its_results_at_the_end():
    # a -> b, c; b -> d; c -> d. Accelerator 0 holds b and c; a and d are on the CPU.
    problem = load_problem(
        [1, 2, 3, 4], [(0, 1), (0, 2), (1, 3), (2, 3)], cost=[5, 6, 7, 0], k=2, cpus=1, cpu_times=[10, 20, 30, 40]
    )
    assert split_latency(problem, np.array([2, 0, 0, 2])) == 10 + (5 + 2 + 3 + 6 + 7) + 40
    assert split_latency(problem, np.array([2, 0, 1, 2])) == 10 + max(5 + 2 + 6, 5 + 3 + 7) + 40
    assert split_latency(problem, np.array([0, 0, 0, 0])) == 10
    assert split_latency(problem, np.full(4, 2)) == 10 + 30 + 40
    assert split_latency(problem, np.array([0, 2, 2, 0])) == np.inf  # the call would wait for its own result
    assert critical_path(problem) == 1 + 3 + 4


def test_what_an_accelerator_holds_cuts_a_path():
    # Four nodes of 10 and 2 bytes in a row, tensors of 3: accelerators of 4 bytes take two each, with one border.
    problem = load_problem([10] * 4, [(0, 1), (1, 2), (2, 3)], cost=[3] * 4, k=2, memory=4.0, size=[2] * 4)
    assert critical_path(problem) == 40 and path_bound(problem) == 46
    assert split_latency(problem, np.array([0, 0, 1, 1])) == 46


@pytest.mark.parametrize("cpus", [0, 1])
def test_path_bound_is_never_above_the_optimum(cpus):
    rng, above, met = np.random.default_rng(cpus), 0, 0
    while met < 150:
        n = int(rng.integers(2, 6))
        edges = [(a, b) for a in range(n) for b in range(a + 1, n) if rng.random() < 0.5]
        times = rng.integers(1, 9, n)
        problem = load_problem(
            times,
            edges,
            cost=rng.integers(0, 6, n),
            k=3,
            cpus=cpus,
            memory=float(rng.integers(3, 8)),
            size=rng.integers(0, 5, n),
            cpu_times=times * int(rng.integers(1, 8)),
        )
        splits = (np.array(processor) for processor in itertools.product(range(problem.n_processors), repeat=n))
        best = min(
            (split_latency(problem, m) for m in splits if not processor_loads(problem, m).overfull), default=np.inf
        )
        assert path_bound(problem) <= best + 1e-9
        met += np.isfinite(best)
        above += path_bound(problem) > critical_path(problem)
    assert above > 20


def test_equals_enumeration():
    rng = np.random.default_rng(7)
    for _ in range(25):
        n = int(rng.integers(1, 6))
        edges = [(a, b) for a in range(n) for b in range(a + 1, n) if rng.random() < 0.4]
        times = rng.integers(1, 9, n)
        problem = load_problem(
            times,
            edges,
            cost=rng.integers(0, 4, n),
            k=int(rng.integers(1, 3)),
            cpus=1,
            memory=float(rng.integers(3, 9)),
            size=rng.integers(0, 5, n),
            cpu_times=times * int(rng.integers(1, 5)),
        )
        best = np.inf
        for processor in itertools.product(range(problem.n_processors), repeat=n):
            if not processor_loads(problem, np.array(processor)).overfull:
                best = min(best, split_latency(problem, np.array(processor)))
        linear = linear_split(problem)
        assert linear is not None and split_latency(problem, linear) >= best
        assert not processor_loads(problem, linear).overfull
        found = best_latency(problem, seconds=10)
        assert found.status == "optimal" and found.latency == pytest.approx(best) and found.bound <= best + 1e-9
        assert critical_path(problem) <= path_bound(problem) <= best + 1e-9
        assert split_latency(problem, found.processor) == found.latency
        assert not processor_loads(problem, found.processor).overfull


@pytest.mark.slow
def test_ctrl_c_returns_the_best_so_far():
    rng, n = np.random.default_rng(1), 90
    edges = [(a, b) for a in range(n) for b in range(a + 1, min(n, a + 6)) if rng.random() < 0.5]
    problem = load_problem(
        rng.integers(5, 99, n) + 0.37, edges, cost=rng.integers(1, 40, n), k=5, cpus=1, memory=25.0, size=[1] * n
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    timer = threading.Timer(8.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    try:
        found = best_latency(problem, seconds=300)
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)
    assert 7 < time.monotonic() - began < 200  # of 300
    assert found.status == "feasible" and found.bound < found.latency == split_latency(problem, found.processor)


@published
@pytest.mark.parametrize(
    "name, on_cpu, path",
    [
        ("LayerGraphs/bert24_inference", 924.060, 92.406),
        ("LayerGraphs/inceptionv3_inference", 1952.770, 195.277),
        ("LayerGraphs/resnet50_inference", 1874.550, 187.455),
        ("OperatorGraphs/bert_l-3_inference", 1099.934, 47.823),
        ("OperatorGraphs/bert_l-6_inference", 1724.791, 74.991),
        ("OperatorGraphs/resnet50_inference", 6666.672, 289.855),
    ],
)
def test_published_figures(name, on_cpu, path):
    problem = read_load_problem(DATA / "latency-inputs" / f"{name}.json")
    assert split_latency(problem, np.full(problem.n_nodes, problem.accelerators)) == pytest.approx(on_cpu, rel=1e-4)
    assert critical_path(problem) == pytest.approx(path, rel=1e-4)


@published
def test_the_greedy_split_of_bert24_is_optimal():
    problem = read_load_problem(DATA / "latency-inputs" / "LayerGraphs" / "bert24_inference.json")
    assert split_latency(problem, greedy_split(problem)) == pytest.approx(100.219, rel=1e-4)
    found = best_latency(problem, seconds=60)
    assert found.latency == pytest.approx(100.2185, rel=1e-5) and found.status == "optimal" and found.gap < 1e-3


@published
@pytest.mark.parametrize(
    "name, latency",
    [
        ("LayerGraphs/bert24", 100.2185),
        ("LayerGraphs/inceptionv3", 2485.24),
        ("LayerGraphs/resnet50", 4197.06),
        ("OperatorGraphs/bert_l-3", 416.204),
        ("OperatorGraphs/bert_l-6", 494.135),
        ("OperatorGraphs/resnet50", 839.536),
    ],
)
def test_the_published_greedy(name, latency):
    problem = read_load_problem(DATA / "latency-inputs" / f"{name}_inference.json")
    assert split_latency(problem, greedy_split(problem)) == pytest.approx(latency, rel=2e-6)


@published
@pytest.mark.slow
def test_bert3_operators_to_the_proof():
    problem = read_load_problem(DATA / "latency-inputs" / "OperatorGraphs" / "bert_l-3_inference.json")
    found = best_latency(problem, seconds=120)
    assert found.latency == pytest.approx(408.4759, rel=1e-4) and found.status == "optimal"
    assert not processor_loads(problem, found.processor).overfull


def test_two_calls_of_an_accelerator():
    # a -> b -> c, tensors of 2; only the CPU can run b. One call holds a or c, two calls hold both.
    problem = load_problem([1, np.inf, 3], [(0, 1), (1, 2)], cost=[2, 2, 0], k=1, cpus=1, cpu_times=[10, 20, 30])
    assert best_latency(problem, seconds=5).latency == 10 + 20 + 2 + 3
    found = best_latency(problem, seconds=5, calls=2)
    assert found.latency == 1 + 2 + 20 + 2 + 3 and found.processor.tolist() == [0, 2, 1]
    assert split_latency(problem, np.array([0, 2, 0]), 2) == np.inf
    # The second call waits for the first one, also without a tensor between them.
    apart = load_problem([4, 5], [], cost=[0, 0], k=1, cpus=1, cpu_times=[50, 50])
    assert split_latency(apart, np.array([0, 1]), 2) == 9


def test_calls_are_as_good_as_the_best_of_all_splits():
    for seed in range(8):
        rng = np.random.default_rng(seed)
        n = 5
        problem = load_problem(
            rng.integers(1, 9, n).tolist(),
            [(a, b) for a in range(n) for b in range(a + 1, n) if rng.random() < 0.4],
            cost=rng.integers(0, 4, n).tolist(),
            k=2,
            cpus=1,
            cpu_times=rng.integers(5, 30, n).tolist(),
            size=[2] * n,
            memory=5,
        )
        best = np.inf
        for split in itertools.product(range(5), repeat=n):
            held = np.bincount(np.array(split) // 2, problem.size, 3)
            if held[:2].max() <= problem.memory:
                best = min(best, split_latency(problem, np.array(split), 2))
        found = best_latency(problem, seconds=10, calls=2)
        assert found.latency == pytest.approx(best) and found.bound <= best * (1 + 1e-9)
