"""Record a run as the base of moves (:class:`simdev.sim.kernels.move_state.BaseRun`)."""

from __future__ import annotations

import numpy as np

from simdev.sim.kernels.compiled import inlined, kernel, merged, part
from simdev.sim.kernels.heap import pop_key, push_key
from simdev.sim.kernels.move_state import EVERY, BaseRun, MoveInputs, MoveWork
from simdev.sim.kernels.send import occupy
from simdev.sim.kernels.state import MASK, SHARED, SHIFT, Timeline, Whole


@kernel
def record(inputs: MoveInputs, devices, timeline: Timeline, state, first, line, base: BaseRun, work: MoveWork):
    """Keep as base what :func:`simdev.sim.kernels.fifo.run_fifo` left in ``timeline`` and in ``state``, ``base`` and
    ``line`` of its workspace. Each device's ops stand in ``line`` in the order of their finishes, so merging the lines
    visits the finishes of all devices in order."""
    n, transfer, oldest = len(devices), 0, 0
    copy_run(timeline, state, base)
    n_heap = open_lines(first, line, base, work)
    for number in range(n):
        op, now = np.uint32(work.heap[0] & MASK), work.heap[0] >> SHIFT
        n_heap = pop_key(work.heap, n_heap)
        if number % EVERY == 0:
            oldest = snapshot(timeline, first, base, work, number // EVERY, now, oldest, transfer)
        home = work.device[devices[op]]
        home.running += 1
        if home.running < first[devices[op] + 1]:
            n_heap = push_key(work.heap, n_heap, line[home.running])
        base.order[number], base.position[op], base.sent[number] = op, number, transfer
        transfer = follow_tensors(inputs, devices, timeline, base, work, op, number, now, transfer)
    base.sent[n] = transfer
    base.size[0].step_ns = timeline.count[1]
    find_prologue(inputs, devices, base)
    list_readers(inputs, devices, base, work)


@merged
def copy_run(timeline: Timeline, state, base: BaseRun):
    """The times of the ops. (Copies of whole arrays would take seconds to compile.)"""
    for op in range(len(base.op)):
        at = base.op[op]
        at.finish, at.ready, base.sequence[op] = timeline.op_finish[op], state[op] >> SHIFT, timeline.start_order[op]


@merged
def open_lines(first, line, base: BaseRun, work: MoveWork):
    """Before the first finish: free channels, and the first op of each device in the heap; return their number."""
    n_heap, n_devices = 0, len(work.device)
    for channel in range(len(work.channel_end)):
        work.channel_end[channel] = 0
    base.device[n_devices].first = first[n_devices]
    for device in range(n_devices):
        base.device[device].first = work.device[device].running = work.device[device].waiting = first[device]
        if first[device] < first[device + 1]:
            n_heap = push_key(work.heap, n_heap, line[first[device]])
    return n_heap


@merged
def snapshot(timeline: Timeline, first, base: BaseRun, work: MoveWork, row, now, oldest, transfer):
    """Write row ``row`` of the snapshots. Of the transfers before ``transfer``, those before ``oldest`` have ended;
    return the new ``oldest``."""
    while oldest < transfer and timeline.x_finish[oldest] < now:
        oldest += 1
    base.under_way[row] = oldest
    for channel in range(len(work.channel_end)):
        base.channel_end[row, channel] = work.channel_end[channel]
    for device in range(len(work.device)):
        at = work.device[device]
        while at.waiting < first[device + 1] and base.op[base.sequence[at.waiting]].ready < now:
            at.waiting += 1
        base.running[row, device], base.waiting[row, device] = at.running, at.waiting
    return oldest


@merged
def follow_tensors(inputs: MoveInputs, devices, timeline: Timeline, base, work, op, number, now, transfer):
    """Where the tensors of ``op`` arrive after finish ``number``; return the first transfer that is not one of
    theirs."""
    source, n_transfers = devices[op], timeline.count[0]
    for tensor in range(inputs.output_ptr[op], inputs.output_ptr[op + 1]):
        work.device[source].arrival = now
        while transfer < n_transfers and timeline.x_tensor[transfer] == tensor:
            target, finish, sent = timeline.x_target[transfer], timeline.x_finish[transfer], base.transfer[transfer]
            sent.tensor, sent.target, sent.finish = tensor, target, finish
            work.device[target].arrival = finish
            if inputs.contention == SHARED:
                occupy(inputs, work.channel_end, np.uint32(source * len(inputs.pair_class) + target), finish)
            transfer += 1
        for edge in range(inputs.consumer_ptr[tensor], inputs.consumer_ptr[tensor + 1]):
            reader = inputs.consumers[edge]
            base.arrival[edge] = work.device[devices[reader]].arrival
            base.op[reader].complete = number
    return transfer


@merged
def find_prologue(inputs: MoveInputs, devices, base: BaseRun):
    """The longest prologue: the first sources, if the last of them ends before any other op can."""
    early, latest = 0, np.int64(0)
    for device in range(len(base.device)):
        base.device[device].early_end = 0
    for number in range(len(inputs.sources)):
        op = inputs.sources[number]
        at = base.device[devices[op]]
        at.early_end += inputs.op_ns[inputs.device_row[devices[op]], op]
        latest = max(latest, at.early_end)
        if latest < inputs.rest_ns[number + 1]:
            early = number + 1
    for op in inputs.sources[early:]:
        base.device[devices[op]].early_end -= inputs.op_ns[inputs.device_row[devices[op]], op]
    size = base.size[0]
    size.early, size.senders = early, 0
    for number in range(early):
        if base.sent[number + 1] > base.sent[number]:
            base.senders[size.senders] = number
            size.senders += 1


@merged
def list_readers(inputs: MoveInputs, devices, base: BaseRun, work: MoveWork):
    """The ops that read what the prologue sends: when it has all arrived, and what they wait for besides."""
    size, n_heap = base.size[0], 0
    size.readers = size.late_readers = 0
    for number in range(len(base.op)):
        base.op[number].early_ready = 0
    for transfer in range(base.sent[size.early]):
        sent = base.transfer[transfer]
        for edge in range(inputs.consumer_ptr[sent.tensor], inputs.consumer_ptr[sent.tensor + 1]):
            op = inputs.consumers[edge]
            at = base.op[op]
            if devices[op] == sent.target:
                if at.early_ready == 0:
                    _, at.late_ready = to_come(inputs, base, op, size.early)
                    n_heap = push_key(work.heap, n_heap, (np.int64(at.complete) << SHIFT) | op)
                at.early_ready = max(at.early_ready, sent.finish)
    while n_heap > 0:
        op = np.uint32(work.heap[0] & MASK)
        n_heap = pop_key(work.heap, n_heap)
        base.readers[size.readers] = op
        size.readers += 1
        if base.op[op].early_ready >= base.op[op].late_ready:
            base.late_readers[size.late_readers] = op
            size.late_readers += 1


@inlined
def to_come(inputs: MoveInputs, base: BaseRun, op, number):
    """Of the inputs of ``op`` that are made by finish ``number`` of the base or later: the last of those finishes
    (-1: there are none), and when the last arrives."""
    last, ready = np.int64(-1), np.int64(0)
    for slot in range(inputs.input_ptr[op], inputs.input_ptr[op + 1]):
        place = np.int64(base.position[inputs.producer[slot]])
        if place >= number:
            last, ready = max(last, place), max(ready, base.arrival[inputs.edge[slot]])
    return last, ready


@part
def next_change(inputs: MoveInputs, base: BaseRun, moved, first):
    """The first finish, from ``first`` on, of a producer of a moved op; the number of ops if there is none."""
    found: Whole = len(base.position)
    for op in moved:
        for slot in range(inputs.input_ptr[op], inputs.input_ptr[op + 1]):
            place = np.int64(base.position[inputs.producer[slot]])
            if first <= place < found:
                found = place
    return found


@part
def load_channels(inputs: MoveInputs, base: BaseRun, before, channel_end, number):
    """The ends of channels in the base, just before finish ``number``."""
    row = number // EVERY
    for channel in range(len(channel_end)):
        channel_end[channel] = base.channel_end[row, channel]
    advance_channels(inputs, base, before, channel_end, row * EVERY, number)


@part
def advance_channels(inputs: MoveInputs, base: BaseRun, before, channel_end, first, number):
    """Bring ends of channels in the base from before finish ``first`` to before finish ``number``."""
    if inputs.contention == SHARED:
        for transfer in range(base.sent[first], base.sent[number]):
            sent = base.transfer[transfer]
            occupy(inputs, channel_end, pair_of(inputs, before, sent), sent.finish)


@merged
def pair_of(inputs: MoveInputs, before, sent):
    """The pair of devices of a transfer of the base."""
    return np.uint32(before[inputs.tensor_producer[sent.tensor]] * len(inputs.pair_class) + sent.target)
