"""The kernel of the default rules (dataflow, ``fifo`` policy, ``fifo`` or ``none`` contention): no event queue.

Three facts make it exact. The ops of a device run in the order of (ready time, op number), so an op's place is final
once no op can become ready before it, which is so when it was ready before the earliest send not yet dealt with. Sends
are asked for in the order of (finish, op), so dealing with them in that order settles every transfer at once. And what
an op does on its own device, and over channels that no other device sends on, waits for nobody: it is settled with the
op's start. What remains is a queue of ready ops and, per device, a line of ops that have something to send.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simdev.sim.inputs import Inputs
from simdev.sim.kernels.bits import IN_WORD, ONE, WORD, lowest_bit, set_words
from simdev.sim.kernels.general import SHARED, UNKNOWN, Timeline, check_devices
from simdev.sim.kernels.heap import inlined, kernel, part, pop_key, push_key, sort_by

SHIFT, MASK = 20, (1 << 20) - 1  # a key is a time and an op number; see MAX_OPS and MAX_KEY_TIME_NS
NEVER = np.iinfo(np.int64).max
NONE = np.uint64(0)  # indices are unsigned: Numba checks signed ones for being negative
NEAR = np.uint64(32)  # how far a ready op is moved up the sorted queue before it goes to the heap instead


class Room(NamedTuple):
    """Working arrays of one thread. ``state`` of an op: the time at which it is ready as far as is known, and how many
    inputs it lacks, in one key. The ops of a device are at ``base`` in ``line``, by finish, and ``started`` is where
    the next goes; in ``sends``, from ``head`` to ``end``, are those whose sends are still to be dealt with."""

    queue: np.ndarray
    heap: np.ndarray
    line: np.ndarray
    sends: np.ndarray
    state: np.ndarray
    base: np.ndarray
    started: np.ndarray
    head: np.ndarray
    end: np.ndarray
    first_send: np.ndarray
    free: np.ndarray
    slot_free: np.ndarray
    channel_end: np.ndarray
    arrival: np.ndarray
    todo: np.ndarray
    listed: np.ndarray
    sent_until: np.ndarray
    sent_last: np.ndarray
    freed_by_op: np.ndarray
    freed_late: np.ndarray
    last_op: np.ndarray
    level: np.ndarray
    over_time: np.ndarray
    over_base: np.ndarray
    copy_ptr: np.ndarray
    copies_end: np.ndarray
    copies: np.ndarray
    freeing_ptr: np.ndarray
    freeing_end: np.ndarray
    freeing: np.ndarray
    spare: np.ndarray
    ready_ranks: np.ndarray
    request: np.ndarray
    requested: np.ndarray


def new_room(
    n_ops: int, n_tensors: int, n_edges: int, n_devices: int, n_channels: int, n_slots: int,
    *, eager: bool = False, priority: bool = False
) -> Room:  # fmt: skip
    """Working arrays for one thread. ``eager``, ``priority``: with what only these rules need."""

    def ints(length, dtype=np.int64):
        return np.zeros(length, dtype)

    per_device = ("started", "head", "end", "first_send", "free", "arrival", "todo", "listed")
    per_device += ("last_op", "level", "over_time", "over_base", "copies_end", "freeing_end")
    return Room(
        queue=ints(n_ops), heap=ints(n_ops), line=ints(n_ops), sends=ints(n_ops), state=ints(n_ops),
        slot_free=ints(n_slots), channel_end=ints(n_channels), sent_until=ints(n_tensors),
        sent_last=ints(n_tensors, np.uint32), freed_by_op=ints(n_ops), copies=ints(n_edges, np.uint32),
        freeing=ints(n_tensors, np.uint32), freed_late=ints(n_tensors, np.bool_),
        spare=ints(n_tensors, np.uint32),
        ready_ranks=ints(set_words(n_ops) * n_devices * priority, np.uint64),
        request=ints(n_edges * eager), requested=ints(n_edges * eager),
        **{name: ints(n_devices + 1) for name in ("base", "copy_ptr", "freeing_ptr")},
        **{name: ints(n_devices) for name in per_device},
    )  # fmt: skip


@inlined
def send(p: Inputs, devices, tensor, source, now, x: Timeline, s: Room, n_transfers, step):
    """Send ``tensor``, finished on device ``source`` at ``now``, to all other devices where it is read (R3, R4), and
    note its arrivals. Returns how many transfers there are and the step time so far."""
    n_devices, shared = len(p.slots), p.contention == SHARED
    channel_end, arrival = s.channel_end, s.arrival
    edge, stop = p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]
    n_words = (np.uint64(n_devices - 1) >> WORD) + ONE
    for word in range(n_words):
        targets = NONE  # a set, as bits
        if n_words == ONE:
            for where in range(edge, stop):
                targets |= ONE << np.uint64(devices[p.consumers[where]])
        else:
            for where in range(edge, stop):
                target = np.uint64(devices[p.consumers[where]])
                if target >> WORD == word:
                    targets |= ONE << (target & IN_WORD)
        if source >> WORD == word:
            targets &= ~(ONE << (source & IN_WORD))
        while targets != NONE:
            target = np.uint32(word << WORD) | np.uint32(lowest_bit(targets))
            targets &= targets - ONE
            pair = np.uint32(source * n_devices + target)
            start = now
            if shared:
                for hop in range(p.route_ptr[pair], p.route_ptr[pair + ONE]):
                    start = max(start, channel_end[p.route[hop]])
            finish = start + p.transfer_ns[p.pair_class[source, target], tensor]
            if shared:
                for hop in range(p.route_ptr[pair], p.route_ptr[pair + ONE]):
                    channel_end[p.route[hop]] = finish
            arrival[target] = finish << SHIFT
            x.x_tensor[n_transfers], x.x_target[n_transfers] = tensor, target
            x.x_start[n_transfers], x.x_finish[n_transfers] = start, finish
            if finish > s.sent_until[tensor]:
                s.sent_until[tensor], s.sent_last[tensor] = finish, n_transfers
            step = max(step, finish)
            n_transfers += ONE
    return n_transfers, step


@part
def run_fifo(p: Inputs, devices, x: Timeline, s: Room):
    """Simulate one placement (uint32 ``(n,)``, checked) under the default rules; every op runs."""
    n, n_devices = len(devices), len(p.slots)
    queue, heap, line, sends, alone = s.queue, s.heap, s.line, s.sends, p.alone
    base, started, head, end = s.base, s.started, s.head, s.end
    first_send, free, slot_free = s.first_send, s.free, s.slot_free
    state, arrival = s.state, s.arrival
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
    slot_free[:] = 0
    s.channel_end[:] = 0
    first = last = n_transfers = NONE
    n_heap = 0
    for op in range(n):
        state[op] = p.input_ptr[op + 1] - p.input_ptr[op]
        if state[op] == 0:
            queue[last] = op
            last += ONE
    step = np.int64(0)
    next_send = np.int64(NEVER)

    while True:
        ready = queue[first] if first < last else np.int64(NEVER)
        from_heap = False
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
            step = max(step, now)
            key = (now << SHIFT) | op
            spot = np.uint64(started[source])
            sequence[spot] = op
            started[source] += 1
            front = np.uint64(base[source])
            while spot > front and line[spot - ONE] > key:
                line[spot] = line[spot - ONE]
                spot -= ONE
            line[spot] = key
            away = np.uint32(0)
            for where in range(p.consumer_ptr[p.output_ptr[op]], p.consumer_ptr[p.output_ptr[op + 1]]):
                away |= devices[p.consumers[where]] ^ source
            if away != 0 and not alone[source]:
                spot, front = np.uint64(end[source]), np.uint64(head[source])
                end[source] += 1
                while spot > front and sends[spot - ONE] > key:
                    sends[spot] = sends[spot - ONE]
                    spot -= ONE
                sends[spot] = key
                if spot == front:
                    first_send[source] = key
                    next_send = min(next_send, key)
                continue
        elif next_send == NEVER:
            break
        else:
            # The next sends (R5).
            op, now, away = np.uint32(next_send & MASK), next_send >> SHIFT, np.uint32(1)
            source = devices[op]
            head[source] += 1
            first_send[source] = sends[head[source]] if head[source] < end[source] else NEVER
            next_send = np.int64(NEVER)
            for device in range(n_devices):
                next_send = min(next_send, first_send[device])
        arrival[source] = now << SHIFT
        for tensor in range(p.output_ptr[op], p.output_ptr[op + 1]):
            edge, stop = p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]
            s.sent_until[tensor] = -1
            if away != 0:
                n_transfers, step = send(p, devices, tensor, source, now, x, s, n_transfers, step)
            for where in range(edge, stop):
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


@part
def sweep_fifo(p: Inputs, devices, x: Timeline, s: Room, peak):
    """What :func:`simdev.sim.kernels.general.sweep_memory` does, device by device, after :func:`run_fifo`."""
    n, n_devices, n_transfers = len(devices), len(p.slots), np.uint64(x.count[0])
    freed_by_op, freed_late, last_op, level, granule = s.freed_by_op, s.freed_late, s.last_op, s.level, p.granule
    op_finish, op_start = x.op_finish, x.op_start
    level[:] = 0
    last_op[:] = -1
    for op in range(n):
        grain = granule[devices[op]]
        freed_by_op[op] = p.workspace_size[grain, op]
        level[devices[op]] += p.persistent_size[grain, op]

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
        if s.sent_until[tensor] >= 0:
            for where in range(edge, stop):
                device = devices[p.consumers[where]]
                if last_op[device] >= 0:
                    freed_by_op[last_op[device]] += p.tensor_size[granule[device], tensor]
                    last_op[device] = -1
        freed_late[tensor] = s.sent_until[tensor] > until and not p.tensor_result[tensor]
        if s.sent_until[tensor] <= until and not p.tensor_result[tensor]:
            freed_by_op[last] += p.home_size[granule[home], tensor]

    # Per device, copies by start and the transfers that free by finish: both are nearly in order already.
    copy_ptr, copies_end, copies = s.copy_ptr, s.copies_end, s.copies
    freeing_ptr, freeing_end, freeing = s.freeing_ptr, s.freeing_end, s.freeing
    for device in range(n_devices + 1):
        copy_ptr[device] = freeing_ptr[device] = 0
    for transfer in range(n_transfers):
        tensor = x.x_tensor[transfer]
        copy_ptr[x.x_target[transfer] + 1] += 1
        if freed_late[tensor] and s.sent_last[tensor] == transfer:
            freeing_ptr[devices[p.tensor_producer[tensor]] + 1] += 1
    for device in range(n_devices):
        copies_end[device], freeing_end[device] = copy_ptr[device], freeing_ptr[device]
        copy_ptr[device + 1] += copy_ptr[device]
        freeing_ptr[device + 1] += freeing_ptr[device]
    for transfer in range(n_transfers):
        tensor, device = x.x_tensor[transfer], x.x_target[transfer]
        copies[copies_end[device]] = transfer
        copies_end[device] += 1
        if freed_late[tensor] and s.sent_last[tensor] == transfer:
            device = devices[p.tensor_producer[tensor]]
            freeing[freeing_end[device]] = transfer
            freeing_end[device] += 1
    for device in range(n_devices):
        sort_by(x.x_start, copies, s.spare, copy_ptr[device], copies_end[device])
        sort_by(x.x_finish, freeing, s.spare, freeing_ptr[device], freeing_end[device])

    for device in range(n_devices):
        grain, capacity, used = granule[device], p.capacity[device], level[device]
        most = used
        s.over_time[device] = -2 if used > capacity else -1
        s.over_base[device] = 0
        start = finish = np.uint64(s.base[device])
        ops_end = np.uint64(s.base[device + 1])
        copy, last_copy = np.uint64(copy_ptr[device]), np.uint64(copies_end[device])
        free, last_free = np.uint64(freeing_ptr[device]), np.uint64(freeing_end[device])
        previous, before = np.int64(-1), used
        while start < ops_end or copy < last_copy:
            op_time = op_start[x.start_order[start]] if start < ops_end else NEVER
            copy_time = x.x_start[copies[copy]] if copy < last_copy else NEVER
            now = min(op_time, copy_time)
            while finish < start and (s.line[finish] >> SHIFT) <= now:
                used -= freed_by_op[np.uint32(s.line[finish] & MASK)]
                finish += ONE
            while free < last_free and x.x_finish[freeing[free]] <= now:
                used -= p.home_size[grain, x.x_tensor[freeing[free]]]
                free += ONE
            if now != previous:
                previous, before = now, used
            if op_time == now:
                used += p.start_size[grain, x.start_order[start]]
                start += ONE
            else:
                used += p.tensor_size[grain, x.x_tensor[copies[copy]]]
                copy += ONE
            if used > most:
                most = used
                if s.over_time[device] == -1 and used > capacity:
                    s.over_time[device], s.over_base[device] = now, before
        peak[device] = most


@part
def answer(p: Inputs, devices, row, below, x: Timeline, s: Room, step, peak, overflow):
    """Note the step time of a run in row ``row``, and the memory where that is less than ``below``."""
    step[row] = x.count[1]
    if step[row] >= below:
        peak[row] = overflow[row] = UNKNOWN
        return
    sweep_fifo(p, devices, x, s, peak[row])
    overflow[row] = 0
    for device in range(len(p.slots)):
        overflow[row] += max(0, peak[row, device] - p.capacity[device])


@kernel
def run_many_fifo(p: Inputs, placements, first, stop, below, x: Timeline, s: Room, step, peak, overflow, known):
    """What :func:`simdev.sim.kernels.general.run_many` does, under the default rules. ``known``: the run of the first
    row is in ``x`` and ``s`` already, so that only its memory is worked out."""
    for row in range(first, stop):
        if not (known and row == first):
            if not check_devices(p, placements[row]):
                return row
            run_fifo(p, placements[row], x, s)
        answer(p, placements[row], row, below, x, s, step, peak, overflow)
    return -1
