"""Binary heaps of keys, or of (key, item) pairs in two arrays; and sorting in place."""

from __future__ import annotations

import numpy as np

from simdev.sim.kernels.compiled import part

ONE, RUN = np.uint64(1), np.uint64(16)


@part
def push(key, item, base, size, new_key, new_item):
    """Add to the binary heap of (key, item) pairs stored at ``base``; return its new size."""
    hole = size
    while hole > 0:
        parent = (hole - 1) >> 1
        above = key[base + parent]
        if above < new_key or (above == new_key and item[base + parent] < new_item):
            break
        key[base + hole], item[base + hole] = above, item[base + parent]
        hole = parent
    key[base + hole], item[base + hole] = new_key, new_item
    return size + 1


@part
def pop(key, item, base, size):
    """Remove the first pair of a heap (the caller has read it); return its new size."""
    size -= 1
    last_key, last_item = key[base + size], item[base + size]
    hole = 0
    while True:
        child = 2 * hole + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            key[base + right] < key[base + child]
            or (key[base + right] == key[base + child] and item[base + right] < item[base + child])
        ):
            child = right
        below = key[base + child]
        if last_key < below or (last_key == below and last_item < item[base + child]):
            break
        key[base + hole], item[base + hole] = below, item[base + child]
        hole = child
    key[base + hole], item[base + hole] = last_key, last_item
    return size


@part
def push_key(heap, size, key):
    """Add to a heap of keys without items; return its new size."""
    hole = size
    while hole > 0:
        parent = (hole - 1) >> 1
        if heap[parent] <= key:
            break
        heap[hole] = heap[parent]
        hole = parent
    heap[hole] = key
    return size + 1


@part
def pop_key(heap, size):
    """Remove the first key of a heap without items; return its new size."""
    size -= 1
    last, hole = heap[size], 0
    while True:
        child = 2 * hole + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if last <= heap[child]:
            break
        heap[hole] = heap[child]
        hole = child
    heap[hole] = last
    return size


@part
def sort_pairs(key, item, first, stop):
    """Sort the pairs ``first:stop`` by (key, item) in place: by insertion while they are nearly in order, else by heap.

    (NumPy's sorts would do, but take longer to compile than all the rest.)
    """
    patience = 8 * (stop - first) + 64
    sorted_to = first
    while sorted_to < stop and patience > 0:
        new_key, new_item, hole = key[sorted_to], item[sorted_to], sorted_to
        while hole > first and (key[hole - 1] > new_key or (key[hole - 1] == new_key and item[hole - 1] > new_item)):
            key[hole], item[hole] = key[hole - 1], item[hole - 1]
            hole -= 1
        key[hole], item[hole] = new_key, new_item
        patience -= sorted_to - hole
        sorted_to += 1
    if sorted_to == stop:
        return
    for index in range(first, stop):
        push(key, item, first, index - first, key[index], item[index])
    for size in range(stop - first, 1, -1):
        least_key, least_item = key[first], item[first]
        pop(key, item, first, size)
        key[first + size - 1], item[first + size - 1] = least_key, least_item
    low, high = first, stop - 1
    while low < high:
        key[low], key[high] = key[high], key[low]
        item[low], item[high] = item[high], item[low]
        low += 1
        high -= 1


@part
def sort_by(time, order, spare, first, stop):
    """Sort the numbers ``order[first:stop]`` by ``time[number]`` in place, fast where they are nearly in order: short
    runs by insertion, which are then merged where they overlap. ``spare`` is an array for as many numbers."""
    first, stop = np.uint64(first), np.uint64(stop)
    for start in range(first, stop, RUN):
        for index in range(start + ONE, min(start + RUN, stop)):
            item, hole = order[index], np.uint64(index)
            while hole > start and time[order[hole - ONE]] > time[item]:
                order[hole] = order[hole - ONE]
                hole -= ONE
            order[hole] = item
    width = RUN
    while first + width < stop:
        start = first
        while start + width < stop:
            middle = start + width
            end = min(middle + width, stop)
            left = middle
            while left > start and time[order[left - ONE]] > time[order[middle]]:
                left -= ONE
            waiting = middle - left
            for index in range(waiting):
                spare[index] = order[left + index]
            at, right = waiting - waiting, middle
            while at < waiting:
                if right < end and time[order[right]] < time[spare[at]]:
                    order[left] = order[right]
                    right += ONE
                else:
                    order[left] = spare[at]
                    at += ONE
                left += ONE
            start += width + width
        width += width
