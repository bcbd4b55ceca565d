"""The compiled loops of the searches (:mod:`simdev.baselines._order`, :mod:`simdev.baselines._critical`). This module
loads Numba."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def path_keys(devices, op_ns, device_row, transfer_ns, pair_class, output_ptr, consumer_ptr, consumers):
    """See :func:`simdev.baselines._order.path_keys`."""
    keys = np.empty(len(devices), np.int64)
    for op in range(len(devices) - 1, -1, -1):
        here, longest = devices[op], np.int64(0)
        for tensor in range(output_ptr[op], output_ptr[op + 1]):
            for edge in range(consumer_ptr[tensor], consumer_ptr[tensor + 1]):
                reader = consumers[edge]
                length, there = keys[reader], devices[reader]
                if there != here:
                    length += transfer_ns[pair_class[here, there], tensor]
                longest = max(longest, length)
        keys[op] = longest + op_ns[device_row[here], op]
    return keys


@njit(cache=True)
def critical_path(
    devices, start, finish, before, input_ptr, inputs, producer, x_tensor, x_target, x_start, x_finish, by_end
):
    """See :func:`simdev.baselines._critical.critical`. ``before``: the op that ran before each op on its device, or -1;
    ``x_*``: the transfers, sorted by (tensor, target); ``by_end``: their numbers by end."""
    n = len(devices)
    ops, n_ops = np.empty(n, np.int64), 0
    sends, n_sends = np.empty((len(x_tensor), 2), np.int64), 0
    queued, n_queued = np.empty((n, 2), np.int64), 0
    ends = x_finish[by_end]
    op = np.int64(np.argmax(finish))
    while True:
        ops[n_ops] = op
        n_ops += 1
        now = start[op]
        if now == 0 or n_ops == n:
            break
        home, row = np.int64(-1), np.int64(-1)
        for slot in range(input_ptr[op], input_ptr[op + 1]):
            maker = producer[inputs[slot]]
            if devices[maker] == devices[op]:
                if finish[maker] == now:
                    home = np.int64(maker)
            else:
                place = find(x_tensor, x_target, np.int64(inputs[slot]), devices[op])
                if x_finish[place] == now:
                    row = place
        if home >= 0:
            op = home
        elif row >= 0:
            while True:
                sends[n_sends, 0], sends[n_sends, 1] = x_tensor[row], x_target[row]
                n_sends += 1
                op, begin = np.int64(producer[x_tensor[row]]), x_start[row]
                place = np.searchsorted(ends, begin)
                if begin <= finish[op] or place == len(ends) or ends[place] != begin or n_sends == len(sends):
                    break
                row = by_end[place]
            if n_sends == len(sends):
                break
        elif before[op] >= 0 and finish[before[op]] == now:
            queued[n_queued, 0], queued[n_queued, 1] = op, before[op]
            n_queued += 1
            op = np.int64(before[op])
        else:  # a closed slot or a dispatch: the path ends here
            break
    return ops[:n_ops], sends[:n_sends], queued[:n_queued]


@njit(cache=True)
def find(x_tensor, x_target, tensor, target):
    """The row of the transfer of ``tensor`` to ``target``."""
    low, high = 0, len(x_tensor)
    while low < high:
        middle = (low + high) >> 1
        if x_tensor[middle] < tensor or (x_tensor[middle] == tensor and x_target[middle] < target):
            low = middle + 1
        else:
            high = middle
    return low
