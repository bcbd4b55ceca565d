"""The prologue after a move: its sends in order, without events (fact 4 of :mod:`simdev.sim.kernels.incremental`).

Times of the prologue are times of the step; all other times of the base hold ``total`` later. Tensors of the prologue
that stay on their device are there before any other op ends: they decide nothing but when seeds start, and count as 0.
"""

from __future__ import annotations

import numpy as np

from simdev.sim.kernels.base_run import load_channels, next_change, to_come
from simdev.sim.kernels.compiled import inlined, merged, part
from simdev.sim.kernels.move_state import BaseRun, MoveInputs, MoveWork
from simdev.sim.kernels.queue import drop, enqueue, peek
from simdev.sim.kernels.send import destinations, first_device, n_words, transfer
from simdev.sim.kernels.state import MASK, NEVER, NONE, ONE, SHARED, SHIFT


@part
def replay_prologue(inputs: MoveInputs, base: BaseRun, work: MoveWork, before, devices, moved):
    """Compute the prologue after a move, if the move touches it. False if it would not be over before the other ops, so
    that a full run has to tell. Sets the news, the ends of channels and devices after it, and whether the next window
    is ``fresh``: whether an op that reads from nothing else is moved or may start at another time."""
    move, size = work.move[0], base.size[0]
    touches, n_touched = touch_prologue(inputs, base, work, moved)
    if not touches:
        return True
    first = next_change(inputs, base, moved, 0)  # nothing differs before this finish
    for device in range(len(work.device)):
        work.device[device].early_end = 0 if move.reordered else base.device[device].early_end
    if move.reordered:
        since = run_sources(inputs, base, work, before, devices)
        if since < 0:
            return False
        first = min(first, first_finish_from(base, since, size.early))
    first = min(first, size.early)
    load_channels(inputs, base, before, work.channel_end, first)
    send_again(inputs, base, work, before, devices, first, n_touched)
    compare_channels(inputs, base, work, before)
    restart = news_of_readers(inputs, base, work, devices)
    restart = restart or moves_seed(inputs, base, moved)
    if move.reordered and not restart:
        restart = delays_seed(inputs, base, work, before, devices, moved)
    move.fresh, move.reached = restart, size.early
    move.spent += (size.early >> 5) + (move.news >> 2)
    return size.early < len(devices)


@inlined
def touch_prologue(inputs: MoveInputs, base: BaseRun, work: MoveWork, moved):
    """Whether a moved op is of the prologue, or reads from it or from nothing. The ops of the prologue whose sends
    change are marked as ``touched`` and written to ``carried``; returns their number, too."""
    move, early = work.move[0], base.size[0].early
    touches, count = False, 0
    for op in moved:
        if base.position[op] < early:
            move.reordered = 1
            count = touch(work, count, op)
        else:
            touches = touches or inputs.input_ptr[op] == inputs.input_ptr[op + 1]
            for slot in range(inputs.input_ptr[op], inputs.input_ptr[op + 1]):
                if base.position[inputs.producer[slot]] < early:
                    count = touch(work, count, inputs.producer[slot])
    return touches or count > 0, count


@merged
def touch(work: MoveWork, count, op):
    if work.op[op].touched != work.move[0].number:
        work.op[op].touched = work.move[0].number
        work.carried[count] = op
        count += 1
    return count


@inlined
def run_sources(inputs: MoveInputs, base: BaseRun, work: MoveWork, before, devices):
    """The finishes of the prologue's ops if some of them change device, and the ends of the devices. Returns a time
    before which no finish differs; -1 if the prologue would not be over before the other ops."""
    since, early = np.int64(NEVER), base.size[0].early
    for op in inputs.sources[:early]:
        here = work.device[devices[op]]
        if devices[op] != before[op]:
            since = min(since, base.op[op].finish, here.early_end + 1)
        here.early_end += inputs.op_ns[inputs.device_row[devices[op]], op]
        work.op[op].finish = here.early_end
    for device in range(len(work.device)):
        if work.device[device].early_end >= inputs.rest_ns[early]:
            return np.int64(-1)
    return since


@merged
def first_finish_from(base: BaseRun, since, stop):
    """The number of the first finish at or after a time, at most ``stop``."""
    low, high = np.int64(0), stop
    while low < high:
        middle = (low + high) >> 1
        if base.op[base.order[middle]].finish < since:
            low = middle + 1
        else:
            high = middle
    return low


@merged
def early_finish(base: BaseRun, work: MoveWork, op):
    """The finish of an op of the prologue after the move."""
    return work.op[op].finish if work.move[0].reordered else base.op[op].finish


@inlined
def send_again(inputs: MoveInputs, base: BaseRun, work: MoveWork, before, devices, first, n_touched):
    """Send what the prologue sends from finish ``first`` on, in order of (finish, op), and note the news."""
    number, n_senders, queue, heap = work.move[0].number, base.size[0].senders, work.queue, work.heap
    head, tail, n_heap = NONE, NONE, 0
    low = n_senders
    while low > 0 and base.senders[low - 1] >= first:
        low -= 1
    for index in range(low, n_senders):
        op = base.order[base.senders[index]]
        if work.op[op].touched != number:
            tail, n_heap = enqueue(queue, heap, head, tail, n_heap, (early_finish(base, work, op) << SHIFT) | op)
    for index in range(n_touched):
        op = work.carried[index]
        if base.position[op] >= first:
            tail, n_heap = enqueue(queue, heap, head, tail, n_heap, (early_finish(base, work, op) << SHIFT) | op)
    while head < tail or n_heap > 0:
        key, from_heap = peek(queue, heap, head, tail, n_heap)
        head, n_heap = drop(heap, head, n_heap, from_heap)
        send_tensors(inputs, base, work, before, devices, np.uint32(key & MASK), key >> SHIFT)


@inlined
def send_tensors(inputs: MoveInputs, base: BaseRun, work: MoveWork, before, devices, op, now):
    """Send the tensors of an op of the prologue that ends at ``now`` (R3, R4). Only a tensor of a touched op, or one
    that arrives at another time than in the base, can be news."""
    source, words, sent = devices[op], n_words(inputs), np.int64(base.sent[base.position[op]])
    touched = work.op[op].touched == work.move[0].number
    for tensor in range(inputs.output_ptr[op], inputs.output_ptr[op + 1]):
        differs = touched
        for word in range(words):
            targets = destinations(inputs, devices, tensor, source, word, words)
            while targets != NONE:
                target = first_device(targets, word)
                targets &= targets - ONE
                _, finish = transfer(inputs, work.channel_end, source, target, tensor, now)
                work.device[target].arrival = finish
                if not touched:
                    differs = differs or finish != base.transfer[sent].finish
                    sent += 1
        if differs:
            tell_readers(inputs, base, work, before, devices, op, tensor)


@merged
def tell_readers(inputs: MoveInputs, base: BaseRun, work: MoveWork, before, devices, op, tensor):
    """Note the readers of a tensor of the prologue that have it at another time than in the base."""
    move = work.move[0]
    for edge in range(inputs.consumer_ptr[tensor], inputs.consumer_ptr[tensor + 1]):
        reader = inputs.consumers[edge]
        there = work.device[devices[reader]].arrival if devices[reader] != devices[op] else np.int64(0)
        if there != (base.arrival[edge] if before[reader] != before[op] else np.int64(0)):
            work.edge[edge].touched, work.edge[edge].arrival = move.number, there
            if work.op[reader].touched != move.number:
                work.op[reader].touched = move.number
                work.news[move.news] = reader
                move.news += 1


@merged
def compare_channels(inputs: MoveInputs, base: BaseRun, work: MoveWork, before):
    """The ends of channels after the prologue, in the base and after the move, and whether they differ."""
    if inputs.contention != SHARED:
        return
    load_channels(inputs, base, before, work.base_channel_end, base.size[0].early)
    for channel in range(len(work.channel_end)):
        work.carried_channel_end[channel] = work.channel_end[channel]
        if work.channel_end[channel] != work.base_channel_end[channel]:
            work.move[0].channels_differ = 1


@merged
def early_arrival(base: BaseRun, work: MoveWork, edge):
    """When a consumer has its tensor from the prologue, after the move."""
    return work.edge[edge].arrival if work.edge[edge].touched == work.move[0].number else base.arrival[edge]


@inlined
def from_prologue(inputs: MoveInputs, base: BaseRun, work: MoveWork, devices, op):
    """When the last of what the prologue sends to ``op`` arrives, and of what it makes on the same device."""
    far, near = np.int64(0), np.int64(0)
    for slot in range(inputs.input_ptr[op], inputs.input_ptr[op + 1]):
        producer = inputs.producer[slot]
        if base.position[producer] < base.size[0].early:
            if devices[producer] != devices[op]:
                far = max(far, early_arrival(base, work, inputs.edge[slot]))
            else:
                near = max(near, early_finish(base, work, producer))
    return far, near


@inlined
def reads_prologue_only(inputs: MoveInputs, base: BaseRun, op):
    """Whether all inputs of an op are of the prologue."""
    last, _ = to_come(inputs, base, op, base.size[0].early)
    return last < 0


@inlined
def news_of_readers(inputs: MoveInputs, base: BaseRun, work: MoveWork, devices):
    """When each of the news has its inputs from the prologue. True if one of them reads from nothing else, and has them
    at another time."""
    restart = False
    for index in range(work.move[0].news):
        op = work.news[index]
        ready, _ = from_prologue(inputs, base, work, devices, op)
        work.op[op].early_ready = ready
        last, base.op[op].late_ready = to_come(inputs, base, op, base.size[0].early)
        restart = restart or (last < 0 and ready != base.op[op].early_ready)
    return restart


@merged
def moves_seed(inputs: MoveInputs, base: BaseRun, moved):
    """Whether a moved op, not of the prologue, reads from nothing else."""
    restart = False
    for op in moved:
        if base.position[op] >= base.size[0].early:
            restart = restart or reads_prologue_only(inputs, base, op)
    return restart


@inlined
def delays_seed(inputs: MoveInputs, base: BaseRun, work: MoveWork, before, devices, moved):
    """Whether an op that reads from the prologue only may start at another time, because the prologue ends at another
    time on its device."""
    number, early = work.move[0].number, base.size[0].early
    for op in moved:
        if base.position[op] < early:
            work.device[devices[op]].touched = work.device[before[op]].touched = number
    for op in inputs.seeds[: len(inputs.seeds) - early]:
        at = work.device[devices[op]]
        if at.touched == number and base.op[op].ready <= max(at.early_end, base.device[devices[op]].early_end):
            if reads_prologue_only(inputs, base, op):
                return True
    return False
