"""The inner loops of the cost model: a schedule of passes that is laid out once, with times and memory of a plan."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def end_ns(rank, stage, before, name, share, table, sent, ranks):
    """When the last action ends: ``table`` float ``(passes, stages)`` in ns, ``sent`` ns from stage to stage."""
    free, end = np.zeros(ranks), np.zeros(len(rank))
    for n in range(len(rank)):
        start = free[rank[n]]
        if before[n] >= 0:
            start = max(start, end[before[n]] + sent)
        end[n] = start + share[n] * table[name[n], stage[n]]
        free[rank[n]] = end[n]
    return free.max()


@njit(cache=True)
def most_bytes(rank, stage, name, left, most, live):
    """The largest peak of a rank: ``left`` and ``most`` are float ``(passes, stages)``, ``live`` ``(ranks,)``."""
    peak = 0.0
    for n in range(len(rank)):
        if name[n] >= 0:
            peak = max(peak, live[rank[n]] + most[name[n], stage[n]])
            live[rank[n]] += left[name[n], stage[n]]
    return peak


@njit(cache=True)
def longest_ns(stream, ns, wait_item, wait_for, streams):
    """The longest path that begins at an item on stream 0 and ends on it. Items, int ``(n,)``, are in the order in
    which they are issued; those of a stream run one after another. ``wait_item[p]`` waits for ``wait_for[p]``, which
    was issued before (negative: for nothing on a path)."""
    last, before = np.full(len(stream), -1), np.full(len(wait_item), -1)  # of the waits of an item, as a chain
    for p in range(len(wait_item)):
        before[p], last[wait_item[p]] = last[wait_item[p]], p
    free, finish = np.zeros(streams, np.int64), np.zeros(len(stream), np.int64)
    for n in range(len(stream)):
        start, p = free[stream[n]], last[n]
        while p >= 0:
            if wait_for[p] >= 0:
                start = max(start, finish[wait_for[p]])
            p = before[p]
        # what no item of stream 0 delays may have run before it
        finish[n] = start + ns[n] if stream[n] == 0 or start else 0
        free[stream[n]] = max(free[stream[n]], finish[n])
    return free[0]
