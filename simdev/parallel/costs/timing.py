"""From a segment of calls to a timed template: what each call takes, and runs of kernels merged into one item.

On a stream, kernels that no one else waits for run back to back. Such a run is one item: it takes the sum ``T`` of its
kernels, and the host takes the sum ``D`` of their dispatch times to issue it. The run ends at the later of ``S + T``,
with the stream free at ``S``, and ``H + B``, with the host free at ``H`` and ``B`` the largest over its kernels of all
dispatches up to one and all kernels from it on. An item that waits for a first piece ``B - T`` of the host's time ends
at exactly that instant, so that merging changes no time outside the run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from simdev.errors import InvalidInput, Unsupported
from simdev.graphs.routing import Routing
from simdev.parallel.cluster import Cluster, load_cluster
from simdev.parallel.costs.collectives import adapter_share, collective_ns
from simdev.parallel.costs.float8 import Float8
from simdev.parallel.costs.fusion import remaining_shares
from simdev.parallel.mesh import AXES, Mesh
from simdev.parallel.program import COMPUTE, Call, Segment
from simdev.problem.costs import CostModel, op_class
from simdev.problem.graph import GraphBuilder
from simdev.problem.topology import topology_names

WIDE = 8  # ranks of a collective that takes a host longer
# By how much a 16-bit product with an odd side is slower, as cuBLAS has no aligned kernel for it; chosen on the rows of
# vTrain's one-node set without tensor parallelism (1.8 to 2.2 fits all three models).
ODD_PRODUCT = 2.0
PRODUCT = re.compile(r"(?:addmm|mm|bmm|baddbmm|linear)\(.*b?f16\[")
PRECISION = re.compile(r"[^(]*\((b?f16|f8\w*)\[")
PRECISIONS = {"f16": "f16", "bf16": "bf16", "f8": "f8", "f8e4m3": "f8", "f8e5m2": "f8"}  # and how boards name them
SIDES = re.compile(r"f16\[(?:\d+,)*(\d+),(\d+)\]")


@dataclass(frozen=True)
class Host:
    """Time of the host thread to issue a kernel in a forward pass, in a backward pass (autograd's own thread, without
    Python), in the update, and a collective; ``wide_collective_ns`` is what a collective of eight ranks or more takes
    in addition. All zero: a host that is never late (compiled programs, CUDA graphs).

    With ``wait_ns`` the host waits until what a forward or backward pass of a microbatch needs has arrived, and until
    the pass has finished on the device, and then takes that time: it never runs ahead of the device from pass to
    pass."""

    forward_ns: int = 0
    backward_ns: int = 0
    update_ns: int = 0
    collective_ns: int = 0
    wait_ns: int = 0
    wide_collective_ns: int = 0

    def dispatch_ns(self, segment: str, call: Call, mesh: Mesh) -> int:
        """Host time to issue a call of the segment named ``segment``."""
        if call.is_collective:
            wide = math.prod(mesh[axis] for axis in call.axes) >= WIDE
            return self.collective_ns + (self.wide_collective_ns if wide else 0)
        if call.is_forward:
            return self.forward_ns
        return self.backward_ns if call.in_backward or segment.startswith("backward") else self.update_ns

    def dispatches_ns(self, segment: Segment, mesh: Mesh) -> np.ndarray:
        """int64: :meth:`dispatch_ns` of each call."""
        if self.idle:
            return np.zeros(len(segment.order), np.int64)
        keys = [(call.axes, call.is_forward, call.in_backward) for call in segment.distinct]  # what decides it
        different = dict(zip(keys, segment.distinct, strict=True))  # of which there are few
        known = {key: self.dispatch_ns(segment.name, call, mesh) for key, call in different.items()}
        return np.array([known[key] for key in keys], np.int64)[segment.order]

    @property
    def idle(self) -> bool:
        return not (self.forward_ns or self.backward_ns or self.update_ns or self.collective_ns)


@dataclass(frozen=True, eq=False)
class Template:
    """A segment's items in order of issue. ``n`` items, ``w`` waits.

    ``stream`` int32 ``(n,)`` into ``streams``; ``ns``, ``issue_ns`` (before the item may start) and ``rest_ns`` (issue
    time that is left after that) int64 ``(n,)``; ``axes`` per stream, empty for streams of kernels. ``wait_item`` and
    ``wait_for`` int32 ``(w,)``: the item waits for an item of the segment, or for ``-1 - stream``: the stream's last
    item before it. ``kind`` int32 into ``kinds``; ``calls`` int32 counts the calls of an item. ``collectives`` are the
    collectives by their items, and ``adapter`` float64 ``(n,)`` how much of a rank's adapter to the network an item
    takes (:func:`~simdev.parallel.costs.collectives.adapter_share`). ``kernel_ns`` is the summed duration of kernels on
    the compute stream by class of op (:func:`~simdev.problem.costs.op_class`).
    """

    streams: tuple[str, ...]
    axes: tuple[tuple[str, ...], ...]
    stream: np.ndarray
    ns: np.ndarray
    issue_ns: np.ndarray
    rest_ns: np.ndarray
    kind: np.ndarray
    kinds: tuple[str, ...]
    calls: np.ndarray
    wait_item: np.ndarray
    wait_for: np.ndarray
    live_bytes: int
    peak_bytes: int
    flops: int
    adapter: np.ndarray
    collectives: Mapping[int, Call] = field(default_factory=dict)
    kernel_ns: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def kinds_of_collectives(self) -> tuple[np.ndarray, np.ndarray, list[Call]]:
        """int64: the items that are collectives, and of which kind each is: the position among the different ones."""
        keys = [(call.kind, call.payload_bytes, call.axes) for call in self.collectives.values()]  # layers repeat
        calls = dict(zip(keys, self.collectives.values(), strict=True))
        place = {key: number for number, key in enumerate(calls)}
        kind_of = np.array([place[key] for key in keys], np.int64)
        return np.array(list(self.collectives), np.int64), kind_of, list(calls.values())

    @property
    def work_ns(self) -> int:
        """Summed duration of the kernels on the compute stream."""
        return int(self.ns[self.stream == 0].sum()) if len(self.ns) else 0


def make_template(
    segment: Segment, cluster: Cluster, mesh: Mesh, first: int, host: Host, prices: Prices, merge: bool = True
) -> Template:
    """Time ``segment`` as it runs on ``mesh``, whose first rank has the global number ``first``; ``merge=False`` keeps
    an item for each call."""
    calls, order = segment.distinct, segment.order
    streams = {COMPUTE: 0}
    stream_of = np.zeros(len(calls), np.int64)
    for number, call in enumerate(calls):
        stream_of[number] = streams.setdefault(call.stream, len(streams))
        for other, _ in call.waits:
            streams.setdefault(other, len(streams))
    names = [tuple(name.split("+")) for name in streams]
    stream = stream_of[order]
    waiting, target = _resolve(calls, order, stream, streams)
    communicates = np.array([bool(call.axes) for call in calls], bool)[order]
    alone = communicates.copy()  # no kernel may join it
    alone[target[target >= 0]] = True
    begins = np.ones(len(order), bool)  # whether a call is the first of an item
    begins[1:] = communicates[1:] | alone[:-1] | (stream[1:] != stream[:-1]) | (not merge)
    begins[waiting] = True
    begin, item_of = np.flatnonzero(begins), np.cumsum(begins) - 1
    counts = np.diff(begin, append=len(order)).astype(np.int32)
    ns = prices.of(segment, mesh, first)
    durations, issue, rest = _runs(ns, host.dispatches_ns(segment, mesh), begin)
    flops = np.array([call.flops for call in calls], np.int64)[order]
    heaviest = order[_first_largest(flops, begin, item_of)].tolist()
    kinds: dict[str, int] = {}
    labels = (
        calls[number].kind if count == 1 else f"{calls[number].kind} + {count - 1}"
        for number, count in zip(heaviest, counts.tolist(), strict=True)
    )
    collectives = {item: calls[order[begin[item]]] for item in np.flatnonzero(communicates[begin]).tolist()}
    adapter = np.zeros(len(begin))
    share = {id(call): prices.collective(call, mesh, first)[1] for call in calls if call.axes}
    adapter[list(collectives)] = [share[id(call)] for call in collectives.values()]
    return Template(
        tuple(streams),
        tuple(name if name[0] in AXES else () for name in names),
        stream[begin].astype(np.int32),
        durations,
        issue,
        rest,
        np.array([kinds.setdefault(label, len(kinds)) for label in labels], np.int32),
        tuple(kinds),
        counts,
        item_of[waiting].astype(np.int32),
        np.where(target >= 0, item_of[np.maximum(target, 0)], target).astype(np.int32),
        segment.live_bytes,
        segment.peak_bytes,
        int(flops.sum()),
        adapter,
        collectives,
        _by_class(calls, np.bincount(order, ns, len(calls)), stream_of),
    )


def _by_class(calls: tuple[Call, ...], ns: np.ndarray, stream: np.ndarray) -> dict[str, int]:
    """The summed ``ns`` of the kernels on the compute stream, by class of op."""
    found: dict[str, int] = {}
    for call, one in zip(calls, np.where(stream == 0, ns, 0).astype(np.int64).tolist(), strict=True):
        if one:
            found[op_class(call.kind)] = found.get(op_class(call.kind), 0) + one
    return found


def on_mesh(template: Template, mesh: Mesh, first: int, host: Host, prices: Prices) -> Template:
    """The template of a segment that was timed on another mesh of the same axes: collectives take other times, kernels
    the same."""
    ns, issue, adapter = template.ns.copy(), template.issue_ns.copy(), template.adapter.copy()
    items, kind_of, kinds = template.kinds_of_collectives
    if kinds:
        priced = [(*prices.collective(call, mesh, first), host.dispatch_ns("", call, mesh)) for call in kinds]
        ns[items], adapter[items], issue[items] = np.array(priced).T[:, kind_of]
    return replace(template, ns=ns, issue_ns=issue, adapter=adapter)


def _first_largest(values: np.ndarray, begin: np.ndarray, item_of: np.ndarray) -> np.ndarray:
    """int64: the position of the first of the largest ``values`` of each item, which pictures name it by; ``begin``
    are the positions at which items begin, ``item_of`` the items of all."""
    if not len(begin):
        return begin
    largest = np.flatnonzero(values == np.maximum.reduceat(values, begin)[item_of])
    return largest[np.searchsorted(largest, begin)]


def _runs(kernel: np.ndarray, dispatch: np.ndarray, begin: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``T``, ``B - T`` and ``D - (B - T)`` of each run (see the top), int64; ``kernel`` and ``dispatch`` int64 are the
    times of each call, ``begin`` is the first call of each run."""
    if not len(begin):
        return kernel, kernel, kernel
    issued, done = np.cumsum(dispatch), np.cumsum(kernel) - kernel  # at a kernel's begin; all runs one after another
    late = np.maximum.reduceat(issued - done, begin) - (issued - dispatch - done)[begin]
    return np.add.reduceat(kernel, begin), late, np.add.reduceat(dispatch, begin) - late


def _resolve(
    calls: tuple[Call, ...], order: np.ndarray, stream: np.ndarray, streams: Mapping[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """int64, for each wait: the position that waits, and the position that it waits for, or ``-1 - stream`` for the
    last call on that stream before the segment. ``calls`` are the distinct calls, and ``order`` and ``stream`` say for
    each position which it is and where it goes."""
    number = np.array([len(call.waits) for call in calls], np.int64)
    other = np.array([streams[name] for call in calls for name, _ in call.waits], np.int64)
    back = np.array([steps for call in calls for _, steps in call.waits], np.int64)
    count = number[order]
    waiting = np.repeat(np.arange(len(order)), count)
    begin = (np.cumsum(number) - number)[order]
    wait = np.arange(len(waiting)) + np.repeat(begin - (np.cumsum(count) - count), count)
    other, back = other[wait], back[wait]
    target = -1 - other
    for one in set(other.tolist()):
        mine, there = np.flatnonzero(other == one), np.flatnonzero(stream == one)
        place = np.searchsorted(there, waiting[mine]) - 1 - back[mine]  # among the calls on that stream
        target[mine[place >= 0]] = there[place[place >= 0]]
    return waiting, target


class Prices:
    """Whole nanoseconds of calls on a cluster, remembered by signature.

    ``scale`` multiplies the duration of kernels by class of op (:func:`simdev.problem.costs.op_class`), a calibrated
    quantity. ``compiled``: elementwise kernels are fused (:mod:`simdev.parallel.costs.fusion`), with ``real_rotation``
    those on complex numbers, too. ``float8``: linear layers multiply in FP8. ``routing``: how tokens of experts that go
    once to each node are routed.
    """

    def __init__(
        self,
        cluster: Cluster,
        costs: CostModel | None = None,
        scale: dict[str, float] | None = None,
        compiled: bool = False,
        float8: Float8 | None = None,
        routing: Routing | None = None,
        real_rotation: bool = False,
    ):
        self.compiled, self.float8, self.routing = compiled, float8, routing
        self.real_rotation = real_rotation
        self.cluster, self.costs, self.scale = cluster, costs or CostModel(), scale or {}
        self._kernels: dict[tuple, int] = {}
        self._collectives: dict[tuple, tuple[int, float]] = {}  # ns, and the share of an adapter

    def of(self, segment: Segment, mesh: Mesh, first: int) -> np.ndarray:
        """int64: the duration of each call on ``mesh``, whose first rank has the global number ``first``."""
        calls, known = segment.distinct, self._kernels
        keys = [(call.signature, call.flops, call.bytes_read, call.bytes_written) for call in calls]
        unknown: dict[tuple, Call] = {}
        for key, call in zip(keys, calls, strict=True):
            if not call.axes and key not in known:
                unknown.setdefault(key, call)
        if unknown:
            known.update(zip(unknown, self._cost(list(unknown.values())), strict=True))
        pairs = zip(keys, calls, strict=True)
        different = [self.collective(call, mesh, first)[0] if call.axes else known[key] for key, call in pairs]
        of_each = np.array(different, np.int64)[segment.order]
        if not self.compiled:
            return of_each
        sequence = [calls[number] for number in segment.order.tolist()]
        shares = zip(of_each.tolist(), remaining_shares(sequence, self.real_rotation), sequence, strict=True)
        return np.array([ns if call.axes else max(1, round(share * ns)) for ns, share, call in shares], np.int64)

    def _cost(self, calls: list[Call]) -> list[int]:
        kernels = [(owner, part) for owner, call in enumerate(calls) for part in self._kernels_of(call)]
        builder = GraphBuilder("kernels")
        for number, (_, call) in enumerate(kernels):
            builder.op(
                str(number),
                call.kind,
                signature=call.signature,
                flops=call.flops,
                bytes_read=call.bytes_read,
                bytes_written=call.bytes_written,
            )
        graph = builder.build()
        _check_rates([part for _, part in kernels], self.cluster)
        ns = self.costs.op_durations(graph, self.cluster.kind)
        found = {int(name): int(value) for name, value in zip(graph.op_names, ns, strict=True)}
        total = [0] * len(calls)
        for number, (owner, call) in enumerate(kernels):
            slower = self.scale.get(op_class(call.kind), 1.0) * _odd(call.signature)
            total[owner] += max(1, round(found[number] * slower))
        return total

    def _kernels_of(self, call: Call) -> list[Call]:
        return self.float8.calls_of(call) if self.float8 else [call]

    def collective(self, call: Call, mesh: Mesh, first: int) -> tuple[int, float]:
        """The duration of a collective in ns, and how much of a rank's adapter to the network it takes."""
        key = call.kind, call.payload_bytes, call.axes, mesh.inner, first % self.cluster.gpus
        if key not in self._collectives:
            lines = _different(mesh.lines(call.axes) + first, self.cluster)
            what = call.kind, call.payload_bytes
            ns = [collective_ns(*what, line, self.cluster, self.routing) for line in lines]
            pairs = zip(lines, ns, strict=True)
            shares = (adapter_share(*what, line, self.cluster, one, self.routing) for line, one in pairs)
            self._collectives[key] = max(1, *ns), max(shares)
        return self._collectives[key]


def _check_rates(calls: list[Call], cluster: Cluster) -> None:
    """Raise :class:`Unsupported` for a product in a precision that the board has no rate for."""
    rates = cluster.kind.peak_flops
    for call in calls:
        found = PRECISION.match(call.signature)
        if found and PRECISIONS[found[1]] not in rates and op_class(call.kind) in ("gemm", "attention"):
            precision, known = PRECISIONS[found[1]], ", ".join(rates)
            message = f"no rate for products in {precision}; {cluster.kind.name} has {known}"
            others = ", ".join(_machines_with(precision, cluster)[:4])
            remedy = f"; use a machine that has one, such as {others}" if others else ""
            raise Unsupported(f"{cluster.name}: {message}{remedy}")


def _machines_with(precision: str, cluster: Cluster) -> list[str]:
    """The shipped machines with a network whose accelerators, of the vendor of the cluster's, have a rate for a
    precision."""
    found = []
    for name in topology_names():
        with suppress(InvalidInput):  # accelerators of several kinds
            other = load_cluster(name)
            same = other.kind.vendor == cluster.kind.vendor and other.network_bytes_per_s
            if same and precision in other.kind.peak_flops:
                found.append(name)
    return found


def _odd(signature: str) -> float:
    """The factor of a 16-bit product whose matrices have an odd side."""
    if not PRODUCT.match(signature):
        return 1.0
    odd = any(int(side) % 2 for pair in SIDES.findall(signature) for side in pair if side != "1")
    return ODD_PRODUCT if odd else 1.0


def _different(lines: np.ndarray, cluster: Cluster) -> list[np.ndarray]:
    """One of the groups for each way in which groups lie across nodes."""
    nodes = np.sort(lines // cluster.gpus, axis=1)
    borders = np.diff(nodes, axis=1) > 0  # between the members of one node and those of the next one
    return list({border.tobytes(): line for border, line in zip(borders, lines, strict=True)}.values())
