"""The kernel of the policy ``priority`` on devices of one slot (dataflow, no ``fair`` contention, no gaps).

As in :mod:`simdev.sim._fifo`, dealing with finishes in the order of (finish, op) settles every transfer at once. An op
waits in one queue until it is ready, and then, by rank, in a heap of its device.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from simdev.sim._fifo import MASK, NEAR, NEVER, NONE, ONE, SHIFT, Room, send, sweep_fifo
from simdev.sim._heap import part, pop, pop_key, push, push_key
from simdev.sim._kernel import OK, STUCK, UNKNOWN, Timeline, check_devices
from simdev.sim.arrays import Inputs


@part
def run_priority(p: Inputs, devices, rank, x: Timeline, s: Room):
    """Simulate one placement (uint32 ``(n,)``, checked); return :data:`OK`, or :data:`STUCK` where an op never ran.

    ``rank`` int64 ``(n,)`` orders the ready ops.
    """
    n, n_devices = len(devices), len(p.slots)
    queue, heap, line, state, arrival = s.queue, s.heap, s.line, s.state, s.arrival
    base, started, first_finish = s.base, s.started, s.first_send
    # Arrays that only the sweep and the general kernel need: ready ops by rank, how many; devices that may start an op.
    ready_rank, ready_op, n_ready = s.freed_by_op, x.finish_order, s.head
    touched, is_touched = s.level, s.last_op

    for device in range(n_devices + 1):
        base[device] = 0
    for op in range(n):
        base[devices[op] + 1] += 1
    for device in range(n_devices):
        base[device + 1] += base[device]
        started[device] = base[device]
        first_finish[device] = NEVER
        n_ready[device] = is_touched[device] = 0
    for channel in range(len(s.channel_end)):
        s.channel_end[channel] = 0
    first = last = n_transfers = NONE
    n_heap = n_touched = n_finished = 0
    for op in range(n):
        state[op] = p.input_ptr[op + 1] - p.input_ptr[op]
        if state[op] == 0:
            queue[last] = op
            last += ONE
    now, step = np.int64(0), np.int64(0)
    next_finish, next_device = np.int64(NEVER), np.uint32(0)

    while True:
        ready = queue[first] if first < last else np.int64(NEVER)
        from_heap = False
        if n_heap > 0 and heap[0] < ready:
            ready = heap[0]
            from_heap = True

        # Starts (R1, R2), after all else at an instant.
        if n_touched > 0 and min(ready, next_finish) >> SHIFT > now:
            for index in range(n_touched):
                device = np.uint32(touched[index])
                is_touched[device] = 0
                if first_finish[device] != NEVER or n_ready[device] == 0:
                    continue
                op = ready_op[base[device]]
                n_ready[device] = pop(ready_rank, ready_op, base[device], n_ready[device])
                sequence_end = started[device]
                finish = now + p.op_ns[p.device_row[device], op]
                x.start_order[sequence_end], x.op_start[op], x.op_finish[op] = op, now, finish
                key = (finish << SHIFT) | op
                line[sequence_end] = first_finish[device] = key
                started[device] += 1
                if key < next_finish:
                    next_finish, next_device = key, device
            n_touched = 0
            continue

        if (ready >> SHIFT) < (next_finish >> SHIFT):
            if from_heap:
                n_heap = pop_key(heap, n_heap)
            else:
                first += ONE
            op, now = np.uint32(ready & MASK), ready >> SHIFT
            device = devices[op]
            n_ready[device] = push(ready_rank, ready_op, base[device], n_ready[device], rank[op], op)
            if is_touched[device] == 0:
                touched[n_touched], is_touched[device] = device, 1
                n_touched += 1
            continue
        if next_finish == NEVER:
            break

        # The next op to finish (R5).
        op, now, source = np.uint32(next_finish & MASK), next_finish >> SHIFT, next_device
        n_finished += 1
        first_finish[source] = NEVER
        next_finish = np.int64(NEVER)
        for device in range(n_devices):
            if first_finish[device] < next_finish:
                next_finish, next_device = first_finish[device], np.uint32(device)
        if is_touched[source] == 0:
            touched[n_touched], is_touched[source] = source, 1
            n_touched += 1
        step = max(step, now)
        arrival[source] = now << SHIFT
        for tensor in range(p.output_ptr[op], p.output_ptr[op + 1]):
            s.sent_until[tensor] = -1
            n_transfers, step = send(p, devices, tensor, source, now, x, s, n_transfers, step)
            for where in range(p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]):
                consumer = p.consumers[where]
                was = state[consumer]
                was = max(was, arrival[devices[consumer]] | (was & MASK)) - 1
                state[consumer] = was
                if (was & MASK) > 0:
                    continue
                key = was | consumer
                nearest = last - NEAR if last - first > NEAR else first
                if nearest > first and queue[nearest - ONE] > key:
                    n_heap = push_key(heap, n_heap, key)
                    continue
                spot = last
                while spot > nearest and queue[spot - ONE] > key:
                    queue[spot] = queue[spot - ONE]
                    spot -= ONE
                queue[spot] = key
                last += ONE
    x.count[0], x.count[1] = n_transfers, step
    return OK if n_finished == n else STUCK


@njit(cache=True, nogil=True)
def run_many_priority(p: Inputs, placements, first, stop, rank, below, x: Timeline, s: Room, step, peak, overflow):
    """What :func:`simdev.sim._kernel.run_many` does, under this policy."""
    for row in range(first, stop):
        if not check_devices(p, placements[row]) or run_priority(p, placements[row], rank, x, s) != OK:
            return row
        step[row] = x.count[1]
        if step[row] >= below:
            peak[row] = overflow[row] = UNKNOWN
            continue
        sweep_fifo(p, placements[row], x, s, peak[row])
        overflow[row] = 0
        for device in range(len(p.slots)):
            overflow[row] += max(0, peak[row, device] - p.capacity[device])
    return -1
