"""Op signatures taken apart: ``mm(f32[2,3],f32[3,4])->f32[2,4]`` into a kind, tensors and attributes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

TENSOR = re.compile(r"(?<![\w=.])(bool|[a-z]+\d\w*)\[([\d,]*)\]")
ATTRIBUTE = re.compile(r"(\w+)=(\[[^\]]*\]|[^,()]+)")
ITEM_BYTES = {"f64": 8, "i64": 8, "f32": 4, "i32": 4, "f16": 2, "bf16": 2, "i16": 2}


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * ITEM_BYTES.get(self.dtype, 1)


@dataclass(frozen=True)
class Signature:
    kind: str
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    attributes: dict[str, str] = field(default_factory=dict)

    def numbers(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """The whole numbers of a list attribute such as ``stride=[2,2]``."""
        return tuple(int(number) for number in re.findall(r"-?\d+", self.attributes.get(name, ""))) or default

    @property
    def dtype(self) -> str:
        """The dtype of the first floating-point tensor; ``f32`` where there is none."""
        floats = (t.dtype for t in (*self.inputs, *self.outputs) if t.dtype in ("f32", "f16", "bf16", "f64"))
        return next(floats, "f32")

    @property
    def key(self) -> str:
        """How ``[ops]`` of a device file names the op: :func:`op_key`."""
        return op_key(self.kind, [tensor.shape for tensor in self.inputs], self.dtype)


def op_key(kind: str, shapes: Iterable[Iterable[int]], dtype: str) -> str:
    """``mm(16x4,8x16) f32``: an op by the shapes of its operands, as graphs and profiler traces agree on them.

    The shapes are sorted, because operands of one kind come in any order, and those with less than two dimensions count
    only if there is no other: a profiler lists scalars and statistics that a graph lacks. ``add_`` is ``add``.
    """
    known = sorted(tuple(shape) for shape in shapes if shape)
    names = ["x".join(map(str, shape)) for shape in [shape for shape in known if len(shape) > 1] or known]
    return f"{kind.rstrip('_')}({','.join(names)}) {dtype}"


def parse_signature(text: str) -> Signature:
    """Take a signature apart. Text without parentheses is a kind alone; nothing is refused."""
    kind, bracket, rest = text.partition("(")
    if not bracket:
        return Signature(text)
    arguments, _, results = rest.rpartition(")->") if ")->" in rest else (rest, "", "")
    return Signature(kind, _tensors(arguments), _tensors(results), dict(ATTRIBUTE.findall(arguments)))


def _tensors(text: str) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(dtype, tuple(int(size) for size in sizes.split(",") if size)) for dtype, sizes in TENSOR.findall(text)
    )
