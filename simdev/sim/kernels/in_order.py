"""The kernels for devices of one slot that run their ops by number: the policy ``program`` and the ``eager`` runtime
(no ``fair`` contention, no gaps).

An op's start is settled as soon as its inputs are, so each device, and the host that issues ops, goes on until it lacks
an input. What is left then are sends: all that are not yet asked for will be asked for later than the earliest of those
that are, so that one is next.
"""

from __future__ import annotations

import numpy as np

from simdev.sim.inputs import Inputs
from simdev.sim.kernels.fifo import MASK, NEVER, NONE, ONE, SHIFT, Room, answer, send
from simdev.sim.kernels.general import OK, SHARED, STUCK, Timeline, check_devices
from simdev.sim.kernels.heap import kernel, part, pop, push


@part
def run_program(p: Inputs, devices, x: Timeline, s: Room):
    """Simulate one placement (uint32 ``(n,)``, checked) under ``program``; return :data:`OK`, or :data:`STUCK` where an
    op never ran."""
    n, n_devices = len(devices), len(p.slots)
    state, line, sends, sequence, base = s.state, s.line, s.sends, x.start_order, s.base
    started, head, end, first_send = s.started, s.head, s.end, s.first_send
    n_todo = _reset(p, devices, 0, x, s)
    for device in range(n_devices):
        head[device] = end[device] = base[device]
        first_send[device] = NEVER
    todo, listed = s.todo, s.listed  # devices that may be able to go on
    n_transfers, n_started, step = NONE, 0, np.int64(0)

    while True:
        if n_todo > 0:
            source = np.uint32(todo[n_todo - 1])
            spot = np.uint64(started[source])
            if spot == np.uint64(base[source + 1]) or (state[sequence[spot]] & MASK) > 0:
                n_todo -= 1
                listed[source] = 0
                continue
            op = sequence[spot]
            start = max(state[op] >> SHIFT, s.free[source])
            now = start + p.op_ns[p.device_row[source], op]
            x.op_start[op], x.op_finish[op], s.free[source] = start, now, now
            key = (now << SHIFT) | op
            line[spot] = key
            started[source] += 1
            n_started += 1
            step = max(step, now)
            away = np.uint32(0)
            for where in range(p.consumer_ptr[p.output_ptr[op]], p.consumer_ptr[p.output_ptr[op + 1]]):
                away |= devices[p.consumers[where]] ^ source
            if away != 0 and not p.alone[source]:
                sends[end[source]] = key
                if head[source] == end[source]:
                    first_send[source] = key
                end[source] += 1
                continue
        else:
            next_send = np.int64(NEVER)
            for device in range(n_devices):
                next_send = min(next_send, first_send[device])
            if next_send == NEVER:
                break
            op, now, away = np.uint32(next_send & MASK), next_send >> SHIFT, np.uint32(1)
            source = devices[op]
            head[source] += 1
            first_send[source] = sends[head[source]] if head[source] < end[source] else NEVER
        s.arrival[source] = now << SHIFT
        for tensor in range(p.output_ptr[op], p.output_ptr[op + 1]):
            s.sent_until[tensor] = -1
            if away != 0:
                n_transfers, step = send(p, devices, tensor, source, now, x, s, n_transfers, step)
            for where in range(p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]):
                consumer = p.consumers[where]
                target = devices[consumer]
                was = state[consumer]
                state[consumer] = max(was, s.arrival[target] | (was & MASK)) - 1
                if (was & MASK) == 1 and listed[target] == 0 and consumer == sequence[started[target]]:
                    todo[n_todo], listed[target] = target, 1
                    n_todo += 1
    x.count[0], x.count[1] = n_transfers, step
    return OK if n_started == n else STUCK


@part
def _reset(p: Inputs, devices, more, x: Timeline, s: Room):
    """Before a run: ops by device and number, each lacking its inputs and ``more``; all devices are to be looked at.
    Returns their number."""
    n_devices = len(p.slots)
    s.channel_end[:] = 0
    for device in range(n_devices + 1):
        s.base[device] = 0
    for op in range(len(devices)):
        s.base[devices[op] + 1] += 1
        s.state[op] = p.input_ptr[op + 1] - p.input_ptr[op] + more
    for device in range(n_devices):
        s.base[device + 1] += s.base[device]
        s.started[device] = s.base[device]
        s.free[device] = 0
        s.todo[device], s.listed[device] = device, 1
    for op in range(len(devices)):
        x.start_order[s.started[devices[op]]] = op
        s.started[devices[op]] += 1
    for device in range(n_devices):
        s.started[device] = s.base[device]
    return n_devices


@part
def run_eager(p: Inputs, devices, x: Timeline, s: Room):
    """Simulate one placement (uint32 ``(n,)``, checked) in the ``eager`` runtime (R11); return :data:`OK`, or
    :data:`STUCK` where an op never ran.

    A copy is asked for when its tensor is finished and its first reader there is issued, whichever is later.
    """
    n, n_devices = len(devices), len(p.slots)
    state, sequence, base, started = s.state, x.start_order, s.base, s.started
    op_finish, issue, wanted, what, seen = x.op_finish, s.sends, s.request, s.requested, s.first_send
    n_todo = _reset(p, devices, 1, x, s)
    todo, listed = s.todo, s.listed
    for op in range(n):
        op_finish[op] = -1
    for device in range(n_devices):
        seen[device] = -1
    n_issued = np.uint32(0)
    n_transfers, n_started, n_wanted, step, mark = NONE, 0, 0, np.int64(0), 0

    while True:
        # The host issues ops until one of its own has to run first.
        while n_issued < n:
            op = n_issued
            if op == 0:
                now = p.dispatch_ns[0]
            elif devices[op - 1] != p.host:
                now = issue[op - 1] + p.dispatch_ns[op]
            elif op_finish[op - 1] >= 0:
                now = op_finish[op - 1] + p.dispatch_ns[op]
            else:
                break
            issue[op] = now
            n_issued += np.uint32(1)
            device = devices[op]
            was = state[op]
            state[op] = max(was, (now << SHIFT) | (was & MASK)) - 1
            if (was & MASK) == 1 and listed[device] == 0:
                todo[n_todo], listed[device] = device, 1
                n_todo += 1
            for slot in range(p.input_ptr[op], p.input_ptr[op + 1]):
                tensor = p.inputs[slot]
                producer = p.tensor_producer[tensor]
                if devices[producer] == device or op_finish[producer] < 0:
                    continue
                where = p.consumer_ptr[tensor]
                while devices[p.consumers[where]] != device:
                    where += np.uint32(1)
                if p.consumers[where] == op:
                    pair = np.int64(tensor) * n_devices + device
                    n_wanted = push(wanted, what, 0, n_wanted, max(now, op_finish[producer]), pair)

        if n_todo > 0:
            source = np.uint32(todo[n_todo - 1])
            spot = np.uint64(started[source])
            if spot == np.uint64(base[source + 1]) or (state[sequence[spot]] & MASK) > 0:
                n_todo -= 1
                listed[source] = 0
                continue
            op = sequence[spot]
            start = max(state[op] >> SHIFT, s.free[source])
            now = start + p.op_ns[p.device_row[source], op]
            x.op_start[op], op_finish[op], s.free[source] = start, now, now
            s.line[spot] = (now << SHIFT) | op
            started[source] += 1
            n_started += 1
            step = max(step, now)
            for tensor in range(p.output_ptr[op], p.output_ptr[op + 1]):
                s.sent_until[tensor] = -1
                mark += 1
                for where in range(p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]):
                    consumer = p.consumers[where]
                    target = devices[consumer]
                    if target == source:
                        was = state[consumer]
                        state[consumer] = max(was, (now << SHIFT) | (was & MASK)) - 1
                    elif seen[target] != mark:
                        seen[target] = mark
                        if consumer < n_issued:
                            pair = np.int64(tensor) * n_devices + target
                            n_wanted = push(wanted, what, 0, n_wanted, max(now, issue[consumer]), pair)
            continue
        if n_wanted == 0:
            break

        # The next send (R3, R4).
        now, tensor, target = wanted[0], np.uint32(what[0] // n_devices), np.uint32(what[0] % n_devices)
        n_wanted = pop(wanted, what, 0, n_wanted)
        source = devices[p.tensor_producer[tensor]]
        pair = np.uint32(source * n_devices + target)
        start = now
        if p.contention == SHARED:
            for hop in range(p.route_ptr[pair], p.route_ptr[pair + ONE]):
                start = max(start, s.channel_end[p.route[hop]])
        finish = start + p.transfer_ns[p.pair_class[source, target], tensor]
        if p.contention == SHARED:
            for hop in range(p.route_ptr[pair], p.route_ptr[pair + ONE]):
                s.channel_end[p.route[hop]] = finish
        x.x_tensor[n_transfers], x.x_target[n_transfers] = tensor, target
        x.x_start[n_transfers], x.x_finish[n_transfers] = start, finish
        if finish > s.sent_until[tensor]:
            s.sent_until[tensor], s.sent_last[tensor] = finish, n_transfers
        step = max(step, finish)
        n_transfers += ONE
        for where in range(p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]):
            consumer = p.consumers[where]
            if devices[consumer] == target:
                was = state[consumer]
                state[consumer] = max(was, (finish << SHIFT) | (was & MASK)) - 1
        if listed[target] == 0:
            todo[n_todo], listed[target] = target, 1
            n_todo += 1
    x.count[0], x.count[1] = n_transfers, step
    return OK if n_started == n else STUCK


@kernel
def run_many_stream(p: Inputs, placements, first, stop, rank, below, x: Timeline, s: Room, step, peak, overflow):
    """What :func:`simdev.sim.kernels.general.run_many` does, under these rules."""
    for row in range(first, stop):
        if not check_devices(p, placements[row]):
            return row
        done = run_eager(p, placements[row], x, s) if p.host >= 0 else run_program(p, placements[row], x, s)
        if done != OK:
            return row
        answer(p, placements[row], row, below, x, s, step, peak, overflow)
    return -1
