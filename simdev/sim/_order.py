"""The kernel of the policies ``priority`` and ``program`` on devices of one slot (dataflow, no ``fair`` contention).

As in :mod:`simdev.sim._fifo`, dealing with finishes in the order of (finish, op) settles every transfer at once. Under
``program`` the order on each device is known, so that an op's start is settled as soon as its inputs are: there is no
queue at all. Under ``priority`` an op waits in one queue until it is ready, and then, by rank, in a heap of its device.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from simdev.sim._fifo import MASK, NEAR, NEVER, NONE, ONE, SHIFT, Room, sweep_fifo
from simdev.sim._heap import part, pop, pop_key, push, push_key
from simdev.sim._kernel import OK, PROGRAM, SHARED, STUCK, UNKNOWN, Timeline, check_devices
from simdev.sim.arrays import Inputs


@part
def run_ordered(p: Inputs, devices, rank, x: Timeline, s: Room):
    """Simulate one placement (uint32 ``(n,)``, checked); return :data:`OK`, or :data:`STUCK` where an op never ran.

    ``rank`` int64 ``(n,)`` orders the ready ops under the ``priority`` policy.
    """
    n, n_devices = len(devices), len(p.slots)
    shared, program = p.contention == SHARED, p.policy == PROGRAM
    queue, heap, line = s.queue, s.heap, s.line
    base, started, first_finish, free = s.base, s.started, s.first_send, s.free
    missing, ready_time, channel_end = s.missing, s.ready_time, s.channel_end
    stamp, arrival, request = s.stamp, s.arrival, s.request
    op_start, op_finish, sequence = x.op_start, x.op_finish, x.start_order
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
        free[device] = n_ready[device] = s.received[device] = s.sent[device] = 0
        stamp[device] = -1
        touched[device], is_touched[device] = device, 1
    for channel in range(len(channel_end)):
        channel_end[channel] = 0
    first = last = n_transfers = NONE
    n_heap = mark = n_finished = 0
    for op in range(n):
        missing[op] = p.input_ptr[op + 1] - p.input_ptr[op]
        ready_time[op] = 0
        if program:
            sequence[started[devices[op]]] = op
            started[devices[op]] += 1
        elif missing[op] == 0:
            queue[last] = op
            last += ONE
    for device in range(n_devices):
        started[device] = base[device]
    n_touched = n_devices
    now, step = np.int64(0), np.int64(0)
    next_finish, next_device = np.int64(NEVER), np.uint32(0)

    while True:
        ready = np.int64(NEVER)
        from_heap = False
        if first < last:
            ready = queue[first]
        if n_heap > 0 and heap[0] < ready:
            ready = heap[0]
            from_heap = True

        # Starts (R1, R2), after all else at an instant.
        if n_touched > 0 and (program or min(ready, next_finish) >> SHIFT > now):
            for index in range(n_touched):
                device = np.uint32(touched[index])
                is_touched[device] = 0
                if first_finish[device] != NEVER:
                    continue
                begin = now
                if program:
                    if started[device] == base[device + 1] or missing[sequence[started[device]]] > 0:
                        continue
                    op = sequence[started[device]]
                    begin = max(ready_time[op], free[device])
                else:
                    if n_ready[device] == 0:
                        continue
                    op = ready_op[base[device]]
                    n_ready[device] = pop(ready_rank, ready_op, base[device], n_ready[device])
                    sequence[started[device]] = op
                finish = begin + p.op_ns[p.device_row[device], op]
                op_start[op], op_finish[op], free[device] = begin, finish, finish
                key = (finish << SHIFT) | op
                line[started[device]] = first_finish[device] = key
                started[device] += 1
                if key < next_finish:
                    next_finish, next_device = key, device
            n_touched = 0
            continue

        if ready != NEVER and (ready >> SHIFT) < (next_finish >> SHIFT):
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
        if now > step:
            step = now
        for tensor in range(p.output_ptr[op], p.output_ptr[op + 1]):
            edge, stop = p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]
            mark += 1
            n_requests = NONE
            for where in range(edge, stop):
                target = devices[p.consumers[where]]
                if target != source and stamp[target] != mark:
                    stamp[target] = mark
                    hole = n_requests
                    while hole > NONE and request[hole - ONE] > target:
                        request[hole] = request[hole - ONE]
                        hole -= ONE
                    request[hole] = target
                    n_requests += ONE
            s.sent_until[tensor] = -1
            arrival[source] = now
            for number in range(n_requests):  # R3, R4
                target = np.uint32(request[number])
                pair = np.uint32(source * n_devices + target)
                start = now
                if shared:
                    for hop in range(p.route_ptr[pair], p.route_ptr[pair + ONE]):
                        start = max(start, channel_end[p.route[hop]])
                finish = start + p.transfer_ns[p.pair_class[source, target], tensor]
                if shared:
                    for hop in range(p.route_ptr[pair], p.route_ptr[pair + ONE]):
                        channel_end[p.route[hop]] = finish
                arrival[target] = finish
                s.received[target] += 1
                s.sent[source] += 1
                x.x_tensor[n_transfers], x.x_target[n_transfers] = tensor, target
                x.x_start[n_transfers], x.x_finish[n_transfers] = start, finish
                if finish > s.sent_until[tensor]:
                    s.sent_until[tensor], s.sent_last[tensor] = finish, n_transfers
                    if finish > step:
                        step = finish
                n_transfers += ONE
            for where in range(edge, stop):
                consumer = p.consumers[where]
                target = devices[consumer]
                there = max(ready_time[consumer], arrival[target])
                ready_time[consumer] = there
                missing[consumer] -= 1
                if missing[consumer] > 0:
                    continue
                if program:
                    if is_touched[target] == 0:
                        touched[n_touched], is_touched[target] = target, 1
                        n_touched += 1
                    continue
                key = (there << SHIFT) | consumer
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
def run_many_ordered(p: Inputs, placements, first, stop, rank, below, x: Timeline, s: Room, step, peak, overflow):
    """What :func:`simdev.sim._kernel.run_many` does, under these policies."""
    for row in range(first, stop):
        if not check_devices(p, placements[row]) or run_ordered(p, placements[row], rank, x, s) != OK:
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
