"""The computation graph: ops in a topological order, tensors with one producer each, and who consumes them.

:class:`ComputationGraph` is frozen: read-only arrays, checked once when built. :class:`GraphBuilder` is the only
mutable form; every importer and the capture end in ``GraphBuilder.build()``.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import numpy as np

from simdev.errors import InvalidInput, quoted

PHASES = ("forward", "backward", "update")
MAX_OPS = 1 << 24  # an op number and a time share one 64-bit key in the engines
MAX_BYTES = 1 << 50


@dataclass(frozen=True, eq=False)
class ComputationGraph:
    """One training (or inference) step as a directed acyclic graph.

    ``n`` ops are numbered in a topological order; ``m`` tensors are numbered by producer; a tensor with ``k``
    consumers is one tensor, not ``k`` edges. Views and aliases are not ops. All arrays are read-only.

    Ops, each of length ``n``:

    * ``op_names`` str; ``op_kind`` int32 into ``kinds``; ``op_signature`` int32 into ``signatures`` (kind with the
      shapes and dtypes of inputs and outputs: the key of measured cost tables); ``op_layer`` int32 into ``layers``
      (module path in the source model); ``op_phase`` int8 into :data:`PHASES`.
    * ``op_flops``, ``op_bytes_read``, ``op_bytes_written``, ``op_persistent_bytes`` (parameters, optimiser state:
      live on the op's device for the whole step), ``op_workspace_bytes`` (live while the op runs): int64.
    * ``op_group`` int32: ops with equal non-negative numbers are colocated; -1 means free.

    Tensors, each of length ``m``:

    * ``tensor_producer`` int32, non-decreasing; ``tensor_bytes`` int64 (0 is a control edge).
    * ``tensor_persistent`` bool: the tensor lives inside its producer's persistent bytes (a parameter read), so it
      takes no further memory at home. ``tensor_result`` bool: the tensor leaves the step and stays allocated.
    * ``consumer_ptr`` int32 ``(m + 1,)`` and ``consumers`` int32: the ops that read tensor ``t`` are
      ``consumers[consumer_ptr[t]:consumer_ptr[t + 1]]``, increasing, each greater than the producer.
    """

    name: str
    kinds: tuple[str, ...]
    signatures: tuple[str, ...]
    layers: tuple[str, ...]
    op_names: tuple[str, ...]
    op_kind: np.ndarray
    op_signature: np.ndarray
    op_layer: np.ndarray
    op_phase: np.ndarray
    op_flops: np.ndarray
    op_bytes_read: np.ndarray
    op_bytes_written: np.ndarray
    op_persistent_bytes: np.ndarray
    op_workspace_bytes: np.ndarray
    op_group: np.ndarray
    tensor_producer: np.ndarray
    tensor_bytes: np.ndarray
    tensor_persistent: np.ndarray
    tensor_result: np.ndarray
    consumer_ptr: np.ndarray
    consumers: np.ndarray
    meta: dict = field(default_factory=dict)

    OP_COLUMNS = {
        "op_kind": np.int32,
        "op_signature": np.int32,
        "op_layer": np.int32,
        "op_phase": np.int8,
        "op_flops": np.int64,
        "op_bytes_read": np.int64,
        "op_bytes_written": np.int64,
        "op_persistent_bytes": np.int64,
        "op_workspace_bytes": np.int64,
        "op_group": np.int32,
    }
    TENSOR_COLUMNS = {
        "tensor_producer": np.int32,
        "tensor_bytes": np.int64,
        "tensor_persistent": np.bool_,
        "tensor_result": np.bool_,
    }
    EDGE_COLUMNS = {"consumer_ptr": np.int32, "consumers": np.int32}
    STRINGS = ("kinds", "signatures", "layers", "op_names")

    def __post_init__(self) -> None:
        for name in self.STRINGS:
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, dtype in {**self.OP_COLUMNS, **self.TENSOR_COLUMNS, **self.EDGE_COLUMNS}.items():
            object.__setattr__(self, name, _column(getattr(self, name), dtype, self.name, name))
        self._check()

    @property
    def n_ops(self) -> int:
        return len(self.op_kind)

    @property
    def n_tensors(self) -> int:
        return len(self.tensor_bytes)

    @property
    def n_edges(self) -> int:
        """Tensor-to-consumer pairs."""
        return len(self.consumers)

    @cached_property
    def output_ptr(self) -> np.ndarray:
        """int32 ``(n + 1,)``: op ``v`` produces the tensors ``output_ptr[v]:output_ptr[v + 1]``."""
        return _frozen(_places(self.tensor_producer, self.n_ops))

    @cached_property
    def _input_csr(self) -> tuple[np.ndarray, np.ndarray]:
        tensor = np.repeat(np.arange(self.n_tensors, dtype=np.int32), np.diff(self.consumer_ptr))
        order = np.argsort(self.consumers, kind="stable")
        return _frozen(_places(self.consumers, self.n_ops)), _frozen(tensor[order])

    @property
    def input_ptr(self) -> np.ndarray:
        """int32 ``(n + 1,)``: op ``v`` reads the tensors ``inputs[input_ptr[v]:input_ptr[v + 1]]``, increasing."""
        return self._input_csr[0]

    @property
    def inputs(self) -> np.ndarray:
        """int32 ``(n_edges,)``: see :attr:`input_ptr`."""
        return self._input_csr[1]

    @cached_property
    def edge_tensor(self) -> np.ndarray:
        """int32 ``(n_edges,)``: the tensor of each entry of :attr:`consumers`."""
        return _frozen(np.repeat(np.arange(self.n_tensors, dtype=np.int32), np.diff(self.consumer_ptr)))

    @cached_property
    def edge_source(self) -> np.ndarray:
        """int32 ``(n_edges,)``: the producing op of each entry of :attr:`consumers`."""
        return _frozen(self.tensor_producer[self.edge_tensor])

    @cached_property
    def unit_of_op(self) -> np.ndarray:
        """int32 ``(n,)``: number of the placement unit (a colocation group, or an op alone), numbered by first op."""
        if self.op_group.max(initial=-1) < 0:
            return _frozen(np.arange(self.n_ops, dtype=np.int32))
        label = np.where(self.op_group >= 0, self.op_group, self.op_group.max(initial=-1) + 1 + np.arange(self.n_ops))
        _, first, inverse = np.unique(label, return_index=True, return_inverse=True)
        rank = np.empty(len(first), np.int32)
        rank[np.argsort(first, kind="stable")] = np.arange(len(first), dtype=np.int32)
        return _frozen(rank[inverse].astype(np.int32))

    @property
    def n_units(self) -> int:
        return int(self.unit_of_op.max(initial=-1)) + 1

    @cached_property
    def updated_in_backward(self) -> np.ndarray:
        """bool ``(n,)``: the ops of each unit whose parameters its backward ops change: a forward op of it holds
        persistent bytes, and it has a backward op, but no update. A fused optimiser does that, such as that of the
        large tables of DLRM."""
        forward, backward, update = (self.op_phase == phase for phase in range(len(PHASES)))
        held, changed, updated = (
            np.bincount(self.unit_of_op, which, self.n_units) > 0
            for which in (forward & (self.op_persistent_bytes > 0), backward, update)
        )
        return _frozen((held & changed & ~updated)[self.unit_of_op])

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex, 16 characters) of everything but the graph's name and ``meta``."""
        digest = hashlib.sha256()
        for name in self.STRINGS:
            digest.update(json.dumps(getattr(self, name)).encode())
        for name in {**self.OP_COLUMNS, **self.TENSOR_COLUMNS, **self.EDGE_COLUMNS}:
            digest.update(np.ascontiguousarray(getattr(self, name)).tobytes())
        return digest.hexdigest()[:16]

    def to_arrays(self) -> dict[str, np.ndarray]:
        """The graph as plain writable arrays, in the layout of graph-learning libraries.

        ``edge_index`` int64 ``(2, n_edges)``: producing op, reading op, for each read of a tensor (a pair that shares
        two tensors is there twice); ``edge_bytes`` int64 and ``edge_tensor`` int64 ``(n_edges,)``; ``features`` float32
        ``(n, 5)``: log2(1 + v) of FLOPs, bytes read, bytes written, persistent and workspace bytes; ``kind``, ``phase``
        and ``unit`` (the placement unit) int64 ``(n,)``.
        """
        columns = (
            self.op_flops,
            self.op_bytes_read,
            self.op_bytes_written,
            self.op_persistent_bytes,
            self.op_workspace_bytes,
        )
        return {
            "edge_index": np.stack([self.edge_source, self.consumers]).astype(np.int64),
            "edge_bytes": self.tensor_bytes[self.edge_tensor],
            "edge_tensor": self.edge_tensor.astype(np.int64),
            "features": np.log2(1 + np.stack(columns, axis=1).astype(np.float64)).astype(np.float32),
            "kind": self.op_kind.astype(np.int64),
            "phase": self.op_phase.astype(np.int64),
            "unit": self.unit_of_op.astype(np.int64),
        }

    def __repr__(self) -> str:
        return f"<ComputationGraph {self.name}: {self.n_ops} ops, {self.n_tensors} tensors, {self.n_edges} edges>"

    def _fail(self, message: str, field: str) -> NoReturn:
        raise InvalidInput(message, source=self.name, field=field)

    def _check(self) -> None:
        n, m = len(self.op_kind), len(self.tensor_bytes)
        if n == 0:
            self._fail("the graph has no ops", "ops")
        if n > MAX_OPS:
            self._fail(f"{n} ops; at most {MAX_OPS} are supported", "ops")
        for name in self.OP_COLUMNS:
            if len(getattr(self, name)) != n:
                self._fail(f"length {len(getattr(self, name))}, expected {n}", name)
        if len(self.op_names) != n:
            self._fail(f"length {len(self.op_names)}, expected {n}", "op_names")
        for name in self.TENSOR_COLUMNS:
            if len(getattr(self, name)) != m:
                self._fail(f"length {len(getattr(self, name))}, expected {m}", name)
        for column, table in (("op_kind", "kinds"), ("op_signature", "signatures"), ("op_layer", "layers")):
            values = getattr(self, column)
            if values.min() < 0 or values.max() >= len(getattr(self, table)):
                self._fail(f"index out of range of {table}", column)
        if self.op_phase.min() < 0 or self.op_phase.max() >= len(PHASES):
            self._fail("unknown phase", "op_phase")
        for column in ("op_flops", "op_bytes_read", "op_bytes_written", "op_persistent_bytes", "op_workspace_bytes"):
            values = getattr(self, column)
            if values.min() < 0:
                worst = int(np.argmin(values))
                self._fail(f"negative value at op {self.op_names[worst]!r}", column)
            if column != "op_flops" and values.max() > MAX_BYTES:
                self._fail(f"larger than {MAX_BYTES} bytes at op {self.op_names[int(np.argmax(values))]!r}", column)
        if m and (self.tensor_bytes.min() < 0 or self.tensor_bytes.max() > MAX_BYTES):
            self._fail("negative or too large", "tensor_bytes")
        if len(self.consumer_ptr) != m + 1 or self.consumer_ptr[0] != 0 or self.consumer_ptr[-1] != len(self.consumers):
            self._fail("does not match the tensors and consumers", "consumer_ptr")
        if m == 0:
            return
        if np.any(np.diff(self.consumer_ptr) < 0):
            self._fail("decreases", "consumer_ptr")
        if np.any(np.diff(self.tensor_producer) < 0):
            self._fail("tensors are not numbered by producer", "tensor_producer")
        if self.tensor_producer[0] < 0 or self.tensor_producer[-1] >= n:
            self._fail("a tensor's producer is not an op of the graph (dangling tensor)", "tensor_producer")
        if len(self.consumers):
            if self.consumers.min() < 0 or self.consumers.max() >= n:
                self._fail("a tensor's consumer is not an op of the graph (dangling tensor)", "consumers")
            if np.any(self.consumers <= self.edge_source):
                self._fail("an op reads a tensor made at or after it: cyclic or not in topological order", "consumers")
            same = self.edge_tensor[1:] == self.edge_tensor[:-1]
            if np.any(same & (np.diff(self.consumers) <= 0)):
                self._fail("the consumers of a tensor are not strictly increasing", "consumers")


class GraphBuilder:
    """Collects ops and tensors in any order, then numbers, checks and freezes them.

    >>> b = GraphBuilder("two ops")
    >>> x = b.op("x", "input", outputs=[4096])
    >>> y = b.op("y", "relu", inputs=b.outputs(x), flops=1024, outputs=[4096])
    >>> b.build().n_ops
    2
    """

    def __init__(self, name: str, meta: dict | None = None):
        self.name, self.meta = name, dict(meta or {})
        self._ops: list[dict] = []
        self._tensors: list[dict] = []

    def op(
        self,
        name: str,
        kind: str,
        *,
        inputs: Iterable[int] = (),
        outputs: Iterable[int] = (),
        flops: int = 0,
        bytes_read: int | None = None,
        bytes_written: int | None = None,
        persistent_bytes: int = 0,
        workspace_bytes: int = 0,
        phase: str = "forward",
        layer: str = "",
        signature: str | None = None,
        group: Hashable | None = None,
    ) -> int:
        """Add an op; return its handle.

        ``inputs`` are tensor handles, ``outputs`` the sizes in bytes of the tensors it makes (see :meth:`outputs`).
        ``bytes_read`` / ``bytes_written`` default to the sums over inputs / outputs; ``signature`` to ``kind``.
        Ops with an equal ``group`` key are colocated.
        """
        if phase not in PHASES:
            raise InvalidInput(f"unknown phase {phase!r}", source=self.name, field=f"op {name!r}")
        handle = len(self._ops)
        record = dict(
            name=str(name),
            kind=str(kind),
            flops=flops,
            read=bytes_read,
            written=bytes_written,
            layer=str(layer),
            persistent=persistent_bytes,
            workspace=workspace_bytes,
            phase=phase,
            group=group,
            signature=str(kind if signature is None else signature),
            tensors=[],
            inputs=[],
        )
        self._ops.append(record)
        for size in outputs:
            self.tensor(handle, size)
        for tensor in inputs:
            self.connect(tensor, handle)
        return handle

    def tensor(self, producer: int, size: int, *, persistent: bool = False, result: bool = False) -> int:
        """Add a tensor of ``size`` bytes made by op ``producer``; return its handle."""
        handle = len(self._tensors)
        self._tensors.append(dict(producer=producer, bytes=size, persistent=persistent, result=result, consumers=set()))
        self._ops[producer]["tensors"].append(handle)
        return handle

    def outputs(self, op: int) -> list[int]:
        """Tensor handles that op ``op`` makes, in order."""
        return list(self._ops[op]["tensors"])

    def connect(self, tensor: int, op: int) -> None:
        """Let op ``op`` read tensor ``tensor``."""
        if not 0 <= tensor < len(self._tensors):
            raise InvalidInput(
                f"reads tensor {tensor}, which does not exist (dangling tensor)",
                source=self.name,
                field=f"op {self._ops[op]['name']!r}",
            )
        if op not in self._tensors[tensor]["consumers"]:
            self._tensors[tensor]["consumers"].add(op)
            self._ops[op]["inputs"].append(tensor)

    def control(self, before: int, after: int) -> None:
        """Let op ``after`` wait for op ``before`` without data: a zero-byte tensor, shared by all waiters."""
        for tensor in self._ops[before]["tensors"]:
            if self._tensors[tensor]["bytes"] == 0 and not self._tensors[tensor]["persistent"]:
                break
        else:
            tensor = self.tensor(before, 0)
        self.connect(tensor, after)

    def build(self) -> ComputationGraph:
        """Number the ops topologically (in the given order, if that is topological), check and freeze the graph.

        Raises :class:`InvalidInput` naming the ops of a cycle, or the field that is negative or not a whole number.
        """
        order = self._order()
        rank = {op: i for i, op in enumerate(order)}
        kinds, signatures, layers, groups = _Interner(), _Interner(), _Interner(), _Interner()
        columns: dict[str, Any] = {name: [] for name in ComputationGraph.OP_COLUMNS}
        tensor_rows: dict[str, Any] = {name: [] for name in ComputationGraph.TENSOR_COLUMNS}
        ptr: Any = [0]  # the graph makes arrays and tuples of these lists
        consumers: Any = []
        for op in order:
            record = self._ops[op]
            sizes_in = sum(self._whole(self._tensors[t]["bytes"], record, "bytes") for t in record["inputs"])
            sizes_out = sum(self._whole(self._tensors[t]["bytes"], record, "bytes") for t in record["tensors"])
            columns["op_kind"].append(kinds[record["kind"]])
            columns["op_signature"].append(signatures[record["signature"]])
            columns["op_layer"].append(layers[record["layer"]])
            columns["op_phase"].append(PHASES.index(record["phase"]))
            columns["op_flops"].append(self._whole(record["flops"], record, "flops"))
            read = sizes_in if record["read"] is None else record["read"]
            written = sizes_out if record["written"] is None else record["written"]
            columns["op_bytes_read"].append(self._whole(read, record, "bytes_read"))
            columns["op_bytes_written"].append(self._whole(written, record, "bytes_written"))
            columns["op_persistent_bytes"].append(self._whole(record["persistent"], record, "persistent_bytes"))
            columns["op_workspace_bytes"].append(self._whole(record["workspace"], record, "workspace_bytes"))
            columns["op_group"].append(-1 if record["group"] is None else groups[record["group"]])
            for t in record["tensors"]:
                tensor = self._tensors[t]
                tensor_rows["tensor_producer"].append(rank[op])
                tensor_rows["tensor_bytes"].append(tensor["bytes"])
                tensor_rows["tensor_persistent"].append(tensor["persistent"])
                tensor_rows["tensor_result"].append(tensor["result"])
                consumers.extend(sorted(rank[c] for c in tensor["consumers"]))
                ptr.append(len(consumers))
        return ComputationGraph(
            name=self.name,
            kinds=tuple(kinds.items),
            signatures=tuple(signatures.items),
            layers=tuple(layers.items),
            op_names=tuple(self._ops[op]["name"] for op in order),
            **columns,
            **tensor_rows,
            consumer_ptr=ptr,
            consumers=consumers,
            meta=self.meta,
        )

    def _whole(self, value: Any, record: dict, what: str) -> int:
        where = f"op {record['name']!r}: {what}"
        try:
            whole = int(value)
        except (TypeError, ValueError, OverflowError):
            whole = None
        if whole is None or isinstance(value, (str, bool)) or whole != value:
            raise InvalidInput(f"{quoted(value)} is not a whole number", source=self.name, field=where)
        if not 0 <= whole < 2**63:
            raise InvalidInput(f"{quoted(value)} is out of range", source=self.name, field=where)
        return whole

    def _order(self) -> list[int]:
        """Kahn's algorithm, lowest handle first."""
        waiting = [len({self._tensors[t]["producer"] for t in record["inputs"]}) for record in self._ops]
        ready = [op for op, count in enumerate(waiting) if count == 0]
        heapq.heapify(ready)
        order = []
        while ready:
            op = heapq.heappop(ready)
            order.append(op)
            for successor in {c for t in self._ops[op]["tensors"] for c in self._tensors[t]["consumers"]}:
                waiting[successor] -= 1
                if waiting[successor] == 0:
                    heapq.heappush(ready, successor)
        if len(order) < len(self._ops):
            cycle = self._cycle({op for op, count in enumerate(waiting) if count > 0})
            raise InvalidInput(f"the graph is cyclic: {' -> '.join(cycle)}", source=self.name, field="ops")
        return order

    def _cycle(self, stuck: set[int]) -> list[str]:
        """The names along a cycle among the ops that never became ready: each of them reads another one."""
        import networkx

        makers = {op: sorted({self._tensors[t]["producer"] for t in self._ops[op]["inputs"]} & stuck) for op in stuck}
        loop = [op for op, _ in networkx.find_cycle(networkx.DiGraph(makers), min(stuck))][::-1]
        names = [self._ops[v]["name"] for v in [*loop, loop[0]]]
        return names if len(names) <= 8 else [*names[:4], "...", *names[-3:]]


class _Interner:
    def __init__(self) -> None:
        self.items: list = []
        self._index: dict = {}

    def __getitem__(self, item: Hashable) -> int:
        if item not in self._index:
            self._index[item] = len(self.items)
            self.items.append(item)
        return self._index[item]


def _column(values: Any, dtype: type, source: str, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(dtype).reshape(-1)
    if array.ndim != 1:
        raise InvalidInput(f"expected one dimension, got {array.ndim}", source=source, field=name)
    if array.dtype.kind not in "iub" or (np.dtype(dtype).kind != "b" and array.dtype.kind == "b"):
        raise InvalidInput(f"expected whole numbers, got dtype {array.dtype}", source=source, field=name)
    if np.dtype(dtype).kind == "i" and array.size:
        info = np.iinfo(dtype)
        if int(array.min()) < info.min or int(array.max()) > info.max:
            raise InvalidInput(f"value out of range of {np.dtype(dtype)}", source=source, field=name)
    return _frozen(np.array(array, dtype=dtype))


def _places(owner: np.ndarray, n: int) -> np.ndarray:
    """int32 ``(n + 1,)``: where the entries of each of ``n`` owners begin when they are sorted by owner."""
    ptr = np.zeros(n + 1, np.int32)
    np.cumsum(np.bincount(owner, minlength=n), out=ptr[1:])
    return ptr


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
