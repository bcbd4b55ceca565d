"""Durations, levels and critical paths of a graph."""

from __future__ import annotations

import numpy as np

from simdev.problem.graph import ComputationGraph
from simdev.problem.problem import Problem


def average_durations(problem: Problem) -> np.ndarray:
    """int64 ``(n,)``: duration of each op averaged over the devices that support it, rounded down."""
    durations = problem.costs.device_op_ns
    supported = durations > 0
    return np.where(supported, durations, 0).sum(axis=0) // np.maximum(supported.sum(axis=0), 1)


def fastest_durations(problem: Problem) -> np.ndarray:
    """int64 ``(n,)``: duration of each op on the device that runs it fastest."""
    durations = problem.costs.device_op_ns
    return np.where(durations > 0, durations, np.iinfo(np.int64).max).min(axis=0)


def average_transfers(problem: Problem) -> np.ndarray:
    """int64 ``(m,)``: transfer time of each tensor averaged over the ordered pairs of distinct devices that have a
    route, rounded down; 0 if no pair has a route."""
    pair_class = problem.costs.pair_class
    classes, counts = np.unique(pair_class[~np.eye(len(pair_class), dtype=bool)], return_counts=True)
    counts, classes = counts[classes >= 0], classes[classes >= 0]
    if not len(classes):
        return np.zeros(problem.graph.n_tensors, np.int64)
    return (problem.costs.transfer_ns[classes] * counts[:, None]).sum(axis=0) // counts.sum()


def b_level(graph: ComputationGraph, duration: np.ndarray, transfer: np.ndarray | None = None) -> np.ndarray:
    """int64 ``(n,)``: longest path from the start of each op to the end of the graph, its own duration included.

    ``duration`` int64 ``(n,)`` ns; ``transfer`` int64 ``(m,)`` ns charged on every edge of a tensor (default: free).
    """
    ptr, starts = graph.consumer_ptr.tolist(), graph.output_ptr.tolist()
    consumers, level = graph.consumers.tolist(), duration.tolist()
    delay = [0] * graph.n_tensors if transfer is None else transfer.tolist()
    for op in range(graph.n_ops - 1, -1, -1):
        longest = 0
        for tensor in range(starts[op], starts[op + 1]):
            for consumer in consumers[ptr[tensor] : ptr[tensor + 1]]:
                if level[consumer] + delay[tensor] > longest:
                    longest = level[consumer] + delay[tensor]
        level[op] += longest
    return np.array(level, np.int64)


def t_level(graph: ComputationGraph, duration: np.ndarray, transfer: np.ndarray | None = None) -> np.ndarray:
    """int64 ``(n,)``: longest path from the start of the graph to the start of each op (arguments as
    :func:`b_level`)."""
    ptr, inputs = graph.input_ptr.tolist(), graph.inputs.tolist()
    producer, length = graph.tensor_producer.tolist(), duration.tolist()
    delay = [0] * graph.n_tensors if transfer is None else transfer.tolist()
    level = [0] * graph.n_ops
    for op in range(graph.n_ops):
        for tensor in inputs[ptr[op] : ptr[op + 1]]:
            source = producer[tensor]
            level[op] = max(level[op], level[source] + length[source] + delay[tensor])
    return np.array(level, np.int64)


def levels(graph: ComputationGraph) -> np.ndarray:
    """int32 ``(n,)``: the number of ops before each op on the longest chain to it; 0 for ops without inputs."""
    return t_level(graph, np.ones(graph.n_ops, np.int64)).astype(np.int32)


def critical_path(graph: ComputationGraph, duration: np.ndarray, transfer: np.ndarray | None = None) -> np.ndarray:
    """int32: the ops of a longest path in order (arguments as :func:`b_level`; the lowest op numbers on ties)."""
    below = b_level(graph, duration, transfer)
    op, path = int(np.argmax(below)), []
    while op >= 0:
        path.append(op)
        rest, op_next = below[op] - duration[op], -1
        for tensor in range(graph.output_ptr[op], graph.output_ptr[op + 1]):
            delay = 0 if transfer is None else transfer[tensor]
            for consumer in graph.consumers[graph.consumer_ptr[tensor] : graph.consumer_ptr[tensor + 1]]:
                if below[consumer] + delay == rest and (op_next < 0 or consumer < op_next):
                    op_next = int(consumer)
        op = op_next
    return np.array(path, np.int32)
