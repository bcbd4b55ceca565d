"""An acyclic graph of groups, which ``giph`` and ``doppler`` read.

Groups with forward and backward ops depend on one another in cycles. Here a pair of groups is one edge, from the first
to the second in running order, and carries the tensors of both directions.
"""

from __future__ import annotations

import numpy as np

from simdev.baselines.rl._grouped import GroupedProblem


def _unit(grouped: GroupedProblem) -> float:
    """One over the mean time of a group, each op on its fastest device, in ns."""
    return grouped.n_groups / grouped.scale_ns


def group_loads(grouped: GroupedProblem) -> tuple[np.ndarray, np.ndarray]:
    """The load of each group on each device, float32 ``(G, D)`` each, padded as ``grouped``.

    The first is the time in mean group times, the second the persistent and output bytes over the device's memory.
    """
    problem, count = grouped.problem, grouped.n_groups
    graph, op_group = problem.graph, grouped.group[problem.graph.unit_of_op]
    time, need = np.zeros((2, *grouped.inputs.allowed.shape), np.float32)
    held = np.bincount(op_group, graph.op_persistent_bytes, count)
    sent = np.where(graph.tensor_persistent, 0, graph.tensor_bytes)
    made = np.bincount(op_group[graph.tensor_producer], sent, count)
    for column, device in enumerate(grouped.devices):
        durations = np.maximum(problem.costs.device_op_ns[device], 0)
        time[:count, column] = np.bincount(op_group, durations, count) * _unit(grouped)
        need[:count, column] = (held + made) / max(1, problem.topology.memory_bytes[device])
    return time, need


def group_pairs(grouped: GroupedProblem) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pairs of groups that tensors join.

    Returns ``low`` and ``high`` int64 ``(E,)``, log of the MB float ``(E,)``, and the transfer time in mean group
    times, float ``(E, D, D)``, with the device of ``low`` first. A tensor counts once for each group that reads it.
    """
    graph, costs, count = grouped.problem.graph, grouped.problem.costs, grouped.n_groups
    op_group, unit, columns = grouped.group[graph.unit_of_op], _unit(grouped), grouped.inputs.allowed.shape[1]
    key = np.unique(graph.edge_tensor.astype(np.int64) * count + op_group[graph.consumers])
    tensor, target = key // count, key % count
    source = op_group[graph.tensor_producer[tensor]].astype(np.int64)
    apart = source != target
    tensor, source, target = tensor[apart], source[apart], target[apart]
    pairs, inverse = np.unique(np.minimum(source, target) * count + np.maximum(source, target), return_inverse=True)
    size = np.log1p(np.bincount(inverse, graph.tensor_bytes[tensor], len(pairs)) / 2**20)
    transfer = np.zeros((len(pairs), columns, columns))
    onward = source < target
    for one, a in enumerate(grouped.devices):
        for two, b in enumerate(grouped.devices):
            if one != two:
                there, back = (_row(costs, costs.pair_class[pair])[tensor] for pair in ((a, b), (b, a)))
                transfer[:, one, two] = np.bincount(inverse, np.where(onward, there, back) * unit, len(pairs))
    return pairs // count, pairs % count, size, transfer


def _row(costs, number: int) -> np.ndarray:
    """Transfer times of all tensors over a pair class; 0 for a device and itself."""
    return costs.transfer_ns[number] if number >= 0 else np.zeros(costs.transfer_ns.shape[1], np.int64)


def neighbours(of: np.ndarray, other: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 ``(rows, K)`` each: the ``other`` ends of each row's pairs, and the pairs' numbers (-1: none)."""
    order = np.lexsort((other, of))
    rank = np.arange(len(of)) - np.searchsorted(of[order], of[order])
    width = int(rank.max()) + 1 if len(rank) else 1
    neighbour, pair = np.zeros((rows, width), np.int64), np.full((rows, width), -1)
    neighbour[of[order], rank], pair[of[order], rank] = other[order], order
    return neighbour, pair
