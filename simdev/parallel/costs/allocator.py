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
class _Block:
    size: int
    stream: int
    small: bool
    order: int  # of its address within the allocator
    before: _Block | None = None
    after: _Block | None = None
    free: bool = False

    @property
    def rank(self) -> int:
        """By size, then by address: one number is compared more quickly than a pair."""
        return self.size << ORDERS | self.order


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
        self._free: dict[tuple[int, bool], list[int]] = {}  # (stream, small) -> ranks of the free blocks, sorted
        self._by_rank: dict[int, _Block] = {}
        self._next = 0
        self._held: dict[Hashable, _Block] = {}

    def replay(self, events: Iterable[Event]) -> None:
        """Apply events in their order. A key that is allocated again is released first."""
        for key, size, stream in events:
            if key in self._held:
                self._release(self._held.pop(key))
            if size > 0:
                self._held[key] = self._allocate(size, stream)

    def _allocate(self, size: int, stream: int) -> _Block:
        size = -(-size // GRANULE) * GRANULE
        small = size <= SMALL
        block = self._best(size, stream, small) or self._segment(size, stream, small)
        left = block.size - size
        if left >= GRANULE if small else left > SMALL:
            rest = _Block(left, stream, small, self._number(), block, block.after, True)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            self._keep(rest)
        block.free = False
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def _best(self, size: int, stream: int, small: bool) -> _Block | None:
        """The smallest free block of the stream that is large enough."""
        rows = self._free.get((stream, small), [])
        place = bisect_left(rows, size << ORDERS)
        return self._by_rank.pop(rows.pop(place)) if place < len(rows) else None

    def _segment(self, size: int, stream: int, small: bool) -> _Block:
        if small:
            whole = SMALL_SEGMENT
        else:
            whole = LARGE_SEGMENT if size < MEDIUM else -(-size // ROUND) * ROUND
        if self.reserved_bytes + whole > self.limit:
            self._give_back()
        self.reserved_bytes += whole
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return _Block(whole, stream, small, self._number())

    def _give_back(self) -> None:
        """Return to the driver each segment that is one free block."""
        for block in [block for block in self._by_rank.values() if block.before is None and block.after is None]:
            self._take(block)
            self.reserved_bytes -= block.size

    def _release(self, block: _Block) -> None:
        """Free a block and merge it with free neighbours of its segment."""
        self.allocated_bytes -= block.size
        for other in (block.before, block.after):
            if other is None or not other.free:
                continue
            self._take(other)
            block.size += other.size
            if other is block.before:
                block.before = other.before
                if block.before is not None:
                    block.before.after = block
            else:
                block.after = other.after
                if block.after is not None:
                    block.after.before = block
        block.free = True
        self._keep(block)

    def _keep(self, block: _Block) -> None:
        rank = block.rank
        self._by_rank[rank] = block
        insort(self._free.setdefault((block.stream, block.small), []), rank)

    def _take(self, block: _Block) -> None:
        """Remove a block from the free ones."""
        rank = block.rank
        rows = self._free[block.stream, block.small]
        rows.pop(bisect_left(rows, rank))
        del self._by_rank[rank]

    def _number(self) -> int:
        self._next += 1
        return self._next
