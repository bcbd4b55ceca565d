"""Runs an op on fake tensors, or repeats what it did to others of the same shapes.

The fake mode of PyTorch keeps results, too, but spends half of its time on the names under which it finds them. Here
a :class:`Result` is kept under shapes, strides and data types. Ops that make new tensors or overwrite their arguments
have one; views are computed anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

from simdev.graphs.capture.trace import tensors_in

MOST = 1 << 16  # results that are kept; a plan has a few thousand
# Ops that ask for values, or that give a tensor another storage.
OTHERS = frozenset({"resize_", "resize_as_", "set_", "_local_scalar_dense", "is_same_size", "equal", "item"})
TAGS = torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
TENSORS = "Tensor", "List[Tensor]"
PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


class Made(NamedTuple):
    """A tensor that an op made."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def again(self, mode) -> FakeTensor:
        """Another such tensor."""
        with in_kernel_invocation_manager(mode):
            empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return FakeTensor(mode, empty, self.device)


@dataclass(slots=True)
class Result:
    """What an op did: it made tensors, which it returned as a ``list`` or ``tuple`` or by itself (None); or it returned
    the argument at a position. ``recorded`` is what a recorder noted of an op that made tensors (None: nothing yet)."""

    made: tuple[Made | None, ...] = ()
    several: type | None = None
    returned: int | None = None
    recorded: tuple | None = None

    def of(self, args: tuple) -> Any:
        """The result of the op on other tensors."""
        if self.returned is not None:
            return args[self.returned]
        if not self.made:
            return None
        mode = next(tensors_in(args)).fake_mode
        found = (None if one is None else one.again(mode) for one in self.made)
        return self.several(found) if self.several else next(found)


_RESULTS: dict[tuple, Result] = {}


def run(func, args: tuple, kwargs: dict) -> tuple[Any, Result | None]:
    """What ``func`` returns, and what is kept of it: None where nothing is."""
    key = _key(func, args, kwargs)
    if key is None:
        return func(*args, **kwargs), None
    found = _RESULTS.get(key)
    if found is not None:
        return found.of(args), found
    out = func(*args, **kwargs)
    found = _result(func, args, out)
    if found is not None and len(_RESULTS) < MOST:
        _RESULTS[key] = found
    return out, found


@cache
def _is_kept(func) -> bool:
    """Whether the results of an op follow from shapes, and share memory with no argument that it leaves as it is."""
    schema = func._schema
    if func.namespace != "aten" or func._opname in OTHERS or not schema.arguments:
        return False
    if any(tag in func.tags for tag in TAGS):
        return False
    aliases = [one.alias_info for one in (*schema.arguments, *schema.returns) if one.alias_info is not None]
    return all(one.is_write for one in aliases) and str(schema.arguments[0].type) in TENSORS


def _key(func, args: tuple, kwargs: dict) -> tuple | None:
    """The op and all that its result follows from; None if this is not known."""
    if not _is_kept(func):
        return None
    parts: list = [func, torch.get_default_dtype()]
    if not _add(parts, args):
        return None
    for name, value in kwargs.items():
        parts.append(name)
        if not _add(parts, (value,)):
            return None
    return tuple(parts)


def _add(parts: list, values: Iterable) -> bool:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None:  # its value is known
                return False
            parts += (value.shape, value.stride(), value.dtype, value.fake_device)
        elif kind in PLAIN:
            parts += (kind, value)  # 1, 1.0 and True are equal, and results with them are not
        elif kind is list or kind is tuple or kind is torch.Size:
            parts.append(len(value))
            if not _add(parts, value):
                return False
        else:
            return False
    return True


def _result(func, args: tuple, out) -> Result | None:
    """What is kept; None if the result is something else than new tensors, or an argument."""
    if out is None:
        return Result()
    for position, value in enumerate(args):
        if out is value:
            return Result(returned=position)
    if func._schema.is_mutable:
        return None
    several = type(out) if isinstance(out, (tuple, list)) else None
    made = tuple(_made_of(out if several else (out,), tensors_in(args)))
    return None if Ellipsis in made else Result(made, several)


def _made_of(outs: Iterable, given: Iterable) -> Iterator[Any]:
    """Each of ``outs`` as :class:`Made`, or None; ``...`` for what cannot be made again."""
    used = {tensor.untyped_storage()._cdata for tensor in given}
    for out in outs:
        if out is None:
            yield None
            continue
        if type(out) is not FakeTensor or out.constant is not None or out.requires_grad or out.is_sparse:
            yield ...
            return
        storage = out.untyped_storage()
        made = Made(tuple(out.shape), out.stride(), out.dtype, out.fake_device)
        whole = storage.nbytes() == made.again(out.fake_mode).untyped_storage().nbytes() and not out.storage_offset()
        yield made if whole and storage._cdata not in used else ...
        used.add(storage._cdata)
