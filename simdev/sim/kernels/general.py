"""The general loop: every policy, contention and runtime, on devices of any number of slots (R1-R6, R11).

It is the textbook discrete-event simulation and the twin that the other loops are tested against. One heap of (time,
event) drives it. At each instant, all completions come first; then ops that are ready now enter the queue of their
device; then the requests, in the order of (tensor, destination); then the starts (R5).

Invariant: when an instant ``now`` is processed, every completion at or before ``now`` is in the heap or is the end of a
flow. Everything that starts at ``now`` ends later, because it lasts at least 1 ns; so one pass over an instant
suffices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simdev.sim.kernels.compiled import inlined, kernel, part
from simdev.sim.kernels.flows import Flows, advance, join, new_flows, next_end, pop_ended, reset, share
from simdev.sim.kernels.heap import pop, push, sort_pairs
from simdev.sim.kernels.memory import measure
from simdev.sim.kernels.placement import is_valid
from simdev.sim.kernels.send import lay_out, log, transfer
from simdev.sim.kernels.state import FAIR, OK, PRIORITY, PROGRAM, STUCK, Inputs, Timeline, Workspace

# Events: the finish of op v is v, its issue n + v, that it is ready 2 n + v; the beginning of the flow of transfer k is
# 3 n + k; the end of the gap after op v is -1 - v. At one time they are taken in the order of these numbers, so ops
# finish in order of op number, and their requests come in order of tensor number (R3).


class General(NamedTuple):
    """``event_time`` and ``event_id``: the heap of events. ``ready_key`` and ``ready_op``: per device, at its ``base``,
    a heap of ``ready_size`` ready ops. ``program_next``: per device, the place of the lowest-numbered op not yet
    started. ``missing``, ``ready_time``, ``issued``, ``done``: per op, inputs missing, latest arrival so far, and what
    happened. ``fresh``: ops that are ready now. ``request``: tensor * D + destination. ``touched``: devices to look at,
    where ``is_touched``. ``stamp``: the mark of the tensor last sent to a device, which arrives there at ``there``.
    ``count``: the lengths of the lists, at the places named below."""

    event_time: np.ndarray
    event_id: np.ndarray
    ready_key: np.ndarray
    ready_op: np.ndarray
    ready_size: np.ndarray
    program: np.ndarray
    program_next: np.ndarray
    free_slots: np.ndarray
    missing: np.ndarray
    ready_time: np.ndarray
    issued: np.ndarray
    done: np.ndarray
    fresh: np.ndarray
    request: np.ndarray
    request_item: np.ndarray
    touched: np.ndarray
    is_touched: np.ndarray
    stamp: np.ndarray
    there: np.ndarray
    flows: Flows
    count: np.ndarray  # type: ignore[assignment]  # hides tuple.count, which no one calls


EVENTS, FRESH, REQUESTS, TOUCHED, TRANSFERS, FLOWS, STARTED, FINISHED, MARK, STEP, CHANGED = range(11)


def new_general(n_ops: int, n_edges: int, n_devices: int, n_channels: int, *, fair: bool) -> General:
    """Arrays for one thread."""
    events, requests = 4 * n_ops + n_edges + 8, max(n_edges, n_devices)

    def ints(length, dtype=np.int64):
        return np.zeros(length, dtype)

    return General(
        event_time=ints(events),
        event_id=ints(events),
        ready_key=ints(n_ops),
        ready_op=ints(n_ops, np.int32),
        ready_size=ints(n_devices),
        program=ints(n_ops, np.int32),
        program_next=ints(n_devices),
        free_slots=ints(n_devices),
        missing=ints(n_ops),
        ready_time=ints(n_ops),
        issued=ints(n_ops, np.bool_),
        done=ints(n_ops, np.bool_),
        fresh=ints(n_ops, np.uint32),
        request=ints(requests),
        request_item=ints(requests),
        touched=ints(n_devices),
        is_touched=ints(n_devices, np.bool_),
        stamp=ints(n_devices),
        there=ints(n_devices),
        flows=new_flows(n_edges if fair else 0, n_devices, n_channels),
        count=ints(11),
    )


@inlined
def at(own: General, time, event):
    """Add an event."""
    own.count[EVENTS] = push(own.event_time, own.event_id, np.int64(0), own.count[EVENTS], time, event)


@inlined
def touch(own: General, device):
    """Look at a device when this instant starts ops."""
    if not own.is_touched[device]:
        own.is_touched[device] = True
        own.touched[own.count[TOUCHED]] = device
        own.count[TOUCHED] += 1


@inlined
def receive(own: General, op, now, then, n):
    """An op gets an input, or is issued, at ``then``, which is known at ``now``. If it misses nothing more it is fresh
    now, or becomes ready later."""
    own.missing[op] -= 1
    own.ready_time[op] = max(own.ready_time[op], then)
    if own.missing[op] > 0:
        return
    if own.ready_time[op] == now:
        own.fresh[own.count[FRESH]] = op
        own.count[FRESH] += 1
    else:
        at(own, own.ready_time[op], 2 * n + op)


@inlined
def prepare(inputs: Inputs, devices, workspace: Workspace[General]):
    """Before a run. Ops without inputs are ready at time 0, or when they are issued."""
    own, n, eager = workspace.own, len(devices), inputs.host >= 0
    lay_out(inputs, devices, workspace, 0)
    for index in range(len(own.count)):
        own.count[index] = 0
    for device in range(len(inputs.slots)):
        own.ready_size[device] = 0
        own.program_next[device] = workspace.base[device]
        own.free_slots[device] = inputs.slots[device]
        own.stamp[device] = -1
        own.is_touched[device] = False
    for tensor in range(len(workspace.sent_until)):
        workspace.sent_until[tensor] = -1
    for op in range(n):
        device = devices[op]
        own.program[own.program_next[device]] = op
        own.program_next[device] += 1
        own.missing[op] = inputs.input_ptr[op + 1] - inputs.input_ptr[op] + (1 if eager else 0)
        own.ready_time[op] = 0
        own.issued[op], own.done[op] = not eager, False
        if own.missing[op] == 0:
            at(own, np.int64(0), np.int64(2 * n + op))
    for device in range(len(inputs.slots)):
        own.program_next[device] = workspace.base[device]
    if inputs.contention == FAIR:
        reset(inputs, devices, own.flows)
    if eager:
        at(own, inputs.dispatch_ns[0], np.int64(n))


@inlined
def end_flows(inputs: Inputs, devices, now, timeline: Timeline, workspace: Workspace[General]):
    """End the flows that have no work left ``now``: their tensors arrive (R4)."""
    own, n = workspace.own, len(devices)
    while True:
        number = pop_ended(own.flows)
        if number < 0:
            return
        own.count[CHANGED] = 1
        own.count[FLOWS] -= 1
        own.count[STEP] = max(own.count[STEP], now)
        tensor, target = timeline.x_tensor[number], timeline.x_target[number]
        log(timeline, workspace, number, tensor, target, timeline.x_start[number], now)
        for edge in range(inputs.consumer_ptr[tensor], inputs.consumer_ptr[tensor + 1]):
            op = np.int64(inputs.consumers[edge])
            if devices[op] == target:
                receive(own, op, now, now, n)


@inlined
def finish_op(inputs: Inputs, devices, op, now, workspace: Workspace[General]):
    """The finish of an op: it frees its slot, perhaps after a gap (R1), its tensors are at home, and it requests their
    transfers (R3)."""
    own, n, n_devices, eager = workspace.own, len(devices), len(inputs.slots), inputs.host >= 0
    device = devices[op]
    workspace.line[workspace.head[device]] = op
    workspace.head[device] += 1
    own.count[FINISHED] += 1
    own.done[op] = True
    if inputs.gap_ns[op] > 0:
        at(own, now + inputs.gap_ns[op], -1 - op)
    else:
        own.free_slots[device] += 1
    touch(own, device)
    if eager and device == inputs.host and op + 1 < n:  # R11: the host runs its own op before it issues the next
        at(own, now + inputs.dispatch_ns[op + 1], n + op + 1)
    for tensor in range(inputs.output_ptr[op], inputs.output_ptr[op + 1]):
        own.count[MARK] += 1
        first = own.count[REQUESTS]
        for edge in range(inputs.consumer_ptr[tensor], inputs.consumer_ptr[tensor + 1]):
            consumer = np.int64(inputs.consumers[edge])
            target = devices[consumer]
            if target == device:
                receive(own, consumer, now, now, n)
            elif own.stamp[target] != own.count[MARK]:
                own.stamp[target] = own.count[MARK]
                if own.issued[consumer]:  # R11: else the issue of this first consumer requests it
                    wanted, hole = np.int64(tensor) * n_devices + target, own.count[REQUESTS]
                    while hole > first and own.request[hole - 1] > wanted:
                        own.request[hole] = own.request[hole - 1]
                        hole -= 1
                    own.request[hole] = wanted
                    own.count[REQUESTS] += 1


@inlined
def issue_op(inputs: Inputs, devices, op, now, workspace: Workspace[General]):
    """The host has issued an op (R11): it may start, and the copies of which it is the first consumer are requested."""
    own, n, n_devices = workspace.own, len(devices), len(inputs.slots)
    device = devices[op]
    own.issued[op] = True
    receive(own, op, now, now, n)
    if device != inputs.host and op + 1 < n:
        at(own, now + inputs.dispatch_ns[op + 1], n + op + 1)
    for slot in range(inputs.input_ptr[op], inputs.input_ptr[op + 1]):
        tensor = inputs.inputs[slot]
        producer = inputs.tensor_producer[tensor]
        if devices[producer] == device or not own.done[producer]:
            continue
        edge = inputs.consumer_ptr[tensor]
        while devices[inputs.consumers[edge]] != device:
            edge += 1
        if inputs.consumers[edge] == op:
            own.request[own.count[REQUESTS]] = np.int64(tensor) * n_devices + device
            own.count[REQUESTS] += 1


@inlined
def complete(inputs: Inputs, devices, now, timeline: Timeline, workspace: Workspace[General]):
    """All completions at ``now`` that are in the heap (R5)."""
    own, n = workspace.own, len(devices)
    while own.count[EVENTS] > 0 and own.event_time[0] == now:
        event = own.event_id[0]
        own.count[EVENTS] = pop(own.event_time, own.event_id, np.int64(0), own.count[EVENTS])
        if event < 0:
            device = devices[-1 - event]
            own.free_slots[device] += 1
            touch(own, device)
        elif event < n:
            finish_op(inputs, devices, event, now, workspace)
        elif event < 2 * n:
            issue_op(inputs, devices, event - n, now, workspace)
        elif event < 3 * n:
            own.fresh[own.count[FRESH]] = event - 2 * n
            own.count[FRESH] += 1
        else:
            begin_flow(inputs, devices, event - 3 * n, timeline, own)


@inlined
def begin_flow(inputs: Inputs, devices, number, timeline: Timeline, own: General):
    """The latency of a transfer has passed: it shares bandwidth from now on (R4)."""
    tensor = timeline.x_tensor[number]
    source = devices[inputs.tensor_producer[tensor]]
    pair = np.int64(source * len(inputs.slots) + timeline.x_target[number])
    join(own.flows, pair, number, inputs.tensor_bytes[tensor])
    own.count[CHANGED] = 1
    own.count[FLOWS] += 1


@inlined
def queue_up(inputs: Inputs, devices, rank, now, workspace: Workspace[General]):
    """Ops that are ready now enter the queue of their device, in the order of the policy (R2)."""
    own = workspace.own
    for index in range(own.count[FRESH]):
        op = own.fresh[index]
        device = devices[op]
        key = now
        if inputs.order == PRIORITY:
            key = rank[op]
        elif inputs.order == PROGRAM:
            key = np.int64(op)
        own.ready_size[device] = push(
            own.ready_key, own.ready_op, workspace.base[device], own.ready_size[device], key, op
        )
        touch(own, device)
    own.count[FRESH] = 0


@inlined
def send_all(inputs: Inputs, devices, now, timeline: Timeline, workspace: Workspace[General]):
    """The requests of an instant become transfers, in the order of (tensor, destination) (R3, R4)."""
    own, n, n_devices, fair = workspace.own, len(devices), len(inputs.slots), inputs.contention == FAIR
    if inputs.host >= 0 and own.count[REQUESTS] > 1:
        sort_pairs(own.request, own.request_item, np.int64(0), own.count[REQUESTS])
    first = 0
    while first < own.count[REQUESTS]:
        tensor = own.request[first] // n_devices
        source = devices[inputs.tensor_producer[tensor]]
        own.count[MARK] += 1
        flows = fair and inputs.tensor_bytes[tensor] > 0
        while first < own.count[REQUESTS] and own.request[first] // n_devices == tensor:
            target, number = np.uint32(own.request[first] % n_devices), own.count[TRANSFERS]
            start = finish = now
            if not fair:
                start, finish = transfer(inputs, workspace.channel_end, source, target, tensor, now)
            else:
                finish = now + inputs.pair_latency[source, target]
                if not flows:
                    finish = max(finish, now + 1)
            if flows:  # its end is not known yet
                timeline.x_tensor[number], timeline.x_target[number], timeline.x_start[number] = tensor, target, now
                if finish > now:
                    at(own, finish, 3 * n + number)
                else:
                    begin_flow(inputs, devices, number, timeline, own)
            else:
                log(timeline, workspace, number, tensor, target, start, finish)
                own.count[STEP] = max(own.count[STEP], finish)
            own.count[TRANSFERS] += 1
            own.stamp[target], own.there[target] = own.count[MARK], finish
            first += 1
        if not flows:
            for edge in range(inputs.consumer_ptr[tensor], inputs.consumer_ptr[tensor + 1]):
                consumer = np.int64(inputs.consumers[edge])
                if own.stamp[devices[consumer]] == own.count[MARK]:
                    receive(own, consumer, now, own.there[devices[consumer]], n)
    own.count[REQUESTS] = 0


@inlined
def start_ops(inputs: Inputs, devices, now, timeline: Timeline, workspace: Workspace[General]):
    """Fill the free slots of the devices where something changed (R1, R2)."""
    own, started = workspace.own, workspace.started
    for index in range(own.count[TOUCHED]):
        device = own.touched[index]
        own.is_touched[device] = False
        base = workspace.base[device]
        while own.free_slots[device] > 0 and own.ready_size[device] > 0:
            op = own.ready_op[base]
            if inputs.order == PROGRAM:
                if op != own.program[own.program_next[device]]:
                    break
                own.program_next[device] += 1
            own.ready_size[device] = pop(own.ready_key, own.ready_op, base, own.ready_size[device])
            own.free_slots[device] -= 1
            finish = now + inputs.op_ns[inputs.device_row[device], op]
            timeline.op_start[op], timeline.op_finish[op] = now, finish
            timeline.start_order[started[device]] = op
            started[device] += 1
            own.count[STARTED] += 1
            own.count[STEP] = max(own.count[STEP], finish)  # R6
            at(own, finish, np.int64(op))
    own.count[TOUCHED] = 0


@part
def run(inputs: Inputs, devices, rank, timeline: Timeline, workspace: Workspace[General]):
    """Simulate one placement, uint32 ``(n,)`` and valid; return OK, or STUCK if an op never ran.

    ``rank`` int64 ``(n,)``: the position of each op in the order of the priorities (policy ``priority`` only).
    """
    own, count, event_time = workspace.own, workspace.own.count, workspace.own.event_time
    prepare(inputs, devices, workspace)
    now, flow_end = np.int64(0), np.int64(-1)
    while count[EVENTS] > 0 or count[FLOWS] > 0:
        before = now
        now = flow_end
        if count[EVENTS] > 0 and (count[FLOWS] == 0 or event_time[0] <= flow_end):
            now = event_time[0]
        count[CHANGED] = 0
        if inputs.contention == FAIR:
            advance(own.flows, now - before)
            end_flows(inputs, devices, now, timeline, workspace)
        complete(inputs, devices, now, timeline, workspace)
        queue_up(inputs, devices, rank, now, workspace)
        send_all(inputs, devices, now, timeline, workspace)
        start_ops(inputs, devices, now, timeline, workspace)
        if count[CHANGED] > 0 and count[FLOWS] > 0:
            share(inputs.route_ptr, inputs.route, inputs.channel_rate, own.flows)
        if count[FLOWS] > 0:
            flow_end = next_end(own.flows, now)
    timeline.count[0], timeline.count[1] = count[TRANSFERS], count[STEP]
    return OK if count[FINISHED] == len(devices) else STUCK


@kernel
def run_many(
    inputs: Inputs,
    placements,
    first,
    stop,
    rank,
    below,
    timeline: Timeline,
    workspace: Workspace[General],
    step,
    peak,
    overflow,
):
    """Simulate the rows ``first:stop`` of ``placements`` uint32 ``(k, n)``; return the first row that failed, or -1.

    Writes ``step`` int64 ``(k,)``, ``peak`` int64 ``(k, D)`` and ``overflow`` int64 ``(k,)``; the last two are UNKNOWN
    for rows whose step time is not less than ``below``. The last row's run stays in ``timeline``, and the instants at
    which it exceeds the capacities in ``workspace``.
    """
    for row in range(first, stop):
        if not is_valid(inputs, placements[row]):
            return row
        if run(inputs, placements[row], rank, timeline, workspace) != OK:
            return row
        measure(inputs, placements[row], row, below, timeline, workspace, step, peak, overflow)
    return -1
