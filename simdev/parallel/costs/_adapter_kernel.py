"""The inner loops of a step whose ops slow each other down: when ops run, and how long those on one adapter take."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def shared_ns(start, alone, share, queue):
    """float64 ``(n,)``: what each of ``n`` ops takes. An op begins at ``start`` (int64, ascending), or when the one
    before it in its ``queue`` (int64, from 0 on) has ended. By itself it takes ``alone`` ns (int64) and the ``share``
    (float64) of the adapter. While the ops that run want ``d > 1`` adapters, all run at the rate ``1 / d``."""
    queues = queue.max() + 1
    waiting, running = np.full(queues, -1), np.full(queues, -1)
    following = np.full(len(start), -1)
    for n in range(len(start) - 1, -1, -1):
        following[n] = waiting[queue[n]]
        waiting[queue[n]] = n
    begun, taken = np.zeros(queues), np.zeros(len(start))
    left, ends = np.zeros(queues), np.zeros(queues)
    now = 0.0
    while True:
        wanted = 0.0
        for q in range(queues):
            if running[q] >= 0:
                wanted += share[running[q]]
        wanted = max(1.0, wanted)
        upcoming = np.inf
        for q in range(queues):
            if running[q] >= 0:
                ends[q] = now + left[q] * wanted
                upcoming = min(upcoming, ends[q])
            elif waiting[q] >= 0:
                upcoming = min(upcoming, float(start[waiting[q]]))
        if upcoming == np.inf:
            return taken
        for q in range(queues):
            if running[q] >= 0:
                left[q] -= (upcoming - now) / wanted
                if ends[q] <= upcoming:
                    taken[running[q]] = upcoming - begun[q]
                    running[q] = -1
            if running[q] < 0 and waiting[q] >= 0 and start[waiting[q]] <= upcoming:
                running[q] = waiting[q]
                waiting[q] = following[running[q]]
                begun[q], left[q] = upcoming, float(alone[running[q]])
        now = upcoming


@njit(cache=True)
def in_order(device, ns, input_ptr, source, hop):
    """int64 ``(n,)`` twice: when ops start and finish. A ``device`` runs its ops by number, each for ``ns``; op ``n``
    reads ``source[input_ptr[n]:input_ptr[n + 1]]``, ops of smaller numbers, whose results arrive after ``hop`` ns."""
    free = np.zeros(device.max() + 1, np.int64)
    start, finish = np.zeros(len(device), np.int64), np.zeros(len(device), np.int64)
    for n in range(len(device)):
        begin = free[device[n]]
        for k in range(input_ptr[n], input_ptr[n + 1]):
            begin = max(begin, finish[source[k]] + hop[k])
        start[n] = begin
        finish[n] = free[device[n]] = begin + ns[n]
    return start, finish
