"""A script on fake tensors: parameters hold no values, so a number that the script reads out of them is unknown.

Parameters are fake from the moment they are made, and so is what follows from them; data, indices and masks that the
script makes or loads are real. A number that follows from real tensors alone, or from small ones, is known and read as
it is. Any other is an :class:`Unknown`: it can be added up, formatted and printed, as logs do, and refuses to be
compared, converted or used as a condition. So no such number steers the script unseen.
"""

from __future__ import annotations

import copy
import dis
import importlib
import importlib.util
import json
import math
import operator
import os
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from simdev.errors import Unsupported
from simdev.graphs.capture.optimizers import has_own_rules, trained_by
from simdev.graphs.capture.rehearse import INSIDE
from simdev.graphs.capture.rewrites import fake_construction
from simdev.graphs.capture.shadows import MOST_DRAWN, Shadows
from simdev.graphs.capture.trace import Tape, tensors_in

REMEDY = "a run on fake tensors has no such value; run the script without --fake (smaller, if it does not fit), or {}"
FINITE = {"isfinite": True, "isnan": False, "isinf": False}  # what numbers are taken for
ARITHMETIC = "add sub mul truediv floordiv mod pow".split()
COMPARISONS = "eq ne lt le gt ge".split()
FUNCTIONS = "exp exp2 expm1 log log2 log10 log1p sqrt pow fabs tanh".split()  # of Python's math, and of NumPy


class Fakes:
    """While active, parameters are fake. :attr:`shadows` know the values of small tensors, :attr:`read` counts the
    unknown numbers by the place that read them, :attr:`assumed` the places that asked whether numbers are finite, and
    :attr:`refusal` is the first use of an unknown number that was refused, which the script may have caught."""

    def __init__(self, path: Path):
        self.mode, self.shadows = FakeTensorMode(allow_non_fake_inputs=True), Shadows()
        self.quiet = Tape()  # answers the optimizers of the steps that are not recorded
        self.quiet.recording, self.quiet.phase = False, "loop"
        self.read: Counter[str] = Counter()
        self.assumed: Counter[str] = Counter()
        self.refusal: Unsupported | None = None
        self._saved: dict = {}
        self._path, self._stack = path.resolve(), ExitStack()

    def __enter__(self):
        enter, draws = self._stack.enter_context, torch.nn.init._no_grad_trunc_normal_
        enter(fake_construction())
        enter(_set(torch.nn.init, "_no_grad_trunc_normal_", self._truncated(draws)))
        made, own = Parameter.__new__, self._parameter

        def parameter(cls, data=None, requires_grad=True):
            return made(cls, own(torch.empty(0) if data is None else data), requires_grad)

        enter(_set(Parameter, "__new__", staticmethod(parameter)))
        for owner, name in ((DataLoader, "__iter__"), (_BaseDataLoaderIter, "__next__")):
            enter(_set(owner, name, _without_modes(getattr(owner, name))))
        enter(_set(torch.Tensor, "share_memory_", _shared(torch.Tensor.share_memory_)))
        if (
            "torchvision" in self._path.read_text(encoding="utf-8", errors="replace")
            and importlib.util.find_spec("torchvision") is not None
        ):
            pictures = importlib.import_module("torchvision.utils")
            enter(_set(pictures, "save_image", self._picture(pictures.save_image)))
        enter(_set(json.JSONEncoder, "default", _as_null(json.JSONEncoder.default)))
        enter(_set(torch.distributions.Distribution, "_validate_args", False))  # its parameters are taken for valid
        enter(_set(torch, "save", self._save(torch.save)))
        enter(_set(torch, "load", self._load(torch.load)))
        for name in FINITE:
            enter(_in_math(name, self._finite(name, getattr(math, name))))
            enter(_set(np, name, self._finite(name, getattr(np, name))))
        for name in FUNCTIONS:
            enter(_in_math(name, _computed(getattr(math, name))))
        enter(self.shadows)
        enter(self.quiet)
        enter(_Reads(self))
        return self

    def __exit__(self, *error):
        return self._stack.__exit__(*error)

    def begin_update(self, optimizer, closure: bool) -> None:
        """An optimizer begins its step, which is a search if it has a closure."""
        self.quiet.updating += 1
        self.quiet.own_rules.append(has_own_rules(optimizer))
        self.quiet.searching = closure

    def end_update(self, optimizer) -> None:
        """It has ended. After a made-up number, the values of its parameters are not those of a real step."""
        if self.quiet.guessed:
            self.shadows.outdate(trained_by(optimizer))
        self.quiet.guessed = False
        self.quiet.updating -= 1
        self.quiet.own_rules.pop()

    def stepping(self) -> bool:
        """Whether an optimizer asks for numbers that steer nothing (step counters)."""
        return self.quiet.updating > 0 and not self.quiet.searching

    def unknown(self, tensor) -> bool:
        """Whether the values of a tensor are not known."""
        return isinstance(tensor, torch.Tensor) and self.shadows.of(tensor) is None

    def number(self) -> Unknown:
        """A number that was read and is not known."""
        self.read[self.place()] += 1
        return Unknown(self)

    def refuse(self, what: str, instead: str = "keep such numbers to logs") -> Unsupported:
        """The error of a use of an unknown number."""
        error = Unsupported(f"{self.place()} {what}; {REMEDY.format(instead)}")
        self.refusal = self.refusal or error
        return error

    def place(self) -> str:
        """``line 12`` of the script that runs, or of the file outside of PyTorch that asks."""
        frame: FrameType | None = sys._getframe(1)
        first = None
        while frame is not None:
            file = frame.f_code.co_filename
            if Path(file).resolve() == self._path:
                return f"line {frame.f_lineno}"
            if first is None and not file.startswith(INSIDE):
                first = f"line {frame.f_lineno} of {Path(file).name}"
            frame = frame.f_back
        return first or "the script"

    def _parameter(self, data):
        """``data`` without memory, unless it is fake already. A small tensor keeps its values beside."""
        if isinstance(data, FakeTensor) or type(data) not in (torch.Tensor, Parameter) or data.device.type == "meta":
            return data
        with self.mode, torch.no_grad():
            fake = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype)
        if data.numel() <= MOST_DRAWN:
            self.shadows.adopt(fake, data)
        else:
            self.shadows.outdate([fake])  # which took what its memory held for its values
        return fake

    def _truncated(self, original):
        """The truncated normal distribution looks at its draws: they are made beside a fake tensor."""

        def draw(tensor, *args, **kwargs):
            known = self.shadows.of(tensor)
            if known is not None:
                original(known, *args, **kwargs)
            return tensor

        return draw

    def _picture(self, original):
        """Pictures are logs: one of unknown values is not written."""

        def save(tensor, *args, **kwargs):
            if any(map(self.unknown, tensors_in(tensor))):
                self.read[self.place()] += 1
                return None
            return original(tensor, *args, **kwargs)

        return save

    def _save(self, original):
        """A checkpoint without values is not written, over one with values perhaps: it is kept for ``torch.load``."""

        def save(obj, f, *args, **kwargs):
            modules = [leaf for leaf in tree_leaves(obj) if isinstance(leaf, torch.nn.Module)]
            tensors = [*tree_leaves(obj), *(tensor for module in modules for tensor in module.parameters())]
            if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
                self._saved.pop(_named(f), None)
                return original(obj, f, *args, **kwargs)
            self.read[self.place()] += 1
            with torch.no_grad():
                copied = tree_map_only(torch.Tensor, torch.clone, obj)
            self._saved[_named(f)] = tree_map_only(torch.nn.Module, copy.deepcopy, copied)
            return None

        return save

    def _load(self, original):
        def load(f, *args, **kwargs):
            return self._saved[_named(f)] if _named(f) in self._saved else original(f, *args, **kwargs)

        return load

    def _finite(self, name: str, original):
        def asked(value, *args, **kwargs):
            if isinstance(value, Unknown):
                return self.take_for_finite(name)
            return original(value, *args, **kwargs)

        return asked

    def with_unknown(self, func, args, kwargs):
        """A tensor that takes unknown numbers for its own: from then on, all of its values are unknown."""
        known = tree_map_only(Unknown, lambda _: math.nan, args)
        made = func(*known, **kwargs)
        self.shadows.outdate([args[0] if made is None else made])
        return made

    def take_for_finite(self, name: str) -> bool:
        """The answer to a question after NaN or infinity."""
        self.assumed[self.place()] += 1
        return FINITE[name]


class _Reads(TorchFunctionMode):
    """Hears of every tensor that becomes a number."""

    def __init__(self, fakes: Fakes):
        super().__init__()
        self._fakes = fakes

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, fakes = kwargs or {}, self._fakes
        name = getattr(func, "__name__", "")
        tensor = args[0] if args else None
        if name in READS and isinstance(tensor, torch.Tensor) and not fakes.stepping() and fakes.unknown(tensor):
            return READS[name](fakes, tensor, *args[1:])
        taken = args[2] if name == "__setitem__" else tensor if name in ("tensor", "as_tensor") else None
        if fakes.read and any(isinstance(number, Unknown) for number in tree_leaves(taken)):
            return fakes.with_unknown(func, args, kwargs)
        if name in FINITE and isinstance(tensor, torch.Tensor) and fakes.unknown(tensor):
            asked = func(*args, **kwargs)
            answer = fakes.take_for_finite(name)
            fakes.shadows.adopt(asked, torch.full(asked.shape, answer))
            return asked
        if name in ("numpy", "tolist", "__format__", "__float__", "__int__") and isinstance(tensor, FakeTensor):
            known = fakes.shadows.of(tensor)
            if known is not None:
                return func(known, *args[1:], **kwargs)
        return func(*args, **kwargs)


def _item(fakes, tensor):
    return fakes.number()


def _list(fakes, tensor):
    fakes.read[fakes.place()] += 1
    return np.full(tuple(tensor.shape), Unknown(fakes), dtype=object).tolist()


def _array(fakes, tensor, *_):
    if tensor.numel() > MOST_DRAWN:
        raise fakes.refuse("makes a NumPy array of a large tensor", "leave the array out")
    fakes.read[fakes.place()] += 1
    return np.full(tuple(tensor.shape), Unknown(fakes), dtype=object)


def _format(fakes, tensor, spec=""):
    return format(fakes.number(), spec) if tensor.dim() == 0 else str(tensor)


def _refused(what: str):
    def refuse(fakes, *_):
        raise fakes.refuse(what, "use .item() in logs")

    return refuse


def _float(fakes, tensor, *_):
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*INSIDE, __file__)):
        frame = frame.f_back
    if frame is not None and _formats(frame):  # "%.3f" % tensor
        fakes.read[fakes.place()] += 1
        return math.nan
    raise fakes.refuse("turns the value of a tensor into a Python number by float()", "use .item() in logs")


CONDITION = "uses the value of a tensor as a condition"
READS = {
    "item": _item,
    "tolist": _list,
    "numpy": _array,
    "__array__": _array,
    "__format__": _format,
    "__float__": _float,
    "__int__": _refused("turns the value of a tensor into a Python number by int()"),
    "__index__": _refused("takes the value of a tensor as an index"),
    "__bool__": _refused(CONDITION),
    "equal": _refused(CONDITION),
    "allclose": _refused(CONDITION),
    "is_nonzero": _refused(CONDITION),
}


class Unknown:
    """A number that a run on fake tensors does not have: arithmetic with it is unknown, too, its text is ``?``."""

    __slots__ = ("_fakes",)

    def __init__(self, fakes: Fakes):
        self._fakes = fakes

    def __repr__(self) -> str:
        return "?"

    def __format__(self, spec: str) -> str:
        return "?"

    def __round__(self, digits=None):
        return self

    def __neg__(self):
        return self

    __pos__ = __abs__ = __neg__

    def __float__(self) -> float:
        frame = sys._getframe(1)
        if _formats(frame):  # "%.3f" % number
            return math.nan
        raise self._fakes.refuse("hands a number of the run to a function that computes with it")

    def __hash__(self) -> int:
        raise self._fakes.refuse("takes a number of the run as a key")

    def __bool__(self) -> bool:
        raise self._fakes.refuse("uses a number of the run as a condition")

    def __index__(self) -> int:
        raise self._fakes.refuse("takes a number of the run as a size or an index")

    def __int__(self) -> int:
        if _formats(sys._getframe(1)):
            return 0
        raise self._fakes.refuse("rounds a number of the run")

    def _with(self, calculate, other, swapped: bool):
        if isinstance(other, torch.Tensor):
            shadows = self._fakes.shadows
            active, shadows.active = shadows.active, False  # the result is unknown
            try:
                made = calculate(1.0, other) if swapped else calculate(other, 1.0)
            finally:
                shadows.active = active
            shadows.outdate([made])
            return made
        return self


def _formats(frame) -> bool:
    """Whether a frame is at the operator ``%``, which formats a text."""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset == frame.f_lasti:
            return instruction.opname in ("BINARY_MODULO", "BINARY_OP") and instruction.argrepr in ("%", "%=", "")
    return False


def _arithmetic(name: str):
    calculate = getattr(operator, name)

    def forward(self, other):
        return self._with(calculate, other, True)

    def backward(self, other):
        return self._with(calculate, other, False)

    return forward, backward


def _comparison(name: str):
    def compare(self, other):
        raise self._fakes.refuse("compares a number of the run")

    return compare


for _name in ARITHMETIC:
    _forward, _backward = _arithmetic(_name)
    setattr(Unknown, f"__{_name}__", _forward)
    setattr(Unknown, f"__r{_name}__", _backward)
for _name in FUNCTIONS:
    setattr(Unknown, _name, lambda self, *_: self)  # which NumPy's function calls
for _name in COMPARISONS:
    setattr(Unknown, f"__{_name}__", _comparison(_name))


def _computed(original):
    """A function of numbers, whose result is unknown if one of them is."""

    def compute(*numbers):
        unknown = [number for number in numbers if isinstance(number, Unknown)]
        return unknown[0] if unknown else original(*numbers)

    return compute


def _shared(original):
    """A tensor without memory has none to share."""

    def share(tensor):
        return tensor if isinstance(tensor, FakeTensor) else original(tensor)

    return share


def _as_null(original):
    """JSON has no unknown numbers."""

    def default(encoder, value):
        return None if isinstance(value, Unknown) else original(encoder, value)

    return default


def _named(file):
    """The absolute path of a file that is named, or the open file itself."""
    return os.path.abspath(file) if isinstance(file, (str, os.PathLike)) else file


def _without_modes(original):
    """What a ``DataLoader`` computes is real."""

    def call(*args, **kwargs):
        with torch.utils._python_dispatch._disable_current_modes():
            return original(*args, **kwargs)

    return call


@contextmanager
def _in_math(name: str, value):
    """A function in place of one of Python's ``math``, which TorchScript knows functions of by their identity."""
    from torch.jit import _builtins

    table = _builtins._get_builtin_table()
    known = table.get(id(getattr(math, name)))
    if known is not None:
        table[id(value)] = known
    try:
        with _set(math, name, value):
            yield
    finally:
        table.pop(id(value), None)


@contextmanager
def _set(owner, name: str, value):
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
