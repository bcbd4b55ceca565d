"""Orders of ops: the priorities that a search gives the ops beside their devices (R2, ``priority``).

A search keeps a *key* for each op: the longest path from the op to the end under the placement (durations and transfers
between the chosen devices), plus a *bias* in ns that the search changes. The op with the larger key has the higher
priority. If devices change, the paths change with them, and the biases stay.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules


def ordered(problem: Problem) -> bool:
    """Whether a placement of ``problem`` may bring its own order of ops."""
    return problem.rules.order == "priority" and problem.rules.runtime == "dataflow"


def path_keys(problem: Problem, devices: np.ndarray) -> np.ndarray:
    """int64 ``(n,)``: ns of the longest path from the start of each op to the end, if ``devices`` int ``(n,)`` run the
    ops and every transfer between them takes the time in the cost table, without waiting."""
    graph, costs = problem.graph, problem.costs
    return _path_kernel()(
        np.ascontiguousarray(devices),
        costs.op_ns,
        costs.device_row,
        costs.transfer_ns,
        costs.pair_class,
        graph.output_ptr,
        graph.consumer_ptr,
        graph.consumers,
    )


def priority_of(keys: np.ndarray) -> np.ndarray:
    """int64 ``(n,)``: the priorities ``0 ... n - 1`` that order ops by ``keys``; of equal keys, the lower op number
    first."""
    n = len(keys)
    priority = np.empty(n, np.int64)
    priority[np.argsort(~keys, kind="stable")] = np.arange(n - 1, -1, -1)
    return priority


def priority_of_list(problem: Problem, ops: np.ndarray) -> np.ndarray:
    """The priorities of a list scheduler that takes ``ops`` int ``(k,)`` in this order; the ops that are not in the
    list (sources that cost nothing) come first."""
    keys = np.full(problem.graph.n_ops, len(ops) + 1, np.int64)
    keys[ops] = np.arange(len(ops), 0, -1)
    return priority_of(keys)


def fifo_starts(problem: Problem, devices: np.ndarray) -> np.ndarray:
    """int64 ``(n,)``: the start of each op under the order ``fifo``, ns.

    On devices of one slot, priorities that follow these starts repeat the schedule of ``fifo``: whatever ``fifo`` would
    start next is the ready op with the earliest of these starts. So no placement is slower under the best order than
    under ``fifo``.
    """
    from simdev.sim import simulate

    other = replace(problem, rules=Rules("fifo", problem.rules.contention, problem.rules.runtime))
    return simulate(other, Placement(devices)).op_start


def start_keys(problem: Problem, devices: np.ndarray, priority: np.ndarray | None = None) -> list[np.ndarray]:
    """Keys, int64 ``(n,)`` ns each, that a search may begin with: those of the schedule with the given ``priority``, if
    there is one, the longest paths, and those of the schedule under ``fifo``; ``devices`` int ``(n,)``."""
    from simdev.sim import simulate

    keys = [path_keys(problem, devices), -fifo_starts(problem, devices)]
    return keys if priority is None else [-simulate(problem, Placement(devices, priority)).op_start, *keys]


@cache
def _path_kernel():
    from simdev.baselines._search_kernels import path_keys

    return path_keys


def with_orders(problem: Problem, placement: Placement) -> list[Placement]:
    """The placement with each order of ops that a search may begin with."""
    if not ordered(problem):
        return [Placement(placement.devices)]
    keys = start_keys(problem, placement.devices, placement.priority)
    return [Placement(placement.devices, priority_of(key)) for key in keys]
