"""The self-check of every capture: the graph against what PyTorch's own tools count in the run that was recorded.

``FlopCounterMode`` counts the products of the run, version counters tell which parameters it changed, and a walk over
parameters, buffers and optimizer states sums their bytes. A graph that differs by more than 1 % is never returned.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from simdev.errors import InvalidInput, Unsupported
from simdev.graphs.capture.trace import FORMULAS, known_lengths, plain_tensors

TOLERANCE = 0.01
REPORT = "this is a fault of simdev, or the step runs code that PyTorch's dispatcher does not see; please report it"


class Counted(FlopCounterMode):
    """PyTorch's counter of the FLOPs of products, without its account of modules and without its search for composite
    ops, which do not get past the tape. Enter it before the tape."""

    def __init__(self):
        super().__init__(display=False, custom_mapping=FORMULAS)
        self.mod_tracker = _NoModules()

    def __enter__(self):
        self.mode = _Count(self)
        self.mode.__enter__()
        return self

    @property
    def total(self) -> int:
        """FLOPs so far."""
        return int(self.get_total_flops())


class _Count(TorchDispatchMode):
    def __init__(self, counter: Counted):
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        with known_lengths(func, args) as args:
            return self._counter._count_flops(func._overloadpacket, out, args, kwargs or {})


class _NoModules:
    parents = frozenset({"Global"})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@dataclass
class Expected:
    """What the graph of a run must hold: FLOPs of products, the parameters that the run changed, each with how often
    (by label), persistent bytes of parameters, buffers and optimizer states, and the number of gradients."""

    products: int = 0
    updates: dict[str, int] = field(default_factory=dict)
    persistent_bytes: int = 0
    gradients: int = 0


class Versions:
    """Counts the updates of parameters by their version counters, which every in-place write raises."""

    def __init__(self, named: dict[str, torch.Tensor]):
        self._named = named
        self._before = self._now()
        self.updates: dict[str, int] = {}

    def _now(self) -> dict[str, int]:
        return {label: parameter._version for label, parameter in self._named.items()}

    def start(self) -> None:
        """An optimizer begins its step."""
        self._before = self._now()

    def stop(self) -> None:
        """It has ended: every parameter that it wrote counts as updated once more. What an optimizer inside it wrote
        has counted when that one ended."""
        now = self._now()
        for label, version in now.items():
            if version != self._before[label]:
                self.updates[label] = self.updates.get(label, 0) + 1
        self._before = now


def held_bytes(tensors, *, scalars: bool = False, besides=()) -> int:
    """Bytes of the distinct storages behind tensors, also of those that a tensor subclass holds. Tensors of one element
    (the step counters of optimizers) count only with ``scalars``, storages of the tensors ``besides`` not at all."""
    storages = {}
    known = {tensor.untyped_storage()._cdata for whole in besides for tensor in plain_tensors(whole)}
    for whole in tensors:
        for tensor in plain_tensors(whole):
            if scalars or tensor.numel() > 1:
                storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
    storages = {key: storage for key, storage in storages.items() if key not in known}
    return sum(int(storage.nbytes()) for storage in storages.values())


def check(name: str, expected: Expected, products: int, updates: dict[str, int], graph, gradients: int) -> None:
    """Compare a graph with its run: FLOPs of ``products`` in the graph, its update ops of each parameter, its
    persistent bytes, and how many ``gradients`` it knows.

    Raises :class:`Unsupported` with both figures if they differ by more than 1 %.
    """
    kind = [graph.kinds[kind] == "parameter" for kind in graph.op_kind]
    persistent = int(graph.op_persistent_bytes[kind].sum())
    missing = sum(max(0, count - updates.get(label, 0)) for label, count in expected.updates.items())
    updated = sum(expected.updates.values())
    for what, found, counted in (
        ("FLOPs of products", products, expected.products),
        ("updates of parameters", updated - missing, updated),
        ("gradients", gradients, expected.gradients),
        ("bytes of parameters, buffers and optimizer states", persistent, expected.persistent_bytes),
    ):
        if abs(found - counted) > TOLERANCE * max(counted, found):
            raise Unsupported(f"{name}: the graph has {found:,} {what}, its run {counted:,}; {REPORT}")


def check_not_empty(name: str, products: int, updates: int, wants_update: bool) -> None:
    """Raise :class:`InvalidInput` for a graph without a product, or without an update if the step should have one."""
    lacks = "matrix product, convolution or attention" if not products else "update of a parameter"
    if not products or (wants_update and not updates):
        outside = "" if not products else ", or computes the update outside PyTorch (in NumPy), where it is not seen"
        raise InvalidInput(
            f"the graph has no {lacks}: the step may have taken another course than in training{outside}; if it is "
            "meant so, capture with --allow-empty (allow_empty=True)",
            source=name,
        )


def check_repeats(name: str, first: int, second: int) -> None:
    """Raise :class:`InvalidInput` if two calls of a step that no value steers differ in their FLOPs."""
    if abs(first - second) > TOLERANCE * max(first, second):
        raise InvalidInput(
            f"its first call has {first:,} FLOPs of products, its second {second:,}; let each call of run be one whole "
            "cycle (all micro-batches, all critics' steps), without a counter that outlives the call",
            source=name,
        )
