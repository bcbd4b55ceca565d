"""An executable training step: the graph, and for each op the ATen calls that do its work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from simdev.problem.graph import ComputationGraph


@dataclass(frozen=True)
class Layout:
    """How a tensor is laid out in its storage: PyTorch dtype; sizes, strides and offset in elements."""

    dtype: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Ref:
    """A tensor argument: a layout over a storage.

    ``source`` and ``key`` name the storage. ``value``: the value with number ``key`` of the recording. ``home``: the
    persistent storage ``key``, such as optimizer state. ``scalar``: the constant ``key``. ``blank``: a new storage of
    ``key`` bytes.
    """

    source: str
    key: int
    layout: Layout


@dataclass(frozen=True)
class AtenCall:
    """One ATen call. Tensors in ``args`` and ``kwargs`` are :class:`Ref`.

    ``made`` has an entry for each new storage: the position among the output tensors, and the number of the value.
    ``written`` has an entry for each overwritten storage: its :class:`Ref`, and the value that it holds afterwards.
    ``seed`` is set if the call draws random numbers.
    """

    function: Callable
    args: tuple
    kwargs: dict
    made: tuple[tuple[int, int], ...]
    written: tuple[tuple[Ref, int], ...]
    seed: int | None = None


@dataclass
class Home:
    """A storage that outlives the step.

    ``op`` is the op of the graph that owns it, and ``dtype`` is used for comparisons. ``before`` and ``after`` are its
    bytes before and after the step, as uint8 arrays.
    """

    op: int
    dtype: Any
    before: np.ndarray
    after: np.ndarray | None = None


@dataclass
class Program:
    """An executable step.

    * ``calls[v]`` are the ATen calls of op ``v``; an op whose data exists before the step has none.
    * ``tensor_value[t]`` is the number of the value of graph tensor ``t``, or -1 for a control edge.
    * ``layouts`` and ``value_bytes`` describe each value.
    * ``homes`` are the persistent storages; ``value_home`` maps a persistent value to its storage.
    * ``scalars`` are constants that every device holds; ``given`` holds the bytes of the batch by value.
    * ``results`` holds the bytes of the values that leave the step, as PyTorch itself computed them.
    """

    graph: ComputationGraph
    calls: list[list[AtenCall]]
    tensor_value: list[int]
    layouts: dict[int, Layout] = field(default_factory=dict)
    value_bytes: dict[int, int] = field(default_factory=dict)
    homes: dict[int, Home] = field(default_factory=dict)
    value_home: dict[int, int] = field(default_factory=dict)
    scalars: dict[int, Any] = field(default_factory=dict)
    given: dict[int, np.ndarray] = field(default_factory=dict)
    results: dict[int, np.ndarray] = field(default_factory=dict)

    def scrap(self, op: int) -> list[list[int]]:
        """For each call of op ``op``, the values that were made inside the op and are not needed after the call."""
        kept, last = self._kept, {}
        for number, call in enumerate(self.calls[op]):
            for ref in references((call.args, call.kwargs)):
                if ref.source == "value" and ref.key in last:
                    last[ref.key] = number
            for value in [value for _, value in (*call.made, *call.written)]:
                if value not in kept:
                    last[value] = number
        return [[value for value, at in last.items() if at == number] for number in range(len(self.calls[op]))]

    def workspace_bytes(self) -> np.ndarray:
        """int64 ``(n,)``: the most bytes that the calls of each op hold for one another at any time.

        Kernels may allocate more than this inside a call.
        """
        return np.array([self._workspace(op) for op in range(self.graph.n_ops)], np.int64)

    @cached_property
    def _kept(self) -> set[int]:
        return set(self.tensor_value) | set(self.value_home)

    def _workspace(self, op: int) -> int:
        live: dict[int, int] = {}  # storage, named by its first value -> bytes
        storage: dict[int, int] = {}
        most = 0
        for call, scrap in zip(self.calls[op], self.scrap(op), strict=True):
            for _, value in call.made:
                storage[value] = value
                live[value] = self.value_bytes[value]
            for ref, value in call.written:
                storage[value] = storage.get(ref.key, value) if ref.source == "value" else value
                if ref.source == "blank":
                    live[value] = ref.key
            outputs = {storage[value] for value in storage if value in self._kept}
            most = max(most, sum(size for key, size in live.items() if key not in outputs))
            for value in scrap:
                gone = storage.pop(value, None)
                if gone is not None and gone not in storage.values():
                    live.pop(gone, None)
        return most


def references(item):
    """Every :class:`Ref` in the arguments of a call, also inside tuples, lists and dictionaries."""
    if isinstance(item, Ref):
        yield item
    elif isinstance(item, (tuple, list)):
        for part in item:
            yield from references(part)
    elif isinstance(item, dict):
        yield from references(list(item.values()))
