"""FP8 training: linear layers multiply in FP8, all else stays in 16 bit.

A linear layer has three products: its result, the gradient of its input and that of its weight. Their three operands
(input, weight, gradient of the result) are cast to FP8, once as they are and once transposed, and each serves two of
the three products; so each product is charged with half of the cast of both its operands. Products with a side that is
no multiple of 16, and those of the vocabulary, stay as they are (torchao's and torchtitan's filters). The share of a
gather that FP8 weights would save, and memory, are not modelled.

Megatron-Core keeps the FP8 weights of a step's first microbatch for the others (Transformer Engine's
``is_first_microbatch``). ``tokens`` is the number of rows of an activation; operands with other sizes are weights, and
their casts are left out: one of them a step is below 1 % of a step of 16 microbatches.
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
    """``recipe`` is a key of :data:`RECIPES`; products with a side of ``keep`` (the vocabulary) stay in 16 bit.
    ``tokens`` is the number of rows of an activation if the casts of weights are kept through a step; otherwise 0."""

    recipe: str = "dynamic"
    keep: int = 0
    tokens: int = 0

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
        elements = round(left.elements + self._share_of_cast(call, left.shape, right.shape) * right.elements) // 2
        read, written = RECIPES[self.recipe]
        shapes = [",".join(map(str, tensor.shape)) for tensor in matrices]
        product = f"_scaled_mm(f8e4m3[{shapes[0]}],f8e4m3[{shapes[1]}])->{left.dtype}"
        moved = call.bytes_read - (left.bytes + right.bytes) // 2
        return [
            replace(call, kind="_scaled_mm", signature=product, bytes_read=max(0, moved)),
            replace(call, kind="_to_copy", signature=f"_to_copy({left.dtype}[{elements}])->f8e4m3[{elements}]", flops=0,
                    bytes_read=read * elements, bytes_written=written * elements),
        ]  # fmt: skip

    def _share_of_cast(self, call: Call, left: tuple[int, ...], right: tuple[int, ...]) -> float:
        """Which share of a product's right operand is cast in each microbatch. That operand is a weight in a forward
        pass and in the gradient of an input, and an activation in the gradient of a weight, which sums over tokens. For
        a square product of a backward pass, shapes do not say which: half of such products are of either sort."""
        if not self.tokens:
            return 1.0
        if call.is_forward or left[1] != self.tokens:
            return 0.0
        return 0.5 if left[0] == self.tokens else 1.0
