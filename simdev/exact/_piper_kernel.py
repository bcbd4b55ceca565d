"""The inner loops of Piper's dynamic program (:mod:`simdev.exact.piper`).

Arrays of a model: ``seconds``, ``parameter``, ``memory_a``, ``memory_b`` float ``(degrees, 2, n)`` by tensor degree,
choice and layer; ``count`` int ``(degrees, n)`` choices; the edges ``touch[touch_ptr[v]:touch_ptr[v + 1]]`` of layer
``v`` with their other end ``beyond`` and their bytes ``crossing`` float ``(degrees, 2, e)`` per choice.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def stage_time(
    layers, held, position, d, progress, count, seconds, parameter, memory_a, memory_b, touch_ptr, beyond, crossing,
    degrees, data, memory, bandwidth, microbatches,
):  # fmt: skip
    """Time per sample of a stage (inf if it does not fit) and the choice of each of its ``layers``, of which ``held``
    is the mask. ``position`` numbers the tensor degree, ``d`` is the data degree, ``progress`` the microbatches in
    progress."""
    sent, cost = np.zeros((2, len(layers))), np.zeros((2, len(layers)))
    chosen = np.zeros(len(layers), np.int64)
    if not _sent(layers, held, position, count, touch_ptr, beyond, crossing, sent):
        return np.inf, chosen
    _cost(layers, position, d, count, seconds, parameter, sent, bandwidth, microbatches, cost)
    return _fit(layers, position, progress, count, cost, memory_a, memory_b, memory, chosen), chosen


@njit(cache=True)
def _sent(layers, held, position, count, touch_ptr, beyond, crossing, sent):
    """Fill ``sent`` with the bytes that each choice of each layer sends over the border of the stage; False if a layer
    lacks the degree."""
    for i in range(len(layers)):
        v = layers[i]
        if count[position, v] == 0:
            return False
        sent[0, i] = sent[1, i] = 0.0
        for e in range(touch_ptr[v], touch_ptr[v + 1]):
            if not held[beyond[e]]:
                sent[0, i] += 2 * crossing[position, 0, e]
                sent[1, i] += 2 * crossing[position, 1, e]
    return True


@njit(cache=True)
def _cost(layers, position, d, count, seconds, parameter, sent, bandwidth, microbatches, cost):
    """Fill ``cost`` with what each choice adds to the time of the stage; return the least sum."""
    total = 0.0
    for i in range(len(layers)):
        v = layers[i]
        for number in range(count[position, v]):
            exchange = 4 * (d - 1) * parameter[position, number, v] / d / microbatches
            cost[number, i] = (sent[number, i] / d + exchange) / bandwidth + seconds[position, number, v] / d
        total += min(cost[0, i], cost[1, i]) if count[position, v] > 1 else cost[0, i]
    return total


@njit(cache=True)
def _fit(layers, position, progress, count, cost, memory_a, memory_b, memory, chosen):
    """The least time found for ``progress`` microbatches in progress; fills ``chosen``. Start from the fastest choices
    and take the cheapest savings per byte until the stage fits."""
    total, used, least = 0.0, 0.0, 0.0
    for i in range(len(layers)):
        v = layers[i]
        fast = 1 if count[position, v] > 1 and cost[1, i] < cost[0, i] else 0
        chosen[i] = fast
        total += cost[fast, i]
        mine = memory_a[position, fast, v] * progress + memory_b[position, fast, v]
        used += mine
        if count[position, v] > 1:
            mine = min(mine, memory_a[position, 1 - fast, v] * progress + memory_b[position, 1 - fast, v])
        least += mine
    if used <= memory:
        return total
    if least > memory:
        return np.inf
    price, saving = np.full(len(layers), np.inf), np.zeros(len(layers))
    for i in range(len(layers)):
        v, fast = layers[i], chosen[i]
        if count[position, v] > 1:
            saved = memory_a[position, fast, v] - memory_a[position, 1 - fast, v]
            saved = saved * progress + memory_b[position, fast, v] - memory_b[position, 1 - fast, v]
            if saved > 1e-9:
                saving[i], price[i] = saved, (cost[1 - fast, i] - cost[fast, i]) / saved
    over = used - memory
    for i in np.argsort(price, kind="mergesort"):
        total += cost[1 - chosen[i], i] - cost[chosen[i], i]
        chosen[i] = 1 - chosen[i]
        over -= saving[i]
        if over < 1e-9:
            break
    return total


@njit(cache=True)
def fill(
    packed, count, seconds, parameter, memory_a, memory_b, touch_ptr, beyond, crossing, degrees, data, memory,
    bandwidth, microbatches, bound, table,
):  # fmt: skip
    """Fill ``table[i, k, s]``: the least time per sample of all layers outside ideal ``i`` on at most ``k`` devices
    with a sum of data degrees of at most ``s``. The last ideal is full and its table is 0.

    ``packed`` uint64 ``(ideals, words)`` holds the ideals as bits. Values above ``bound`` are not needed and left out.
    ``table[i, k]`` falls in steps, so only the values of ``s`` where the table of the upper ideal falls are tried.
    """
    ideals, words = packed.shape
    n = count.shape[1]
    devices, most = table.shape[1] - 1, table.shape[2] - 1
    drops = np.zeros((ideals, devices + 1, most + 2), np.int32)  # how many, then where
    drops[ideals - 1, :, 0] = 1
    held, members, chosen = np.zeros(n, np.bool_), np.zeros(n, np.int64), np.zeros(n, np.int64)
    sent, cost, times = np.zeros((2, n)), np.zeros((2, n)), np.zeros(most + 2)
    for lower in range(ideals - 2, -1, -1):
        for upper in range(lower + 1, ideals):
            nested = True
            for word in range(words):
                if packed[lower, word] & ~packed[upper, word]:
                    nested = False
                    break
            if not nested or drops[upper, devices, 0] == 0:
                continue
            size = 0
            for v in range(n):
                bits = (packed[upper, v >> 6] ^ packed[lower, v >> 6]) >> np.uint64(v & 63)
                held[v] = bits & np.uint64(1)
                if held[v]:
                    members[size] = v
                    size += 1
            layers = members[:size]
            for position in range(len(degrees)):
                t = degrees[position]
                if not _sent(layers, held, position, count, touch_ptr, beyond, crossing, sent):
                    continue
                for d in data:
                    if t * d > devices:
                        break
                    if (
                        _cost(layers, position, d, count, seconds, parameter, sent, bandwidth, microbatches, cost)
                        > bound
                    ):
                        continue
                    reach = most // d + 1
                    for progress in range(1, most // d + 2):
                        times[progress] = _fit(
                            layers, position, progress, count, cost, memory_a, memory_b, memory, chosen
                        )
                        if times[progress] > bound:
                            reach = progress - 1
                            break
                    if reach == 0:
                        continue
                    for k in range(t * d, devices + 1):
                        rest = drops[upper, k - t * d]
                        for number in range(1, rest[0] + 1):
                            s = rest[number] + d
                            if s > most or -(-s // d) > reach:
                                break
                            value = max(table[upper, k - t * d, rest[number]], times[-(-s // d)])
                            if value < table[lower, k, s]:
                                table[lower, k, s] = value
        for k in range(devices + 1):
            for s in range(most + 1):
                if k > 0 and table[lower, k - 1, s] < table[lower, k, s]:
                    table[lower, k, s] = table[lower, k - 1, s]
                if s > 0 and table[lower, k, s - 1] <= table[lower, k, s]:
                    table[lower, k, s] = table[lower, k, s - 1]
                elif np.isfinite(table[lower, k, s]):
                    drops[lower, k, 0] += 1
                    drops[lower, k, drops[lower, k, 0]] = s
