"""The measurements behind README.md: ``python tests/perf/report.py PART...`` from the root of a checkout.

Each part replaces its rows in ``perf.csv``; ``sizes`` also draws ``perf.png``. Contenders take turns and a figure is
the least of its rounds, in processor time, but for the rows of threads and of starting, which are in time of the clock.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import peers

from simdev.baselines._search import starts
from simdev.baselines._units import choices
from simdev.placers.registry import load_workload
from simdev.placers.testing import training_graph
from simdev.problem.graph import ComputationGraph, GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Device, DeviceKind, Link, Topology, load_topology
from simdev.sim import Simulator, simulate, simulate_many
from simdev.sim.fast import NO_LIMIT, new_buffers
from simdev.sim.inputs import problem_arrays
from simdev.sim.kernels.fifo import run_many_fifo
from simdev.studies import perf

HERE = Path(__file__).parent
COLUMNS = ("part", "contender", "graph", *perf.COLUMNS[1:])
KIND = DeviceKind("gpu", 1 << 40, {"f32": 1e13}, 5e11)
SHIPPED = (
    "inception-v3",
    "nmt",
    "nasnet-a-large",
    "amoebanet-d",
    "transformer-xl-8",
    "wavenet-4x36",
    "gpt2-medium",
    "gnmt-8",
)
OTHER_RULES = {**perf.OTHER_RULES, "fair": Rules(contention="fair")}


def row(part, contender, graph: ComputationGraph, placement, devices, seconds) -> dict:
    return {"part": part, "graph": graph.name, **perf.row(contender, graph, placement, devices, seconds)}


def take_turns(part, problem, placement, functions, rounds=3) -> list[dict]:
    """``functions`` from name to (function, evaluations in one call)."""
    found = {}
    for turn in range(rounds + 1):  # the first compiles and warms up
        for name, (function, count) in functions.items():
            if turn == 0 and count < 0:
                continue  # too slow to be done more than once
            if turn > 1 and count < 0:
                continue
            started = time.process_time()
            function()
            seconds = (time.process_time() - started) / abs(count)
            if turn > 0:
                found[name] = min(found.get(name, seconds), seconds)
    graph, devices = problem.graph, problem.topology.n_devices
    return [row(part, name, graph, placement, devices, seconds) for name, seconds in found.items()]


def near(problem, rng, how) -> np.ndarray:
    """int32 ``(64, n)``: forward ops cut in order into runs of equal time, one a device, with parameters and gradients
    following (what a search begins with), and 5 % of the units, or all where ``random``, on any device instead."""
    graph, usable = problem.graph, np.array(problem.topology.accelerators)
    cut = starts(problem, choices(problem))[1]
    scattered = rng.choice(usable, (perf.PLACEMENTS, graph.n_units))
    possible = problem.unit_op_ns[scattered, np.arange(graph.n_units)] >= 0
    moved = possible & (rng.random(scattered.shape) < (1 if how == "random" else 0.05))
    return np.ascontiguousarray(np.where(moved, scattered, cut)[:, graph.unit_of_op], np.int32)


def engines(problem, rows: np.ndarray, yardstick) -> dict:
    """Step time alone, step time and memory, and memory of one in a hundred; the C kernel and the queue-free pass."""
    inputs = [peers.tables(problem, devices) for devices in rows]
    static_room = peers.static_room(problem)
    below = int(np.quantile(simulate_many(problem, rows).step_ns, 0.02))
    found = {
        "step time only": (lambda: simulate_many(problem, rows, below=0), len(rows)),
        "with peaks": (lambda: simulate_many(problem, rows), len(rows)),
        "peaks on demand": (lambda: simulate_many(problem, rows, below=below), len(rows)),
        "static order, no queue": (lambda: [peers.static_order(*one, *static_room) for one in inputs], len(rows)),
    }
    if yardstick is not None:
        run = yardstick.prepare(problem, rows.astype(np.uint32, order="C"))
        assert run(0) == simulate_many(problem, rows[:1]).step_ns[0]
        found["C, step time only"] = (lambda: [run(i) for i in range(len(rows))], len(rows))
    return found


def sizes(yardstick) -> list[dict]:
    """Everything side by side on four P100 behind switches, by size."""
    found = []
    for blocks in (68, 640, 3100, 6250):
        rng = np.random.default_rng(0)
        problem = Problem.build(training_graph(rng, blocks), load_topology("p100x4"))
        n = problem.graph.n_ops
        for how in ("random", "contiguous", "followed"):
            rows = near(problem, rng, how) if how == "followed" else perf.placements(rng, problem, how)
            functions = engines(problem, rows, yardstick)
            one = Placement(rows[0])
            if n < 80_000 and how == "random":
                reference = partial(simulate, problem, one, engine="reference")
                functions["reference (SimPy)"] = (reference, -1 if n > 20_000 else 1)
            if n < 20_000:
                inputs = peers.plain(peers.tables(problem, rows[0]))
                functions["heap of events, Python"] = (lambda: peers.event_heap(*inputs), -1)  # noqa: B023
                functions["heap of events, Numba"] = (lambda: peers.naive_numba(*inputs), 1)  # noqa: B023
                functions["networkx longest path"] = (perf._longest_path(problem), 1)
            for name, rules in OTHER_RULES.items():
                if n < 20_000 or name != "fair":
                    some = rows[: 2 if name == "fair" else 16]
                    other = Problem(problem.graph, problem.topology, problem.costs, rules)
                    functions[name] = (lambda other=other, some=some: simulate_many(other, some), len(some))
            found += take_turns("sizes", problem, how, functions, rounds=4 if n > 20_000 else 6)
    return found


def switched(devices: int) -> Topology:
    links = tuple(Link((f"gpu{i}", "switch"), 12 * 10**9, 5000) for i in range(devices))
    return Topology(f"switch-{devices}", tuple(Device(f"gpu{i}", KIND) for i in range(devices)), links, ("switch",))


def meshed(devices: int) -> Topology:
    names = [f"gpu{i}" for i in range(devices)]
    links = tuple(Link((a, b), 12 * 10**9, 10_000) for i, a in enumerate(names) for b in names[i + 1 :])
    return Topology(f"mesh-{devices}", tuple(Device(name, KIND) for name in names), links)


def shuffled(graph: ComputationGraph, rng) -> ComputationGraph:
    """The same graph with its ops in another, random, topological order."""
    waiting = np.diff(graph.input_ptr).tolist()
    builder, tensor_of, free = GraphBuilder(graph.name + ", shuffled"), {}, [i for i, k in enumerate(waiting) if not k]
    while free:
        at = int(rng.integers(len(free)))
        free[at], free[-1] = free[-1], free[at]
        op = free.pop()
        tensors = range(graph.output_ptr[op], graph.output_ptr[op + 1])
        inputs = [tensor_of[t] for t in graph.inputs[graph.input_ptr[op] : graph.input_ptr[op + 1]].tolist()]
        handle = builder.op(f"op{op}", "mm", inputs=inputs, flops=int(graph.op_flops[op]))
        for tensor in tensors:
            tensor_of[tensor] = builder.tensor(handle, int(graph.tensor_bytes[tensor]))
            for reader in graph.consumers[graph.consumer_ptr[tensor] : graph.consumer_ptr[tensor + 1]].tolist():
                waiting[reader] -= 1
                if waiting[reader] == 0:
                    free.append(reader)
    return builder.build()


def star(readers: int) -> ComputationGraph:
    builder = GraphBuilder(f"star-{readers}")
    hub = builder.outputs(builder.op("hub", "mm", flops=10**9, outputs=[1 << 20]))
    for i in range(readers):
        builder.op(f"reader{i}", "mm", inputs=hub, flops=10**8 + i)
    return builder.build()


def layered(rng, width: int, layers: int) -> ComputationGraph:
    builder, before = GraphBuilder(f"layered-{width}"), []
    for layer in range(layers):
        now = []
        for i in range(width):
            reads = sorted({before[k] for k in rng.integers(0, width, 2)}) if before else []
            op = builder.op(
                f"op{layer}.{i}", "mm", inputs=reads, flops=int(rng.integers(10**7, 10**9)), outputs=[1 << 18]
            )
            now += builder.outputs(op)
        before = now
    return builder.build()


def equal(graph: ComputationGraph) -> ComputationGraph:
    builder, tensor_of = GraphBuilder(graph.name + ", all equal"), {}
    for op in range(graph.n_ops):
        inputs = [tensor_of[t] for t in graph.inputs[graph.input_ptr[op] : graph.input_ptr[op + 1]].tolist()]
        handle = builder.op(f"op{op}", "mm", inputs=inputs, flops=10**8)
        for tensor in range(graph.output_ptr[op], graph.output_ptr[op + 1]):
            tensor_of[tensor] = builder.tensor(handle, 1 << 18)
    return builder.build()


def shapes(yardstick) -> list[dict]:
    """Machines, numbers of devices, numberings and worst cases; a graph of 10,000 ops where none is named."""
    rng = np.random.default_rng(1)
    train = training_graph(rng, 640)
    cases = [
        (train, meshed(4)), (train, switched(4)), (train, switched(16)), (train, switched(64)),
        (shuffled(train, rng), switched(4)), (equal(train), switched(4)), (star(20_000), switched(4)),
        (layered(rng, 10_000, 3), switched(4)), (layered(rng, 100, 100), switched(4)),
        (without_parameters(training_graph(rng, 3930)), meshed(4)),  # like the graphs for which the goals were set
    ]  # fmt: skip
    found = []
    for graph, topology in cases:
        problem = Problem.build(graph, topology)
        for how in ("random", "contiguous", "followed"):
            rows = (near(problem, rng, how) if how == "followed" else perf.placements(rng, problem, how))[:32]
            functions = engines(problem, rows, yardstick)
            for name, rules in (("no contention", Rules(contention="none")), ("priority", Rules(order="priority"))):
                other = Problem(graph, topology, problem.costs, rules)
                functions[name] = (lambda other=other, rows=rows: simulate_many(other, rows[:8]), 8)
            for one in take_turns("shapes", problem, how, functions, rounds=6):
                found.append(one | {"graph": f"{one['graph']} on {topology.name}"})
    return found


def workloads(yardstick) -> list[dict]:
    """Shipped graphs on four P100 behind switches."""
    found = []
    for name in SHIPPED:
        problem, rng = Problem.build(load_workload(name), load_topology("p100x4")), np.random.default_rng(3)
        for how in ("random", "followed"):
            rows = near(problem, rng, how)
            functions = engines(problem, rows, yardstick)
            if how == "random":
                reference = partial(simulate, problem, Placement(rows[0]), engine="reference")
                functions["reference (SimPy)"] = (reference, 1)
            for rule, rules in OTHER_RULES.items():
                other = Problem(problem.graph, problem.topology, problem.costs, rules)
                functions[rule] = (lambda other=other, rows=rows: simulate_many(other, rows[:8]), 8)
            found += take_turns("workloads", problem, how, functions, rounds=6)
    return found


def batches(yardstick) -> list[dict]:
    """Many placements of a graph of 1,000 ops and of 10,000: the bare kernel, one thread, two (time of the clock)."""
    found = []
    for blocks in (68, 640):
        rng = np.random.default_rng(0)
        problem = Problem.build(training_graph(rng, blocks), load_topology("p100x4"))
        rows = np.tile(perf.placements(rng, problem, "random"), (8, 1))
        p, here, placements, k = problem_arrays(problem), new_buffers(problem), rows.astype(np.uint32), len(rows)
        answers = np.empty(k, np.int64), np.empty((k, problem.topology.n_devices), np.int64), np.empty(k, np.int64)
        functions = {
            "bare kernel": lambda: run_many_fifo(p, placements, 0, k, NO_LIMIT, *here, *answers, False),  # noqa: B023
            "one thread": lambda: simulate_many(problem, rows),  # noqa: B023
            "two threads": lambda: simulate_many(problem, rows, threads=2),  # noqa: B023
        }
        best = dict.fromkeys(functions, float("inf"))
        for _ in range(8):
            for name, function in functions.items():
                started = time.perf_counter()
                function()
                best[name] = min(best[name], (time.perf_counter() - started) / k)
        for name, seconds in best.items():
            found.append(row("batches", name, problem.graph, "random", problem.topology.n_devices, seconds))
    return found


def without_parameters(graph: ComputationGraph) -> ComputationGraph:
    """A graph less its ops without inputs, but for the first."""
    builder, tensor_of = GraphBuilder(graph.name + ", no parameters"), {}
    gone = (np.diff(graph.input_ptr) == 0) & (graph.op_persistent_bytes > 0)
    for op in np.flatnonzero(~gone):
        read = graph.inputs[graph.input_ptr[op] : graph.input_ptr[op + 1]].tolist()
        inputs = [tensor_of[tensor] for tensor in read if tensor in tensor_of]
        handle = builder.op(f"op{op}", "mm", inputs=inputs, flops=int(graph.op_flops[op]))
        for tensor in range(graph.output_ptr[op], graph.output_ptr[op + 1]):
            tensor_of[tensor] = builder.tensor(handle, int(graph.tensor_bytes[tensor]))
    return builder.build()


def moves(yardstick) -> list[dict]:
    """Moves of a single unit, drawn at random, beside full runs (step time only) from the same placement."""
    rng, found = np.random.default_rng(2), []
    graphs = [training_graph(rng, 640), training_graph(rng, 3100)]
    graphs = [*graphs, *(without_parameters(graph) for graph in graphs)]
    graphs += [load_workload(name) for name in ("inception-v3", "gpt2-medium", "nasnet-a-large", "nmt")]
    for graph in graphs:
        problem = Problem.build(graph, load_topology("p100x4"))
        units = np.unique(graph.unit_of_op, return_index=True)[1]
        usable = np.array(problem.topology.accelerators)
        cut = starts(problem, choices(problem))[1]
        present = {
            "random": rng.choice(usable, graph.n_units),
            "cut by number": usable[units * len(usable) // graph.n_ops],
            "cut, gradients follow": cut,
            "climbed": climbed(problem, cut, rng),
        }
        for how, of_unit in present.items():
            devices = of_unit[graph.unit_of_op]
            simulator = Simulator(problem, Placement(devices))
            some, targets = rng.integers(0, graph.n_units, 300), rng.choice(usable, 300)
            possible = (problem.unit_op_ns[targets, some] >= 0) & (of_unit[some] != targets)
            some, targets = some[possible], targets[possible]
            full = np.tile(devices, (20, 1))
            functions = {
                "full run": (lambda: simulate_many(problem, full, below=0), 20),  # noqa: B023
                "move": (lambda: simulator.try_moves(some, targets), len(some)),  # noqa: B023
            }
            found += take_turns("moves", problem, how, functions)
    return found


def climbed(problem, of_unit, rng, tries=3000) -> np.ndarray:
    """A placement of units after ``tries`` moves of single units, taken where they are not worse."""
    of_unit = np.array(of_unit)
    simulator = Simulator(problem, Placement.of_units(problem, of_unit))
    usable, step = np.array(problem.topology.accelerators), simulator.step_ns
    for _ in range(tries):
        unit, device = int(rng.integers(len(of_unit))), int(rng.choice(usable))
        if of_unit[unit] == device or problem.unit_op_ns[device, unit] < 0:
            continue
        found = simulator.move(unit, device, below=step + 1)
        if found <= step:
            simulator.accept()
            of_unit[unit], step = device, found
        else:
            simulator.undo()
    return of_unit


FIRST = (
    "from simdev.bench.warm import *\nfrom simdev.sim import *\n"
    "p = tiny_problem(); q = tiny_placement(p); simulate(p, q)\n"
)
OTHERS = (
    "from simdev.problem.problem import *\ns = Simulator(p, q); s.try_moves(np.array([0]), np.array([1]))\n"
    "for rules in (Rules('priority'), Rules('program'), Rules(contention='fair'), Rules('priority', 'fair')):\n"
    "    simulate(Problem(p.graph, p.topology, p.costs, rules), q)"
)


def cold(yardstick) -> list[dict]:
    """Processor time of a new process, less that of one that imports NumPy alone; at first without compiled kernels."""
    tiny = training_graph(np.random.default_rng(0), 1)
    cases = {
        "import": "import simdev",
        "first result, cache empty": FIRST,
        "first result, cache full": FIRST,
        "all other kernels, cache empty": FIRST + OTHERS,
        "all kernels, cache full": FIRST + OTHERS,
    }
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"NUMBA_CACHE_DIR": folder}
        before = _child("import numpy", environment)
        return [row("cold", name, tiny, "", 0, _child(code, environment) - before) for name, code in cases.items()]


def _child(code: str, environment) -> float:
    started = os.times()
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    ended = os.times()
    return ended.children_user + ended.children_system - started.children_user - started.children_system


PARTS = {function.__name__: function for function in (sizes, shapes, workloads, batches, moves, cold)}


def main(parts: list[str]) -> None:
    path, yardstick = HERE / "perf.csv", peers.Yardstick.build()
    for part in parts or PARTS:
        rows = PARTS[part](yardstick)
        kept = []
        if path.exists():
            with open(path, newline="", encoding="utf-8") as file:
                kept = [old for old in csv.DictReader(file) if old.get("part") not in (part, None)]
        order = list(PARTS)
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted(kept + rows, key=lambda one: order.index(one["part"])))
        if part == "sizes":
            perf.draw(rows, HERE / "perf.png")
        for one in rows:
            print(*(one[name] for name in COLUMNS[:9]), sep=" | ", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
