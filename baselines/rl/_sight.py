"""What the graph networks of ``placeto`` and ``gdp`` read of a problem: features that mean the same in every graph and
on every machine, and tables of neighbours."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from simdev.analysis.levels import average_transfers, fastest_durations
from simdev.baselines.rl._case import NUMBERS, Case, Inputs
from simdev.problem.costs import OP_CLASSES, op_class
from simdev.problem.problem import Problem

CLASSES = (*OP_CLASSES, "elementwise")
NODE_FEATURES = NUMBERS + len(CLASSES) + 3
SUMMARY_FEATURES = 7


class Sight(NamedTuple):
    """A pytree of arrays of ``G`` groups (padded), ``D`` devices (padded) and ``K`` neighbours.

    ``nodes`` float32 ``(G, NODE_FEATURES)``: the first ``NUMBERS`` columns of ``_case.node_features``, shares of time
    of the op classes of :mod:`simdev.problem.costs`, the group's middle in the running sum of time, and the sine and
    cosine of that middle.
    ``real`` bool ``(G,)``, ``allowed`` bool ``(G, D)`` and ``devices`` float32 ``(D, 4)`` as in ``_case.Inputs``.
    ``shares`` float32 ``(G, D)``: how near that middle is to the middle of the device's even share of the time, 0 to 1:
    where a pipeline of equal stages would place the group.
    ``parents`` and ``children`` int32 ``(G, K)``: the neighbours with the longest transfers, and for each bool and
    float32 ``(G, K)``: whether there is one, log of the transfer time over the mean time of a group.
    ``summary`` float32 ``(SUMMARY_FEATURES,)``: devices / 8, transfer time of all tensors between groups over the time
    of all ops and its log, persistent bytes and all bytes over the memory of all devices, all bytes over that of the
    smallest, log of the number of groups.
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


def with_sight(case: Case, neighbours: int) -> Case:
    """``case`` with a :class:`Sight` of ``neighbours`` parents and children in place of its inputs."""
    inputs, group = case.inputs, case.group
    problem, count = case.problem, case.n_groups
    op_group = group[problem.graph.unit_of_op]
    time = np.bincount(op_group, fastest_durations(problem).astype(float), count)
    middle = (np.cumsum(time) - time / 2) / max(1.0, time.sum())
    rows = len(inputs.real)
    nodes = np.zeros((rows, NODE_FEATURES), np.float32)
    nodes[:, :NUMBERS] = inputs.nodes[:, :NUMBERS]
    nodes[:count, NUMBERS:-3] = _class_shares(problem, op_group, time)
    nodes[:count, -3:] = np.stack([middle, np.sin(2 * np.pi * middle), np.cos(2 * np.pi * middle)], axis=1)
    shares = np.zeros(inputs.allowed.shape, np.float32)
    stages = len(case.devices)
    shares[:count, :stages] = np.exp(-2.0 * (middle[:, None] * stages - np.arange(stages) - 0.5) ** 2)
    parents = _neighbours(inputs.target, inputs.source, inputs, count, neighbours)
    children = _neighbours(inputs.source, inputs.target, inputs, count, neighbours)
    sight = Sight(
        nodes, inputs.real, inputs.allowed, inputs.devices, shares, *parents, *children, _summary(case, op_group)
    )
    return dataclasses.replace(case, inputs=sight)


def _class_shares(problem: Problem, op_group: np.ndarray, time: np.ndarray) -> np.ndarray:
    classes = np.array([CLASSES.index(op_class(kind)) for kind in problem.graph.kinds])[problem.graph.op_kind]
    cells = np.bincount(
        op_group * len(CLASSES) + classes, fastest_durations(problem).astype(float), len(time) * len(CLASSES)
    )
    return cells.reshape(len(time), len(CLASSES)) / np.maximum(time, 1)[:, None]


def _neighbours(of: np.ndarray, other: np.ndarray, inputs: Inputs, count: int, most: int):
    """``(number, real, cost)``, each ``(G, most)``: for each group the ``other`` ends of its edges, dearest first."""
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


def _summary(case: Case, op_group: np.ndarray) -> np.ndarray:
    problem, count = case.problem, case.n_groups
    graph = problem.graph
    target = op_group[graph.consumers].astype(np.int64)
    key = np.unique(graph.edge_tensor.astype(np.int64) * count + target)
    tensor, target = key // count, key % count
    apart = op_group[graph.tensor_producer[tensor]] != target
    ratio = float(average_transfers(problem)[tensor[apart]].sum()) / case.scale_ns
    held = float(graph.op_persistent_bytes.sum())
    both = held + float(graph.tensor_bytes[~graph.tensor_persistent].sum())
    memory = problem.topology.memory_bytes[case.devices].astype(float)
    numbers = [
        len(case.devices) / 8,
        min(ratio, 5.0),
        np.log(ratio + 1e-3),
        held / memory.sum(),
        both / memory.sum(),
        both / memory.min(),
        np.log(count) / 5,
    ]
    return np.minimum(numbers, 5.0).astype(np.float32)
