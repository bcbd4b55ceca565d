"""The kernel of ``fair`` contention under the usual rules (dataflow, ``fifo`` policy, no gaps).

Ops are queued and lined up as in :mod:`simdev.sim.kernels.fifo`; an op's place is final when it was ready before the
next event: a send, the beginning of a flow, a latency after its send, or its end. Flows between the same two devices always
have the same rate, so each such pair keeps one count of the work served to any of its flows and a heap of its flows by
the count at which they end. The count is brought up to date only when the pair's rate or flows change.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simdev.problem.problem import Problem
from simdev.sim.inputs import Inputs
from simdev.sim.kernels.fifo import MASK, NEAR, NEVER, NONE, ONE, SHIFT, Room, answer, new_room
from simdev.sim.kernels.flows import NANO, REBASE
from simdev.sim.kernels.general import Timeline, check_devices
from simdev.sim.kernels.heap import kernel, part, pop_key, push_key

LATE = NEVER >> SHIFT  # no event

# Rows of ``pairs``: where the heap of a pair is, its flows, the work served to each of them up to an instant, that
# instant, their rate (0: to be set), the first instant at which one ends, and the latency's place in ``latencies``.
BASE, SIZE, SERVED, SINCE, RATE, END, LATENCY = range(7)
# Of ``channels``: flows; what each gets if they share all the bandwidth (-1: to be worked out); whether in use; while
# rates are set, bandwidth and flows left, and what each of those would get (-1: to be worked out); where the list of
# the hops of pairs with flows begins, and how long it is.
FLOWS, ALL, LISTED, LEFT, OPEN, EACH, BEGIN, LISTING = range(8)
# Of ``hops``, by place in ``route``: the lists of hops of all channels, where in them a hop is, and its pair.
HOP, SPOT, PAIR = range(3)
# Of ``lists``: pairs with flows, pairs whose flows are others than when rates were last set, a flag for each of those,
# the mark of when a pair's rate was last set, channels in use.
ACTIVE, CHANGES, CHANGED, MARK, IN_USE = range(5)
# Of ``latencies``: ns, and the first and the last transfer that wait for it to pass.
LENGTH, FIRST, LAST = range(3)

NOT_NEEDED = ("todo", "listed", "ready_ranks", "channel_end", "free", "request", "requested")
SHARED_FIELDS = tuple(name for name in Room._fields if name not in NOT_NEEDED)
OWN = ("pairs", "channels", "lists", "latencies", "work", "flow", "behind", "stamp", "targets", "hops")
FairRoom = NamedTuple("FairRoom", [(name, np.ndarray) for name in SHARED_FIELDS + OWN])


def new_fair_room(problem: Problem, *sizes: int) -> FairRoom:
    """Working arrays for one thread; ``sizes`` as of :func:`simdev.sim.kernels.fifo.new_room`."""
    n_edges, n_devices, n_channels = problem.graph.n_edges, problem.topology.n_devices, len(problem.topology.channels)
    lengths, places = np.unique(problem.topology.pair_latency_ns, return_inverse=True)
    n_pairs = n_devices * n_devices
    pairs, latencies = np.zeros((7, n_pairs), np.int64), np.zeros((3, len(lengths)), np.int64)
    pairs[LATENCY], latencies[LENGTH] = places.ravel(), lengths
    ptr, route = problem.topology.route_csr
    channels, hops = np.zeros((8, n_channels), np.int64), np.zeros((3, len(route)), np.uint32)
    channels[BEGIN, 1:] = np.cumsum(np.bincount(route, minlength=n_channels))[:-1]
    hops[PAIR] = np.repeat(np.arange(n_pairs), np.diff(ptr))
    shared = new_room(*sizes)._asdict()
    return FairRoom(
        *(shared[name] for name in SHARED_FIELDS), pairs, channels,
        np.zeros((5, max(n_pairs, n_channels)), np.uint32), latencies, np.zeros(n_edges, np.int64),
        np.zeros(n_edges, np.uint32), np.zeros(n_edges, np.int64), np.zeros(n_devices, np.int64),
        np.zeros(n_devices, np.uint32), hops,
    )  # fmt: skip


@part
def reset(p: Inputs, devices, s: FairRoom):
    """Before a run: room for the ops of each device and the flows of each pair."""
    n_devices, n_pairs = len(p.slots), s.pairs.shape[1]
    bottom, size = s.pairs[BASE], s.pairs[SIZE]
    for device in range(n_devices):
        s.base[device + 1] = 0
        s.stamp[device] = -1
        s.first_send[device] = NEVER
    for slot in range(len(s.slot_free)):
        s.slot_free[slot] = 0
    for op in range(len(devices)):
        s.base[devices[op] + 1] += 1
        s.state[op] = p.input_ptr[op + 1] - p.input_ptr[op]
    for device in range(n_devices):
        s.base[device + 1] += s.base[device]
        s.started[device] = s.head[device] = s.end[device] = s.base[device]
    for place in range(s.latencies.shape[1]):
        s.latencies[FIRST, place] = -1
    for channel in range(s.channels.shape[1]):
        s.channels[FLOWS, channel] = s.channels[LISTED, channel] = s.channels[LISTING, channel] = 0
    for pair in range(n_pairs):
        bottom[pair] = size[pair] = s.lists[CHANGED, pair] = s.lists[MARK, pair] = 0
    for tensor in range(len(p.tensor_producer)):
        source = devices[p.tensor_producer[tensor]]
        for edge in range(p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]):
            target = devices[p.consumers[edge]]
            if target != source and s.stamp[target] != tensor:
                s.stamp[target] = tensor
                bottom[np.uint32(source * n_devices + target)] += 1
    above = 0
    for pair in range(n_pairs):
        above += bottom[pair]
        bottom[pair] = above - bottom[pair]
    for device in range(n_devices):
        s.stamp[device] = -1


@part
def run_fair(p: Inputs, devices, x: Timeline, s: FairRoom):
    """Simulate one placement (uint32 ``(n,)``, checked); every op runs."""
    n_devices, consumer_ptr, consumers = len(p.slots), p.consumer_ptr, p.consumers
    queue, heap, line, sends, state, arrival = s.queue, s.heap, s.line, s.sends, s.state, s.arrival
    base, started, head, end, first_send, slot_free = s.base, s.started, s.head, s.end, s.first_send, s.slot_free
    stamp, targets, behind, work, flow = s.stamp, s.targets, s.behind, s.work, s.flow
    bottoms, sizes, served, since = s.pairs[BASE], s.pairs[SIZE], s.pairs[SERVED], s.pairs[SINCE]
    rates, ends, places = s.pairs[RATE], s.pairs[END], s.pairs[LATENCY]
    flows, share, listed = s.channels[FLOWS], s.channels[ALL], s.channels[LISTED]
    left, still_open, each = s.channels[LEFT], s.channels[OPEN], s.channels[EACH]
    begin, listing, hop_at, spot_of, pair_of = (
        s.channels[BEGIN],
        s.channels[LISTING],
        s.hops[HOP],
        s.hops[SPOT],
        s.hops[PAIR],
    )
    active, changes, changed, marked, in_use = (
        s.lists[ACTIVE], s.lists[CHANGES], s.lists[CHANGED], s.lists[MARK], s.lists[IN_USE]
    )  # fmt: skip
    length, waiting, last_waiting = s.latencies[LENGTH], s.latencies[FIRST], s.latencies[LAST]
    route_ptr, route, fresh, x_finish = p.route_ptr, p.route, x.finish_order, x.x_finish
    reset(p, devices, s)
    first = last = n_transfers = n_fresh = n_active = n_changes = n_channels = NONE
    n_heap = mark = np.int64(0)
    for op in range(len(devices)):
        if state[op] == 0:
            queue[last] = op
            last += ONE
    step = np.int64(0)
    next_send = np.int64(NEVER)
    next_begin, next_end, next_event = np.int64(LATE), np.int64(LATE), np.int64(LATE)

    while True:
        ready = queue[first] if first < last else np.int64(NEVER)
        from_heap = False
        if n_heap > 0 and heap[0] < ready:
            ready = heap[0]
            from_heap = True
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
            for where in range(consumer_ptr[p.output_ptr[op]], consumer_ptr[p.output_ptr[op + 1]]):
                different |= devices[consumers[where]] ^ source
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
                    next_send, next_event = min(next_send, key), min(next_event, now)
                continue
            first_tensor, last_tensor = p.output_ptr[op], p.output_ptr[op + 1]
        elif next_event == LATE:
            break
        elif (next_send >> SHIFT) == next_event:
            # The next sends (R5).
            op, now, away = np.uint32(next_send & MASK), next_event, True
            source = devices[op]
            head[source] += 1
            first_send[source] = sends[head[source]] if head[source] < end[source] else NEVER
            next_send = np.int64(NEVER)
            for device in range(n_devices):
                next_send = min(next_send, first_send[device])
            first_tensor, last_tensor = p.output_ptr[op], p.output_ptr[op + 1]
        else:
            # All else that happens at this instant: flows that end,
            now = next_event
            index = NONE
            while next_end == now and index < n_active:
                pair = active[index]
                index += ONE
                if ends[pair] > now:
                    continue
                step = max(step, now)
                served[pair] += rates[pair] * (now - since[pair])
                since[pair] = now
                bottom, size = np.uint64(bottoms[pair]), np.uint64(sizes[pair])
                while size > NONE and work[bottom] <= served[pair]:
                    transfer = flow[bottom]
                    size -= ONE
                    moved, hole, child = work[bottom + size], NONE, ONE
                    while child < size:
                        if child + ONE < size and work[bottom + child + ONE] < work[bottom + child]:
                            child += ONE
                        if moved <= work[bottom + child]:
                            break
                        work[bottom + hole], flow[bottom + hole] = work[bottom + child], flow[bottom + child]
                        hole, child = child, child + child + ONE
                    work[bottom + hole], flow[bottom + hole] = moved, flow[bottom + size]
                    x_finish[transfer] = now
                    tensor, target = x.x_tensor[transfer], x.x_target[transfer]
                    if now > s.sent_until[tensor]:
                        s.sent_until[tensor], s.sent_last[tensor] = now, transfer
                    for where in range(consumer_ptr[tensor], consumer_ptr[tensor + ONE]):
                        consumer = consumers[where]
                        if devices[consumer] == target:
                            was = state[consumer]
                            was = max(was, (now << SHIFT) | (was & MASK)) - 1
                            state[consumer] = was
                            if (was & MASK) == 0:
                                fresh[n_fresh] = consumer
                                n_fresh += ONE
                gone = sizes[pair] - np.int64(size)
                for hop in range(route_ptr[pair], route_ptr[pair + ONE]):
                    channel = route[hop]
                    flows[channel] -= gone
                    share[channel] = -1
                    if size == NONE:
                        listing[channel] -= 1
                        other = hop_at[np.uint64(begin[channel] + listing[channel])]
                        hop_at[spot_of[hop]], spot_of[other] = other, spot_of[hop]
                sizes[pair] = size
                changes[n_changes], changed[pair] = pair, 1
                n_changes += ONE
                if size == NONE:
                    n_active -= ONE
                    index -= ONE
                    active[index] = active[n_active]
            # flows that begin,
            if next_begin == now:
                next_begin = np.int64(LATE)
                for place in range(len(waiting)):
                    while waiting[place] >= 0 and x_finish[np.uint32(waiting[place])] == now:
                        transfer = np.uint32(waiting[place])
                        tensor = x.x_tensor[transfer]
                        pair = np.uint32(devices[p.tensor_producer[tensor]] * n_devices + x.x_target[transfer])
                        bottom, hole = np.uint64(bottoms[pair]), np.uint64(sizes[pair])
                        if hole == NONE:
                            active[n_active] = pair
                            n_active += ONE
                            served[pair] = rates[pair] = 0
                        served[pair] += rates[pair] * (now - since[pair])
                        since[pair] = now
                        if served[pair] > REBASE:
                            for other in range(bottom, bottom + hole):
                                work[other] -= served[pair]
                            served[pair] = 0
                        if changed[pair] == 0:
                            changes[n_changes], changed[pair] = pair, 1
                            n_changes += ONE
                        enough = served[pair] + p.tensor_bytes[tensor] * NANO
                        while hole > NONE:
                            parent = (hole - ONE) >> ONE
                            if work[bottom + parent] <= enough:
                                break
                            work[bottom + hole], flow[bottom + hole] = work[bottom + parent], flow[bottom + parent]
                            hole = parent
                        work[bottom + hole], flow[bottom + hole] = enough, transfer
                        sizes[pair] += 1
                        for hop in range(route_ptr[pair], route_ptr[pair + ONE]):
                            channel = route[hop]
                            flows[channel] += 1
                            share[channel] = -1
                            if sizes[pair] == 1:
                                spot = np.uint64(begin[channel] + listing[channel])
                                hop_at[spot], spot_of[hop] = hop, spot
                                listing[channel] += 1
                            if listed[channel] == 0:
                                listed[channel], in_use[n_channels] = 1, channel
                                n_channels += ONE
                        waiting[place] = behind[transfer]
                    if waiting[place] >= 0:
                        next_begin = min(next_begin, x_finish[np.uint32(waiting[place])])
            # and what they change: rates are max-min fair in whole bytes/s.
            if n_changes > NONE:
                alone = True
                for number in range(n_changes):
                    pair = changes[number]
                    changed[pair] = rates[pair] = 0
                    for hop in range(route_ptr[pair], route_ptr[pair + ONE]):
                        alone = alone and flows[route[hop]] == sizes[pair]
                n_open = np.int64(0)
                if alone:  # no other rate changes with theirs
                    for number in range(n_changes):
                        pair = changes[number]
                        if sizes[pair] > 0:
                            rate = np.int64(NEVER)
                            for hop in range(route_ptr[pair], route_ptr[pair + ONE]):
                                rate = min(rate, p.channel_rate[route[hop]])
                            rate = max(1, np.int64(np.uint64(rate) // np.uint64(sizes[pair])))
                            rates[pair] = rate
                            lacking = np.uint64(work[np.uint64(bottoms[pair])] - served[pair] + rate - 1)
                            ends[pair] = now + np.int64(lacking // np.uint64(rate))
                else:
                    mark += 1
                    for number in range(n_active):
                        n_open += sizes[active[number]]
                    number = NONE
                    while number < n_channels:
                        channel = in_use[number]
                        if flows[channel] == 0:
                            listed[channel] = 0
                            n_channels -= ONE
                            in_use[number] = in_use[n_channels]
                            continue
                        if share[channel] < 0:
                            share[channel] = np.uint64(p.channel_rate[channel]) // np.uint64(flows[channel])
                        left[channel], still_open[channel] = p.channel_rate[channel], flows[channel]
                        each[channel] = share[channel]
                        number += ONE
                n_changes = NONE
                while n_open > 0:
                    # The narrowest channel gives all its flows an equal share.
                    narrowest, least = np.uint32(0), np.int64(NEVER)
                    for number in range(n_channels):
                        channel = in_use[number]
                        if each[channel] < 0:
                            each[channel] = np.uint64(left[channel]) // np.uint64(still_open[channel])
                        if each[channel] < least or (each[channel] == least and channel < narrowest):
                            narrowest, least = channel, each[channel]
                    rate = max(least, 1)
                    n_open -= still_open[narrowest]
                    spot = np.uint64(begin[narrowest])
                    for where in range(spot, spot + np.uint64(listing[narrowest])):
                        pair = pair_of[hop_at[where]]
                        if marked[pair] == mark:
                            continue
                        marked[pair] = mark
                        if rates[pair] != rate:
                            served[pair] += rates[pair] * (now - since[pair])
                            since[pair], rates[pair] = now, rate
                            lacking = np.uint64(work[np.uint64(bottoms[pair])] - served[pair] + rate - 1)
                            ends[pair] = now + np.int64(lacking // np.uint64(rate))
                        if n_open == 0:
                            continue  # no other flows are left to share with
                        taken = rate * sizes[pair]
                        for hop in range(route_ptr[pair], route_ptr[pair + ONE]):
                            channel = route[hop]
                            still_open[channel] -= sizes[pair]
                            left[channel] = max(0, left[channel] - taken)
                            each[channel] = -1 if still_open[channel] > 0 else NEVER
                next_end = np.int64(LATE)
                for number in range(n_active):
                    next_end = min(next_end, ends[active[number]])
            next_event = min(next_send >> SHIFT, next_begin, next_end)
            first_tensor = last_tensor = np.uint32(0)

        for tensor in range(first_tensor, last_tensor):
            edge, stop = consumer_ptr[tensor], consumer_ptr[tensor + ONE]
            s.sent_until[tensor] = -1
            arrival[source] = now << SHIFT
            if away:
                mark += 1
                n_targets = NONE
                for where in range(edge, stop):
                    target = devices[consumers[where]]
                    if target != source and stamp[target] != mark:
                        stamp[target] = mark
                        hole = n_targets
                        while hole > NONE and targets[hole - ONE] > target:
                            targets[hole] = targets[hole - ONE]
                            hole -= ONE
                        targets[hole] = target
                        n_targets += ONE
                for number in range(n_targets):  # R3, R4
                    target = targets[number]
                    place = np.uint32(places[np.uint32(source * n_devices + target)])
                    finish = now + length[place]
                    if p.tensor_bytes[tensor] == 0:
                        finish = max(finish, now + 1)
                        arrival[target] = finish << SHIFT
                        step = max(step, finish)
                        if finish > s.sent_until[tensor]:
                            s.sent_until[tensor], s.sent_last[tensor] = finish, n_transfers
                    else:
                        arrival[target] = -1  # not known yet
                        behind[n_transfers] = -1
                        if waiting[place] < 0:
                            waiting[place] = n_transfers
                            next_begin = min(next_begin, finish)
                        else:
                            behind[np.uint32(last_waiting[place])] = n_transfers
                        last_waiting[place] = n_transfers
                    x.x_tensor[n_transfers], x.x_target[n_transfers] = tensor, target
                    x.x_start[n_transfers], x_finish[n_transfers] = now, finish
                    n_transfers += ONE
            for where in range(edge, stop):
                consumer = consumers[where]
                there = arrival[devices[consumer]]
                if there >= 0:
                    was = state[consumer]
                    was = max(was, there | (was & MASK)) - 1
                    state[consumer] = was
                    if (was & MASK) == 0:
                        fresh[n_fresh] = consumer
                        n_fresh += ONE
        for number in range(n_fresh):
            key = state[fresh[number]] | fresh[number]
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
    x.count[0], x.count[1] = n_transfers, step


@kernel
def run_many_fair(p: Inputs, placements, first, stop, below, x: Timeline, s: FairRoom, step, peak, overflow):
    """What :func:`simdev.sim.kernels.general.run_many` does, under these rules."""
    for row in range(first, stop):
        if not check_devices(p, placements[row]):
            return row
        run_fair(p, placements[row], x, s)
        answer(p, placements[row], row, below, x, s, step, peak, overflow)
    return -1
