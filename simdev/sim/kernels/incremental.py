"""The loop behind :class:`simdev.sim.Simulator`: the step time after a few ops changed device, without a full run.

Nothing differs from the recorded run (the *base*) before the first finish of a producer of a moved op. From there, a
*window* is simulated until the state is that of the base again, a time ``shift`` earlier or later: the same ops have
finished, and everything that the future depends on is the same but for the shift. The rest of the base then holds too,
shifted, up to the next difference: the next producer of a moved op, a channel that is free at another time, or an op
with an input that arrived at another time. There the next window begins. Every transfer ends before its consumer, so
the shifts sum to the change of the step time. Times inside a window are those of the base; the shifts of earlier
windows are added at the end.

Ops without inputs (parameters) come first on their devices. Those that finish before any other op can finish are the
*prologue*: finishes ``0`` to ``early`` of every placement. The changes of a move there are computed without events,
send by send. If a tensor of the prologue arrives at another time than in the base, or is still on its way after a
shift, the next window begins where an op becomes ready at another time because of it. A window begins at once only if a
change affects an op that reads from the prologue alone.

This holds for the default rules (:mod:`simdev.sim.kernels.fifo`) on devices of one slot.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simdev.sim.kernels.compiled import inlined, kernel, part
from simdev.sim.kernels.heap import pop_key, push_key
from simdev.sim.kernels.state import MASK, NEVER, SHIFT, Timeline

EVERY = 64  # finishes between two snapshots
NEAR = 32  # as in queue.py
NIL = -1
FULL_RUN = -1
WINDOW_COST = 4  # in finishes
SOONEST = 4  # with k moves given up lately, one is given up after n >> min(k + 1, SOONEST) finishes
MANY = 3  # moves of more than n >> MANY ops are full runs
LONGEST_PAUSE = 5  # and the next 2**min(k, LONGEST_PAUSE) - 1 are full runs


def _rows(long: str, short: str = "") -> np.dtype:
    return np.dtype(
        [(name, np.int64) for name in long.split()] + [(name, np.int32) for name in short.split()], align=True
    )


# Arrays that are read together are columns of one: each array that a kernel knows is seven values to its compiler.
BASE_OP = _rows("finish ready early_ready late_ready", "complete")
TRANSFER = _rows("finish", "tensor target")
BASE_DEVICE = _rows("first early_end")
OP = _rows("finish ready loaded touched early_ready carried_ready", "missing after in_dirty")
DEVICE = _rows("running waiting free first_finish stamp arrival request early_end first_added last_added")
EDGE = _rows("epoch arrival")


class Graph(NamedTuple):
    """The parts that do not depend on a placement. Besides arrays of :class:`simdev.sim.kernels.state.Inputs`:
    ``producer`` and ``edge`` of each input of each op; ``sources`` the ops without inputs, in order; ``rest_ns[k]`` the
    least duration of all ops but the first ``k`` sources; ``seeds`` the ops that read from sources alone, then all
    sources, last first; ``tail`` a lower bound of the time from the end of an op to that of the step; ``shared``
    whether channels are ever busy."""

    op_ns: np.ndarray
    device_row: np.ndarray
    transfer_ns: np.ndarray
    pair_class: np.ndarray
    output_ptr: np.ndarray
    input_ptr: np.ndarray
    tensor_producer: np.ndarray
    consumer_ptr: np.ndarray
    consumers: np.ndarray
    route_ptr: np.ndarray
    route: np.ndarray
    producer: np.ndarray
    edge: np.ndarray
    sources: np.ndarray
    rest_ns: np.ndarray
    seeds: np.ndarray
    tail: np.ndarray
    shared: bool


class Base(NamedTuple):
    """The recorded run, with finishes numbered in the order (time, op): ``order`` and its inverse ``position``;
    ``op.complete`` the finish that completes an op's inputs; ``arrival`` when each consumer had its tensor;
    ``sequence`` the ops by device and start, from ``device.first`` on. Transfers are in order of request, those from
    ``sent[i]`` on after finish ``i``. Row ``i`` of a snapshot is what was just before finish ``i * EVERY``: ends of
    channels, and per device the position in ``sequence`` of the first op that has not finished and of the first that is
    not yet ready; ``under_way`` the first transfer that had not ended. ``early``: the length of the prologue, which
    ends at ``device.early_end``, two numbers of readers, and the step time. ``op.early_ready`` and ``op.late_ready``:
    when an op has its inputs from the prologue's ops on other devices, and its other inputs; ``readers[:early[1]]`` are
    the ops with any of the former, by ``complete``, and ``late_readers[:early[2]]`` those of them that wait for it;
    ``senders[:early[4]]`` are its finishes of ops that send."""

    op: np.ndarray
    position: np.ndarray
    order: np.ndarray
    sequence: np.ndarray
    arrival: np.ndarray
    transfer: np.ndarray
    sent: np.ndarray
    device: np.ndarray
    channel_end: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    under_way: np.ndarray
    early: np.ndarray
    readers: np.ndarray
    late_readers: np.ndarray
    senders: np.ndarray


class Window(NamedTuple):
    """Working arrays. ``epoch``: window number, then request number. ``fate``: moves given up lately, moves still
    to be run in full, windows simulated, finishes simulated, full runs asked for. Where ``op.touched`` or
    ``edge.epoch`` is the number of the present prologue, ``op.early_ready`` and ``edge.arrival`` are what they are in
    the base, after the move; ``news`` are the ops for which that is so."""

    op: np.ndarray
    device: np.ndarray
    edge: np.ndarray
    dirty: np.ndarray
    queue: np.ndarray
    heap: np.ndarray
    carried: np.ndarray
    news: np.ndarray
    channel_end: np.ndarray
    base_channel_end: np.ndarray
    carried_channel_end: np.ndarray
    epoch: np.ndarray
    fate: np.ndarray


def new_base(n_ops: int, n_edges: int, n_devices: int, n_channels: int) -> Base:
    """Arrays for the record of one run."""
    long, short, rows = np.int64, np.uint32, n_ops // EVERY + 1
    return Base(
        np.zeros(n_ops, BASE_OP),
        np.zeros(n_ops, short),
        np.zeros(n_ops, short),
        np.zeros(n_ops, short),
        np.zeros(n_edges, long),
        np.zeros(n_edges, TRANSFER),
        np.zeros(n_ops + 1, short),
        np.zeros(n_devices + 1, BASE_DEVICE),
        np.zeros((rows, n_channels), long),
        np.zeros((rows, n_devices), short),
        np.zeros((rows, n_devices), short),
        np.zeros(rows, short),
        np.zeros(5, long),
        *(np.zeros(n_ops, short) for _ in range(3)),
    )


def new_window(n_ops: int, n_edges: int, n_devices: int, n_channels: int) -> Window:
    """Working arrays of one thread."""
    long, short = np.int64, np.uint32
    return Window(
        np.zeros(n_ops, OP),
        np.zeros(n_devices, DEVICE),
        np.zeros(n_edges, EDGE),
        np.zeros(n_ops, short),
        np.zeros(n_ops, long),
        np.zeros(n_ops, long),
        np.zeros(n_ops, short),
        np.zeros(n_ops, short),
        *(np.zeros(n_channels, long) for _ in range(3)),
        np.zeros(2, long),
        np.zeros(5, long),
    )


@kernel
def record(g: Graph, devices, x: Timeline, state, first, line, b: Base, w: Window):
    """Keep as base what :func:`simdev.sim.kernels.fifo.run_fifo` left in ``x`` and in ``state``, ``base``, ``line``."""
    n, n_devices, n_transfers = len(devices), len(w.device), x.count[0]
    for op in range(n):  # copies as wholes would take seconds to compile
        at = b.op[op]
        at.finish, at.ready, at.early_ready, b.sequence[op] = x.op_finish[op], state[op] >> SHIFT, 0, x.start_order[op]
    for channel in range(len(w.channel_end)):
        w.channel_end[channel] = 0
    n_heap = 0
    b.device[n_devices].first = first[n_devices]
    for device in range(n_devices):
        b.device[device].first = w.device[device].running = w.device[device].waiting = first[device]
        if first[device] < first[device + 1]:
            n_heap = push_key(w.heap, n_heap, line[first[device]])
    transfer = oldest = 0
    for number in range(n):
        op, now = np.uint32(w.heap[0] & MASK), w.heap[0] >> SHIFT
        n_heap = pop_key(w.heap, n_heap)
        if number % EVERY == 0:
            row = number // EVERY
            while oldest < transfer and x.x_finish[oldest] < now:
                oldest += 1
            b.under_way[row] = oldest
            for channel in range(len(w.channel_end)):
                b.channel_end[row, channel] = w.channel_end[channel]
            for device in range(n_devices):
                at = w.device[device]
                while at.waiting < first[device + 1] and b.op[b.sequence[at.waiting]].ready < now:
                    at.waiting += 1
                b.running[row, device], b.waiting[row, device] = at.running, at.waiting
        source = devices[op]
        home = w.device[source]
        home.running += 1
        if home.running < first[source + 1]:
            n_heap = push_key(w.heap, n_heap, line[home.running])
        b.order[number], b.position[op], b.sent[number] = op, number, transfer
        for tensor in range(g.output_ptr[op], g.output_ptr[op + 1]):
            home.arrival = now
            while transfer < n_transfers and x.x_tensor[transfer] == tensor:
                target, finish, sent = x.x_target[transfer], x.x_finish[transfer], b.transfer[transfer]
                sent.tensor, sent.target, sent.finish = tensor, target, finish
                w.device[target].arrival = finish
                if g.shared:
                    _occupy(g.route_ptr, g.route, w.channel_end, source * n_devices + target, finish)
                transfer += 1
            for edge in range(g.consumer_ptr[tensor], g.consumer_ptr[tensor + 1]):
                reader = g.consumers[edge]
                b.arrival[edge] = w.device[devices[reader]].arrival
                b.op[reader].complete = number
    b.sent[n] = transfer

    # The prologue.
    early, latest = 0, np.int64(0)
    for device in range(n_devices):
        b.device[device].early_end = 0
    for number in range(len(g.sources)):
        op = g.sources[number]
        device = devices[op]
        b.device[device].early_end += g.op_ns[g.device_row[device], op]
        latest = max(latest, b.device[device].early_end)
        if latest < g.rest_ns[number + 1]:
            early = number + 1
    for op in g.sources[early:]:
        b.device[devices[op]].early_end -= g.op_ns[g.device_row[devices[op]], op]
    n_senders = n_readers = n_waiting = 0
    for number in range(early):
        if b.sent[number + 1] > b.sent[number]:
            b.senders[n_senders] = number
            n_senders += 1
    for transfer in range(b.sent[early]):
        sent = b.transfer[transfer]
        for edge in range(g.consumer_ptr[sent.tensor], g.consumer_ptr[sent.tensor + 1]):
            op = g.consumers[edge]
            if devices[op] == sent.target:
                if b.op[op].early_ready == 0:
                    b.readers[n_readers] = op
                    n_readers += 1
                b.op[op].early_ready = max(b.op[op].early_ready, sent.finish)
    for index in range(n_readers):
        op = b.readers[index]
        _, b.op[op].late_ready = _to_come(g.input_ptr, g.producer, g.edge, b.position, b.arrival, op, early)
        n_heap = push_key(w.heap, n_heap, (np.int64(b.op[op].complete) << SHIFT) | op)
    for index in range(n_readers):
        op = np.uint32(w.heap[0] & MASK)
        n_heap = pop_key(w.heap, n_heap)
        b.readers[index] = op
        if b.op[op].early_ready >= b.op[op].late_ready:
            b.late_readers[n_waiting] = op
            n_waiting += 1
    b.early[0], b.early[1], b.early[2], b.early[3], b.early[4] = early, n_readers, n_waiting, x.count[1], n_senders


# Helpers take arrays, not the tuples that hold them, where they are called often: a call copies a tuple whole.


@inlined
def _occupy(route_ptr, route, channel_end, pair, finish):
    for hop in range(route_ptr[pair], route_ptr[pair + 1]):
        channel_end[route[hop]] = finish


@inlined
def _to_come(input_ptr, producer, edge, position, arrival, op, number):
    """Of the inputs of ``op`` that are made by finish ``number`` of the base or later: the last of those finishes
    (-1: there are none), and when the last arrives."""
    last, ready = np.int64(-1), np.int64(0)
    for slot in range(input_ptr[op], input_ptr[op + 1]):
        place = np.int64(position[producer[slot]])
        if place >= number:
            last, ready = max(last, place), max(ready, arrival[edge[slot]])
    return last, ready


@inlined
def _received(input_ptr, producer, edges, position, arrival, op, first, early, changed, prologue, total):
    """The number of inputs that ``op`` misses before finish ``first`` of the base, and the arrival of the last of the
    others. Inputs from the prologue (before finish ``early``) arrive without the shift ``total`` that all others have,
    some at a ``changed`` time."""
    missing, ready = 0, np.int64(0)
    for slot in range(input_ptr[op], input_ptr[op + 1]):
        place, edge = position[producer[slot]], edges[slot]
        if place >= first:
            missing += 1
        elif place >= early:
            ready = max(ready, arrival[edge])
        else:
            ready = max(ready, (changed[edge].arrival if changed[edge].epoch == prologue else arrival[edge]) - total)
    return missing, ready


@inlined
def _follow(ops, dirty, n_dirty, op, epoch, missing, ready):
    """Note that the state of ``op`` may differ from the base from now on; return the number of such ops."""
    at = ops[op]
    at.missing, at.ready, at.loaded, at.finish, at.in_dirty = missing, ready, epoch, -1, 1
    dirty[n_dirty] = op
    return n_dirty + 1


@inlined
def _wait(ops, dirty, heap, n_waiting, op, epoch, ready):
    """Enqueue an op that has all its inputs, ready at ``ready``, and follow it. Before the first event of a window, the
    followed ops are exactly those in the queue, so ``n_waiting`` counts both."""
    push_key(heap, n_waiting, (ready << SHIFT) | op)
    return _follow(ops, dirty, n_waiting, op, epoch, 0, ready)


@inlined
def _readers_wait(
    consumer_ptr, consumers, ops_before, before, ops, dirty, heap, n_waiting, tensor, target, epoch, first
):
    """Enqueue and follow all ops on ``target`` that read a tensor and have all their inputs before finish ``first``."""
    for edge in range(consumer_ptr[tensor], consumer_ptr[tensor + 1]):
        op = consumers[edge]
        if before[op] == target and ops_before[op].complete < first and ops[op].loaded != epoch:
            n_waiting = _wait(ops, dirty, heap, n_waiting, op, epoch, ops_before[op].ready)
    return n_waiting


@inlined
def _enqueue(queue, heap, head, tail, n_heap, key):
    """As :func:`simdev.sim.kernels.queue.enqueue`, with signed indices."""
    nearest = max(head, tail - NEAR)
    if nearest > head and queue[nearest - 1] > key:
        return tail, push_key(heap, n_heap, key)
    spot = tail
    while spot > nearest and queue[spot - 1] > key:
        queue[spot] = queue[spot - 1]
        spot -= 1
    queue[spot] = key
    return tail + 1, n_heap


@inlined
def _requests(consumer_ptr, consumers, devices, here, tensor, source, mark):
    """Write the destinations of a tensor, in order, to ``here.request`` (R3); return their number."""
    count = 0
    for where in range(consumer_ptr[tensor], consumer_ptr[tensor + 1]):
        target = devices[consumers[where]]
        if target != source and here[target].stamp != mark:
            here[target].stamp = mark
            hole = count
            while hole > 0 and here[hole - 1].request > target:
                here[hole].request = here[hole - 1].request
                hole -= 1
            here[hole].request = target
            count += 1
    return count


@inlined
def _send(route_ptr, route, channel_end, pair_class, transfer_ns, shared, tensor, source, target, now):
    """The finish of a transfer requested ``now`` (R4)."""
    pair, start = source * len(pair_class) + target, now
    if shared:
        for hop in range(route_ptr[pair], route_ptr[pair + 1]):
            start = max(start, channel_end[route[hop]])
    finish = start + transfer_ns[pair_class[source, target], tensor]
    if shared:
        _occupy(route_ptr, route, channel_end, pair, finish)
    return finish


@part
def _next_change(input_ptr, producer, position, moved, first):
    """The first finish, from ``first`` on, of a producer of a moved op; the number of ops if there is none."""
    found = len(position)
    for op in moved:
        for slot in range(input_ptr[op], input_ptr[op + 1]):
            place = np.int64(position[producer[slot]])
            if first <= place < found:
                found = place
    return found


@part
def _not_before(position, ops, moved, number):
    """``number`` if every moved op either has finished or misses an input before finish ``number`` of the base; else
    the first finish at which that may hold."""
    for op in moved:
        if ops[op].complete < number <= position[op]:
            return np.int64(position[op]) + 1
    return number


@part
def _next_reader(ops, readers, n_readers, here, news, n_news, prologue, total, reached):
    """The first finish from ``reached`` on that completes an op which is then ready at another time than in the base,
    because of what comes from the prologue; else the number of ops. All else is ``total`` later than in the base."""
    found = np.int64(len(ops))
    for index in range(n_news):
        op = news[index]
        at = ops[op]
        if reached <= at.complete < found:
            there = here[op].early_ready - total
            if max(there, at.late_ready) != max(at.early_ready, at.late_ready):
                found = np.int64(at.complete)
    low, high = np.int64(0), n_readers if total != 0 else np.int64(0)
    while low < high:
        middle = (low + high) >> 1
        if ops[readers[middle]].complete < reached:
            low = middle + 1
        else:
            high = middle
    while total != 0 and low < n_readers:
        op = readers[low]
        at = ops[op]
        if at.complete >= found:
            break
        if here[op].touched != prologue and max(at.early_ready - total, at.late_ready) != max(
            at.early_ready, at.late_ready
        ):
            return np.int64(at.complete)
        low += 1
    return found


@part
def _first_crossing(g: Graph, b: Base, before, base_end, carried_end, first, change):
    """The finish of the producer of the first transfer from ``first`` on, before finish ``change``, that meets a
    channel which is not as in the base; else ``change``, or -1 where no channel matters any more. Brings both sets of
    channels up to it."""
    n_devices, stop = len(g.pair_class), b.sent[len(before)]
    until = np.int64(0)
    for channel in range(len(base_end)):
        if base_end[channel] != carried_end[channel]:
            until = max(until, base_end[channel], carried_end[channel])
    while first < stop:
        op = g.tensor_producer[b.transfer[first].tensor]
        now = b.op[op].finish
        if b.position[op] >= change:
            break
        if now >= until:
            return -1
        last = b.sent[b.position[op] + 1]
        for transfer in range(first, last):
            pair = before[op] * n_devices + b.transfer[transfer].target
            for hop in range(g.route_ptr[pair], g.route_ptr[pair + 1]):
                channel = g.route[hop]
                if max(base_end[channel], now) != max(carried_end[channel], now):
                    return np.int64(b.position[op])
        for transfer in range(first, last):
            pair, finish = before[op] * n_devices + b.transfer[transfer].target, b.transfer[transfer].finish
            _occupy(g.route_ptr, g.route, base_end, pair, finish)
            _occupy(g.route_ptr, g.route, carried_end, pair, finish)
        first = last
    return change


@part
def _channels_between(g: Graph, b: Base, before, channel_end, first, number):
    """Bring ends of channels in the base from before finish ``first`` to before finish ``number``; ``first`` is -1
    where they are not known."""
    if first < 0:
        row = number // EVERY
        first = row * EVERY
        for channel in range(len(channel_end)):
            channel_end[channel] = b.channel_end[row, channel]
    if g.shared:
        for transfer in range(b.sent[first], b.sent[number]):
            sent = b.transfer[transfer]
            pair = before[g.tensor_producer[sent.tensor]] * len(g.pair_class) + sent.target
            _occupy(g.route_ptr, g.route, channel_end, pair, sent.finish)


@inlined
def _from_prologue(
    input_ptr, producers, edges, position, arrival, ops_before, ops, changed, devices, op, early, prologue, reordered
):
    """When the last of what the prologue sends to ``op`` arrives, and of what it makes on the same device."""
    far, near = np.int64(0), np.int64(0)
    for slot in range(input_ptr[op], input_ptr[op + 1]):
        producer, edge = producers[slot], edges[slot]
        if position[producer] >= early:
            continue
        if devices[producer] != devices[op]:
            far = max(far, changed[edge].arrival if changed[edge].epoch == prologue else arrival[edge])
        else:
            near = max(near, ops[producer].finish if reordered else ops_before[producer].finish)
    return far, near


@part
def _touch_prologue(g: Graph, b: Base, w: Window, moved):
    """Whether a moved op is of the prologue, and whether one is or reads from it or from nothing; marks the ops whose
    sends change, and puts them into ``carried``: also how many."""
    early, epoch = b.early[0], w.epoch[0]
    reordered, touched, count = False, False, 0
    for op in moved:
        if b.position[op] < early:
            reordered = True
            count = _touch(w.op, w.carried, count, op, epoch)
        else:
            touched = touched or g.input_ptr[op] == g.input_ptr[op + 1]
            for slot in range(g.input_ptr[op], g.input_ptr[op + 1]):
                if b.position[g.producer[slot]] < early:
                    count = _touch(w.op, w.carried, count, g.producer[slot], epoch)
    return reordered, touched or count > 0, count


@inlined
def _touch(ops, found, count, op, epoch):
    if ops[op].touched != epoch:
        ops[op].touched = epoch
        found[count] = op
        count += 1
    return count


@part
def _prologue(g: Graph, b: Base, w: Window, before, devices, moved, reordered, n_touched):
    """Work out the prologue anew: ``(possible, n_news, restart)``. Writes the news (see :class:`Window`), the ends of
    channels after it, here and in the base, and the ends of devices. Where it is not over before the other ops it is
    not ``possible``; ``restart`` where an op that reads from nothing else is moved or may start at another time.

    Arrivals at home, all before any other op ends, count as 0: they decide nothing but when seeds start.
    """
    early, epoch, mark = b.early[0], w.epoch[0], w.epoch[1]
    restart, n_news = False, 0
    for device in range(len(w.device)):
        w.device[device].early_end = 0 if reordered else b.device[device].early_end
    first = _next_change(g.input_ptr, g.producer, b.position, moved, 0)  # nothing is otherwise before this finish
    if reordered:
        since = np.int64(NEVER)
        for op in g.sources[:early]:
            here = w.device[devices[op]]
            if devices[op] != before[op]:
                since = min(since, b.op[op].finish, here.early_end + 1)
            here.early_end += g.op_ns[g.device_row[devices[op]], op]
            w.op[op].finish = here.early_end
        for device in range(len(w.device)):
            if w.device[device].early_end >= g.rest_ns[early]:
                return False, 0, False
        low, high = np.int64(0), early
        while low < high:
            middle = (low + high) >> 1
            if b.op[b.order[middle]].finish < since:
                low = middle + 1
            else:
                high = middle
        first = min(first, low)
    first = min(first, early)

    # The ops that send, in order of (finish, op).
    head = tail = n_heap = 0
    n_senders = low = b.early[4]
    while low > 0 and b.senders[low - 1] >= first:
        low -= 1
    for index in range(low, n_senders + n_touched):
        op = b.order[b.senders[index]] if index < n_senders else w.carried[index - n_senders]
        if b.position[op] >= first and (index >= n_senders or w.op[op].touched != epoch):
            finish = w.op[op].finish if reordered else b.op[op].finish
            tail, n_heap = _enqueue(w.queue, w.heap, head, tail, n_heap, (finish << SHIFT) | op)
    _channels_between(g, b, before, w.channel_end, -1, first)
    while head < tail or n_heap > 0:
        if n_heap > 0 and (head == tail or w.heap[0] < w.queue[head]):
            key = w.heap[0]
            n_heap = pop_key(w.heap, n_heap)
        else:
            key = w.queue[head]
            head += 1
        op, now = np.uint32(key & MASK), key >> SHIFT
        source = np.int64(devices[op])
        sent, sent_stop = np.int64(b.sent[b.position[op]]), np.int64(b.sent[b.position[op] + 1])
        for tensor in range(g.output_ptr[op], g.output_ptr[op + 1]):
            mark += 1
            differs = w.op[op].touched == epoch
            first_sent = sent
            while sent < sent_stop and b.transfer[sent].tensor == tensor:
                sent += 1
            n_requests = sent - first_sent
            if differs:
                n_requests = _requests(g.consumer_ptr, g.consumers, devices, w.device, tensor, source, mark)
            for request in range(n_requests):
                again = w.op[op].touched != epoch
                target = b.transfer[first_sent + request].target if again else w.device[request].request
                finish = _send(
                    g.route_ptr,
                    g.route,
                    w.channel_end,
                    g.pair_class,
                    g.transfer_ns,
                    g.shared,
                    tensor,
                    source,
                    target,
                    now,
                )
                w.device[target].arrival = finish
                differs = differs or finish != b.transfer[first_sent + request].finish
            if not differs:
                continue
            for edge in range(g.consumer_ptr[tensor], g.consumer_ptr[tensor + 1]):
                reader = g.consumers[edge]
                there = w.device[devices[reader]].arrival if devices[reader] != source else np.int64(0)
                if there != (b.arrival[edge] if before[reader] != before[op] else np.int64(0)):
                    w.edge[edge].epoch, w.edge[edge].arrival = epoch, there
                    if w.op[reader].touched != epoch:
                        w.op[reader].touched = epoch
                        w.news[n_news] = reader
                        n_news += 1
    if g.shared:
        _channels_between(g, b, before, w.base_channel_end, -1, early)
        for channel in range(len(w.channel_end)):
            w.carried_channel_end[channel] = w.channel_end[channel]

    for op in moved:
        if b.position[op] >= early:
            last, _ = _to_come(g.input_ptr, g.producer, g.edge, b.position, b.arrival, op, early)
            restart = restart or last < 0
    for index in range(n_news):
        op = w.news[index]
        ready, _ = _from_prologue(
            g.input_ptr,
            g.producer,
            g.edge,
            b.position,
            b.arrival,
            b.op,
            w.op,
            w.edge,
            devices,
            op,
            early,
            epoch,
            reordered,
        )
        w.op[op].early_ready = ready
        last, b.op[op].late_ready = _to_come(g.input_ptr, g.producer, g.edge, b.position, b.arrival, op, early)
        restart = restart or (last < 0 and ready != b.op[op].early_ready)
    mark += 1
    w.epoch[1] = mark
    if reordered and not restart:
        for op in moved:
            if b.position[op] < early:
                w.device[devices[op]].stamp = w.device[before[op]].stamp = mark
        for op in g.seeds[: len(g.seeds) - early]:
            device = devices[op]
            end = max(w.device[device].early_end, b.device[device].early_end)
            if w.device[device].stamp == mark and b.op[op].ready <= end:
                last, _ = _to_come(g.input_ptr, g.producer, g.edge, b.position, b.arrival, op, early)
                restart = restart or last < 0
    return True, n_news, restart


@kernel
def steps_after(g: Graph, b: Base, w: Window, before, devices, move_ptr, ops, targets, below, step):
    """The step time after each move alone, into ``step``; where it is not ``below``, a lower bound of it that is not
    either; or :data:`FULL_RUN` where a full run has to tell, as the prologue would not be over before the other ops, or
    too much would have to be simulated. Move ``i`` takes ``ops[move_ptr[i]:move_ptr[i + 1]]`` from their devices in
    ``before`` to ``targets``; ``devices`` (uint32 ``(n,)``) is left as ``before``."""
    n, n_devices, n_channels, early = len(devices), len(w.device), len(w.channel_end), b.early[0]
    for row in range(len(step)):
        step[row] = FULL_RUN
        moved = ops[move_ptr[row] : move_ptr[row + 1]]
        if len(moved) > n >> MANY or w.fate[1] > 0:
            w.fate[1] = max(0, w.fate[1] - 1)
            w.fate[4] += 1
            continue
        for index in range(len(moved)):
            devices[moved[index]] = targets[move_ptr[row] + index]
        most = max(n >> min(w.fate[0] + 1, SOONEST), 64)
        total, reached, spent = np.int64(0), np.int64(0), 0
        n_carried, n_news, channels_differ, windows, fresh = 0, 0, False, 0, False
        w.epoch[0] += 1
        prologue = w.epoch[0]
        reordered, touched, n_touched = _touch_prologue(g, b, w, moved)
        possible = True
        if touched:
            possible, n_news, fresh = _prologue(g, b, w, before, devices, moved, reordered, n_touched)
            possible = possible and early < n
            reached = early
            spent += (early >> 5) + (n_news >> 2)
            if g.shared:
                for channel in range(n_channels):
                    channels_differ = channels_differ or w.channel_end[channel] != w.base_channel_end[channel]
        while possible:
            if fresh:
                first = reached
            else:
                first = _next_change(g.input_ptr, g.producer, b.position, moved, reached)
                first = min(
                    first,
                    _next_reader(b.op, b.readers, b.early[1], w.op, w.news, n_news, prologue, total, reached),
                )
            for index in range(n_carried):
                op = w.carried[index]
                last, ready = _to_come(g.input_ptr, g.producer, g.edge, b.position, b.arrival, op, reached)
                if max(ready, w.op[op].carried_ready) != b.op[op].ready:
                    first = min(first, last)
            if channels_differ and not fresh:
                crossing = _first_crossing(
                    g, b, before, w.base_channel_end, w.carried_channel_end, np.int64(b.sent[reached]), first
                )
                channels_differ = crossing >= 0
                if crossing >= 0:
                    first = crossing
            if first == n:
                step[row] = b.early[3] + total
                break

            # The state of the base before finish `first`.
            w.epoch[0] += 1
            epoch, mark = w.epoch[0], w.epoch[1]
            shot = first // EVERY
            under_way = max(np.int64(b.under_way[shot]), np.int64(b.sent[early]))
            begin = np.int64(0) if fresh else b.op[b.order[first]].finish
            for device in range(n_devices):
                here = w.device[device]
                here.running, here.waiting = b.running[shot, device], b.waiting[shot, device]
            for number in range(shot * EVERY, first):
                w.device[before[b.order[number]]].running += 1
            _channels_between(g, b, before, w.channel_end, -1, first)
            for channel in range(n_channels):
                w.base_channel_end[channel] = w.channel_end[channel]
                if channels_differ:
                    w.channel_end[channel] = w.carried_channel_end[channel]
            next_finish, next_device = np.int64(NEVER), np.int64(0)
            for device in range(n_devices):
                here = w.device[device]
                if fresh:
                    here.waiting = here.running
                while not fresh and here.waiting < b.device[device + 1].first:
                    if b.op[b.sequence[here.waiting]].ready >= begin:
                        break
                    here.waiting += 1
                here.first_added = here.last_added = NIL
                here.first_finish = NEVER
                here.free = here.early_end if fresh else 0
                if here.running < here.waiting:
                    op = b.sequence[here.running]
                    here.free = b.op[b.sequence[here.waiting - 1]].finish
                    here.first_finish = (b.op[op].finish << SHIFT) | op
                    if here.first_finish < next_finish:
                        next_finish, next_device = here.first_finish, np.int64(device)
            n_heap = head = tail = 0
            if fresh:
                for op in g.seeds[: len(g.seeds) - early]:
                    last, _ = _to_come(g.input_ptr, g.producer, g.edge, b.position, b.arrival, op, early)
                    if last < 0:
                        far, near = _from_prologue(
                            g.input_ptr,
                            g.producer,
                            g.edge,
                            b.position,
                            b.arrival,
                            b.op,
                            w.op,
                            w.edge,
                            devices,
                            op,
                            early,
                            prologue,
                            reordered,
                        )
                        n_heap = _wait(w.op, w.dirty, w.heap, n_heap, op, epoch, max(far, near))
            else:
                # The queue: ops that lack nothing but are not ready before this instant.
                for index in range(b.early[2]):
                    op = b.late_readers[index]
                    if b.op[op].complete < first and b.op[op].ready >= begin:
                        n_heap = _wait(w.op, w.dirty, w.heap, n_heap, op, epoch, b.op[op].ready)
                for transfer in range(under_way, b.sent[first]):
                    sent = b.transfer[transfer]
                    if sent.finish >= begin:
                        tensor, target = np.int64(sent.tensor), np.int64(sent.target)
                        n_heap = _readers_wait(
                            g.consumer_ptr,
                            g.consumers,
                            b.op,
                            before,
                            w.op,
                            w.dirty,
                            w.heap,
                            n_heap,
                            tensor,
                            target,
                            epoch,
                            first,
                        )
                number = first - 1
                while number >= 0 and b.op[b.order[number]].finish == begin:
                    op = b.order[number]
                    target = np.int64(before[op])
                    for tensor in range(g.output_ptr[op], g.output_ptr[op + 1]):
                        n_heap = _readers_wait(
                            g.consumer_ptr,
                            g.consumers,
                            b.op,
                            before,
                            w.op,
                            w.dirty,
                            w.heap,
                            n_heap,
                            np.int64(tensor),
                            target,
                            epoch,
                            first,
                        )
                    number -= 1
            n_dirty = n_heap
            for index in range(n_carried):
                op = w.carried[index]
                missing, ready = 0, w.op[op].carried_ready
                for slot in range(g.input_ptr[op], g.input_ptr[op + 1]):
                    place = b.position[g.producer[slot]]
                    if place >= first:
                        missing += 1
                    elif place >= reached:
                        ready = max(ready, b.arrival[g.edge[slot]])
                if missing > 0 and w.op[op].loaded == epoch:
                    w.op[op].missing, w.op[op].ready = missing, ready
                elif missing > 0:
                    n_dirty = _follow(w.op, w.dirty, n_dirty, op, epoch, missing, ready)

            w.fate[2] += 1
            # Changes that follow close upon each other are cheaper in one window than in many.
            windows += 1
            spent += WINDOW_COST + (max(0, b.sent[first] - under_way) >> 3)
            done, highest, not_before, now, all_loaded = first, np.int64(-1), first + windows, begin, False
            same = False
            while not same:
                ready = w.queue[head] if head < tail else np.int64(NEVER)
                from_heap = n_heap > 0 and w.heap[0] < ready
                if from_heap:
                    ready = w.heap[0]
                if (ready >> SHIFT) < (next_finish >> SHIFT):
                    if from_heap:
                        n_heap = pop_key(w.heap, n_heap)
                    else:
                        head += 1
                    op = np.uint32(ready & MASK)
                    device = np.int64(devices[op])
                    here, at = w.device[device], w.op[op]
                    finish = max(ready >> SHIFT, here.free) + g.op_ns[g.device_row[device], op]
                    here.free = at.finish = finish
                    if finish + g.tail[op] + total >= below:
                        step[row] = finish + g.tail[op] + total
                        break
                    at.after = NIL
                    if here.last_added == NIL:
                        here.first_added = op
                        if here.running == here.waiting:
                            here.first_finish = (finish << SHIFT) | op
                            if here.first_finish < next_finish:
                                next_finish, next_device = here.first_finish, device
                    else:
                        w.op[here.last_added].after = op
                    here.last_added = op
                    continue
                if next_finish == NEVER:
                    step[row] = now + total
                    break

                op = np.uint32(next_finish & MASK)
                if done >= not_before and done == highest + 1 and b.order[done] == op:
                    not_before = _not_before(b.position, b.op, moved, done)
                    if not_before <= done:
                        at_base = b.op[op].finish
                        soon = next_finish >> SHIFT
                        shift = soon - at_base
                        same = True
                        if shift != 0:
                            for device in range(n_devices):
                                same = same and w.device[device].running == w.device[device].waiting
                        if same and shift != 0 and not all_loaded:
                            # What is under way since before the window arrives at another time than shifted.
                            all_loaded = True
                            for transfer in range(under_way, b.sent[first]):
                                sent = b.transfer[transfer]
                                if sent.finish < begin:
                                    continue
                                for edge in range(g.consumer_ptr[sent.tensor], g.consumer_ptr[sent.tensor + 1]):
                                    other = g.consumers[edge]
                                    if before[other] == sent.target and w.op[other].loaded != epoch:
                                        missing, ready = _received(
                                            g.input_ptr,
                                            g.producer,
                                            g.edge,
                                            b.position,
                                            b.arrival,
                                            other,
                                            first,
                                            early,
                                            w.edge,
                                            prologue,
                                            total,
                                        )
                                        n_dirty = _follow(w.op, w.dirty, n_dirty, other, epoch, missing, ready)
                            spent += max(0, b.sent[first] - under_way) >> 3
                        index = 0
                        while same and index < n_dirty:
                            other = w.dirty[index]
                            here_op, there = w.op[other], b.op[other]
                            # 0: stands differently from the base, 1: the same so far, 2: and from now on
                            verdict = 2
                            if b.position[other] >= done and here_op.finish >= 0:
                                as_base = there.ready < at_base and here_op.finish == there.finish + shift
                                verdict = 1 if as_base else 0
                            elif b.position[other] >= done:
                                verdict = 1  # what lacks an input is carried to when it does not
                                if here_op.missing == 0:  # in the queue here, so not yet taken out of it there
                                    waits = there.ready >= at_base
                                    same_time = max(here_op.ready, soon) == there.ready + shift
                                    verdict = 1 if waits and same_time else 0
                            if verdict == 0:  # looked at first next time
                                same = False
                                w.dirty[index], w.dirty[0] = w.dirty[0], other
                            elif verdict == 1:
                                index += 1
                            else:
                                n_dirty -= 1
                                w.dirty[index] = w.dirty[n_dirty]
                                here_op.in_dirty = 0
                        spent += index >> 4
                        not_before = done + (index >> 2)  # looking on at every finish would cost more than it saves
                        if same:
                            continue

                spent += 1
                w.fate[3] += 1
                if spent > most:
                    possible = False
                    break
                now, source = next_finish >> SHIFT, next_device
                home = w.device[source]
                if home.running < home.waiting:
                    home.running += 1
                else:
                    home.first_added = w.op[op].after
                    if home.first_added == NIL:
                        home.last_added = NIL
                home.first_finish = NEVER
                if home.running < home.waiting:
                    other = b.sequence[home.running]
                    home.first_finish = (b.op[other].finish << SHIFT) | other
                elif home.first_added != NIL:
                    home.first_finish = (w.op[home.first_added].finish << SHIFT) | home.first_added
                next_finish = np.int64(NEVER)
                for device in range(n_devices):
                    if w.device[device].first_finish < next_finish:
                        next_finish, next_device = w.device[device].first_finish, np.int64(device)
                highest = max(highest, np.int64(b.position[op]))
                done += 1
                for tensor in range(g.output_ptr[op], g.output_ptr[op + 1]):
                    mark += 1
                    home.arrival = now
                    for request in range(
                        _requests(g.consumer_ptr, g.consumers, devices, w.device, tensor, source, mark)
                    ):
                        target = w.device[request].request
                        w.device[target].arrival = _send(
                            g.route_ptr,
                            g.route,
                            w.channel_end,
                            g.pair_class,
                            g.transfer_ns,
                            g.shared,
                            tensor,
                            source,
                            target,
                            now,
                        )
                    for edge in range(g.consumer_ptr[tensor], g.consumer_ptr[tensor + 1]):
                        consumer = g.consumers[edge]
                        at = w.op[consumer]
                        if at.loaded != epoch:
                            missing, ready = _received(
                                g.input_ptr,
                                g.producer,
                                g.edge,
                                b.position,
                                b.arrival,
                                consumer,
                                first,
                                early,
                                w.edge,
                                prologue,
                                total,
                            )
                            n_dirty = _follow(w.op, w.dirty, n_dirty, consumer, epoch, missing, ready)
                        elif at.in_dirty == 0:
                            w.dirty[n_dirty], at.in_dirty = consumer, 1
                            n_dirty += 1
                        at.ready = max(at.ready, w.device[devices[consumer]].arrival)
                        at.missing -= 1
                        if at.missing == 0:
                            tail, n_heap = _enqueue(w.queue, w.heap, head, tail, n_heap, (at.ready << SHIFT) | consumer)
            w.epoch[1] = mark
            if not same:
                break
            # What still differs matters only to some later events: carry it to them.
            n_carried, channels_differ = 0, False
            for index in range(n_dirty):
                other = w.dirty[index]
                at = w.op[other]
                if at.finish < 0 and at.missing > 0:
                    _, ready = _received(
                        g.input_ptr, g.producer, g.edge, b.position, b.arrival, other, done, 0, w.edge, prologue, total
                    )
                    if max(at.ready - shift, at_base) != max(ready, at_base):
                        w.carried[n_carried], at.carried_ready = other, at.ready - shift
                        n_carried += 1
            if g.shared:
                _channels_between(g, b, before, w.base_channel_end, first, done)
                for channel in range(n_channels):
                    end, base_end = w.channel_end[channel] - shift, w.base_channel_end[channel]
                    differs = max(end, at_base) != max(base_end, at_base)
                    channels_differ = channels_differ or differs
                    w.carried_channel_end[channel] = end if differs else base_end
            total += shift
            reached, fresh = done, False

        for op in moved:
            devices[op] = before[op]
        if step[row] != FULL_RUN:
            w.fate[0] = max(0, w.fate[0] - 1)
            continue
        w.fate[4] += 1
        if spent > most:
            w.fate[0] = min(w.fate[0] + 1, LONGEST_PAUSE)
            w.fate[1] = (1 << w.fate[0]) - 1
