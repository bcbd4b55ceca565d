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
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from simdev.errors import InvalidInput, Unsupported
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
            return np.zeros(len(segment.calls), np.int64)
        keys = [(call.axes, call.is_forward, call.in_backward) for call in segment.calls]  # what decides it
        different = dict(zip(keys, segment.calls, strict=True))  # of which there are few
        known = {key: self.dispatch_ns(segment.name, call, mesh) for key, call in different.items()}
        return np.array([known[key] for key in keys], np.int64)

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
    takes (:func:`~simdev.parallel.costs.collectives.adapter_share`).
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

    @property
    def work_ns(self) -> int:
        """Summed duration of the kernels on the compute stream."""
        return int(self.ns[self.stream == 0].sum()) if len(self.ns) else 0


def make_template(
    segment: Segment, cluster: Cluster, mesh: Mesh, first: int, host: Host, prices: Prices, merge: bool = True
) -> Template:
    """Time ``segment`` as it runs on ``mesh``, whose first rank has the global number ``first``; ``merge=False`` keeps
    an item for each call."""
    calls = segment.calls
    waits, awaited = _resolve(calls)
    streams = {COMPUTE: 0}
    begins: list[int] = []  # the first call of each item
    running = None  # the stream of a run that the next kernel may join
    for number, call in enumerate(calls):
        stream = call.stream
        if stream not in streams:
            streams[stream] = len(streams)
        for other, _ in call.waits:
            streams.setdefault(other, len(streams))
        if call.waits or call.axes or stream != running:
            begins.append(number)
        running = None if call.axes or not merge or number in awaited else stream
    names = [tuple(name.split("+")) for name in streams]
    begin, counts = np.array(begins, np.int64), np.diff(begins, append=len(calls)).astype(np.int32)
    item_of = np.repeat(np.arange(len(begins)), counts).tolist()
    durations, issue, rest = _runs(
        np.array(prices.of(calls, mesh, first), np.int64), host.dispatches_ns(segment, mesh), begin
    )
    pairs = [
        (item_of[number], item_of[target] if target >= 0 else -1 - streams[stream])
        for number, found in waits.items()
        for stream, target in found
    ]
    kinds: dict[str, int] = {}
    flops = [call.flops for call in calls]
    labels = (_label(calls, flops, n, count) for n, count in zip(begins, counts.tolist(), strict=True))
    pair = np.array(pairs, np.int32).reshape(-1, 2)
    collectives = {item: calls[n] for item, n in enumerate(begins) if calls[n].axes}
    adapter = np.zeros(len(begins))
    adapter[list(collectives)] = [prices.collective(call, mesh, first)[1] for call in collectives.values()]
    return Template(
        tuple(streams),
        tuple(name if name[0] in AXES else () for name in names),
        np.array([streams[calls[n].stream] for n in begins], np.int32),
        durations,
        issue,
        rest,
        np.array([kinds.setdefault(label, len(kinds)) for label in labels], np.int32),
        tuple(kinds),
        counts,
        pair[:, 0],
        pair[:, 1],
        segment.live_bytes,
        segment.peak_bytes,
        sum(flops),
        adapter,
        collectives,
    )


def on_mesh(template: Template, mesh: Mesh, first: int, host: Host, prices: Prices) -> Template:
    """The template of a segment that was timed on another mesh of the same axes: collectives take other times, kernels
    the same."""
    items, calls = list(template.collectives), list(template.collectives.values())
    ns, issue, adapter = template.ns.copy(), template.issue_ns.copy(), template.adapter.copy()
    keys = [(call.kind, call.payload_bytes, call.axes) for call in calls]  # which layers repeat
    of_key = {
        key: (*prices.collective(call, mesh, first), host.dispatch_ns("", call, mesh))
        for key, call in dict(zip(keys, calls, strict=True)).items()
    }
    if keys:
        ns[items], adapter[items], issue[items] = zip(*map(of_key.__getitem__, keys), strict=True)
    return replace(template, ns=ns, issue_ns=issue, adapter=adapter)


def _label(calls: tuple[Call, ...], flops: list[int], begin: int, count: int) -> str:
    """What an item of ``count`` calls from number ``begin`` on is called in pictures: the collective, or the kernel
    that most FLOPs are in; ``flops`` are those of each call."""
    if count == 1:
        return calls[begin].kind
    of_item = flops[begin : begin + count]
    return f"{calls[begin + of_item.index(max(of_item))].kind} + {count - 1}"


def _runs(kernel: np.ndarray, dispatch: np.ndarray, begin: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``T``, ``B - T`` and ``D - (B - T)`` of each run (see the top), int64; ``kernel`` and ``dispatch`` int64 are the
    times of each call, ``begin`` is the first call of each run."""
    if not len(begin):
        return kernel, kernel, kernel
    issued, done = np.cumsum(dispatch), np.cumsum(kernel) - kernel  # at a kernel's begin; all runs one after another
    late = np.maximum.reduceat(issued - done, begin) - (issued - dispatch - done)[begin]
    return np.add.reduceat(kernel, begin), late, np.add.reduceat(dispatch, begin) - late


def _resolve(calls: tuple[Call, ...]) -> tuple[dict[int, list[tuple[str, int]]], set[int]]:
    """For each call that waits the calls it waits for, as ``(stream, number)`` with -1 for one before the segment; and
    all numbers that are waited for."""
    issued: dict[str, list[int]] = defaultdict(list)
    waits: dict[int, list[tuple[str, int]]] = {}
    for number, call in enumerate(calls):
        for stream, back in call.waits:
            there = issued[stream]
            target = there[-1 - back] if back < len(there) else -1
            waits.setdefault(number, []).append((stream, target))
        issued[call.stream].append(number)
    return waits, {target for found in waits.values() for _, target in found}


class Prices:
    """Whole nanoseconds of calls on a cluster, remembered by signature.

    ``scale`` multiplies the duration of kernels by class of op (:func:`simdev.problem.costs.op_class`), a calibrated
    quantity. ``compiled``: elementwise kernels are fused (:mod:`simdev.parallel.costs.fusion`). ``float8``: linear
    layers multiply in FP8.
    """

    def __init__(
        self,
        cluster: Cluster,
        costs: CostModel | None = None,
        scale: dict[str, float] | None = None,
        compiled: bool = False,
        float8: Float8 | None = None,
    ):
        self.compiled, self.float8 = compiled, float8
        self.cluster, self.costs, self.scale = cluster, costs or CostModel(), scale or {}
        self._kernels: dict[tuple, int] = {}
        self._collectives: dict[tuple, tuple[int, float]] = {}  # ns, and the share of an adapter

    def of(self, calls: tuple[Call, ...], mesh: Mesh, first: int) -> list[int]:
        """The duration of each call on ``mesh``, whose first rank has the global number ``first``."""
        kernels = self._kernels
        ns = [
            self.collective(call, mesh, first)[0]
            if call.axes
            else kernels.get((call.signature, call.flops, call.bytes_read, call.bytes_written), -1)
            for call in calls
        ]
        if -1 in ns:
            unknown: dict[tuple, Call] = {}
            for call, known in zip(calls, ns, strict=True):
                if known < 0:
                    unknown.setdefault((call.signature, call.flops, call.bytes_read, call.bytes_written), call)
            kernels.update(zip(unknown, self._cost(list(unknown.values())), strict=True))
            return self.of(calls, mesh, first)
        if not self.compiled:
            return ns
        shares = zip(ns, remaining_shares(calls), calls, strict=True)
        return [one if call.axes else max(1, round(share * one)) for one, share, call in shares]

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
            ns = [collective_ns(*what, line, self.cluster) for line in lines]
            shares = (adapter_share(*what, line, self.cluster, one) for line, one in zip(lines, ns, strict=True))
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
