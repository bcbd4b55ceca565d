"""Draws placements of many shapes, on which a simulator is compared with measurements."""

from __future__ import annotations

import numpy as np

from simdev.problem.problem import Problem


def sample(problem: Problem, count: int, rng: np.random.Generator) -> list[tuple[str, np.ndarray]]:
    """Up to ``count`` different placements, each with the name of its shape and the device per op int32 ``(n,)``.

    The shapes are: all ops on one device; cuts of the topological order (an eighth of ``count``); alternating layers;
    branches on different devices; runs of layers on random devices (from three runs to one run per layer); and single
    placement units at random. Colocation groups stay together, and every op is on a device that supports it. Memory is
    not checked.
    """
    devices = problem.topology.n_devices
    layers = _layers(problem)
    found: list[tuple[str, np.ndarray]] = []
    seen: set[bytes] = set()

    def add(name: str, units: np.ndarray) -> None:
        placed = _settle(problem, units.astype(np.int32))
        if len(found) < count and placed.tobytes() not in seen:
            seen.add(placed.tobytes())
            found.append((name, placed))

    n = problem.graph.n_units
    for device in range(devices):
        add(f"all on {device}", np.full(n, device))
    work = _unit_work(problem)
    share = np.cumsum(work) / max(work.sum(), 1)
    cuts = max(1, count // 8)
    for number in range(1, cuts + 1):
        point = number / (cuts + 1)
        add(f"cut at {point:.2f}", np.minimum((share > point) + (share > (1 + point) / 2) * (devices > 2), devices - 1))
    add("layers alternating", layers % devices)
    for width in (2, 3, 5):
        add(f"layers alternating by {width}", layers // width % devices)
    add("branches apart", _branches(problem, devices))
    most = int(layers.max()) + 1
    for attempt in range(20 * count):
        if len(found) >= count:
            break
        if attempt % 6 == 5:
            lot = rng.integers(0, devices, n)
            keep = rng.random(n) < rng.choice([0.1, 0.3, 1.0])
            add("units at random", np.where(keep, lot, 0))
            continue
        runs = int(min(most, rng.choice([3, 4, 6, 10, 20, most])))
        borders = np.sort(rng.choice(np.arange(1, most), runs - 1, replace=False)) if runs > 1 else np.zeros(0, int)
        lot = rng.integers(0, devices, runs)
        add(f"{runs} runs of layers", lot[np.searchsorted(borders, layers, side="right")])
    return found


def perturb(problem: Problem, devices: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """``devices``, with a random ``share`` of the layers (at least one) moved to a random device each."""
    layers = _layers(problem)
    most = int(layers.max()) + 1
    units = np.zeros(problem.graph.n_units, np.int64)
    units[problem.graph.unit_of_op] = devices
    lot = rng.integers(0, problem.topology.n_devices, most)
    chosen = np.zeros(most, bool)
    chosen[rng.choice(most, max(1, round(share * most)), replace=False)] = True
    return _settle(problem, np.where(chosen[layers], lot[layers], units).astype(np.int32))


def _layers(problem: Problem) -> np.ndarray:
    """The layer of each placement unit, numbered by first appearance; the backward ops of a layer belong to it."""
    graph = problem.graph
    first = np.full(graph.n_units, -1)
    for op in range(graph.n_ops - 1, -1, -1):
        first[graph.unit_of_op[op]] = graph.op_layer[op]
    _, number = np.unique(first, return_inverse=True)
    order: dict[int, int] = {}
    return np.array([order.setdefault(int(layer), len(order)) for layer in number])


def _unit_work(problem: Problem) -> np.ndarray:
    return np.maximum(problem.unit_op_ns, 0).mean(axis=0)


def _branches(problem: Problem, devices: int) -> np.ndarray:
    """Spread branches over the devices: the layers that read one result go to the devices in turn.

    A layer that is the only reader of its source goes to the device of its source.
    """
    graph = problem.graph
    layers = _layers(problem)[graph.unit_of_op]
    where: dict[int, int] = {}
    turn: dict[int, int] = {}
    forward = graph.op_phase == 0
    for op in range(graph.n_ops):
        layer = int(layers[op])
        if not forward[op] or layer in where:
            continue
        inputs = graph.inputs[graph.input_ptr[op] : graph.input_ptr[op + 1]]
        makers = [int(graph.tensor_producer[tensor]) for tensor in inputs if not graph.tensor_persistent[tensor]]
        makers = [maker for maker in makers if layers[maker] != layer]
        if makers:
            source = max(makers)
            where[layer] = (where.get(int(layers[source]), 0) + turn.get(source, 0)) % devices
            turn[source] = turn.get(source, 0) + 1
    found = np.zeros(graph.n_units, np.int64)
    found[graph.unit_of_op] = [where.get(int(layer), 0) for layer in layers]
    return found


def _settle(problem: Problem, units: np.ndarray) -> np.ndarray:
    """Device per op. A unit whose device does not support it goes to the first device that does."""
    bad = problem.unit_op_ns[units, np.arange(len(units))] < 0
    able = np.argmax(problem.unit_op_ns >= 0, axis=0)
    return np.where(bad, able, units).astype(np.int32)[problem.graph.unit_of_op]
