"""Measures the speed of the simulator and of its alternatives in one run (``simdev study perf``).

The contenders take turns in rounds, and each figure is the minimum over the rounds, because other processes may run on
the same computer. Times are processor times, except with several threads, where they are wall times. All contenders
except the reference engine cycle through many placements: with a single one, the branch predictor would learn it.
"""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from simdev.bench.provenance import machine, versions
from simdev.files import guarded
from simdev.placers.testing import training_graph
from simdev.problem.graph import ComputationGraph
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import load_topology
from simdev.sim import Simulator, simulate, simulate_many

OPS_PER_BLOCK = 16  # in training_graph
PLACEMENTS, MOVES, ROUNDS = 64, 200, 3
MAX_REFERENCE_OPS = 20_000  # with more ops, one round takes seconds
COLUMNS = ("contender", "placement", "ops", "edges", "devices", "us", "ns_per_op", "machine", "versions")
OTHER_RULES = {
    "no contention": Rules(contention="none"),
    "priority": Rules(order="priority"),
    "program": Rules(order="program"),
    "eager": Rules(runtime="eager"),
}


def measure(ops: list[int], topology: str = "p100x4", *, rounds: int = ROUNDS, seed: int = 0) -> list[dict]:
    """Time every contender on training graphs of about ``ops`` ops each.

    Returns one row for each contender, kind of placement and size, with microseconds per evaluation and ns per op.
    Raises :class:`UnknownName` for an unknown topology.
    """
    machine_with_links, rows = load_topology(topology), []
    for size in ops:
        rng = np.random.default_rng(seed)
        graph = training_graph(rng, max(1, size // OPS_PER_BLOCK))
        problem = Problem.build(graph, machine_with_links)
        for how in ("random", "contiguous"):
            devices = placements(rng, problem, how)
            for contender, seconds in _least(contenders(problem, devices, rng), rounds).items():
                rows.append(row(contender, graph, how, machine_with_links.n_devices, seconds))
    return rows


def row(contender: str, graph: ComputationGraph, placement: str, devices: int, seconds: float) -> dict:
    """A row of the table: what one evaluation takes."""
    return {
        "contender": contender,
        "placement": placement,
        "ops": graph.n_ops,
        "edges": graph.n_edges,
        "devices": devices,
        "us": round(seconds * 1e6, 3),
        "ns_per_op": round(seconds / graph.n_ops * 1e9, 3),
        "machine": machine(),
        "versions": versions(),
    }


def placements(rng: np.random.Generator, problem: Problem, how: str) -> np.ndarray:
    """Draw placements on all devices except the host, int32 ``(PLACEMENTS, n)``.

    ``how`` is ``random`` (each op on a random device) or ``contiguous`` (runs of ops of random lengths, and 5 % of the
    ops on random devices).
    """
    n, usable = problem.graph.n_ops, np.setdiff1d(np.arange(problem.topology.n_devices), [problem.topology.host])
    scattered = rng.choice(usable, (PLACEMENTS, n))
    if how == "random":
        return scattered.astype(np.int32)
    cuts = np.sort(rng.integers(0, n, (PLACEMENTS, len(usable) - 1)), axis=1)
    runs = usable[np.array([np.searchsorted(row, np.arange(n), side="right") for row in cuts])]
    return np.where(rng.random(runs.shape) < 0.05, scattered, runs).astype(np.int32)


def _batch(problem: Problem, devices: np.ndarray) -> Callable[[], float]:
    return lambda: _processor(lambda: simulate_many(problem, devices)) / len(devices)


def contenders(problem: Problem, devices: np.ndarray, rng: np.random.Generator) -> dict[str, Callable[[], float]]:
    """Functions that evaluate placements and return the seconds that one evaluation takes."""
    found = {
        "fast": _batch(problem, devices),
        "fast, step time only": lambda: _processor(lambda: simulate_many(problem, devices, below=0)) / len(devices),
        "moves": _moves(problem, devices[0], rng),
        "networkx longest path": _longest_path(problem),
    }
    for name, rules in OTHER_RULES.items():
        if rules.runtime == "dataflow" or problem.topology.host >= 0:
            other = Problem(problem.graph, problem.topology, problem.costs, rules)
            found[f"fast, {name}"] = _batch(other, devices)
    if (os.cpu_count() or 1) > 1:
        found["fast, 2 threads"] = lambda: _clock(lambda: simulate_many(problem, devices, threads=2)) / len(devices)
    if problem.graph.n_ops <= MAX_REFERENCE_OPS:
        placement = Placement(devices[0])
        found["reference"] = lambda: _processor(lambda: simulate(problem, placement, engine="reference"))
    return found


def _moves(problem: Problem, devices: np.ndarray, rng: np.random.Generator) -> Callable[[], float]:
    """A function that tries moves of single placement units from one placement."""
    simulator = Simulator(problem, Placement(devices))
    units = rng.integers(0, problem.graph.n_units, 4 * MOVES)
    targets = rng.integers(0, problem.topology.n_devices, 4 * MOVES)
    first = devices[np.unique(problem.graph.unit_of_op, return_index=True)[1]]
    possible = np.flatnonzero((problem.unit_op_ns[targets, units] >= 0) & (first[units] != targets))[:MOVES]
    units, targets = units[possible], targets[possible]
    return lambda: _processor(lambda: simulator.try_moves(units, targets)) / max(1, len(units))


def _longest_path(problem: Problem) -> Callable[[], float]:
    """A function that computes only the longest path, with networkx and without devices."""
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(range(problem.graph.n_ops))
    duration = problem.costs.op_ns[0]
    pairs = zip(problem.graph.edge_source.tolist(), problem.graph.consumers.tolist(), strict=True)
    graph.add_weighted_edges_from((source, target, int(duration[source])) for source, target in pairs)
    return lambda: _processor(lambda: nx.dag_longest_path_length(graph))


def _least(functions: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    for function in functions.values():
        function()
    turns = [{name: function() for name, function in functions.items()} for _ in range(rounds)]
    return {name: min(turn[name] for turn in turns) for name in functions}


def _processor(function: Callable[[], object]) -> float:
    started = time.process_time()
    function()
    return time.process_time() - started


def _clock(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def write(rows: list[dict], folder: Path) -> None:
    """Write ``perf.csv`` and ``perf.png``, a plot of the time per evaluation against the size of the graph."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "perf.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({column: guarded(cell) for column, cell in row.items()} for row in rows)
    draw(rows, folder / "perf.png")


def draw(rows: list[dict], path: Path) -> None:
    """Draw one panel for each kind of placement, with one line for each contender."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(row["placement"] for row in rows))
    figure, axes = plt.subplots(1, len(kinds), figsize=(6 * len(kinds), 5), sharey=True, squeeze=False)
    for axis, kind in zip(axes[0], kinds, strict=True):
        for number, contender in enumerate(dict.fromkeys(row["contender"] for row in rows)):
            chosen = [row for row in rows if (row["contender"], row["placement"]) == (contender, kind)]
            style = {"color": f"C{number % 10}", "linestyle": ["-", "--"][number // 10 % 2], "marker": "o"}
            axis.loglog([row["ops"] for row in chosen], [row["us"] for row in chosen], label=contender, **style)
        axis.set(title=f"{kind} placements", xlabel="ops")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("microseconds of one evaluation")
    axes[0][-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(rows[0]["machine"], fontsize="small")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
