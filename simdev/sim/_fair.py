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
from simdev.sim._fifo import MASK, NEVER, SHIFT, Room, new_room, sweep_fifo
from simdev.sim._flows import NANO, REBASE
from simdev.sim._heap import inlined, part, pop, pop_key, push, push_key
from simdev.sim._kernel import UNKNOWN, Timeline, check_devices
from simdev.sim.arrays import Inputs

LATE = NEVER >> SHIFT  # no event
NEAR = 32  # how far a ready op is moved up the sorted queue before it goes to the heap instead

# Columns of ``pairs``: where the heap of the pair is, its flows, the work served to each of them up to an instant,
# their rate, the first instant at which one ends, its row in ``latencies``, whether its flows are others than when the
# rates were last set; and, as lists, the pairs with flows, those with other flows, and those without a new rate.
BASE, SIZE, SERVED, SINCE, RATE, END, LATENCY, CHANGED, ACTIVE, CHANGES, UNSET = range(11)
# Of ``channels``: flows; while rates are set, bandwidth and flows left, what each of those would get, and the mark of
# when this was written; and, as a list, the channels in use.
FLOWS, LEFT, OPEN, EACH, MARK, IN_USE = range(6)
# Of ``latencies``, a row for each: ns, and the first and the last transfer that wait for it to pass.
LENGTH, FIRST, LAST = range(3)
# Of ``counts``: pairs with flows, pairs whose flows have changed, the last mark.
N_ACTIVE, N_CHANGES, MARKS = range(3)

OWN = ("pairs", "channels", "latencies", "counts", "work", "flow", "behind", "stamp", "request")
FairRoom = NamedTuple("FairRoom", [(name, np.ndarray) for name in (*Room._fields[:-2], *OWN)])


def new_fair_room(problem: Problem, *sizes: int) -> FairRoom:
    """Working arrays for one thread; ``sizes`` as of :func:`simdev.sim._fifo.new_room`."""
    n_edges, n_devices, topology = problem.graph.n_edges, problem.topology.n_devices, problem.topology
    lengths, rows = np.unique(topology.pair_latency_ns, return_inverse=True)
    pairs = np.zeros((n_devices * n_devices, 11), np.int64)
    pairs[:, LATENCY] = rows.ravel()
    latencies = np.zeros((len(lengths), 3), np.int64)
    latencies[:, LENGTH] = lengths
    own = pairs, np.zeros((len(topology.channels), 6), np.int64), latencies, np.zeros(3, np.int64)
    own += tuple(np.zeros(n_edges, kind) for kind in (np.int64, np.uint32, np.int32))
    return FairRoom(*new_room(*sizes)[:-2], *own, np.zeros(n_devices, np.int64), np.zeros(n_devices, np.int64))


@part
def reset(p: Inputs, devices, x: Timeline, s: FairRoom):
    """Before a run: room for the ops of each device and the flows of each pair."""
    n_devices, pairs = len(p.slots), s.pairs
    s.base[:] = 0
    s.slot_free[:] = 0
    s.stamp[:] = -1
    s.counts[:] = 0
    x.count[:] = 0
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
    queue, heap, line, sends, state = s.queue, s.heap, s.line, s.sends, s.state
    reset(p, devices, x, s)
    first = last = n_heap = 0
    for op in range(len(devices)):
        if state[op] == 0:
            queue[last] = op
            last += 1
    next_send, next_device, next_begin, next_end, next_event = NEVER, 0, LATE, LATE, LATE

    while True:
        ready, from_heap = NEVER, 0
        if first < last:
            ready = queue[first]
        if n_heap > 0 and heap[0] < ready:
            ready, from_heap = heap[0], 1
        if (ready >> SHIFT) < next_event:
            # Its place on its device is final (R1, R2).
            if from_heap == 1:
                n_heap = pop_key(heap, n_heap)
            else:
                first += 1
            op = ready & MASK
            source = devices[op]
            slot = p.slot_ptr[source]
            for other in range(p.slot_ptr[source] + 1, p.slot_ptr[source + 1]):
                if s.slot_free[other] < s.slot_free[slot]:
                    slot = other
            start = max(ready >> SHIFT, s.slot_free[slot])
            now = start + p.op_ns[p.device_row[source], op]
            s.slot_free[slot] = now
            x.op_start[op], x.op_finish[op] = start, now
            x.count[1] = max(x.count[1], now)
            key = (now << SHIFT) | op
            spot = s.started[source]
            x.start_order[spot] = op
            s.started[source] += 1
            while spot > s.base[source] and line[spot - 1] > key:
                line[spot] = line[spot - 1]
                spot -= 1
            line[spot] = key
            away = 0
            for where in range(p.consumer_ptr[p.output_ptr[op]], p.consumer_ptr[p.output_ptr[op + 1]]):
                if devices[p.consumers[where]] != source:
                    away = 1
            if away == 1:
                spot = s.end[source]
                s.end[source] += 1
                while spot > s.head[source] and sends[spot - 1] > key:
                    sends[spot] = sends[spot - 1]
                    spot -= 1
                sends[spot] = key
                if spot == s.head[source]:
                    s.first_send[source] = key
                    if key < next_send:
                        next_send, next_device = key, source
                        next_event = min(next_event, now)
                continue
        elif next_event == LATE:
            break
        elif next_end == next_event:
            now, next_end = next_event, LATE
            x.count[1] = max(x.count[1], now)
            last, n_heap = end_flows(p, devices, x, s, now, first, last, n_heap)
            continue
        elif (next_send >> SHIFT) != next_event:
            # All that happens at this instant is known.
            if next_begin == next_event:
                next_begin = begin_flows(p, devices, x, s, next_event)
            if s.counts[N_CHANGES] > 0:
                share(p, s, next_event)
            next_end = LATE
            for index in range(s.counts[N_ACTIVE]):
                next_end = min(next_end, s.pairs[s.pairs[index, ACTIVE], END])
            next_event = min(next_send >> SHIFT, next_begin, next_end)
            continue
        else:
            # The next sends (R5).
            away, op, now, source = 1, next_send & MASK, next_event, next_device
            s.head[source] += 1
            s.first_send[source] = sends[s.head[source]] if s.head[source] < s.end[source] else NEVER
            next_send = NEVER
            for device in range(len(p.slots)):
                if s.first_send[device] < next_send:
                    next_send, next_device = s.first_send[device], device

        s.arrival[source] = now << SHIFT
        for tensor in range(p.output_ptr[op], p.output_ptr[op + 1]):
            s.sent_until[tensor] = -1
            if away == 1:
                next_begin = send(p, devices, tensor, source, now, x, s, next_begin)
            for where in range(p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]):
                consumer = p.consumers[where]
                there = s.arrival[devices[consumer]]
                if there >= 0:
                    was = state[consumer]
                    was = max(was, there | (was & MASK)) - 1
                    state[consumer] = was
                    if (was & MASK) == 0:
                        last, n_heap = enqueue(queue, heap, first, last, n_heap, was | consumer)


@inlined
def enqueue(queue, heap, first, last, n_heap, key):
    """An op is ready: into the sorted queue or the heap. Returns the end of the queue and the size of the heap."""
    nearest = max(first, last - NEAR)
    if nearest > first and queue[nearest - 1] > key:
        return last, push_key(heap, n_heap, key)
    spot = last
    while spot > nearest and queue[spot - 1] > key:
        queue[spot] = queue[spot - 1]
        spot -= 1
    queue[spot] = key
    return last + 1, n_heap


@inlined
def send(p: Inputs, devices, tensor, source, now, x: Timeline, s: FairRoom, next_begin):
    """Send ``tensor``, finished on device ``source`` at ``now``, to all other devices where it is read (R3, R4); note
    the arrivals that are known, else -1. Returns when the next latency has passed."""
    n_requests, latencies = 0, s.latencies
    s.counts[MARKS] += 1
    for where in range(p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]):
        target = devices[p.consumers[where]]
        if target != source and s.stamp[target] != s.counts[MARKS]:
            s.stamp[target] = s.counts[MARKS]
            hole = n_requests
            while hole > 0 and s.request[hole - 1] > target:
                s.request[hole] = s.request[hole - 1]
                hole -= 1
            s.request[hole] = target
            n_requests += 1
    for number in range(n_requests):
        target, transfer = s.request[number], x.count[0]
        row = s.pairs[source * len(p.slots) + target, LATENCY]
        finish = now + latencies[row, LENGTH]
        if p.tensor_bytes[tensor] == 0:
            finish = max(finish, now + 1)
            s.arrival[target] = finish << SHIFT
            x.count[1] = max(x.count[1], finish)
            if finish > s.sent_until[tensor]:
                s.sent_until[tensor], s.sent_last[tensor] = finish, transfer
        else:
            s.arrival[target] = -1
            if latencies[row, FIRST] < 0:
                latencies[row, FIRST] = transfer
                next_begin = min(next_begin, finish)
            else:
                s.behind[latencies[row, LAST]] = transfer
            latencies[row, LAST], s.behind[transfer] = transfer, -1
        x.x_tensor[transfer], x.x_target[transfer] = tensor, target
        x.x_start[transfer], x.x_finish[transfer] = now, finish
        x.count[0] += 1
    return next_begin


@inlined
def begin_flows(p: Inputs, devices, x: Timeline, s: FairRoom, now):
    """Latencies have passed. Returns when the next one will have."""
    pairs, counts, next_begin = s.pairs, s.counts, LATE
    for row in range(len(s.latencies)):
        transfer = s.latencies[row, FIRST]
        while transfer >= 0 and x.x_finish[transfer] == now:
            tensor = x.x_tensor[transfer]
            pair = devices[p.tensor_producer[tensor]] * len(p.slots) + x.x_target[transfer]
            if pairs[pair, SIZE] == 0:
                pairs[counts[N_ACTIVE], ACTIVE] = pair
                counts[N_ACTIVE] += 1
                pairs[pair, SERVED] = pairs[pair, RATE] = 0
                pairs[pair, SINCE] = now
            change(s, pair, now)
            ends = pairs[pair, SERVED] + p.tensor_bytes[tensor] * NANO
            pairs[pair, SIZE] = push(s.work, s.flow, pairs[pair, BASE], pairs[pair, SIZE], ends, transfer)
            for hop in range(p.route_ptr[pair], p.route_ptr[pair + 1]):
                s.channels[p.route[hop], FLOWS] += 1
            transfer = s.behind[transfer]
        s.latencies[row, FIRST] = transfer
        if transfer >= 0:
            next_begin = min(next_begin, x.x_finish[transfer])
    return next_begin


@inlined
def end_flows(p: Inputs, devices, x: Timeline, s: FairRoom, now, first, last, n_heap):
    """Take out the flows that have no work left. Returns what :func:`enqueue` does."""
    pairs, counts, state, index = s.pairs, s.counts, s.state, 0
    while index < counts[N_ACTIVE]:
        pair = pairs[index, ACTIVE]
        index += 1
        if pairs[pair, END] > now:
            continue
        change(s, pair, now)
        before = pairs[pair, SIZE]
        while pairs[pair, SIZE] > 0 and s.work[pairs[pair, BASE]] <= pairs[pair, SERVED]:
            transfer = s.flow[pairs[pair, BASE]]
            pairs[pair, SIZE] = pop(s.work, s.flow, pairs[pair, BASE], pairs[pair, SIZE])
            x.x_finish[transfer] = now
            tensor, target = x.x_tensor[transfer], x.x_target[transfer]
            if now > s.sent_until[tensor]:
                s.sent_until[tensor], s.sent_last[tensor] = now, transfer
            for edge in range(p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]):
                op = p.consumers[edge]
                if devices[op] == target:
                    was = state[op]
                    was = max(was, (now << SHIFT) | (was & MASK)) - 1
                    state[op] = was
                    if (was & MASK) == 0:
                        last, n_heap = enqueue(s.queue, s.heap, first, last, n_heap, was | op)
        for hop in range(p.route_ptr[pair], p.route_ptr[pair + 1]):
            s.channels[p.route[hop], FLOWS] += pairs[pair, SIZE] - before
        if pairs[pair, SIZE] == 0:
            counts[N_ACTIVE] -= 1
            index -= 1
            pairs[index, ACTIVE] = pairs[counts[N_ACTIVE], ACTIVE]
    return last, n_heap


@inlined
def change(s: FairRoom, pair, now):
    """The flows of a pair become others."""
    advance(s, pair, now)
    if s.pairs[pair, CHANGED] == 0:
        s.pairs[pair, CHANGED] = 1
        s.pairs[s.counts[N_CHANGES], CHANGES] = pair
        s.counts[N_CHANGES] += 1


@inlined
def advance(s: FairRoom, pair, now):
    """Bring the count of a pair up to date."""
    pairs = s.pairs
    if pairs[pair, SINCE] != now:
        served = pairs[pair, SERVED] + pairs[pair, RATE] * (now - pairs[pair, SINCE])
        if served > REBASE:
            for flow in range(pairs[pair, BASE], pairs[pair, BASE] + pairs[pair, SIZE]):
                s.work[flow] -= served
            served = 0
        pairs[pair, SERVED], pairs[pair, SINCE] = served, now


@inlined
def set_rate(s: FairRoom, pair, rate, now):
    """The flows of a pair get ``rate`` bytes/s each from now on."""
    pairs = s.pairs
    if pairs[pair, RATE] != rate or pairs[pair, CHANGED] == 1:
        advance(s, pair, now)
        pairs[pair, RATE] = rate
        pairs[pair, END] = now + (s.work[pairs[pair, BASE]] - pairs[pair, SERVED] + rate - 1) // rate


@inlined
def share(p: Inputs, s: FairRoom, now):
    """Set the rates, as flows have begun or ended, max-min fairly in whole bytes/s."""
    pairs, counts, alone = s.pairs, s.counts, True
    for index in range(counts[N_CHANGES]):
        pair = pairs[index, CHANGES]
        for hop in range(p.route_ptr[pair], p.route_ptr[pair + 1]):
            alone = alone and s.channels[p.route[hop], FLOWS] == pairs[pair, SIZE]
    if alone:  # no other pair's rate changes with theirs
        for index in range(counts[N_CHANGES]):
            pair = pairs[index, CHANGES]
            if pairs[pair, SIZE] > 0:
                rate = NEVER
                for hop in range(p.route_ptr[pair], p.route_ptr[pair + 1]):
                    rate = min(rate, p.channel_rate[p.route[hop]])
                set_rate(s, pair, max(1, rate // pairs[pair, SIZE]), now)
    else:
        fill(p, s, now)
    for index in range(counts[N_CHANGES]):
        pairs[pairs[index, CHANGES], CHANGED] = 0
    counts[N_CHANGES] = 0


@inlined
def fill(p: Inputs, s: FairRoom, now):
    """Progressive filling: the narrowest channel gives all its flows an equal whole share, again and again."""
    pairs, channels, counts = s.pairs, s.channels, s.counts
    n_channels, n_open = 0, counts[N_ACTIVE]
    counts[MARKS] += 1
    for index in range(n_open):
        pair = pairs[index, ACTIVE]
        pairs[index, UNSET] = pair
        for hop in range(p.route_ptr[pair], p.route_ptr[pair + 1]):
            channel = p.route[hop]
            if channels[channel, MARK] != counts[MARKS]:
                channels[channel, MARK] = counts[MARKS]
                channels[n_channels, IN_USE] = channel
                n_channels += 1
                channels[channel, LEFT], channels[channel, OPEN] = p.channel_rate[channel], channels[channel, FLOWS]
                channels[channel, EACH] = p.channel_rate[channel] // channels[channel, FLOWS]
    while n_open > 0:
        narrowest, each = -1, NEVER
        for index in range(n_channels):
            channel = channels[index, IN_USE]
            if channels[channel, EACH] < each or (channels[channel, EACH] == each and channel < narrowest):
                narrowest, each = channel, channels[channel, EACH]
        rate, index = max(each, 1), 0
        while index < n_open:
            pair = pairs[index, UNSET]
            crosses = False
            for hop in range(p.route_ptr[pair], p.route_ptr[pair + 1]):
                crosses = crosses or p.route[hop] == narrowest
            if not crosses:
                index += 1
                continue
            n_open -= 1
            pairs[index, UNSET] = pairs[n_open, UNSET]
            set_rate(s, pair, rate, now)
            for hop in range(p.route_ptr[pair], p.route_ptr[pair + 1]):
                channel = p.route[hop]
                still = channels[channel, OPEN] - pairs[pair, SIZE]
                left = max(0, channels[channel, LEFT] - rate * pairs[pair, SIZE])
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
