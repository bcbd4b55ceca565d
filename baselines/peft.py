"""PEFT (Arabnejad and Barbosa 2014): like HEFT, with an optimistic cost table that looks ahead."""

from __future__ import annotations

import heapq

import numpy as np

from simdev.baselines._list import fit, kernels, mean_costs, new_state, tables, unit_devices
from simdev.baselines._units import used_devices
from simdev.placers.placer import placer


@placer(
    "peft",
    version=1,
    family="list",
    source="Arabnejad, Barbosa: List Scheduling Algorithm for Heterogeneous Systems by an Optimistic Cost Table, "
    "IEEE TPDS 25(3), 2014, section 4",
)
def peft(problem, *, rng, budget):
    """Place the ready op with the largest mean optimistic cost where its finish time plus optimistic cost is least.

    An op may be inserted into an idle interval. Communication, colocation, memory and priorities are as in ``heft``.
    """
    table = tables(problem, forward_only=False)
    k = len(used_devices(table.allowed))
    _, transfer = mean_costs(problem, table.allowed)
    optimistic = kernels().optimistic_costs(table, transfer // k)
    order = ready_order(problem.graph, table, optimistic[used_devices(table.allowed)].sum(axis=0))

    def build(headroom):
        state = new_state(table, headroom)
        kernels().earliest_finish_first(table, state, order, optimistic)
        return unit_devices(problem, table, state)

    return fit(problem, budget, build, order)


def ready_order(graph, table, rank: np.ndarray) -> np.ndarray:
    """int64: the ops to place; the next is the ready op with the largest rank (the lowest op number on ties)."""
    edge_source = graph.edge_source
    counted = table.scope[graph.consumers] & ~table.lazy[edge_source]
    missing = np.bincount(graph.consumers[counted], minlength=graph.n_ops).tolist()
    ready = [(-int(rank[op]), op) for op in np.flatnonzero(table.scope).tolist() if missing[op] == 0]
    heapq.heapify(ready)
    ptr = graph.consumer_ptr[graph.output_ptr].tolist()
    consumers, scope, order = graph.consumers.tolist(), table.scope.tolist(), []
    while ready:
        op = heapq.heappop(ready)[1]
        order.append(op)
        for reader in consumers[ptr[op] : ptr[op + 1]]:
            missing[reader] -= 1
            if missing[reader] == 0 and scope[reader]:
                heapq.heappush(ready, (-int(rank[reader]), reader))
    return np.array(order, np.int64)
