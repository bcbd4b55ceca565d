"""Coarsening: a graph of fewer, larger ops with the same dependences, and the way back to a full placement.

A *clustering* is int ``(n,)``: a cluster number per op. :func:`coarse_problem` makes each cluster one op, whose costs
are sums; a placement of the coarse problem is a placement of the whole by :func:`expand`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from simdev.errors import InvalidInput
from simdev.problem.costs import CostTable
from simdev.problem.graph import ComputationGraph, GraphBuilder
from simdev.problem.problem import Problem


def fuse_chains(graph: ComputationGraph) -> np.ndarray:
    """int32 ``(n,)``: clusters that join each op to its predecessor if the two have no other successor or predecessor.

    No cluster contains ops of two colocation groups, so that fusing makes no groups share a device. The clusters of an
    acyclic graph are acyclic.
    """
    source, target, _ = _op_pairs(graph)
    alone = (np.bincount(source, minlength=graph.n_ops)[source] == 1) & (
        np.bincount(target, minlength=graph.n_ops)[target] == 1
    )
    return _merge(graph, source[alone], target[alone])


def contract(graph: ComputationGraph, weight: np.ndarray, k: int) -> np.ndarray:
    """int32 ``(n,)``: clusters, merged in pairs along edges until ``k`` are left or no further pair can merge.

    A pair spans two neighbouring levels and is refused if it could close a cycle (the idea of Herrmann et al.,
    "Multilevel algorithms for acyclic partitioning of directed acyclic graphs", SIAM J. Sci. Comput. 2019), so clusters
    stay acyclic. Pairs with the most traffic merge first. The ``weight``, float ``(n,)``, of a cluster stays under four
    times the average of ``k`` clusters. No cluster contains ops of two colocation groups, so a graph with more than
    ``k`` groups keeps more than ``k`` clusters (see :func:`cut`).
    """
    cluster, weight = fuse_chains(graph), np.asarray(weight, float)
    limit, idle, parity = 4 * weight.sum() / k, 0, 0
    while (count := int(cluster.max()) + 1) > k and idle < 2:
        pairs = _pairs_to_merge(graph, cluster, np.bincount(cluster, weight, count), limit, parity, count - k)
        label = np.arange(count)
        for before, after in pairs:
            label[after] = before
        cluster = _by_first(label[cluster])
        idle, parity = (0 if pairs else idle + 1), 1 - parity
    return cluster


def _pairs_to_merge(graph, cluster, weight, limit, parity, most) -> list[tuple[int, int]]:
    """At most ``most`` disjoint pairs of clusters, from a level of this parity to the next, that close no cycle.

    All edges inside such a band of two levels lead from the first to the second, so a cycle runs through merged pairs
    only. A new pair with no edge from an earlier one, or none to an earlier one, closes none.
    """
    count = len(weight)
    source, target, size = _op_pairs(graph, cluster)
    level = _levels(count, source, target)
    band = (level[source] % 2 == parity) & (level[target] == level[source] + 1)
    source, target, size = source[band], target[band], size[band]
    group = np.full(count, -1, np.int64)
    np.maximum.at(group, cluster, graph.op_group)
    after_of, before_of = _lists(count, source, target), _lists(count, target, source)
    paired, pairs = [False] * count, list[tuple[int, int]]()
    for edge in np.lexsort((target, source, -size)).tolist():
        before, after = int(source[edge]), int(target[edge])
        if len(pairs) == most:
            break
        if paired[before] or paired[after] or weight[before] + weight[after] > limit:
            continue
        if group[before] >= 0 and group[after] >= 0 and group[before] != group[after]:
            continue
        if any(paired[v] for v in before_of[after]) and any(paired[v] for v in after_of[before]):
            continue
        paired[before] = paired[after] = True
        pairs.append((before, after))
    return pairs


def _levels(count, source, target) -> np.ndarray:
    """Length of the longest chain to each cluster; a cluster without inputs sits just before its first reader."""
    after_of = _lists(count, source, target)
    missing = np.bincount(target, minlength=count)
    sources = missing == 0
    level, missing = [0] * count, missing.tolist()
    ready = [number for number in range(count) if missing[number] == 0]
    for number in ready:
        for reader in after_of[number]:
            level[reader] = max(level[reader], level[number] + 1)
            missing[reader] -= 1
            if missing[reader] == 0:
                ready.append(reader)
    level_of = np.array(level)
    first = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(first, source, level_of[target])
    return np.where(sources & (first < np.iinfo(np.int64).max), first - 1, level_of)


def _lists(count, source, target) -> list[list[int]]:
    """The targets of each source."""
    order = np.argsort(source, kind="stable")
    bounds = np.searchsorted(source[order], np.arange(count + 1)).tolist()
    values = target[order].tolist()
    return [values[bounds[number] : bounds[number + 1]] for number in range(count)]


def cut(graph: ComputationGraph, weight: np.ndarray, k: int) -> np.ndarray:
    """int32 ``(n,)``: at most ``k`` runs of consecutive ops of about equal ``weight`` float ``(n,)``.

    Op numbers are topological, so edges lead from lower runs to higher ones. Runs that share a colocation group are
    colocated in the coarse problem.
    """
    total = np.cumsum(np.asarray(weight, float))
    middle = total - np.asarray(weight, float) / 2
    return _by_first(np.minimum(k - 1, middle * k // max(total[-1], np.finfo(float).tiny)).astype(np.int64))


def group_units(graph: ComputationGraph, weight: np.ndarray, k: int) -> np.ndarray:
    """int32 ``(n,)``: at most ``k`` groups of whole placement units, for placers and agents that place groups.

    Units merge in rounds of matchings along the heaviest traffic (the coarsening of Karypis and Kumar, "A fast and high
    quality multilevel scheme for partitioning irregular graphs", SIAM J. Sci. Comput. 1998). The ``weight``, float
    ``(n,)``, of a group stays under twice the average of ``k`` groups as long as some pair can merge within this limit.
    Groups may depend on one another in cycles, because they are placed together and not run as one op. They are
    numbered by their first op.
    """
    if k < 1:
        raise InvalidInput(f"{k} is not a number of groups", source=graph.name, field="groups")
    group, weight = graph.unit_of_op.astype(np.int64), np.asarray(weight, float)
    limit = 2 * weight.sum() / k
    while (count := int(group.max()) + 1) > k:
        label = _matched(*_op_pairs(graph, group), np.bincount(group, weight, count), limit, count - k)
        if label is None:
            limit = 2 * limit if limit < weight.sum() else np.inf
            label = np.arange(count)
            if limit == np.inf:  # no traffic is left between any two: neighbours by number
                label = np.minimum(label, k - 1)
        group = _by_first(label[group]).astype(np.int64)
    return _by_first(group)


def _matched(source, target, size, weight, limit, most) -> np.ndarray | None:
    """The label of each group after merging at most ``most`` disjoint pairs, heaviest traffic first; None if no pair
    merges."""
    low, high = np.minimum(source, target), np.maximum(source, target)
    pairs, inverse = np.unique(low * len(weight) + high, return_inverse=True)
    size = _total(size, inverse, len(pairs))
    low, high = pairs // len(weight), pairs % len(weight)
    fits = weight[low] + weight[high] <= limit
    low, high, size = low[fits], high[fits], size[fits]
    label, taken, left = np.arange(len(weight)), [False] * len(weight), most
    for pair in np.lexsort((high, low, -size)).tolist():
        a, b = int(low[pair]), int(high[pair])
        if left == 0:
            break
        if not (taken[a] or taken[b]):
            taken[a] = taken[b] = True
            label[b], left = a, left - 1
    return None if left == most else label


def coarse_graph(graph: ComputationGraph, cluster: np.ndarray) -> ComputationGraph:
    """The quotient graph: one op per cluster, in the order of :func:`coarse_numbers`.

    FLOPs, bytes and persistent bytes are sums, the workspace is the largest one. Tensors that are read outside their
    cluster are kept, the others are dropped. Clusters that share a colocation group are colocated.

    Raises :class:`InvalidInput` if the clusters depend on one another in a cycle.
    """
    cluster = _checked(graph, cluster)
    count = int(cluster.max()) + 1
    builder = GraphBuilder(graph.name, {**graph.meta, "coarse": True})
    sums = {
        name: _total(getattr(graph, name), cluster, count)
        for name in ("op_flops", "op_bytes_read", "op_bytes_written", "op_persistent_bytes")
    }
    workspace = np.zeros(count, np.int64)
    np.maximum.at(workspace, cluster, graph.op_workspace_bytes)
    first = np.unique(cluster, return_index=True)[1]
    group = _colocated(graph, cluster, count)
    for number, op in enumerate(first.tolist()):
        builder.op(
            graph.op_names[op],
            "cluster",
            flops=int(sums["op_flops"][number]),
            bytes_read=int(sums["op_bytes_read"][number]),
            bytes_written=int(sums["op_bytes_written"][number]),
            persistent_bytes=int(sums["op_persistent_bytes"][number]),
            workspace_bytes=int(workspace[number]),
            layer=graph.layers[graph.op_layer[op]],
            phase=("forward", "backward", "update")[graph.op_phase[op]],
            group=None if group[number] < 0 else int(group[number]),
        )
    for tensor in outer_tensors(graph, cluster).tolist():
        home = int(cluster[graph.tensor_producer[tensor]])
        handle = builder.tensor(
            home,
            int(graph.tensor_bytes[tensor]),
            persistent=bool(graph.tensor_persistent[tensor]),
            result=bool(graph.tensor_result[tensor]),
        )
        readers = cluster[graph.consumers[graph.consumer_ptr[tensor] : graph.consumer_ptr[tensor + 1]]]
        for reader in np.unique(readers[readers != home]).tolist():
            builder.connect(handle, reader)
    return builder.build()


def outer_tensors(graph: ComputationGraph, cluster: np.ndarray) -> np.ndarray:
    """The tensors that a coarse graph keeps: those read in another cluster, and results."""
    outside = cluster[graph.edge_source] != cluster[graph.consumers]
    kept = graph.tensor_result.copy()
    kept[graph.edge_tensor[outside]] = True
    return np.flatnonzero(kept)


def coarse_problem(problem: Problem, cluster: np.ndarray) -> tuple[Problem, np.ndarray]:
    """The problem of placing clusters, and the clustering renumbered by its ops (for :func:`expand`).

    The duration of a cluster is the sum of its ops' durations, and a device has a kernel for it if it has kernels for
    all of them. Transfers keep their costs. The step times of the two problems differ, because a cluster waits for all
    its inputs and sends nothing before its end.
    """
    graph = problem.graph
    numbers = coarse_numbers(graph, cluster)
    count = int(numbers.max()) + 1
    coarse = coarse_graph(graph, numbers)
    op_ns = np.stack([_total(np.maximum(row, 0), numbers, count) for row in problem.costs.op_ns])
    for kind, row in enumerate(problem.costs.op_ns):
        op_ns[kind, numbers[row < 0]] = -1
    kept = outer_tensors(graph, numbers)
    kept = kept[np.argsort(numbers[graph.tensor_producer[kept]], kind="stable")]
    dispatch = _total(problem.costs.dispatch_ns, numbers, count)
    costs = CostTable(
        op_ns, problem.costs.device_row, problem.costs.transfer_ns[:, kept], problem.costs.pair_class, dispatch
    )
    return Problem(coarse, problem.topology, costs, problem.rules), numbers


def coarse_numbers(graph: ComputationGraph, cluster: np.ndarray) -> np.ndarray:
    """``cluster`` numbered topologically, int32 ``(n,)``. Raises :class:`InvalidInput` if clusters form a cycle."""
    cluster = _checked(graph, _by_first(cluster))
    count = int(cluster.max()) + 1
    source, target, _ = _op_pairs(graph, cluster)
    builder = GraphBuilder(graph.name)
    for number in range(count):
        builder.op(str(number), "cluster")
    for before, after in zip(source.tolist(), target.tolist(), strict=True):
        builder.control(before, after)
    rank = np.empty(count, np.int32)
    rank[[int(name) for name in builder.build().op_names]] = np.arange(count)
    return rank[cluster]


def expand(numbers: np.ndarray, coarse_devices: np.ndarray) -> np.ndarray:
    """The devices of all ops, given those of the clusters: int32 ``(n,)``."""
    return np.asarray(coarse_devices, np.int32)[numbers]


def _op_pairs(graph: ComputationGraph, cluster: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct pairs of clusters (ops without clustering) that depend on one another: ``(source, target, bytes)``."""
    source, target = graph.edge_source.astype(np.int64), graph.consumers.astype(np.int64)
    size = graph.tensor_bytes[graph.edge_tensor]
    count = graph.n_ops
    if cluster is not None:
        source, target, count = cluster[source].astype(np.int64), cluster[target].astype(np.int64), cluster.max() + 1
    apart = source != target
    pairs, inverse = np.unique(source[apart] * count + target[apart], return_inverse=True)
    return pairs // count, pairs % count, _total(size[apart], inverse, len(pairs))


def _merge(graph, source, target) -> np.ndarray:
    """int32 ``(n,)``: clusters from joining pairs of ops in order, without joining colocation groups."""
    sets, group = DisjointSets(graph.n_ops), graph.op_group.tolist()
    for before, after in zip(source.tolist(), target.tolist(), strict=True):
        a, b = sets.root(before), sets.root(after)
        if group[a] < 0 or group[b] < 0 or group[a] == group[b]:
            sets.parent[b] = a
            group[a] = max(group[a], group[b])
    return _by_first(sets.roots())


class DisjointSets:
    """Sets of the numbers below ``count``, at first one each. ``parent[b] = a`` joins the set of root ``b`` to that of
    root ``a``."""

    def __init__(self, count: int):
        self.parent = list(range(count))

    def root(self, number: int) -> int:
        parent = self.parent
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    def roots(self) -> np.ndarray:
        """int64 ``(count,)``: the root of each number."""
        return np.array([self.root(number) for number in range(len(self.parent))], np.int64)


def joined(numbers: Iterable[int], pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    """The smallest number of the set that each of ``numbers`` is in, if the two of each pair are in the same set. Pairs
    with a number that is not among them join nothing."""
    import networkx

    network = networkx.Graph()
    network.add_nodes_from(numbers)
    network.add_edges_from((a, b) for a, b in pairs if a in network and b in network)
    return {number: min(members) for members in networkx.connected_components(network) for number in members}


def _by_first(labels: np.ndarray) -> np.ndarray:
    """int32: labels renumbered from 0 in the order of their first use."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int32)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first), dtype=np.int32)
    return rank[inverse].astype(np.int32)


def _colocated(graph, cluster, count) -> np.ndarray:
    """The colocation group of each cluster, or -1. Clusters that share a group of the graph share a group."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    tied = graph.op_group >= 0
    groups = int(graph.op_group.max(initial=-1)) + 1
    rows, columns = cluster[tied], count + graph.op_group[tied]
    shape = (count + groups, count + groups)
    label = connected_components(coo_matrix((np.ones(len(rows), np.int8), (rows, columns)), shape), directed=False)[1]
    group = np.full(count, -1, np.int64)
    group[rows] = label[rows]
    return group


def _total(values, index, count) -> np.ndarray:
    total = np.zeros(count, np.int64)
    np.add.at(total, index, values)
    return total


def _checked(graph, cluster) -> np.ndarray:
    cluster = np.asarray(cluster)
    if cluster.shape != (graph.n_ops,) or cluster.dtype.kind not in "iu" or cluster.min(initial=0) < 0:
        raise InvalidInput("expected one cluster number per op", source=graph.name, field="cluster")
    return cluster
