"""The compiled loops of the bound from paths and transfers (:func:`simdev.analysis.transfers.gathered` has the
argument).

NumPy's functions would say the same in fewer lines, but take several times as long to compile.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

NEVER = np.int64(1) << 59
SIDES = 8  # side 0 is the last op's device, the next are named devices, and one side stands for all other devices
WAITING = 96  # choices of sides in the stack of the search; if it is full, nothing is refuted

part = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)  # called by kernels only


class Lengths(NamedTuple):
    """``fastest`` int64 ``(n,)`` ns; ops with equal ``tie`` share a device; ``work`` and ``size`` int64 ``(k, n)`` are
    ns (-1: no kernel) and persistent bytes on each of ``k`` device types."""

    fastest: np.ndarray
    tie: np.ndarray
    work: np.ndarray
    size: np.ndarray


class Sends(NamedTuple):
    """The inputs of op ``v`` are ``first[v]:first[v + 1]``: the ``source`` of each, the ``tensor``, and the least time
    of ``sending`` it in ns."""

    first: np.ndarray
    source: np.ndarray
    tensor: np.ndarray
    sending: np.ndarray


class Devices(NamedTuple):
    """``n_devices`` devices of ``k`` types with ``slots`` and ``memory`` int64 ``(k,)``. ``doors`` int64 ``(2, k)``:
    how many tensors at most reach, and leave, a device at once; 0: any number."""

    n_devices: int
    slots: np.ndarray
    memory: np.ndarray
    doors: np.ndarray


class Region(NamedTuple):
    """Ancestors of an op in topological order, and the op as the last, which takes no time. ``head``, ``length`` int64
    ``(j,)``; ``work``, ``size`` int64 ``(k, j)``; ``tied``: whether each shares the last one's device. ``inputs``: the
    edges among them, with places in place of ops, and tensors from 0 on."""

    head: np.ndarray
    length: np.ndarray
    tied: np.ndarray
    work: np.ndarray
    size: np.ndarray
    inputs: Sends


class Sides(NamedTuple):
    """What is known of the sides that ops may be on. ``mask`` int64 ``(j,)``: bit ``s`` for side ``s``. ``start`` and
    ``rest`` int64 ``(j, SIDES)``: the earliest start there, and the least time from the end to the last op's start;
    ``soonest`` and ``least`` int64 ``(j,)`` are the least of them."""

    mask: np.ndarray
    start: np.ndarray
    rest: np.ndarray
    soonest: np.ndarray
    least: np.ndarray


@njit(cache=True)
def raise_heads(head, ops, inputs, devices, most, looks):
    """Raise ``head`` int64 ``(n,)`` in place. Ops are in a topological order. At most ``most`` ancestors of each op are
    considered, and choices of their sides for each time that is tried until ``looks`` ancestors were looked at."""
    n = len(head)
    place, along, apart = np.full(n, -1, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    label = np.full(inputs.tensor.max() + 1 if len(inputs.tensor) else 0, -1, np.int64)
    last = np.full(ops.tie.max() + 1 if n else 0, -1, np.int64)  # of each tie so far
    near, waiting = np.empty(most, np.int64), np.empty((WAITING, most + 1), np.int64)
    for v in range(n):
        for i in range(inputs.first[v], inputs.first[v + 1]):
            head[v] = max(head[v], head[inputs.source[i]] + ops.fastest[inputs.source[i]])
        before = last[ops.tie[v]]
        last[ops.tie[v]] = v
        alone = _follows_one(v, before, head, ops, inputs)
        count = _around(v, head[v], head, ops, inputs, near, place, along, apart)
        if not count:
            continue
        if not alone:
            count = _between(v, count, inputs, near, place)
        region = _region(v, near[:count], head, ops, inputs, place, label)
        cases = 1 if alone else max(1, looks // count)
        known = low = head[v] - 1
        high, step = head[v], max(np.int64(1), head[v] >> 10)
        while _refuted(high, region, devices, waiting, cases):
            low = high
            high += step
            step *= 2
            if step > NEVER >> 4:  # no device can run them all: no placement exists
                low = high = known
                break
        while high - low > 1 + (low - known >> 11):
            middle = (low + high) // 2
            if _refuted(middle, region, devices, waiting, cases):
                low = middle
            else:
                high = middle
        head[v] = low + 1


@part
def _follows_one(v, before, head, ops, inputs):
    """Whether ``v`` follows one op, and all else is there in time from any device: then choices of sides hardly teach
    what they did not for that op. ``before``: the last op before ``v`` that shares its device, or -1."""
    found = np.int64(-1)
    for i in range(inputs.first[v], inputs.first[v + 1]):
        x = inputs.source[i]
        late = head[x] + ops.fastest[x] + inputs.sending[i] > head[v]
        if x != found and (late or inputs.first[x + 1] > inputs.first[x]):
            if found >= 0:
                return False
            found = x
    return before < 0 or before == found


@part
def _around(v, known, head, ops, inputs, near, place, along, apart):
    """Write to ``near``, last first, the ancestors of ``v`` whose results would arrive later than ``known`` from
    another device; return their number. ``along`` and ``apart``: the longest way to ``v``, and its length if it is sent
    once."""
    fastest, tie = ops.fastest, ops.tie
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
                for i in range(inputs.first[u], inputs.first[u + 1]):
                    x = inputs.source[i]
                    late = alone if tie[x] == tie[u] else min(alone, inputs.sending[i] + along[u])
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
def _between(v, count, inputs, near, place):
    """Add to the ``count`` ancestors of ``v`` in ``near``, last first, those that follow one of them; return how many
    there are then, or ``count`` if they would be too many.

    Such an op would be in time from another device, but perhaps not what it reads.
    """
    low = v
    for j in range(count):
        low = min(low, near[j])
        place[near[j]] = 0
    follows, leads = np.zeros(v - low + 1, np.bool_), np.zeros(v - low + 1, np.bool_)
    for u in range(low, v):
        follows[u - low] = place[u] == 0
        place[u] = -1
        for i in range(inputs.first[u], inputs.first[u + 1]):
            follows[u - low] |= inputs.source[i] >= low and follows[inputs.source[i] - low]
    leads[v - low], total = True, 0
    for u in range(v, low - 1, -1):
        if leads[u - low]:
            for i in range(inputs.first[u], inputs.first[u + 1]):
                if inputs.source[i] >= low:
                    leads[inputs.source[i] - low] = True
            total += u < v and follows[u - low]
    if total > len(near):
        return count
    total = 0
    for u in range(v - 1, low - 1, -1):
        if leads[u - low] and follows[u - low]:
            near[total] = u
            total += 1
    return total


@part
def _region(v, near, head, ops, inputs, place, label):
    count, k, most = len(near), len(ops.work), 0
    its = np.empty(count + 1, np.int64)
    for j in range(count + 1):
        its[j] = near[count - 1 - j] if j < count else v
        place[its[j]] = j
        most += inputs.first[its[j] + 1] - inputs.first[its[j]]
    first, begin = np.zeros(count + 2, np.int64), np.empty(most, np.int64)
    tensor, cost = np.empty(most, np.int64), np.empty(most, np.int64)
    work, size = np.empty((k, count + 1), np.int64), np.empty((k, count + 1), np.int64)
    edges = tensors = 0
    for j in range(count + 1):
        op = its[j]
        for d in range(k):
            work[d, j], size[d, j] = ops.work[d, op] if j < count else min(0, ops.work[d, op]), ops.size[d, op]
        for i in range(inputs.first[op], inputs.first[op + 1]):
            x = inputs.source[i]
            if place[x] >= 0:
                if label[inputs.tensor[i]] < 0:
                    label[inputs.tensor[i]] = tensors
                    tensors += 1
                begin[edges], tensor[edges] = place[x], label[inputs.tensor[i]]
                cost[edges] = NEVER if ops.tie[x] == ops.tie[op] else inputs.sending[i]
                edges += 1
        first[j + 1] = edges
    for j in range(count + 1):
        place[its[j]] = -1
        for i in range(inputs.first[its[j]], inputs.first[its[j] + 1]):
            label[inputs.tensor[i]] = -1
    length = ops.fastest[its]
    length[count] = 0
    return Region(head[its], length, ops.tie[its] == ops.tie[v], work, size, Sends(first, begin, tensor[:edges], cost))


@part
def _refuted(limit, region, devices, waiting, cases):
    """Whether the last op of a region cannot start by ``limit``, for all choices of sides; False if there are too many
    of them."""
    n = len(region.head)
    sides = Sides(
        np.empty(n, np.int64),
        np.empty((n, SIDES), np.int64),
        np.empty((n, SIDES), np.int64),
        np.empty(n, np.int64),
        np.empty(n, np.int64),
    )
    mask = sides.mask
    waiting[0, :n] = np.where(region.tied, 1, 3)
    named = np.zeros(WAITING, np.int64)  # of each choice in the stack: the number of named devices
    level, seen = 1, 0
    while level:
        level -= 1
        mask[:] = waiting[level, :n]
        names, seen = named[level], seen + 1
        if seen > cases:
            return False
        if not _settle(limit, names, region, sides) or not _all_possible(limit, names, region, devices, sides):
            continue
        rest = names + 1  # the side of all other devices
        may_name = names + 2 < SIDES and names + 1 < devices.n_devices
        pick = _most_open(names, may_name, region, sides)
        if pick < 0 or level + names + 2 > WAITING:
            return False
        if mask[pick] >> rest & 1:
            waiting[level, :n] = mask
            if may_name:  # one of the other devices gets a name; the next side stands for those that are left
                if names + 2 < devices.n_devices:
                    waiting[level, :n] |= (mask >> rest & 1) << rest + 1
                named[level] = names + 1
            else:
                named[level] = names
            waiting[level, pick] = 1 << rest
            level += 1
        for side in range(names, -1, -1):
            if mask[pick] >> side & 1:
                waiting[level, :n] = mask
                waiting[level, pick] = 1 << side
                named[level] = names
                level += 1
    return True


@part
def _most_open(names, may_name, region, sides):
    """The op whose side is chosen next, or -1 if no op is open: the sum of an op's length and of what its worst side
    costs more than its best one decides. An op on the side of all other devices is open if a device may be named."""
    mask, found, most = sides.mask, -1, np.int64(-1)
    for j in range(len(mask)):
        if mask[j] & (mask[j] - 1) or (may_name and mask[j] == 1 << names + 1):
            worst = np.int64(0)
            for s in range(names + 2):
                if mask[j] >> s & 1:
                    worst = max(worst, sides.start[j, s] + sides.rest[j, s])
            value = region.length[j] + worst - sides.soonest[j] - sides.least[j]
            if value > most:
                found, most = j, value
    return found


@part
def _settle(limit, names, region, sides):
    """Take from ``mask`` the sides on which an op would be too late; False if one has none left."""
    mask, start, rest, inputs, length = sides.mask, sides.start, sides.rest, region.inputs, region.length
    n, count, changed = len(mask), names + 2, True
    while changed:
        changed = False
        for j in range(n):
            for s in range(count):
                start[j, s], rest[j, s] = region.head[j], 0
            for i in range(inputs.first[j], inputs.first[j + 1]):
                x = inputs.source[i]
                sent = sides.soonest[x] + inputs.sending[i]
                for s in range(count):
                    start[j, s] = max(start[j, s], length[x] + min(start[x, s], sent))
            soonest = NEVER
            for s in range(count):
                start[j, s] = min(start[j, s], NEVER) if mask[j] >> s & 1 else NEVER
                soonest = min(soonest, start[j, s])
            sides.soonest[j] = soonest
        for j in range(n - 1, -1, -1):
            least = NEVER
            for s in range(count):
                if mask[j] >> s & 1 and start[j, s] + length[j] + rest[j, s] > limit:
                    mask[j] &= ~(np.int64(1) << s)
                    changed = True
                if mask[j] >> s & 1:
                    least = min(least, rest[j, s])
                else:
                    rest[j, s] = NEVER
            if not mask[j]:
                return False
            sides.least[j] = least
            for i in range(inputs.first[j], inputs.first[j + 1]):
                x = inputs.source[i]
                for s in range(count):
                    rest[x, s] = max(rest[x, s], length[j] + min(rest[j, s], least + inputs.sending[i]))
    return True


@part
def _all_possible(limit, names, region, devices, sides):
    """Whether the last op's device and each named device have the time, the memory and the links for their ops."""
    for side in range(names + 1):
        if not _possible(limit, side, names, region, devices, sides):
            return False
    return True


@part
def _possible(limit, side, names, region, devices, sides):
    mask, only, count = sides.mask, np.int64(1) << side, 0
    here = np.empty(len(mask), np.int64)
    for j in range(len(mask)):
        if mask[j] == only:
            here[count] = j
            count += 1
    if not count:
        return True
    here = here[:count]
    ready, after = sides.start[:, side].copy()[here], sides.rest[:, side].copy()[here]
    for d in range(len(devices.slots)):
        work, held = region.work[d][here], region.size[d][here].sum()
        if work.min() < 0 or held > devices.memory[d] or _is_late(limit, ready, after, work, devices.slots[d]):
            continue
        if not _pass_late(limit, side, names, region, devices.doors[:, d], sides):
            return True
    return False


@part
def _pass_late(limit, side, names, region, doors, sides):
    """Whether the tensors that surely reach or leave the device of ``side`` take too long to pass its ``doors``."""
    for way in range(2):
        if doors[way]:
            passing = _crossings(side, way == 0, names, region, sides)
            if _is_late(limit, passing[0], passing[1], passing[2], doors[way]):
                return True
    return False


@part
def _crossings(side, inward, names, region, sides):
    """The transfers that surely reach (``inward``) or leave the device of ``side``, int64 ``(3, transfers)``: when each
    could begin, the least time from its end to the last op's start, and how long it takes.

    A tensor reaches a device once. It leaves once for each named device that holds a reader. If no reader is on a named
    device, it leaves at least once.
    """
    mask, only, inputs, length = sides.mask, np.int64(1) << side, region.inputs, region.length
    edges = len(inputs.tensor)
    found, count = np.zeros((3, edges), np.int64), 0
    known = np.full((edges, SIDES + 1), -1, np.int64)  # by tensor and side of the readers, the last for open ones
    for fixed in range(1 if inward else 2):
        for j in range(len(mask)):
            if inward != (mask[j] == only) or (not inward and mask[j] & only):
                continue
            where = SIDES
            if not inward:
                where = _named_side(mask[j], names)
                if (where < SIDES) != (fixed == 0):
                    continue
            for i in range(inputs.first[j], inputs.first[j + 1]):
                x, tensor = inputs.source[i], inputs.tensor[i]
                if (mask[x] & only != 0) if inward else mask[x] != only:
                    continue
                if fixed and known[tensor].max() >= 0 and known[tensor, SIDES] < 0:
                    continue
                number = known[tensor, where]
                if number < 0:
                    number = known[tensor, where] = count
                    found[2, number] = inputs.sending[i]
                    count += 1
                ready = sides.soonest[x] if inward else sides.start[x, side]
                after = sides.rest[j, side] if inward else sides.least[j]
                found[0, number] = max(found[0, number], ready + length[x])
                found[1, number] = max(found[1, number], after + length[j])
    return found[:, :count]


@part
def _named_side(mask, names):
    """The side that an op of this ``mask`` is on, or ``SIDES`` if its device is open."""
    for side in range(names + 1):
        if mask == np.int64(1) << side:
            return side
    return SIDES


@part
def _is_late(limit, ready, after, length, lanes):
    """Whether what is ready at ``a`` or later and has at least ``b`` after it takes longer than from ``a`` until ``b``
    before ``limit``, for any ``a`` and ``b``, if ``lanes`` pass at once."""
    order = _sorted(after)
    for first in ready:
        total = np.int64(0)
        for index in range(len(order) - 1, -1, -1):
            j = order[index]
            if ready[j] >= first:
                total += length[j]
                if first + after[j] - (-total // lanes) > limit:
                    return True
    return False


@part
def _sorted(key):
    """The order of ``key``, by merging runs; equal keys keep their order."""
    count, width = len(key), 1
    item, spare = np.arange(count), np.empty(count, np.int64)
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
        item, spare = spare, item
        width *= 2
    return item
