"""Lines of ops per device, and how their tensors are sent (R3, R4).

A send is requested at the finish of its op, in the order (finish, op). The loops settle an op's finish when the op
starts, which may be far ahead; the op then waits in the ``sends`` of its device until no earlier request can appear.
The next request of all devices is the least of ``first_send``.
"""

from __future__ import annotations

import numpy as np

from simdev.sim.kernels.bits import IN_WORD, WORD, lowest_bit
from simdev.sim.kernels.compiled import inlined
from simdev.sim.kernels.queue import insert
from simdev.sim.kernels.state import NEVER, NONE, ONE, SHARED, Inputs, Timeline, Workspace


@inlined
def lay_out(inputs: Inputs, devices, workspace: Workspace, more):
    """Before a run: the places of each device's ops in ``line`` and ``sends``, empty; free channels and slots; and ops
    that miss their inputs and ``more``."""
    base, state = workspace.base, workspace.state
    for device in range(len(base)):
        base[device] = 0
    for op in range(len(devices)):
        base[devices[op] + 1] += 1
        state[op] = inputs.input_ptr[op + 1] - inputs.input_ptr[op] + more
    for device in range(len(base) - 1):
        base[device + 1] += base[device]
        workspace.started[device] = workspace.head[device] = workspace.end[device] = base[device]
        workspace.first_send[device] = NEVER
        workspace.free[device] = 0
    for slot in range(len(workspace.slot_free)):
        workspace.slot_free[slot] = 0
    for channel in range(len(workspace.channel_end)):
        workspace.channel_end[channel] = 0


@inlined
def leaves(inputs: Inputs, devices, op, source):
    """0 if all consumers of the op's tensors are on ``source``."""
    elsewhere = np.uint32(0)
    for edge in range(inputs.consumer_ptr[inputs.output_ptr[op]], inputs.consumer_ptr[inputs.output_ptr[op + 1]]):
        elsewhere |= devices[inputs.consumers[edge]] ^ source
    return elsewhere


@inlined
def postpone(workspace: Workspace, source, key, next_send):
    """Keep the sends of an op for later; return the earliest request of all devices."""
    front, stop = np.uint64(workspace.head[source]), np.uint64(workspace.end[source])
    workspace.end[source] += 1
    if insert(workspace.sends, front, stop, key) == front:
        workspace.first_send[source] = key
        next_send = min(next_send, key)
    return next_send


@inlined
def take_next(workspace: Workspace, source):
    """Remove the first postponed op of ``source``; return the earliest request of all devices."""
    head, first_send = workspace.head, workspace.first_send
    head[source] += 1
    first_send[source] = workspace.sends[head[source]] if head[source] < workspace.end[source] else NEVER
    return earliest(first_send)


@inlined
def earliest(keys):
    """The least of one key per device."""
    least = np.int64(NEVER)
    for device in range(len(keys)):
        least = min(least, keys[device])
    return least


@inlined
def transfer(inputs: Inputs, channel_end, source, target, tensor, now):
    """Start and finish of a transfer requested ``now``, under ``fifo`` and ``none`` (R4). Requests come in the order in
    which the channels serve them, so a request waits exactly for the transfers before it."""
    start, pair = now, np.uint32(source * len(inputs.pair_class) + target)
    if inputs.contention == SHARED:
        for hop in range(inputs.route_ptr[pair], inputs.route_ptr[pair + ONE]):
            start = max(start, channel_end[inputs.route[hop]])
    finish = start + inputs.transfer_ns[inputs.pair_class[source, target], tensor]
    if inputs.contention == SHARED:
        occupy(inputs, channel_end, pair, finish)
    return start, finish


@inlined
def occupy(inputs: Inputs, channel_end, pair, finish):
    """The channels from the first device of a pair to the second are busy until ``finish``."""
    for hop in range(inputs.route_ptr[pair], inputs.route_ptr[pair + ONE]):
        channel_end[inputs.route[hop]] = finish


@inlined
def log(timeline: Timeline, workspace: Workspace, number, tensor, target, start, finish):
    """Write down transfer ``number``."""
    timeline.x_tensor[number], timeline.x_target[number] = tensor, target
    timeline.x_start[number], timeline.x_finish[number] = start, finish
    if finish > workspace.sent_until[tensor]:
        workspace.sent_until[tensor], workspace.sent_last[tensor] = finish, number


@inlined
def n_words(inputs: Inputs):
    """Words of a set of devices."""
    return (np.uint64(len(inputs.pair_class) - 1) >> WORD) + ONE


@inlined
def destinations(inputs: Inputs, devices, tensor, source, word, words):
    """The devices other than ``source`` that have a consumer of ``tensor`` (R3), as the bits of a word: 64 devices a
    word. Taking the lowest bit visits them in order."""
    targets = NONE
    for where in range(inputs.consumer_ptr[tensor], inputs.consumer_ptr[tensor + 1]):
        target = np.uint64(devices[inputs.consumers[where]])
        if words == ONE or target >> WORD == word:
            targets |= ONE << (target & IN_WORD)
    if source >> WORD == word:
        targets &= ~(ONE << (source & IN_WORD))
    return targets


@inlined
def first_device(targets, word):
    """The lowest device of a word of :func:`destinations`."""
    return np.uint32(word << WORD) | np.uint32(lowest_bit(targets))


@inlined
def send(inputs: Inputs, devices, tensor, source, now, timeline: Timeline, workspace: Workspace, n_transfers, step):
    """Send ``tensor``, finished on device ``source`` at ``now``, to every other device that has a consumer (R3, R4),
    and set the ``arrival`` of those devices. Returns the number of transfers and the step time so far."""
    words = n_words(inputs)
    for word in range(words):
        targets = destinations(inputs, devices, tensor, source, word, words)
        while targets != NONE:
            target = first_device(targets, word)
            targets &= targets - ONE
            start, finish = transfer(inputs, workspace.channel_end, source, target, tensor, now)
            workspace.arrival[target] = finish << inputs.shift
            log(timeline, workspace, n_transfers, tensor, target, start, finish)
            step = max(step, finish)
            n_transfers += ONE
    return n_transfers, step
