"""Sets of small numbers as the bits of a word."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload


def lowest_bit(bits):
    """The least number in a set, uint64 that is not 0; with Numba, one instruction."""
    return (int(bits) & -int(bits)).bit_length() - 1


@overload(lowest_bit)
def _lowest_bit(bits):
    return lambda bits: _trailing_zeros(bits)


@intrinsic
def _trailing_zeros(context, bits):
    def generate(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate
