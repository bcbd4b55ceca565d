"""Op signatures taken apart: ``mm(f32[2,3],f32[3,4])->f32[2,4]`` into a kind, tensors and attributes."""

from __future__ import annotations

import re
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
