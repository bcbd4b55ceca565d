"""Costs: what each op takes on each device kind, and each tensor on each route, in whole nanoseconds.

A measured table (op signature -> ns) comes first; where it is silent, a roofline: the launch overhead plus the larger
of FLOPs over the reachable compute rate and bytes over the reachable memory bandwidth (Williams et al. 2009), both
scaled by the efficiency of the op's class on that kind of device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from simdev.errors import InvalidInput
from simdev.graph import ComputationGraph
from simdev.topology import DeviceKind, Topology

FREE_KINDS = frozenset({"input", "parameter", "constant", "barrier"})  # data that is there already: no kernel runs

# Op class by kind, longest prefix first; everything else is elementwise (bound by memory traffic).
OP_CLASSES = {
    "convolution_backward": "conv_backward",
    "convolution": "conv",
    "mm": "gemm", "addmm": "gemm", "bmm": "gemm", "baddbmm": "gemm", "matmul": "gemm", "linear": "gemm",
    "scaled_dot_product": "attention", "_scaled_dot_product": "attention", "_flash_attention": "attention",
    "embedding": "embedding", "_embedding_bag": "embedding", "index": "embedding", "gather": "embedding",
    "scatter": "embedding", "native_batch_norm": "norm", "native_layer_norm": "norm", "batch_norm": "norm",
    "_softmax": "reduction", "_log_softmax": "reduction", "sum": "reduction", "mean": "reduction",
    "max_pool": "pool", "avg_pool": "pool", "_adaptive_avg_pool": "pool", "cat": "copy", "copy": "copy",
}  # fmt: skip


def op_class(kind: str) -> str:
    """The cost class of an op kind: ``gemm``, ``conv``, ``elementwise`` ..."""
    matches = [prefix for prefix in OP_CLASSES if kind == prefix or kind.startswith((f"{prefix}_", f"{prefix}."))]
    return OP_CLASSES[max(matches, key=len)] if matches else "elementwise"


@dataclass(frozen=True, eq=False)
class CostTable:
    """Costs of one graph on one topology. ``n`` ops, ``m`` tensors, ``D`` devices.

    * ``op_ns`` int64 ``(K, n)``: duration per device kind, at least 1; -1 where the op has no kernel.
    * ``device_row`` int32 ``(D,)``: the row of ``op_ns`` that serves a device.
    * ``transfer_ns`` int64 ``(C, m)``: duration of sending a tensor, per class of route, at least 1.
    * ``pair_class`` int32 ``(D, D)``: the row of ``transfer_ns`` for a source and a destination; -1: no route.
    * ``dispatch_ns`` int64 ``(n,)``: host time to issue the op (runtime ``eager``).
    """

    op_ns: np.ndarray
    device_row: np.ndarray
    transfer_ns: np.ndarray
    pair_class: np.ndarray
    dispatch_ns: np.ndarray

    def __post_init__(self):
        for name, dtype in (("op_ns", np.int64), ("device_row", np.int32), ("transfer_ns", np.int64),
                            ("pair_class", np.int32), ("dispatch_ns", np.int64)):  # fmt: skip
            array = np.asarray(getattr(self, name))
            if array.dtype.kind != "i":
                raise InvalidInput(f"expected whole nanoseconds, got dtype {array.dtype}", source="costs", field=name)
            array = np.ascontiguousarray(array, dtype).copy()
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if self.op_ns.min(initial=1) < -1 or np.any(self.op_ns == 0) or self.transfer_ns.min(initial=1) < 1:
            raise InvalidInput("negative or zero duration (zero must be raised to 1 ns)", source="costs")
        if self.dispatch_ns.min(initial=0) < 0:
            raise InvalidInput("negative", source="costs", field="dispatch_ns")

    @cached_property
    def device_op_ns(self) -> np.ndarray:
        """int64 ``(D, n)``: :attr:`op_ns` with a row per device."""
        return self.op_ns[self.device_row]

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex, 16 characters) of every number in the table."""
        digest = hashlib.sha256()
        for array in (self.op_ns, self.device_row, self.transfer_ns, self.pair_class, self.dispatch_ns):
            digest.update(repr(array.shape).encode() + array.tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class CostModel:
    """Turns a graph and a topology into a :class:`CostTable`.

    ``measured`` maps a device kind's name to ``{op signature: ns}``; a hit overrides the roofline.
    """

    measured: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def table(self, graph: ComputationGraph, topology: Topology) -> CostTable:
        """Cost every op on every device kind and every tensor on every route.

        Raises :class:`InvalidInput` for an op that no device supports, or a measured cost that is negative or NaN.
        """
        op_ns = np.stack([self.op_durations(graph, kind) for kind in topology.kinds])
        nowhere = np.flatnonzero((op_ns < 0).all(axis=0))
        if len(nowhere):
            name, kind = graph.op_names[nowhere[0]], graph.kinds[graph.op_kind[nowhere[0]]]
            raise InvalidInput(
                f"op {name!r} of kind {kind!r} is supported by no device of {topology.name}", source=graph.name
            )
        transfer_ns, pair_class = transfer_durations(graph.tensor_bytes, topology)
        host = topology.devices[topology.host].kind if topology.host >= 0 else topology.kinds[0]
        dispatch = np.full(graph.n_ops, host.dispatch_ns, np.int64)
        free = np.array([kind in FREE_KINDS for kind in graph.kinds])
        dispatch[free[graph.op_kind]] = 0
        return CostTable(op_ns, topology.device_kind, transfer_ns, pair_class, dispatch)

    def op_durations(self, graph: ComputationGraph, kind: DeviceKind) -> np.ndarray:
        """int64 ``(n,)``: duration of every op on a device of ``kind``, -1 where unsupported."""
        ns = roofline_ns(graph, kind)
        table = self.measured.get(kind.name)
        if table:
            hits = np.full(len(graph.signatures), -1, np.int64)
            for number, signature in enumerate(graph.signatures):
                if signature in table:
                    value = table[signature]
                    if not value >= 0:  # also catches NaN
                        raise InvalidInput(
                            f"cost {value!r} of {signature!r} is not a duration",
                            source="measured costs",
                            field=kind.name,
                        )
                    hits[number] = max(1, round(value))
            found = hits[graph.op_signature]
            ns = np.where(found >= 0, found, ns)
        return ns


def roofline_ns(graph: ComputationGraph, kind: DeviceKind) -> np.ndarray:
    """int64 ``(n,)``: the roofline duration of every op on ``kind``; 1 for data that is there already."""
    per_kind = [op_class(name) for name in graph.kinds]
    compute_share = np.array([_share(kind.compute_efficiency, name) for name in per_kind])
    memory_share = np.array([_share(kind.memory_efficiency, name) for name in per_kind])
    peak = np.array([peak_flops(kind, _compute_dtype(signature)) for signature in graph.signatures])
    seconds = np.maximum(
        graph.op_flops / (peak[graph.op_signature] * compute_share[graph.op_kind]),
        (graph.op_bytes_read + graph.op_bytes_written) / (kind.memory_bandwidth * memory_share[graph.op_kind]),
    )
    ns = kind.launch_ns + np.ceil(seconds * 1e9).astype(np.int64)
    free = np.array([name in FREE_KINDS for name in graph.kinds])
    ns = np.where(free[graph.op_kind], 1, np.maximum(ns, 1))
    unsupported = np.array([name in kind.unsupported for name in graph.kinds])
    return np.where(unsupported[graph.op_kind], -1, ns)


def transfer_durations(tensor_bytes: np.ndarray, topology: Topology) -> tuple[np.ndarray, np.ndarray]:
    """``(transfer_ns, pair_class)`` of a :class:`CostTable`: latency + ceil(bytes * 1e9 / bandwidth), exactly."""
    latency, rate = topology.pair_latency_ns, topology.pair_bytes_per_s
    classes: dict[tuple[int, int], int] = {}
    pair_class = np.full(latency.shape, -1, np.int32)
    for pair, _ in topology.routes.items():
        key = int(latency[pair]), int(rate[pair])
        pair_class[pair] = classes.setdefault(key, len(classes))
    sizes, inverse = np.unique(tensor_bytes, return_inverse=True)
    # Python integers: bytes * 1e9 does not fit 64 bits for large tensors.
    rows = [
        np.array([max(1, delay + -(-int(size) * 10**9 // speed)) for size in sizes], np.int64)[inverse]
        for delay, speed in classes
    ]
    transfer_ns = np.stack(rows) if rows else np.zeros((0, len(tensor_bytes)), np.int64)
    return transfer_ns, pair_class


def peak_flops(kind: DeviceKind, dtype: str) -> float:
    """Peak rate of ``kind`` for ``dtype``; an unlisted dtype runs at the f32 rate (or the lowest listed)."""
    return kind.peak_flops.get(dtype, kind.peak_flops.get("f32", min(kind.peak_flops.values())))


def _compute_dtype(signature: str) -> str:
    """The dtype of the first floating-point tensor in a signature such as ``mm(f32[2,3],f32[3,4])->f32[2,4]``."""
    for part in signature.replace("(", ",").replace(">", ",").split(","):
        dtype, bracket, _ = part.partition("[")
        if bracket and dtype in ("f32", "f16", "bf16", "f64"):
            return dtype
    return "f32"


def _share(table: Mapping[str, float], name: str) -> float:
    return table.get(name, table.get("default", 1.0))
