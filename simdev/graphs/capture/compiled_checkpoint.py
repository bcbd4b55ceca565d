"""Selective recomputation as ``torch.compile`` leaves it: a layer keeps those of the chosen results that its backward
pass reads, directly or to compute again what it reads.

Eager PyTorch keeps every result that a policy chooses. A compiler has the graphs of both passes: its partitioner cuts
them at the chosen results and drops those without a reader in the backward graph (``_extract_fwd_bwd_modules`` in
``torch/_functorch/partitioners.py``). Here the same follows from one forward pass of the layer: what autograd saves is
what the backward pass reads, and each op says what a result is computed from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from simdev.graphs.capture.trace import tensors_in

Chosen = Callable[[Any, bool], bool]  # whether to keep the result of an op, the next one of a layer's (forward) pass


def contexts_of_read(chosen: Chosen) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Contexts of a layer's forward pass and of its recomputation; ``chosen(op, again)`` says whether a result is to be
    kept, and is asked for each op of either pass in order."""
    kept: dict[int, Any] = {}  # by the number of the chosen result
    return _forward(chosen, kept), _PassAgain(chosen, kept)


@dataclass(frozen=True, eq=False)
class _Computed:
    """What a storage holds: the values that it was computed from, and its number if it was chosen."""

    sources: tuple[_Computed, ...]
    number: int | None = None


@contextmanager
def _forward(chosen: Chosen, kept: dict[int, Any]) -> Iterator[None]:
    layer = _LayerPass(chosen, kept)
    # Of two pairs of hooks only the inner one is called: this one passes on what it sees to the checkpoint's own.
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)
    with layer, saved_tensors_hooks(lambda tensor: pack(layer.save(tensor)), unpack):
        yield
    read = layer.read()
    for number in kept.keys() - read:
        del kept[number]


class _LayerPass(TorchDispatchMode):
    """Keeps chosen results of a forward pass, and notes which values are computed from which, and which are saved."""

    def __init__(self, chosen: Chosen, kept: dict[int, Any]):
        super().__init__()
        self.chosen, self.kept, self.numbers = chosen, kept, count()
        self.saved: list[_Computed] = []
        self._values: Any = WeakIdKeyDictionary()  # by storage

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {_storage(t): None for a in (*args, *(kwargs or {}).values()) for t in tensors_in(a)}
        sources = tuple(self._values[storage] for storage in given if storage in self._values)
        number = None
        if self.chosen(func, False):
            number = next(self.numbers)
            self.kept[number] = tree_map_only(torch.Tensor, torch.Tensor.detach, out)
        value = _Computed(sources, number)
        made = [storage for t in tensors_in(out) if (storage := _storage(t)) not in given]
        # An op that writes into its arguments may compute each of them from all; views compute nothing.
        for storage in (*made, *(given if func._schema.is_mutable else ())):
            self._values[storage] = value
        return out

    def save(self, tensor):
        """Note that the backward pass reads the tensor."""
        value = self._values.get(_storage(tensor))
        self.saved += [] if value is None else [value]
        return tensor

    def read(self) -> set[int]:
        """The numbers of the chosen results that are read, at first hand or to compute what is."""
        found, met, left = set(), set(), self.saved
        while left:
            value = left.pop()
            if id(value) in met:
                continue
            met.add(id(value))
            if value.number is None:
                left += value.sources
            else:
                found.add(value.number)
        return found


class _PassAgain(TorchDispatchMode):
    """Takes kept results in place of computing them."""

    def __init__(self, chosen: Chosen, kept: dict[int, Any]):
        super().__init__()
        self.chosen, self.kept, self.numbers = chosen, kept, count()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        number = next(self.numbers) if self.chosen(func, True) else None
        return self.kept.pop(number) if number in self.kept else func(*args, **(kwargs or {}))


def _storage(tensor):
    """The storage that holds a tensor's values on this rank."""
    for inside in ("_local_tensor", "elem"):  # of a DTensor, and of a collective's result that nobody has waited for
        tensor = getattr(tensor, inside, tensor)
    return tensor.untyped_storage()
