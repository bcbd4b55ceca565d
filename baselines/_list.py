"""List scheduling with colocation and memory: the parts that HEFT, PEFT, m-ETF and m-SCT share.

The kernels place one op at a time. The first op of a colocation group to be placed decides the device of the group.
Sources that cost nothing (parameters, inputs, constants) are *lazy*: they go where their first reader goes, as in
Baechi, which ties a variable to its reader. Otherwise all of them would be placed on the first device, before their
readers.

Memory is tracked in placing order: a group's persistent bytes from its first op on, an op's outputs until their last
reader is placed, and a copy per device that reads them. The true peak depends on when ops run. If there is a budget,
:func:`fit` therefore checks with the simulator and tries again with less headroom.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from simdev.analysis.coarsen import DisjointSets
from simdev.baselines._order import ordered, priority_of_list
from simdev.baselines._units import capacities, choices, used_devices
from simdev.placers.budget import Budget
from simdev.problem.costs import FREE_KINDS
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem

HEADROOM_SHARES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12)  # shares of the capacity that fit() tries, in this order


class Tables(NamedTuple):
    """Inputs of the kernels: ``n`` ops, ``m`` tensors, ``D`` devices, ``u`` units (merged, see ``label``)."""

    allowed: np.ndarray  # bool (D, u)
    op_ns: np.ndarray  # int64 (D, n)
    transfer_ns: np.ndarray  # int64 (C, m)
    pair_class: np.ndarray  # int32 (D, D)
    unit: np.ndarray  # int32 (n,)
    unit_bytes: np.ndarray  # int64 (u,)
    input_ptr: np.ndarray
    inputs: np.ndarray
    output_ptr: np.ndarray
    producer: np.ndarray
    consumer_ptr: np.ndarray
    consumers: np.ndarray
    size: np.ndarray  # int64 (m,): bytes of a copy on another device
    home_size: np.ndarray  # int64 (m,): bytes on the producer's device, 0 for a persistent tensor
    keep: np.ndarray  # bool (m,): never freed, because it is a result or is read outside the scope
    workspace: np.ndarray  # int64 (n,)
    lazy: np.ndarray  # bool (n,)
    scope: np.ndarray  # bool (n,): the ops to place; lazy ones are placed by their readers
    label: np.ndarray  # int32 (units of the graph,): the merged unit that holds each unit of the graph


class ListState(NamedTuple):
    """What the kernels write. Times are in ns; -1 means not placed."""

    unit_device: np.ndarray  # int32 (u,)
    start: np.ndarray  # int64 (n,)
    finish: np.ndarray  # int64 (n,)
    used: np.ndarray  # int64 (D,): bytes
    headroom: np.ndarray  # int64 (D,): bytes that may be used
    arrived: np.ndarray  # int64 (D, m): arrival time of the tensor's copy, -1: no copy
    unread: np.ndarray  # int32 (m,): readers in scope that are not yet placed


def tables(problem: Problem, *, forward_only: bool) -> Tables:
    """Build the inputs of the kernels for ``problem``.

    With ``forward_only``, backward and update ops are left out, and :func:`follow_forward` places them later. The
    tensors that they will read are kept, gradients of parameters count with the parameter, and units are merged by
    :func:`coplace`. A graph without forward ops is scheduled whole.
    """
    graph, costs = problem.graph, problem.costs
    free_kind = np.array([kind in FREE_KINDS for kind in graph.kinds])
    lazy = free_kind[graph.op_kind] & (np.diff(graph.input_ptr) == 0) & (costs.op_ns <= 1).all(axis=0)
    scope = ~lazy
    if forward_only and (scope & (graph.op_phase == 0)).any():
        scope &= graph.op_phase == 0
    allowed = choices(problem)
    keep = graph.tensor_result.copy()
    keep[graph.edge_tensor[~scope[graph.consumers]]] = True
    home_size = np.where(graph.tensor_persistent, 0, graph.tensor_bytes)
    maker_unit, made_inside = graph.unit_of_op[graph.tensor_producer], (scope | lazy)[graph.tensor_producer]
    inside = np.zeros(graph.n_units, bool)
    inside[graph.unit_of_op[scope | lazy]] = True
    held = problem.unit_persistent_bytes.copy()
    gradients = ~made_inside & inside[maker_unit]
    np.add.at(held, maker_unit[gradients], home_size[gradients])
    label = np.arange(graph.n_units, dtype=np.int32)
    if forward_only:
        whole = held.copy()
        np.add.at(whole, maker_unit[made_inside], home_size[made_inside])
        label = coplace(graph, scope, allowed, whole, int(capacities(problem)[used_devices(allowed)].min()) // 2)
    count, unit = int(label.max()) + 1, label[graph.unit_of_op]
    unit_bytes = np.zeros(count, np.int64)
    np.add.at(unit_bytes, label, held)
    forbidden = np.zeros((len(allowed), count), np.int64)
    np.add.at(forbidden.T, label, ~allowed.T)
    return Tables(
        forbidden == 0,
        costs.device_op_ns,
        costs.transfer_ns,
        costs.pair_class,
        unit,
        unit_bytes,
        graph.input_ptr,
        graph.inputs,
        graph.output_ptr,
        graph.tensor_producer,
        graph.consumer_ptr,
        graph.consumers,
        graph.tensor_bytes,
        home_size,
        keep,
        graph.op_workspace_bytes,
        lazy,
        scope,
        label,
    )


def coplace(graph, scope: np.ndarray, allowed: np.ndarray, unit_bytes: np.ndarray, most: int) -> np.ndarray:
    """int32 ``(units,)``: units merged as Baechi co-places ops: an op whose outputs only one op reads joins that op.

    Only readers in ``scope`` bool ``(n,)`` count. Units stay apart if no device may take both, or (unlike in Baechi) if
    they would exceed ``most`` bytes together.
    """
    inside = scope[graph.consumers]
    pairs = np.unique(graph.edge_source[inside].astype(np.int64) * graph.n_ops + graph.consumers[inside])
    source, target = pairs // graph.n_ops, pairs % graph.n_ops
    alone = np.bincount(source, minlength=graph.n_ops)[source] == 1
    sets, common, total = DisjointSets(graph.n_units), allowed.copy(), unit_bytes.tolist()
    unit = graph.unit_of_op
    for before, after in zip(unit[source[alone]].tolist(), unit[target[alone]].tolist(), strict=True):
        a, b = sets.root(before), sets.root(after)
        if a != b and total[a] + total[b] <= most and (common[:, a] & common[:, b]).any():
            sets.parent[b] = a
            total[a] += total[b]
            common[:, a] &= common[:, b]
    return np.unique(sets.roots(), return_inverse=True)[1].astype(np.int32)


def new_state(table: Tables, headroom: np.ndarray) -> ListState:
    """A state without placed ops in which ``headroom`` int64 ``(D,)`` bytes may be used on each device."""
    d, n, m = len(table.op_ns), len(table.unit), len(table.size)
    edge_tensor = np.repeat(np.arange(m), np.diff(table.consumer_ptr))
    unread = np.bincount(edge_tensor[table.scope[table.consumers]], minlength=m).astype(np.int32)
    return ListState(
        np.full(len(table.unit_bytes), -1, np.int32),
        np.full(n, -1, np.int64),
        np.full(n, -1, np.int64),
        np.zeros(d, np.int64),
        np.asarray(headroom, np.int64),
        np.full((d, m), -1, np.int64),
        unread,
    )


def mean_costs(problem: Problem, allowed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``k`` times the mean duration of each op, int64 ``(n,)``, and of the transfer of each tensor, int64 ``(m,)``.

    The means are over the ``k`` devices in use and their ordered pairs. Durations stay exact because they are not
    divided by ``k``.
    """
    devices = used_devices(allowed)
    durations = problem.costs.device_op_ns[devices]
    supported = durations >= 0
    count = np.maximum(1, supported.sum(axis=0))
    duration = np.where(supported, durations, 0).sum(axis=0) * len(devices) // count
    classes = problem.costs.pair_class[np.ix_(devices, devices)]
    classes = classes[~np.eye(len(devices), dtype=bool)]
    if not len(classes):
        return duration, np.zeros(problem.graph.n_tensors, np.int64)
    weight = np.bincount(classes, minlength=len(problem.costs.transfer_ns))
    transfer = (weight[:, None] * problem.costs.transfer_ns).sum(axis=0) * len(devices) // len(classes)
    return duration, transfer


def fit(
    problem: Problem, budget: Budget, build: Callable[[np.ndarray], np.ndarray], order: np.ndarray | None = None
) -> Placement:
    """Retry ``build(headroom)`` with less and less memory until the placement fits.

    ``build`` takes the bytes that it may use on each device, int64 ``(D,)``, and returns unit devices, int ``(u,)``.
    Returns the first placement that fits according to the simulator or, without a budget, the first placement. If none
    fits, returns the one with the least overflow.

    ``order`` int ``(k,)``, the ops as the scheduler takes them, becomes the priorities of the placement if the rules of
    the problem use any.
    """
    capacity = capacities(problem)
    best, least = None, 0
    priority = None if order is None or not ordered(problem) else priority_of_list(problem, order)
    for share in HEADROOM_SHARES:
        units = build((capacity * share).astype(np.int64))
        placement = Placement(units[problem.graph.unit_of_op], priority)
        if not budget.open:
            break
        score = budget.evaluate(placement.devices, priority=priority)
        if best is None or score.known_overflow_bytes < least:
            best, least = placement, score.known_overflow_bytes
        if score.fits:
            break
    return best or placement


def follow_forward(problem: Problem, unit_device: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Place the units that ``unit_device`` leaves at -1, in op order: each backward op joins its forward op.

    TensorFlow colocates gradients with their ops, so Baechi and its predecessors place only forward ops. The forward op
    is found through the tensors that the unit's first op reads: among their producers and readers in the same layer, it
    is one of the same kind, else the one that shares most bytes. If there is none, the op goes to the device that holds
    most of the bytes that it reads; bytes of its own layer have precedence. A source goes to the device of its first
    placed reader, else to the first allowed device.
    """
    graph = problem.graph
    device = np.array(unit_device, np.int32)
    todo = np.flatnonzero((device[graph.unit_of_op] < 0) & (np.diff(graph.input_ptr) > 0)).tolist()
    forward_of = forward_finder(graph)
    for op in todo:
        unit = graph.unit_of_op[op]
        if device[unit] >= 0:
            continue
        votes = np.zeros(len(allowed))
        forward = forward_of(op)
        if forward >= 0 and device[graph.unit_of_op[forward]] >= 0:
            votes[device[graph.unit_of_op[forward]]] = 1.0
        else:
            tensors = graph.inputs[graph.input_ptr[op] : graph.input_ptr[op + 1]]
            sources = graph.tensor_producer[tensors]
            where = device[graph.unit_of_op[sources]]
            near = (graph.op_layer[sources] == graph.op_layer[op]) & (where >= 0)
            chosen = near if near.any() else where >= 0
            np.add.at(votes, where[chosen], graph.tensor_bytes[tensors[chosen]] + 1.0)
        device[unit] = np.argmax(np.where(allowed[:, unit], votes, -1.0))
    return _place_sources(problem, device, allowed)


def forward_finder(graph):
    """A function from a backward op to its forward op, or -1."""
    kinds = [kind.rstrip("_") for kind in graph.kinds]
    kind, layer, forward = graph.op_kind.tolist(), graph.op_layer.tolist(), (graph.op_phase == 0).tolist()
    input_ptr, inputs, producer = graph.input_ptr.tolist(), graph.inputs.tolist(), graph.tensor_producer.tolist()
    consumer_ptr, consumers, size = graph.consumer_ptr.tolist(), graph.consumers.tolist(), graph.tensor_bytes.tolist()
    common = 16  # a tensor with more readers, such as a weight shared by all time steps, identifies no op

    def find(op):
        shared: dict[int, int] = {}
        for tensor in inputs[input_ptr[op] : input_ptr[op + 1]]:
            if not forward[producer[tensor]] or consumer_ptr[tensor + 1] - consumer_ptr[tensor] > common:
                continue
            for other in (producer[tensor], *consumers[consumer_ptr[tensor] : consumer_ptr[tensor + 1]]):
                if forward[other] and layer[other] == layer[op]:
                    shared[other] = shared.get(other, 0) + size[tensor] + 1
        return max(
            shared,
            key=lambda other: (kinds[kind[op]].startswith(kinds[kind[other]]), shared[other], -other),
            default=-1,
        )

    return find


def _place_sources(problem: Problem, device: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    graph = problem.graph
    for op in np.flatnonzero(device[graph.unit_of_op] < 0).tolist():
        unit = graph.unit_of_op[op]
        first, last = graph.consumer_ptr[graph.output_ptr[op]], graph.consumer_ptr[graph.output_ptr[op + 1]]
        there = device[graph.unit_of_op[graph.consumers[first:last]]]
        there = there[(there >= 0) & allowed[there, unit]]
        device[unit] = there[0] if len(there) else np.argmax(allowed[:, unit])
    return device


def unit_devices(problem: Problem, table: Tables, state: ListState) -> np.ndarray:
    """The device of every unit of the graph, int32 ``(units,)``, once a kernel has placed the ops in scope."""
    return follow_forward(problem, state.unit_device[table.label], choices(problem))


@cache
def kernels():
    """The compiled kernels, as a namespace of functions; loaded on first use, because Numba is slow to import."""
    from simdev.baselines import _list_kernels

    return _list_kernels
