"""The kernel behind :class:`simdev.sim.Simulator`: the step time after a few ops changed device, without a full run.

Until the first finish of a producer of a moved op nothing differs from the recorded run (the *base*). From there a
window is simulated, until everything that the future depends on is what it was in the base, some time ``shift`` earlier
or later: the same ops have finished, and every device stands as it stood, shifted. Then the rest of the base holds as
well, shifted, up to where something that still differs is met: the next producer of a moved op, a channel that is free
at another time, or an op with an input that arrived at another time. There the next window begins. No transfer outlasts
the consumer it is for, so the shifts sum to the change of the step time. Times inside a window are those of the base:
what earlier windows shifted is added at the end.

Ops without inputs (parameters) come first on their devices, and those that are over before any other op can be are
the *prologue*: finishes ``0`` to ``early`` of any placement. What a move changes there is worked out without events,
send by send. What arrives at another time than in the base, and after a shift all that is still on its way, makes the
next window begin where an op would be ready at another time for it. Only where an op that reads from nothing else is
touched does a window begin at once.

Holds for the default rules (see :mod:`simdev.sim._fifo`) on devices of one slot.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from simdev.sim._fifo import MASK, NEVER, SHIFT, Room
from simdev.sim._heap import part, pop_key, push_key, sort_pairs
from simdev.sim._kernel import SHARED, Timeline
from simdev.sim.arrays import Inputs

EVERY = 64  # finishes between two snapshots
NEAR = 32  # as in _fifo
NIL = np.uint32(0xFFFFFFFF)
EXACT, NOT_BELOW, GAVE_UP, HOPELESS = 0, 1, 2, 3
FULL_RUN = -1
WINDOW_COST = 4  # in finishes
SOONEST = 4  # with k moves given up lately, one is given up after n >> min(k + 1, SOONEST) finishes
MANY = 3  # moves of more than n >> MANY ops are full runs
LONGEST_PAUSE = 5  # and the next 2**min(k, LONGEST_PAUSE) - 1 are full runs


class Base(NamedTuple):
    """The recorded run, with finishes numbered in the order (time, op): ``order`` and its inverse ``position``;
    ``complete`` the finish that completes an op's inputs;
    ``arrival`` int64 ``(e,)`` when each consumer had its tensor; ``sequence`` the ops by device and start. Transfers
    are in order of request, those from ``sent[i]`` on after finish ``i``. Row ``i`` of a snapshot is what was just
    before finish ``i * EVERY``: ends of channels, and per device the position in ``sequence`` of the first op that has
    not finished and of the first that is not yet ready; ``under_way`` the first transfer that had not ended.
    ``early[0]`` is the length of the prologue, ``early_end`` when it ends on each device. ``early_ready`` and
    ``late_ready`` are when an op has its inputs from the prologue's ops on other devices, and its other inputs;
    ``readers[:early[1]]`` are the ops with any of the former, and the first ``early[2]`` wait for those last."""

    finish: np.ndarray
    ready: np.ndarray
    order: np.ndarray
    position: np.ndarray
    complete: np.ndarray
    arrival: np.ndarray
    sequence: np.ndarray
    sequence_ptr: np.ndarray
    x_tensor: np.ndarray
    x_target: np.ndarray
    x_finish: np.ndarray
    sent: np.ndarray
    channel_end: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    under_way: np.ndarray
    step: np.ndarray
    early: np.ndarray
    early_end: np.ndarray
    early_ready: np.ndarray
    late_ready: np.ndarray
    readers: np.ndarray


class Graph(NamedTuple):
    """What does not change: ``producer`` and ``edge`` of each input of each op; ``sources`` the ops without inputs, in
    order; ``rest_ns[k]`` the least duration of all ops but the first ``k`` sources; ``seeds`` the ops that read from
    sources alone, and the sources; ``tail`` a lower bound of the time from the end of an op to that of the step."""

    producer: np.ndarray
    edge: np.ndarray
    sources: np.ndarray
    rest_ns: np.ndarray
    seeds: np.ndarray
    tail: np.ndarray


class Window(NamedTuple):
    """Working arrays. ``epoch``: window number, then request number. ``fate``: moves given up lately, moves still
    to be run in full, windows simulated, finishes simulated, full runs asked for. Where ``touched`` or ``edge_epoch``
    is the number of the present prologue, ``early_ready`` and ``edge_arrival`` are what they are in the base, after
    the move; ``news`` are the ops for which that is so."""

    finish: np.ndarray
    ready: np.ndarray
    missing: np.ndarray
    loaded: np.ndarray
    dirty: np.ndarray
    in_dirty: np.ndarray
    after: np.ndarray
    queue: np.ndarray
    heap: np.ndarray
    heap_item: np.ndarray
    channel_end: np.ndarray
    base_channel_end: np.ndarray
    carried_channel_end: np.ndarray
    carried: np.ndarray
    carried_ready: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    first_added: np.ndarray
    last_added: np.ndarray
    free: np.ndarray
    first_finish: np.ndarray
    stamp: np.ndarray
    arrival: np.ndarray
    request: np.ndarray
    epoch: np.ndarray
    fate: np.ndarray
    touched: np.ndarray
    edge_epoch: np.ndarray
    edge_arrival: np.ndarray
    early_end: np.ndarray
    early_ready: np.ndarray
    news: np.ndarray


def new_base(n_ops: int, n_edges: int, n_devices: int, n_channels: int) -> Base:
    """Room for the record of one run."""
    long, short, rows = np.int64, np.uint32, n_ops // EVERY + 1
    return Base(
        np.zeros(n_ops, long), np.zeros(n_ops, long), np.zeros(n_ops, short), np.zeros(n_ops, short),
        np.zeros(n_ops, short), np.zeros(n_edges, long), np.zeros(n_ops, short), np.zeros(n_devices + 1, long),
        np.zeros(n_edges, short), np.zeros(n_edges, short), np.zeros(n_edges, long), np.zeros(n_ops + 1, short),
        np.zeros((rows, n_channels), long), np.zeros((rows, n_devices), short), np.zeros((rows, n_devices), short),
        np.zeros(rows, short), np.zeros(1, long), np.zeros(3, long), np.zeros(n_devices, long),
        np.zeros(n_ops, long), np.zeros(n_ops, long), np.zeros(n_ops, short),
    )  # fmt: skip


def new_window(n_ops: int, n_edges: int, n_devices: int, n_channels: int) -> Window:
    """Working arrays of one thread."""
    long, short = np.int64, np.uint32
    ops = lambda dtype: np.zeros(n_ops, dtype)  # noqa: E731
    devices = lambda: np.zeros(n_devices, long)  # noqa: E731
    return Window(
        ops(long), ops(long), ops(np.int32), ops(long), ops(short), ops(np.bool_), ops(short), ops(long), ops(long),
        ops(long), np.zeros(n_channels, long), np.zeros(n_channels, long), np.zeros(n_channels, long),
        ops(short), ops(long), devices(), devices(), np.zeros(n_devices, short), np.zeros(n_devices, short),
        devices(), devices(), devices(), devices(), devices(),
        np.zeros(2, long), np.zeros(5, long), ops(long), np.zeros(n_edges, long), np.zeros(n_edges, long), devices(),
        ops(long), ops(short),
    )  # fmt: skip


@njit(cache=True, nogil=True)
def record(p: Inputs, g: Graph, devices, x: Timeline, s: Room, b: Base):
    """Keep as base what :func:`simdev.sim._fifo.run_fifo` left in ``x`` and ``s``."""
    n, n_devices, n_transfers = len(devices), len(p.slots), x.count[0]
    heap, head, arrival = s.heap, s.head, s.arrival
    for op in range(n):  # copies as wholes would take seconds to compile
        b.finish[op], b.ready[op], b.sequence[op] = x.op_finish[op], s.state[op] >> SHIFT, x.start_order[op]
    for device in range(n_devices + 1):
        b.sequence_ptr[device] = s.base[device]
    b.step[0] = x.count[1]
    waiting = s.started
    s.channel_end[:] = 0
    n_heap = 0
    for device in range(n_devices):
        head[device] = waiting[device] = b.sequence_ptr[device]
        if head[device] < b.sequence_ptr[device + 1]:
            n_heap = push_key(heap, n_heap, s.line[head[device]])
    transfer = oldest = 0
    for number in range(n):
        op, now = np.uint32(heap[0] & MASK), heap[0] >> SHIFT
        source = devices[op]
        n_heap = pop_key(heap, n_heap)
        if number % EVERY == 0:
            row = number // EVERY
            while oldest < transfer and x.x_finish[oldest] < now:
                oldest += 1
            b.under_way[row] = oldest
            for channel in range(len(s.channel_end)):
                b.channel_end[row, channel] = s.channel_end[channel]
            for device in range(n_devices):
                while waiting[device] < b.sequence_ptr[device + 1] and b.ready[b.sequence[waiting[device]]] < now:
                    waiting[device] += 1
                b.running[row, device], b.waiting[row, device] = head[device], waiting[device]
        head[source] += 1
        if head[source] < b.sequence_ptr[source + 1]:
            n_heap = push_key(heap, n_heap, s.line[head[source]])
        b.order[number], b.position[op], b.sent[number] = op, number, transfer
        for tensor in range(p.output_ptr[op], p.output_ptr[op + 1]):
            arrival[source] = now
            while transfer < n_transfers and x.x_tensor[transfer] == tensor:
                target, finish = x.x_target[transfer], x.x_finish[transfer]
                b.x_tensor[transfer], b.x_target[transfer], b.x_finish[transfer] = tensor, target, finish
                arrival[target] = finish
                if p.contention == SHARED:
                    _occupy(p.route_ptr, p.route, s.channel_end, source * n_devices + target, finish)
                transfer += 1
            for edge in range(p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]):
                b.arrival[edge] = arrival[devices[p.consumers[edge]]]
                b.complete[p.consumers[edge]] = number
    b.sent[n] = transfer

    _record_prologue(p, g, devices, b)


@part
def _record_prologue(p: Inputs, g: Graph, devices, b: Base):
    b.early[:] = 0
    b.early_end[:] = 0
    latest = np.int64(0)
    for number in range(len(g.sources)):
        op = g.sources[number]
        device = devices[op]
        b.early_end[device] += p.op_ns[p.device_row[device], op]
        latest = max(latest, b.early_end[device])
        if latest < g.rest_ns[number + 1]:
            b.early[0] = number + 1
    early = b.early[0]
    b.early_end[:] = 0
    for op in g.sources[:early]:
        b.early_end[devices[op]] += p.op_ns[p.device_row[devices[op]], op]
    b.early_ready[:] = 0
    n_readers = n_waiting = 0
    for transfer in range(b.sent[early]):
        tensor, target = b.x_tensor[transfer], b.x_target[transfer]
        for edge in range(p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]):
            op = p.consumers[edge]
            if devices[op] == target:
                if b.early_ready[op] == 0:
                    b.readers[n_readers] = op
                    n_readers += 1
                b.early_ready[op] = max(b.early_ready[op], b.x_finish[transfer])
    for index in range(n_readers):
        op = b.readers[index]
        b.late_ready[op] = _late_ready(p.input_ptr, g.producer, g.edge, b.position, b.arrival, op, early)
        if b.early_ready[op] >= b.late_ready[op]:
            b.readers[index], b.readers[n_waiting] = b.readers[n_waiting], op
            n_waiting += 1
    b.early[1], b.early[2] = n_readers, n_waiting


# Helpers take arrays, not the tuples that hold them: a call copies a tuple whole.


@part
def _occupy(route_ptr, route, channel_end, pair, finish):
    for hop in range(route_ptr[pair], route_ptr[pair + 1]):
        channel_end[route[hop]] = finish


@part
def _late_ready(input_ptr, producer, edge, position, arrival, op, early):
    """When the last of the inputs of ``op`` that are not from the prologue arrives in the base."""
    ready = np.int64(0)
    for slot in range(input_ptr[op], input_ptr[op + 1]):
        if position[producer[slot]] >= early:
            ready = max(ready, arrival[edge[slot]])
    return ready


@part
def _next_change(input_ptr, input_producer, position, moved, count, first):
    """The first finish from ``first`` on that is of a producer of a moved op; the number of ops where there is none."""
    found = len(position)
    for index in range(count):
        op = moved[index]
        for slot in range(input_ptr[op], input_ptr[op + 1]):
            place = np.int64(position[input_producer[slot]])
            if first <= place < found:
                found = place
    return found


@part
def _not_before(position, complete, moved, count, number):
    """``number`` where all moved ops have either finished or lack an input before finish ``number`` of the base; else
    the first finish at which that may be so."""
    for index in range(count):
        op = moved[index]
        if complete[op] < number <= position[op]:
            return np.int64(position[op]) + 1
    return number


@part
def _next_use(input_ptr, input_producer, input_edge, position, order, finish, arrival, ready, op, carried, number):
    """The finish that completes the inputs of ``op``, where its being ready by ``carried`` instead of what the base
    says before finish ``number`` makes it ready at another time; else the number of ops."""
    last, there = np.int64(0), carried
    for slot in range(input_ptr[op], input_ptr[op + 1]):
        place = np.int64(position[input_producer[slot]])
        if place >= number:
            last = max(last, place)
            there = max(there, arrival[input_edge[slot]])
    return last if there != ready[op] else len(order)


@part
def _next_reader(b: Base, w: Window, n_news, prologue, total, reached):
    """The first finish from ``reached`` on that completes an op which is then ready at another time than in the base,
    because of what comes from the prologue; else the number of ops. All else is ``total`` later than in the base."""
    found = len(b.position)
    for index in range(n_news):
        op = w.news[index]
        if reached <= b.complete[op] < found:
            there, late = w.early_ready[op] - total, b.late_ready[op]
            if max(there, late) != max(b.early_ready[op], late):
                found = np.int64(b.complete[op])
    if total != 0:
        for index in range(b.early[1]):
            op = b.readers[index]
            if reached <= b.complete[op] < found and w.touched[op] != prologue:
                there, late = b.early_ready[op] - total, b.late_ready[op]
                if max(there, late) != max(b.early_ready[op], late):
                    found = np.int64(b.complete[op])
    return found


@part
def _first_crossing(
    route_ptr,
    route,
    x_tensor,
    x_target,
    x_finish,
    producer,
    position,
    finish,
    before,
    n_devices,
    base_end,
    carried_end,
    first,
    stop,
    change,
):
    """The finish of the producer of the first transfer, before finish ``change``, that meets a channel which is not
    as in the base; else ``change``, or -1 where no channel matters any more. Brings both sets of channels up to it."""
    until = np.int64(0)
    for channel in range(len(base_end)):
        if base_end[channel] != carried_end[channel]:
            until = max(until, base_end[channel], carried_end[channel])
    while first < stop:
        op = producer[x_tensor[first]]
        now = finish[op]
        if position[op] >= change:
            break
        if now >= until:
            return -1
        last = first
        while last < stop and producer[x_tensor[last]] == op:
            pair = before[op] * n_devices + x_target[last]
            for hop in range(route_ptr[pair], route_ptr[pair + 1]):
                channel = route[hop]
                if max(base_end[channel], now) != max(carried_end[channel], now):
                    return np.int64(position[op])
            last += 1
        for transfer in range(first, last):
            pair = before[op] * n_devices + x_target[transfer]
            _occupy(route_ptr, route, base_end, pair, x_finish[transfer])
            _occupy(route_ptr, route, carried_end, pair, x_finish[transfer])
        first = last
    return change


@part
def _received(input_ptr, input_producer, input_edge, position, arrival, op, first):
    """How many inputs ``op`` lacks in the base before finish ``first``, and when the last of the others arrives."""
    missing, ready = 0, np.int64(0)
    for slot in range(input_ptr[op], input_ptr[op + 1]):
        if position[input_producer[slot]] >= first:
            missing += 1
        else:
            ready = max(ready, arrival[input_edge[slot]])
    return missing, ready


@part
def _received_here(
    input_ptr, input_producer, input_edge, position, arrival, op, first, early, overlay, changed, prologue, total
):
    """The same after the move, where the ops of the prologue are not ``total`` later: ``overlay`` is the arrival of the
    edges that ``changed`` marks."""
    missing, ready = 0, np.int64(0)
    for slot in range(input_ptr[op], input_ptr[op + 1]):
        place, edge = position[input_producer[slot]], input_edge[slot]
        if place >= first:
            missing += 1
        elif place >= early:
            ready = max(ready, arrival[edge])
        else:
            ready = max(ready, (overlay[edge] if changed[edge] == prologue else arrival[edge]) - total)
    return missing, ready


@part
def _touches_prologue(p: Inputs, g: Graph, b: Base, w: Window, moved, count):
    """Whether a moved op is of the prologue or reads from nothing else, or one reads from it; marks what it touches."""
    early = b.early[0]
    epoch = w.epoch[0]
    touched = seed_moved = False
    for index in range(count):
        op = moved[index]
        if b.position[op] < early:
            touched = True
            w.touched[op] = epoch
            continue
        all_early = True
        for slot in range(p.input_ptr[op], p.input_ptr[op + 1]):
            if b.position[g.producer[slot]] < early:
                w.touched[g.producer[slot]] = epoch
                touched = True
            else:
                all_early = False
        seed_moved = seed_moved or all_early
    return touched or seed_moved, seed_moved


@part
def _channels_before(p: Inputs, b: Base, before, channel_end, number):
    """Ends of channels in the base before finish ``number``."""
    row = number // EVERY
    for channel in range(len(channel_end)):
        channel_end[channel] = b.channel_end[row, channel]
    if p.contention == SHARED:
        for transfer in range(b.sent[row * EVERY], b.sent[number]):
            pair = before[p.tensor_producer[b.x_tensor[transfer]]] * len(p.slots) + b.x_target[transfer]
            _occupy(p.route_ptr, p.route, channel_end, pair, b.x_finish[transfer])


@part
def _prologue(p: Inputs, g: Graph, b: Base, w: Window, before, devices, moved, count):
    """Work out the prologue anew: ``(possible, n_news, restart)``. Writes the news (see :class:`Window`), the ends of
    channels after it, here and in the base, and the ends of devices. Where it is not over before the other ops it is
    not ``possible``; ``restart`` where an op that reads from nothing else may start at another time.

    Arrivals at home, all before any other op ends, count as 0: they decide nothing but when seeds start.
    """
    early, n_devices = b.early[0], len(p.slots)
    shared = p.contention == SHARED
    epoch, mark = w.epoch[0], w.epoch[1]
    position, input_ptr = b.position, p.input_ptr
    reordered, restart, n_news = False, False, 0
    for index in range(count):
        reordered = reordered or position[moved[index]] < early
    for device in range(n_devices):
        w.early_end[device] = b.early_end[device]
    first = early  # nothing is otherwise before this finish
    if reordered:
        w.early_end[:] = 0
        since = np.int64(NEVER)
        for op in g.sources[:early]:
            device = devices[op]
            start = w.early_end[device]
            w.finish[op] = w.early_end[device] = start + p.op_ns[p.device_row[device], op]
            if device != before[op]:
                since = min(since, b.finish[op], start + 1)
        for device in range(n_devices):
            if w.early_end[device] >= g.rest_ns[early]:
                return False, 0, False
        low = 0
        while low < first:
            middle = (low + first) >> 1
            if b.finish[b.order[middle]] < since:
                low = middle + 1
            else:
                first = middle
    for index in range(count):
        op = moved[index]
        for slot in range(input_ptr[op], input_ptr[op + 1]):
            first = min(first, np.int64(position[g.producer[slot]]))

    # The ops that send, in order of (finish, op).
    n_senders = 0
    for number in range(first, early):
        op = b.order[number]
        if b.sent[number + 1] > b.sent[number] or w.touched[op] == epoch:
            finish = w.finish[op] if reordered else b.finish[op]
            w.queue[n_senders], w.heap_item[n_senders] = (finish << SHIFT) | op, number
            n_senders += 1
    if reordered:
        sort_pairs(w.queue, w.heap_item, 0, n_senders)
    _channels_before(p, b, before, w.channel_end, first)
    for index in range(n_senders):
        op, now, number = np.uint32(w.queue[index] & MASK), w.queue[index] >> SHIFT, w.heap_item[index]
        source, source_before = devices[op], before[op]
        sent, sent_stop = np.int64(b.sent[number]), np.int64(b.sent[number + 1])
        for tensor in range(p.output_ptr[op], p.output_ptr[op + 1]):
            edge, stop = p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]
            n_requests = 0
            mark += 1
            differs = w.touched[op] == epoch
            if differs:
                for where in range(edge, stop):
                    target = devices[p.consumers[where]]
                    if target != source and w.stamp[target] != mark:
                        w.stamp[target] = mark
                        hole = n_requests
                        while hole > 0 and w.request[hole - 1] > target:
                            w.request[hole] = w.request[hole - 1]
                            hole -= 1
                        w.request[hole] = target
                        n_requests += 1
            first_sent = sent
            while sent < sent_stop and b.x_tensor[sent] == tensor:
                if not differs:
                    w.request[n_requests] = b.x_target[sent]
                    n_requests += 1
                sent += 1
            for request in range(n_requests):  # R3, R4
                target = np.uint32(w.request[request])
                pair = source * n_devices + target
                start = now
                if shared:
                    for hop in range(p.route_ptr[pair], p.route_ptr[pair + 1]):
                        start = max(start, w.channel_end[p.route[hop]])
                finish = start + p.transfer_ns[p.pair_class[source, target], tensor]
                if shared:
                    _occupy(p.route_ptr, p.route, w.channel_end, pair, finish)
                w.arrival[target] = finish
                differs = differs or finish != b.x_finish[first_sent + request]
            if not differs:
                continue
            for where in range(edge, stop):
                reader = p.consumers[where]
                target = devices[reader]
                there = w.arrival[target] if target != source else np.int64(0)
                there_before = b.arrival[where] if before[reader] != source_before else np.int64(0)
                if there != there_before:
                    w.edge_epoch[where], w.edge_arrival[where] = epoch, there
                    if w.touched[reader] != epoch:
                        w.touched[reader] = epoch
                        w.news[n_news] = reader
                        n_news += 1
    if shared:
        _channels_before(p, b, before, w.base_channel_end, early)
        for channel in range(len(w.channel_end)):
            w.carried_channel_end[channel] = w.channel_end[channel]
    w.epoch[1] = mark

    for index in range(n_news):
        op = w.news[index]
        ready, all_early = np.int64(0), True
        for slot in range(input_ptr[op], input_ptr[op + 1]):
            producer, edge = g.producer[slot], g.edge[slot]
            if position[producer] >= early:
                all_early = False
            elif devices[producer] != devices[op]:
                ready = max(ready, w.edge_arrival[edge] if w.edge_epoch[edge] == epoch else b.arrival[edge])
        w.early_ready[op] = ready
        if b.early_ready[op] == 0:
            b.late_ready[op] = _late_ready(input_ptr, g.producer, g.edge, position, b.arrival, op, early)
        restart = restart or (all_early and ready != b.early_ready[op])
    if reordered and not restart:
        mark += 1
        w.epoch[1] = mark
        for index in range(count):
            if position[moved[index]] < early:
                w.stamp[devices[moved[index]]] = w.stamp[before[moved[index]]] = mark
        for op in g.seeds:
            device = devices[op]
            if w.stamp[device] == mark and b.ready[op] <= max(w.early_end[device], b.early_end[device]):
                restart = restart or _is_seed(input_ptr, g.producer, position, op, early)
    return True, n_news, restart


@part
def _is_seed(input_ptr, producer, position, op, early):
    """Whether an op outside the prologue reads from nothing else."""
    for slot in range(input_ptr[op], input_ptr[op + 1]):
        if position[producer[slot]] >= early:
            return False
    return position[op] >= early


@part
def _seed_ready(input_ptr, g: Graph, b: Base, w: Window, devices, op, changed, reordered):
    """When a seed is ready after the prologue; ``changed`` is the epoch of the edges whose arrival has changed."""
    ready = np.int64(0)
    for slot in range(input_ptr[op], input_ptr[op + 1]):
        producer, edge = g.producer[slot], g.edge[slot]
        if devices[producer] == devices[op]:
            there = w.finish[producer] if reordered else b.finish[producer]
        else:
            there = w.edge_arrival[edge] if w.edge_epoch[edge] == changed else b.arrival[edge]
        ready = max(ready, there)
    return ready


@part
def evaluate(p: Inputs, g: Graph, b: Base, w: Window, before, devices, moved, count, most, below):
    """``(status, step)`` after the ops ``moved[:count]`` went from ``before`` to ``devices`` (uint32 ``(n,)``).

    :data:`EXACT`: the step time. :data:`NOT_BELOW`: a lower bound of it that is at least ``below``.
    :data:`GAVE_UP`: more than ``most`` finishes would have to be simulated. :data:`HOPELESS`: the prologue would not be
    over before the other ops.
    """
    n, n_devices, n_channels = len(devices), len(p.slots), len(w.channel_end)
    shared = p.contention == SHARED
    input_ptr, position = p.input_ptr, b.position
    input_producer, input_edge, tail = g.producer, g.edge, g.tail
    early = b.early[0]
    total, reached, spent = np.int64(0), 0, 0
    n_carried, n_news, channels_differ, windows, fresh = 0, 0, False, 0, False
    w.epoch[0] += 1
    prologue = w.epoch[0]
    touched, seed_moved = _touches_prologue(p, g, b, w, moved, count)
    if touched:
        possible, n_news, fresh = _prologue(p, g, b, w, before, devices, moved, count)
        if not possible or early == n:
            return HOPELESS, np.int64(0)
        reached, fresh = early, fresh or seed_moved
        spent += (early >> 5) + (n_news >> 2)
        if shared:
            for channel in range(n_channels):
                channels_differ = channels_differ or w.channel_end[channel] != w.base_channel_end[channel]
    while True:
        first = _next_change(input_ptr, input_producer, position, moved, count, reached)
        if fresh:
            first = reached
        else:
            first = min(first, _next_reader(b, w, n_news, prologue, total, reached))
        for index in range(n_carried):
            op = w.carried[index]
            use = _next_use(
                input_ptr, input_producer, input_edge, position, b.order, b.finish, b.arrival, b.ready, op,
                w.carried_ready[op], reached,
            )  # fmt: skip
            first = min(first, use)
        if channels_differ and not fresh:
            crossing = _first_crossing(
                p.route_ptr, p.route, b.x_tensor, b.x_target, b.x_finish, p.tensor_producer, position, b.finish,
                before, n_devices, w.base_channel_end, w.carried_channel_end, b.sent[reached], b.sent[n], first,
            )  # fmt: skip
            channels_differ = crossing >= 0
            if crossing >= 0:
                first = crossing
        if first == n:
            return EXACT, b.step[0] + total

        # The state of the base before finish `first`.
        w.epoch[0] += 1
        epoch, mark = w.epoch[0], w.epoch[1]
        row = first // EVERY
        under_way = max(np.int64(b.under_way[row]), np.int64(b.sent[early]))
        begin = np.int64(0) if fresh else b.finish[b.order[first]]
        for device in range(n_devices):
            w.running[device], w.waiting[device] = b.running[row, device], b.waiting[row, device]
        for number in range(row * EVERY, first):
            w.running[before[b.order[number]]] += 1
        _channels_before(p, b, before, w.channel_end, first)
        for channel in range(n_channels):
            w.base_channel_end[channel] = w.channel_end[channel]
            if channels_differ:
                w.channel_end[channel] = w.carried_channel_end[channel]
        next_finish, next_device = np.int64(NEVER), np.uint32(0)
        for device in range(n_devices):
            head, stop = w.running[device], w.waiting[device]
            limit = b.sequence_ptr[device + 1]
            if fresh:
                stop = head
            else:
                while stop < limit and b.ready[b.sequence[stop]] < begin:
                    stop += 1
            w.waiting[device] = stop
            w.first_added[device] = w.last_added[device] = NIL
            w.first_finish[device] = NEVER
            w.free[device] = w.early_end[device] if fresh else 0
            if head < stop:
                op = b.sequence[head]
                w.free[device] = b.finish[b.sequence[stop - 1]]
                w.first_finish[device] = (b.finish[op] << SHIFT) | op
                if w.first_finish[device] < next_finish:
                    next_finish, next_device = w.first_finish[device], np.uint32(device)
        n_dirty = head_q = tail_q = n_heap = 0
        if fresh:
            reordered = False
            for index in range(count):
                reordered = reordered or position[moved[index]] < early
            for op in g.seeds:
                if _is_seed(input_ptr, input_producer, position, op, early):
                    w.missing[op] = 0
                    w.ready[op] = _seed_ready(input_ptr, g, b, w, devices, op, prologue, reordered)
                    w.loaded[op], w.finish[op] = epoch, -1
                    w.dirty[n_dirty], w.in_dirty[op] = op, True
                    n_dirty += 1
                    n_heap = push_key(w.heap, n_heap, (w.ready[op] << SHIFT) | op)
        else:
            # The queue: ops that lack nothing but are not ready before this instant.
            for index in range(b.early[2]):
                op = b.readers[index]
                if b.complete[op] < first and b.ready[op] >= begin:
                    w.missing[op], w.ready[op] = 0, b.ready[op]
                    w.loaded[op], w.finish[op] = epoch, -1
                    w.dirty[n_dirty], w.in_dirty[op] = op, True
                    n_dirty += 1
                    n_heap = push_key(w.heap, n_heap, (b.ready[op] << SHIFT) | op)
            for transfer in range(under_way, b.sent[first]):
                if b.x_finish[transfer] < begin:
                    continue
                tensor, target = b.x_tensor[transfer], b.x_target[transfer]
                for edge in range(p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]):
                    op = p.consumers[edge]
                    if before[op] == target and b.complete[op] < first and w.loaded[op] != epoch:
                        w.missing[op], w.ready[op] = 0, b.ready[op]
                        w.loaded[op], w.finish[op] = epoch, -1
                        w.dirty[n_dirty], w.in_dirty[op] = op, True
                        n_dirty += 1
                        n_heap = push_key(w.heap, n_heap, (b.ready[op] << SHIFT) | op)
            number = first - 1
            while number >= 0 and b.finish[b.order[number]] == begin:
                source = before[b.order[number]]
                for tensor in range(p.output_ptr[b.order[number]], p.output_ptr[b.order[number] + 1]):
                    for edge in range(p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]):
                        op = p.consumers[edge]
                        if before[op] == source and b.complete[op] < first and w.loaded[op] != epoch:
                            w.missing[op], w.ready[op] = 0, b.ready[op]
                            w.loaded[op], w.finish[op] = epoch, -1
                            w.dirty[n_dirty], w.in_dirty[op] = op, True
                            n_dirty += 1
                            n_heap = push_key(w.heap, n_heap, (b.ready[op] << SHIFT) | op)
                number -= 1
        for index in range(n_carried):
            op = w.carried[index]
            missing, ready = 0, w.carried_ready[op]
            for slot in range(input_ptr[op], input_ptr[op + 1]):
                place = position[input_producer[slot]]
                if place >= first:
                    missing += 1
                elif place >= reached:
                    ready = max(ready, b.arrival[input_edge[slot]])
            if missing == 0:
                continue
            if w.loaded[op] != epoch:
                w.dirty[n_dirty], w.in_dirty[op] = op, True
                n_dirty += 1
            w.missing[op], w.ready[op] = missing, ready
            w.loaded[op], w.finish[op] = epoch, -1

        w.fate[2] += 1
        # Changes that follow close upon each other are cheaper in one window than in many.
        windows += 1
        spent += WINDOW_COST
        done, highest, not_before, now, all_loaded = first, -1, first + windows, begin, False
        while True:
            ready = np.int64(NEVER)
            from_heap = False
            if head_q < tail_q:
                ready = w.queue[head_q]
            if n_heap > 0 and w.heap[0] < ready:
                ready = w.heap[0]
                from_heap = True
            if ready != NEVER and (ready >> SHIFT) < (next_finish >> SHIFT):
                if from_heap:
                    n_heap = pop_key(w.heap, n_heap)
                else:
                    head_q += 1
                op = np.uint32(ready & MASK)
                device = devices[op]
                finish = max(ready >> SHIFT, w.free[device]) + p.op_ns[p.device_row[device], op]
                w.free[device] = w.finish[op] = finish
                if finish + tail[op] + total >= below:
                    w.epoch[1] = mark
                    return NOT_BELOW, finish + tail[op] + total
                w.after[op] = NIL
                if w.last_added[device] == NIL:
                    w.first_added[device] = op
                    if w.running[device] == w.waiting[device]:
                        key = (finish << SHIFT) | op
                        w.first_finish[device] = key
                        if key < next_finish:
                            next_finish, next_device = key, device
                else:
                    w.after[w.last_added[device]] = op
                w.last_added[device] = op
                continue
            if next_finish == NEVER:
                w.epoch[1] = mark
                return EXACT, now + total

            op = np.uint32(next_finish & MASK)
            if done >= not_before and done == highest + 1 and b.order[done] == op:
                not_before = _not_before(position, b.complete, moved, count, done)
                if not_before <= done:
                    at, at_base = next_finish >> SHIFT, b.finish[op]
                    shift = at - at_base
                    same = True
                    if shift != 0:
                        for device in range(n_devices):
                            same = same and w.running[device] == w.waiting[device]
                    if same and shift != 0 and not all_loaded:
                        # What is under way since before the window arrives at another time than in the shifted base.
                        all_loaded = True
                        for transfer in range(under_way, b.sent[first]):
                            if b.x_finish[transfer] < begin:
                                continue
                            tensor, target = b.x_tensor[transfer], b.x_target[transfer]
                            for edge in range(p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]):
                                other = p.consumers[edge]
                                if before[other] == target and w.loaded[other] != epoch:
                                    w.missing[other], w.ready[other] = _received_here(
                                        input_ptr, input_producer, input_edge, position, b.arrival, other, first,
                                        early, w.edge_arrival, w.edge_epoch, prologue, total,
                                    )  # fmt: skip
                                    w.loaded[other], w.finish[other] = epoch, -1
                                    w.dirty[n_dirty], w.in_dirty[other] = other, True
                                    n_dirty += 1
                        spent += max(0, b.sent[first] - under_way) >> 3
                    index = 0
                    while same and index < n_dirty:
                        other = w.dirty[index]
                        # 0: stands differently from the base, 1: the same, 2: also from now on, unless more arrives
                        verdict = 2
                        if position[other] >= done and w.finish[other] >= 0:
                            as_base = b.ready[other] < at_base and w.finish[other] == b.finish[other] + shift
                            verdict = 1 if as_base else 0
                        elif position[other] >= done:
                            missing, ready_base = _received(
                                input_ptr, input_producer, input_edge, position, b.arrival, other, done
                            )
                            if max(w.ready[other], at) != max(ready_base, at_base) + shift:
                                verdict = 1 if missing > 0 else 0  # carried until its inputs are complete
                            elif missing == 0:  # in the queue here, so not yet taken out of it there
                                verdict = 1 if ready_base >= at_base else 0
                            elif w.ready[other] > at or ready_base > at_base:
                                verdict = 1
                        if verdict == 0:  # looked at first next time
                            same = False
                            w.dirty[index] = w.dirty[0]
                            w.dirty[0] = other
                        elif verdict == 1:
                            index += 1
                        else:
                            n_dirty -= 1
                            w.dirty[index] = w.dirty[n_dirty]
                            w.in_dirty[other] = False
                    spent += index >> 3
                    not_before = done + (index >> 2)  # looking on at every finish would cost more than it saves
                    if same:
                        # What still differs matters only to some later events: carry it to them.
                        n_carried, channels_differ = 0, False
                        for index in range(n_dirty):
                            other = w.dirty[index]
                            if w.finish[other] < 0 and w.missing[other] > 0:
                                w.carried[n_carried], w.carried_ready[other] = other, w.ready[other] - shift
                                n_carried += 1
                        if shared:
                            for transfer in range(b.sent[first], b.sent[done]):
                                op = p.tensor_producer[b.x_tensor[transfer]]
                                pair = before[op] * n_devices + b.x_target[transfer]
                                _occupy(p.route_ptr, p.route, w.base_channel_end, pair, b.x_finish[transfer])
                            for channel in range(n_channels):
                                end = w.channel_end[channel] - shift
                                if max(end, at_base) == max(w.base_channel_end[channel], at_base):
                                    end = w.base_channel_end[channel]
                                else:
                                    channels_differ = True
                                w.carried_channel_end[channel] = end
                        total += shift
                        reached, fresh = done, False
                        break

            spent += 1
            w.fate[3] += 1
            if spent > most:
                w.epoch[1] = mark
                return GAVE_UP, np.int64(0)
            now, source = next_finish >> SHIFT, next_device
            if w.running[source] < w.waiting[source]:
                w.running[source] += 1
            else:
                w.first_added[source] = w.after[op]
                if w.first_added[source] == NIL:
                    w.last_added[source] = NIL
            w.first_finish[source] = NEVER
            if w.running[source] < w.waiting[source]:
                other = b.sequence[w.running[source]]
                w.first_finish[source] = (b.finish[other] << SHIFT) | other
            elif w.first_added[source] != NIL:
                other = w.first_added[source]
                w.first_finish[source] = (w.finish[other] << SHIFT) | other
            next_finish = np.int64(NEVER)
            for device in range(n_devices):
                if w.first_finish[device] < next_finish:
                    next_finish, next_device = w.first_finish[device], np.uint32(device)
            highest = max(highest, np.int64(b.position[op]))
            done += 1
            for tensor in range(p.output_ptr[op], p.output_ptr[op + 1]):
                edge, stop_edge = p.consumer_ptr[tensor], p.consumer_ptr[tensor + 1]
                mark += 1
                n_requests = 0
                for where in range(edge, stop_edge):
                    target = devices[p.consumers[where]]
                    if target != source and w.stamp[target] != mark:
                        w.stamp[target] = mark
                        hole = n_requests
                        while hole > 0 and w.request[hole - 1] > target:
                            w.request[hole] = w.request[hole - 1]
                            hole -= 1
                        w.request[hole] = target
                        n_requests += 1
                w.arrival[source] = now
                for index in range(n_requests):  # R3, R4
                    target = np.uint32(w.request[index])
                    pair = source * n_devices + target
                    start = now
                    if shared:
                        for hop in range(p.route_ptr[pair], p.route_ptr[pair + 1]):
                            start = max(start, w.channel_end[p.route[hop]])
                    finish = start + p.transfer_ns[p.pair_class[source, target], tensor]
                    if shared:
                        _occupy(p.route_ptr, p.route, w.channel_end, pair, finish)
                    w.arrival[target] = finish
                for where in range(edge, stop_edge):
                    consumer = p.consumers[where]
                    if w.loaded[consumer] != epoch:
                        w.missing[consumer], w.ready[consumer] = _received_here(
                            input_ptr, input_producer, input_edge, position, b.arrival, consumer, first,
                            early, w.edge_arrival, w.edge_epoch, prologue, total,
                        )  # fmt: skip
                        w.loaded[consumer], w.finish[consumer] = epoch, -1
                        w.dirty[n_dirty], w.in_dirty[consumer] = consumer, True
                        n_dirty += 1
                    elif not w.in_dirty[consumer]:
                        w.dirty[n_dirty], w.in_dirty[consumer] = consumer, True
                        n_dirty += 1
                    there = max(w.ready[consumer], w.arrival[devices[consumer]])
                    w.ready[consumer] = there
                    w.missing[consumer] -= 1
                    if w.missing[consumer] > 0:
                        continue
                    key = (there << SHIFT) | consumer
                    nearest = max(head_q, tail_q - NEAR)
                    if nearest > head_q and w.queue[nearest - 1] > key:
                        n_heap = push_key(w.heap, n_heap, key)
                        continue
                    spot = tail_q
                    while spot > nearest and w.queue[spot - 1] > key:
                        w.queue[spot] = w.queue[spot - 1]
                        spot -= 1
                    w.queue[spot] = key
                    tail_q += 1
        w.epoch[1] = mark


@njit(cache=True, nogil=True)
def steps_after(p, g, b, w, before, devices, move_ptr, ops, targets, below, step):
    """The step time (see :func:`evaluate`) after each move alone, into ``step``, or :data:`FULL_RUN` where a full run
    has to tell. Move ``i`` takes ``ops[move_ptr[i]:move_ptr[i + 1]]`` to ``targets``; ``devices`` is left as
    ``before``."""
    for row in range(len(step)):
        step[row] = FULL_RUN
        first, stop = move_ptr[row], move_ptr[row + 1]
        if stop - first > len(devices) >> MANY:
            pass
        elif w.fate[1] > 0:
            w.fate[1] -= 1
        else:
            for index in range(first, stop):
                devices[ops[index]] = targets[index]
            most = max(len(devices) >> min(w.fate[0] + 1, SOONEST), 64)
            status, found = evaluate(p, g, b, w, before, devices, ops[first:stop], stop - first, most, below)
            for index in range(first, stop):
                devices[ops[index]] = before[ops[index]]
            if status == EXACT or status == NOT_BELOW:
                w.fate[0], step[row] = max(0, w.fate[0] - 1), found
            elif status == GAVE_UP:
                w.fate[0] = min(w.fate[0] + 1, LONGEST_PAUSE)
                w.fate[1] = (1 << w.fate[0]) - 1
        if step[row] == FULL_RUN:
            w.fate[4] += 1
