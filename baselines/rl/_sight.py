"""Features and neighbour tables that the graph networks of ``placeto`` and ``gdp`` read.

The features mean the same in every graph and on every topology.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simdev.analysis.levels import average_transfers, fastest_durations
from simdev.baselines.rl._grouped import NUMBERS, GroupedArrays, GroupedProblem
from simdev.problem.costs import OP_CLASSES, op_class
from simdev.problem.problem import Problem

CLASSES = (*OP_CLASSES, "elementwise")
NODE_FEATURES = NUMBERS + len(CLASSES) + 3
SUMMARY_FEATURES = 7


class Sight(NamedTuple):
    """What the graph networks read, as a pytree of arrays; ``G`` groups and ``D`` devices (padded), ``K`` neighbours.

    ``nodes`` float32 ``(G, NODE_FEATURES)``: the first ``NUMBERS`` columns of ``_grouped.node_features``, shares of
    time of the op classes of :mod:`simdev.problem.costs`, the group's middle in the running sum of time, and the sine
    and cosine of that middle. ``real`` bool ``(G,)``, ``allowed`` bool ``(G, D)`` and ``devices`` float32 ``(D, 4)``
    are those of ``_grouped.Inputs``. ``shares`` float32 ``(G, D)``: how near that middle is to the middle of the
    device's even share of the time, 0 to 1; a pipeline of equal stages would place the group where this is largest.
    ``parents`` and ``children`` int32 ``(G, K)``: the neighbours with the longest transfers, each with a bool and a
    float32 array ``(G, K)``: whether the neighbour exists, and log of the transfer time over the mean time of a group.
    ``summary`` float32 ``(SUMMARY_FEATURES,)``: devices / 8, transfer time of all tensors between groups over the time
    of all ops and its log, persistent bytes and all bytes over the memory of all devices, all bytes over the memory of
    the smallest device, log of the number of groups.
    """

    nodes: np.ndarray
    real: np.ndarray
    allowed: np.ndarray
    devices: np.ndarray
    shares: np.ndarray
    parents: np.ndarray
    parent_real: np.ndarray
    parent_cost: np.ndarray
    children: np.ndarray
    child_real: np.ndarray
    child_cost: np.ndarray
    summary: np.ndarray


def with_sight(grouped: GroupedProblem[GroupedArrays], neighbours: int) -> GroupedProblem[Sight]:
    """``grouped`` with a :class:`Sight` of ``neighbours`` parents and children in place of its inputs."""
    inputs, group = grouped.inputs, grouped.group
    problem, count = grouped.problem, grouped.n_groups
    op_group = group[problem.graph.unit_of_op]
    time = np.bincount(op_group, fastest_durations(problem).astype(float), count)
    middle = (np.cumsum(time) - time / 2) / max(1.0, time.sum())
    rows = len(inputs.real)
    nodes = np.zeros((rows, NODE_FEATURES), np.float32)
    nodes[:, :NUMBERS] = inputs.nodes[:, :NUMBERS]
    nodes[:count, NUMBERS:-3] = _class_shares(problem, op_group, time)
    nodes[:count, -3:] = np.stack([middle, np.sin(2 * np.pi * middle), np.cos(2 * np.pi * middle)], axis=1)
    shares = np.zeros(inputs.allowed.shape, np.float32)
    stages = len(grouped.devices)
    shares[:count, :stages] = np.exp(-2.0 * (middle[:, None] * stages - np.arange(stages) - 0.5) ** 2)
    parents = _neighbours(inputs.target, inputs.source, inputs, count, neighbours)
    children = _neighbours(inputs.source, inputs.target, inputs, count, neighbours)
    return grouped.with_inputs(
        Sight(
            nodes=nodes,
            real=inputs.real,
            allowed=inputs.allowed,
            devices=inputs.devices,
            shares=shares,
            parents=parents[0],
            parent_real=parents[1],
            parent_cost=parents[2],
            children=children[0],
            child_real=children[1],
            child_cost=children[2],
            summary=_summary(grouped, op_group),
        )
    )


def _class_shares(problem: Problem, op_group: np.ndarray, time: np.ndarray) -> np.ndarray:
    classes = np.array([CLASSES.index(op_class(kind)) for kind in problem.graph.kinds])[problem.graph.op_kind]
    cells = np.bincount(
        op_group * len(CLASSES) + classes, fastest_durations(problem).astype(float), len(time) * len(CLASSES)
    )
    return cells.reshape(len(time), len(CLASSES)) / np.maximum(time, 1)[:, None]


def _neighbours(of: np.ndarray, other: np.ndarray, inputs: GroupedArrays, count: int, most: int):
    """``(number, real, cost)``, each ``(G, most)``: the ``other`` ends of each group's edges, largest cost first."""
    rows = len(inputs.real)
    of, other, cost = of[inputs.edge_real], other[inputs.edge_real], inputs.edge[inputs.edge_real, 1]
    order = np.lexsort((other, -cost, of))
    of, other, cost = of[order], other[order], cost[order]
    rank = np.arange(len(of)) - np.searchsorted(of, of)
    kept = rank < most
    number, real = np.zeros((rows, most), np.int32), np.zeros((rows, most), bool)
    weight = np.zeros((rows, most), np.float32)
    number[of[kept], rank[kept]] = other[kept]
    real[of[kept], rank[kept]] = True
    weight[of[kept], rank[kept]] = np.log1p(cost[kept] * count)
    return number, real, weight


def _summary(grouped: GroupedProblem, op_group: np.ndarray) -> np.ndarray:
    problem, count = grouped.problem, grouped.n_groups
    graph = problem.graph
    target = op_group[graph.consumers].astype(np.int64)
    key = np.unique(graph.edge_tensor.astype(np.int64) * count + target)
    tensor, target = key // count, key % count
    apart = op_group[graph.tensor_producer[tensor]] != target
    ratio = float(average_transfers(problem)[tensor[apart]].sum()) / grouped.scale_ns
    held = float(graph.op_persistent_bytes.sum())
    both = held + float(graph.tensor_bytes[~graph.tensor_persistent].sum())
    memory = problem.topology.memory_bytes[grouped.devices].astype(float)
    numbers = [
        len(grouped.devices) / 8,
        min(ratio, 5.0),
        np.log(ratio + 1e-3),
        held / memory.sum(),
        both / memory.sum(),
        both / memory.min(),
        np.log(count) / 5,
    ]
    return np.minimum(numbers, 5.0).astype(np.float32)
