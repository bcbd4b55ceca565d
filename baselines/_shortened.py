"""A recurrent network with fewer time steps, whose units move in sets: a cheap model of where to place the whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from simdev.baselines._search import PARTS, longest_op, units_by_group, weight_gradient_bytes
from simdev.baselines._units import unit_adjacency
from simdev.problem.costs import CostTable
from simdev.problem.graph import PHASES, ComputationGraph, GraphBuilder
from simdev.problem.problem import Problem

SHARE = 0.25  # of the time steps that stay
MANY = 16  # units of one group and signature from which on a part of them stays; fewer stay whole, in less time
NEIGHBOURS = 8  # a unit of more neighbours joins no time steps: all of them read it, or it sums over them
LINK = 1 / 8  # of the largest traffic within a layer joins two units of a time step; less, such as a loss, does not
OWN = 0.8  # share of a group's units in independent parts of their layer from which on its sets are residue classes


def shortened(problem: Problem, group: np.ndarray, rank: np.ndarray) -> tuple[Problem, np.ndarray]:
    """The problem of the shorter network, and int ``(n,)``: an op of it that stands for each op. ``group`` and ``rank``
    int ``(units,)`` are those of :mod:`simdev.baselines._search`.

    Of the units that do the same work for a layer and have the same signature, the first quarter stays if they run
    forward and the last quarter if they run backward: those of the first time steps. Once-only work and all memory are
    scaled to a quarter, so that a step takes about a quarter of the time, and a placement fits if it fits in the whole.
    What a unit that stays reads of one that does not comes from that one's stand-in, at the same relative place among
    those that stay, if the stand-in comes before the reader.

    Each group is divided into eight sets, whose units are colocated: the
    eighths of its units in topological order. If a layer falls apart into independent parts, such as a softmax for each
    time step, the sets are the parts whose numbers leave the same remainder, so that neighbours can run on two devices.
    """
    graph = problem.graph
    stays, factor, stand_in = _chosen(graph, longest_op(problem), group, rank)
    label = _sets(problem, group, rank, stays)
    absent = ~np.isin(label, label[stays])
    label[absent] = label[stand_in[absent]]
    short = _short_graph(graph, stays, factor, stand_in, label)
    ops = np.flatnonzero(stays[graph.unit_of_op])
    one = np.full(int(label.max()) + 1, -1)
    one[label[graph.unit_of_op[ops]]] = np.arange(len(ops))
    return _with_costs(problem, short, ops, factor[graph.unit_of_op]), one[label[graph.unit_of_op]]


def _chosen(graph: ComputationGraph, op: np.ndarray, group: np.ndarray, rank: np.ndarray):
    """For each unit: whether it stays, bool; by which factor its time, bytes and memory change, float; and the unit
    that stands for it, int64."""
    key = np.unique(np.stack([group, graph.op_signature[op]]), axis=1, return_inverse=True)[1].reshape(-1)
    units, ptr = units_by_group(key, rank)
    stays, factor, stand_in = np.ones(len(key), bool), np.full(len(key), SHARE), np.arange(len(key))
    for first, stop in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True):
        alike, count = units[first:stop], stop - first
        if count >= MANY:
            left = round(count * SHARE)
            chosen = alike[:left] if graph.op_phase[op[alike[0]]] == 0 else alike[-left:]
            stays[alike], stays[chosen] = False, True
            factor[alike] = SHARE * count / left
            stand_in[alike] = chosen[np.arange(count) * left // count]
            stand_in[chosen] = chosen
    return stays, factor, stand_in


def _sets(problem: Problem, group: np.ndarray, rank: np.ndarray, stays: np.ndarray) -> np.ndarray:
    """int64 ``(units,)``: the number of each unit's set. A unit's place in a group is that among the units that stay,
    or for one that does not, among all."""
    part, label, number = _independent_parts(problem, rank), np.empty(len(group), np.int64), 0
    units, ptr = units_by_group(group, rank)
    for first, stop in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True):
        members, count = units[first:stop], stop - first
        if count < MANY:
            place, sets = np.arange(count), count
        elif (part[members] >= 0).mean() > OWN:
            place, sets = np.where(part[members] >= 0, part[members] % PARTS, PARTS), PARTS + 1
        else:
            place, sets = np.arange(count) * PARTS // count, PARTS
            staying = np.flatnonzero(stays[members])
            place[staying] = np.arange(len(staying)) * PARTS // len(staying)
        label[members] = number + place
        number += sets
    return label


def _independent_parts(problem: Problem, rank: np.ndarray) -> np.ndarray:
    """int64 ``(units,)``: the number of the part of its layer that each unit is in, in topological order, if the layer
    falls apart into many that exchange little; -1 elsewhere.

    Gradients of weights and units of many neighbours join no parts; a unit that reads or feeds one part only is in it.
    """
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    graph, op, n = problem.graph, longest_op(problem), problem.graph.n_units
    layer, (ptr, target, size) = graph.op_layer[op], unit_adjacency(problem)
    source = np.repeat(np.arange(n), np.diff(ptr))
    core = (graph.op_phase[op] < 2) & (weight_gradient_bytes(problem) == 0) & (np.diff(ptr) <= NEIGHBOURS)
    near = core[source] & core[target] & (layer[source] == layer[target])
    most = np.zeros(len(graph.layers), np.int64)
    np.maximum.at(most, layer[source[near]], size[near])
    near &= size >= LINK * most[layer[source]]
    count, joined = connected_components(coo_matrix((near[near], (source[near], target[near])), (n, n)), directed=False)
    begin = np.full(count, n)
    np.minimum.at(begin, joined, rank)
    part = np.full(n, -1)
    own = core & (np.bincount(joined)[joined] > 1)
    for number in np.unique(layer[own]).tolist():
        members = own & (layer == number)
        begins, numbers = np.unique(begin[joined[members]], return_inverse=True)
        if len(begins) >= MANY:
            part[members] = numbers
    reads = (part[source] < 0) & (part[target] >= 0) & (layer[source] == layer[target])
    low, high = np.full(n, n), np.full(n, -1)
    np.minimum.at(low, source[reads], part[target[reads]])
    np.maximum.at(high, source[reads], part[target[reads]])
    return np.where(low == high, low, part)


def _short_graph(
    graph: ComputationGraph, stays: np.ndarray, factor: np.ndarray, stand_in: np.ndarray, label: np.ndarray
) -> ComputationGraph:
    """The graph of the units that stay, its ops and tensors in the order that they have in ``graph``."""
    unit, ptr = graph.unit_of_op, graph.consumer_ptr.tolist()
    builder, scale, handle = GraphBuilder(graph.name, {**graph.meta, "coarse": True}), factor[unit].tolist(), {}
    for op in np.flatnonzero(stays[unit]).tolist():
        handle[op] = builder.op(
            graph.op_names[op],
            "shortened",
            flops=int(graph.op_flops[op] * scale[op]),
            bytes_read=int(graph.op_bytes_read[op] * scale[op]),
            bytes_written=int(graph.op_bytes_written[op] * scale[op]),
            persistent_bytes=int(graph.op_persistent_bytes[op] * SHARE),
            workspace_bytes=int(graph.op_workspace_bytes[op] * SHARE),
            layer=graph.layers[graph.op_layer[op]],
            phase=PHASES[graph.op_phase[op]],
            group=int(label[unit[op]]),
        )
    sent = dict[int, int]()  # the first tensor of each op, which carries what ops read of those that it stands for
    for tensor, op in enumerate(graph.tensor_producer.tolist()):
        if op in handle:
            made = builder.tensor(
                handle[op],
                int(graph.tensor_bytes[tensor] * scale[op]),
                persistent=bool(graph.tensor_persistent[tensor]),
                result=bool(graph.tensor_result[tensor]),
            )
            sent.setdefault(op, made)
            for reader in graph.consumers[ptr[tensor] : ptr[tensor + 1]].tolist():
                if reader in handle:
                    builder.connect(made, handle[reader])
    first = np.unique(unit, return_index=True)[1]
    for producer, reader in zip(graph.edge_source.tolist(), graph.consumers.tolist(), strict=True):
        instead = int(first[stand_in[unit[producer]]])
        if producer not in handle and reader in handle and instead < reader and instead in sent:
            builder.connect(sent[instead], handle[reader])
    return builder.build()


def _with_costs(problem: Problem, short: ComputationGraph, ops: np.ndarray, scale: np.ndarray) -> Problem:
    """The problem of the shorter graph, whose ops take ``scale`` float ``(n,)`` times what they took."""
    graph, costs = problem.graph, problem.costs

    def scaled(times: np.ndarray, factor: np.ndarray, least: int) -> np.ndarray:
        return np.where(times < 0, times, np.maximum(least, np.rint(times * factor))).astype(np.int64)

    sent = np.flatnonzero(np.isin(graph.tensor_producer, ops))
    table = CostTable(
        scaled(costs.op_ns[:, ops], scale[ops], 1),
        costs.device_row,
        scaled(costs.transfer_ns[:, sent], scale[graph.tensor_producer[sent]], 1),
        costs.pair_class,
        scaled(costs.dispatch_ns[ops], scale[ops], 0),
        scaled(costs.gap_ns[ops], scale[ops], 0),
    )
    devices = tuple(
        replace(device, kind=replace(device.kind, memory_bytes=int(device.kind.memory_bytes * SHARE)))
        for device in problem.topology.devices
    )
    return Problem(short, replace(problem.topology, devices=devices), table, problem.rules)
