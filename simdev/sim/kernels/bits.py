"""Sets of small numbers as the bits of words."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from simdev.sim.kernels.compiled import part

WORD, IN_WORD = np.uint64(6), np.uint64(63)  # a number's word, and its bit there
NONE, ONE = np.uint64(0), np.uint64(1)


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


def set_words(n):
    """Words of a set of numbers below ``n``. Over the words for the numbers lie two levels more, where a bit says
    whether a word of the level below holds any."""
    return (n >> 6) + (n >> 12) + (n >> 18) + 3


@part
def _levels(n):
    """Where the second and the third level begin."""
    second = np.uint64((n >> 6) + 1)
    return second, second + np.uint64((n >> 12) + 1)


@part
def add(bits, base, n, number):
    """Add a number to the set of numbers below ``n`` whose words begin at ``base``."""
    second, third = _levels(n)
    bits[base + (number >> WORD)] |= ONE << (number & IN_WORD)
    number >>= WORD
    bits[base + second + (number >> WORD)] |= ONE << (number & IN_WORD)
    number >>= WORD
    bits[base + third + (number >> WORD)] |= ONE << (number & IN_WORD)


@part
def take_least(bits, base, n):
    """Remove the least number of a set that is not empty; returns it."""
    second, third = _levels(n)
    word = NONE
    while bits[base + third + word] == NONE:
        word += ONE
    upper = (word << WORD) | lowest_bit(bits[base + third + word])
    middle = (upper << WORD) | lowest_bit(bits[base + second + upper])
    number = (middle << WORD) | lowest_bit(bits[base + middle])
    bits[base + middle] &= bits[base + middle] - ONE
    if bits[base + middle] == NONE:
        bits[base + second + upper] &= bits[base + second + upper] - ONE
        if bits[base + second + upper] == NONE:
            bits[base + third + word] &= bits[base + third + word] - ONE
    return number
