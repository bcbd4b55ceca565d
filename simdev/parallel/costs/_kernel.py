"""The inner loops of the replay of allocations: PyTorch's caching allocator over flat arrays.

A block is a number. The free blocks of a stream, small ones and large ones apart, are a *pool*, sorted by *rank*: by
size, then by address, as one number.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

GRANULE = 512  # every block is a multiple
SMALL = 1 << 20  # requests up to this size share segments of SMALL_SEGMENT bytes
SMALL_SEGMENT = 2 << 20
MEDIUM = 10 << 20  # larger requests below this size take segments of LARGE_SEGMENT bytes
LARGE_SEGMENT = 20 << 20
ROUND = 2 << 20  # segments of even larger requests are a multiple
ORDERS = 32  # bits for the order of a block

ALLOCATED, RESERVED, MOST_ALLOCATED, MOST_RESERVED, ORDER, SPARE = range(6)  # of ``totals``
part = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)  # called by kernels only


class State(NamedTuple):
    """An allocator.

    ``totals`` int64 ``(6,)``: bytes allocated and reserved, their largest values, how many blocks were numbered, and
    how many numbers in ``spare`` no block has. Of each block int64 ``(blocks,)``: ``size`` in bytes, ``order`` of its
    address, its neighbours ``before`` and ``after`` in its segment (-1: none), its ``pool``, ``rank`` while it is free
    and -1 while it is not. Of each pool: ``filled``, the number of its free blocks, and their ``ranks`` and ``blocks``,
    int64 ``(pools, blocks)``. ``held`` int64 ``(keys,)``: the block of each key, or -1.
    """

    totals: np.ndarray
    spare: np.ndarray
    size: np.ndarray
    order: np.ndarray
    before: np.ndarray
    after: np.ndarray
    pool: np.ndarray
    rank: np.ndarray
    filled: np.ndarray
    ranks: np.ndarray
    blocks: np.ndarray
    held: np.ndarray


@njit(cache=True)
def replay(state, events, begin, limit):
    """Apply ``events`` from number ``begin`` on, int64 ``(n, 3)``: key, bytes (0: release), stream; ``limit`` in bytes.
    Returns the number of the first that was not applied, for lack of room for the two blocks that one may need."""
    for n in range(begin, len(events)):
        if state.totals[SPARE] < 2:
            return n
        key, size, stream = events[n]
        if state.held[key] >= 0:
            _release(state, state.held[key])
            state.held[key] = -1
        if size > 0:
            state.held[key] = _allocate(state, size, stream, limit)
    return len(events)


@part
def _allocate(state, size, stream, limit):
    size = -(-size // GRANULE) * GRANULE
    small = size <= SMALL
    pool = 2 * stream + small
    least = size // GRANULE << ORDERS  # of the ranks of blocks that are large enough
    place = np.searchsorted(state.ranks[pool, : state.filled[pool]], least)
    if place < state.filled[pool]:
        block = state.blocks[pool, place]
        _forget(state, pool, place)
    else:
        block = _segment(state, size, pool, limit)
    left = state.size[block] - size
    if left >= (GRANULE if small else SMALL + 1):
        after = state.after[block]
        rest = _block(state, left, pool, block, after)
        if after >= 0:
            state.before[after] = rest
        state.after[block], state.size[block] = rest, size
        _keep(state, rest)
    state.totals[ALLOCATED] += state.size[block]
    state.totals[MOST_ALLOCATED] = max(state.totals[MOST_ALLOCATED], state.totals[ALLOCATED])
    return block


@part
def _segment(state, size, pool, limit):
    if pool % 2:
        whole = SMALL_SEGMENT
    else:
        whole = LARGE_SEGMENT if size < MEDIUM else -(-size // ROUND) * ROUND
    if state.totals[RESERVED] + whole > limit:
        _give_back(state)
    state.totals[RESERVED] += whole
    state.totals[MOST_RESERVED] = max(state.totals[MOST_RESERVED], state.totals[RESERVED])
    return _block(state, whole, pool, -1, -1)


@part
def _give_back(state):
    """Return to the driver each segment that is one free block."""
    for pool in range(len(state.filled)):
        kept = 0
        for place in range(state.filled[pool]):
            block = state.blocks[pool, place]
            if state.before[block] < 0 and state.after[block] < 0:
                state.totals[RESERVED] -= state.size[block]
                _drop(state, block)
            else:
                state.ranks[pool, kept], state.blocks[pool, kept] = state.ranks[pool, place], block
                kept += 1
        state.filled[pool] = kept


@part
def _release(state, block):
    """Free a block and merge it with free neighbours of its segment."""
    state.totals[ALLOCATED] -= state.size[block]
    _absorb(state, block, state.before, state.after)
    _absorb(state, block, state.after, state.before)
    _keep(state, block)


@part
def _absorb(state, block, near, far):
    """Merge a block with its neighbour ``near`` it, if that is free; ``far`` are the neighbours on the other side."""
    other = near[block]
    if other >= 0 and state.rank[other] >= 0:
        _take(state, other)
        state.size[block] += state.size[other]
        near[block] = near[other]
        if near[block] >= 0:
            far[near[block]] = block
        _drop(state, other)


@part
def _block(state, size, pool, before, after):
    state.totals[SPARE] -= 1
    block = state.spare[state.totals[SPARE]]
    state.totals[ORDER] += 1
    state.size[block], state.order[block] = size, state.totals[ORDER]
    state.before[block], state.after[block] = before, after
    state.pool[block], state.rank[block] = pool, -1
    return block


@part
def _drop(state, block):
    state.spare[state.totals[SPARE]] = block
    state.totals[SPARE] += 1


@part
def _keep(state, block):
    pool = state.pool[block]
    rank = state.size[block] // GRANULE << ORDERS | state.order[block]
    end = state.filled[pool]
    place = np.searchsorted(state.ranks[pool, :end], rank)
    for n in range(end, place, -1):
        state.ranks[pool, n], state.blocks[pool, n] = state.ranks[pool, n - 1], state.blocks[pool, n - 1]
    state.ranks[pool, place], state.blocks[pool, place] = rank, block
    state.filled[pool], state.rank[block] = end + 1, rank


@part
def _take(state, block):
    """Remove a block from the free ones."""
    pool = state.pool[block]
    _forget(state, pool, np.searchsorted(state.ranks[pool, : state.filled[pool]], state.rank[block]))


@part
def _forget(state, pool, place):
    state.rank[state.blocks[pool, place]] = -1
    for n in range(place, state.filled[pool] - 1):
        state.ranks[pool, n], state.blocks[pool, n] = state.ranks[pool, n + 1], state.blocks[pool, n + 1]
    state.filled[pool] -= 1


@njit(cache=True)
def count(totals, held, events):
    """Bytes that ``events`` allocate, without an allocator: ``totals`` int64 holds those of now and the largest."""
    for n in range(len(events)):
        key, size, _ = events[n]
        totals[ALLOCATED] += size - held[key]
        held[key] = size
        totals[MOST_ALLOCATED] = max(totals[MOST_ALLOCATED], totals[ALLOCATED])


@njit(cache=True)
def keys_of_pass(slot, size, how, number, alive, depth, wide, key):
    """Writes the keys of a pass of the microbatch ``number`` to ``key``, int64 ``(n,)``.

    ``slot`` int64 ``(n,)`` numbers what is allocated; a key is ``slot * wide`` plus the microbatch that allocates it.
    ``how`` int64 ``(n,)``: -2, one of each for all microbatches; -1, the pass's own microbatch; ``k >= 0``, the same,
    remembered in row ``k`` of ``alive``, int64 ``(rows, wide)``, of which the first ``depth[k]`` count; ``k < -2``: the
    last one that row ``-3 - k`` remembers.
    """
    for n in range(len(slot)):
        whose = number
        if how[n] == -2:
            key[n] = slot[n] * wide
            continue
        if how[n] != -1:
            row = how[n] if how[n] >= 0 else -3 - how[n]
            end = depth[row]
            if how[n] < 0 and end:
                whose = alive[row, end - 1]
            place = 0
            while place < end and alive[row, place] != whose:
                place += 1
            if size[n] and place == end:
                alive[row, end] = whose
                depth[row] = end + 1
            elif not size[n] and place < end:
                for k in range(place, end - 1):
                    alive[row, k] = alive[row, k + 1]
                depth[row] = end - 1
        key[n] = slot[n] * wide + 1 + whose
