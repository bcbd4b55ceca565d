"""Watches a training step run on fake tensors and writes down every ATen op: what it reads, makes and overwrites.

Identity is the storage: two tensors that share one are the same value, so views and aliases vanish by themselves. An
in-place write to a transient storage starts a new value (a new version of that storage).
"""

from __future__ import annotations

import bisect
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import repeat
from math import prod

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass

from simdev.errors import Unsupported
from simdev.graphs.capture.attention import running_kind

DTYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
    torch.complex64: "c64", torch.complex128: "c128", torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2",
}  # fmt: skip

# Kinds that move data and compute nothing.
MOVES = frozenset(
    "clone contiguous copy_ cat stack embedding embedding_dense_backward index index_select gather _to_copy "
    "slice_backward select_backward zeros zeros_like ones ones_like full full_like new_zeros new_ones new_full zero_ "
    "fill_ arange eye constant_pad_nd index_put index_put_ _unsafe_index scatter scatter_ repeat roll flip tril triu "
    "im2col col2im upsample_nearest2d reflection_pad1d where masked_fill masked_fill_ lift_fresh_copy".split()
)
# Kinds that read of their first argument only as much as they put out (rows of a table, not the table).
GATHERS = frozenset({"embedding", "index", "index_select", "gather", "_unsafe_index", "take", "_embedding_bag"})
# In-place kinds that write only as much as their last tensor argument holds; the additions read as much there, too.
SCATTERS = frozenset({"index_put_", "scatter_", "scatter_add_", "index_add_", "index_copy_", "index_fill_"})
OVERWRITES = frozenset("copy_ zero_ fill_ bernoulli_ normal_ uniform_ random_ exponential_ log_normal_".split())
EMPTIES = frozenset("empty empty_like empty_strided new_empty new_empty_strided empty_permuted".split())
BATCH_NORMS = {"native_batch_norm": (3, 4), "_batch_norm_with_update": (3, 4)}  # statistics written without notice
TOGETHER = frozenset({"_amp_foreach_non_finite_check_and_unscale_"})  # multi-tensor kernels beside _foreach_*
COMPOSITE = frozenset("linear matmul einsum conv1d conv2d conv3d".split())  # whole only where wrappers call them
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
COUNTED = ("aten", "prims", "c10d", "_c10d_functional")  # namespaces in which PyTorch counts every product
AROUND_A_TAPE = (__name__, "torch._compile", "torch._dynamo.eval_frame")  # modules whose functions lead to its methods
# Rooms of the functions that PyTorch writes a node of its own in, and of a capture's modes, which they meet.
DECOMPOSED = ("torch._decomp", "torch._prims_common", "simdev.graphs.capture.")
RECOMPUTED = ".recomputed"  # the end of an op's name that a checkpoint computes again
SKIPPED_ARGUMENTS = frozenset({"size", "dtype", "layout", "device", "pin_memory", "memory_format", "input_sizes"})


class NeedsValues(Unsupported):
    """The step cannot run on fake tensors."""


STEERED = (
    "a number that follows from values, which fake tensors do not have, steers an optimizer's own step(); capture a "
    "smaller model, which simdev runs for real"
)


class MadeUp(float):
    """A number that an optimizer reads on fake tensors, where a real step has one that follows from values. Arithmetic
    with it is made up, too. A comparison or a whole number, which steers a step, raises :class:`NeedsValues`. Functions
    written in C make a plain number of it, which may steer a step unseen: a step that read one is captured once more,
    with other :attr:`guesses`, and has to be the same."""

    __slots__ = ()
    reads = 0  # how often one took the place of a number
    guesses: Iterator[float] = repeat(1000.0)

    def steers(self, *_):
        raise NeedsValues(STEERED)

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = steers  # type: ignore[assignment]
    __int__ = __trunc__ = __floor__ = __ceil__ = steers  # type: ignore[assignment]
    __hash__ = float.__hash__


def _still_made_up(name: str):
    operation = getattr(float, name)

    def compute(self, *others):
        found = operation(self, *others)
        return MadeUp(found) if isinstance(found, float) else found

    return compute


for _name in "add radd sub rsub mul rmul truediv rtruediv floordiv mod pow rpow neg pos abs round".split():
    setattr(MadeUp, f"__{_name}__", _still_made_up(f"__{_name}__"))


@contextmanager
def other_guesses():
    """Meanwhile, each made-up number is another one, from 1e-12 to 1e12."""
    draw, usual = random.Random(0), MadeUp.guesses
    MadeUp.guesses = (10 ** draw.uniform(-12, 12) for _ in repeat(None))
    try:
        yield
    finally:
        MadeUp.guesses = usual


@dataclass(slots=True)
class Op:
    """One recorded op.

    ``reads`` and ``makes`` are value numbers. A *home* is the op of a parameter, buffer or constant: ``writes`` are
    the homes whose persistent bytes the op overwrites, ``touches`` those it reads or overwrites, ``replaces`` the
    values that end with such a write. ``twin`` is the op whose output it overwrites in place (-1: none). ``products``
    are the FLOPs that PyTorch's counter counts; ``turn`` is the number of optimizer steps that began before the op.
    A ``sparse`` op takes rows of a table, not the table.
    """

    kind: str
    signature: str
    layer: str
    phase: str
    flops: int
    read: int
    written: int
    reads: list[int] = field(default_factory=list)
    makes: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    touches: list[int] = field(default_factory=list)
    replaces: list[int] = field(default_factory=list)
    twin: int = -1
    label: str = ""
    persistent: int = 0
    products: int = 0
    turn: int = 0
    sparse: bool = False


@dataclass(slots=True)
class Value:
    """A tensor version: its producer (an op number), bytes of its storage, whether it lives in persistent bytes."""

    producer: int
    bytes: int
    persistent: bool = False


class Tape(TorchDispatchMode):
    """Records while active. :attr:`ops` and :attr:`values` are the result.

    Set :attr:`phase` to ``forward``, ``backward`` or ``update``; or to ``loop``, where the phase of each op follows
    from who calls it, count the optimizers that are at work in :attr:`updating`, and their steps in :attr:`turn`.
    """

    def __init__(self):
        super().__init__()
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.phase, self.recording, self.updating, self.turn = "forward", True, 0, 0
        self.searching = False  # whether the optimizer at work has a closure
        self.own_rules: list[bool] = []  # of each optimizer at work: whether numbers may steer its step
        self.guessed = False  # whether an optimizer of a loop got a made-up number
        self.repeated = 0  # FLOPs of products that were not run: copies of what ran for a parameter that is alike
        self.keeps_saved = True  # whether a tensor that autograd saved lives until its node has run, read or not
        self.uncounted: dict[str, int] = {}  # calls of ops of libraries for whose FLOPs there is no formula
        self._node: tuple = (None, -1, set(), set())  # the node that runs, its last op, what it saved and has not read
        self._counters: set[int] = set()  # storages of step counters of optimizers
        self._value: dict[int, int | None] = {}  # storage -> value; None: allocated, nothing written yet
        self._home: dict[int, int] = {}  # storage of a parameter, buffer or optimiser state -> op of kind parameter
        self._known: list = []  # of every storage, so that no address is used twice
        self._moved: dict[int, int] = {}  # storage that a parameter has in place of its own -> op of the parameter
        self._attention: dict[int, str] = {}  # storage of an attention's result -> kind
        self._layers: list[str] = []
        self._marks: tuple[list[int], list[str]] = ([0], ["loss"])

    # What is there before the step -----------------------------------------------------------------------------

    def persistent(self, tensor, name: str, kind: str = "parameter") -> int:
        """A parameter, buffer or constant: an op with persistent bytes. Returns its number."""
        key = self._key(tensor)
        if key in self._home:
            return self._home[key]
        size = storage_bytes(tensor)
        layer, _, label = name.rpartition(".")
        self.ops.append(Op(kind, f"{kind}()->{describe(tensor)}", layer, "forward", 0, 0, 0, label=label))
        op = len(self.ops) - 1
        self.ops[op].persistent = size
        self._home[key] = op
        self._new_value(tensor, op, persistent=True)
        return op

    def state(self, tensor, home: int) -> None:
        """A tensor of optimiser state, kept with the parameter whose op is ``home``."""
        if self.keep(tensor, home) and tensor.numel() > 1:  # step counters are kept by the host
            self.ops[home].persistent += storage_bytes(tensor)

    def count(self, tensor) -> None:
        """The step counter of an optimizer."""
        self._counters.add(self._key(tensor))

    def keep(self, tensor, home: int) -> bool:
        """Say that ``tensor`` is among the persistent bytes of ``home``; False if it has a home already."""
        key = self._key(tensor)
        known = key in self._home
        self._home.setdefault(key, home)
        return not known

    def input(self, tensor, name: str) -> None:
        """A tensor of the batch."""
        if self._key(tensor) not in self._value:
            self.ops.append(Op("input", f"input()->{describe(tensor)}", "", "forward", 0, 0, 0, label=name))
            self._new_value(tensor, len(self.ops) - 1)

    def value_of(self, tensor) -> int | None:
        """The value that ``tensor`` holds now."""
        return self._value.get(self._key(tensor))

    def renew(self, tensor, value: int) -> None:
        """Say that ``tensor`` now holds ``value``."""
        self._value[self._key(tensor)] = value

    def follow(self, homes: dict) -> None:
        """Look for parameters whose contents were exchanged (``parameter.data = other``): what is written into their
        new storages from now on is written into them. ``homes`` are the ops of parameters."""
        for parameter, home in homes.items():
            key = self._key(parameter)
            if key not in self._home:
                self._moved[key] = home

    def settle(self, homes: dict) -> None:
        """Let the ops that made the contents which parameters have now, in place of their own, be their updates."""
        self.follow(homes)
        for parameter, home in homes.items():
            value = self._value.get(self._key(parameter)) if self._key(parameter) in self._moved else None
            op = self.ops[self.values[value].producer] if value is not None else None
            if op is None or home in op.writes or op.kind in ("parameter", "constant", "input"):
                continue
            op.writes.append(home)
            op.touches.append(home)
            if op.phase == "forward" and op.layer == "loss":
                op.phase, op.layer = "update", ""

    # Layers ----------------------------------------------------------------------------------------------------

    def enter(self, layer: str) -> None:
        """Ops from now on belong to ``layer``."""
        self._layers.append(layer)
        self._mark()

    def leave(self) -> None:
        """Back to the layer before."""
        self._layers.pop()
        self._mark()

    def _mark(self):
        # A backward op belongs to the layer in which its autograd node was made; nodes are numbered as they are made.
        self._marks[0].append(torch.autograd._get_sequence_nr())
        self._marks[1].append(self._layer())

    def _layer(self) -> str:
        return self._layers[-1] if self._layers else "loss"

    def _phase_now(self) -> str:
        if self.phase != "loop":
            return self.phase
        if self.updating:
            return "update"
        if torch._C._current_autograd_node() is not None:
            return "backward"
        return "forward" if torch.is_grad_enabled() or self._layers else "update"

    def _layer_now(self, phase: str) -> str:
        if self._layers or phase == "forward":
            return self._layer()
        node = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else 1 << 63
        if number >= 1 << 63:  # the seed of the backward pass, or the end of a path
            return "loss" if phase == "backward" else ""
        return self._marks[1][bisect.bisect_right(self._marks[0], number) - 1]

    # Ops -------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():  # in the backward pass, a mode would hear of every look at a size
            return self._call(func, types, args, kwargs or {})

    def _call(self, func, types, args, kwargs):
        if wraps_tensors(types):
            return NotImplemented  # the kernels that the wrapper calls are recorded
        if func.namespace not in ("aten", "prims") and not moves_tensors(func):
            return func(*args, **kwargs)
        if func._opname in COMPOSITE:
            with self:
                return func.decompose(*args, **kwargs)
        asks = func is torch.ops.aten._local_scalar_dense.default and args[0].dtype != torch.bool
        if asks and self._made_up(args[0]):
            return self._number(args[0])
        if func._opname in TOGETHER or func._opname.startswith("_foreach_"):
            with self:  # the single calls are recorded
                return one_by_one(func, args, kwargs)
        before = self._inputs(func, args, kwargs) if self.recording else None
        out = func(*args, **kwargs)
        if isinstance(out, FakeTensor) and is_sparse(out):
            raise NeedsValues("a sparse tensor has as many rows as its values decide")
        if self.recording:
            self._record(func, args, kwargs, before, out)
        return out

    def _number(self, tensor) -> float:
        """A made-up number. What another optimizer than PyTorch's own reads, and is no step counter, is taken as it is
        if it is known; a whole number, which may be a size, has to be known."""
        if self.own_rules and self.own_rules[-1] and self._key(tensor) not in self._counters:
            try:
                return torch.ops.aten._local_scalar_dense.default(tensor)
            except DataDependentOutputException:
                if not tensor.is_floating_point():
                    raise
            MadeUp.reads += 1  # ``item()`` returns a plain number, whatever this is: who hears of the call asks
            self.guessed = True
            return next(MadeUp.guesses)
        self.guessed = True
        return 1000.0 if tensor.is_floating_point() else 1000

    def _made_up(self, tensor) -> bool:
        """Whether an optimizer's own step, where a number decides no shape, asks for a number that is made up: a step
        counter (1000: no optimizer warms up any more), or what a fake tensor has no value for. A step that evaluates a
        closure is a search, which numbers steer; so may the parameters of a loop, whose real counters are true."""
        if self.phase == "loop":
            return self.updating > 0 and not self.searching and isinstance(tensor, FakeTensor)
        return self.phase == "update" and (isinstance(tensor, FakeTensor) or self._key(tensor) in self._counters)

    def _inputs(self, func, args, kwargs) -> list:
        """Pairs (tensor, written) of every tensor argument."""
        found = []
        written = written_arguments(func)
        skipped = ()
        if func._opname == "native_batch_norm_backward" and args[7]:
            skipped = (3, 4)  # in training the running statistics are handed over, but not read
        for position, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name) if argument.kwarg_only or position >= len(args) else args[position]
            if position in skipped or value is None:
                continue
            for tensor in tensors_in(value):
                found.append((tensor, position in written))
        training_norm = func._opname in BATCH_NORMS and (len(args) < 6 or args[5] or func._opname[0] == "_")
        if training_norm:
            statistics = [args[i] for i in BATCH_NORMS[func._opname] if i < len(args) and args[i] is not None]
            found = [(t, w or any(t is s for s in statistics)) for t, w in found]
        return found

    def _record(self, func, args, kwargs, inputs, out):
        kind = func._opname
        outputs = list(tensors_in(out))
        known = {self._key(tensor) for tensor, _ in inputs}
        fresh = []
        for tensor in outputs:
            if self._key(tensor) not in known and all(self._key(tensor) != self._key(other) for other in fresh):
                fresh.append(tensor)
        writes = [] if torch.Tag.inplace_view in func.tags else [tensor for tensor, written in inputs if written]
        if kind in ("lift_fresh", "lift_fresh_copy"):
            for tensor in fresh:
                self._constant(tensor)
            return
        if kind in EMPTIES:
            for tensor in fresh:
                self._value[self._key(tensor)] = None
            return
        if not fresh and not writes:
            return  # a view, an alias, a question about a tensor
        self._append(func, kind, args, kwargs, inputs, fresh, writes, out)

    def _append(self, func, kind, args, kwargs, inputs, fresh, writes, out):
        phase = self._phase_now()
        if phase == "forward" and self.phase == "loop" and not self._layers and self._writes_parameter(writes):
            phase = "update"  # parameter.data.add_(...) with gradients on
        op = Op(self._kind(func, args, out), "", self._layer_now(phase), phase, 0, 0, 0, turn=self.turn)
        with_gradients = (
            phase == "backward" and torch.is_grad_enabled() and torch._C._current_autograd_node() is not None
        )
        if with_gradients and not _called_by_the_engine():
            # A checkpoint runs its forward pass again, in Python, with gradients. PyTorch's own nodes have gradients
            # with create_graph, but compute nothing again.
            op.label = op.kind + RECOMPUTED
        rows = sum(touched_bytes(tensor) for tensor, _ in inputs if is_sparse(tensor))  # of a dense one, no more
        op.sparse = rows > 0
        seen: dict[int, int] = {}
        out_bytes = sum(storage_bytes(tensor) for tensor in fresh)
        for position, (tensor, written) in enumerate(inputs):
            key = self._key(tensor)
            covers = written and kind in OVERWRITES and touched_bytes(tensor) == storage_bytes(tensor)
            value = self._read(tensor)
            if not covers and value is not None and value not in op.reads:
                op.reads.append(value)
            size = touched_bytes(tensor)
            if kind in GATHERS and position == 0:
                size = min(size, touched_bytes(fresh[0]))
            if rows and not is_sparse(tensor):
                size = min(size, rows)
            if not (written and kind in OVERWRITES | SCATTERS):
                seen[key] = min(seen.get(key, 0) + size, storage_bytes(tensor))
            if key in self._home and self._home[key] not in op.touches:
                op.touches.append(self._home[key])
        op.read = sum(seen.values())
        op.written = out_bytes
        source = touched_bytes(inputs[-1][0]) if inputs else 0
        op.signature = f"{op.kind}({signature(func, args, kwargs, out).partition('(')[2]}"
        op.products = product_flops(func, args, kwargs, out)
        op.flops = op.products or _other_flops(func, [tensor for tensor, _ in inputs], fresh)
        if func.namespace not in COUNTED and not has_formula(func):
            label = f"{func.namespace}::{func._opname}"
            self.uncounted[label] = self.uncounted.get(label, 0) + 1
        if phase == "update" and op.flops == 1:
            op.flops = 0  # a step counter, kept by the host
        number = len(self.ops)  # after the constants that it reads for the first time
        self.ops.append(op)
        if kind in ("index_add_", "scatter_add_"):
            op.read += source
        for tensor in writes:
            op.written += source if kind in SCATTERS else min(touched_bytes(tensor), rows or touched_bytes(tensor))
            self._write(tensor, op, number)
        for tensor in fresh:
            self._new_value(tensor, number)
        if phase == "backward" and self.keeps_saved and not with_gradients:
            self._hold_saved(op, number)

    def _hold_saved(self, op: Op, number: int) -> None:
        """Let the last op of a backward node read what autograd saved for the node and no op of it reads: the tensor
        that was gathered from, say, of which the backward needs the sizes alone."""
        node = torch._C._current_autograd_node()
        before, last, saved, added = self._node
        if node is None or isinstance(node, torch.autograd.function.BackwardCFunction):
            self._node = (None, -1, set(), set())
            return
        if before is not node:
            saved = {self._value.get(self._key(tensor)) for tensor in saved_tensors(node)} - {None}
            saved = {value for value in saved if not self.values[value].persistent}
        else:
            self.ops[last].reads = [value for value in self.ops[last].reads if value not in added]
        saved -= {*op.reads, *op.makes}
        added = {value for value in saved if self.values[value].producer < number}
        op.reads += sorted(added)
        self._node = (node, number, saved, added)

    def _writes_parameter(self, writes) -> bool:
        homes = [self._home.get(self._key(tensor)) for tensor in writes]
        return any(home is not None and self.ops[home].kind == "parameter" for home in homes)

    def _kind(self, func, args, out) -> str:
        """The name of an op. The CPU has one fused attention; it has the name of the kernel that a GPU chooses."""
        name = func._opname
        if name == ATTENTION:
            return self._attention.setdefault(self._key(out[0]), running_kind())
        if name == f"{ATTENTION}_backward":
            return f"{self._attention.get(self._key(args[4]), running_kind())}_backward"
        return "clone" if name == "contiguous" else name

    def _read(self, tensor) -> int | None:
        key = self._key(tensor)
        if key in self._home:
            # Optimiser state has no value of its own: it is read where it lives.
            return self._value.get(key)
        if key not in self._value:
            self._constant(tensor)
        return self._value[key]

    def _write(self, tensor, op: Op, number: int):
        key = self._key(tensor)
        if key in self._home:
            op.writes.append(self._home[key])
            if key in self._value:
                op.replaces.append(self._value[key])
                self._new_value(tensor, number, persistent=True)
            return
        if key in self._moved and self._moved[key] not in op.writes:
            op.writes.append(self._moved[key])
            op.touches.append(self._moved[key])
        old = self._value.get(key)
        if old is not None and op.twin < 0:
            op.twin = self.values[old].producer
        self._new_value(tensor, number)

    def _constant(self, tensor) -> None:
        """A tensor that was there before the step and is no parameter: kept on a device, unless it is a scalar."""
        if tensor.numel() <= 1:
            self._value[self._key(tensor)] = None
        else:
            self.persistent(tensor, "constant", kind="constant")

    def _new_value(self, tensor, producer: int, *, persistent: bool = False) -> int:
        size = storage_bytes(tensor)
        self.values.append(Value(producer, size, persistent))
        self.ops[producer].makes.append(len(self.values) - 1)
        self._value[self._key(tensor)] = len(self.values) - 1
        return len(self.values) - 1

    def _hold(self, storage):
        """What is kept of a storage. A weak reference lets its memory go, and keeps its address from another use."""
        return StorageWeakRef(storage)

    def _key(self, tensor) -> int:
        if is_sparse(tensor):
            tensor = tensor._values()
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError) as error:
            raise Unsupported(
                f"a tensor of layout {tensor.layout} has no storage to follow; use to_sparse_coo() in place of it"
            ) from error
        key = storage._cdata
        if key not in self._value and key not in self._home:
            self._known.append(self._hold(storage))
        return key


# Multi-tensor kernels ------------------------------------------------------------------------------------------


def one_by_one(func, args, kwargs):
    """A multi-tensor kernel as one call per tensor: what all tensors share in one call has no single place.

    Raises :class:`Unsupported` for a kernel that has no single-tensor form.
    """
    if func._opname in TOGETHER:
        gradients, _, inverse_scale = args
        for gradient in gradients:
            gradient.mul_(inverse_scale)
        return None
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    rows = len(given[names[0]])
    lists = {name for name, value in given.items() if isinstance(value, (list, tuple)) and len(value) == rows}
    single = func._opname.removeprefix("_foreach_")
    call = {"norm": torch.linalg.vector_norm}.get(single)
    inplace = single.endswith("_")
    made = []
    for row in range(rows):
        one = {name: value[row] if name in lists else value for name, value in given.items()}
        made.append(_single_call(single, call, one))
    return None if inplace else made


def _single_call(name: str, call, given: dict):
    positional, named = list(given.values()), {}
    if name.rstrip("_") in ("addcdiv", "addcmul"):
        positional, named = positional[:3], {"value": positional[3]} if len(positional) > 3 else {}
    elif "alpha" in given:
        positional, named = [value for key, value in given.items() if key != "alpha"], {"alpha": given["alpha"]}
    elif name in ("norm", "copy_"):
        positional = positional[:2]
    found = call or getattr(torch, name, None) or getattr(torch.Tensor, name, None)
    if found is None:
        raise Unsupported(f"the multi-tensor kernel _foreach_{name} has no single-tensor form; pass foreach=False")
    return found(*positional, **named)


def _called_by_the_engine() -> bool:
    """Whether a backward node of PyTorch's own, without a function in Python of the user's, calls the op that is being
    recorded."""
    frame = sys._getframe(1)
    while (name := frame.f_globals.get("__name__", "")) in AROUND_A_TAPE or name.startswith(DECOMPOSED):
        frame = frame.f_back
    return frame.f_code.co_name == "_engine_run_backward"


# Arguments -----------------------------------------------------------------------------------------------------


def wraps_tensors(types) -> bool:
    """Whether a tensor subclass among ``types`` holds tensors and calls kernels on them (torchao's FP8 operands)."""
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def plain_tensors(tensor) -> list:
    """The tensor itself, or the tensors that a wrapper holds (an 8-bit optimizer state: codes and scales)."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in plain_tensors(getattr(tensor, name))]


def tensors_in(value):
    """Every tensor in an argument or result: itself, or in a list or tuple."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def saved_tensors(node):
    """The tensors that a backward node of PyTorch's own has saved."""
    for name in _saved_names(type(node)):
        try:
            yield from tensors_in(getattr(node, name))
        except RuntimeError:  # released
            return


@cache
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_"))


@cache
def written_arguments(func) -> frozenset[int]:
    """Positions of the arguments that an op overwrites, by its schema."""
    return frozenset(
        position
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def moves_tensors(func) -> bool:
    """Whether an op takes or returns tensors, by its schema."""
    return any("Tensor" in str(item.type) for item in [*func._schema.arguments, *func._schema.returns])


def is_sparse(tensor) -> bool:
    """Whether a tensor holds rows and their numbers (the gradient of a sparse embedding)."""
    return tensor.layout is torch.sparse_coo


def storage_bytes(tensor) -> int:
    """Bytes of the storage behind a tensor."""
    if is_sparse(tensor):
        return storage_bytes(tensor._indices()) + storage_bytes(tensor._values())
    return int(tensor.untyped_storage().nbytes())


def touched_bytes(tensor) -> int:
    """Bytes that a kernel over ``tensor`` touches: its elements, expanded dimensions counted once."""
    if is_sparse(tensor):
        return touched_bytes(tensor._indices()) + touched_bytes(tensor._values())
    count = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return int(count) * tensor.element_size()


# Signatures and FLOPs ------------------------------------------------------------------------------------------


def describe(value) -> str:
    """``f32[2,3]`` for a tensor, lists in brackets."""
    if isinstance(value, torch.Tensor):
        return f"{DTYPES.get(value.dtype, str(value.dtype))}[{','.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return f"({','.join(describe(item) for item in value if item is not None)})"
    return "()" if value is None else str(value)


def signature(func, args, kwargs, out) -> str:
    """``mm(f32[2,3],f32[3,4])->f32[2,4]``, with the integer and boolean arguments that differ from their defaults."""
    tensors, rest = [], []
    for position, argument in enumerate(func._schema.arguments):
        value = kwargs.get(argument.name) if argument.kwarg_only or position >= len(args) else args[position]
        if value is None or argument.name in SKIPPED_ARGUMENTS:
            continue
        found = list(tensors_in(value))
        if found:
            tensors.extend(describe(tensor) for tensor in found)
        elif isinstance(value, (bool, int, list, tuple)) and "Scalar" not in str(argument.type):
            if not argument.has_default_value() or argument.default_value != value:
                text = str(list(value) if isinstance(value, (list, tuple)) else value).replace(" ", "")
                rest.append(f"{argument.name}={text}")
    kind = func._opname.replace("_for_cpu", "")
    return f"{kind}({','.join(tensors + rest)})->{describe(out)}"


def grouped_backward_flops(image, gradient, weight, transposed, output_mask) -> int:
    """FLOPs of a grouped convolution's backward, which PyTorch counts as if every filter read every channel: each
    gradient takes as many multiplications as the forward, which a transposed convolution does for each element of its
    image, any other for each element of its result."""
    macs = prod((image if transposed else gradient).shape) * prod(weight.shape[1:])
    return 2 * macs * sum(bool(wanted) for wanted in output_mask[:2])


def _attention_flops(query, *others, **_) -> int:
    return int(flop_counter.sdpa_flop_count(query.shape, *_with_heads(query, others[:2])))


def _attention_backward_flops(gradient, query, *others, **_) -> int:
    return int(flop_counter.sdpa_backward_flop_count(gradient.shape, query.shape, *_with_heads(query, others[:2])))


def _with_heads(query, others) -> list[tuple]:
    """Shapes of keys and values as if each head of the queries had its own."""
    return [(*other.shape[:1], query.shape[1], *other.shape[2:]) for other in others]


def _grouped_product_flops(first, second, *_, **__) -> int:
    groups = first.shape[0] if first.dim() == second.dim() == 3 else 1
    return 2 * groups * prod(first.shape[-2:]) * second.shape[-1]


def _whole_numbers_flops(activations, *_, out_val=None, **__) -> int:
    """Of a product with weights of whole numbers, packed or not: the result has one column for each row of them."""
    return 2 * activations.numel() * out_val.shape[-1]


def _trilinear_flops(first, second, third, *expanded, out_val=None, **_) -> int:
    """Of ``nn.Bilinear``: a multiplication and an addition for each element of the three arguments' common shape."""
    shapes = []
    for tensor, places in zip((first, second, third), expanded[:3], strict=True):
        shape = list(tensor.shape)
        for place in sorted(places):
            shape.insert(place, 1)
        shapes.append(shape)
    return 2 * prod(torch.broadcast_shapes(*shapes))


def _product_flops_of(packet, left: int):
    """Of a product whose left factor, the argument number ``left``, may be sparse: then of its elements that are
    there. PyTorch counts all."""

    def count(*args, out_val=None, **kwargs) -> int:
        first, second = args[left : left + 2]
        if is_sparse(first):
            return 2 * first._nnz() * second.shape[-1]
        return flop_counter.flop_registry[packet](*args, **kwargs, out_val=out_val)

    return count


def _convolution_backward_flops(*args, out_val=None, **kwargs) -> int:
    if args[9] > 1:
        return grouped_backward_flops(args[1], args[0], args[2], args[7], args[10])
    return flop_counter.flop_registry[torch.ops.aten.convolution_backward](*args, **kwargs, out_val=out_val)


KNOWN_VALUES: list[Callable[[torch.Tensor], torch.Tensor | None]] = []  # of fake tensors; the innermost last
PACKED_ATTENTION = re.compile("_?(flash_attention|efficient_attention|varlen_attn)")
WHOLE = (torch.int32, torch.int64)
FORMULAS = {  # in place of PyTorch's, or where PyTorch has none
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    torch.ops.aten.convolution_backward: _convolution_backward_flops,
    torch.ops.aten.mm: _product_flops_of(torch.ops.aten.mm, 0),
    torch.ops.aten.addmm: _product_flops_of(torch.ops.aten.addmm, 1),
    torch.ops.aten._sparse_addmm: _product_flops_of(torch.ops.aten._sparse_addmm, 1),
}
for _space, _names, _formula in (
    ("aten", "_grouped_mm", _grouped_product_flops),
    ("aten", "_trilinear", _trilinear_flops),
    ("aten", "_int_mm _weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu", _whole_numbers_flops),
    ("quantized", "linear linear_relu linear_dynamic linear_relu_dynamic linear_dynamic_fp16", _whole_numbers_flops),
):
    for _name in _names.split():
        if hasattr(getattr(torch.ops, _space), _name):
            FORMULAS[getattr(getattr(torch.ops, _space), _name)] = _formula
for _formula in FORMULAS.values():
    _formula._get_raw = True  # FlopCounterMode: hand over tensors, not their shapes


def product_flops(func, args, kwargs, out) -> int:
    """FLOPs of a matrix product, a convolution or an attention, by PyTorch's formulas; 0 for any other op."""
    count = FORMULAS.get(func._overloadpacket) or flop_counter.flop_registry.get(func._overloadpacket)
    if count is None:
        return 0
    with known_lengths(func, args) as args:
        return int(count(*args, **kwargs, out_val=out))


@contextmanager
def known_lengths(func, args):
    """Yields the arguments of an op, with the ends of packed sequences as real tensors: PyTorch's formulas for an
    attention over them take every sequence to be as long as the longest if the ends are fake. Raises
    :class:`Unsupported` if what knows values does not know the ends."""
    if not KNOWN_VALUES or not PACKED_ATTENTION.match(func._opname):
        yield args
        return
    ends = [isinstance(item, FakeTensor) and item.dim() == 1 and item.dtype in WHOLE for item in args]
    real = [KNOWN_VALUES[-1](item) if is_end else item for item, is_end in zip(args, ends, strict=True)]
    if any(is_end and value is None for value, is_end in zip(real, ends, strict=True)):
        raise Unsupported(
            "an attention over packed sequences reads their ends from values that are not known; compute them from "
            "an input of the step"
        )
    with _disable_current_modes():  # the formula computes with the ends
        yield real


def has_formula(func) -> bool:
    """Whether the FLOPs of an op's products are known."""
    return func._overloadpacket in FORMULAS or func._overloadpacket in flop_counter.flop_registry


def flop_counter_mode():
    """PyTorch's ``FlopCounterMode`` with these formulas."""
    return flop_counter.FlopCounterMode(display=False, custom_mapping=FORMULAS)


def flops(func, args, kwargs, out, inputs, outputs) -> int:
    """FLOPs of an op: PyTorch's own count for matrix products, convolutions and attention, none for data movement,
    otherwise one per element of the largest tensor."""
    return product_flops(func, args, kwargs, out) or _other_flops(func, inputs, outputs)


def _other_flops(func, inputs, outputs) -> int:
    if func._opname in MOVES or func._overloadpacket in flop_counter.flop_registry:
        return 0
    if func._opname in SCATTERS:
        return int(inputs[-1].numel())
    rows = [tensor for tensor in [*inputs, *outputs] if is_sparse(tensor)]
    if rows:
        return max(int(tensor._values().numel()) for tensor in rows)
    return max((int(tensor.numel()) for tensor in [*inputs, *outputs]), default=0)
