"""The compiled loops of the bound from paths and transfers (:func:`simdev.analysis.transfers.gathered` has the
argument).

NumPy's functions would say the same in fewer lines, but take several times as long to compile.
"""

from __future__ import annotations

import numpy as np
from numba import njit

NEVER = np.int64(1) << 59
OPEN, HERE, AWAY = 0, 1, 2

part = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)  # called by kernels only


@njit(cache=True)
def raise_heads(head, fastest, first_input, source, sending, tie, work, size, slots, memory, most):
    """Raise ``head`` int64 ``(n,)`` in place. Ops are in a topological order.

    The inputs of op ``v`` are ``first_input[v]:first_input[v + 1]``; ``source`` and ``sending`` are the producer of
    each input and the least time to send it. Ops with equal ``tie`` share a device. ``work`` and ``size`` int64 ``(k,
    n)`` are ns (-1: no kernel) and persistent bytes on each of ``k`` device types, which have ``slots`` and ``memory``.
    At most ``most`` ancestors of each op are considered.
    """
    n, k = len(head), len(work)
    place, along, apart = np.full(n, -1, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    near = np.empty(most, np.int64)
    for v in range(n):
        for i in range(first_input[v], first_input[v + 1]):
            head[v] = max(head[v], head[source[i]] + fastest[source[i]])
        count = _around(v, head[v], head, fastest, first_input, source, sending, tie, near, place, along, apart)
        if not count:
            continue
        # These ancestors in topological order, with v as the last, are a graph of their own.
        ops, heads, length = np.empty(count + 1, np.int64), np.empty(count + 1, np.int64), np.empty(count + 1, np.int64)
        its_work, its_size = np.empty((k, count + 1), np.int64), np.empty((k, count + 1), np.int64)
        ties, side = np.empty(count + 1, np.bool_), np.empty(count + 1, np.int64)
        for j in range(count + 1):
            op = near[count - 1 - j] if j < count else v
            ops[j], heads[j], length[j], ties[j] = op, head[op], fastest[op] if j < count else 0, tie[op] == tie[v]
            for d in range(k):
                its_work[d, j], its_size[d, j] = work[d, op] if j < count else min(0, work[d, op]), size[d, op]
        first, begin, cost = _edges(ops, first_input, source, sending, tie, place)
        low, high, step = head[v] - 1, head[v], np.int64(1)
        while not _settle(high, ties, side, heads, length, first, begin, cost, its_work, its_size, slots, memory):
            low, step = high, max(2 * step, head[v] >> 10)
            high += step
            if step > NEVER >> 4:  # no device can run them all: no placement exists
                low, high = head[v] - 1, head[v]
                break
        while high - low > 1 + (high >> 18):
            middle = (low + high) // 2
            if _settle(middle, ties, side, heads, length, first, begin, cost, its_work, its_size, slots, memory):
                high = middle
            else:
                low = middle
        head[v] = low + 1


@part
def _around(v, known, head, fastest, first_input, source, sending, tie, near, place, along, apart):
    """Write to ``near``, last first, the ancestors of ``v`` whose results would arrive later than ``known`` from
    another device; return their number. ``along`` and ``apart``: the longest way to ``v``, and its length if it is sent
    once."""
    low, count, u = v, 0, v
    along[v], apart[v], place[v] = 0, NEVER, 0
    while u >= low and count < len(near):
        if place[u] == 0:
            place[u] = -1
            if tie[u] == tie[v]:
                apart[u] = NEVER
            alone = NEVER if u == v else min(NEVER, fastest[u] + apart[u])
            if u == v or head[u] + alone > known:  # otherwise all that reaches v through u is in time as well
                if u != v:
                    along[u] += fastest[u]
                    near[count] = u
                    count += 1
                for i in range(first_input[u], first_input[u + 1]):
                    x = source[i]
                    late = alone if tie[x] == tie[u] else min(alone, sending[i] + along[u])
                    if place[x] < 0:
                        place[x], along[x], apart[x] = 0, along[u], late
                        low = min(low, x)
                    else:
                        along[x], apart[x] = max(along[x], along[u]), max(apart[x], late)
        u -= 1
    for i in range(low, u + 1):  # met, but not considered
        place[i] = -1
    return count


@part
def _edges(ops, first_input, source, sending, tie, place):
    """The edges among ``ops``, by reader: ``first`` (where those of each reader begin), ``begin`` (the place of the
    producer in ``ops``) and ``cost`` (the least time to send)."""
    most = 0
    for j in range(len(ops)):
        place[ops[j]] = j
        most += first_input[ops[j] + 1] - first_input[ops[j]]
    first, begin, cost, count = np.empty(len(ops) + 1, np.int64), np.empty(most, np.int64), np.empty(most, np.int64), 0
    first[0] = 0
    for j in range(len(ops)):
        for i in range(first_input[ops[j]], first_input[ops[j] + 1]):
            x = source[i]
            if place[x] >= 0:
                begin[count] = place[x]
                cost[count] = NEVER if tie[x] == tie[ops[j]] else sending[i]
                count += 1
        first[j + 1] = count
    for j in range(len(ops)):
        place[ops[j]] = -1
    return first, begin, cost


@part
def _settle(limit, ties, side, heads, length, first, begin, cost, work, size, slots, memory):
    """Decide in ``side`` which ops must be on the last op's device, as those in ``ties`` are, if the last op starts by
    ``limit``. Returns False if it cannot start by then."""
    n = len(side)
    for j in range(n):
        side[j] = HERE if ties[j] else OPEN
    near_head, far_head = np.empty(n, np.int64), np.empty(n, np.int64)
    near_tail, far_tail = np.empty(n, np.int64), np.empty(n, np.int64)
    changed = True
    while changed:
        changed = False
        for j in range(n):  # earliest starts, on the device and off it
            near, far = heads[j], heads[j]
            for e in range(first[j], first[j + 1]):
                x = begin[e]
                near = max(near, length[x] + min(near_head[x], far_head[x] + cost[e]))
                far = max(far, length[x] + min(near_head[x] + cost[e], far_head[x]))
            near_head[j] = NEVER if side[j] == AWAY else min(near, NEVER)
            far_head[j] = NEVER if side[j] == HERE else min(far, NEVER)
        for j in range(n):
            near_tail[j] = far_tail[j] = 0
        for j in range(n - 1, -1, -1):  # least times from the end to the last op's start
            if side[j] == AWAY:
                near_tail[j] = NEVER
            if side[j] == HERE:
                far_tail[j] = NEVER
            near, far = min(NEVER, length[j] + near_tail[j]), min(NEVER, length[j] + far_tail[j])
            for e in range(first[j], first[j + 1]):
                x = begin[e]
                near_tail[x] = max(near_tail[x], min(near, far + cost[e]))
                far_tail[x] = max(far_tail[x], min(near + cost[e], far))
        for j in range(n):
            near = near_head[j] + length[j] + near_tail[j] <= limit
            far = far_head[j] + length[j] + far_tail[j] <= limit
            if not near and not far:
                return False
            if side[j] == OPEN and near != far:
                side[j] = HERE if near else AWAY
                changed = True
    by_head, by_tail, spare = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    count = 0
    for j in range(n):
        if side[j] == HERE:
            by_head[count] = by_tail[count] = j
            count += 1
    _sort(by_head, count, near_head, spare)
    _sort(by_tail, count, near_tail, spare)
    for d in range(len(slots)):
        done, total, held, least, possible = np.int64(0), np.int64(0), np.int64(0), NEVER, True
        for index in range(count):
            j = by_head[index]
            if work[d, j] < 0:
                possible = False
                break
            done = max(done, near_head[j]) + work[d, j]
            total, held = total + work[d, j], held + size[d, j]
            least = min(least, near_head[j])
        if not possible or held > memory[d]:
            continue
        if slots[d] > 1:
            if least - (-total // slots[d]) <= limit:
                return True
            continue
        left = np.int64(0)
        for index in range(count):
            j = by_tail[index]
            left = max(left, near_tail[j]) + work[d, j]
        if done > limit or least + left > limit:
            continue
        return True
    return False


@part
def _sort(item, count, key, spare):
    """Sort ``item[:count]`` by ``key[item]`` by merging runs; equal keys keep their order."""
    width = 1
    while width < count:
        for first in range(0, count, 2 * width):
            middle, stop = min(first + width, count), min(first + 2 * width, count)
            left, right = first, middle
            for out in range(first, stop):
                if right == stop or (left < middle and key[item[left]] <= key[item[right]]):
                    spare[out] = item[left]
                    left += 1
                else:
                    spare[out] = item[right]
                    right += 1
        for out in range(count):
            item[out] = spare[out]
        width *= 2
