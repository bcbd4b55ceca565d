"""Records a training step so that its ops can be executed one by one.

The recorder extends the tape of :mod:`simdev.graphs.capture`: it works on real tensors and keeps every ATen call.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from simdev.errors import Unsupported
from simdev.graphs.capture.run import run_real
from simdev.graphs.capture.trace import EMPTIES, Tape, storage_bytes, tensors_in
from simdev.graphs.workload import Step
from simdev.measure.execute.program import AtenCall, Home, Layout, Program, Ref
from simdev.problem.costs import FREE_KINDS


def record(make: Callable[[], Step], name: str, meta: dict, *, seed: int = 0) -> Program:
    """Build the step with ``make``, run it once on the CPU and record every ATen call.

    ``seed`` determines the parameters, the batch and all random draws. The graph is the same as that of
    :func:`simdev.graphs.capture.capture`. Raises :class:`Unsupported` if the graph of the step depends on the values of
    its tensors.
    """
    torch.set_num_threads(1)  # the order of summation must be that of the workers
    torch.manual_seed(seed)
    recorder = OpRecorder(seed)
    assembly = run_real(make, name, meta, recorder)
    return recorder.program(assembly)


class OpRecorder(Tape):
    """A tape that also keeps every call with its arguments, and the bytes that exist before the step."""

    def __init__(self, seed: int):
        super().__init__()
        self.calls: dict[int, AtenCall] = {}
        self.layouts: dict[int, Layout] = {}
        self._seed = seed
        self._before: dict[int, np.ndarray] = {}  # storage -> its bytes before the step
        self._tensor: dict[int, torch.Tensor] = {}  # storage -> a tensor over it that existed before the step
        self._value_key: dict[int, int] = {}
        self._blank: set[int] = set()

    def _hold(self, storage):
        return storage  # with its bytes: results are read from it

    def persistent(self, tensor, name, kind="parameter"):
        self._keep(tensor)
        return super().persistent(tensor, name, kind)

    def state(self, tensor, home):
        self._keep(tensor)
        super().state(tensor, home)

    def input(self, tensor, name):
        self._keep(tensor)
        super().input(tensor, name)

    def _constant(self, tensor):
        self._keep(tensor)
        super()._constant(tensor)

    def _keep(self, tensor) -> None:
        key = self._key(tensor)
        if key not in self._before:
            self._before[key] = _bytes_of(tensor).copy()
            self._tensor[key] = tensor.detach()

    def _inputs(self, func, args, kwargs):
        found = super()._inputs(func, args, kwargs)
        for tensor, _ in found:
            key = self._key(tensor)
            if key not in self._value and key not in self._home:
                self._keep(tensor)  # before the call may overwrite it
        return found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.recording and torch.Tag.nondeterministic_seeded in func.tags:
            torch.manual_seed(self._seed_of(len(self.ops)))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _seed_of(self, number: int) -> int:
        return self._seed * 1_000_003 + number

    def _record(self, func, args, kwargs, inputs, out):
        if func._opname in EMPTIES:
            self._blank |= {self._key(tensor) for tensor in tensors_in(out)}
        super()._record(func, args, kwargs, inputs, out)

    def _append(self, func, kind, args, kwargs, inputs, fresh, writes, out):
        number = len(self.ops)
        new = {self._key(tensor) for tensor in fresh}
        encode = self._encoder(new)
        flat = tuple(_map(encode, item) for item in args), {key: _map(encode, item) for key, item in kwargs.items()}
        written = [(encode(tensor), self._key(tensor)) for tensor in writes]
        super()._append(func, kind, args, kwargs, inputs, fresh, writes, out)
        made = []
        for position, tensor in enumerate(tensors_in(out)):
            key = self._key(tensor)
            value = self._value.get(key)
            if key in new and value is not None:
                new.discard(key)
                self._describe(value, tensor)
                made.append((position, value))
        for tensor in writes:
            value = self._value.get(self._key(tensor))
            if value is not None:
                self._describe(value, tensor)
        seed = self._seed_of(number) if torch.Tag.nondeterministic_seeded in func.tags else None
        after = tuple((ref, value) for ref, key in written if (value := self._value.get(key)) is not None)
        self.calls[number] = AtenCall(func, *flat, tuple(made), after, seed)

    def _describe(self, value: int, tensor) -> None:
        self.layouts[value] = _layout(tensor)
        self._value_key[value] = self._key(tensor)

    def _encoder(self, new: set[int]):
        def encode(tensor) -> Ref:
            key, layout = self._key(tensor), _layout(tensor)
            if key in new:
                raise Unsupported("an op receives its own result as an argument")
            value = self._value.get(key)
            if value is not None and self.values[value].bytes:
                return Ref("value", value, layout)
            if key in self._home:
                return Ref("home", key, layout)
            if value is None and key not in self._blank and tensor.numel() <= 1:
                return Ref("scalar", key, layout)
            return Ref("blank", storage_bytes(tensor), layout)

        return encode

    def _new_value(self, tensor, producer, *, persistent=False):
        value = super()._new_value(tensor, producer, persistent=persistent)
        self._value_key[value] = self._key(tensor)
        self.layouts[value] = _layout(tensor)
        return value

    def program(self, assembly) -> Program:
        """The executable step. Call this after the step has run: the recorder's tensors then hold its results."""
        graph = assembly.graph
        owner = {part: op for op, parts in enumerate(assembly.parts) for part in parts}
        free = {number for number, kind in enumerate(graph.kinds) if kind in FREE_KINDS}
        calls = [
            [] if graph.op_kind[op] in free else [self.calls[part] for part in parts]
            for op, parts in enumerate(assembly.parts)
        ]
        program = Program(graph, calls, list(assembly.values), self.layouts)
        program.value_bytes = {number: value.bytes for number, value in enumerate(self.values)}
        for key, op in self._home.items():
            if op in owner:
                tensor = self._tensor[key]
                program.homes[key] = Home(owner[op], tensor.dtype, self._before[key], _bytes_of(tensor).copy())
        program.value_home = {
            number: self._value_key[number] for number, value in enumerate(self.values) if value.persistent
        }
        for key, before in self._before.items():
            if key not in self._home and key in self._tensor:
                program.scalars[key] = before
        for op, parts in enumerate(assembly.parts):
            if graph.kinds[graph.op_kind[op]] == "input":
                for value in self.ops[parts[0]].makes:
                    program.given[value] = self._before[self._value_key[value]]
        storages = {storage._cdata: storage for storage in self._known}
        for tensor, value in enumerate(assembly.values):
            if value >= 0 and graph.tensor_result[tensor]:
                program.results[value] = _storage_array(storages[self._value_key[value]]).copy()
        return program


def _map(encode, item):
    if isinstance(item, torch.Tensor):
        return encode(item)
    if isinstance(item, (list, tuple)):
        return [_map(encode, part) for part in item]
    return item


def _layout(tensor) -> Layout:
    return Layout(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())


def _bytes_of(tensor) -> np.ndarray:
    return _storage_array(tensor.untyped_storage())


def _storage_array(storage) -> np.ndarray:
    """The bytes of a storage as a uint8 array that shares its memory."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
