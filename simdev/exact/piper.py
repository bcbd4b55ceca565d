"""Piper's planner (Tarnawski, Narayanan, Phanishayee, NeurIPS 2021): stages with data and tensor parallelism.

A stage holds the layers between two nested ideals. It has a tensor degree ``t`` and a data degree ``d`` and runs on
``t * d`` devices; each layer runs with or without recomputed activations. The time of a stage per sample is

* the time of its layers divided by ``d``,
* plus twice the bytes of every edge that crosses its border (with what the layer must gather or scatter there) divided
  by ``d`` and by the bandwidth,
* plus ``4 (d - 1) / d`` times its parameter bytes, divided by the microbatches of a batch and by the bandwidth.

A device of the stage holds ``a * y + b`` bytes of each layer, where ``y`` is the sum of the data degrees of this stage
and all later ones, divided by ``d`` and rounded up: so many microbatches are in progress. The plan minimises the
slowest stage. The choice of recomputed layers is a knapsack, which the published program (msr-fiddle/piper) solves
greedily by seconds per byte; so does this one, so that its figures can be reproduced.

Times and bandwidth are in the units of the input: published files mix seconds and milliseconds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simdev.errors import InvalidInput, Unsupported
from simdev.exact.contract import last_first
from simdev.exact.ideals import all_ideals
from simdev.graphs.importers.reading import Fields, json_object, name_of, read_input

TOLERANCE = 1e-9


@dataclass(frozen=True)
class LayerChoice:
    """One way to run a layer at one tensor degree.

    ``seconds`` per sample, ``parameter`` bytes to exchange, ``memory_a`` bytes for each microbatch in progress and
    ``memory_b`` bytes besides. ``gathered`` and ``scattered`` are bytes by the other end of an edge: what the layer
    adds to the cost of an edge that enters or leaves the stage.
    """

    name: str
    seconds: float
    parameter: float
    memory_a: float
    memory_b: float
    gathered: dict[int, float]
    scattered: dict[int, float]


@dataclass(frozen=True)
class Layers:
    """What is to be planned: ``choices[v][t]`` for layer ``v`` at tensor degree ``t``, and edges ``(source, target,
    bytes)``."""

    name: str
    choices: tuple[dict[int, tuple[LayerChoice, ...]], ...]
    edges: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True)
class PiperStage:
    """Layers of a stage, its degrees, and the name of the choice of each layer."""

    layers: tuple[int, ...]
    data: int
    tensor: int
    chosen: tuple[str, ...]


@dataclass(frozen=True)
class PiperPlan:
    """``seconds`` of the slowest stage per sample, the stages in order, and the ``ideals`` examined."""

    seconds: float
    stages: tuple[PiperStage, ...]
    ideals: int


def read_piper(path: str | os.PathLike) -> Layers:
    """Read a JSON input of Piper. Raises :class:`InvalidInput` that names the file and the field."""
    document = json_object(read_input(path), path)
    nodes = document.rows("nodes")
    index = {node.number("id"): number for number, node in enumerate(nodes)}
    if len(index) < len(nodes):
        raise InvalidInput("an id is given twice", source=path, field="nodes")
    choices = []
    for node in nodes:
        by_degree = node.object("TMPCs")
        choices.append(
            {
                int(degree): tuple(_choice(row, index) for row in by_degree.rows(degree))
                for degree in by_degree.table
                if degree.isdigit() and len(degree) < 6
            }
        )
    edges = []
    for edge in document.rows("edges"):
        ends = edge.end("sourceId", index), edge.end("destId", index)
        edges.append((*ends, float(edge.number("communicationCost"))))
    return Layers(name_of(path), tuple(choices), tuple(edges))


def _choice(row: Fields, index: dict) -> LayerChoice:
    def by_layer(field: str) -> dict[int, float]:
        inner = row.object(field)
        return {index[int(key)]: float(inner.number(key)) for key in inner.table if int(key) in index}

    return LayerChoice(
        row.text("id", ""),
        float(row.number("timePerSample")),
        float(row.number("parameterSize")),
        float(row.number("memoryUsageA")),
        float(row.number("memoryUsageB")),
        by_layer("syncTimeFw"),
        by_layer("syncTimeBw"),
    )


def piper(
    layers: Layers,
    devices: int,
    memory: float,
    bandwidth: float,
    microbatches: int,
    *,
    limit: int = 40_000,
) -> PiperPlan:
    """The plan of least time per sample on ``devices`` devices of ``memory`` bytes.

    ``bandwidth`` is in bytes per unit of time, ``microbatches`` counts those of a batch; data degrees divide it. The
    stages of the best plan along one order of the layers bound the search; with more than ``limit`` ideals, that plan
    is the result. Raises :class:`Unsupported` if nothing fits in memory, and :class:`InvalidInput` for numbers that
    make no sense or more than two choices for a layer.
    """
    if devices < 1 or microbatches < 1 or bandwidth <= 0:
        raise InvalidInput("expected devices, microbatches and a positive bandwidth", source=layers.name)
    arrays, machine = _arrays(layers), (float(memory), float(bandwidth), float(microbatches))
    shape = devices, min(microbatches, devices)
    order = last_first(len(layers.choices), [edge[:2] for edge in layers.edges])
    chain = np.tri(len(order) + 1, len(order), -1, dtype=bool)
    inside = np.zeros_like(chain)
    inside[:, order] = chain
    try:
        plan = _solve(layers, inside, arrays, shape, machine, np.inf)
    except Unsupported:
        plan = None
    try:
        ideals = all_ideals(_predecessors(layers), limit)
    except Unsupported:
        if plan is None:
            raise
        return plan
    inside = np.zeros((ideals.count, len(order)), bool)
    for ideal in range(1, ideals.count):
        edge = ideals.ptr[ideal]
        inside[ideal] = inside[ideals.below[edge]]
        inside[ideal, ideals.removed[edge]] = True
    return _solve(layers, inside, arrays, shape, machine, np.inf if plan is None else plan.seconds * (1 + TOLERANCE))


def _predecessors(layers: Layers) -> list[frozenset[int]]:
    before: list[set[int]] = [set() for _ in layers.choices]
    for source, target, _ in layers.edges:
        before[target].add(source)
    return [frozenset(p) for p in before]


def _solve(layers: Layers, inside: np.ndarray, arrays, shape, machine, bound: float) -> PiperPlan:
    """The best plan whose stages are differences of the ideals ``inside``, bool ``(ideals, n)`` by growing size."""
    from simdev.exact._piper_kernel import fill

    (devices, most), microbatches = shape, int(machine[-1])
    data = np.array([d for d in range(1, devices + 1) if microbatches % d == 0], np.int64)
    words = -(-inside.shape[1] // 64)
    bits = np.zeros((len(inside), 64 * words), bool)
    bits[:, : inside.shape[1]] = inside
    packed = np.packbits(bits, axis=1, bitorder="little").view(np.uint64)
    table = np.full((len(inside), devices + 1, most + 1), np.inf)
    table[-1] = 0.0
    fill(packed, *arrays, data, *machine, bound, table)
    best = float(table[0].min())
    if not np.isfinite(best):
        raise Unsupported(f"{layers.name}: no plan keeps each of {devices} devices within {machine[0]:.6g} bytes")
    k, s = (int(value) for value in np.argwhere(table[0] <= best + TOLERANCE)[0])
    stages, lower = [], 0
    while lower < len(inside) - 1:
        lower, k, s, stage = _next_stage(layers, inside, (*arrays, data, *machine), table, lower, k, s)
        stages.append(stage)
    return PiperPlan(best, tuple(stages), len(inside))


def _next_stage(layers: Layers, inside, arguments, table, lower: int, k: int, s: int):
    """The stage after ideal ``lower`` in a plan of ``table[lower, k, s]``, and the state after it."""
    from simdev.exact._piper_kernel import stage_time

    degrees, data = arguments[8:10]
    above = np.flatnonzero((inside[lower] <= inside).all(axis=1))
    for upper in above[above > lower].tolist():
        held = inside[upper] & ~inside[lower]
        members = np.flatnonzero(held)
        for position, t in enumerate(degrees.tolist()):
            for d in data[(t * data <= k) & (data <= s)].tolist():
                if table[upper, k - t * d, s - d] > table[lower, k, s] + TOLERANCE:
                    continue
                time, chosen = stage_time(members, held, position, d, -(-s // d), *arguments)
                if time <= table[lower, k, s] + TOLERANCE:
                    names = zip(members.tolist(), chosen.tolist(), strict=True)
                    stage = PiperStage(
                        tuple(members.tolist()), d, t, tuple(layers.choices[v][t][one].name for v, one in names)
                    )
                    return upper, k - t * d, s - d, stage
    raise AssertionError("every value of the table has a stage")


def _arrays(layers: Layers) -> tuple:
    """The arrays of :mod:`simdev.exact._piper_kernel` up to ``degrees``."""
    n = len(layers.choices)
    degrees = sorted({t for by_degree in layers.choices for t, found in by_degree.items() if found})
    if any(len(found) > 2 for by_degree in layers.choices for found in by_degree.values()):
        raise InvalidInput("more than two choices for a layer at one degree", source=layers.name)
    touch: list[list[tuple[int, float]]] = [[] for _ in range(n)]
    for source, target, size in layers.edges:
        touch[source].append((target, size))
        touch[target].append((source, size))
    ptr = np.cumsum([0, *map(len, touch)])
    beyond = np.array([other for mine in touch for other, _ in mine], np.int64)
    count = np.zeros((len(degrees), n), np.int64)
    columns = np.zeros((4, len(degrees), 2, n))
    crossing = np.zeros((len(degrees), 2, len(beyond)))
    for position, t in enumerate(degrees):
        for v, by_degree in enumerate(layers.choices):
            found = by_degree.get(t, ())
            count[position, v] = len(found)
            for number, one in enumerate(found):
                columns[:, position, number, v] = one.seconds, one.parameter, one.memory_a, one.memory_b
                crossing[position, number, ptr[v] : ptr[v + 1]] = [
                    size + one.gathered.get(other, 0.0) + one.scattered.get(other, 0.0) for other, size in touch[v]
                ]
    return (count, *columns, ptr, beyond, crossing, np.array(degrees, np.int64))


def equal_stages(
    layers: Layers,
    devices: int,
    memory: float,
    bandwidth: float,
    microbatches: int,
    *,
    order: Sequence[int] | None = None,
) -> PiperPlan:
    """The published baseline: stages of equally many layers, one data degree for all, recomputation of all or none.

    ``order`` is a topological order of the layers (default: :func:`simdev.exact.contract.last_first`). Raises
    :class:`Unsupported` if nothing fits.
    """
    if order is None:
        order = last_first(len(layers.choices), [edge[:2] for edge in layers.edges])
    best = None
    for count in range(1, min(devices, len(order)) + 1):
        groups = _equal_groups(order, count)
        for d in range(1, min(devices, microbatches) // count + 1):
            if microbatches % d:
                continue
            for chosen in (0, 1):
                seconds = plan_seconds(layers, groups, d, 1, chosen, memory, bandwidth, microbatches)
                if seconds is not None and (best is None or seconds < best[0]):
                    best = seconds, groups, d, chosen
    if best is None:
        raise Unsupported(f"{layers.name}: no equal stages keep each device within {memory:.6g} bytes")
    seconds, groups, d, chosen = best
    stages = [
        PiperStage(tuple(group), d, 1, tuple(layers.choices[v][1][chosen].name for v in group)) for group in groups
    ]
    return PiperPlan(seconds, tuple(stages), 0)


def _equal_groups(order: Sequence[int], count: int) -> list[list[int]]:
    """The order cut into ``count`` runs; the last ones are one longer where the division leaves a remainder."""
    small, larger = divmod(len(order), count)
    groups, first = [], 0
    for number in range(count):
        length = small + (number >= count - larger)
        groups.append([int(v) for v in order[first : first + length]])
        first += length
    return groups


def plan_seconds(
    layers: Layers,
    groups: Sequence[Sequence[int]],
    data: int,
    tensor: int,
    chosen: int,
    memory: float,
    bandwidth: float,
    microbatches: int,
) -> float | None:
    """Time per sample of stages that all have the same degrees and the same choice; None if one does not fit."""
    slowest = 0.0
    for number, group in enumerate(groups):
        held, progress = set(group), len(groups) - number
        found = [layers.choices[v][tensor][min(chosen, len(layers.choices[v][tensor]) - 1)] for v in group]
        if sum(one.memory_a * progress + one.memory_b for one in found) > memory:
            return None
        crossing = sum(
            2 * (size + one.gathered.get(source, 0.0))
            for v, one in zip(group, found, strict=True)
            for source, target, size in layers.edges
            if target == v and source not in held
        ) + sum(
            2 * (size + one.scattered.get(target, 0.0))
            for v, one in zip(group, found, strict=True)
            for source, target, size in layers.edges
            if source == v and target not in held
        )
        exchange = 4 * (data - 1) * sum(one.parameter for one in found) / data / microbatches
        seconds = sum(one.seconds for one in found) / data + (crossing / data + exchange) / bandwidth
        slowest = max(slowest, seconds)
    return slowest
