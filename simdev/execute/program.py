"""A training step as it can be executed: the graph, and for each op the ATen calls that do its work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simdev.graph import ComputationGraph


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in its storage: a PyTorch dtype, and sizes, strides and offset in elements."""

    dtype: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Ref:
    """A tensor argument: a layout over a storage.

    ``source`` says which storage: ``value`` number ``key`` of the recording; ``home``: the persistent storage ``key``
    (optimiser state); ``scalar``: the host's number ``key``; ``blank``: a new storage of ``key`` bytes.
    """

    source: str
    key: int
    layout: Layout


@dataclass(frozen=True)
class Call:
    """One ATen call. Tensors in ``args`` and ``kwargs`` are :class:`Ref`.

    ``made``: per new storage the position among the tensors put out and its value. ``written``: per storage
    overwritten, the :class:`Ref` and the value that it holds afterwards. ``seed`` is set for a call that draws random
    numbers.
    """

    function: Callable
    args: tuple
    kwargs: dict
    made: tuple[tuple[int, int], ...]
    written: tuple[tuple[Ref, int], ...]
    seed: int | None = None


@dataclass
class Home:
    """A storage that outlives the step: its owner (an op of the graph), a dtype to compare by, its first and its final
    bytes (uint8 arrays)."""

    op: int
    dtype: Any
    before: np.ndarray
    after: np.ndarray | None = None


@dataclass
class Program:
    """An executable step.

    ``calls[v]`` are the ATen calls of op ``v`` (none for data that is there already). ``tensor_value[t]`` is the value
    of graph tensor ``t`` (-1: a control edge); ``layouts`` and ``value_bytes`` describe values; ``homes`` are
    persistent storages, ``value_home`` maps a persistent value to its home; ``scalars`` are constants that every
    device has; ``given`` are the bytes of the batch by value. ``results`` are the bytes of the values that leave the
    step, computed by PyTorch itself.
    """

    graph: ComputationGraph
    calls: list[list[Call]]
    tensor_value: list[int]
    layouts: dict[int, Layout] = field(default_factory=dict)
    value_bytes: dict[int, int] = field(default_factory=dict)
    homes: dict[int, Home] = field(default_factory=dict)
    value_home: dict[int, int] = field(default_factory=dict)
    scalars: dict[int, Any] = field(default_factory=dict)
    given: dict[int, np.ndarray] = field(default_factory=dict)
    results: dict[int, np.ndarray] = field(default_factory=dict)
