"""The event-driven kernel: every rule, policy, contention and runtime (R1-R8, R11) over flat arrays.

One heap of (time, event) drives it; at each instant first all completions, then the sends they asked for in (tensor,
destination) order, then the starts (R5). Compiled by Numba; import this module only when a simulation runs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simdev.sim.inputs import Inputs
from simdev.sim.kernels.flows import Flows, advance, join, new_flows, next_end, pop_ended, reset, share
from simdev.sim.kernels.heap import kernel, part, pop, push, sort_pairs

FIFO, PRIORITY, PROGRAM = 0, 1, 2  # positions in ORDERS
SHARED, FREE, FAIR = 0, 1, 2  # positions in CONTENTIONS: fifo, none, fair

OK, BAD_PLACEMENT, STUCK = 0, 1, 2
UNKNOWN = -1  # memory that has not been worked out


class Timeline(NamedTuple):
    """What one run writes. ``count`` int64 ``(2,)``: transfers made, step time in ns. Transfers are in the order they
    were requested; ``start_order`` and ``finish_order`` are the ops by start and by finish."""

    op_start: np.ndarray
    op_finish: np.ndarray
    start_order: np.ndarray
    finish_order: np.ndarray
    x_tensor: np.ndarray
    x_target: np.ndarray
    x_start: np.ndarray
    x_finish: np.ndarray
    count: np.ndarray


class Scratch(NamedTuple):
    """Working arrays of one thread; nothing in them outlives a run."""

    event_time: np.ndarray
    event_id: np.ndarray
    ready_key: np.ndarray
    ready_op: np.ndarray
    ready_base: np.ndarray
    ready_size: np.ndarray
    program: np.ndarray
    program_next: np.ndarray
    free_slots: np.ndarray
    missing: np.ndarray
    ready_time: np.ndarray
    fresh: np.ndarray
    issued: np.ndarray
    done: np.ndarray
    channel_end: np.ndarray
    request: np.ndarray
    stamp: np.ndarray
    arrival: np.ndarray
    touched: np.ndarray
    is_touched: np.ndarray
    flows: Flows
    freed_by_op: np.ndarray
    freed_by_transfer: np.ndarray
    sent_until: np.ndarray
    sent_last: np.ndarray
    last_op: np.ndarray
    level: np.ndarray
    instant: np.ndarray
    before: np.ndarray
    over_time: np.ndarray
    over_base: np.ndarray
    in_time: np.ndarray
    in_size: np.ndarray
    out_time: np.ndarray
    out_size: np.ndarray


def new_timeline(n_ops: int, n_edges: int) -> Timeline:
    """Room for the run of a graph of ``n_ops`` ops and ``n_edges`` tensor-to-consumer pairs."""
    ops, edges = (lambda: np.empty(n_ops, np.int64)), (lambda: np.empty(n_edges, np.int64))
    return Timeline(
        ops(), ops(), np.empty(n_ops, np.uint32), np.empty(n_ops, np.uint32), np.empty(n_edges, np.uint32),
        np.empty(n_edges, np.uint32), edges(), edges(), np.zeros(2, np.int64),
    )  # fmt: skip


def new_scratch(n_ops: int, n_tensors: int, n_edges: int, n_devices: int, n_channels: int, fair: bool) -> Scratch:
    """Working arrays for one thread."""
    events, requests = 4 * n_ops + n_edges + 8, max(n_edges, n_devices)

    def ints(length, dtype=np.int64):
        return np.zeros(length, dtype)

    return Scratch(
        event_time=ints(events), event_id=ints(events), ready_key=ints(n_ops), ready_op=ints(n_ops, np.int32),
        ready_base=ints(n_devices + 1), ready_size=ints(n_devices), program=ints(n_ops, np.int32),
        program_next=ints(n_devices), free_slots=ints(n_devices), missing=ints(n_ops), ready_time=ints(n_ops),
        fresh=ints(n_ops, np.uint32), issued=ints(n_ops, np.bool_), done=ints(n_ops, np.bool_),
        channel_end=ints(n_channels), request=ints(requests),
        stamp=ints(n_devices), arrival=ints(n_devices), touched=ints(n_devices), is_touched=ints(n_devices, np.bool_),
        flows=new_flows(n_edges if fair else 0, n_devices, n_channels),
        freed_by_op=ints(n_ops), freed_by_transfer=ints(n_edges),
        sent_until=ints(n_tensors), sent_last=ints(n_tensors), last_op=ints(n_devices), level=ints(n_devices),
        instant=ints(n_devices), before=ints(n_devices), over_time=ints(n_devices), over_base=ints(n_devices),
        in_time=ints(n_edges), in_size=ints(n_edges), out_time=ints(n_edges), out_size=ints(n_edges),
    )  # fmt: skip


@part
def check_devices(p: Inputs, devices):
    """True where every op is on a device that runs it (that it exists has been seen to), with its group, and every
    tensor has a route."""
    if not p.anywhere:
        for op in range(len(devices)):
            device = devices[op]
            if p.op_ns[p.device_row[device], op] < 0 or devices[p.unit_first[op]] != device:
                return False
    if p.all_routed:
        return True
    for tensor in range(len(p.tensor_producer)):
        source = devices[p.tensor_producer[tensor]]
        for edge in range(p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]):
            target = devices[p.consumers[edge]]
            if target != source and p.pair_class[source, target] < 0:
                return False
    return True


@part
def run(p: Inputs, devices, rank, x: Timeline, s: Scratch):
    """Simulate one placement (uint32 ``(n,)``, checked); return :data:`OK`, or :data:`STUCK` where an op never ran.

    ``rank`` int64 ``(n,)`` orders the ready ops under the ``priority`` policy.
    Event ids: finish of op v = v, issue of v done = n + v, v is ready = 2 n + v, flow of transfer k joins = 3 n + k,
    slot of v open again = -1 - v.
    """
    n, n_devices = len(devices), len(p.slots)
    fair, shared, eager = p.contention == FAIR, p.contention == SHARED, p.host >= 0
    ready_key, ready_op, ready_base, ready_size = s.ready_key, s.ready_op, s.ready_base, s.ready_size
    event_time, event_id, missing, ready_time = s.event_time, s.event_id, s.missing, s.ready_time
    touched, is_touched, stamp, arrival, request = s.touched, s.is_touched, s.stamp, s.arrival, s.request
    flows, fresh = s.flows, s.fresh
    zero = np.int64(0)  # a plain 0 is a type of its own, for which Numba compiles called functions again
    n_events = n_flows = n_transfers = n_started = n_finished = n_touched = n_fresh = mark = zero

    ready_base[:] = 0
    for op in range(n):
        ready_base[devices[op] + 1] += 1
    for device in range(n_devices):
        ready_base[device + 1] += ready_base[device]
        ready_size[device] = 0
        s.program_next[device] = ready_base[device]
        s.free_slots[device] = p.slots[device]
        stamp[device] = -1
        is_touched[device] = False
    for op in range(n):
        device = devices[op]
        s.program[s.program_next[device]] = op
        s.program_next[device] += 1
        missing[op] = p.input_ptr[op + 1] - p.input_ptr[op] + (1 if eager else 0)
        ready_time[op] = 0
        s.issued[op] = not eager
        s.done[op] = False
    for device in range(n_devices):
        s.program_next[device] = ready_base[device]
    s.channel_end[:] = 0
    if fair:
        reset(p, devices, flows)

    now = step = zero
    flow_end = np.int64(-1)
    if eager:
        n_events = push(event_time, event_id, zero, n_events, p.dispatch_ns[0], n)
    else:
        for op in range(n):
            if missing[op] == 0:
                n_events = push(event_time, event_id, zero, n_events, zero, 2 * n + op)

    while n_events > 0 or n_flows > 0:
        before = now
        if n_events > 0 and (n_flows == 0 or event_time[0] <= flow_end):
            now = event_time[0]
        else:
            now = flow_end
        n_requests = zero
        flows_changed = False

        # Flows that end now (R4, fair).
        if fair:
            advance(flows, now - before)
            while True:
                transfer = pop_ended(flows)
                if transfer < 0:
                    break
                flows_changed = True
                n_flows -= 1
                x.x_finish[transfer] = now
                tensor, target = x.x_tensor[transfer], x.x_target[transfer]
                for edge in range(p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]):
                    op = p.consumers[edge]
                    if devices[op] == target:
                        missing[op] -= 1
                        if missing[op] == 0:
                            # A control edge's arrival is known ahead and may lie later.
                            n_events = push(event_time, event_id, zero, n_events, max(now, ready_time[op]), 2 * n + op)
                if now > step:
                    step = now

        # Completions (R5): finishing ops come in op order, so their sends are asked for in tensor order (R3).
        while n_events > 0 and event_time[0] == now:
            event = event_id[0]
            n_events = pop(event_time, event_id, zero, n_events)
            if event < 0:  # the gap after an op is over (R1)
                device = devices[-1 - event]
                s.free_slots[device] += 1
                if not is_touched[device]:
                    is_touched[device] = True
                    touched[n_touched] = device
                    n_touched += 1
            elif event < n:
                op = event
                device = devices[op]
                x.finish_order[n_finished] = op
                n_finished += 1
                s.done[op] = True
                if p.gap_ns[op] > 0:
                    n_events = push(event_time, event_id, zero, n_events, now + p.gap_ns[op], -1 - op)
                else:
                    s.free_slots[device] += 1
                if not is_touched[device]:
                    is_touched[device] = True
                    touched[n_touched] = device
                    n_touched += 1
                if eager and device == p.host and op + 1 < n:
                    n_events = push(event_time, event_id, zero, n_events, now + p.dispatch_ns[op + 1], n + op + 1)
                for tensor in range(p.output_ptr[op], p.output_ptr[op + 1]):
                    mark += 1
                    first_request = n_requests
                    for edge in range(p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]):
                        consumer = p.consumers[edge]
                        target = devices[consumer]
                        if target == device:
                            missing[consumer] -= 1
                            if now > ready_time[consumer]:
                                ready_time[consumer] = now
                            if missing[consumer] > 0:
                                continue
                            there = ready_time[consumer]
                            if there == now:
                                fresh[n_fresh] = consumer
                                n_fresh += 1
                            else:
                                n_events = push(event_time, event_id, zero, n_events, there, 2 * n + consumer)
                        elif stamp[target] != mark:
                            stamp[target] = mark
                            if s.issued[consumer]:
                                wanted = np.int64(tensor) * n_devices + target
                                hole = n_requests
                                while hole > first_request and request[hole - 1] > wanted:
                                    request[hole] = request[hole - 1]
                                    hole -= 1
                                request[hole] = wanted
                                n_requests += 1
            elif event < 2 * n:  # the host has issued an op (R11)
                op = event - n
                device = devices[op]
                s.issued[op] = True
                missing[op] -= 1
                if now > ready_time[op]:
                    ready_time[op] = now
                if missing[op] == 0 and ready_time[op] == now:
                    fresh[n_fresh] = op
                    n_fresh += 1
                elif missing[op] == 0:
                    n_events = push(event_time, event_id, zero, n_events, ready_time[op], 2 * n + op)
                if device != p.host and op + 1 < n:
                    n_events = push(event_time, event_id, zero, n_events, now + p.dispatch_ns[op + 1], n + op + 1)
                for slot in range(p.input_ptr[op], p.input_ptr[op + 1]):
                    tensor = p.inputs[slot]
                    producer = p.tensor_producer[tensor]
                    if devices[producer] == device or not s.done[producer]:
                        continue
                    edge = p.consumer_ptr[tensor]
                    while devices[p.consumers[edge]] != device:
                        edge += 1
                    if p.consumers[edge] == op:  # the first consumer there: the copy is issued with it
                        request[n_requests] = np.int64(tensor) * n_devices + device
                        n_requests += 1
            elif event < 3 * n:
                fresh[n_fresh] = event - 2 * n
                n_fresh += 1
            else:
                transfer = event - 3 * n
                tensor = x.x_tensor[transfer]
                source = devices[p.tensor_producer[tensor]]
                join(flows, source * n_devices + x.x_target[transfer], transfer, p.tensor_bytes[tensor])
                flows_changed = True
                n_flows += 1

        # Ops that are ready from now on, into the queues of their devices (R2).
        for index in range(n_fresh):
            op = fresh[index]
            device = devices[op]
            key = now
            if p.policy == PRIORITY:
                key = rank[op]
            elif p.policy == PROGRAM:
                key = np.int64(op)
            ready_size[device] = push(ready_key, ready_op, ready_base[device], ready_size[device], key, op)
            if not is_touched[device]:
                is_touched[device] = True
                touched[n_touched] = device
                n_touched += 1
        n_fresh = 0

        # Sends (R3, R4), in order of tensor and destination.
        if eager and n_requests > 1:
            sort_pairs(request, s.freed_by_transfer, zero, n_requests)  # the items are of no account
        first_request = 0
        while first_request < n_requests:
            tensor = request[first_request] // n_devices
            source = devices[p.tensor_producer[tensor]]
            mark += 1
            last_request = first_request
            while last_request < n_requests and request[last_request] // n_devices == tensor:
                target = request[last_request] % n_devices
                pair = source * n_devices + target
                start = now
                if shared:
                    for hop in range(p.route_ptr[pair], p.route_ptr[pair + 1]):
                        start = max(start, s.channel_end[p.route[hop]])
                finish = start + p.transfer_ns[p.pair_class[source, target], tensor]
                if shared:
                    for hop in range(p.route_ptr[pair], p.route_ptr[pair + 1]):
                        s.channel_end[p.route[hop]] = finish
                if fair:
                    finish = now + p.pair_latency[source, target]
                    if p.tensor_bytes[tensor] == 0:
                        finish = max(finish, now + 1)
                    elif finish > now:
                        n_events = push(event_time, event_id, zero, n_events, finish, 3 * n + n_transfers)
                    else:
                        join(flows, pair, n_transfers, p.tensor_bytes[tensor])
                        flows_changed = True
                        n_flows += 1
                x.x_tensor[n_transfers], x.x_target[n_transfers] = tensor, target
                x.x_start[n_transfers], x.x_finish[n_transfers] = start, finish
                n_transfers += 1
                stamp[target], arrival[target] = mark, finish
                last_request += 1
            if not fair or p.tensor_bytes[tensor] == 0:
                for edge in range(p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]):
                    consumer = p.consumers[edge]
                    target = devices[consumer]
                    if stamp[target] == mark:
                        missing[consumer] -= 1
                        if arrival[target] > ready_time[consumer]:
                            ready_time[consumer] = arrival[target]
                        if arrival[target] > step:
                            step = arrival[target]
                        if missing[consumer] == 0:
                            n_events = push(
                                event_time, event_id, zero, n_events, ready_time[consumer], 2 * n + consumer
                            )
            first_request = last_request

        # Starts (R1, R2).
        for index in range(n_touched):
            device = touched[index]
            is_touched[device] = False
            base = ready_base[device]
            while s.free_slots[device] > 0 and ready_size[device] > 0:
                op = ready_op[base]
                if p.policy == PROGRAM:
                    if op != s.program[s.program_next[device]]:
                        break
                    s.program_next[device] += 1
                ready_size[device] = pop(ready_key, ready_op, base, ready_size[device])
                s.free_slots[device] -= 1
                finish = now + p.op_ns[p.device_row[device], op]
                x.op_start[op], x.op_finish[op] = now, finish
                x.start_order[n_started] = op
                n_started += 1
                if finish > step:
                    step = finish
                n_events = push(event_time, event_id, zero, n_events, finish, np.int64(op))
        n_touched = 0

        if flows_changed and n_flows > 0:
            share(p.route_ptr, p.route, p.channel_rate, flows)
        if n_flows > 0:
            flow_end = next_end(flows, now)

    x.count[0], x.count[1] = n_transfers, step
    return OK if n_finished == n else STUCK


@part
def sweep_memory(p: Inputs, devices, x: Timeline, s: Scratch, peak):
    """Peak memory per device from a finished timeline (R7), by a sweep over all allocations and frees in time order.

    Writes ``peak`` int64 ``(D,)`` and, into the scratch, ``over_time``, the first instant above capacity (-1: never,
    -2: by the persistent bytes alone), and ``over_base``, the memory in use before that instant's allocations.
    """
    n, n_devices, n_transfers = len(devices), len(p.slots), x.count[0]
    level, freed_by_op, freed_by_transfer, last_op = s.level, s.freed_by_op, s.freed_by_transfer, s.last_op
    over_time, over_base = s.over_time, s.over_base
    level[:] = 0
    last_op[:] = -1
    s.instant[:] = -1
    s.sent_last[:] = -1
    s.sent_until[:] = -1
    for op in range(n):
        granule = p.granule[devices[op]]
        freed_by_op[op] = p.workspace_size[granule, op]
        level[devices[op]] += p.persistent_size[granule, op]
    for device in range(n_devices):
        peak[device] = level[device]
        over_time[device] = -2 if level[device] > p.capacity[device] else -1
        over_base[device] = 0
    for transfer in range(n_transfers):
        freed_by_transfer[transfer] = 0
        tensor = x.x_tensor[transfer]
        if x.x_finish[transfer] > s.sent_until[tensor]:
            s.sent_until[tensor] = x.x_finish[transfer]
            s.sent_last[tensor] = transfer

    # Each instance is freed with the completion that ends its life: an op's on its own device, or a transfer's.
    for tensor in range(len(p.tensor_producer)):
        producer = p.tensor_producer[tensor]
        home = devices[producer]
        last_op[home] = producer
        first, stop = p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]
        for edge in range(first, stop):
            op = p.consumers[edge]
            device = devices[op]
            if last_op[device] < 0 or x.op_finish[op] > x.op_finish[last_op[device]]:
                last_op[device] = op
        if not p.tensor_result[tensor]:
            size = p.home_size[p.granule[home], tensor]
            if s.sent_until[tensor] > x.op_finish[last_op[home]]:
                freed_by_transfer[s.sent_last[tensor]] += size
            else:
                freed_by_op[last_op[home]] += size
        last_op[home] = -1
        for edge in range(first, stop):
            device = devices[p.consumers[edge]]
            if last_op[device] >= 0:
                freed_by_op[last_op[device]] += p.tensor_size[p.granule[device], tensor]
                last_op[device] = -1

    start_time, by_start, finish_time, by_finish = s.in_time, s.in_size, s.out_time, s.out_size
    for transfer in range(n_transfers):
        start_time[transfer], finish_time[transfer] = x.x_start[transfer], x.x_finish[transfer]
        by_start[transfer] = by_finish[transfer] = transfer
    sort_pairs(start_time, by_start, np.int64(0), n_transfers)
    sort_pairs(finish_time, by_finish, np.int64(0), n_transfers)
    started = finished = sent = arrived = 0
    last = np.iinfo(np.int64).max
    while started < n or sent < n_transfers:
        op_time = x.op_start[x.start_order[started]] if started < n else last
        send_time = x.x_start[by_start[sent]] if sent < n_transfers else last
        now = min(op_time, send_time)
        while finished < n and x.op_finish[x.finish_order[finished]] <= now:
            op = x.finish_order[finished]
            level[devices[op]] -= freed_by_op[op]
            finished += 1
        while arrived < n_transfers and x.x_finish[by_finish[arrived]] <= now:
            transfer = by_finish[arrived]
            level[devices[p.tensor_producer[x.x_tensor[transfer]]]] -= freed_by_transfer[transfer]
            arrived += 1
        if op_time == now:
            op = x.start_order[started]
            device = devices[op]
            size = p.start_size[p.granule[device], op]
            started += 1
        else:
            transfer = by_start[sent]
            device = np.int64(x.x_target[transfer])
            size = p.tensor_size[p.granule[device], x.x_tensor[transfer]]
            sent += 1
        if s.instant[device] != now:
            s.instant[device], s.before[device] = now, level[device]
        level[device] += size
        if level[device] > peak[device]:
            peak[device] = level[device]
            if over_time[device] == -1 and level[device] > p.capacity[device]:
                over_time[device], over_base[device] = now, s.before[device]


@kernel
def run_many(p: Inputs, placements, first, stop, rank, below, x: Timeline, s: Scratch, step, peak, overflow):
    """Simulate the rows ``first:stop`` of ``placements`` ``(k, n)``; return the first row that failed, or -1. Memory is
    :data:`UNKNOWN` where the step time is not ``below``.

    ``x`` and the overflow instants in ``s`` are left as the last row's.
    """
    n_devices = len(p.slots)
    for row in range(first, stop):
        if not check_devices(p, placements[row]) or run(p, placements[row], rank, x, s) != OK:
            return row
        step[row] = x.count[1]
        if step[row] >= below:
            peak[row] = overflow[row] = UNKNOWN
            continue
        sweep_memory(p, placements[row], x, s, peak[row])
        overflow[row] = 0
        for device in range(n_devices):
            overflow[row] += max(0, peak[row, device] - p.capacity[device])
    return -1
