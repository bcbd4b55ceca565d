"""The loop of ``fair`` contention: dataflow, policy ``fifo``, no gaps.

Ops are queued and lined up as in :mod:`simdev.sim.kernels.fifo`: an op's place on its device is final if the op was
ready before the next event. Here events are the requests, the beginnings of flows (a latency after the request) and the
ends of flows; the rates, and so the ends, change at every instant at which a flow joins or ends (R4).

All flows between the same two devices have the same rate, because they cross the same channels. Each such *pair* keeps
one count of the work served to any one of its flows, and a heap of its flows by the count at which they end. The count
is brought up to date only when the pair's rate or its flows change:
``served(t) = served + rate * (t - since)`` until then.

Invariant of the loop: at ``next_event`` no earlier event is left; ``pair_end`` is, for each pair with flows, the first
whole ns at which its first flow has no work left at the present rate; ``channel_flows`` counts the flows over each
channel, and the list of a channel holds the hops of the pairs with flows that cross it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simdev.problem.problem import Problem
from simdev.sim.kernels.compiled import inlined, kernel, part
from simdev.sim.kernels.fifo import line_up, take_slot
from simdev.sim.kernels.flows import NANO, REBASE
from simdev.sim.kernels.memory import measure
from simdev.sim.kernels.placement import is_valid
from simdev.sim.kernels.queue import drop, enqueue, enqueue_sources, peek
from simdev.sim.kernels.send import lay_out, leaves, postpone, take_next
from simdev.sim.kernels.state import NEVER, NONE, ONE, Inputs, Timeline, Workspace


class Fair(NamedTuple):
    """Flows, by pair of devices (``source * D + target``), by channel, and by hop (a place in ``route``)."""

    pair_bottom: np.ndarray  # where the pair's heap begins in ``work`` and ``flow``
    pair_size: np.ndarray  # its flows
    pair_served: np.ndarray  # work served to each of them, counted from some instant on, until ``pair_since``
    pair_since: np.ndarray
    pair_rate: np.ndarray  # bytes/s of each of them; 0: to be set
    pair_end: np.ndarray  # first instant at which one of them ends
    pair_latency: np.ndarray  # place of the route's latency in ``latency_ns``
    channel_flows: np.ndarray
    channel_share: np.ndarray  # what each flow gets if all share the whole bandwidth; -1: to be computed
    channel_listed: np.ndarray  # whether it is in ``in_use``
    channel_left: np.ndarray  # while rates are set: bandwidth left,
    channel_open: np.ndarray  # flows without a rate,
    channel_each: np.ndarray  # and what each of these would get; -1: to be computed
    channel_begin: np.ndarray  # where the channel's list begins in ``hop_at``
    channel_listing: np.ndarray  # and its length
    hop_at: np.ndarray  # uint32: the lists of all channels
    spot_of: np.ndarray  # uint32: the place of each hop in ``hop_at``
    pair_of: np.ndarray  # uint32: the pair of each hop
    active: np.ndarray  # uint32: pairs with flows
    changes: np.ndarray  # uint32: pairs whose flows changed since rates were last set
    changed: np.ndarray  # uint32: whether a pair is in ``changes``
    marked: np.ndarray  # uint32: mark of the last time that the pair's rate was set
    in_use: np.ndarray  # uint32: channels with flows, and some without
    latency_ns: np.ndarray  # the distinct latencies
    waiting: np.ndarray  # for each: the first transfer that waits for it to pass, and the last
    last_waiting: np.ndarray
    behind: np.ndarray  # the next transfer that waits for the same latency
    work: np.ndarray  # the heaps: count of work at which a flow ends,
    flow: np.ndarray  # uint32: and its transfer
    stamp: np.ndarray
    targets: np.ndarray  # uint32
    fresh: np.ndarray  # uint32: ops that are ready from now on


def new_fair(problem: Problem) -> Fair:
    """Arrays for one thread."""
    graph, topology = problem.graph, problem.topology
    n_edges, n_devices, n_channels = graph.n_edges, topology.n_devices, len(topology.channels)
    n_pairs = n_devices * n_devices
    latency_ns, places = np.unique(topology.pair_latency_ns, return_inverse=True)
    ptr, route = topology.route_csr
    begin = np.zeros(n_channels, np.int64)
    begin[1:] = np.cumsum(np.bincount(route, minlength=n_channels))[:-1]

    def ints(length, dtype=np.int64):
        return np.zeros(length, dtype)

    return Fair(
        pair_bottom=ints(n_pairs),
        pair_size=ints(n_pairs),
        pair_served=ints(n_pairs),
        pair_since=ints(n_pairs),
        pair_rate=ints(n_pairs),
        pair_end=ints(n_pairs),
        pair_latency=places.ravel().astype(np.int64),
        channel_flows=ints(n_channels),
        channel_share=ints(n_channels),
        channel_listed=ints(n_channels),
        channel_left=ints(n_channels),
        channel_open=ints(n_channels),
        channel_each=ints(n_channels),
        channel_begin=begin,
        channel_listing=ints(n_channels),
        hop_at=ints(len(route), np.uint32),
        spot_of=ints(len(route), np.uint32),
        pair_of=np.repeat(np.arange(n_pairs), np.diff(ptr)).astype(np.uint32),
        active=ints(n_pairs, np.uint32),
        changes=ints(n_pairs, np.uint32),
        changed=ints(n_pairs, np.uint32),
        marked=ints(n_pairs, np.uint32),
        in_use=ints(n_channels, np.uint32),
        latency_ns=latency_ns.astype(np.int64),
        waiting=ints(len(latency_ns)),
        last_waiting=ints(len(latency_ns)),
        behind=ints(n_edges),
        work=ints(n_edges),
        flow=ints(n_edges, np.uint32),
        stamp=ints(n_devices),
        targets=ints(n_devices, np.uint32),
        fresh=ints(graph.n_ops, np.uint32),
    )


@part
def no_flows(inputs: Inputs, devices, own: Fair):
    """Before a run: no flows, and for each pair as much of the heaps as it has transfers."""
    n_devices, stamp, bottom = len(inputs.slots), own.stamp, own.pair_bottom
    for device in range(n_devices):
        stamp[device] = -1
    for place in range(len(own.waiting)):
        own.waiting[place] = -1
    for channel in range(len(own.channel_flows)):
        own.channel_flows[channel] = own.channel_listed[channel] = own.channel_listing[channel] = 0
    for pair in range(len(bottom)):
        bottom[pair] = own.pair_size[pair] = own.changed[pair] = own.marked[pair] = 0
    for tensor in range(len(inputs.tensor_producer)):
        source = devices[inputs.tensor_producer[tensor]]
        for edge in range(inputs.consumer_ptr[tensor], inputs.consumer_ptr[tensor + 1]):
            target = devices[inputs.consumers[edge]]
            if target != source and stamp[target] != tensor:
                stamp[target] = tensor
                bottom[np.uint32(source * n_devices + target)] += 1
    above = 0
    for pair in range(len(bottom)):
        above += bottom[pair]
        bottom[pair] = above - bottom[pair]
    for device in range(n_devices):
        stamp[device] = -1


@inlined
def pop_flow(work, flow, bottom, size):
    """Remove the flow that ends first from the heap of ``size`` flows at ``bottom``; return its transfer."""
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
    return transfer


@inlined
def push_flow(work, flow, bottom, hole, enough, transfer):
    """Add a flow that ends at the count ``enough`` to the heap of ``hole`` flows at ``bottom``."""
    while hole > NONE:
        parent = (hole - ONE) >> ONE
        if work[bottom + parent] <= enough:
            break
        work[bottom + hole], flow[bottom + hole] = work[bottom + parent], flow[bottom + parent]
        hole = parent
    work[bottom + hole], flow[bottom + hole] = enough, transfer


@inlined
def catch_up(own: Fair, pair, now):
    """Bring the work served to a pair up to date."""
    own.pair_served[pair] += own.pair_rate[pair] * (now - own.pair_since[pair])
    own.pair_since[pair] = now


@inlined
def first_end(own: Fair, pair, now, rate):
    """The first whole ns at which a flow of the pair has no work left (R4)."""
    lacking = np.uint64(own.work[np.uint64(own.pair_bottom[pair])] - own.pair_served[pair] + rate - 1)
    return now + np.int64(lacking // np.uint64(rate))


@inlined
def end_flows(
    inputs: Inputs, devices, now, timeline: Timeline, workspace: Workspace[Fair], n_active, n_changes, n_fresh
):
    """End the flows that have no work left ``now``: their tensors arrive. Returns the three counts."""
    own, state, index = workspace.own, workspace.state, NONE
    while index < n_active:
        pair = own.active[index]
        index += ONE
        if own.pair_end[pair] > now:
            continue
        catch_up(own, pair, now)
        bottom, size = np.uint64(own.pair_bottom[pair]), np.uint64(own.pair_size[pair])
        while size > NONE and own.work[bottom] <= own.pair_served[pair]:
            transfer = pop_flow(own.work, own.flow, bottom, size)
            size -= ONE
            timeline.x_finish[transfer] = now
            tensor, target = timeline.x_tensor[transfer], timeline.x_target[transfer]
            if now > workspace.sent_until[tensor]:
                workspace.sent_until[tensor], workspace.sent_last[tensor] = now, transfer
            for where in range(inputs.consumer_ptr[tensor], inputs.consumer_ptr[tensor + ONE]):
                consumer = inputs.consumers[where]
                if devices[consumer] == target:
                    was = state[consumer]
                    was = max(was, (now << inputs.shift) | (was & inputs.mask)) - 1
                    state[consumer] = was
                    if (was & inputs.mask) == 0:
                        own.fresh[n_fresh] = consumer
                        n_fresh += ONE
        gone = own.pair_size[pair] - np.int64(size)
        for hop in range(inputs.route_ptr[pair], inputs.route_ptr[pair + ONE]):
            channel = inputs.route[hop]
            own.channel_flows[channel] -= gone
            own.channel_share[channel] = -1
            if size == NONE:  # the channel's last hop takes the place of this one in its list
                own.channel_listing[channel] -= 1
                other = own.hop_at[np.uint64(own.channel_begin[channel] + own.channel_listing[channel])]
                own.hop_at[own.spot_of[hop]], own.spot_of[other] = other, own.spot_of[hop]
        own.pair_size[pair] = size
        own.changes[n_changes], own.changed[pair] = pair, 1
        n_changes += ONE
        if size == NONE:
            n_active -= ONE
            index -= ONE
            own.active[index] = own.active[n_active]
    return n_active, n_changes, n_fresh


@inlined
def begin_flows(inputs: Inputs, devices, now, timeline: Timeline, own: Fair, n_active, n_changes, n_channels):
    """The transfers whose latency has passed ``now`` become flows. Returns the three counts and the next beginning."""
    n_devices, work, next_begin = len(inputs.slots), own.work, np.int64(NEVER) >> inputs.shift
    for place in range(len(own.waiting)):
        while own.waiting[place] >= 0 and timeline.x_finish[np.uint32(own.waiting[place])] == now:
            transfer = np.uint32(own.waiting[place])
            tensor = timeline.x_tensor[transfer]
            pair = np.uint32(devices[inputs.tensor_producer[tensor]] * n_devices + timeline.x_target[transfer])
            bottom, size = np.uint64(own.pair_bottom[pair]), np.uint64(own.pair_size[pair])
            if size == NONE:
                own.active[n_active] = pair
                n_active += ONE
                own.pair_served[pair] = own.pair_rate[pair] = 0
            catch_up(own, pair, now)
            if own.pair_served[pair] > REBASE:  # count from 0 again, so that counts stay below 2**63
                for other in range(bottom, bottom + size):
                    work[other] -= own.pair_served[pair]
                own.pair_served[pair] = 0
            if own.changed[pair] == 0:
                own.changes[n_changes], own.changed[pair] = pair, 1
                n_changes += ONE
            enough = own.pair_served[pair] + inputs.tensor_bytes[tensor] * NANO
            push_flow(work, own.flow, bottom, size, enough, transfer)
            own.pair_size[pair] += 1
            for hop in range(inputs.route_ptr[pair], inputs.route_ptr[pair + ONE]):
                channel = inputs.route[hop]
                own.channel_flows[channel] += 1
                own.channel_share[channel] = -1
                if own.pair_size[pair] == 1:
                    spot = np.uint64(own.channel_begin[channel] + own.channel_listing[channel])
                    own.hop_at[spot], own.spot_of[hop] = hop, spot
                    own.channel_listing[channel] += 1
                if own.channel_listed[channel] == 0:
                    own.channel_listed[channel], own.in_use[n_channels] = 1, channel
                    n_channels += ONE
            own.waiting[place] = own.behind[transfer]
        if own.waiting[place] >= 0:
            next_begin = min(next_begin, timeline.x_finish[np.uint32(own.waiting[place])])
    return n_active, n_changes, n_channels, next_begin


@inlined
def set_own_rates(inputs: Inputs, now, own: Fair, n_changes):
    """Set the rates of the changed pairs. Valid if no other pair has flows on their channels: then no other rate
    changes, and the flows of a pair share its narrowest channel."""
    for number in range(n_changes):
        pair = own.changes[number]
        if own.pair_size[pair] > 0:
            rate = np.int64(NEVER)
            for hop in range(inputs.route_ptr[pair], inputs.route_ptr[pair + ONE]):
                rate = min(rate, inputs.channel_rate[inputs.route[hop]])
            rate = max(np.int64(1), np.int64(np.uint64(rate) // np.uint64(own.pair_size[pair])))
            own.pair_rate[pair] = rate
            own.pair_end[pair] = first_end(own, pair, now, rate)


@inlined
def list_channels(inputs: Inputs, own: Fair, n_channels):
    """Before rates are set anew: all bandwidth is left and no flow has a rate. Drops channels without flows from
    ``in_use``; returns their number."""
    number = NONE
    while number < n_channels:
        channel = own.in_use[number]
        if own.channel_flows[channel] == 0:
            own.channel_listed[channel] = 0
            n_channels -= ONE
            own.in_use[number] = own.in_use[n_channels]
            continue
        if own.channel_share[channel] < 0:
            own.channel_share[channel] = np.uint64(inputs.channel_rate[channel]) // np.uint64(
                own.channel_flows[channel]
            )
        own.channel_left[channel], own.channel_open[channel] = inputs.channel_rate[channel], own.channel_flows[channel]
        own.channel_each[channel] = own.channel_share[channel]
        number += ONE
    return n_channels


@inlined
def narrowest_channel(own: Fair, n_channels):
    """The channel that gives each of its flows without a rate the least, and this rate (R4)."""
    narrowest, least = np.uint32(0), np.int64(NEVER)
    for number in range(n_channels):
        channel = own.in_use[number]
        if own.channel_each[channel] < 0:
            own.channel_each[channel] = np.uint64(own.channel_left[channel]) // np.uint64(own.channel_open[channel])
        each = own.channel_each[channel]
        if each < least or (each == least and channel < narrowest):
            narrowest, least = channel, each
    return narrowest, max(least, 1)


@inlined
def fill(inputs: Inputs, now, own: Fair, n_open, n_channels, mark):
    """Progressive filling in whole bytes/s (R4): the narrowest channel gives all its ``n_open`` flows an equal rate."""
    while n_open > 0:
        narrowest, rate = narrowest_channel(own, n_channels)
        n_open -= own.channel_open[narrowest]
        spot = np.uint64(own.channel_begin[narrowest])
        for where in range(spot, spot + np.uint64(own.channel_listing[narrowest])):
            pair = own.pair_of[own.hop_at[where]]
            if own.marked[pair] == mark:
                continue
            own.marked[pair] = mark
            if own.pair_rate[pair] != rate:
                catch_up(own, pair, now)
                own.pair_rate[pair] = rate
                own.pair_end[pair] = first_end(own, pair, now, rate)
            if n_open == 0:
                continue  # no flow is left to share with
            taken = rate * own.pair_size[pair]
            for hop in range(inputs.route_ptr[pair], inputs.route_ptr[pair + ONE]):
                channel = inputs.route[hop]
                own.channel_open[channel] -= own.pair_size[pair]
                own.channel_left[channel] = max(0, own.channel_left[channel] - taken)
                own.channel_each[channel] = -1 if own.channel_open[channel] > 0 else NEVER


@inlined
def set_rates(inputs: Inputs, now, own: Fair, n_active, n_changes, n_channels, mark):
    """Set the rates after the joins and ends of an instant. Returns ``n_channels`` and ``mark``."""
    apart = True
    for number in range(n_changes):
        pair = own.changes[number]
        own.changed[pair] = own.pair_rate[pair] = 0
        for hop in range(inputs.route_ptr[pair], inputs.route_ptr[pair + ONE]):
            apart = apart and own.channel_flows[inputs.route[hop]] == own.pair_size[pair]
    if apart:
        set_own_rates(inputs, now, own, n_changes)
        return n_channels, mark
    mark += 1
    n_open = np.int64(0)
    for number in range(n_active):
        n_open += own.pair_size[own.active[number]]
    n_channels = list_channels(inputs, own, n_channels)
    fill(inputs, now, own, n_open, n_channels, mark)
    return n_channels, mark


@inlined
def request(
    inputs: Inputs,
    devices,
    tensor,
    source,
    now,
    timeline: Timeline,
    workspace: Workspace[Fair],
    mark,
    n_transfers,
    next_begin,
    step,
):
    """Request a transfer of ``tensor`` to every other device that has a consumer, in order (R3): it waits for the
    latency, and a tensor of zero bytes for nothing else (R4). Returns the last three."""
    own, n_targets, n_devices = workspace.own, NONE, len(inputs.slots)
    for where in range(inputs.consumer_ptr[tensor], inputs.consumer_ptr[tensor + ONE]):
        target = devices[inputs.consumers[where]]
        if target != source and own.stamp[target] != mark:
            own.stamp[target] = mark
            hole = n_targets
            while hole > NONE and own.targets[hole - ONE] > target:
                own.targets[hole] = own.targets[hole - ONE]
                hole -= ONE
            own.targets[hole] = target
            n_targets += ONE
    for number in range(n_targets):
        target = own.targets[number]
        place = np.uint32(own.pair_latency[np.uint32(source * n_devices + target)])
        finish = now + own.latency_ns[place]
        if inputs.tensor_bytes[tensor] == 0:
            finish = max(finish, now + 1)
            workspace.arrival[target] = finish << inputs.shift
            step = max(step, finish)
            if finish > workspace.sent_until[tensor]:
                workspace.sent_until[tensor], workspace.sent_last[tensor] = finish, n_transfers
        else:
            workspace.arrival[target] = -1  # not known yet
            own.behind[n_transfers] = -1
            if own.waiting[place] < 0:
                own.waiting[place] = n_transfers
                next_begin = min(next_begin, finish)
            else:
                own.behind[np.uint32(own.last_waiting[place])] = n_transfers
            own.last_waiting[place] = n_transfers
        timeline.x_tensor[n_transfers], timeline.x_target[n_transfers] = tensor, target
        timeline.x_start[n_transfers], timeline.x_finish[n_transfers] = now, finish  # of a flow: where it begins
        n_transfers += ONE
    return n_transfers, next_begin, step


@inlined
def receive(inputs: Inputs, devices, tensor, workspace: Workspace[Fair], n_fresh):
    """The consumers whose devices have a known ``arrival`` receive ``tensor``; return the number of fresh ops."""
    state = workspace.state
    for where in range(inputs.consumer_ptr[tensor], inputs.consumer_ptr[tensor + ONE]):
        consumer = inputs.consumers[where]
        there = workspace.arrival[devices[consumer]]
        if there >= 0:
            was = state[consumer]
            was = max(was, there | (was & inputs.mask)) - 1
            state[consumer] = was
            if (was & inputs.mask) == 0:
                workspace.own.fresh[n_fresh] = consumer
                n_fresh += ONE
    return n_fresh


@part
def run_fair(inputs: Inputs, devices, timeline: Timeline, workspace: Workspace[Fair]):
    """Simulate one placement, uint32 ``(n,)`` and valid. Every op runs."""
    own, queue, heap, state = workspace.own, workspace.queue, workspace.heap, workspace.state
    shift, mask = inputs.shift, inputs.mask
    late = np.int64(NEVER) >> shift  # no event
    lay_out(inputs, devices, workspace, 0)
    no_flows(inputs, devices, own)
    last = enqueue_sources(workspace, len(devices))
    first = n_transfers = n_fresh = n_active = n_changes = n_channels = NONE
    n_heap = mark = step = np.int64(0)
    next_send = np.int64(NEVER)
    next_begin, next_end, next_event = late, late, late

    while True:
        first_tensor = last_tensor = np.uint32(0)
        ready, from_heap = peek(queue, heap, first, last, n_heap)
        if (ready >> shift) < next_event:
            # R1, R2: the place of this op is final.
            first, n_heap = drop(heap, first, n_heap, from_heap)
            op = np.uint32(ready & mask)
            source = devices[op]
            start, now = take_slot(inputs, workspace.slot_free, source, op, ready >> shift)
            timeline.op_start[op], timeline.op_finish[op] = start, now
            step = max(step, now)  # R6
            key = (now << shift) | op
            line_up(timeline, workspace, source, op, key)
            away = leaves(inputs, devices, op, source) != 0
            if away:
                next_send = postpone(workspace, source, key, next_send)
                next_event = min(next_event, next_send >> shift)
                continue
            first_tensor, last_tensor = inputs.output_ptr[op], inputs.output_ptr[op + 1]
        elif next_event == late:
            break
        elif (next_send >> shift) == next_event:
            # R3, R5: the next request.
            op, now, away = np.uint32(next_send & mask), next_event, True
            source = devices[op]
            next_send = take_next(workspace, source)
            first_tensor, last_tensor = inputs.output_ptr[op], inputs.output_ptr[op + 1]
        else:
            # R4: all ends and joins of this instant, and then the rates.
            now = next_event
            if next_end == now:
                step = max(step, now)  # R6
                n_active, n_changes, n_fresh = end_flows(
                    inputs, devices, now, timeline, workspace, n_active, n_changes, n_fresh
                )
            if next_begin == now:
                n_active, n_changes, n_channels, next_begin = begin_flows(
                    inputs, devices, now, timeline, own, n_active, n_changes, n_channels
                )
            if n_changes > NONE:
                n_channels, mark = set_rates(inputs, now, own, n_active, n_changes, n_channels, mark)
                n_changes = NONE
                next_end = late
                for number in range(n_active):
                    next_end = min(next_end, own.pair_end[own.active[number]])
            next_event = min(next_send >> shift, next_begin, next_end)

        for tensor in range(first_tensor, last_tensor):
            workspace.sent_until[tensor] = -1
            workspace.arrival[source] = now << shift
            if away:
                mark += 1
                n_transfers, next_begin, step = request(
                    inputs, devices, tensor, source, now, timeline, workspace, mark, n_transfers, next_begin, step
                )
            n_fresh = receive(inputs, devices, tensor, workspace, n_fresh)
        for number in range(n_fresh):
            key = state[own.fresh[number]] | own.fresh[number]
            last, n_heap = enqueue(queue, heap, first, last, n_heap, key)
        n_fresh = NONE
    timeline.count[0], timeline.count[1] = n_transfers, step


@kernel
def run_many_fair(
    inputs: Inputs, placements, first, stop, below, timeline: Timeline, workspace: Workspace[Fair], step, peak, overflow
):
    """See :func:`simdev.sim.kernels.general.run_many`."""
    for row in range(first, stop):
        if not is_valid(inputs, placements[row]):
            return row
        run_fair(inputs, placements[row], timeline, workspace)
        measure(inputs, placements[row], row, below, timeline, workspace, step, peak, overflow)
    return -1
