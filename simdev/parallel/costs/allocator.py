"""How much memory PyTorch's caching allocator takes from the driver for a sequence of allocations: *reserved* memory.

Profilers and published runs report reserved memory as often as allocated memory. The allocator asks the driver for
segments, cuts blocks from them, and gives segments back only if memory runs out: then all that are free as a whole. A
freed block serves only requests of its own stream, and a block that is slightly too small serves none, so more is
reserved than was ever allocated. The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` with default settings;
expandable segments, ``record_stream`` and garbage collection are not modelled.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from math import inf

GRANULE = 512  # every block is a multiple
SMALL = 1 << 20  # requests up to this size share segments of SMALL_SEGMENT bytes
SMALL_SEGMENT = 2 << 20
MEDIUM = 10 << 20  # larger requests below this size take segments of LARGE_SEGMENT bytes
LARGE_SEGMENT = 20 << 20
ROUND = 2 << 20  # segments of even larger requests are a multiple
ORDERS = 40  # bits for the number of a block

Event = tuple[Hashable, int, int]  # (key, bytes, stream): an allocation, or with 0 bytes the release of a key


@dataclass(eq=False, slots=True)
class _Pool:
    """The free blocks of a stream, small or large ones: their ranks, sorted. ``least`` is the smallest rest of a block
    that is cut off."""

    small: bool
    least: int
    free: list[int]


@dataclass(eq=False, slots=True)
class _Block:
    """``rank`` is that by size, then by address: one number is compared more quickly than a pair."""

    size: int
    pool: _Pool
    order: int  # of its address within the allocator
    before: _Block | None = None
    after: _Block | None = None
    free: bool = False
    rank: int = 0  # while it is free


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


class CachingAllocator:
    """``allocated_bytes`` and ``reserved_bytes`` are the present totals, ``peak_allocated_bytes`` and
    ``peak_reserved_bytes`` their largest values. ``limit`` is the memory of the board in bytes: where a segment exceeds
    it although free segments were given back, the driver would refuse it; here it is taken, so that the peak says how
    much is lacking."""

    def __init__(self, limit: float = inf):
        self.limit = limit
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}  # by stream, and whether their blocks are small
        self._by_rank: dict[int, _Block] = {}
        self._next = 0
        self._held: dict[Hashable, _Block] = {}

    def replay(self, events: Iterable[Event]) -> None:
        """Apply events in their order. A key that is allocated again is released first."""
        held = self._held
        for key, size, stream in events:
            if key in held:
                self._release(held.pop(key))
            if size > 0:
                held[key] = self._allocate(size, stream)

    def _allocate(self, size: int, stream: int) -> _Block:
        size = -(-size // GRANULE) * GRANULE
        small = size <= SMALL
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = _Pool(small, GRANULE if small else SMALL + 1, [])
        ranks = pool.free
        place = bisect_left(ranks, size << ORDERS)  # the smallest free block that is large enough
        block = self._by_rank.pop(ranks.pop(place)) if place < len(ranks) else self._segment(size, pool)
        left = block.size - size
        if left >= pool.least:
            after = block.after
            rest = _Block(left, pool, self._number(), block, after)
            if after is not None:
                after.before = rest
            block.after, block.size = rest, size
            self._keep(rest)
        block.free = False
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def _segment(self, size: int, pool: _Pool) -> _Block:
        if pool.small:
            whole = SMALL_SEGMENT
        else:
            whole = LARGE_SEGMENT if size < MEDIUM else -(-size // ROUND) * ROUND
        if self.reserved_bytes + whole > self.limit:
            self._give_back()
        self.reserved_bytes += whole
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return _Block(whole, pool, self._number())

    def _give_back(self) -> None:
        """Return to the driver each segment that is one free block."""
        for block in [block for block in self._by_rank.values() if block.before is None and block.after is None]:
            self._take(block)
            self.reserved_bytes -= block.size

    def _release(self, block: _Block) -> None:
        """Free a block and merge it with free neighbours of its segment."""
        self.allocated_bytes -= block.size
        before, after = block.before, block.after
        if before is not None and before.free:
            self._take(before)
            block.size += before.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.free:
            self._take(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        self._keep(block)

    def _keep(self, block: _Block) -> None:
        block.free, block.rank = True, block.size << ORDERS | block.order
        self._by_rank[block.rank] = block
        insort(block.pool.free, block.rank)

    def _take(self, block: _Block) -> None:
        """Remove a block from the free ones."""
        ranks = block.pool.free
        ranks.pop(bisect_left(ranks, block.rank))
        del self._by_rank[block.rank]

    def _number(self) -> int:
        self._next += 1
        return self._next
