"""A step of a parallel program as a problem: every stream, communicator and host is a device, every item an op.

The devices run their ops in order of op number (rule ``program``), links have no contention (what shares an adapter is
lengthened afterwards: :mod:`simdev.parallel.costs.overlap`), and messages between devices have no bytes: they take the
least transfer time of 1 ns. A collective is one op on the device of its communicator; it waits for the last item of
each member and every member's next item waits for it. A send from stage to stage is an op on a device of its own.
Folded, each stage has one rank, and collectives are priced for their real groups. Unfolded, all ranks are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from simdev.errors import InvalidInput
from simdev.parallel.costs.timing import Template
from simdev.parallel.mesh import Mesh
from simdev.parallel.orders import Action
from simdev.problem.costs import CostTable
from simdev.problem.graph import MAX_OPS, ComputationGraph
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Device, DeviceKind, Topology

HOP_NS = 1  # the least time of a message between two devices (R4)
Item = TypeVar("Item")
STREAM = DeviceKind("stream", 1 << 50, {"f32": 1e12}, 1e12)


class TooManyOps(InvalidInput):
    """The step has more ops than a graph may hold."""


@dataclass(frozen=True, eq=False)
class UnrolledJob:
    """A step as a problem, and where its ops come from.

    Per op int32 ``(n,)``: ``rank`` (pipeline rank when folded, else global rank; of a collective its first member),
    ``action`` into ``actions`` ``(what, stage, microbatch)``; ``is_compute``, ``is_communication`` bool. ``adapter``
    float64: how much of a rank's adapter to the network an op takes; ``receiver`` int32: the rank that a send goes to,
    else -1. ``copies`` is how many ranks of each pipeline rank are there; op ``rank`` counts these alone.
    """

    problem: Problem
    placement: Placement
    rank: np.ndarray
    action: np.ndarray
    actions: tuple[Action, ...]
    is_compute: np.ndarray
    is_communication: np.ndarray
    adapter: np.ndarray
    receiver: np.ndarray
    copies: tuple[int, ...]

    @property
    def first(self) -> np.ndarray:
        """int64 per pipeline rank: op ``rank`` of its first copy."""
        return np.cumsum((0, *self.copies))[:-1]


def execution_order(orders: tuple[tuple[Action, ...], ...], stages: int) -> list[tuple[int, Action]]:
    """``(rank, action)`` of all ranks in an order in which each finds its inputs. Raises like :func:`in_turns`."""
    gradient = gradient_actions(orders)
    return in_turns(orders, lambda action: _inputs(action, stages, gradient), lambda action: action)


def in_turns(
    queues: Sequence[Sequence[Item]], needs: Callable[[Item], Sequence[Action]], action_of: Callable[[Item], Action]
) -> list[tuple[int, Item]]:
    """``(rank, item)`` of the queues of all ranks in an order in which the actions that each item ``needs`` are done.

    Raises :class:`InvalidInput` naming ranks and actions where ranks wait for each other for ever, and where an action
    waits for one that no rank has.
    """
    done: set[Action] = set()
    place, result = [0] * len(queues), []
    moved = True
    while moved:
        moved = False
        for rank, items in enumerate(queues):
            while place[rank] < len(items) and all(need in done for need in needs(items[place[rank]])):
                item = items[place[rank]]
                done.add(action_of(item))
                result.append((rank, item))
                place[rank], moved = place[rank] + 1, True
    stuck = [rank for rank, items in enumerate(queues) if place[rank] < len(items)]
    if stuck:
        known = {action_of(item) for items in queues for item in items}
        waits = []
        for rank in stuck:
            item = queues[rank][place[rank]]
            missing = next(need for need in needs(item) if need not in done)
            nobody = "" if missing in known else ", which no rank executes"
            waits.append(f"rank {rank} at {name_of(action_of(item))} waits for {name_of(missing)}{nobody}")
        more = f"; and {len(waits) - 4} more" if len(waits) > 4 else ""
        raise InvalidInput(f"the pipeline ranks wait for each other: {'; '.join(waits[:4])}{more}", source="schedule")
    return result


def name_of(action: Action) -> str:
    """``F3.0``: forward of stage 3, microbatch 0."""
    return f"{action[0]}{action[1]}.{action[2]}"


def gradient_actions(orders: tuple[tuple[Action, ...], ...]) -> dict[tuple[int, int], Action]:
    """``(stage, microbatch)`` -> the action that computes the gradient of the stage's input: ``B`` or ``I``."""
    return {(a[1], a[2]): a for actions in orders for a in actions if a[0] in "BI"}


def _inputs(action: Action, stages: int, gradient: dict[tuple[int, int], Action]) -> list[Action]:
    what, stage, microbatch = action
    if what == "F":
        return [("F", stage - 1, microbatch)] if stage else []
    if what == "W":
        return [("I", stage, microbatch)]
    later = gradient.get((stage + 1, microbatch), ("B", stage + 1, microbatch))
    return [("F", stage, microbatch), *([later] if stage + 1 < stages else [])]


@dataclass(frozen=True, eq=False)
class _Layout:
    """The ``total`` ops of a template on all copies of a pipeline rank, numbered from 0; see :class:`UnrolledJob`.
    ``edges`` between them, int64 ``(2, k)``; ``before``: ops that wait for the last earlier op of a stream; ``begins``:
    the first item; ``computes``: the first on the compute stream; ``last``: the last op of each stream, all per copy.
    ``template`` stays alive, so that its id stays its own."""

    total: int
    device: np.ndarray
    ns: np.ndarray
    kind: np.ndarray
    rank: np.ndarray
    flags: np.ndarray
    adapter: np.ndarray
    edges: np.ndarray
    before: list[tuple[str, np.ndarray]]
    begins: np.ndarray
    computes: np.ndarray
    last: list[tuple[str, np.ndarray]]
    template: Template


class Unroller:
    """Collects the items of all actions and makes the problem of them. Raises :class:`TooManyOps` as soon as these are
    more than a graph may hold.

    ``meshes`` are those of the pipeline ranks; all ranks of them are there, or one each if ``folded``. ``factors``
    float ``(copies,)`` for each pipeline rank: how many times longer the kernels of each copy take. The host issues a
    merged run of kernels as it does on a rank of factor 1.
    """

    def __init__(self, meshes: Sequence[Mesh], folded: bool, factors: Sequence[np.ndarray] | None = None):
        self.meshes, self.factors = tuple(meshes), factors
        self.copies = tuple(1 if folded else mesh.stage_ranks for mesh in meshes)
        self._first = [0, *np.cumsum(self.copies).tolist()]
        self._devices: dict[tuple, int] = {}
        self._names: list[str] = []
        self._device: list[np.ndarray] = []
        self._ns: list[np.ndarray] = []
        self._kind: list[np.ndarray] = []
        self._rank: list[np.ndarray] = []
        self._action: list[np.ndarray] = []
        self._flags: list[np.ndarray] = []
        self._adapter: list[np.ndarray] = []
        self._receiver: list[np.ndarray] = []
        self._edges: list[np.ndarray] = []
        self._kinds: dict[str, int] = {}
        self._count = 0
        self._actions: list[Action] = []
        self._last: dict[tuple[int, str], np.ndarray] = {}  # (pipeline rank, stream) -> its last op on each copy
        self._groups: dict[tuple, np.ndarray] = {}
        self._prepared: dict[int, tuple] = {}
        self._layouts: dict[tuple[int, int], _Layout] = {}

    def last(self, rank: int, stream: str) -> np.ndarray | None:
        """The last op of a stream on each copy of a pipeline rank."""
        return self._last.get((rank, stream))

    def add(self, rank: int, action: Action, template: Template, after: list[np.ndarray], ahead: bool = False) -> None:
        """Append an action on all copies of a pipeline rank; its first items also wait for the ops ``after``, or its
        first kernels on the compute stream, if what other streams do is issued ``ahead`` of them."""
        if not len(template.ns):
            raise InvalidInput(f"{name_of(action)} has no work", source="stage", field=str(action[1]))
        self._actions.append(action)
        base, found = self._count, self._layout(rank, template)
        self._check(base + found.total)
        self._edges.append(found.edges + base)
        for stream, targets in found.before:
            past = self._last.get((rank, stream))
            if past is not None:
                self._edges.append(_pairs(np.broadcast_to(past, targets.shape), targets + base))
        self._edges += [_pairs(ops, (found.computes if ahead else found.begins) + base) for ops in after]
        for stream, ops in found.last:
            self._last[rank, stream] = ops + base
        self._count += found.total
        self._device.append(found.device)
        self._ns.append(found.ns)
        self._kind.append(found.kind)
        self._rank.append(found.rank)
        self._flags.append(found.flags)
        self._adapter.append(found.adapter)
        self._receiver.append(np.full(found.total, -1, np.int32))
        self._action.append(np.full(found.total, len(self._actions) - 1, np.int32))

    def _layout(self, rank: int, template: Template) -> _Layout:
        """The ops of a template on all copies of a pipeline rank, remembered: schedules repeat their actions."""
        known = self._layouts.get((rank, id(template)))
        if known is None:
            known = self._layouts[rank, id(template)] = self._lay_out(rank, template)
        return known

    def _lay_out(self, rank: int, template: Template) -> _Layout:
        copies, copy, own = self.copies[rank], np.arange(self.copies[rank]), self._first[rank]
        group_of = [self._group(rank, axes) for axes in template.axes]
        width, kind, host_first, host_rest = self._shape(template, group_of)
        # Numbers: for each item its first host op, the item, its second host op, each on every copy (or group).
        size = width + copies * (host_first.astype(np.int64) + host_rest)
        start = np.concatenate([[0], np.cumsum(size)])[:-1]
        item = start + copies * host_first
        total = int(size.sum())
        device, ns = np.empty(total, np.int32), np.empty(total, np.int64)
        kinds, ranks, flags = np.empty(total, np.int32), np.empty(total, np.int32), np.zeros(total, np.int8)
        adapter = np.zeros(total)
        for stream, group in enumerate(group_of):
            rows = np.flatnonzero(template.stream == stream)
            if not len(rows):
                continue
            members = int(group.max()) + 1
            where = (item[rows][:, None] + np.arange(members)).ravel()
            name, axes = template.streams[stream], template.axes[stream]
            device[where] = np.tile([self._device_of(rank, name, axes, member) for member in range(members)], len(rows))
            ns[where] = np.repeat(template.ns[rows], members)
            if self.factors is not None and not axes:
                ns[where] = np.rint(np.outer(template.ns[rows], self.factors[rank])).astype(np.int64).ravel()
            kinds[where] = np.repeat(kind[rows], members)
            adapter[where] = np.repeat(template.adapter[rows], members)
            first = np.array([int(np.flatnonzero(group == g)[0]) for g in range(members)])
            ranks[where] = np.tile(own + first, len(rows))
            flags[where] = 2 if axes else 1 if stream == 0 else 0
        host_kind = self._kinds.setdefault("issue", len(self._kinds))
        for mask, values, offset in (
            (host_first, template.issue_ns, start),
            (host_rest, template.rest_ns, item + width),
        ):
            rows = np.flatnonzero(mask)
            if len(rows):
                where = (offset[rows][:, None] + copy).ravel()
                device[where] = np.tile([self._device_of(rank, "host", (), c) for c in range(copies)], len(rows))
                ns[where] = np.repeat(values[rows], copies)
                kinds[where] = host_kind
                ranks[where] = np.tile(own + copy, len(rows))
        edges, before = self._waits(template, group_of, start, item, host_first, copies)
        kernel = int(np.argmax(template.stream == 0))  # the first one; the first item where there is none
        begins, computes = (int(item[n]) + group_of[int(template.stream[n])] for n in (0, kernel))
        last = []
        for stream, group in enumerate(group_of):
            rows = np.flatnonzero(template.stream == stream)
            if len(rows):
                last.append((template.streams[stream], item[rows[-1]] + group))
        return _Layout(total, device, ns, kinds, ranks, flags, adapter, edges, before, begins, computes, last, template)

    def _waits(self, template: Template, group_of: list, start, item, host_first, copies) -> tuple[np.ndarray, list]:
        """Edges between the ops of a template, int64 ``(2, k)``, and for each stream whose last earlier op is waited
        for, the ops that wait, ``(waits, copies)``."""
        edges, before = [np.zeros((2, 0), np.int64)], []
        rows = np.flatnonzero(host_first)
        for stream, group in enumerate(group_of):
            mine = rows[template.stream[rows] == stream]
            edges.append(_pairs(start[mine][:, None] + np.arange(copies), item[mine][:, None] + group))
        source, target = template.wait_for, template.wait_item
        for stream, group in enumerate(group_of):
            here = template.stream[target] == stream
            for other, others in enumerate(group_of):
                inside = here & (source >= 0) & (template.stream[np.maximum(source, 0)] == other)
                edges.append(_pairs(item[source[inside]][:, None] + others, item[target[inside]][:, None] + group))
                earlier = target[here & (source == -1 - other)]
                if len(earlier):
                    before.append((template.streams[other], item[earlier][:, None] + group))
        return np.concatenate(edges, axis=1), before

    def wait_on_host(self, rank: int, ops: np.ndarray, ns: int) -> None:
        """Block the host of each copy of a pipeline rank until ``ops`` have finished, and for ``ns`` more."""
        copies = self.copies[rank]
        waits = self._count + np.arange(copies)
        devices = [self._device_of(rank, "host", (), copy) for copy in range(copies)]
        self._single(rank, waits, devices, ns, "wait", 0, 0.0, np.full(copies, -1))
        self._edges.append(_pairs(ops, waits))

    def send(self, source: int, target: int, ns: int, adapter: float, together: bool = False) -> np.ndarray:
        """A send from each copy of one pipeline rank to the same copy of another, which takes the share ``adapter`` of
        their adapters to the network; returns its ops. ``together``: one send from all copies to all of another number
        of copies."""
        copies = 1 if together else self.copies[source]
        ops = self._count + np.arange(copies)
        devices = [self._device_of(source, f"send to {target}", (), copy) for copy in range(copies)]
        self._single(source, ops, devices, ns, "send", 2, adapter, self._first[target] + np.arange(copies))
        self._edges.append(_pairs(self._last[source, "compute"], ops))
        return ops

    def _single(self, rank: int, ops, devices: list[int], ns: int, kind: str, flag: int, adapter: float, receiver):
        """Append one op for each of ``ops``, on the first copies of a pipeline rank."""
        copies = len(ops)
        self._check(self._count + copies)
        self._device.append(np.array(devices, np.int32))
        self._ns.append(np.full(copies, max(1, ns), np.int64))
        self._kind.append(np.full(copies, self._kinds.setdefault(kind, len(self._kinds)), np.int32))
        self._rank.append((self._first[rank] + np.arange(copies)).astype(np.int32))
        self._flags.append(np.full(copies, flag, np.int8))
        self._adapter.append(np.full(copies, adapter))
        self._receiver.append(receiver.astype(np.int32))
        self._action.append(np.full(copies, len(self._actions) - 1, np.int32))
        self._count += copies

    def build(self, name: str) -> UnrolledJob:
        """The problem of all that was added."""
        n = self._count
        edges = np.concatenate(self._edges, axis=1) if self._edges else np.zeros((2, 0), np.int64)
        device = np.concatenate(self._device)
        keep = device[edges[0]] != device[edges[1]]
        key = np.sort(edges[0, keep] * n + edges[1, keep])
        key = key[np.diff(key, prepend=-1) > 0]  # np.unique, which is many times slower
        source, target = key // n, key % n
        first = np.flatnonzero(np.diff(source, prepend=-1))
        producers = source[first]
        m = len(first)
        kinds = list(self._kinds)
        kind = np.concatenate(self._kind)
        action = np.concatenate(self._action)
        zeros = np.zeros(n, np.int64)
        labels = [name_of(a) for a in self._actions]
        layers = list(dict.fromkeys(labels))
        number = {label: position for position, label in enumerate(layers)}
        graph = ComputationGraph(
            name,
            tuple(kinds),
            ("",),
            tuple(layers),
            tuple(np.array(kinds, object)[kind].tolist()),
            kind,
            np.zeros(n, np.int32),
            np.array([number[label] for label in labels], np.int32)[action],
            np.array([_phase(a) for a in self._actions], np.int8)[action],
            zeros,
            zeros,
            zeros,
            zeros,
            zeros,
            np.full(n, -1, np.int32),
            producers.astype(np.int32),
            np.zeros(m, np.int64),
            np.zeros(m, bool),
            np.zeros(m, bool),
            np.append(first, len(source)).astype(np.int32),
            target.astype(np.int32),
        )
        count = len(self._names)
        topology = Topology(name, tuple(Device(text, STREAM) for text in self._names))
        costs = CostTable(
            np.concatenate(self._ns)[None],
            np.zeros(count, np.int32),
            np.full((1, m), HOP_NS, np.int64),
            np.where(np.eye(count, dtype=bool), -1, 0).astype(np.int32),
            zeros,
        )
        problem = Problem(graph, topology, costs, Rules("program", "none"))
        flags = np.concatenate(self._flags)
        return UnrolledJob(
            problem,
            Placement(device),
            np.concatenate(self._rank),
            action,
            tuple(self._actions),
            flags == 1,
            flags == 2,
            np.concatenate(self._adapter),
            np.concatenate(self._receiver),
            self.copies,
        )

    def _check(self, count: int) -> None:
        """Refuse a step of ``count`` ops before it takes the memory."""
        if count > MAX_OPS:
            how = "simulate it folded" if max(self.copies) > 1 else "simulate fewer microbatches"
            message = f"the step has more than {MAX_OPS:,} ops, the most that are simulated: {how}"
            raise TooManyOps(message, source="step")

    def _shape(self, template: Template, group_of: list[np.ndarray]) -> tuple:
        """How many ops each item is, and what it is called, remembered by template."""
        known = self._prepared.get(id(template))
        if known is None:
            members = np.array([group.max() + 1 for group in group_of])
            width = members[template.stream] if len(template.stream) else np.zeros(0, np.int64)
            kind = np.array([self._kinds.setdefault(k, len(self._kinds)) for k in template.kinds])[template.kind]
            known = width, kind, template.issue_ns > 0, template.rest_ns > 0, template
            self._prepared[id(template)] = known
        return known[:4]

    def _group(self, rank: int, axes: tuple[str, ...]) -> np.ndarray:
        """int64 ``(copies,)``: the number of the group along ``axes`` of each copy of a pipeline rank; kernels are
        groups of one."""
        copies, mesh = self.copies[rank], self.meshes[rank]
        key = copies, mesh.inner, axes
        if key not in self._groups:
            groups = np.arange(copies)
            if axes and copies == 1:
                groups = np.zeros(1, np.int64)
            elif axes:
                for number, line in enumerate(mesh.lines(axes)):
                    groups[line] = number
            self._groups[key] = groups
        return self._groups[key]

    def _device_of(self, rank: int, stream: str, axes: tuple[str, ...], member: int) -> int:
        key = rank, stream, member
        if key not in self._devices:
            self._devices[key] = len(self._names)
            several = self.copies[rank] > 1
            what = f"group {member}" if axes and several else f"copy {member}" if several else ""
            self._names.append(" ".join(filter(None, (f"rank {rank}", what, stream))))
        return self._devices[key]


def _phase(action: Action) -> int:
    return {"F": 0, "U": 2}.get(action[0], 1)


def _pairs(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """int64 ``(2, k)``: edges from each source to the target at the same place."""
    a, b = np.broadcast_arrays(source, target)
    return np.stack([a.ravel(), b.ravel()]).astype(np.int64)
