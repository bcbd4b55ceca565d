"""Memory that all workers of an execution see: one anonymous mapping, made before they are forked."""

from __future__ import annotations

import mmap

import numpy as np

ALIGNMENT = 64


class Shared:
    """Arrays in one shared mapping. :meth:`reserve` all of them, then :meth:`open` once; pages that nobody touches
    take no memory.

    Workers tell each other of finished work by plain stores, which others must see in the order in which they were
    made: true of x86, the only processors on which this is used for measurements.
    """

    def __init__(self):
        self._size = 0
        self._wanted: dict[str, tuple[int, tuple[int, ...], np.dtype]] = {}
        self._mapping: mmap.mmap | None = None

    def reserve(self, name: str, shape: tuple[int, ...] | int, dtype=np.int64) -> None:
        """An array of zeros by the name of ``name``."""
        shape = (shape,) if isinstance(shape, int) else shape
        dtype = np.dtype(dtype)
        self._wanted[name] = self._size, shape, dtype
        size = int(np.prod(shape)) * dtype.itemsize
        self._size += -(-size // ALIGNMENT) * ALIGNMENT

    def open(self) -> None:
        """Make the mapping."""
        self._mapping = mmap.mmap(-1, max(self._size, mmap.PAGESIZE))

    def array(self, name: str) -> np.ndarray:
        """The array reserved as ``name``; writable."""
        offset, shape, dtype = self._wanted[name]
        count = int(np.prod(shape))
        return np.frombuffer(self._mapping, dtype, count, offset).reshape(shape)

    def words(self, name: str) -> memoryview:
        """An int64 array as a flat view whose items are read and written fastest."""
        offset, shape, dtype = self._wanted[name]
        size = int(np.prod(shape)) * dtype.itemsize
        return memoryview(self._mapping)[offset : offset + size].cast("q")

    def span(self) -> tuple[int, int]:
        """Address and size in bytes of the mapping in this process."""
        return np.frombuffer(self._mapping, np.uint8).ctypes.data, len(self._mapping)
