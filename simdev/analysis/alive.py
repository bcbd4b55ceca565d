"""Bytes that must be in memory at the same time under every schedule: what a device needs if it runs given ops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simdev.problem.problem import Problem

PIVOTS = 8


@dataclass(frozen=True, eq=False)
class Moment:
    """The start of one op, the *pivot*.

    An edge of ``source`` and ``target`` int ``(e,)``, which are units, carries tensor ``tensor`` from an op before the
    pivot, in every schedule, to the pivot or an op after it. If both units are on one device, the tensor is there when
    the pivot starts. The units ``holder`` int ``(h,)`` hold ``held`` int64 ``(k, h)`` bytes then, wherever they are:
    results of earlier ops and, for the unit of the pivot, its workspace and outputs. Sizes are
    those on ``k`` types of devices.
    """

    source: np.ndarray
    target: np.ndarray
    tensor: np.ndarray
    holder: np.ndarray
    held: np.ndarray


class Alive:
    """Moments at which much must be in memory (R7). ``granularity`` int64 ``(k,)``: of each type of device.

    If everything fits on the smallest device, there are no moments.
    """

    def __init__(self, problem: Problem, granularity: np.ndarray):
        graph = problem.graph
        grain = granularity[:, None]
        self.size = np.where(graph.tensor_persistent, 0, -(-graph.tensor_bytes // grain) * grain)
        workspace = -(-graph.op_workspace_bytes // grain) * grain
        persistent = -(-graph.op_persistent_bytes // grain) * grain
        everything = (self.size.sum(axis=1) + workspace.sum(axis=1) + persistent.sum(axis=1)).max()
        few = everything <= problem.topology.memory_bytes.min()
        pivots = [] if few or not graph.n_ops else _pivots(problem, self.size[0])
        self.moments = [_moment(problem, pivot, self.size, workspace) for pivot in pivots]

    def bytes_of(self, moment: Moment, label: np.ndarray, count: int) -> np.ndarray:
        """int64 ``(k, count)``: bytes that a device holds at ``moment`` if it runs all units of a set, for each of
        ``count`` sets; ``label`` int ``(units,)`` is the set of each unit. Persistent bytes are not included."""
        together = label[moment.source] == label[moment.target]
        tensor, first = np.unique(moment.tensor[together], return_index=True)
        owner = label[moment.source[together][first]]
        total = np.zeros((len(self.size), count), np.int64)
        for row in range(len(total)):
            np.add.at(total[row], owner, self.size[row, tensor])
            np.add.at(total[row], label[moment.holder], moment.held[row])
        return total


def _pivots(problem: Problem, size: np.ndarray) -> list[int]:
    """The ops at whose start most bytes are alive if ops run in the order of their numbers: one in each stretch of the
    graph."""
    graph = problem.graph
    n = graph.n_ops
    last = graph.tensor_producer.astype(np.int64).copy()
    np.maximum.at(last, graph.edge_tensor, graph.consumers)
    last[graph.tensor_result] = n - 1
    change = np.zeros(n + 1, np.int64)
    np.add.at(change, graph.tensor_producer, size)
    np.subtract.at(change, last + 1, size)
    alive = np.cumsum(change[:n]) + graph.op_workspace_bytes
    stretches = np.array_split(np.arange(n), min(n, PIVOTS))
    return [int(part[np.argmax(alive[part])]) for part in stretches]


def _moment(problem: Problem, pivot: int, size: np.ndarray, workspace: np.ndarray) -> Moment:
    graph, unit = problem.graph, problem.graph.unit_of_op.astype(np.int64)
    source, target, tensor = graph.edge_source, graph.consumers, graph.edge_tensor
    before, after = _reached(graph.n_ops, target, source, pivot), _reached(graph.n_ops, source, target, pivot)
    before[pivot] = False
    through = before[source] & after[target]
    results = np.flatnonzero(graph.tensor_result & before[graph.tensor_producer])
    counted = np.isin(results, tensor[through])  # an edge counts them already, if its ends share a device
    results = results[~counted]
    own = np.arange(graph.output_ptr[pivot], graph.output_ptr[pivot + 1])
    at_pivot = workspace[:, pivot] + size[:, own].sum(axis=1)
    return Moment(
        unit[source[through]],
        unit[target[through]],
        tensor[through].astype(np.int64),
        np.append(unit[graph.tensor_producer[results]], unit[pivot]),
        np.concatenate([size[:, results], at_pivot[:, None]], axis=1),
    )


def _reached(n: int, source: np.ndarray, target: np.ndarray, start: int) -> np.ndarray:
    """bool ``(n,)``: the ops that paths along the edges lead to from ``start``, which is one of them."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import breadth_first_order

    arcs = coo_array((np.ones(len(source), np.int8), (source, target)), (n, n)).tocsr()
    reached = np.zeros(n, bool)
    reached[breadth_first_order(arcs, start, return_predecessors=False)] = True
    return reached
