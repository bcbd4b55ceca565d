"""The compiled loops of the bound from bottlenecks (:func:`simdev.analysis.bottleneck.bottleneck` has the argument)."""

from __future__ import annotations

import numpy as np
from numba import njit

BEFORE, BESIDE, BEHIND = 0, 1, 2

part = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)  # called by kernels only


@njit(cache=True)
def largest(longest, head, tail, by_tail, length, unit, share, most, slots, first, reader, sent, begin, maker, got):
    """The bound in ns, float, before its margin. ``first``, ``reader``, ``sent``: the edges by their maker;
    ``begin``, ``maker``, ``got``: by their reader."""
    n, best = len(head), 0.0
    side, stack, arrives = np.empty(n, np.int8), np.empty(n, np.int64), np.full(n, -1.0)
    for p in longest:
        side[:] = BESIDE
        _mark(p, side, BEHIND, first, reader, stack)
        _mark(p, side, BEFORE, begin, maker, stack)
        for e in range(begin[p], begin[p + 1]):
            u, end = maker[e], head[maker[e]] + length[maker[e]]
            c = head[p] + length[p]
            for i in range(first[u], first[u + 1]):
                v = reader[i]
                there = end + sent[i] if unit[v] != unit[u] else np.inf
                arrives[v] = max(arrives[v], head[v], there)
            room = max(0.0, slots * (c - end) - length[p]) * most
            found = _to_do(c, room, head, tail, by_tail, length, share, side, arrives)
            for i in range(first[u], first[u + 1]):
                arrives[reader[i]] = -1.0
            if unit[u] != unit[p]:
                c = max(c, end + got[e] + length[p])
                found = min(found, _to_do(c, 0.0, head, tail, by_tail, length, share, side, arrives))
            best = max(best, found)
    return best


@part
def _mark(p, side, value, first, other, stack):
    """Write ``value`` to ``side`` for ``p`` and all ops that its edges lead to."""
    side[p] = value
    stack[0], top = p, 1
    while top:
        top -= 1
        u = stack[top]
        for i in range(first[u], first[u + 1]):
            v = other[i]
            if side[v] != value:
                side[v] = value
                stack[top] = v
                top += 1


@part
def _to_do(c, room, head, tail, by_tail, length, share, side, arrives):
    """The largest ``c + b +`` shares of what is to be done after ``c`` and by ``b`` before the end. ``arrives`` is -1
    for all ops but the readers of the tensor, which have ``room`` in shares on the maker's device."""
    best, others, alone, together, behind = 0.0, 0.0, 0.0, 0.0, False
    for v in by_tail:
        if side[v] == BEHIND:
            others += share[v]
            behind = True
        elif side[v] == BESIDE:
            left = 1 - min(1.0, max(0.0, c - head[v]) / length[v])
            if arrives[v] < 0:
                others += share[v] * left
            else:
                alone += share[v] * left
                together += share[v] * (1 - min(1.0, max(0.0, c - arrives[v]) / length[v]))
        if behind:
            best = max(best, c + tail[v] + others + max(alone, together - room))
    return best
