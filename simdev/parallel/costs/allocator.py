"""How much memory PyTorch's caching allocator takes from the driver for a sequence of allocations: *reserved* memory.

Profilers and published runs report reserved memory as often as allocated memory. The allocator asks the driver for
segments, cuts blocks from them, and gives segments back only if memory runs out: then all that are free as a whole. A
freed block serves only requests of its own stream, and a block that is slightly too small serves none, so more is
reserved than was ever allocated. The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` with default settings;
expandable segments, ``record_stream`` and garbage collection are not modelled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

import numpy as np

from simdev.parallel.costs import _kernel
from simdev.parallel.costs._kernel import ALLOCATED, MOST_ALLOCATED, MOST_RESERVED, RESERVED, SPARE

Event = tuple[int, int, int]  # (key, bytes, stream): an allocation, or with 0 bytes the release of a key
LIMIT = 1 << 60  # bytes that no board has


@dataclass(frozen=True)
class Reserved:
    """Bytes of a pipeline rank: ``allocated`` is the peak of what its tensors take, ``reserved`` that of what PyTorch's
    allocator has taken from the driver, ``buffers`` what NCCL takes beside it."""

    allocated: int
    reserved: int
    buffers: int

    @property
    def total(self) -> int:
        return self.reserved + self.buffers


class Counter:
    """Counts the bytes that are allocated, ``allocated_bytes`` now and ``peak_allocated_bytes`` at most; reserves
    nothing."""

    def __init__(self):
        self._totals, self._held = np.zeros(6, np.int64), np.zeros(0, np.int64)

    @property
    def allocated_bytes(self) -> int:
        return int(self._totals[ALLOCATED])

    @property
    def peak_allocated_bytes(self) -> int:
        return int(self._totals[MOST_ALLOCATED])

    def replay(self, events: Iterable[Event] | np.ndarray) -> None:
        """Apply events, int64 ``(n, 3)``, in their order. A key that is allocated again is released first."""
        rows = as_events(events)
        self._held = _longer(self._held, _end(rows[:, 0]))
        _kernel.count(self._totals, self._held, rows)


class CachingAllocator(Counter):
    """Reserves ``reserved_bytes`` now and ``peak_reserved_bytes`` at most. ``limit`` is the memory of the board in
    bytes: where a segment exceeds it although free segments were given back, the driver would refuse it; here it is
    taken, so that the peak says how much is lacking."""

    def __init__(self, limit: float = inf):
        self.limit = int(min(limit, LIMIT))
        none, flat = np.zeros(0, np.int64), np.zeros((0, 0), np.int64)
        self._totals = np.zeros(6, np.int64)
        self._state = _kernel.State(self._totals, *(none,) * 8, flat, flat, none)

    @property
    def reserved_bytes(self) -> int:
        return int(self._totals[RESERVED])

    @property
    def peak_reserved_bytes(self) -> int:
        return int(self._totals[MOST_RESERVED])

    def replay(self, events: Iterable[Event] | np.ndarray) -> None:
        rows = as_events(events)
        pools = max(len(self._state.filled), 2 * _end(rows[:, 2]))
        self._grow(len(self._state.size), pools, _end(rows[:, 0]))
        done = 0
        while (done := _kernel.replay(self._state, rows, done, self.limit)) < len(rows):
            self._grow(2 * len(self._state.size), pools, 0)

    def _grow(self, blocks: int, pools: int, keys: int) -> None:
        """Make room for at least so many blocks, pools and keys."""
        old, blocks = self._state, max(blocks, 1024)
        have, few = int(self._totals[SPARE]), len(old.size)
        own = {name: _longer(getattr(old, name), blocks) for name in ("spare", "size", "order", "before", "after")}
        own |= {name: _longer(getattr(old, name), blocks) for name in ("pool", "rank")}
        own["spare"][have : have + blocks - few] = np.arange(few, blocks)
        self._totals[SPARE] += blocks - few
        flat = [np.pad(one, [(0, pools - len(one)), (0, blocks - few)]) for one in (old.ranks, old.blocks)]
        held, filled = _longer(old.held, keys, -1), _longer(old.filled, pools)
        self._state = old._replace(**own, filled=filled, ranks=flat[0], blocks=flat[1], held=held)


def as_events(events: Iterable[Event] | np.ndarray) -> np.ndarray:
    """Events as int64 ``(n, 3)``."""
    rows = events if isinstance(events, np.ndarray) else list(events)
    return np.array(rows, np.int64).reshape(-1, 3)


def _end(numbers: np.ndarray) -> int:
    return int(numbers.max()) + 1 if len(numbers) else 0


def _longer(array: np.ndarray, length: int, fill: int = 0) -> np.ndarray:
    return np.pad(array, (0, max(0, length - len(array))), constant_values=fill)
