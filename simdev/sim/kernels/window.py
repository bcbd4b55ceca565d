"""One window of a move: the part of the schedule from a difference to the state of the base again, a shift away.

A window begins with the state of the base just before one of its finishes. The state of an op is loaded when it first
matters; ops whose state may differ from the base are *suspects*. Times in a window are those of the base, and the sum
of the earlier shifts is added at the end; only what comes from the prologue has its own time (:mod:`.prologue`).

On a device, the ops that were running or waiting in the base when the window began come first: their finishes are those
of the base. The ops taken from the queue since then stand behind them.
"""

from __future__ import annotations

import numpy as np

from simdev.sim.kernels.base_run import advance_channels, load_channels, to_come
from simdev.sim.kernels.compiled import inlined, merged, part
from simdev.sim.kernels.heap import push_key
from simdev.sim.kernels.move_state import EVERY, BaseRun, MoveInputs, MoveWork
from simdev.sim.kernels.prologue import early_arrival, from_prologue
from simdev.sim.kernels.queue import drop, enqueue, peek
from simdev.sim.kernels.send import destinations, earliest, first_device, n_words, transfer
from simdev.sim.kernels.state import MASK, NEVER, NONE, ONE, SHARED, SHIFT

NIL = -1
FULL_RUN, AS_BASE = -1, -2  # ends of a window beside a step time
DIFFERS, SO_FAR, FOR_GOOD = 0, 1, 2  # how a suspect stands: not as in the base; as in the base; and from now on
WINDOW_COST = 4  # in finishes


@inlined
def open_window(inputs: MoveInputs, base: BaseRun, work: MoveWork, before, devices, first):
    """Load the state just before finish ``first`` of the base, with what differs from it."""
    move, window = work.move[0], work.window[0]
    window.number += 1
    window.first = window.done = first
    window.under_way = max(np.int64(base.under_way[first // EVERY]), np.int64(base.sent[base.size[0].early]))
    window.begin = window.now = 0 if move.fresh else base.op[base.order[first]].finish
    load_channels(inputs, base, before, work.channel_end, first)
    for channel in range(len(work.channel_end)):
        work.base_channel_end[channel] = work.channel_end[channel]
        if move.channels_differ:
            work.channel_end[channel] = work.carried_channel_end[channel]
    load_devices(base, work, before)
    window.suspects = 0
    if move.fresh:
        wait_for_devices(inputs, base, work, devices)
    else:
        wait_as_in_base(inputs, base, work, before)
    window.enqueued = window.suspects
    load_carried(inputs, base, work)
    move.windows += 1
    work.tally[0].windows += 1
    move.spent += WINDOW_COST + (max(0, base.sent[first] - window.under_way) >> 3)


@merged
def load_devices(base: BaseRun, work: MoveWork, before):
    """What runs on each device, and what waits there for others to end. When the prologue ends, nothing does."""
    fresh, window = work.move[0].fresh, work.window[0]
    shot = window.first // EVERY
    for device in range(len(work.device)):
        here = work.device[device]
        here.running, here.waiting = base.running[shot, device], base.waiting[shot, device]
    for number in range(shot * EVERY, window.first):
        work.device[before[base.order[number]]].running += 1
    for device in range(len(work.device)):
        here = work.device[device]
        if fresh:
            here.waiting = here.running
        while not fresh and here.waiting < base.device[device + 1].first:
            if base.op[base.sequence[here.waiting]].ready >= window.begin:
                break
            here.waiting += 1
        here.first_added = here.last_added = NIL
        work.first_finish[device] = NEVER
        here.free = here.early_end if fresh else 0
        if here.running < here.waiting:
            op = base.sequence[here.running]
            here.free = base.op[base.sequence[here.waiting - 1]].finish
            work.first_finish[device] = (base.op[op].finish << SHIFT) | op


@inlined
def follow(work: MoveWork, op, missing, ready):
    """Load the state of an op, and suspect it."""
    at, window = work.op[op], work.window[0]
    at.missing, at.ready, at.loaded, at.finish, at.listed = missing, ready, window.number, -1, 1
    work.suspects[window.suspects] = op
    window.suspects += 1


@inlined
def wait(work: MoveWork, op, ready):
    """Put an op that has all its inputs into the queue. Before the first event of a window, the suspects are exactly
    the ops in the queue, so their number is that of both."""
    push_key(work.heap, work.window[0].suspects, (ready << SHIFT) | op)
    follow(work, op, 0, ready)


@inlined
def wait_for_devices(inputs: MoveInputs, base: BaseRun, work: MoveWork, devices):
    """The queue when the prologue ends: the ops that read from nothing else."""
    early = base.size[0].early
    for op in inputs.seeds[: len(inputs.seeds) - early]:
        last, _ = to_come(inputs, base, op, early)
        if last < 0:
            far, near = from_prologue(inputs, base, work, devices, op)
            wait(work, op, max(far, near))


@inlined
def wait_as_in_base(inputs: MoveInputs, base: BaseRun, work: MoveWork, before):
    """The queue of the base: the ops that have all their inputs made, but not before this instant on their device. Such
    an op reads what the prologue sends, a tensor that is under way, or one that is made at this instant."""
    window = work.window[0]
    for index in range(base.size[0].late_readers):
        op = base.late_readers[index]
        if base.op[op].complete < window.first and base.op[op].ready >= window.begin:
            wait(work, op, base.op[op].ready)
    for number in range(window.under_way, base.sent[window.first]):
        sent = base.transfer[number]
        if sent.finish >= window.begin:
            readers_wait(inputs, base, work, before, np.int64(sent.tensor), np.int64(sent.target))
    number = window.first - 1
    while number >= 0 and base.op[base.order[number]].finish == window.begin:
        op = base.order[number]
        for tensor in range(inputs.output_ptr[op], inputs.output_ptr[op + 1]):
            readers_wait(inputs, base, work, before, np.int64(tensor), np.int64(before[op]))
        number -= 1


@inlined
def readers_wait(inputs: MoveInputs, base: BaseRun, work: MoveWork, before, tensor, target):
    """Put the ops on ``target`` that read a tensor and have all their inputs into the queue."""
    window = work.window[0]
    for edge in range(inputs.consumer_ptr[tensor], inputs.consumer_ptr[tensor + 1]):
        op = inputs.consumers[edge]
        if before[op] == target and base.op[op].complete < window.first and work.op[op].loaded != window.number:
            wait(work, op, base.op[op].ready)


@inlined
def received(inputs: MoveInputs, base: BaseRun, work: MoveWork, op, first, early):
    """The number of inputs that ``op`` misses before finish ``first`` of the base, and the arrival of the last of the
    others. Inputs from before finish ``early`` have a time of their own."""
    missing, ready, total = 0, np.int64(0), work.move[0].total
    for slot in range(inputs.input_ptr[op], inputs.input_ptr[op + 1]):
        place, edge = base.position[inputs.producer[slot]], inputs.edge[slot]
        if place >= first:
            missing += 1
        elif place >= early:
            ready = max(ready, base.arrival[edge])
        else:
            ready = max(ready, early_arrival(base, work, edge) - total)
    return missing, ready


@inlined
def load_carried(inputs: MoveInputs, base: BaseRun, work: MoveWork):
    """The state of the carried ops that still miss an input."""
    move, window = work.move[0], work.window[0]
    for index in range(move.carried):
        op = work.carried[index]
        missing, ready = 0, work.op[op].carried_ready
        for slot in range(inputs.input_ptr[op], inputs.input_ptr[op + 1]):
            place = base.position[inputs.producer[slot]]
            if place >= window.first:
                missing += 1
            elif place >= move.reached:
                ready = max(ready, base.arrival[inputs.edge[slot]])
        if missing > 0 and work.op[op].loaded == window.number:
            work.op[op].missing, work.op[op].ready = missing, ready
        elif missing > 0:
            follow(work, op, missing, ready)


@part
def run_window(inputs: MoveInputs, base: BaseRun, work: MoveWork, before, devices, moved, below):
    """Simulate until the state is that of the base, ``window.shift`` later: AS_BASE. Or the step time, if that never
    happens; a lower bound of the step time that is at least ``below``; FULL_RUN, if the move costs too much.

    As in :mod:`.fifo`, an op that is ready before the next finish starts next (fact 1 there). But ops finish, and send,
    in order, so that no send is postponed, and states can be compared.
    """
    move, window = work.move[0], work.window[0]
    head, tail, n_heap, highest = NONE, NONE, window.enqueued, np.int64(-1)
    done = window.first
    look_at = done + move.windows  # changes that follow close upon each other are cheaper in one window than in many
    next_finish = earliest(work.first_finish)
    while True:
        ready, from_heap = peek(work.queue, work.heap, head, tail, n_heap)
        if (ready >> SHIFT) < (next_finish >> SHIFT):
            # R1, R2: the place of this op is final.
            head, n_heap = drop(work.heap, head, n_heap, from_heap)
            op = np.uint32(ready & MASK)
            bound = line_up(inputs, work, devices, op, ready >> SHIFT) + inputs.tail[op] + move.total
            if bound >= below:
                return bound
            next_finish = min(next_finish, work.first_finish[devices[op]])
            continue
        if next_finish == NEVER:
            return window.now + move.total  # R6
        op = np.uint32(next_finish & MASK)
        if done >= look_at and done == highest + 1 and base.order[done] == op:
            # The same ops have finished as in the base.
            window.done = done
            same, look_at = compare(inputs, base, work, before, moved, next_finish >> SHIFT)
            if same:
                return np.int64(AS_BASE)
        move.spent += 1
        if move.spent > move.most:
            return np.int64(FULL_RUN)
        # R3, R4, R5: the op leaves its device, and its tensors arrive.
        window.now = next_finish >> SHIFT
        highest = max(highest, np.int64(base.position[op]))
        done += 1
        leave(base, work, devices, op)
        next_finish = earliest(work.first_finish)
        for tensor in range(inputs.output_ptr[op], inputs.output_ptr[op + 1]):
            send_tensor(inputs, work, devices, tensor, devices[op], window.now)
            tail, n_heap = receive(inputs, base, work, devices, tensor, head, tail, n_heap)


@merged
def line_up(inputs: MoveInputs, work: MoveWork, devices, op, ready):
    """Put an op behind the others of its device (R1); return its finish."""
    device = devices[op]
    here, at = work.device[device], work.op[op]
    finish = max(ready, here.free) + inputs.op_ns[inputs.device_row[device], op]
    here.free = at.finish = finish
    at.after = NIL
    if here.last_added == NIL:
        here.first_added = op
        if here.running == here.waiting:
            work.first_finish[device] = (finish << SHIFT) | op
    else:
        work.op[here.last_added].after = op
    here.last_added = op
    return finish


@merged
def leave(base: BaseRun, work: MoveWork, devices, op):
    """The first op of a device has finished: which one is next there?"""
    device = devices[op]
    home = work.device[device]
    if home.running < home.waiting:
        home.running += 1
    else:
        home.first_added = work.op[op].after
        if home.first_added == NIL:
            home.last_added = NIL
    if home.running < home.waiting:
        other = base.sequence[home.running]
        work.first_finish[device] = (base.op[other].finish << SHIFT) | other
    elif home.first_added != NIL:
        work.first_finish[device] = (work.op[home.first_added].finish << SHIFT) | home.first_added
    else:
        work.first_finish[device] = NEVER


@inlined
def send_tensor(inputs: MoveInputs, work: MoveWork, devices, tensor, source, now):
    """Set the arrival of a tensor on its device and on those that it is sent to (R3, R4)."""
    work.device[source].arrival = now
    words = n_words(inputs)
    for word in range(words):
        targets = destinations(inputs, devices, tensor, source, word, words)
        while targets != NONE:
            target = first_device(targets, word)
            targets &= targets - ONE
            _, work.device[target].arrival = transfer(inputs, work.channel_end, source, target, tensor, now)


@inlined
def receive(inputs: MoveInputs, base: BaseRun, work: MoveWork, devices, tensor, head, tail, n_heap):
    """As :func:`simdev.sim.kernels.queue.deliver`, with states that are loaded here. Returns ``tail``, ``n_heap``."""
    window = work.window[0]
    for edge in range(inputs.consumer_ptr[tensor], inputs.consumer_ptr[tensor + 1]):
        consumer = inputs.consumers[edge]
        at = work.op[consumer]
        if at.loaded != window.number:
            missing, ready = received(inputs, base, work, consumer, window.first, base.size[0].early)
            follow(work, consumer, missing, ready)
        elif at.listed == 0:
            at.listed, work.suspects[window.suspects] = 1, consumer
            window.suspects += 1
        at.ready = max(at.ready, work.device[devices[consumer]].arrival)
        at.missing -= 1
        if at.missing == 0:
            tail, n_heap = enqueue(work.queue, work.heap, head, tail, n_heap, (at.ready << SHIFT) | consumer)
    return tail, n_heap


@inlined
def compare(inputs: MoveInputs, base: BaseRun, work: MoveWork, before, moved, now):
    """Whether the state at time ``now`` before finish ``window.done``, which is that of the same op in the base, is the
    state of the base, ``window.shift`` later. Returns also the next finish at which to compare: to compare at every
    finish would cost more than it saves."""
    move, window = work.move[0], work.window[0]
    look_at = settled_from(base, moved, window.done)
    if look_at > window.done:
        return False, look_at
    at_base = base.op[base.order[window.done]].finish
    window.shift = now - at_base
    if window.shift != 0:
        for device in range(len(work.device)):
            if work.device[device].running != work.device[device].waiting:
                return False, window.done  # a finish of the base is not shifted
        follow_under_way(inputs, base, work, before)
    index = np.int64(0)
    while index < window.suspects:
        op = work.suspects[index]
        verdict = stands(base, work, op, now, at_base)
        if verdict == DIFFERS:
            break
        if verdict == SO_FAR:
            index += 1
        else:
            window.suspects -= 1
            work.suspects[index] = work.suspects[window.suspects]
            work.op[op].listed = 0
    move.spent += index >> 4
    same = index == window.suspects
    if not same:  # compared first next time
        op = work.suspects[index]
        work.suspects[index], work.suspects[0] = work.suspects[0], op
    return same, window.done + (index >> 2)


@merged
def settled_from(base: BaseRun, moved, number):
    """``number`` if every moved op either has finished or misses an input before finish ``number`` of the base; else
    the first finish at which that may hold."""
    for op in moved:
        if base.op[op].complete < number <= base.position[op]:
            return np.int64(base.position[op]) + 1
    return number


@merged
def stands(base: BaseRun, work: MoveWork, op, now, at_base):
    """How the state of a suspect stands to that of the base: DIFFERS, SO_FAR or FOR_GOOD."""
    here, there, window = work.op[op], base.op[op], work.window[0]
    if base.position[op] < window.done:
        return FOR_GOOD
    if here.finish >= 0:
        as_base = there.ready < at_base and here.finish == there.finish + window.shift
        return SO_FAR if as_base else DIFFERS
    if here.missing > 0:
        return SO_FAR  # it is carried to the finish after which it misses nothing
    # It is in the queue here, so it must not be taken out of it yet there.
    as_base = there.ready >= at_base and max(here.ready, now) == there.ready + window.shift
    return SO_FAR if as_base else DIFFERS


@inlined
def follow_under_way(inputs: MoveInputs, base: BaseRun, work: MoveWork, before):
    """Suspect, once a window, the readers of what is under way since before the window: it does not arrive a shift
    later."""
    move, window = work.move[0], work.window[0]
    for number in range(window.under_way, base.sent[window.first]):
        sent = base.transfer[number]
        if sent.finish >= window.begin:
            for edge in range(inputs.consumer_ptr[sent.tensor], inputs.consumer_ptr[sent.tensor + 1]):
                op = inputs.consumers[edge]
                if before[op] == sent.target and work.op[op].loaded != window.number:
                    missing, ready = received(inputs, base, work, op, window.first, base.size[0].early)
                    follow(work, op, missing, ready)
    move.spent += max(0, base.sent[window.first] - window.under_way) >> 3
    window.under_way = max(window.under_way, np.int64(base.sent[window.first]))


@inlined
def carry(inputs: MoveInputs, base: BaseRun, work: MoveWork, before):
    """After a window: list what still differs from the base and matters to later events only."""
    move, window = work.move[0], work.window[0]
    at_base, shift = base.op[base.order[window.done]].finish, window.shift
    move.carried = move.channels_differ = 0
    for index in range(window.suspects):
        op = work.suspects[index]
        at = work.op[op]
        if at.finish < 0 and at.missing > 0:
            _, ready = received(inputs, base, work, op, window.done, 0)
            if max(at.ready - shift, at_base) != max(ready, at_base):
                work.carried[move.carried], at.carried_ready = op, at.ready - shift
                move.carried += 1
    if inputs.contention == SHARED:
        advance_channels(inputs, base, before, work.base_channel_end, window.first, window.done)
        for channel in range(len(work.channel_end)):
            end, base_end = work.channel_end[channel] - shift, work.base_channel_end[channel]
            differs = max(end, at_base) != max(base_end, at_base)
            work.carried_channel_end[channel] = end if differs else base_end
            if differs:
                move.channels_differ = 1
    move.total += shift
    move.reached, move.fresh = window.done, 0
