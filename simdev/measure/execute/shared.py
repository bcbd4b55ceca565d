"""Memory that all workers of an execution share: one anonymous mapping, created before the workers are forked."""

from __future__ import annotations

import mmap

import numpy as np

ALIGNMENT = 64


class Shared:
    """Arrays in one shared mapping.

    Call :meth:`reserve` for every array, then :meth:`open` once. Pages that are never touched take no memory. Workers
    announce finished work by plain stores. Other workers must see these stores in program order, which x86 processors
    guarantee; measurements are made on no other processors.
    """

    def __init__(self):
        self._size = 0
        self._wanted: dict[str, tuple[int, tuple[int, ...], np.dtype]] = {}
        self._mapping: mmap.mmap | None = None

    def reserve(self, name: str, shape: tuple[int, ...] | int, dtype=np.int64) -> None:
        """Reserve an array of zeros under ``name``."""
        shape = (shape,) if isinstance(shape, int) else shape
        dtype = np.dtype(dtype)
        self._wanted[name] = self._size, shape, dtype
        size = int(np.prod(shape)) * dtype.itemsize
        self._size += -(-size // ALIGNMENT) * ALIGNMENT

    def open(self) -> None:
        """Create the mapping; call it once, after all reservations."""
        self._mapping = mmap.mmap(-1, max(self._size, mmap.PAGESIZE))

    def _pages(self) -> mmap.mmap:
        if self._mapping is None:
            raise RuntimeError("the mapping is not open yet")
        return self._mapping

    def array(self, name: str) -> np.ndarray:
        """The writable array that was reserved as ``name``."""
        offset, shape, dtype = self._wanted[name]
        count = int(np.prod(shape))
        return np.frombuffer(self._pages(), dtype, count, offset).reshape(shape)

    def words(self, name: str) -> memoryview:
        """An int64 array as a flat memoryview, the fastest way to read and write single items."""
        offset, shape, dtype = self._wanted[name]
        size = int(np.prod(shape)) * dtype.itemsize
        return memoryview(self._pages())[offset : offset + size].cast("q")

    def span(self) -> tuple[int, int]:
        """Address of the mapping in this process, and its size in bytes."""
        return np.frombuffer(self._pages(), np.uint8).ctypes.data, len(self._pages())
