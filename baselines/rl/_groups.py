"""Groups of placement units that move together, which are what a learned placer places.

TensorFlow colocates gradients with their ops. The papers therefore group forward ops, and backward and update ops
follow their forward op.

All groups are numbered in running order: by the mean number of their forward ops that have inputs. Parameters do not
count, because they have the first numbers of a graph: with them, layers with parameters would stand before all layers
without.
"""

from __future__ import annotations

import numpy as np

from simdev.analysis.coarsen import DisjointSets
from simdev.baselines._list import coplace, forward_finder, tables
from simdev.baselines._search import atoms, layer_of_unit
from simdev.baselines._units import choices, fastest_ns, unit_tensor_edges
from simdev.problem.graph import ComputationGraph
from simdev.problem.problem import Problem

LARGEST_SHARE = 1 / 256  # of time or persistent bytes: the largest group that joining single readers may make
LEAST_LAYERS = 8  # a source model with fewer layers is grouped by its ops instead


def colocation_groups(problem: Problem) -> np.ndarray:
    """int32 ``(units,)``: the group of each placement unit, numbered in running order.

    A forward op joins its only reader (Mirhoseini et al. 2017, section 4.1), repeatedly, while the group takes at most
    ``LARGEST_SHARE`` of all time and persistent bytes. Backward and update ops follow their forward op; sources follow
    their first reader.
    """
    graph, table = problem.graph, tables(problem, forward_only=True)
    weight = (_weight(problem) / LARGEST_SHARE * 1e9).astype(np.int64)
    own = coplace(graph, table.scope, choices(problem), weight, 10**9)
    label = np.full(graph.n_units, -1, np.int64)
    inside = graph.unit_of_op[table.scope]
    label[inside] = own[inside]
    return _in_order(graph, _followed(graph, label, own))


def forward_groups(problem: Problem) -> np.ndarray:
    """int32 ``(units,)``: one group for each forward op, numbered in running order.

    The group holds the parameters that the op is the first to read, and the backward and update ops that follow it.
    These groups are finer than those of :func:`colocation_groups`.
    """
    graph, table, together = problem.graph, tables(problem, forward_only=True), atoms(problem)
    inside = graph.unit_of_op[table.scope]
    label = np.full(graph.n_units, -1, np.int64)
    known = np.zeros(graph.n_units, bool)
    known[together[inside]] = True
    label[known[together]] = together[known[together]]
    return _in_order(graph, _followed(graph, label, together))


def coarse_groups(problem: Problem, most: int, *, layers: bool = True) -> np.ndarray:
    """int32 ``(units,)``: :func:`colocation_groups` merged to at most ``most``, numbered in running order.

    The papers wrote rules by hand for each model (an LSTM layer, an Inception branch); this is one rule for all graphs.
    If ``layers`` is true and the graph names at least ``LEAST_LAYERS`` layers, the layers of the source model are
    merged instead. They are much better groups for unrolled recurrent networks, whose steps share weights. Groups merge
    along the edges that carry most bytes for their weight, below a weight limit that grows until few enough groups are
    left.
    """
    named = sum(bool(name) for name in problem.graph.layers)
    group = _layers(problem) if layers and named >= LEAST_LAYERS else colocation_groups(problem)
    return _merged(problem, group, most)


def layer_groups(problem: Problem, most: int) -> np.ndarray:
    """int32 ``(units,)``: :func:`coarse_groups`, but no group holds ops of two layers unless there are more than
    ``most`` layers.

    A graph that names few layers is grouped by ops that share traffic within each layer. Groups across layers cannot
    express the placement that practitioners choose for such a graph, each layer on a device of its own.
    """
    names = problem.graph.layers
    if sum(bool(name) for name in names) >= LEAST_LAYERS or not any(names):
        return coarse_groups(problem, most)
    layer = layer_of_unit(problem)
    inside = _layers(problem)
    fine = colocation_groups(problem).astype(np.int64) * (int(inside.max()) + 1) + inside
    parts = np.unique(fine, return_inverse=True)[1]
    return _merged(problem, parts, most, layer)


def fine_groups(problem: Problem, most: int) -> np.ndarray:
    """int32 ``(units,)``: :func:`forward_groups` merged to at most ``most``, without regard to layers."""
    return _merged(problem, forward_groups(problem), most)


def chain_groups(problem: Problem, most: int) -> np.ndarray:
    """int32 ``(units,)``: :func:`forward_groups` joined along chains, numbered in running order.

    A group joins its only successor if that has no other predecessor (Duan et al. 2024). If more than ``most`` chains
    result, the groups are those of :func:`coarse_groups`.
    """
    graph, group = problem.graph, forward_groups(problem)
    op_group, forward = group[graph.unit_of_op].astype(np.int64), graph.op_phase == 0
    count = int(group.max()) + 1
    source, target = op_group[graph.edge_source], op_group[graph.consumers]
    joins = (source != target) & forward[graph.edge_source] & forward[graph.consumers]
    pairs = np.unique(source[joins] * count + target[joins])
    source, target = pairs // count, pairs % count
    alone = (np.bincount(source, minlength=count)[source] == 1) & (np.bincount(target, minlength=count)[target] == 1)
    allowed = _all_allowed(choices(problem), group)
    head = np.arange(count)
    for a, b in zip(source[alone].tolist(), target[alone].tolist(), strict=True):  # in topological order
        if (allowed[:, head[a]] == allowed[:, b]).all():
            head[b] = head[a]
    chain = np.unique(head[group], return_inverse=True)[1]
    return _in_order(graph, chain) if chain.max() < most else coarse_groups(problem, most)


def _merged(problem: Problem, group: np.ndarray, most: int, layer: np.ndarray | None = None) -> np.ndarray:
    """``group`` merged to at most ``most`` groups, numbered in running order: see :func:`coarse_groups`.

    Groups of one ``layer`` int ``(units,)`` merge first.
    """
    count = int(group.max()) + 1
    weight = np.bincount(group, _weight(problem), count)
    allowed = _all_allowed(choices(problem), group)
    tensor, source, target = unit_tensor_edges(problem)
    size = problem.graph.tensor_bytes[tensor] + 1.0
    limit = 0.25 / most
    inside = np.ones(len(source), bool) if layer is None else layer[source] == layer[target]
    while count > most:
        merged = _merge(
            group[source[inside]], group[target[inside]], size[inside], weight, allowed, limit, count - most
        )
        if limit > 4.0 and not inside.all() and merged.max() + 1 == count:
            inside[:], limit = True, 0.25 / most
            continue
        if limit > 4.0 and merged.max() + 1 == count:  # no edge joins these groups: merge neighbours in order
            merged = np.arange(count) * most // count
        group, count = merged[group], int(merged.max()) + 1
        weight = np.bincount(merged, weight, count)
        allowed, limit = _all_allowed(allowed, merged), limit * 1.5
    return _in_order(problem.graph, group)


def _weight(problem: Problem) -> np.ndarray:
    """float ``(units,)``: the larger of each unit's shares of all time and of all persistent bytes."""
    time, held = fastest_ns(problem).astype(float), problem.unit_persistent_bytes.astype(float)
    return np.maximum(time / max(1.0, time.sum()), held / max(1.0, held.sum()))


def _all_allowed(allowed: np.ndarray, group: np.ndarray) -> np.ndarray:
    """bool ``(D, groups)``: the devices where all members of each group may go."""
    refused = np.zeros((len(allowed), int(group.max()) + 1), np.int64)
    np.add.at(refused.T, group, ~allowed.T)
    return refused == 0


def _layers(problem: Problem) -> np.ndarray:
    """int64 ``(units,)``: the layer of the source model of each unit, backward and update ops included.

    Units of a layer that may not go to the same devices stay apart; a unit without a layer is alone.
    """
    kind = np.unique(choices(problem), axis=1, return_inverse=True)[1].ravel()
    return np.unique(layer_of_unit(problem) * (int(kind.max()) + 1) + kind, return_inverse=True)[1]


def _merge(source, target, size, weight, allowed, limit, excess) -> np.ndarray:
    """int64 ``(count,)``: join groups along edges in order of bytes per weight, at most ``excess`` times."""
    count = len(weight)
    low, high = np.minimum(source, target).astype(np.int64), np.maximum(source, target).astype(np.int64)
    apart = low != high
    pairs, inverse = np.unique(low[apart] * count + high[apart], return_inverse=True)
    low, high = pairs // count, pairs % count
    rating = np.bincount(inverse, size[apart], len(pairs)) / (weight[low] + weight[high] + 1e-12)
    order = np.lexsort((pairs, -rating))
    sets, weight, allowed = DisjointSets(count), weight.tolist(), allowed.copy()
    free = bool(allowed.all() or (allowed == allowed[:, :1]).all())

    for a, b in zip(low[order].tolist(), high[order].tolist(), strict=True):
        a, b = sets.root(a), sets.root(b)
        if a == b or weight[a] + weight[b] > limit:
            continue
        if not free:
            common = allowed[:, a] & allowed[:, b]
            if not common.any():
                continue
            allowed[:, a] = common
        sets.parent[b] = a
        weight[a] += weight[b]
        excess -= 1
        if not excess:
            break
    return np.unique(sets.roots(), return_inverse=True)[1]


def _followed(graph: ComputationGraph, label: np.ndarray, own: np.ndarray) -> np.ndarray:
    """``label`` in which every unit has a group: a unit at -1 joins the group of the op that it follows.

    That is its forward op, else the producer of most bytes that it reads, else its reader; a unit without any is alone
    (``own``).
    """
    forward_of = forward_finder(graph)
    unit, size = graph.unit_of_op, graph.tensor_bytes
    for op in np.flatnonzero((label[unit] < 0) & (np.diff(graph.input_ptr) > 0)).tolist():
        if label[unit[op]] >= 0:
            continue
        forward = forward_of(op)
        if forward >= 0 and label[unit[forward]] >= 0:
            label[unit[op]] = label[unit[forward]]
            continue
        tensors = graph.inputs[graph.input_ptr[op] : graph.input_ptr[op + 1]]
        makers = label[unit[graph.tensor_producer[tensors]]]
        if (makers >= 0).any():
            label[unit[op]] = makers[np.argmax(np.where(makers >= 0, size[tensors], -1))]
    for op in np.flatnonzero(label[unit] < 0).tolist():
        first, last = graph.consumer_ptr[graph.output_ptr[op]], graph.consumer_ptr[graph.output_ptr[op + 1]]
        readers = label[unit[graph.consumers[first:last]]]
        readers = readers[readers >= 0]
        if label[unit[op]] < 0:
            label[unit[op]] = readers[0] if len(readers) else own[unit[op]]
    return label


def _in_order(graph: ComputationGraph, label: np.ndarray) -> np.ndarray:
    """``label`` int ``(units,)`` renumbered in running order, as int32 without gaps.

    A group without a forward op that has inputs is placed by the mean number of all its ops.
    """
    _, label = np.unique(label, return_inverse=True)
    count = int(label.max()) + 1
    group = label[graph.unit_of_op]
    weight = np.where((graph.op_phase == 0) & (np.diff(graph.input_ptr) > 0), 1.0, 1e-9)
    middle = np.bincount(group, weight * np.arange(graph.n_ops), count) / np.bincount(group, weight, count)
    rank = np.empty(count, np.int32)
    rank[np.argsort(middle, kind="stable")] = np.arange(count, dtype=np.int32)
    return rank[label]
