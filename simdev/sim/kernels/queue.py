"""The ready queue of the loops that use keys: ops in the order (ready time, op number), across all devices.

``queue[first:last]`` is sorted, and a binary heap of ``n_heap`` keys stands behind it. Most ops become ready in nearly
the order of their keys, so an insertion near the end of the queue is the fast case. A key that would move up more than
``NEAR`` places goes to the heap, so that no insertion is slow. The least key is the lesser of the two fronts.

Every enqueued op has all its inputs, and each op is enqueued once, so both arrays have ``n`` places. The counters
``first``, ``last`` and ``n_heap`` are local variables of the loops, which is faster than an array: the functions take
and return them.
"""

from __future__ import annotations

import numpy as np

from simdev.sim.kernels.compiled import inlined
from simdev.sim.kernels.heap import pop_key, push_key
from simdev.sim.kernels.state import NEVER, NONE, ONE, Inputs, Workspace

NEAR = np.uint64(32)


@inlined
def insert(keys, front, stop, key):
    """Insert into the sorted ``keys[front:stop]``, from the end; return the place. The caller owns place ``stop``."""
    place = stop
    while place > front and keys[place - ONE] > key:
        keys[place] = keys[place - ONE]
        place -= ONE
    keys[place] = key
    return place


@inlined
def enqueue(queue, heap, first, last, n_heap, key):
    """Enqueue an op whose inputs have all arrived. Only such ops are in the queue. Returns ``last`` and ``n_heap``."""
    nearest = last - NEAR if last - first > NEAR else first
    if nearest > first and queue[nearest - ONE] > key:
        return last, push_key(heap, n_heap, key)
    insert(queue, nearest, last, key)
    return last + ONE, n_heap


@inlined
def peek(queue, heap, first, last, n_heap):
    """The least key, NEVER if no op is ready; and whether it is in the heap."""
    ready = queue[first] if first < last else np.int64(NEVER)
    if n_heap > 0 and heap[0] < ready:
        return heap[0], True
    return ready, False


@inlined
def drop(heap, first, n_heap, from_heap):
    """Remove the key that :func:`peek` found. Returns ``first`` and ``n_heap``."""
    if from_heap:
        return first, pop_key(heap, n_heap)
    return first + ONE, n_heap


@inlined
def deliver(inputs: Inputs, devices, tensor, workspace: Workspace, first, last, n_heap):
    """Count ``tensor`` as received by all its consumers, each at the ``arrival`` time of its device, and enqueue those
    that miss nothing now (R1, R2). Returns ``last`` and ``n_heap``."""
    state, arrival = workspace.state, workspace.arrival
    for edge in range(inputs.consumer_ptr[tensor], inputs.consumer_ptr[tensor + 1]):
        consumer = inputs.consumers[edge]
        was = state[consumer]
        was = max(was, arrival[devices[consumer]] | (was & inputs.mask)) - 1
        state[consumer] = was
        if (was & inputs.mask) == 0:
            last, n_heap = enqueue(workspace.queue, workspace.heap, first, last, n_heap, was | consumer)
    return last, n_heap


@inlined
def enqueue_sources(workspace: Workspace, n):
    """Enqueue the ops without inputs, ready at time 0; return ``last``."""
    last = NONE
    for op in range(n):
        if workspace.state[op] == 0:
            workspace.queue[last] = op
            last += ONE
    return last
