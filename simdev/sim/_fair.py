"""The kernel of ``fair`` contention under the usual rules (dataflow, ``fifo`` policy, no gaps).

Ops are queued and lined up as in :mod:`simdev.sim._fifo`; an op's place is final when it was ready before the next
event: a send, the beginning of a flow, a latency after its send, or its end. Flows between the same two devices always
have the same rate, so each such pair keeps one count of the work served to any of its flows and a heap of its flows by
the count at which they end. The count is brought up to date only when the pair's rate or flows change.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from simdev.problem import Problem
from simdev.sim._fifo import MASK, NEAR, NEVER, NONE, ONE, SHIFT, Room, new_room, sweep_fifo
from simdev.sim._flows import NANO, REBASE
from simdev.sim._heap import part, pop, pop_key, push, push_key
from simdev.sim._kernel import UNKNOWN, Timeline, check_devices
from simdev.sim.arrays import Inputs

LATE = NEVER >> SHIFT  # no event

# Columns of ``pairs``: where the heap of the pair is, its flows, the work served to each of them up to an instant,
# their rate, the first instant at which one ends, its row in ``latencies``, whether its flows are others than when the
# rates were last set; and, as lists, the pairs with flows, those with other flows, and those without a new rate.
BASE, SIZE, SERVED, SINCE, RATE, END, LATENCY, CHANGED, ACTIVE, CHANGES, UNSET = range(11)
# Of ``channels``: flows; while rates are set, bandwidth and flows left, what each of those would get, and the mark of
# when this was written; and, as a list, the channels in use.
FLOWS, LEFT, OPEN, EACH, MARK, IN_USE = range(6)
# Of ``latencies``, a row for each: ns, and the first and the last transfer that wait for it to pass.
LENGTH, FIRST, LAST = range(3)

OWN = ("pairs", "channels", "latencies", "work", "flow", "behind", "stamp", "request")
FairRoom = NamedTuple("FairRoom", [(name, np.ndarray) for name in (*Room._fields[:-2], *OWN)])


def new_fair_room(problem: Problem, *sizes: int) -> FairRoom:
    """Working arrays for one thread; ``sizes`` as of :func:`simdev.sim._fifo.new_room`."""
    n_edges, n_devices, topology = problem.graph.n_edges, problem.topology.n_devices, problem.topology
    lengths, rows = np.unique(topology.pair_latency_ns, return_inverse=True)
    pairs = np.zeros((n_devices * n_devices, 11), np.int64)
    pairs[:, LATENCY] = rows.ravel()
    latencies = np.zeros((len(lengths), 3), np.int64)
    latencies[:, LENGTH] = lengths
    own = pairs, np.zeros((len(topology.channels), 6), np.int64), latencies
    own += tuple(np.zeros(n_edges, kind) for kind in (np.int64, np.uint32, np.int32))
    return FairRoom(*new_room(*sizes)[:-2], *own, np.zeros(n_devices, np.int64), np.zeros(n_devices, np.int64))


@part
def reset(p: Inputs, devices, s: FairRoom):
    """Before a run: room for the ops of each device and the flows of each pair."""
    n_devices, pairs = len(p.slots), s.pairs
    s.base[:] = 0
    s.slot_free[:] = 0
    s.stamp[:] = -1
    s.first_send[:] = NEVER
    for op in range(len(devices)):
        s.base[devices[op] + 1] += 1
        s.state[op] = p.input_ptr[op + 1] - p.input_ptr[op]
    for device in range(n_devices):
        s.base[device + 1] += s.base[device]
        s.started[device] = s.head[device] = s.end[device] = s.base[device]
    for row in range(len(s.latencies)):
        s.latencies[row, FIRST] = -1
    for channel in range(len(s.channels)):
        s.channels[channel, FLOWS] = s.channels[channel, MARK] = 0
    for pair in range(len(pairs)):
        pairs[pair, BASE] = pairs[pair, SIZE] = pairs[pair, CHANGED] = 0
    for tensor in range(len(p.tensor_producer)):
        source = devices[p.tensor_producer[tensor]]
        for edge in range(p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]):
            target = devices[p.consumers[edge]]
            if target != source and s.stamp[target] != tensor:
                s.stamp[target] = tensor
                pairs[source * n_devices + target, BASE] += 1
    above = 0
    for pair in range(len(pairs)):
        above += pairs[pair, BASE]
        pairs[pair, BASE] = above - pairs[pair, BASE]
    s.stamp[:] = -1


@part
def run_fair(p: Inputs, devices, x: Timeline, s: FairRoom):
    """Simulate one placement (uint32 ``(n,)``, checked); every op runs."""
    n_devices = len(p.slots)
    queue, heap, line, sends, state, arrival = s.queue, s.heap, s.line, s.sends, s.state, s.arrival
    base, started, head, end, first_send, slot_free = s.base, s.started, s.head, s.end, s.first_send, s.slot_free
    pairs, channels, latencies, work, flow = s.pairs, s.channels, s.latencies, s.work, s.flow
    stamp, request, behind, route_ptr, route = s.stamp, s.request, s.behind, p.route_ptr, p.route
    reset(p, devices, s)
    first = last = n_transfers = n_fresh = NONE
    n_heap = mark = n_active = n_changes = 0
    for op in range(len(devices)):
        if state[op] == 0:
            queue[last] = op
            last += ONE
    step = np.int64(0)
    next_send, next_device = np.int64(NEVER), devices[0]
    next_begin, next_end, next_event = np.int64(LATE), np.int64(LATE), np.int64(LATE)

    while True:
        ready = queue[first] if first < last else np.int64(NEVER)
        from_heap = False
        if n_heap > 0 and heap[0] < ready:
            ready = heap[0]
            from_heap = True
        away = True
        if (ready >> SHIFT) < next_event:
            # Its place on its device is final (R1, R2).
            if from_heap:
                n_heap = pop_key(heap, n_heap)
            else:
                first += ONE
            op = np.uint32(ready & MASK)
            source = devices[op]
            slot = p.slot_ptr[source]
            for other in range(p.slot_ptr[source] + 1, p.slot_ptr[source + 1]):
                if slot_free[other] < slot_free[slot]:
                    slot = other
            start = max(ready >> SHIFT, slot_free[slot])
            now = start + p.op_ns[p.device_row[source], op]
            slot_free[slot] = now
            x.op_start[op], x.op_finish[op] = start, now
            step = max(step, now)
            key = (now << SHIFT) | op
            spot, front = np.uint64(started[source]), np.uint64(base[source])
            x.start_order[spot] = op
            started[source] += 1
            while spot > front and line[spot - ONE] > key:
                line[spot] = line[spot - ONE]
                spot -= ONE
            line[spot] = key
            different = np.uint32(0)
            for where in range(p.consumer_ptr[p.output_ptr[op]], p.consumer_ptr[p.output_ptr[op + 1]]):
                different |= devices[p.consumers[where]] ^ source
            away = different != 0
            if away:
                spot, front = np.uint64(end[source]), np.uint64(head[source])
                end[source] += 1
                while spot > front and sends[spot - ONE] > key:
                    sends[spot] = sends[spot - ONE]
                    spot -= ONE
                sends[spot] = key
                if spot == front:
                    first_send[source] = key
                    if key < next_send:
                        next_send, next_device = key, source
                        next_event = min(next_event, now)
                continue
        elif next_event == LATE:
            break
        elif (next_send >> SHIFT) == next_event:
            # The next sends (R5).
            op, now, source = np.uint32(next_send & MASK), next_event, next_device
            head[source] += 1
            first_send[source] = sends[head[source]] if head[source] < end[source] else NEVER
            next_send = np.int64(NEVER)
            for device in range(n_devices):
                if first_send[device] < next_send:
                    next_send, next_device = first_send[device], np.uint32(device)
        else:
            # The rest of what happens at this instant: flows end, others begin.
            now = next_event
            index = 0
            while next_end == now and index < n_active:
                pair = pairs[index, ACTIVE]
                if pairs[pair, END] > now:
                    index += 1
                    continue
                step = max(step, now)
                bottom, size = pairs[pair, BASE], pairs[pair, SIZE]
                served = pairs[pair, SERVED] + pairs[pair, RATE] * (now - pairs[pair, SINCE])
                while size > 0 and work[bottom] <= served:
                    transfer = flow[bottom]
                    size = pop(work, flow, bottom, size)
                    x.x_finish[transfer] = now
                    tensor, target = x.x_tensor[transfer], x.x_target[transfer]
                    if now > s.sent_until[tensor]:
                        s.sent_until[tensor], s.sent_last[tensor] = now, transfer
                    for where in range(p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]):
                        consumer = p.consumers[where]
                        if devices[consumer] == target:
                            was = state[consumer]
                            was = max(was, (now << SHIFT) | (was & MASK)) - 1
                            state[consumer] = was
                            if (was & MASK) == 0:
                                x.finish_order[n_fresh] = consumer
                                n_fresh += ONE
                for hop in range(route_ptr[pair], route_ptr[pair + 1]):
                    channels[route[hop], FLOWS] += size - pairs[pair, SIZE]
                if served > REBASE:
                    for other in range(bottom, bottom + size):
                        work[other] -= served
                    served = np.int64(0)
                pairs[pair, SIZE], pairs[pair, SERVED], pairs[pair, SINCE] = size, served, now
                pairs[pair, END], pairs[pair, CHANGED] = NEVER, 1
                pairs[n_changes, CHANGES] = pair
                n_changes += 1
                if size == 0:
                    n_active -= 1
                    pairs[index, ACTIVE] = pairs[n_active, ACTIVE]

            if next_begin == now:
                next_begin = np.int64(LATE)
                for row in range(len(latencies)):
                    transfer = latencies[row, FIRST]
                    while transfer >= 0 and x.x_finish[transfer] == now:
                        tensor = x.x_tensor[transfer]
                        pair = np.int64(devices[p.tensor_producer[tensor]] * n_devices + x.x_target[transfer])
                        bottom, size = pairs[pair, BASE], pairs[pair, SIZE]
                        if pairs[pair, CHANGED] == 0:
                            pairs[pair, CHANGED] = 1
                            pairs[n_changes, CHANGES] = pair
                            n_changes += 1
                        if size == 0:
                            pairs[n_active, ACTIVE] = pair
                            n_active += 1
                            pairs[pair, SERVED] = pairs[pair, RATE] = 0
                        elif pairs[pair, SINCE] != now:
                            served = pairs[pair, SERVED] + pairs[pair, RATE] * (now - pairs[pair, SINCE])
                            if served > REBASE:
                                for other in range(bottom, bottom + size):
                                    work[other] -= served
                                served = np.int64(0)
                            pairs[pair, SERVED] = served
                        pairs[pair, SINCE] = now
                        ends = pairs[pair, SERVED] + p.tensor_bytes[tensor] * NANO
                        pairs[pair, SIZE] = push(work, flow, bottom, size, ends, np.uint32(transfer))
                        for hop in range(route_ptr[pair], route_ptr[pair + 1]):
                            channels[route[hop], FLOWS] += 1
                        transfer = np.int64(behind[transfer])
                    latencies[row, FIRST] = transfer
                    if transfer >= 0:
                        next_begin = min(next_begin, x.x_finish[transfer])

            if n_changes > 0:
                mark += 1
                share(route_ptr, route, p.channel_rate, work, pairs, channels, n_active, n_changes, mark, now)
                n_changes = 0
                next_end = np.int64(LATE)
                for index in range(n_active):
                    next_end = min(next_end, pairs[pairs[index, ACTIVE], END])
            next_event = min(next_send >> SHIFT, next_begin, next_end)
            for index in range(n_fresh):
                op = x.finish_order[index]
                key = state[op] | op
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
            n_fresh = NONE
            continue

        arrival[source] = now << SHIFT
        for tensor in range(p.output_ptr[op], p.output_ptr[op + 1]):
            edge, stop = p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]
            s.sent_until[tensor] = -1
            if away:
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
                for number in range(n_requests):  # R3, R4
                    target = np.uint32(request[number])
                    row = pairs[np.uint32(source * n_devices + target), LATENCY]
                    finish = now + latencies[row, LENGTH]
                    if p.tensor_bytes[tensor] == 0:
                        finish = max(finish, now + 1)
                        arrival[target] = finish << SHIFT
                        step = max(step, finish)
                        if finish > s.sent_until[tensor]:
                            s.sent_until[tensor], s.sent_last[tensor] = finish, n_transfers
                    else:
                        arrival[target] = -1
                        if latencies[row, FIRST] < 0:
                            latencies[row, FIRST] = n_transfers
                            next_begin = min(next_begin, finish)
                        else:
                            behind[latencies[row, LAST]] = n_transfers
                        latencies[row, LAST], behind[n_transfers] = n_transfers, -1
                    x.x_tensor[n_transfers], x.x_target[n_transfers] = tensor, target
                    x.x_start[n_transfers], x.x_finish[n_transfers] = now, finish
                    n_transfers += ONE
            for where in range(edge, stop):
                consumer = p.consumers[where]
                there = arrival[devices[consumer]]
                if there < 0:
                    continue
                was = state[consumer]
                was = max(was, there | (was & MASK)) - 1
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
def share(route_ptr, route, channel_rate, work, pairs, channels, n_active, n_changes, mark, now):
    """Set the rates, as flows have begun or ended, max-min fairly in whole bytes/s: the narrowest channel gives all its
    flows an equal share, again and again."""
    alone = True
    for index in range(n_changes):
        pair = pairs[index, CHANGES]
        size, rate = pairs[pair, SIZE], np.int64(NEVER)
        for hop in range(route_ptr[pair], route_ptr[pair + 1]):
            alone = alone and channels[route[hop], FLOWS] == size
            rate = min(rate, channel_rate[route[hop]])
        pairs[pair, RATE] = pairs[pair, CHANGED] = 0
        if size > 0:
            # Right if no other pair shares its channels.
            rate = max(1, rate // size)
            pairs[pair, RATE] = rate
            pairs[pair, END] = now + (work[pairs[pair, BASE]] - pairs[pair, SERVED] + rate - 1) // rate
    if alone:
        return
    n_channels, n_open = 0, n_active
    for index in range(n_active):
        pair = pairs[index, ACTIVE]
        pairs[index, UNSET] = pair
        for hop in range(route_ptr[pair], route_ptr[pair + 1]):
            channel = route[hop]
            if channels[channel, MARK] != mark:
                channels[channel, MARK] = mark
                channels[n_channels, IN_USE] = channel
                n_channels += 1
                channels[channel, LEFT], channels[channel, OPEN] = channel_rate[channel], channels[channel, FLOWS]
                channels[channel, EACH] = channel_rate[channel] // channels[channel, FLOWS]
    while n_open > 0:
        narrowest, each = np.int64(-1), np.int64(NEVER)
        for index in range(n_channels):
            channel = channels[index, IN_USE]
            if channels[channel, EACH] < each or (channels[channel, EACH] == each and channel < narrowest):
                narrowest, each = channel, channels[channel, EACH]
        rate, index = max(each, 1), 0
        while index < n_open:
            pair = pairs[index, UNSET]
            crosses = False
            for hop in range(route_ptr[pair], route_ptr[pair + 1]):
                crosses = crosses or route[hop] == narrowest
            if not crosses:
                index += 1
                continue
            n_open -= 1
            pairs[index, UNSET] = pairs[n_open, UNSET]
            size = pairs[pair, SIZE]
            if pairs[pair, RATE] != rate:
                bottom = pairs[pair, BASE]
                served = pairs[pair, SERVED] + pairs[pair, RATE] * (now - pairs[pair, SINCE])
                if served > REBASE:
                    for other in range(bottom, bottom + size):
                        work[other] -= served
                    served = np.int64(0)
                pairs[pair, SERVED], pairs[pair, SINCE], pairs[pair, RATE] = served, now, rate
                pairs[pair, END] = now + (work[bottom] - served + rate - 1) // rate
            for hop in range(route_ptr[pair], route_ptr[pair + 1]):
                channel = route[hop]
                still = channels[channel, OPEN] - size
                left = max(0, channels[channel, LEFT] - rate * size)
                channels[channel, OPEN], channels[channel, LEFT] = still, left
                channels[channel, EACH] = left // still if still > 0 else NEVER


@njit(cache=True, nogil=True)
def run_many_fair(p: Inputs, placements, first, stop, below, x: Timeline, s: FairRoom, step, peak, overflow):
    """What :func:`simdev.sim._kernel.run_many` does, under these rules."""
    for row in range(first, stop):
        if not check_devices(p, placements[row]):
            return row
        run_fair(p, placements[row], x, s)
        step[row] = x.count[1]
        if step[row] >= below:
            peak[row] = overflow[row] = UNKNOWN
            continue
        sweep_fifo(p, placements[row], x, s, peak[row])
        overflow[row] = 0
        for device in range(len(p.slots)):
            overflow[row] += max(0, peak[row, device] - p.capacity[device])
    return -1
