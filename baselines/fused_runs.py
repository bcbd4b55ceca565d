"""Runs of a topological order, fused by dynamic programming and placed by earliest start."""

from __future__ import annotations

import heapq

import numpy as np

from simdev.analysis.levels import b_level
from simdev.baselines._list import fit, kernels, mean_costs, new_state, tables, unit_devices
from simdev.baselines._units import capacities, used_devices
from simdev.errors import InvalidInput
from simdev.placers.placer import placer


@placer(
    "fused-runs",
    version=1,
    family="list",
    defaults={"most": 200},
    source="cuts: Kernighan: Optimal Sequential Partitions of Graphs, JACM 18(1), 1971; placement: earliest start",
)
def fused_runs(problem, *, rng, budget, most):
    """Fuse neighbours of one topological order at the least cost of communication, then place each fused op where it
    starts earliest.

    The order goes depth first and takes the op with the longest way to the end first. Of all cuts of it into runs of at
    most ``most`` ops and a quarter of the smallest memory, the dynamic program takes the one with the least transfer
    time between runs; ``most=1`` fuses nothing. In that order, each run goes to the device with enough memory that has
    its inputs first and is idle.

    Fusing an order before it is placed is the idea of Celeritas (Xu, Liao, Xie and Zhou, arXiv:2208.00184, 2022). This
    placer is not Celeritas: of the paper, only the abstract and the introduction were read. ``most`` was set to 200
    after 1 to 200 had been tried on nasnet-a-mobile and transformer-xl-4 (p100x2, k80x2), which the standard board
    lacks; on these four cases, 1 was slightly better. Ops of a colocation group follow the first of them, out of their
    run if need be.
    """
    if most < 1:
        raise InvalidInput(f"{most} is below 1", source="placer fused-runs", field="most")
    table = tables(problem, forward_only=False)
    k = len(used_devices(table.allowed))
    duration, transfer = mean_costs(problem, table.allowed)
    order = depth_first(problem.graph, table, b_level(problem.graph, duration, transfer))
    limit = int(capacities(problem)[used_devices(table.allowed)].min()) // 4
    runs = cheapest_runs(problem.graph, table, order, transfer // k, most, limit)

    def build(headroom):
        state = new_state(table, headroom)
        kernels().runs_earliest_start_first(table, state, order, runs)
        return unit_devices(problem, table, state)

    return fit(problem, budget, build, order)


def depth_first(graph, table, below: np.ndarray) -> np.ndarray:
    """int64 ``(k,)``: the ops to place in a topological order in which the ready op is next that became ready last; of
    those that became ready together, the one with the largest ``below`` int64 ``(n,)``, then the lowest number."""
    output_ptr, consumer_ptr, consumers = (
        graph.output_ptr.tolist(),
        graph.consumer_ptr.tolist(),
        graph.consumers.tolist(),
    )
    input_ptr, inputs, producer = graph.input_ptr.tolist(), graph.inputs.tolist(), graph.tensor_producer.tolist()
    lazy, level, order = table.lazy.tolist(), below.tolist(), list[int]()
    missing = [sum(not lazy[producer[t]] for t in inputs[a:b]) for a, b in zip(input_ptr, input_ptr[1:], strict=False)]
    ready = [(0, -level[op], op) for op in np.flatnonzero(table.scope).tolist() if missing[op] == 0]
    heapq.heapify(ready)
    while ready:
        op = heapq.heappop(ready)[2]
        order.append(op)
        for reader in consumers[consumer_ptr[output_ptr[op]] : consumer_ptr[output_ptr[op + 1]]]:
            missing[reader] -= 1
            if missing[reader] == 0:
                heapq.heappush(ready, (-len(order), -level[reader], reader))
    return np.array(order, np.int64)


def cheapest_runs(graph, table, order: np.ndarray, transfer: np.ndarray, most: int, limit: int) -> np.ndarray:
    """int64 ``(runs + 1,)``: where each run of ``order`` begins, and ``len(order)``.

    The sum of ``transfer`` int64 ``(m,)`` over edges between runs is least, if a run has at most ``most`` ops and,
    unless it is a single op, at most ``limit`` bytes of outputs and of memory that its ops keep.
    """
    place = np.full(graph.n_ops, -1, np.int64)
    place[order] = np.arange(len(order))
    source, target = place[graph.edge_source], place[graph.consumers]
    known = source >= 0
    source, target, cost = source[known], target[known], transfer[graph.edge_tensor[known]]
    by_target = np.argsort(target, kind="stable")
    ptr = np.searchsorted(target[by_target], np.arange(len(order) + 1))
    held = graph.op_persistent_bytes.copy()
    np.add.at(held, graph.tensor_producer, table.home_size)
    return kernels().cheapest_runs(ptr, source[by_target], cost[by_target], held[order], most, limit)
