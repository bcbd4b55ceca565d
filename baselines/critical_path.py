"""Critical path: dominant sequence clustering (Yang and Gerasoulis 1994), then clusters onto devices."""

from __future__ import annotations

import heapq

import numpy as np

from simdev.analysis.levels import b_level
from simdev.baselines._list import fit, follow_forward, mean_costs, tables
from simdev.baselines._units import HUGE, adjacency, unit_tensor_edges, used_devices
from simdev.placers.placer import placer


@placer(
    "critical-path",
    version=1,
    family="cluster",
    source="Yang, Gerasoulis: DSC: Scheduling Parallel Tasks on an Unbounded Number of Processors, IEEE TPDS 5(9), "
    "1994, section 4",
)
def critical_path(problem, *, rng, budget):
    """Cluster the ops along the dominant sequence for unlimited devices, then assign the clusters to devices.

    The clusters are assigned by decreasing work, each to the device with enough memory where the load is least. The
    load includes transfers to clusters that are already assigned.

    Departures: an op joins the cluster of one predecessor (the paper may pull in several predecessors that have no
    other child); ops of a colocation group follow the group's first op; the paper does not say how clusters share fewer
    devices.
    """
    table = tables(problem, forward_only=False)
    k = len(used_devices(table.allowed))
    duration, transfer = mean_costs(problem, table.allowed)
    cluster = dominant_sequence_clusters(problem.graph, table, duration // k, transfer // k)
    return fit(problem, budget, lambda headroom: _spread(problem, table, cluster, transfer // k, headroom))


def dominant_sequence_clusters(graph, table, duration: np.ndarray, transfer: np.ndarray) -> np.ndarray:
    """Cluster of each op, int64 ``(n,)``; -1 for sources, which are placed with a reader.

    Mean ``duration`` int64 ``(n,)`` and ``transfer`` int64 ``(m,)`` are in ns.
    """
    below = b_level(graph, duration, transfer).tolist()
    duration, transfer = duration.tolist(), transfer.tolist()
    input_ptr, inputs, producer = graph.input_ptr.tolist(), graph.inputs.tolist(), graph.tensor_producer.tolist()
    output_ptr, consumer_ptr = graph.output_ptr.tolist(), graph.consumer_ptr.tolist()
    consumers, unit = graph.consumers.tolist(), graph.unit_of_op.tolist()
    scope, lazy = table.scope.tolist(), table.lazy.tolist()
    n = graph.n_ops
    cluster, finish = [-1] * n, [0] * n
    top, dominant, missing = [0] * n, [-1] * n, [0] * n  # start bound so far and the predecessor that sets it
    cluster_of_unit: dict[int, int] = {}
    ends: list[int] = []  # when each cluster's last op ends
    free: list[tuple[int, int]] = []  # heaps of (minus the length of the longest path through the op, op)
    partly: list[tuple[int, int]] = []
    for op in range(n):
        if scope[op]:
            missing[op] = sum(not lazy[producer[t]] for t in inputs[input_ptr[op] : input_ptr[op + 1]])
            if missing[op] == 0:
                free.append((-below[op], op))
    heapq.heapify(free)
    while free:
        op = heapq.heappop(free)[1]
        while partly and (missing[partly[0][1]] == 0 or -partly[0][0] != top[partly[0][1]] + below[partly[0][1]]):
            heapq.heappop(partly)
        rival = partly[0][1] if partly and partly[0][0] < -(top[op] + below[op]) else -1
        arrivals = []
        for tensor in inputs[input_ptr[op] : input_ptr[op + 1]]:
            source = producer[tensor]
            if cluster[source] >= 0:
                arrivals.append((finish[source] + transfer[tensor], finish[source], cluster[source]))
        home = cluster_of_unit.get(unit[op], -1)
        if home >= 0:
            start = _start(arrivals, home, ends[home])
        else:
            start, home = top[op], -1
            for candidate in dict.fromkeys(where for _, _, where in sorted(arrivals, reverse=True)):
                joined = _start(arrivals, candidate, ends[candidate])
                if joined > start or (joined == start and home >= 0):
                    continue
                if rival >= 0 and cluster[dominant[rival]] == candidate and joined + duration[op] > top[rival]:
                    continue  # would cost the rival the gain from joining its dominant predecessor's cluster (DSRW)
                start, home = joined, candidate
            if home < 0:
                home = len(ends)
                ends.append(0)
            cluster_of_unit[unit[op]] = home
        cluster[op], finish[op] = home, start + duration[op]
        ends[home] = max(ends[home], finish[op])
        for tensor in range(output_ptr[op], output_ptr[op + 1]):
            for reader in consumers[consumer_ptr[tensor] : consumer_ptr[tensor + 1]]:
                if finish[op] + transfer[tensor] > top[reader] or dominant[reader] < 0:
                    top[reader], dominant[reader] = max(top[reader], finish[op] + transfer[tensor]), op
                missing[reader] -= 1
                entry = -(top[reader] + below[reader]), reader
                heapq.heappush(free if missing[reader] == 0 else partly, entry)
    return np.array(cluster, np.int64)


def _start(arrivals, home, end):
    """Earliest start on cluster ``home``, whose last op ends at ``end``; data from ``home`` needs no transfer."""
    return max(end, max((local if where == home else sent for sent, local, where in arrivals), default=0))


def _spread(problem, table, cluster, transfer, headroom):
    """Unit devices in which each cluster is whole on one device."""
    graph, devices = problem.graph, used_devices(table.allowed)
    unit_cluster = np.full(graph.n_units, -1, np.int64)
    unit_cluster[graph.unit_of_op[cluster >= 0]] = cluster[cluster >= 0]
    count = int(cluster.max(initial=-1)) + 1
    known = unit_cluster >= 0
    work = np.zeros((len(table.allowed), count), np.int64)
    for device in devices:
        np.add.at(work[device], unit_cluster[known], np.maximum(problem.unit_op_ns[device, known], 0))
    fits = np.zeros((count, len(table.allowed)), np.int64)
    np.add.at(fits, unit_cluster[known], (~table.allowed[:, known]).T.astype(np.int64))
    memory = _cluster_bytes(graph, table, unit_cluster, count)
    ptr, neighbour, delay = _cluster_adjacency(problem, unit_cluster, transfer, count)
    device_of, load, used = (
        np.full(count, -1),
        np.zeros(len(table.allowed), np.int64),
        np.zeros(len(headroom), np.int64),
    )
    for number in np.argsort(-work.max(axis=0), kind="stable").tolist():
        placed = device_of[neighbour[ptr[number] : ptr[number + 1]]]
        times = delay[ptr[number] : ptr[number + 1]][placed >= 0]
        apart = np.full(len(load), times.sum())
        np.subtract.at(apart, placed[placed >= 0], times)
        score = np.where(fits[number] == 0, load + work[:, number] + apart, HUGE)
        fitting = used + memory[number] <= headroom
        if fitting[devices].any():
            score = np.where(fitting | (score == HUGE), score, HUGE - 1)
        else:
            score = np.where(score < HUGE, used, HUGE)
        best = devices[int(np.argmin(score[devices]))]
        device_of[number] = best
        load[best] += work[best, number]
        used[best] += memory[number]
    unit_device = np.where(known, device_of[np.maximum(unit_cluster, 0)] if count else -1, -1)
    wrong = known & ~table.allowed[unit_device, np.arange(len(unit_device))]
    unit_device[wrong] = np.argmax(table.allowed[:, wrong], axis=0)
    return follow_forward(problem, unit_device, table.allowed)


def _cluster_bytes(graph, table, unit_cluster, count):
    """Persistent bytes of each cluster's units, and the bytes that its forward ops keep for backward ops."""
    total = np.zeros(count + 1, np.int64)
    np.add.at(total, unit_cluster, table.unit_bytes)
    forward_to_later = (graph.op_phase[graph.edge_source] == 0) & (graph.op_phase[graph.consumers] != 0)
    saved = np.unique(graph.edge_tensor[forward_to_later])
    np.add.at(total, unit_cluster[graph.unit_of_op[graph.tensor_producer[saved]]], table.home_size[saved])
    return total[:count]


def _cluster_adjacency(problem, unit_cluster, transfer, count):
    """CSR of the transfer time between clusters: ``(ptr, neighbour, ns)``."""
    tensor, source, target = unit_tensor_edges(problem)
    source, target = unit_cluster[source], unit_cluster[target]
    apart = (source >= 0) & (target >= 0) & (source != target)
    return adjacency(count, source[apart], target[apart], transfer[tensor[apart]])
