"""The kernel of the policy ``priority`` on devices of one slot (dataflow, no ``fair`` contention, no gaps).

As in :mod:`simdev.sim.kernels.fifo`, sends are dealt with in the order of (finish, op), and what waits for nobody is
settled with an op's start. An op waits in one queue until it is ready, and then in the set of ready ranks of its device, which
takes the least when it is free and all that comes before is known.
"""

from __future__ import annotations

import numpy as np

from simdev.sim.inputs import Inputs
from simdev.sim.kernels.bits import ONE, add, take_least
from simdev.sim.kernels.fifo import MASK, NEAR, NEVER, NONE, SHIFT, Room, answer, send
from simdev.sim.kernels.general import OK, STUCK, Timeline, check_devices
from simdev.sim.kernels.heap import kernel, part, pop_key, push_key


@part
def run_priority(p: Inputs, devices, rank, x: Timeline, s: Room):
    """Simulate one placement (uint32 ``(n,)``, checked); return :data:`OK`, or :data:`STUCK` where an op never ran.

    ``rank`` int64 ``(n,)`` orders the ready ops.
    """
    n, n_devices = len(devices), len(p.slots)
    queue, heap, line, sends, state, arrival = s.queue, s.heap, s.line, s.sends, s.state, s.arrival
    base, started, head, end, first_send, free = s.base, s.started, s.head, s.end, s.first_send, s.free
    # Arrays that only the sweep and the general kernel need: ops by rank, how many are ready, when one is taken.
    by_rank, n_ready, due = x.finish_order, s.level, s.last_op
    bits, width = s.ready_ranks, np.uint64(len(s.ready_ranks) // n_devices)

    for device in range(n_devices + 1):
        base[device] = 0
    for op in range(n):
        base[devices[op] + 1] += 1
    for device in range(n_devices):
        base[device + 1] += base[device]
        started[device] = head[device] = end[device] = base[device]
        first_send[device] = due[device] = NEVER
        free[device] = n_ready[device] = 0
    for channel in range(len(s.channel_end)):
        s.channel_end[channel] = 0
    for word in range(len(bits)):
        bits[word] = 0
    first = last = n_transfers = NONE
    n_heap = n_started = 0
    for op in range(n):
        state[op] = p.input_ptr[op + 1] - p.input_ptr[op]
        by_rank[rank[op]] = op
        if state[op] == 0:
            queue[last] = op
            last += ONE
    step, next_due, next_send = np.int64(0), np.int64(NEVER), np.int64(NEVER)

    while True:
        ready = queue[first] if first < last else np.int64(NEVER)
        from_heap = False
        if n_heap > 0 and heap[0] < ready:
            ready = heap[0]
            from_heap = True
        if next_send < ready and (next_send >> SHIFT) <= (next_due >> SHIFT):
            # The next sends (R5).
            op, now, away = np.uint32(next_send & MASK), next_send >> SHIFT, np.uint32(1)
            source = devices[op]
            head[source] += 1
            first_send[source] = sends[head[source]] if head[source] < end[source] else NEVER
            next_send = np.int64(NEVER)
            for device in range(n_devices):
                next_send = min(next_send, first_send[device])
        elif (ready >> SHIFT) <= (next_due >> SHIFT) and ready != NEVER:
            if from_heap:
                n_heap = pop_key(heap, n_heap)
            else:
                first += ONE
            op = np.uint32(ready & MASK)
            device = devices[op]
            add(bits, np.uint64(device) * width, n, np.uint64(rank[op]))
            n_ready[device] += 1
            if n_ready[device] == 1:
                due[device] = (max(ready >> SHIFT, free[device]) << SHIFT) | device
                next_due = min(next_due, due[device])
            continue
        elif next_due == NEVER:
            break
        else:
            # A device takes the first of its ready ops (R1, R2).
            source, start = np.uint32(next_due & MASK), next_due >> SHIFT
            op = by_rank[take_least(bits, np.uint64(source) * width, n)]
            n_ready[source] -= 1
            now = start + p.op_ns[p.device_row[source], op]
            spot = started[source]
            x.start_order[spot], x.op_start[op], x.op_finish[op] = op, start, now
            key = (now << SHIFT) | op
            line[spot], free[source] = key, now
            started[source] += 1
            n_started += 1
            step = max(step, now)
            due[source] = (now << SHIFT) | source if n_ready[source] > 0 else NEVER
            next_due = np.int64(NEVER)
            for device in range(n_devices):
                next_due = min(next_due, due[device])
            away = np.uint32(0)
            for where in range(p.consumer_ptr[p.output_ptr[op]], p.consumer_ptr[p.output_ptr[op + 1]]):
                away |= devices[p.consumers[where]] ^ source
            if away != 0 and not p.alone[source]:
                sends[end[source]] = key
                if head[source] == end[source]:
                    first_send[source] = key
                    next_send = min(next_send, key)
                end[source] += 1
                continue
        arrival[source] = now << SHIFT
        for tensor in range(p.output_ptr[op], p.output_ptr[op + 1]):
            s.sent_until[tensor] = -1
            if away != 0:
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
    return OK if n_started == n else STUCK


@kernel
def run_many_priority(p: Inputs, placements, first, stop, rank, below, x: Timeline, s: Room, step, peak, overflow):
    """What :func:`simdev.sim.kernels.general.run_many` does, under this policy."""
    for row in range(first, stop):
        if not check_devices(p, placements[row]) or run_priority(p, placements[row], rank, x, s) != OK:
            return row
        answer(p, placements[row], row, below, x, s, step, peak, overflow)
    return -1
