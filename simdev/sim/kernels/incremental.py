"""The kernel behind :class:`simdev.sim.Simulator`: the step time after a few ops changed device, without a full run.

A full run of the accepted placement is recorded as the *base* (:mod:`.base_run`). A move changes a small part of it.
Four facts make it exact to simulate that part only, for the default rules (:mod:`.fifo`) on devices of one slot.

1. *Nothing differs before it can.* Up to the first finish of a producer of a moved op, the base holds.
2. *Equal states have equal futures.* Let the same ops have finished as in the base, and let everything that the future
   depends on be as in the base, but for a *shift* of time: what runs, what is ready, what is under way, and when each
   channel is free. Then the rest of the base holds as well, shifted. A *window* (:mod:`.window`) is simulated from a
   difference to such a state.
3. *A difference may wait.* An op that misses an input may have another input at another time, and a channel may be free
   at another time, without consequences until the op misses nothing, or a transfer meets the channel. So such ops and
   channels are *carried*, and the next window begins at the first finish that makes one of them matter.
4. *The prologue has no events.* The ops without inputs (parameters) come first on their devices. Those that finish
   before any other op can finish are the prologue: finishes 0 to ``early`` of every placement. Their sends are computed
   in order (:mod:`.prologue`). Tensors of the prologue keep their own times while the rest of the base is shifted. So
   an op that reads one may be ready at another time, and a window begins where such an op misses nothing any more.

Invariant of the loop over windows: the finishes of the base before ``reached`` hold, those after the prologue ``total``
later; the state then is that of the base, but for the carried ops and channels, and the news of the prologue. Every
transfer ends before its consumer, so ``total`` is the change of the step time if no difference is left.
"""

from __future__ import annotations

import numpy as np

from simdev.sim.kernels.base_run import next_change, pair_of, to_come
from simdev.sim.kernels.compiled import inlined, kernel, merged
from simdev.sim.kernels.move_state import BaseRun, MoveInputs, MoveWork
from simdev.sim.kernels.prologue import replay_prologue
from simdev.sim.kernels.send import occupy
from simdev.sim.kernels.window import AS_BASE, FULL_RUN, carry, open_window, run_window

SOONEST = 4  # with k moves given up of late, one is given up after n >> min(k + 1, SOONEST) finishes
MANY = 3  # moves of more than n >> MANY ops are full runs
LONGEST_PAUSE = 5  # after k moves given up of late, the next 2**min(k, LONGEST_PAUSE) - 1 are full runs


@kernel
def steps_after(
    inputs: MoveInputs, base: BaseRun, work: MoveWork, before, devices, move_ptr, ops, targets, below, step
):
    """The step time after each move alone, into ``step``; where it is not less than ``below``, a lower bound of it that
    is at least ``below``; FULL_RUN where only a full run is exact or quick. Move ``i`` takes the ops
    ``ops[move_ptr[i]:move_ptr[i + 1]]`` from their devices in ``before`` to ``targets``; ``devices`` (uint32 ``(n,)``)
    equals ``before`` at the begin and at the end."""
    move, tally = work.move[0], work.tally[0]
    for row in range(len(step)):
        step[row] = FULL_RUN
        moved = ops[move_ptr[row] : move_ptr[row + 1]]
        if len(moved) > len(devices) >> MANY or tally.pause > 0:
            tally.pause = max(0, tally.pause - 1)
            tally.full_runs += 1
            continue
        for index in range(len(moved)):
            devices[moved[index]] = targets[move_ptr[row] + index]
        step[row] = step_after(inputs, base, work, before, devices, moved, below)
        for op in moved:
            devices[op] = before[op]
        if step[row] != FULL_RUN:
            tally.given_up = max(0, tally.given_up - 1)
            continue
        tally.full_runs += 1
        if move.spent > move.most:
            tally.given_up = min(tally.given_up + 1, LONGEST_PAUSE)
            tally.pause = (1 << tally.given_up) - 1


@merged
def step_after(inputs: MoveInputs, base: BaseRun, work: MoveWork, before, devices, moved, below):
    """See :func:`steps_after`; ``devices`` is the placement after the move."""
    move = work.move[0]
    move.number += 1
    move.most = max(len(devices) >> min(work.tally[0].given_up + 1, SOONEST), 64)
    move.total = move.reached = move.spent = move.windows = move.news = move.carried = 0
    move.fresh = move.reordered = move.channels_differ = 0
    if not replay_prologue(inputs, base, work, before, devices, moved):
        return np.int64(FULL_RUN)
    while True:
        first = next_difference(inputs, base, work, before, moved)
        if first == len(devices):
            return base.size[0].step_ns + move.total
        open_window(inputs, base, work, before, devices, first)
        end = run_window(inputs, base, work, before, devices, moved, below)
        if end != AS_BASE:
            return end
        carry(inputs, base, work, before)


@inlined
def next_difference(inputs: MoveInputs, base: BaseRun, work: MoveWork, before, moved):
    """The finish of the base at which the next window begins; the number of ops if nothing differs any more."""
    move = work.move[0]
    if move.fresh:
        return move.reached
    first = next_change(inputs, base, moved, move.reached)
    first = min(first, next_reader(base, work))
    for index in range(move.carried):
        op = work.carried[index]
        last, ready = to_come(inputs, base, op, move.reached)
        if max(ready, work.op[op].carried_ready) != base.op[op].ready:
            first = min(first, last)
    if move.channels_differ:
        first = first_crossing(inputs, base, work, before, first)
    return first


@inlined
def next_reader(base: BaseRun, work: MoveWork):
    """The first finish that completes the inputs of an op which is then ready at another time than in the base, because
    of what comes from the prologue; the number of ops if there is none."""
    move, found = work.move[0], np.int64(len(base.op))
    for index in range(move.news):
        op = work.news[index]
        at = base.op[op]
        if move.reached <= at.complete < found:
            there = work.op[op].early_ready - move.total
            if max(there, at.late_ready) != max(at.early_ready, at.late_ready):
                found = np.int64(at.complete)
    if move.total == 0:
        return found
    for index in range(first_reader(base, move.reached), base.size[0].readers):
        op = base.readers[index]
        at = base.op[op]
        if at.complete >= found:
            break
        if work.op[op].touched != move.number:  # else it is among the news
            if max(at.early_ready - move.total, at.late_ready) != max(at.early_ready, at.late_ready):
                return np.int64(at.complete)
    return found


@merged
def first_reader(base: BaseRun, reached):
    """The first of ``base.readers`` whose inputs are not complete before finish ``reached``."""
    low, high = np.int64(0), base.size[0].readers
    while low < high:
        middle = (low + high) >> 1
        if base.op[base.readers[middle]].complete < reached:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def first_crossing(inputs: MoveInputs, base: BaseRun, work: MoveWork, before, change):
    """The finish of the producer of the next transfer, before finish ``change``, that meets a channel which is free at
    another time than in the base; else ``change``. Brings both sets of channels up to it, and clears
    ``channels_differ`` if they are the same then."""
    move, first, stop = work.move[0], np.int64(base.sent[work.move[0].reached]), base.sent[len(before)]
    ends, base_ends, until = work.carried_channel_end, work.base_channel_end, np.int64(0)
    for channel in range(len(ends)):
        if base_ends[channel] != ends[channel]:
            until = max(until, base_ends[channel], ends[channel])
    while first < stop:
        op = inputs.tensor_producer[base.transfer[first].tensor]
        number, now = np.int64(base.position[op]), base.op[op].finish
        if number >= change:
            break
        if now >= until:
            move.channels_differ = 0
            break
        for transfer in range(first, base.sent[number + 1]):
            pair = pair_of(inputs, before, base.transfer[transfer])
            for hop in range(inputs.route_ptr[pair], inputs.route_ptr[pair + 1]):
                channel = inputs.route[hop]
                if max(base_ends[channel], now) != max(ends[channel], now):
                    return number
        for transfer in range(first, base.sent[number + 1]):
            sent = base.transfer[transfer]
            pair = pair_of(inputs, before, sent)
            occupy(inputs, base_ends, pair, sent.finish)
            occupy(inputs, ends, pair, sent.finish)
        first = np.int64(base.sent[number + 1])
    return change
