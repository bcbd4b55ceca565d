"""Costs: what each op takes on each device kind, and each tensor on each route, in whole nanoseconds.

A measured table (op signature -> ns) comes first; then the device file of the kind, where it has one: measured or
fitted times of the op's parts (:mod:`simdev.problem.opcost`). Where both are silent, a roofline: the launch overhead
plus the larger of FLOPs over the reachable compute rate and bytes over the reachable memory bandwidth (Williams et al.
2009), both scaled by the efficiency of the op's class on that kind of device.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import numpy as np

from simdev.errors import Infeasible, InvalidInput, quoted
from simdev.files import guarded, parse_json, read_text, unguarded, write_text
from simdev.problem.graph import ComputationGraph
from simdev.problem.opcost.device import Calibration, load_calibration
from simdev.problem.opcost.parts import KernelPart, parts_of
from simdev.problem.opcost.physics import GEMM_LIKE, Datasheet
from simdev.problem.opcost.signature import parse_signature
from simdev.problem.opcost.stand_in import Board, stand_in
from simdev.problem.topology import DeviceKind, Link, Topology

FREE_KINDS = frozenset({"input", "parameter", "constant", "barrier"})  # data that is there already: no kernel runs
SOURCES = ("free", "table", "fit", "roofline", "unsupported")  # where the cost of an op comes from

MAX_NS = 1 << 42  # over an hour: no op lasts so long, and sums stay far from the end of 64 bits

# Op classes and the kinds in them (ATen names as captured, ONNX and layer names as imported, in lower case): the first
# pattern found in a kind wins; everything else is elementwise. A class is what efficiencies are given for.
OP_CLASSES = {
    "attention": r"scaled_dot_product|flash_attention|efficient_attention|^(multihead)?attention",
    "conv_backward": r"convolution_backward|conv\w*_backward",
    "conv": r"convolution|^conv([123]d|transpose|integer)?($|\.|_)|conv_depthwise|^slow_conv|^thnn_conv",
    "gemm": r"^_?(mm|addmm|bmm|baddbmm|addbmm|addr|mv|addmv|dot|matmul|batchmatmul|gemm|einsum|linear|lstm|gru|rnn"
    r"|stackedlstm)(_backward)?($|_$|\.|_?integer|_relu|_tanh)|mkldnn_rnn_layer|cudnn_rnn|grouped_mm|scaled_mm",
    "norm_backward": r"norm\w*_backward",
    "norm": r"_norm($|_legit|\.|_elemt|_stats)|rms_norm|normalization|^(batch|layer|group|instance)norm",
    "pool": r"pool",
    "reduction": r"softmax|logsumexp|^(sum|mean|var|std|prod|any|all|max|min|amax|amin|argmax|argmin|aminmax|norm"
    r"|topk|sort|cumsum|median|unique|reduce\w*|linalg_vector_norm|var_mean)($|_$|\.|_dim)|nll_loss|cross_entropy",
    "embedding": r"embedding|^(index|gather|scatter|take|nonzero)",
    "copy": r"^(cat|concat|copy|clone|stack|split|constant_pad|pad|fill|zero|repeat|expand|slice|select|as_strided"
    r"|_to_copy|transpose|permute|contiguous)|(slice|select)_backward",
}
TF32_CLASSES = ("conv", "conv_backward")  # f32 ops that PyTorch runs in TF32 by default where the device has it


@cache
def op_class(kind: str) -> str:
    """The cost class of an op kind: ``gemm``, ``conv``, ``elementwise`` ..."""
    kind = kind.lower()
    return next((name for name, pattern in OP_CLASSES.items() if re.search(pattern, kind)), "elementwise")


@dataclass(frozen=True, eq=False)
class CostTable:
    """Costs of one graph on one topology. ``n`` ops, ``m`` tensors, ``D`` devices.

    * ``op_ns`` int64 ``(K, n)``: duration per device kind, at least 1; -1 where the op has no kernel.
    * ``device_row`` int32 ``(D,)``: the row of ``op_ns`` that serves a device.
    * ``transfer_ns`` int64 ``(C, m)``: duration of sending a tensor, per class of route, at least 1.
    * ``pair_class`` int32 ``(D, D)``: the row of ``transfer_ns`` for a source and a destination; -1: no route.
    * ``dispatch_ns`` int64 ``(n,)``: host time to issue the op (runtime ``eager``).
    * ``gap_ns`` int64 ``(n,)``: how long the op's slot stays closed after its finish (R1); zeros by default.
    """

    op_ns: np.ndarray
    device_row: np.ndarray
    transfer_ns: np.ndarray
    pair_class: np.ndarray
    dispatch_ns: np.ndarray
    gap_ns: np.ndarray = None  # type: ignore[assignment]  # zeros are filled in

    def __post_init__(self) -> None:
        if self.gap_ns is None:
            object.__setattr__(self, "gap_ns", np.zeros(np.shape(self.dispatch_ns), np.int64))
        for name, dtype in (
            ("op_ns", np.int64),
            ("device_row", np.int32),
            ("transfer_ns", np.int64),
            ("pair_class", np.int32),
            ("dispatch_ns", np.int64),
            ("gap_ns", np.int64),
        ):
            array = np.asarray(getattr(self, name))
            if array.dtype.kind != "i":
                raise InvalidInput(f"expected whole nanoseconds, got dtype {array.dtype}", source="costs", field=name)
            array = np.ascontiguousarray(array, dtype).copy()
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if self.op_ns.min(initial=1) < -1 or np.any(self.op_ns == 0) or self.transfer_ns.min(initial=1) < 1:
            raise InvalidInput("negative or zero duration (zero must be raised to 1 ns)", source="costs")
        for name in ("dispatch_ns", "gap_ns"):
            if getattr(self, name).min(initial=0) < 0:
                raise InvalidInput("negative", source="costs", field=name)

    @cached_property
    def device_op_ns(self) -> np.ndarray:
        """int64 ``(D, n)``: :attr:`op_ns` with a row per device."""
        return self.op_ns[self.device_row]

    def of_ops(self, devices: np.ndarray) -> np.ndarray:
        """int64 ``(n,)``: the duration of each op on its device, ``devices`` int ``(n,)``; -1 without a kernel."""
        return self.op_ns[self.device_row[devices], np.arange(len(devices))]

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex, 16 characters) of every number in the table."""
        digest = hashlib.sha256()
        gaps = (self.gap_ns,) if self.gap_ns.any() else ()
        for array in (self.op_ns, self.device_row, self.transfer_ns, self.pair_class, self.dispatch_ns, *gaps):
            digest.update(repr(array.shape).encode() + array.tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class CostModel:
    """Turns a graph and a topology into a :class:`CostTable`.

    ``measured`` maps a device kind's name to ``{op signature: ns}`` (see :func:`load_measured`); a hit overrides all
    else. ``tf32`` lists the op classes whose f32 ops run at the ``tf32`` rate of a kind that has one, where the
    roofline costs them. ``calibrated=False`` leaves the kinds' device files aside: a roofline for everything.
    """

    measured: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    tf32: tuple[str, ...] = TF32_CLASSES
    calibrated: bool = True

    def table(self, graph: ComputationGraph, topology: Topology) -> CostTable:
        """Cost every op on every device kind and every tensor on every route.

        Raises :class:`Infeasible` for an op that no device supports, :class:`InvalidInput` for a measured cost that is
        negative or NaN.
        """
        op_ns = np.stack([self.op_durations(graph, kind) for kind in topology.kinds])
        nowhere = np.flatnonzero((op_ns < 0).all(axis=0))
        if len(nowhere):
            name, kind = graph.op_names[nowhere[0]], graph.kinds[graph.op_kind[nowhere[0]]]
            raise Infeasible(
                f"op {name!r} of kind {kind!r} is supported by no device of {topology.name}", source=graph.name
            )
        transfer_ns, pair_class = transfer_durations(graph.tensor_bytes, topology)
        host = topology.devices[topology.host].kind if topology.host >= 0 else topology.kinds[0]
        dispatch = np.full(graph.n_ops, host.dispatch_ns, np.int64)
        free = np.array([kind in FREE_KINDS for kind in graph.kinds])
        for kind in topology.kinds if self.calibrated else ():
            measured = calibration_of(kind).dispatch_ns if kind.calibrated else {}
            if measured:  # the host's time by op kind, on a machine with this device
                known = [round(measured.get(name, host.dispatch_ns)) for name in graph.kinds]
                dispatch = np.array(known, np.int64)[graph.op_kind]
                break
        dispatch[free[graph.op_kind]] = 0
        return CostTable(op_ns, topology.device_kind, transfer_ns, pair_class, dispatch)

    def op_durations(self, graph: ComputationGraph, kind: DeviceKind) -> np.ndarray:
        """int64 ``(n,)``: duration of every op on a device of ``kind``, -1 where unsupported."""
        return self.op_costs(graph, kind)[0]

    def op_costs(self, graph: ComputationGraph, kind: DeviceKind) -> tuple[np.ndarray, np.ndarray]:
        """``(ns, source)`` of every op on a device of ``kind``: int64 as :meth:`op_durations`, and uint8 into
        :data:`SOURCES`."""
        ns = roofline_ns(graph, kind, self.tf32)
        free = np.array([name in FREE_KINDS for name in graph.kinds])[graph.op_kind]
        source = np.where(ns < 0, SOURCES.index("unsupported"), SOURCES.index("roofline"))
        if self.calibrated and kind.calibrated:
            found, where = calibrated_ns(graph, kind, self.tf32)
            take = (found >= 0) & (ns >= 0) & ~free
            ns, source = np.where(take, found, ns), np.where(take, where, source)
            found, where = own_board_ns(graph, kind, ns, source)
            ns, source = np.where(free, ns, found), np.where(free, source, where)
        source[free] = SOURCES.index("free")
        table = self.measured.get(kind.name)
        if table:
            hits = np.full(len(graph.signatures), -1, np.int64)
            for number, signature in enumerate(graph.signatures):
                if signature in table:
                    hits[number] = _duration(table[signature], "measured costs", f"{kind.name}: {signature}")
            found = hits[graph.op_signature]
            ns, source = np.where(found >= 0, found, ns), np.where(found >= 0, SOURCES.index("table"), source)
        return ns, source.astype(np.uint8)


def own_board_ns(
    graph: ComputationGraph, kind: DeviceKind, ns: np.ndarray, source: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """``ns`` and ``source`` with what traces of the board showed (``[ops]`` and ``[factors]`` of its device file): the
    time of an op that they hold, and a factor for the rest of its class. -1 stays."""
    calibration = calibration_of(kind)
    if not calibration.factors and not calibration.ops:
        return ns, source
    parsed = [parse_signature(text) for text in graph.signatures]
    seen = np.array([calibration.ops.get(op.key, -1.0) for op in parsed])[graph.op_signature]
    factors = calibration.factors
    scale = np.array([factors.get(name, factors.get(op_class(name), 1.0)) for name in graph.kinds])[graph.op_kind]
    found = np.where(seen >= 0, kind.launch_ns + seen, np.minimum(ns * scale, MAX_NS))
    source = np.where(ns < 0, source, np.where(seen >= 0, SOURCES.index("table"), SOURCES.index("fit")))
    return np.where(ns < 0, ns, np.maximum(1, np.ceil(found))).astype(np.int64), source


def calibrated_ns(
    graph: ComputationGraph, kind: DeviceKind, tf32: Iterable[str] = TF32_CLASSES
) -> tuple[np.ndarray, np.ndarray]:
    """``(ns, source)`` by the device file of ``kind``: int64 ``(n,)``, -1 where it is silent on a part of the op, and
    int64 into :data:`SOURCES` (``fit`` where any part is fitted).

    As in :func:`roofline_ns`, f32 ops of the classes ``tf32`` are tf32 on a kind that has it, and a dtype that the
    kind does not list computes as f32.
    """
    keys = np.stack([graph.op_signature, graph.op_bytes_read, graph.op_bytes_written], axis=1)
    rows, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    parts: list[KernelPart] = []
    owner: list[int] = []
    for row, (signature, read, written) in enumerate(rows.tolist()):
        name = graph.kinds[graph.op_kind[first[row]]]
        if name not in FREE_KINDS:
            found = parts_of(parse_signature(graph.signatures[signature]), op_class(name), read, written)
            as_tf32 = "tf32" in kind.peak_flops and op_class(name) in tf32
            parts += [_at_rate_of(kind, part, as_tf32) for part in found]
            owner += [row] * len(found)
    calibration = calibration_of(kind)
    part_ns, part_source = calibration.durations(parts, datasheet_of(kind), kind.launch_ns)
    ns, known = np.zeros(len(rows)), np.bincount(owner, minlength=len(rows)) > 0
    for row, value in zip(owner, part_ns, strict=True):  # in this order: floating-point sums depend on it
        ns[row] += value
    fitted = np.zeros(len(rows), bool)
    fitted[[row for row, text in zip(owner, part_source, strict=True) if text == "fit"]] = True
    known &= ~np.isnan(ns) & (ns <= MAX_NS)
    whole = np.where(known, np.maximum(1, np.ceil(np.where(known, ns, 1))), -1).astype(np.int64)
    source = np.where(fitted, SOURCES.index("fit"), SOURCES.index("table"))
    return whole[inverse.ravel()], source[inverse.ravel()]


def _at_rate_of(kind: DeviceKind, part: KernelPart, as_tf32: bool) -> KernelPart:
    """A product's dtype as the arithmetic that ``kind`` uses for it."""
    if part.name not in GEMM_LIKE:
        return part
    if part.dtype == "f32" and as_tf32:
        return replace(part, dtype="tf32")
    return part if part.dtype in kind.peak_flops else replace(part, dtype="f32")


def calibration_of(kind: DeviceKind) -> Calibration:
    """The device file of ``kind``, or what stands in for it (``auto``). Raises :class:`InvalidInput` if nothing can."""
    if kind.calibrated != "auto":
        return load_calibration(kind.calibrated)
    if not kind.watts:
        raise InvalidInput('calibrated = "auto" needs the board\'s watts', source=kind.name, field="watts")
    matrix = kind.peak_flops.get("bf16", kind.peak_flops.get("f16", 0.0))
    found = stand_in(Board(kind.watts, kind.capability, kind.vendor, matrix))
    if found is None:
        raise InvalidInput("no device file can stand in", source=kind.name, field="calibrated")
    return found


def datasheet_of(kind: DeviceKind) -> Datasheet:
    """The rates of ``kind`` that its device file's physics needs."""
    rates = tuple(sorted(kind.peak_flops.items()))
    return Datasheet(peak_flops(kind, "f32"), kind.memory_bandwidth, kind.multiprocessors, rates, kind.watts)


def roofline_ns(graph: ComputationGraph, kind: DeviceKind, tf32: Iterable[str] = TF32_CLASSES) -> np.ndarray:
    """int64 ``(n,)``: the roofline duration of every op on ``kind``; 1 for data that is there already."""
    names, classes = op_classes(graph)
    compute_share = np.array([_share(kind.compute_efficiency, name) for name in names])[classes]
    memory_share = np.array([_share(kind.memory_efficiency, name) for name in names])[classes]
    dtypes = [_compute_dtype(signature) for signature in graph.signatures]
    peak = np.array([peak_flops(kind, dtype) for dtype in dtypes])[graph.op_signature]
    if "tf32" in kind.peak_flops:
        single = np.array([dtype == "f32" for dtype in dtypes])[graph.op_signature]
        eligible = np.array([name in tf32 for name in names])[classes]
        peak = np.where(single & eligible, kind.peak_flops["tf32"], peak)
    seconds = np.maximum(
        graph.op_flops / (peak * compute_share),
        (graph.op_bytes_read + graph.op_bytes_written) / (kind.memory_bandwidth * memory_share),
    )
    if seconds.max(initial=0) * 1e9 + kind.launch_ns > MAX_NS:
        worst = graph.op_names[int(np.argmax(seconds))]
        raise InvalidInput(f"op {worst!r} would take {seconds.max():.3g} s on {kind.name}", source=graph.name)
    ns = kind.launch_ns + np.ceil(seconds * 1e9).astype(np.int64)
    free = np.array([name in FREE_KINDS for name in graph.kinds])
    ns = np.where(free[graph.op_kind], 1, np.maximum(ns, 1))
    unsupported = np.array([name in kind.unsupported for name in graph.kinds])
    return np.where(unsupported[graph.op_kind], -1, ns)


def op_classes(graph: ComputationGraph) -> tuple[list[str], np.ndarray]:
    """``(names, class)``: the cost class of every op, int64 ``(n,)`` into ``names``: :func:`op_class` of its kind, but
    convolutions with groups are ``depthwise`` and ``depthwise_backward``."""
    names = sorted({*map(op_class, graph.kinds), "conv", "conv_backward", "depthwise", "depthwise_backward"})
    number = {name: position for position, name in enumerate(names)}
    classes = np.array([number[op_class(name)] for name in graph.kinds])[graph.op_kind]
    grouped = np.array([re.search(r"groups=(?!1\b)\d", text) is not None for text in graph.signatures])
    for plain, other in (("conv", "depthwise"), ("conv_backward", "depthwise_backward")):
        classes[(classes == number[plain]) & grouped[graph.op_signature]] = number[other]
    return names, classes


def load_measured(path: str | os.PathLike) -> dict[str, dict[str, float]]:
    """Read measured costs: ``{device kind: {op signature: ns}}``.

    A ``.json`` file holds that object; any other file is CSV with the columns ``signature``, ``device_kind`` and
    ``ns``. Raises :class:`InvalidInput` naming the file and the line (or key) of a duration that is negative, NaN or
    not a number, and of a signature given twice.
    """
    text = read_text(path)
    rows = _json_rows(text, path) if str(path).endswith(".json") else _csv_rows(text, path)
    measured: dict[str, dict[str, float]] = {}
    for where, signature, kind, value in rows:
        table = measured.setdefault(kind, {})
        if signature in table:
            raise InvalidInput(f"{signature!r} on {kind!r} is given twice", source=path, field=where)
        _duration(value, path, where)
        table[signature] = value
    return measured


def save_measured(measured: Mapping[str, Mapping[str, float]], path: str | os.PathLike) -> None:
    """Write measured costs for :func:`load_measured`, as JSON or CSV by the end of the name."""
    if str(path).endswith(".json"):
        write_text(path, json.dumps(measured, indent=1, sort_keys=True))
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["signature", "device_kind", "ns"])
    for kind, table in sorted(measured.items()):
        writer.writerows([guarded(signature), guarded(kind), ns] for signature, ns in sorted(table.items()))
    write_text(path, text.getvalue())


def _csv_rows(text: str, path: str | os.PathLike) -> Iterable[tuple[str, str, str, float]]:
    try:
        reader = csv.DictReader(text.splitlines(), strict=True)
        missing = {"signature", "device_kind", "ns"} - set(reader.fieldnames or ())
        if missing:
            raise InvalidInput(f"column {min(missing)!r} is missing", source=path, field="line 1")
        for row in reader:
            where = f"line {reader.line_num}"
            if None in row or None in row.values():
                raise InvalidInput("wrong number of columns", source=path, field=where)
            try:
                yield where, unguarded(row["signature"]), unguarded(row["device_kind"]), float(row["ns"])
            except ValueError:
                raise InvalidInput(f"{row['ns']!r} is not a number", source=path, field=f"{where}: ns") from None
    except csv.Error as error:
        raise InvalidInput(f"not CSV ({error})", source=path) from None


def _json_rows(text: str, path: str | os.PathLike) -> Iterable[tuple[str, str, str, float]]:
    document = parse_json(text, path)
    if not isinstance(document, dict) or not all(isinstance(table, dict) for table in document.values()):
        raise InvalidInput("expected {device kind: {signature: ns}}", source=path)
    for kind, table in document.items():
        for signature, value in table.items():
            yield f"{kind}: {signature}", signature, kind, value


def _duration(value: object, source: object, where: str) -> int:
    """``value`` in whole ns, at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not 0 <= value <= MAX_NS:  # or NaN
        raise InvalidInput(f"{quoted(value)} is not a duration in ns", source=source, field=where)
    return max(1, round(float(value)))


def transfer_durations(tensor_bytes: np.ndarray, topology: Topology) -> tuple[np.ndarray, np.ndarray]:
    """``(transfer_ns, pair_class)`` of a :class:`CostTable`: latency + ceil(bytes * 1e9 / bandwidth), exactly,
    with the figures that each link has for the size.

    Raises :class:`InvalidInput` where a transfer would take over an hour.
    """
    classes: dict[tuple, int] = {}
    pair_class = np.full((topology.n_devices, topology.n_devices), -1, np.int32)
    for pair, path in topology.routes.items():
        key = _route_key([topology.channel_link[channel] for channel in path])
        pair_class[pair] = classes.setdefault(key, len(classes))
    sizes, inverse = np.unique(tensor_bytes, return_inverse=True)
    rows = []
    for key in classes:
        # Python integers: bytes * 1e9 does not fit 64 bits for large tensors.
        row = [_transfer_ns(key, int(size)) for size in sizes]
        if max(row, default=1) > MAX_NS:
            size = int(sizes[int(np.argmax(row))])
            raise InvalidInput(f"a tensor of {size} bytes would take {max(row) / 1e9:.3g} s", source=topology.name)
        rows.append(np.array(row, np.int64)[inverse])
    transfer_ns = np.stack(rows) if rows else np.zeros((0, len(tensor_bytes)), np.int64)
    return transfer_ns, pair_class


def _route_key(links: list[Link]) -> tuple:
    """What decides the duration of a transfer over ``links``: routes with equal keys are one class.

    ``(latency, rate, ranged links)``: the sum and the smallest of the links without ranges, and the others themselves.
    """
    plain = [link for link in links if not link.ranges]
    latency, rate = sum(link.latency_ns for link in plain), min((link.bytes_per_s for link in plain), default=0)
    return latency, rate, tuple(link.ranges for link in links if link.ranges)


def _transfer_ns(key: tuple, size: int) -> int:
    latency, rate, ranged = key
    for ranges in ranged:
        _, more, speed = [part for part in ranges if part[0] <= size][-1]
        latency, rate = latency + more, min(rate or speed, speed)
    return max(1, latency + -(-size * 10**9 // rate))


def peak_flops(kind: DeviceKind, dtype: str) -> float:
    """Peak rate of ``kind`` for ``dtype``; an unlisted dtype runs at the f32 rate (or the lowest listed)."""
    return kind.peak_flops.get(dtype, kind.peak_flops.get("f32", min(kind.peak_flops.values())))


def _compute_dtype(signature: str) -> str:
    """The dtype of the first floating-point tensor in a signature such as ``mm(f32[2,3],f32[3,4])->f32[2,4]``."""
    for part in signature.replace("(", ",").replace(">", ",").split(","):
        dtype, bracket, _ = part.partition("[")
        if bracket and dtype in ("f32", "f16", "bf16", "f64"):
            return dtype
        if bracket and dtype.startswith("f8"):
            return "f8"
    return "f32"


def _share(table: Mapping[str, float], name: str) -> float:
    return table.get(name, table.get("default", 1.0))
