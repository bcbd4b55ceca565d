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
