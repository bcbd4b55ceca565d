"""Kernel of the bound from paths and transfers (see :func:`simdev.bounds.gathered_heads`)."""

from __future__ import annotations

import numpy as np
from numba import njit

NEVER = np.int64(1) << 60


@njit(cache=True)
def raise_heads(head, fastest, first_input, source, sending, tie, work, size, slots, memory, most):
    """Raise ``head`` int64 ``(n,)`` in place; ops are in a topological order.

    ``source`` and ``sending``: of op ``v``'s inputs ``first_input[v]:first_input[v + 1]``, the op that makes it and the
    least time to send it. Ops of equal ``tie`` share a device. ``work``, ``size`` int64 ``(k, n)`` on each of ``k``
    device types (-1: no kernel), with ``slots`` and ``memory``. At most ``most`` ops are looked at for each op.
    """
    n = len(head)
    seen = np.full(n, -1, np.int32)
    apart, along = np.zeros(n, np.int64), np.zeros(n, np.int64)
    near, key, late = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    for v in range(n):
        known, low = head[v], v
        for i in range(first_input[v], first_input[v + 1]):
            u = source[i]
            known = max(known, head[u] + fastest[u])
            cost = NEVER if tie[u] == tie[v] else sending[i]
            apart[u] = max(apart[u], cost) if seen[u] == v else cost
            along[u], seen[u], low = 0, v, min(low, u)
        count, u = 0, v
        while u > low and count < most:
            u -= 1
            if seen[u] != v:
                continue
            if tie[u] == tie[v]:
                apart[u] = NEVER
            from_start = min(NEVER, fastest[u] + apart[u])
            arrives = NEVER if from_start >= NEVER else head[u] + from_start
            if arrives <= known:  # and so is whatever reaches v through u
                continue
            near[count], key[count], late[count] = u, arrives, head[u]
            count += 1
            through = fastest[u] + along[u]
            for i in range(first_input[u], first_input[u + 1]):
                x = source[i]
                cost = from_start if tie[x] == tie[u] else min(from_start, sending[i] + through)
                apart[x] = max(apart[x], cost) if seen[x] == v else cost
                along[x] = max(along[x], through) if seen[x] == v else through
                seen[x], low = v, min(low, x)
        if count:
            known = max(known, _earliest(near[:count], key[:count], late[:count], head, work, size, slots, memory))
        head[v] = known


@njit(cache=True)
def _earliest(near, key, late, head, work, size, slots, memory):
    """Over thresholds ``t``: the lesser of ``t`` and the time by which the ops with ``key >= t`` are done together."""
    ranked, order = np.sort(key)[::-1], np.argsort(late, kind="mergesort")
    best, low, high = np.int64(0), 0, len(key) - 1
    while low <= high:  # the more ops together, the longer: the best threshold is where the two meet
        middle = (low + high) // 2
        limit, together = ranked[middle], NEVER
        for d in range(len(slots)):
            done, total, held, first, possible = np.int64(0), np.int64(0), np.int64(0), NEVER, True
            for j in order:
                if key[j] < limit:
                    continue
                u = near[j]
                if work[d, u] < 0:
                    possible = False
                    break
                done = max(done, head[u]) + work[d, u]
                total, held, first = total + work[d, u], held + size[d, u], min(first, head[u])
            if possible and held <= memory[d]:
                together = min(together, done if slots[d] == 1 else first - (-total // slots[d]))
        if min(limit, together) < NEVER:
            best = max(best, min(limit, together))
        if together >= limit:
            high = middle - 1
        else:
            low = middle + 1
    return best
