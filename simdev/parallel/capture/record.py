"""Records what one rank of a parallel program executes on an accelerator: kernels, collectives, streams and their
waits.

The program runs once on fake tensors and PyTorch's fake process group. :class:`RankRecorder` sees every ATen op and
every collective; the streams and events of ``torch.cpu``, which do nothing of their own, are replaced by ones that
remember who waits for whom. FSDP's prefetching and its order of streams are therefore recorded as PyTorch issues them.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.autograd.profiler import record_function
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass_type,
)

from simdev.graphs.capture.trace import (
    DTYPES,
    EMPTIES,
    GATHERS,
    OVERWRITES,
    SCATTERS,
    describe,
    flops,
    signature,
    storage_bytes,
    tensors_in,
    touched_bytes,
    written_arguments,
)
from simdev.parallel.capture import remembered
from simdev.parallel.capture.remembered import Result

COMPUTE = 0  # the number of the default stream
# c10d op -> (collective, position of the argument whose bytes count, position of the process group)
COLLECTIVES = {
    "all_reduce": "all_reduce", "all_reduce_": "all_reduce", "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all", "broadcast": "broadcast", "broadcast_": "broadcast",
    "allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all", "allgather_": "all_gather", "reduce_scatter_": "reduce_scatter",
    "allreduce_coalesced_": "all_reduce", "send": "send", "recv_": "recv",
    "all_gather_into_tensor_coalesced": "all_gather", "reduce_scatter_tensor_coalesced": "reduce_scatter",
}  # fmt: skip
DEVICE = torch.ops.prim.device.default
# Views, which are every other op. A fake tensor's mode takes many times as long as they do to look one up in its cache.
VIEWS = frozenset(
    {
        torch.ops.aten.view.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.t.default,
        torch.ops.aten.alias.default,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.transpose.int,
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.as_strided.default,
        torch.ops.aten.unsqueeze.default,
        torch.ops.aten.expand.default,
        torch.ops.aten.view_as_complex.default,
        torch.ops.aten.view_as_real.default,
        torch.ops.aten.squeeze.dim,
    }
)
SUBCLASSES = (DTensor, AsyncCollectiveTensor)


@cache
def is_wrapper(kind: type) -> bool:
    """Whether tensors of this class turn each op into ops on the tensors that they hold: DTensor, and those of other
    packages, such as torchao's tensors of 8 bits with a scale."""
    return kind in SUBCLASSES or is_traceable_wrapper_subclass_type(kind)


NO_KERNEL = frozenset({"detach", "lift_fresh", "_unsafe_view"})
QUESTIONS = frozenset({"_local_scalar_dense", "is_same_size", "equal", "item"})  # asked of the host, not of a device


@dataclass(slots=True)
class RecordedCall:
    """One recorded kernel or collective. ``waits`` are positions of earlier entries on other streams."""

    stream: int
    kind: str
    signature: str
    flops: int
    read: int
    written: int
    waits: tuple[int, ...]
    ranks: tuple[int, ...] = ()  # of a collective
    bytes: int = 0  # of a collective: the largest of its buffers on one rank
    live_bytes: int = 0  # bytes of all tensors alive once it has been issued
    recorded_grad: bool = False  # issued by code that autograd records: a forward pass, also one that is recomputed
    in_backward: bool = False  # issued by a backward pass


@dataclass
class RecordedEvent:
    """The entries that whoever waits for the event waits for."""

    marks: frozenset[int] = frozenset()

    def record(self, stream=None):
        where = stream or torch.cpu.current_stream()
        self.marks = where.state() if isinstance(where, RecordedStream) else frozenset()
        return self

    def wait(self, stream=None):
        where = stream or torch.cpu.current_stream()
        where.wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


@dataclass(eq=False)
class RecordedStream:
    """A stream: the last entry issued to it, and what the next one has to wait for."""

    number: int
    recorder: RankRecorder
    last: int = -1
    pending: set[int] = field(default_factory=set)

    def state(self) -> frozenset[int]:
        return frozenset(self.pending | ({self.last} if self.last >= 0 else set()))

    def wait_stream(self, other: RecordedStream) -> None:
        if other is not self:
            self.pending |= other.state()

    def wait_event(self, event: RecordedEvent | None) -> None:
        if event is not None:
            self.pending |= event.marks - {self.last}

    def record_event(self, event: RecordedEvent | None = None) -> RecordedEvent:
        return (event or RecordedEvent()).record(self)

    def synchronize(self) -> None:
        pass

    @property
    def device(self):
        return torch.device("cpu")


class HostAnswers(TorchDispatchMode):
    """Answers the host where it asks fake tensors for a value, such as the number of steps of an optimizer."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(map(is_wrapper, types)):
            return NotImplemented
        if func._opname == "_local_scalar_dense":
            return 1.0 if args[0].is_floating_point() else 1
        return remembered.run(func, args, kwargs or {})[0]


class RankRecorder(TorchDispatchMode):
    """Records while active; :attr:`entries` is the result, in the order in which the host issues them. ``rows``
    answers the host where it asks for a whole number; None if tensors are real and have values."""

    def __init__(self, rows: int | None = 1):
        super().__init__()
        self.rows = rows
        self.entries: list[RecordedCall] = []
        self.live_bytes = 0
        self.sends = 0  # to other ranks
        self.paused = False  # while DTensor asks for the shapes of results
        self._streams: list[RecordedStream] = []
        self._comm: dict[tuple[int, ...], RecordedStream] = {}
        self._ready: dict[int, int] = {}  # storage of a collective's output -> its entry
        self._sizes: dict[int, list] = {}
        self._patches = contextlib.ExitStack()
        self.compute = self.stream()

    def stream(self, *_, **__) -> RecordedStream:
        """A new stream."""
        self._streams.append(RecordedStream(len(self._streams), self))
        return self._streams[-1]

    def __enter__(self):
        current = [self.compute]

        @contextlib.contextmanager
        def use(stream):
            if stream is None:
                yield
                return
            current.append(stream)
            try:
                yield
            finally:
                current.pop()

        for name, value in (
            ("Stream", self.stream),
            ("Event", lambda *_, **__: RecordedEvent()),
            ("current_stream", lambda *_: current[-1]),
            ("stream", use),
        ):
            self._patch(torch.cpu, name, value)
        # FSDP asks here for the stream that clears a gather which nobody waited for.
        self._patch(torch.accelerator, "current_stream", lambda *_: current[-1])
        resize = torch.UntypedStorage.resize_

        def watched(storage, size):
            answer = resize(storage, size)
            self._see(storage)
            return answer

        self._patch(torch.UntypedStorage, "resize_", watched)
        propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def not_recorded(propagator, schema):
            before, self.paused = self.paused, True
            try:
                return propagate(propagator, schema)
            finally:
                self.paused = before

        self._patch(ShardingPropagator, "_propagate_tensor_meta_non_cached", not_recorded)
        for module, launcher in (("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner")):
            if module in sys.modules:
                self._patch(getattr(sys.modules[module], launcher), "run", self._launch())
        # FSDP's labels for a profiler are ops, and as slow as a kernel.
        self._patch(record_function, "__enter__", lambda label: label)
        self._patch(record_function, "__exit__", lambda *_: None)
        # A profiler, such as that of a Dask worker, holds the frames that it samples from another thread, and with them
        # tensors whose function has ended.
        here = sys._getframe()
        self._patch(sys, "_current_frames", lambda: {thread.ident: here for thread in threading.enumerate()})
        if gc.isenabled():  # when it frees reference cycles depends on everything else in the process
            gc.collect()
            gc.disable()
            self._patches.callback(gc.enable)
        return super().__enter__()

    def __exit__(self, *error):
        self._patches.close()
        return super().__exit__(*error)

    def _patch(self, owner, name: str, value) -> None:
        old = getattr(owner, name)
        setattr(owner, name, value)
        self._patches.callback(setattr, owner, name, old)

    # Memory ----------------------------------------------------------------------------------------------------

    def _see(self, storage) -> None:
        """Count the bytes of a storage until it is freed or resized."""
        key, size = storage._cdata, int(storage.nbytes())
        known = self._sizes.get(key)
        if known is None:
            self._sizes[key] = known = [0, weakref.ref(storage, lambda _: self._forget(key))]
        self.live_bytes += size - known[0]
        known[0] = size

    def _forget(self, key: int) -> None:
        known = self._sizes.pop(key, None)
        self._ready.pop(key, None)  # the address may serve another storage
        if known is not None:
            self.live_bytes -= known[0]

    def see(self, tensor) -> None:
        """Count a tensor that was there before the recording."""
        self._see(tensor.untyped_storage())

    # Ops -------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE and type(args[0]) is FakeTensor:  # every second call: PyTorch asks where a tensor lies
            return args[0].fake_device
        if func in VIEWS and type(args[0]) is FakeTensor and args[0].constant is None and not kwargs:
            return _view(func, *args)
        if self.paused:
            return remembered.run(func, args, kwargs or {})[0]
        if any(map(is_wrapper, types)):
            return NotImplemented  # let the subclass turn the op into ops on local tensors, which come here again
        kwargs = kwargs or {}
        name = func._opname
        if (
            name == "_local_scalar_dense" and self.rows is not None
        ):  # a value that only the host reads: a loss scale, a norm to clip by
            return 1.0 if args[0].is_floating_point() else self.rows
        if name in ("wait_tensor", "_wrap_tensor_autograd"):
            self._wait_for(torch.cpu.current_stream(), tensors_in(args[0]))
            if self.rows is None:
                return func(*args, **kwargs)
            if type(args[0]) is FakeTensor:
                return _view(torch.ops.aten.alias.default, args[0])
            return torch.ops.aten.alias.default(args[0])  # the tensor itself; its fake result would be another one
        out, result = remembered.run(func, args, kwargs)
        if func.namespace in ("_c10d_functional", "c10d"):
            self._communicate(func, name, args, kwargs, out)
        elif func.namespace in ("aten", "fsdp", "prims") and name not in QUESTIONS:
            self._kernel(func, name, args, kwargs, out, result)
        elif func.namespace not in ("prim", "profiler", "aten", "inductor"):
            self._kernel(func, name, args, kwargs, out)
        return out

    def _kernel(self, func, name: str, args, kwargs, out, result: Result | None = None) -> None:
        inputs = [t for a in (*args, *kwargs.values()) for t in tensors_in(a)]
        new = result if result is not None and result.made else None  # what is recorded follows from shapes, too
        row = None if new is None else new.recorded
        if row is not None:
            for tensor in tensors_in(out):
                self._see(tensor.untyped_storage())
        else:
            row = self._row(func, name, args, kwargs, out, inputs)
            if new is not None:
                new.recorded = row  # None where nothing runs and no memory is taken
        if row:
            kind, text, count, read, wrote = row
            stream = torch.cpu.current_stream()
            self._wait_for(stream, inputs)
            self._append(RecordedCall(stream.number, kind, text, count, read, wrote, self._take(stream)), stream)

    def _row(self, func, name: str, args, kwargs, out, inputs: list) -> tuple | None:
        """Kind, signature, FLOPs, bytes read and bytes written of a kernel; ``()`` if nothing runs, None for shapes
        without values."""
        if any(t.device.type == "meta" for t in (*inputs, *tensors_in(out))):
            return None
        known = {t.untyped_storage()._cdata for t in inputs}
        fresh = [t for t in tensors_in(out) if t.untyped_storage()._cdata not in known]
        for tensor in fresh:
            self._see(tensor.untyped_storage())
        written = []
        for position in written_arguments(func):
            argument = func._schema.arguments[position]
            by_name = argument.kwarg_only or position >= len(args)
            written += list(tensors_in(kwargs.get(argument.name) if by_name else args[position]))
        if torch.Tag.inplace_view in func.tags or name in EMPTIES or not (fresh or written):
            return ()
        if name in NO_KERNEL or max(t.numel() for t in (*fresh, *written)) <= 1 >= len(inputs):
            return ()
        if name in GATHERS:
            read = touched_bytes(fresh[0]) + sum(touched_bytes(t) for t in inputs[1:])
        else:
            skip = {id(t) for t in written} if name in OVERWRITES | SCATTERS else set()
            read = sum(touched_bytes(t) for t in inputs if id(t) not in skip)
        wrote = sum(storage_bytes(t) for t in fresh) + sum(touched_bytes(t) for t in written)
        if name == "_grouped_mm":
            kind, text, count = "bmm", *_batched(args, out)
        else:
            kind, text = name.replace("_for_cpu", ""), signature(func, args, kwargs, out)
            count = flops(func, args, kwargs, out, inputs, fresh or written)
        return kind, text, int(count), read, wrote

    def _launch(self):
        """What stands in for the launch of a Triton kernel: one entry. What the kernel computes is not known: each of
        its tensors is counted as read or written once, and its FLOPs as 0."""

        def run(kernel, *args, grid=None, warmup=False, **kwargs):
            tensors = [t for a in (*args, *kwargs.values()) for t in tensors_in(a)]
            while hasattr(kernel.fn, "fn"):  # an autotuner, or heuristics around the kernel
                kernel = kernel.fn
            text = f"triton.{kernel.fn.__name__}({','.join(map(describe, tensors))})"
            stream = torch.cpu.current_stream()
            self._wait_for(stream, tensors)
            read = sum(touched_bytes(t) for t in tensors)
            self._append(RecordedCall(stream.number, "triton", text, 0, read, 0, self._take(stream)), stream)

        return run

    def _communicate(self, func, name: str, args, kwargs, out) -> None:
        stream = torch.cpu.current_stream()
        if name not in COLLECTIVES:
            return
        buffers = [t for a in args for t in tensors_in(a)] + [t for a in kwargs.values() for t in tensors_in(a)]
        for tensor in tensors_in(out):
            buffers.append(tensor)
            self._see(tensor.untyped_storage())
        kind, ranks = COLLECTIVES[name], _ranks_of(args, kwargs)
        if kind in ("send", "recv"):  # between pipeline stages: part of a schedule, not of a stage's program
            self.sends += kind == "send"
            return
        if len(ranks) == 1:
            return
        comm = self._comm.get(ranks) or self.stream()
        self._comm[ranks] = comm
        comm.pending |= stream.state()
        size = max(touched_bytes(t) for t in buffers)
        text = f"{kind}({len(ranks)})"
        entry = RecordedCall(comm.number, kind, text, 0, 0, 0, self._take(comm), ranks, size)
        self._append(entry, comm)
        filled = list(tensors_in(out)) if func.namespace == "_c10d_functional" else list(tensors_in(args[0]))
        for tensor in filled if kind != "send" else ():
            self._see(tensor.untyped_storage())
            self._ready[tensor.untyped_storage()._cdata] = len(self.entries) - 1
        asynchronous = func.namespace == "_c10d_functional" or _is_async(func, args, kwargs)
        if not asynchronous:
            stream.pending.add(len(self.entries) - 1)

    def _wait_for(self, stream: RecordedStream, tensors) -> None:
        """The next entry on ``stream`` waits for the collectives that fill these tensors."""
        for tensor in tensors:
            entry = self._ready.pop(tensor.untyped_storage()._cdata, None)
            if entry is not None:
                stream.pending.add(entry)

    def _take(self, stream: RecordedStream) -> tuple[int, ...]:
        """What the next entry on ``stream`` waits for: the last entry of each other stream among the pending."""
        last: dict[int, int] = {}
        for entry in stream.pending:
            other = self.entries[entry].stream
            if other != stream.number:
                last[other] = max(last.get(other, -1), entry)
        stream.pending = set()
        return tuple(sorted(last.values()))

    def _append(self, entry: RecordedCall, stream: RecordedStream) -> None:
        entry.live_bytes = self.live_bytes
        entry.recorded_grad = torch.is_grad_enabled()
        entry.in_backward = torch._C._current_graph_task_id() != -1
        stream.last = len(self.entries)
        self.entries.append(entry)


def _view(func, fake: FakeTensor, *args) -> FakeTensor:
    """What a view of a fake tensor is: nothing runs, and no memory is allocated."""
    with in_kernel_invocation_manager(fake.fake_mode):
        seen = func(fake, *args)
    return FakeTensor(fake.fake_mode, seen, fake.fake_device)


@contextlib.contextmanager
def unrecorded():
    """While active, no recorder of this thread records."""
    active = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, RankRecorder)]
    before = [mode.paused for mode in active]
    for mode in active:
        mode.paused = True
    try:
        yield
    finally:
        for mode, paused in zip(active, before, strict=True):
            mode.paused = paused


def _batched(args, out) -> tuple[str, int]:
    """Signature and FLOPs of a product over groups of rows, as the batched product that it is where all groups have
    the same size: tokens are taken as balanced over experts."""
    a, b, ends = args[:3]
    groups = max(t.shape[0] for t in (a, b) if t.dim() == 3) if 3 in (a.dim(), b.dim()) else ends.shape[0]
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if a.dim() == 2 == b.dim():
        k = max(1, k // groups)
    elif a.dim() == 2:
        m = max(1, m // groups)
    elif b.dim() == 2:
        n = max(1, n // groups)
    dtypes = [DTYPES.get(t.dtype, "f32") for t in (a, b, out)]
    shapes = (groups, m, k), (groups, k, n), (groups, m, n)
    x, y, z = (f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in zip(dtypes, shapes, strict=True))
    return f"bmm({x},{y})->{z}", 2 * groups * m * k * n


def _ranks_of(args, kwargs) -> tuple[int, ...]:
    """The global ranks of a collective's process group."""
    for value in (*reversed(args), *kwargs.values()):
        if isinstance(value, str):
            try:
                group = dist.distributed_c10d._resolve_process_group(value)
            except (RuntimeError, ValueError, KeyError):
                continue
            return tuple(dist.get_process_group_ranks(group))
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
        if isinstance(value, dist.ProcessGroup):
            return tuple(dist.get_process_group_ranks(value))
    return tuple(range(dist.get_world_size()))


def _is_async(func, args, kwargs) -> bool:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("async_op", "asyncOp"):  # now, and in earlier versions of PyTorch
            value = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(value)
    return False
