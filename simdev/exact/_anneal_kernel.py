"""The loop of :func:`simdev.exact.anneal.anneal`."""

from __future__ import annotations

import numpy as np
from numba import njit

POWER = 12.0  # of the norm that stands for the largest load: it also rewards a lower second largest load
COLD = 0.0001  # last temperature as a share of the norm


@njit(cache=True)
def move(c, target, home, load, held, count, accelerator, cpu, size, touch_ptr, touch, width, cost, k):
    """Move class ``c`` to processor ``target`` and update loads, bytes held and counts of borders."""
    origin = home[c]
    for step in range(2):
        processor = origin if step == 0 else target
        sign = -1 if step == 0 else 1
        load[processor] += sign * (accelerator[c] if processor < k else cpu[c])
        held[processor] += sign * size[c]
        if processor >= k:
            continue
        for e in range(touch_ptr[c], touch_ptr[c + 1]):
            border = touch[e]
            before = 0 < count[border, processor] < width[border]
            count[border, processor] += sign
            after = 0 < count[border, processor] < width[border]
            if before != after:
                load[processor] += cost[border] if after else -cost[border]
    home[c] = target


@njit(cache=True)
def norm(load, unit):
    total = 0.0
    for value in load:
        total += (value / unit) ** POWER
    return unit * total ** (1 / POWER)


@njit(cache=True)
def run(
    home, accelerator, cpu, size, touch_ptr, touch, member_ptr, members, cost, memory, k, cores, moves, hot, seed, best
):  # fmt: skip
    """Anneal ``home`` int ``(c,)`` for ``moves`` moves from the temperature ``hot``, a share of the
    norm; fill ``best`` with the split of least largest load."""
    np.random.seed(seed)
    classes, processors = len(home), k + cores
    width = member_ptr[1:] - member_ptr[:-1]
    load, held = np.zeros(processors), np.zeros(processors)
    count = np.zeros((len(cost), k), np.int64)
    for c in range(classes):
        load[home[c]] += accelerator[c] if home[c] < k else cpu[c]
        held[home[c]] += size[c]
        if home[c] < k:
            for e in range(touch_ptr[c], touch_ptr[c + 1]):
                count[touch[e], home[c]] += 1
    for border in range(len(cost)):
        for i in range(k):
            if 0 < count[border, i] < width[border]:
                load[i] += cost[border]
    unit = max(load.max(), 1e-300)
    least, energy = load.max(), norm(load, unit)
    best[:] = home
    moved = np.zeros(64, np.int64)
    for number in range(moves):
        temperature = unit * hot * (COLD / hot) ** (number / moves)
        c = np.random.randint(classes)
        if np.random.random() < 0.5:  # prefer the classes of the most loaded processor
            worst = np.argmax(load)
            for _ in range(4):
                if home[c] == worst:
                    break
                c = np.random.randint(classes)
        origin, target = home[c], np.random.randint(processors)
        if target == origin:
            continue
        wanted, size_moved, tries = 1 << min(np.random.randint(0, 6), np.random.randint(0, 6)), 0, 0
        feasible = True
        while size_moved < wanted and tries < 4 * wanted:
            tries += 1
            if size_moved:  # a neighbour of a class that moves, on the same processor
                a = moved[np.random.randint(size_moved)]
                if touch_ptr[a] == touch_ptr[a + 1]:
                    continue
                border = touch[np.random.randint(touch_ptr[a], touch_ptr[a + 1])]
                c = members[np.random.randint(member_ptr[border], member_ptr[border + 1])]
                if home[c] != origin:
                    continue
            if (target < k and (not np.isfinite(accelerator[c]) or held[target] + size[c] > memory)) or (
                target >= k and not np.isfinite(cpu[c])
            ):
                feasible = False
                break
            move(c, target, home, load, held, count, accelerator, cpu, size, touch_ptr, touch, width, cost, k)
            moved[size_moved] = c
            size_moved += 1
        found = norm(load, unit)
        worse = (found - energy) / temperature
        if feasible and (worse <= 0 or np.random.random() < np.exp(-worse)):
            energy = found
            if load.max() < least * (1 - 1e-9):
                least = load.max()
                best[:] = home
        else:
            for back in range(size_moved - 1, -1, -1):
                move(
                    moved[back], origin, home, load, held, count, accelerator, cpu, size, touch_ptr, touch, width,
                    cost, k,
                )  # fmt: skip
    return least
