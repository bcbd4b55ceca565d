"""Values of small tensors, computed beside the fake ones, for code that looks at them.

Constructors call ``torch.linspace(...).tolist()`` and ``relative_position_index.max().item()``; steps branch on lengths
and masks. A fake tensor has no values. :class:`Shadows` keeps a real copy of every small tensor that follows from small
real tensors alone, and answers such questions from it.
"""

from __future__ import annotations

import math
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from simdev.graphs.capture.rehearse import Answers, asks
from simdev.graphs.capture.trace import (
    BATCH_NORMS,
    KNOWN_VALUES,
    MadeUp,
    is_sparse,
    wraps_tensors,
    written_arguments,
)

aten = torch.ops.aten
INDEXED = (aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._index_put_impl_)
LIKE = (aten.full_like, aten.ones_like, aten.zeros_like)  # which read no value of a tensor
MOST_ELEMENTS = 1 << 20  # larger tensors have no shadow
MOST_ROUTED = 1 << 26  # elements with the routes of tokens to experts: one for each token, choice and expert
MOST_DRAWN = 1 << 12  # nor have larger tensors of random numbers: weights, noise
SET_DATA = torch.Tensor.data.__set__
_DRAWN = [MOST_DRAWN]  # the limit that holds, last


class Shadows(TorchDispatchMode):
    """Active inside a ``FakeTensorMode``. Set :attr:`active` to False where nobody looks at values (backward), and
    :attr:`most_elements` lower where they look at numbers alone (the steps that an optimizer has counted). With the
    ``answers`` of a real forward pass, they are what code finds that looks at values. With :attr:`experts`, numbers of
    experts, what chooses among so many sends tokens to all of them evenly."""

    def __init__(self, answers: Answers | None = None):
        super().__init__()
        self.active = True
        self.answers = answers
        self.experts: frozenset[int] = frozenset()
        self.asked = False  # whether a number led into Python
        self.most_elements = MOST_ELEMENTS
        self._real = WeakTensorKeyDictionary()
        self._stale: set[int] = set()  # storages of shadows that missed a write
        self._kept: list = []  # those storages, so that no address is used twice
        self._exchanges: list[_Exchanges] = []

    def __enter__(self):
        self._exchanges.append(_Exchanges(self))
        self._exchanges[-1].__enter__()
        KNOWN_VALUES.append(self.of)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        KNOWN_VALUES.pop()
        self._exchanges.pop().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if wraps_tensors(types):
            return NotImplemented
        if self.answers is not None and self.active and asks(func, args):
            return self.answers.give(func, args, kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            real = self.of(args[0])
            if real is None and not isinstance(args[0], FakeTensor):  # a fake tensor was written into it
                raise DataDependentOutputException(func)
            if real is None:
                return func(*args, **kwargs)
            self.asked = True
            with unset_fake_temporarily():
                return real.item()
        if func is aten._ctc_loss.Tensor and isinstance(args[0], FakeTensor) and self.of(args[3]) is not None:
            (steps, rows), longest = args[0].shape[:2], max(self._numbers(args[3]))
            return args[0].new_empty(rows), args[0].new_empty(rows, steps, 2 * longest + 1)
        if func is aten.masked_select.default and self.of(args[0]) is None and self.of(args[1]) is not None:
            return args[0].new_empty(_chosen(args[0].shape, self.of(args[1])))
        if func.overloadpacket is aten._ctc_loss_backward and any(isinstance(one, FakeTensor) for one in args[:2]):
            return torch.empty_like(args[1])  # PyTorch has no shape for it
        if (
            func.overloadpacket in INDEXED
            and len(args) > 1
            and any(isinstance(one, FakeTensor) for one in leaves(args))
        ):
            args = (args[0], self._places(args[0], args[1]), *args[2:])
        try:
            out = func(*args, **kwargs)
        except DynamicOutputShapeException:
            return self._sized_by_values(func, args, kwargs)
        if self.active:
            self._follow(func, args, kwargs, out)
        return out

    def _sized_by_values(self, func, args, kwargs):
        """The result of an op whose size the values decide (``nonzero``, ``repeat_interleave``, ``unique``). Raises the
        exception that is being handled if a value is not known."""
        leaves, shape = tree_flatten((args, kwargs))
        reals = [self.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        if not fakes or any(real is None and leaf is not None for real, leaf in zip(reals, leaves, strict=True)):
            raise
        with unset_fake_temporarily():
            real_args, real_kwargs = tree_unflatten(reals, shape)
            found, form = tree_flatten(func(*real_args, **real_kwargs))
        made = [fakes[0].fake_mode.from_tensor(item) if isinstance(item, torch.Tensor) else item for item in found]
        for fake, real in zip(made, found, strict=True):
            if isinstance(real, torch.Tensor):
                self._real[fake] = real
        return tree_unflatten(made, form)

    def _places(self, tensor, indices) -> list:
        """``indices`` of ``tensor``, with the numbers of its true elements in place of each mask of known values: a
        result has their count. Raises :class:`IndexError` for a mask of another shape."""
        places: list = []
        for index in indices:
            real = self.of(index) if isinstance(index, torch.Tensor) and index.dtype == torch.bool else None
            if real is None:
                places.append(index)
                continue
            covered = tensor.shape[len(places) : len(places) + real.dim()]
            if real.shape != covered:
                raise IndexError(
                    f"the shape of the mask {list(real.shape)} is not that of what it masks, {list(covered)}"
                )
            with unset_fake_temporarily():
                columns = [column.clone() for column in real.nonzero().unbind(1)]
            if not isinstance(index, FakeTensor):
                places += columns
                continue
            made = [index.fake_mode.from_tensor(column) for column in columns]
            self._real.update(zip(made, columns, strict=True))
            places += made
        return places

    def _numbers(self, tensor) -> list:
        """The values of a tensor that has a real copy."""
        real = self.of(tensor)
        with unset_fake_temporarily():
            return [] if real is None else real.tolist()

    def of(self, tensor) -> torch.Tensor | None:
        """The real copy of ``tensor``, a real one itself; None if its values are not known."""
        real = self._real.get(tensor) if isinstance(tensor, FakeTensor) else tensor
        if real is None or not self._stale or is_sparse(real):
            return real
        return None if real is None or real.untyped_storage()._cdata in self._stale else real

    def adopt(self, fake, real) -> None:
        """Let ``real``, or its value if it is fake, be the value of its copy ``fake``, if it is small."""
        real = self.of(real) if fake is not real else None
        if real is not None and real.numel() <= MOST_ELEMENTS:
            self._real[fake] = real.detach().clone()

    def exchange(self, tensor, other) -> None:
        """Let ``tensor`` have the contents of ``other`` from now on (``tensor.data = other``)."""
        real = self.of(other)
        if isinstance(tensor, FakeTensor) and real is not None:
            self._real[tensor] = real
        elif isinstance(tensor, FakeTensor):
            self._real.pop(tensor, None)
        elif real is None:
            self.outdate([tensor])

    def _follow(self, func, args, kwargs, out) -> None:
        outputs = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, FakeTensor)]
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        for tensor in outputs:
            if tensor.numel() > (_DRAWN[-1] if drawn and tensor.is_floating_point() else self.most_elements):
                return self._forget(func, args, kwargs)
        given, shape = tree_flatten((args, kwargs))
        reals = [self.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in given]
        small = not outputs or not outputs[0].is_floating_point() or outputs[0].numel() <= MOST_DRAWN
        if func.overloadpacket in LIKE and reals[0] is None and small:
            with unset_fake_temporarily():
                reals[0] = torch.empty(args[0].shape, dtype=args[0].dtype)
        known = all(real is not None or leaf is None for real, leaf in zip(reals, given, strict=True))
        if not outputs and not any(isinstance(leaf, FakeTensor) for leaf in given):
            if not known:  # it ran for real, on values that are not true
                self.outdate(leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, torch.Tensor))
            return None
        if not known:
            if func is aten.topk.default and self._is_route(*args[:3], **kwargs):
                self._real[outputs[1]] = _even_routes(outputs[1].shape, args[0].shape[-1])
            elif func is aten.argmax.default and len(args) > 1 and self._is_route(args[0], 1, args[1]):  # the best one
                self._real[outputs[0]] = _even_routes(outputs[0].shape, args[0].shape[-1])
            return self._forget(func, args, kwargs)
        try:
            with unset_fake_temporarily():
                real_args, real_kwargs = tree_unflatten(reals, shape)
                found = func(*real_args, **real_kwargs)
        except Exception:  # the fake call was accepted: only its values stay unknown
            return self._forget(func, args, kwargs)
        real_outputs = [leaf for leaf in tree_flatten(found)[0] if isinstance(leaf, torch.Tensor)]
        for fake, real in zip(outputs, real_outputs, strict=False):
            self._real[fake] = real
        return None

    def _is_route(self, scores, k, dim=-1, **_) -> bool:
        """Whether the largest of ``scores`` say which experts each token goes to."""
        return dim in (-1, scores.dim() - 1) and scores.shape[-1] in self.experts

    def _forget(self, func, args, kwargs) -> None:
        """The shadows of what ``func`` overwrites no longer hold."""
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        written = [*written_arguments(func), *BATCH_NORMS.get(func._opname, ())]
        self.outdate(leaf for position in written for leaf in leaves(given.get(names[position])))

    def outdate(self, tensors) -> None:
        """The values of some tensors are no longer true."""
        for tensor in tensors:
            real = self._real.get(tensor) if isinstance(tensor, FakeTensor) else tensor
            if isinstance(real, torch.Tensor) and not is_sparse(real):
                self._stale.add(real.untyped_storage()._cdata)
                self._kept.append(real.untyped_storage())


class _Exchanges(TorchFunctionMode):
    """Hears of ``tensor.data = other``, which is no op: a dispatch mode does not. Gives the numbers that an optimizer
    reads, if they are made up, as such."""

    def __init__(self, shadows: Shadows):
        super().__init__()
        self._shadows = shadows

    def __torch_function__(self, func, types, args=(), kwargs=None):
        reads = MadeUp.reads
        out = func(*args, **(kwargs or {}))
        if func is torch.Tensor.__format__ and args[0].dim() == 0 and self._shadows.of(args[0]) is not None:
            return format(args[0].item(), *args[1:])  # as that of a real tensor
        if MadeUp.reads != reads and func is torch.Tensor.item:
            return MadeUp(out)
        if MadeUp.reads != reads and func is torch.Tensor.__float__:  # Python makes a plain number of it
            MadeUp(out).steers()
        if func == SET_DATA:
            self._shadows.exchange(*args)
        return out


def _even_routes(shape, experts: int) -> torch.Tensor:
    """Which of the ``experts`` each row of an int64 tensor of this shape chooses: in turn, so that one is chosen once
    more than another at most, and none twice in a row."""
    with unset_fake_temporarily():
        return (torch.arange(shape.numel()) % experts).reshape(shape)


def _chosen(shape, mask) -> int:
    """How many elements of a tensor of this shape a mask chooses, which is broadcast with it."""
    with unset_fake_temporarily():
        whole = torch.broadcast_shapes(shape, mask.shape)
        return int(mask.sum()) * (math.prod(whole) // max(1, mask.numel()))


@contextmanager
def known_draws():
    """Random numbers that are drawn meanwhile are known, up to the usual size of shadows: inputs of a step, at which
    its code may look (whether an image is all zeros) as in a real run."""
    _DRAWN.append(MOST_ELEMENTS)
    try:
        yield
    finally:
        _DRAWN.pop()


def leaves(args) -> list:
    """What lies inside of lists and tuples."""
    return tree_flatten(args)[0]
