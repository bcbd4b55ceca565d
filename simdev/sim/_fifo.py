"""The kernel of the default rules (dataflow, ``fifo`` policy, ``fifo`` or ``none`` contention): no event queue.

Two facts make it exact. The ops of a device run in the order of (ready time, op number), so an op's place is final once
no op can become ready before it, which is so when it was ready before the earliest finish not yet dealt with. And sends
are asked for in the order of (finish, op), so dealing with finishes in that order settles every transfer at once. What
remains is a queue of ready ops and, per device, a line of ops in the order in which they will finish.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from simdev.sim._heap import part, pop_key, push_key, sort_pairs
from simdev.sim._kernel import SHARED, UNKNOWN, Timeline, check_devices
from simdev.sim.arrays import Inputs

SHIFT, MASK = 20, (1 << 20) - 1  # a key is a time and an op number; see MAX_OPS and MAX_KEY_TIME_NS
NEVER = np.iinfo(np.int64).max
NONE, ONE = np.uint64(0), np.uint64(1)  # indices are unsigned: Numba checks signed ones for being negative
WIDE, GROUP = 16, 3  # of more devices than WIDE, the first finish is looked for by groups of 2**GROUP
NEAR = np.uint64(32)  # how far a ready op is moved up the sorted queue before it goes to the heap instead


class Room(NamedTuple):
    """Working arrays of one thread. The ops of a device are at ``base`` in ``line``: finishes of those that have
    started, ``started`` where the next goes, and those from ``head`` to ``end`` are still to be dealt with."""

    queue: np.ndarray
    heap: np.ndarray
    line: np.ndarray
    sends: np.ndarray
    missing: np.ndarray
    ready_time: np.ndarray
    base: np.ndarray
    started: np.ndarray
    head: np.ndarray
    end: np.ndarray
    first_send: np.ndarray
    group_send: np.ndarray
    leader: np.ndarray
    free: np.ndarray
    slot_free: np.ndarray
    channel_end: np.ndarray
    stamp: np.ndarray
    arrival: np.ndarray
    request: np.ndarray
    received: np.ndarray
    sent: np.ndarray
    sent_until: np.ndarray
    sent_last: np.ndarray
    freed_by_op: np.ndarray
    freed_by_transfer: np.ndarray
    last_op: np.ndarray
    level: np.ndarray
    over_time: np.ndarray
    over_base: np.ndarray
    in_ptr: np.ndarray
    in_end: np.ndarray
    in_time: np.ndarray
    in_size: np.ndarray
    out_ptr: np.ndarray
    out_end: np.ndarray
    out_time: np.ndarray
    out_size: np.ndarray


def new_room(n_ops: int, n_tensors: int, n_edges: int, n_devices: int, n_channels: int, n_slots: int) -> Room:
    """Working arrays for one thread."""

    def ints(length, dtype=np.int64):
        return np.zeros(length, dtype)

    per_device = ("started", "head", "end", "first_send", "free", "stamp", "arrival", "request", "received", "sent")
    per_device += ("last_op", "level", "over_time", "over_base", "in_end", "out_end", "group_send", "leader")
    return Room(
        queue=ints(n_ops), heap=ints(n_ops), line=ints(n_ops), sends=ints(n_ops), missing=ints(n_ops, np.int32), ready_time=ints(n_ops),
        slot_free=ints(n_slots), channel_end=ints(n_channels), sent_until=ints(n_tensors),
        sent_last=ints(n_tensors, np.uint32), freed_by_op=ints(n_ops), freed_by_transfer=ints(n_edges),
        in_time=ints(n_edges), in_size=ints(n_edges), out_time=ints(n_edges), out_size=ints(n_edges),
        base=ints(n_devices + 1), in_ptr=ints(n_devices + 1), out_ptr=ints(n_devices + 1),
        **{name: ints(n_devices) for name in per_device},
    )  # fmt: skip


@part
def run_fifo(p: Inputs, devices, x: Timeline, s: Room):
    """Simulate one placement (uint32 ``(n,)``, checked) under the default rules; every op runs."""
    n, n_devices = len(devices), len(p.slots)
    shared = p.contention == SHARED
    queue, heap, line, sends = s.queue, s.heap, s.line, s.sends
    alone = p.alone
    base, started, head, end = s.base, s.started, s.head, s.end
    first_send, free, slot_free = s.first_send, s.free, s.slot_free
    wide, n_groups = n_devices > WIDE, ((n_devices - 1) >> GROUP) + 1
    group_send, leader = s.group_send, s.leader
    missing, ready_time, channel_end = s.missing, s.ready_time, s.channel_end
    stamp, arrival, request = s.stamp, s.arrival, s.request
    op_start, op_finish, sequence = x.op_start, x.op_finish, x.start_order

    for device in range(n_devices + 1):
        base[device] = 0
    for op in range(n):
        base[devices[op] + 1] += 1
    for device in range(n_devices):
        base[device + 1] += base[device]
        started[device] = head[device] = end[device] = base[device]
        first_send[device] = NEVER
        free[device] = 0
        stamp[device] = -1
        s.received[device] = s.sent[device] = 0
        group_send[device >> GROUP] = NEVER
    slot_free[:] = 0
    channel_end[:] = 0
    first = last = n_transfers = NONE
    n_heap = mark = 0
    for op in range(n):
        missing[op] = p.input_ptr[op + 1] - p.input_ptr[op]
        ready_time[op] = 0
        if missing[op] == 0:
            queue[last] = op
            last += ONE
    step = np.int64(0)
    next_send, next_device = np.int64(NEVER), devices[0]

    while True:
        ready = np.int64(NEVER)
        from_heap = False
        if first < last:
            ready = queue[first]
        if n_heap > 0 and heap[0] < ready:
            ready = heap[0]
            from_heap = True
        if (ready >> SHIFT) < (next_send >> SHIFT):
            # Its place on its device is final (R1, R2).
            if from_heap:
                n_heap = pop_key(heap, n_heap)
            else:
                first += ONE
            op = np.uint32(ready & MASK)
            source = devices[op]
            start = ready >> SHIFT
            front = np.uint64(base[source])
            if p.slots[source] == 1:
                start = max(start, free[source])
                now = start + p.op_ns[p.device_row[source], op]
                free[source] = now
            else:
                slot = p.slot_ptr[source]
                for other in range(p.slot_ptr[source] + 1, p.slot_ptr[source + 1]):
                    if slot_free[other] < slot_free[slot]:
                        slot = other
                start = max(start, slot_free[slot])
                now = start + p.op_ns[p.device_row[source], op]
                slot_free[slot] = now
            op_start[op], op_finish[op] = start, now
            if now > step:
                step = now
            key = (now << SHIFT) | op
            spot = np.uint64(started[source])
            sequence[spot] = op
            started[source] += 1
            while spot > front and line[spot - ONE] > key:
                line[spot] = line[spot - ONE]
                spot -= ONE
            line[spot] = key
            if not alone[source]:
                remote = False
                for where in range(p.consumer_ptr[p.output_ptr[op]], p.consumer_ptr[p.output_ptr[op + 1]]):
                    remote |= devices[p.consumers[where]] != source
                if remote:
                    spot, front = np.uint64(end[source]), np.uint64(head[source])
                    end[source] += 1
                    while spot > front and sends[spot - ONE] > key:
                        sends[spot] = sends[spot - ONE]
                        spot -= ONE
                    sends[spot] = key
                    if spot == front:
                        first_send[source] = key
                        if wide and key < group_send[source >> GROUP]:
                            group_send[source >> GROUP], leader[source >> GROUP] = key, source
                        if key < next_send:
                            next_send, next_device = key, source
                    continue
                for tensor in range(p.output_ptr[op], p.output_ptr[op + 1]):
                    s.sent_until[tensor] = -1
                for where in range(p.consumer_ptr[p.output_ptr[op]], p.consumer_ptr[p.output_ptr[op + 1]]):
                    consumer = p.consumers[where]
                    there = max(ready_time[consumer], now)
                    ready_time[consumer] = there
                    missing[consumer] -= 1
                    if missing[consumer] > 0:
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
                continue
        elif next_send == NEVER:
            break
        else:
            # The next sends (R5).
            op, now, source = np.uint32(next_send & MASK), next_send >> SHIFT, next_device
            head[source] += 1
            first_send[source] = sends[head[source]] if head[source] < end[source] else NEVER
            next_send = np.int64(NEVER)
            if wide:
                group = np.uint64(source >> GROUP)
                for device in range(group << GROUP, min((group + ONE) << GROUP, np.uint64(n_devices))):
                    if first_send[device] < next_send:
                        next_send, leader[group] = first_send[device], device
                group_send[group] = next_send
                for other in range(n_groups):
                    if group_send[other] <= next_send:
                        next_send, next_device = group_send[other], np.uint32(leader[other])
            else:
                for device in range(n_devices):
                    if first_send[device] < next_send:
                        next_send, next_device = first_send[device], np.uint32(device)
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
                there = max(ready_time[consumer], arrival[devices[consumer]])
                ready_time[consumer] = there
                missing[consumer] -= 1
                if missing[consumer] > 0:
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


@part
def sweep_fifo(p: Inputs, devices, x: Timeline, s: Room, peak):
    """What :func:`simdev.sim._kernel.sweep_memory` does, device by device, after :func:`run_fifo`."""
    n, n_devices, n_transfers = len(devices), len(p.slots), x.count[0]
    freed_by_op, freed_by_transfer, last_op, level = s.freed_by_op, s.freed_by_transfer, s.last_op, s.level
    op_finish, op_start, granule = x.op_finish, x.op_start, p.granule
    level[:] = 0
    last_op[:] = -1
    for op in range(n):
        grain = granule[devices[op]]
        freed_by_op[op] = p.workspace_size[grain, op]
        level[devices[op]] += p.persistent_size[grain, op]
    freed_by_transfer[:n_transfers] = 0

    # Each instance is freed with the completion that ends its life: an op's on its own device, or a transfer's.
    for tensor in range(len(p.tensor_producer)):
        producer = p.tensor_producer[tensor]
        home = devices[producer]
        edge, stop = p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]
        until, last = op_finish[producer], producer
        for where in range(edge, stop):
            op = p.consumers[where]
            device = devices[op]
            if device == home:
                if op_finish[op] > until:
                    until, last = op_finish[op], op
            elif last_op[device] < 0 or op_finish[op] > op_finish[last_op[device]]:
                last_op[device] = op
        if not p.tensor_result[tensor]:
            size = p.home_size[granule[home], tensor]
            if s.sent_until[tensor] > until:
                freed_by_transfer[s.sent_last[tensor]] += size
            else:
                freed_by_op[last] += size
        if s.sent_until[tensor] >= 0:
            for where in range(edge, stop):
                device = devices[p.consumers[where]]
                if last_op[device] >= 0:
                    freed_by_op[last_op[device]] += p.tensor_size[granule[device], tensor]
                    last_op[device] = -1

    # Copies by device and start, frees by transfers by device and finish; both are nearly in order already.
    in_ptr, in_end, in_time, in_size = s.in_ptr, s.in_end, s.in_time, s.in_size
    out_ptr, out_end, out_time, out_size = s.out_ptr, s.out_end, s.out_time, s.out_size
    in_ptr[0] = out_ptr[0] = 0
    for device in range(n_devices):
        in_ptr[device + 1] = in_ptr[device] + s.received[device]
        out_ptr[device + 1] = out_ptr[device] + s.sent[device]
        in_end[device], out_end[device] = in_ptr[device], out_ptr[device]
    for transfer in range(np.uint64(n_transfers)):
        tensor, device = x.x_tensor[transfer], x.x_target[transfer]
        in_time[in_end[device]], in_size[in_end[device]] = x.x_start[transfer], p.tensor_size[granule[device], tensor]
        in_end[device] += 1
        if freed_by_transfer[transfer] > 0:
            device = devices[p.tensor_producer[tensor]]
            out_time[out_end[device]], out_size[out_end[device]] = x.x_finish[transfer], freed_by_transfer[transfer]
            out_end[device] += 1
    for device in range(n_devices):
        sort_pairs(in_time, in_size, in_ptr[device], in_end[device])
        sort_pairs(out_time, out_size, out_ptr[device], out_end[device])

    for device in range(n_devices):
        grain, capacity, used = granule[device], p.capacity[device], level[device]
        most = used
        s.over_time[device] = -2 if used > capacity else -1
        s.over_base[device] = 0
        start = finish = np.uint64(s.base[device])
        ops_end = np.uint64(s.base[device + 1])
        copy, copies_end = np.uint64(in_ptr[device]), np.uint64(in_end[device])
        free, frees_end = np.uint64(out_ptr[device]), np.uint64(out_end[device])
        previous, before = np.int64(-1), used
        while start < ops_end or copy < copies_end:
            op_time = op_start[x.start_order[start]] if start < ops_end else NEVER
            copy_time = in_time[copy] if copy < copies_end else NEVER
            now = min(op_time, copy_time)
            while finish < start and (s.line[finish] >> SHIFT) <= now:
                used -= freed_by_op[np.uint32(s.line[finish] & MASK)]
                finish += ONE
            while free < frees_end and out_time[free] <= now:
                used -= out_size[free]
                free += ONE
            if now != previous:
                previous, before = now, used
            if op_time == now:
                used += p.start_size[grain, x.start_order[start]]
                start += ONE
            else:
                used += in_size[copy]
                copy += ONE
            if used > most:
                most = used
                if s.over_time[device] == -1 and used > capacity:
                    s.over_time[device], s.over_base[device] = now, before
        peak[device] = most


@njit(cache=True, nogil=True)
def run_many_fifo(p: Inputs, placements, first, stop, below, x: Timeline, s: Room, step, peak, overflow, known):
    """What :func:`simdev.sim._kernel.run_many` does, under the default rules. ``known``: the run of the first row is in
    ``x`` and ``s`` already, so that only its memory is worked out."""
    for row in range(first, stop):
        if not (known and row == first):
            if not check_devices(p, placements[row]):
                return row
            run_fifo(p, placements[row], x, s)
        step[row] = x.count[1]
        if step[row] >= below:
            peak[row] = overflow[row] = UNKNOWN
            continue
        sweep_fifo(p, placements[row], x, s, peak[row])
        overflow[row] = 0
        for device in range(len(p.slots)):
            overflow[row] += max(0, peak[row, device] - p.capacity[device])
    return -1
