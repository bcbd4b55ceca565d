"""FP8 training: linear layers multiply in FP8, all else stays in 16 bit.

A linear layer has three products: its result, the gradient of its input and that of its weight. Their three operands
(input, weight, gradient of the result) are cast to FP8, once as they are and once transposed, and each serves two of
the three products; so each product is charged with half of the cast of both its operands. Products with a side that is
no multiple of 16, and those of the vocabulary, stay as they are (torchao's and torchtitan's filters). The share of a
gather that FP8 weights would save, and memory, are not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from simdev.errors import UnknownName
from simdev.parallel.program import Call
from simdev.problem.opcost.signature import parse_signature

# Bytes that the cast of an element reads and writes. ``dynamic`` (torchao, by tensor): the largest magnitude is found
# first, then the 16-bit operand is read again. ``delayed`` (Transformer Engine): the scale is that of earlier steps.
RECIPES = {"dynamic": (4, 2), "delayed": (2, 2)}
SIDES = 16  # cuBLAS multiplies FP8 matrices whose sides are multiples of it
LINEAR = ("mm", "addmm", "linear")


@dataclass(frozen=True)
class Float8:
    """``recipe`` is a key of :data:`RECIPES`; products with a side of ``keep`` (the vocabulary) stay in 16 bit."""

    recipe: str = "dynamic"
    keep: int = 0

    def __post_init__(self):
        if self.recipe not in RECIPES:
            raise UnknownName("recipe", self.recipe, RECIPES, source="float8")

    def calls_of(self, call: Call) -> list[Call]:
        """``call``, or the FP8 product and the cast that take its place."""
        if call.kind not in LINEAR or call.is_collective:
            return [call]
        matrices = [tensor for tensor in parse_signature(call.signature).inputs if len(tensor.shape) == 2]
        sides = {side for tensor in matrices for side in tensor.shape}
        half = all(tensor.dtype in ("f16", "bf16") for tensor in matrices)
        if len(matrices) != 2 or not half or self.keep in sides or any(side % SIDES for side in sides):
            return [call]
        left, right = matrices
        elements = (left.elements + right.elements) // 2
        read, written = RECIPES[self.recipe]
        shapes = [",".join(map(str, tensor.shape)) for tensor in matrices]
        product = f"_scaled_mm(f8e4m3[{shapes[0]}],f8e4m3[{shapes[1]}])->{left.dtype}"
        moved = call.bytes_read - (left.bytes + right.bytes) // 2
        return [
            replace(call, kind="_scaled_mm", signature=product, bytes_read=max(0, moved)),
            replace(call, kind="_to_copy", signature=f"_to_copy({left.dtype}[{elements}])->f8e4m3[{elements}]", flops=0,
                    bytes_read=read * elements, bytes_written=written * elements),
        ]  # fmt: skip
