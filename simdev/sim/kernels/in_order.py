"""The loops for devices of one slot that run their ops by number: the policy ``program`` and the runtime ``eager``
(contention ``fifo`` or ``none``, no gaps).

Which op a device runs next is known from the start, so the start of an op follows from its inputs and its predecessor
as soon as all inputs have known arrivals, in whatever order the devices are visited. Each device therefore runs ahead
until its next op misses an input; ``todo`` is a stack of devices that may be able to run on.

Invariant: when the stack is empty, every device waits for a transfer that is not yet requested. Any request still to be
made then follows from an op that waits for such a transfer, so it is later than the earliest request that is known:
that one is next, which is the order that R4 demands. If no request is left and ops are, they wait in a circle: STUCK.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simdev.sim.kernels.compiled import inlined, kernel, part
from simdev.sim.kernels.heap import pop, push
from simdev.sim.kernels.memory import measure
from simdev.sim.kernels.placement import is_valid
from simdev.sim.kernels.send import earliest, lay_out, leaves, log, send, take_next, transfer
from simdev.sim.kernels.state import NEVER, NONE, OK, ONE, STUCK, Inputs, Timeline, Workspace


class InOrder(NamedTuple):
    """``todo``: a stack of devices, ``listed`` whether a device is on it. Under ``eager`` also ``issue`` ``(n,)``, the
    time I(v) of R11; a heap of requests, ``wanted`` the times and ``what`` tensor * D + destination; and ``seen``, per
    device the mark of the tensor that was last asked about."""

    todo: np.ndarray
    listed: np.ndarray
    issue: np.ndarray
    wanted: np.ndarray
    what: np.ndarray
    seen: np.ndarray


def new_in_order(n_ops: int, n_edges: int, n_devices: int, *, eager: bool) -> InOrder:
    """Arrays for one thread."""
    lengths = n_devices, n_devices, n_ops * eager, n_edges * eager, n_edges * eager, n_devices
    return InOrder(*(np.zeros(length, np.int64) for length in lengths))


@part
def _start_all(inputs: Inputs, devices, more, timeline: Timeline, workspace: Workspace[InOrder]):
    """Before a run: ``start_order`` is the ops by device and number, each missing its inputs and ``more``; all devices
    are on the stack. Returns their number."""
    own, started = workspace.own, workspace.started
    lay_out(inputs, devices, workspace, more)
    for op in range(len(devices)):
        timeline.start_order[started[devices[op]]] = op
        started[devices[op]] += 1
    for device in range(len(inputs.slots)):
        started[device] = workspace.base[device]
        own.todo[device], own.listed[device] = device, 1
    return len(inputs.slots)


@inlined
def _receive(inputs: Inputs, state, consumer, now):
    """An op gets an input, or is issued, at ``now``. True if it misses nothing any more."""
    was = state[consumer]
    state[consumer] = max(was, (now << inputs.shift) | (was & inputs.mask)) - 1
    return (was & inputs.mask) == 1


@inlined
def _visit(own: InOrder, device, n_todo):
    """Put a device on the stack unless it is there; return the height of the stack."""
    if own.listed[device] != 0:
        return n_todo
    own.todo[n_todo], own.listed[device] = device, 1
    return n_todo + 1


@inlined
def _waits(inputs: Inputs, workspace: Workspace[InOrder], start_order, source):
    """True if the next op of a device misses something, or there is none."""
    place = np.uint64(workspace.started[source])
    done = place == np.uint64(workspace.base[source + 1])
    return done or (workspace.state[start_order[place]] & inputs.mask) > 0


@inlined
def _start(inputs: Inputs, timeline: Timeline, workspace: Workspace[InOrder], source):
    """Start the next op of a device (R1, R2, R11); return it and its finish."""
    place = np.uint64(workspace.started[source])
    op = timeline.start_order[place]
    start = max(workspace.state[op] >> inputs.shift, workspace.free[source])
    now = start + inputs.op_ns[inputs.device_row[source], op]
    timeline.op_start[op], timeline.op_finish[op], workspace.free[source] = start, now, now
    workspace.line[place] = op
    workspace.started[source] += 1
    return op, now


@part
def run_program(inputs: Inputs, devices, timeline: Timeline, workspace: Workspace[InOrder]):
    """Simulate one placement, uint32 ``(n,)`` and valid, under ``program``; return OK, or STUCK if an op never ran."""
    own, state, start_order, started = workspace.own, workspace.state, timeline.start_order, workspace.started
    sends, end, shift, mask = workspace.sends, workspace.end, inputs.shift, inputs.mask
    n_todo = _start_all(inputs, devices, 0, timeline, workspace)
    n_transfers, n_started, step = NONE, 0, np.int64(0)

    while True:
        if n_todo > 0:
            source = np.uint32(own.todo[n_todo - 1])
            if _waits(inputs, workspace, start_order, source):
                n_todo -= 1
                own.listed[source] = 0
                continue
            op, now = _start(inputs, timeline, workspace, source)
            n_started += 1
            step = max(step, now)  # R6
            away = leaves(inputs, devices, op, source)
            if away != 0 and not inputs.alone[source]:
                # One slot: the ops of a device finish in the order of their starts.
                sends[end[source]] = (now << shift) | op
                if workspace.head[source] == end[source]:
                    workspace.first_send[source] = (now << shift) | op
                end[source] += 1
                continue
        else:
            # R3: the next request.
            next_send = earliest(workspace.first_send)
            if next_send == NEVER:
                break
            op, now, away = np.uint32(next_send & mask), next_send >> shift, np.uint32(1)
            source = devices[op]
            take_next(workspace, source)
        # R3, R4: the op's tensors are at home, and sent if this is their turn.
        workspace.arrival[source] = now << shift
        for tensor in range(inputs.output_ptr[op], inputs.output_ptr[op + 1]):
            workspace.sent_until[tensor] = -1
            if away != 0:
                n_transfers, step = send(inputs, devices, tensor, source, now, timeline, workspace, n_transfers, step)
            for where in range(inputs.consumer_ptr[tensor], inputs.consumer_ptr[tensor + 1]):
                consumer = inputs.consumers[where]
                target = devices[consumer]
                was = state[consumer]
                state[consumer] = max(was, workspace.arrival[target] | (was & mask)) - 1
                if (was & mask) == 1 and own.listed[target] == 0 and consumer == start_order[started[target]]:
                    own.todo[n_todo], own.listed[target] = target, 1
                    n_todo += 1
    timeline.count[0], timeline.count[1] = n_transfers, step
    return OK if n_started == len(devices) else STUCK


@part
def run_eager(inputs: Inputs, devices, timeline: Timeline, workspace: Workspace[InOrder]):
    """Simulate one placement, uint32 ``(n,)`` and valid, under ``eager`` (R11); return OK, or STUCK if an op never ran.

    A copy is requested when its tensor is finished and its first consumer there is issued, whichever is later: the
    later of the two pushes the request.
    """
    n, n_devices = len(devices), len(inputs.slots)
    own, state, start_order, op_finish = workspace.own, workspace.state, timeline.start_order, timeline.op_finish
    issue, wanted, what, seen = own.issue, own.wanted, own.what, own.seen
    n_todo = _start_all(inputs, devices, 1, timeline, workspace)
    for number in range(n):
        op_finish[number] = -1
    for device in range(n_devices):
        seen[device] = -1
    n_issued = np.uint32(0)
    n_transfers, n_started, n_wanted, step, mark = NONE, 0, 0, np.int64(0), 0

    while True:
        # R11: the host issues ops until it has to run one of its own first.
        while n_issued < n:
            op = n_issued
            if op == 0:
                now = inputs.dispatch_ns[0]
            elif devices[op - 1] != inputs.host:
                now = issue[op - 1] + inputs.dispatch_ns[op]
            elif op_finish[op - 1] >= 0:
                now = op_finish[op - 1] + inputs.dispatch_ns[op]
            else:
                break
            issue[op] = now
            n_issued += np.uint32(1)
            device = devices[op]
            if _receive(inputs, state, op, now):
                n_todo = _visit(own, device, n_todo)
            for slot in range(inputs.input_ptr[op], inputs.input_ptr[op + 1]):
                tensor = inputs.inputs[slot]
                producer = inputs.tensor_producer[tensor]
                if devices[producer] == device or op_finish[producer] < 0:
                    continue
                where = inputs.consumer_ptr[tensor]
                while devices[inputs.consumers[where]] != device:
                    where += np.uint32(1)
                if inputs.consumers[where] == op:
                    pair = np.int64(tensor) * n_devices + device
                    n_wanted = push(wanted, what, 0, n_wanted, max(now, op_finish[producer]), pair)

        if n_todo > 0:
            source = np.uint32(own.todo[n_todo - 1])
            if _waits(inputs, workspace, start_order, source):
                n_todo -= 1
                own.listed[source] = 0
                continue
            op, now = _start(inputs, timeline, workspace, source)
            n_started += 1
            step = max(step, now)  # R6
            for tensor in range(inputs.output_ptr[op], inputs.output_ptr[op + 1]):
                workspace.sent_until[tensor] = -1
                mark += 1
                for where in range(inputs.consumer_ptr[tensor], inputs.consumer_ptr[tensor + 1]):
                    consumer = inputs.consumers[where]
                    target = devices[consumer]
                    if target == source:
                        _receive(inputs, state, consumer, now)
                    elif seen[target] != mark:
                        seen[target] = mark
                        if consumer < n_issued:
                            pair = np.int64(tensor) * n_devices + target
                            n_wanted = push(wanted, what, 0, n_wanted, max(now, issue[consumer]), pair)
            continue
        if n_wanted == 0:
            break

        # R3, R4: the next request.
        now, tensor, target = wanted[0], np.uint32(what[0] // n_devices), np.uint32(what[0] % n_devices)
        n_wanted = pop(wanted, what, 0, n_wanted)
        source = devices[inputs.tensor_producer[tensor]]
        start, finish = transfer(inputs, workspace.channel_end, source, target, tensor, now)
        log(timeline, workspace, n_transfers, tensor, target, start, finish)
        step = max(step, finish)
        n_transfers += ONE
        for where in range(inputs.consumer_ptr[tensor], inputs.consumer_ptr[tensor + 1]):
            if devices[inputs.consumers[where]] == target:
                _receive(inputs, state, inputs.consumers[where], finish)
        n_todo = _visit(own, target, n_todo)
    timeline.count[0], timeline.count[1] = n_transfers, step
    return OK if n_started == n else STUCK


@kernel
def run_many_in_order(
    inputs: Inputs,
    placements,
    first,
    stop,
    rank,
    below,
    timeline: Timeline,
    workspace: Workspace[InOrder],
    step,
    peak,
    overflow,
):
    """See :func:`simdev.sim.kernels.general.run_many`. ``rank`` is not read."""
    for row in range(first, stop):
        if not is_valid(inputs, placements[row]):
            return row
        if inputs.host >= 0:
            done = run_eager(inputs, placements[row], timeline, workspace)
        else:
            done = run_program(inputs, placements[row], timeline, workspace)
        if done != OK:
            return row
        measure(inputs, placements[row], row, below, timeline, workspace, step, peak, overflow)
    return -1
