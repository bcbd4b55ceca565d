"""The inner loop of the dynamic program over ideals."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def fill(
    ptr,
    removed,
    below,
    accelerator,
    cpu,
    size,
    touch_ptr,
    touch,
    members,
    cost,
    memory,
    k,
    cores,
    bound,
    table,
    first,
    last,
    most,
):
    """Fill ``table[i]`` for the ideals ``first <= i < last``; return the pairs visited and the last best choice.

    ``table`` float ``(ideals, (cores + 1) * (k + 1))``: the least largest load of ideal ``i`` on ``c`` CPU cores and
    ``f`` accelerators, at ``c * (k + 1) + f``; only values up to ``bound`` are kept. ``choice`` holds, for the last
    ideal, the sub-ideal and the kind (1: accelerator) that gave each entry, or -1. The table is left incomplete after
    the ideal at which more than ``most`` pairs have been visited.

    The sub-ideals of each ideal are visited depth first, so that a stage grows by one class at a time and a few
    additions update its load. A stage that exceeds ``bound`` on both kinds of processor ends its branch, because all
    stages below it are larger.
    """
    states, n = (cores + 1) * (k + 1), len(accelerator)
    seen = np.full(len(ptr) - 1, -1, np.int32)
    inside = np.zeros(len(members), np.int32)
    at, edge = np.zeros(n + 1, np.int32), np.zeros(n + 1, np.int64)
    came = np.zeros(n + 1, np.int32)
    sums = np.zeros((n + 1, 4))
    choice = np.full((states, 2), -1, np.int64)
    pairs = 0
    for ideal in range(first, last):
        if pairs > most:
            break
        row = table[ideal]
        row[:] = np.inf
        choice[:] = -1
        at[0], edge[0], depth = ideal, ptr[ideal], 0
        sums[0] = 0.0
        pairs += 1
        while depth >= 0:
            if edge[depth] == ptr[at[depth] + 1]:
                if depth > 0:
                    for e in range(touch_ptr[came[depth]], touch_ptr[came[depth] + 1]):
                        inside[touch[e]] -= 1
                depth -= 1
                continue
            node, lower = removed[edge[depth]], below[edge[depth]]
            edge[depth] += 1
            if seen[lower] == ideal:
                continue
            seen[lower] = ideal
            on_accelerator = sums[depth, 0] + accelerator[node]
            on_cpu = sums[depth, 1] + cpu[node]
            bytes_held = sums[depth, 2] + size[node]
            fits = bytes_held <= memory and on_accelerator <= bound
            if not fits and on_cpu > bound:
                continue
            pairs += 1
            traffic = sums[depth, 3]
            for e in range(touch_ptr[node], touch_ptr[node + 1]):
                border = touch[e]
                inside[border] += 1
                if inside[border] == 1:
                    traffic += cost[border]
                if inside[border] == members[border]:
                    traffic -= cost[border]
            depth += 1
            at[depth], edge[depth], came[depth] = lower, ptr[lower], node
            sums[depth, 0], sums[depth, 1], sums[depth, 2], sums[depth, 3] = on_accelerator, on_cpu, bytes_held, traffic
            rest = table[lower]
            load = on_accelerator + traffic
            if fits and load <= bound:
                for c in range(cores + 1):
                    for f in range(c * (k + 1) + 1, (c + 1) * (k + 1)):
                        value = max(rest[f - 1], load)
                        if value < row[f]:
                            row[f] = value
                            choice[f, 0], choice[f, 1] = lower, 1
            if on_cpu <= bound:
                for s in range(k + 1, states):
                    value = max(rest[s - k - 1], on_cpu)
                    if value < row[s]:
                        row[s] = value
                        choice[s, 0], choice[s, 1] = lower, 0
        for s in range(states):
            if s % (k + 1) > 0 and row[s - 1] <= row[s]:
                row[s] = row[s - 1]
                choice[s, 0], choice[s, 1] = ideal, 1
            if s > k and row[s - k - 1] < row[s]:
                row[s] = row[s - k - 1]
                choice[s, 0], choice[s, 1] = ideal, 0
    return pairs, choice
