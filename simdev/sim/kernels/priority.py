"""The loop of the policy ``priority`` on devices of one slot: dataflow, contention ``fifo`` or ``none``, no gaps.

As in :mod:`simdev.sim.kernels.fifo`, requests are processed in the order (finish, op), and a send that cannot be
delayed is settled when its op starts. Here, however, a ready op does not know its place on its device: a more urgent
op may become ready before the device is free. So an op waits twice, in the ready queue until its ready time is
reached, and then in the set of ready ranks of its device until the device takes the least.

Each turn takes the earliest of three events: a request, an op that becomes ready, a free device that has a ready op. At
the same instant requests and ready ops precede starts (R5), so a device chooses when all ops that are ready at that
instant are in its set (R2).

Invariant: everything before the earliest of the three is in the timeline. An event taken at ``t`` creates only later
ones: ops and transfers last at least 1 ns.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simdev.sim.kernels.bits import add, set_words, take_least
from simdev.sim.kernels.compiled import kernel, part
from simdev.sim.kernels.memory import measure
from simdev.sim.kernels.placement import is_valid
from simdev.sim.kernels.queue import deliver, drop, enqueue_sources, peek
from simdev.sim.kernels.send import earliest, lay_out, leaves, send, take_next
from simdev.sim.kernels.state import NEVER, NONE, OK, STUCK, Inputs, Timeline, Workspace


class ByPriority(NamedTuple):
    """``by_rank`` ``(n,)``: the ops by rank. ``ready`` holds a set of ranks per device (:mod:`.bits`), ``n_ready`` its
    size. ``due``: the key (time, device) at which a device takes an op."""

    by_rank: np.ndarray
    ready: np.ndarray
    n_ready: np.ndarray
    due: np.ndarray


def new_by_priority(n_ops: int, n_devices: int) -> ByPriority:
    """Arrays for one thread."""
    per_device = np.zeros(n_devices, np.int64), np.zeros(n_devices, np.int64)
    return ByPriority(np.zeros(n_ops, np.uint32), np.zeros(set_words(n_ops) * n_devices, np.uint64), *per_device)


@part
def run_priority(inputs: Inputs, devices, rank, timeline: Timeline, workspace: Workspace[ByPriority]):
    """Simulate one placement, uint32 ``(n,)`` and valid; return OK, or STUCK if an op never ran.

    ``rank`` int64 ``(n,)``: the position of each op in the order of the priorities.
    """
    n, n_devices = len(devices), len(inputs.slots)
    by_rank, ready_ranks = workspace.own.by_rank, workspace.own.ready
    n_ready, due, width = workspace.own.n_ready, workspace.own.due, np.uint64(len(ready_ranks) // n_devices)
    queue, heap, line, free = workspace.queue, workspace.heap, workspace.line, workspace.free
    sends, end, started = workspace.sends, workspace.end, workspace.started
    shift, mask = inputs.shift, inputs.mask
    lay_out(inputs, devices, workspace, 0)
    last = enqueue_sources(workspace, n)
    for device in range(n_devices):
        n_ready[device], due[device] = 0, NEVER
    for word in range(len(ready_ranks)):
        ready_ranks[word] = 0
    for number in range(n):
        by_rank[rank[number]] = number
    first, n_heap, n_transfers, n_started = NONE, 0, NONE, 0
    step, next_due, next_send = np.int64(0), np.int64(NEVER), np.int64(NEVER)

    while True:
        ready, from_heap = peek(queue, heap, first, last, n_heap)
        if next_send < ready and (next_send >> shift) <= (next_due >> shift):
            # R3, R5: the next request.
            op, now, away = np.uint32(next_send & mask), next_send >> shift, np.uint32(1)
            source = devices[op]
            next_send = take_next(workspace, source)
        elif (ready >> shift) <= (next_due >> shift) and ready != NEVER:
            # R2: an op is ready now. Its device takes one as soon as it is free.
            first, n_heap = drop(heap, first, n_heap, from_heap)
            op = np.uint32(ready & mask)
            device = devices[op]
            add(ready_ranks, np.uint64(device) * width, n, np.uint64(rank[op]))
            n_ready[device] += 1
            if n_ready[device] == 1:
                due[device] = (max(ready >> shift, free[device]) << shift) | device
                next_due = min(next_due, due[device])
            continue
        elif next_due == NEVER:
            break
        else:
            # R1, R2: a device takes the most urgent of its ready ops.
            source, start = np.uint32(next_due & mask), next_due >> shift
            op = by_rank[take_least(ready_ranks, np.uint64(source) * width, n)]
            n_ready[source] -= 1
            now = start + inputs.op_ns[inputs.device_row[source], op]
            place = started[source]
            timeline.start_order[place], timeline.op_start[op], timeline.op_finish[op] = op, start, now
            key = (now << shift) | op
            line[place], free[source] = key, now
            started[source] += 1
            n_started += 1
            step = max(step, now)  # R6
            due[source] = (now << shift) | source if n_ready[source] > 0 else NEVER
            next_due = earliest(due)
            away = leaves(inputs, devices, op, source)
            if away != 0 and not inputs.alone[source]:
                # One slot: the ops of a device finish in the order of their starts.
                sends[end[source]] = key
                if workspace.head[source] == end[source]:
                    workspace.first_send[source] = key
                    next_send = min(next_send, key)
                end[source] += 1
                continue
        # R3, R4: the op's tensors are at home, and sent if this is their turn.
        workspace.arrival[source] = now << shift
        for tensor in range(inputs.output_ptr[op], inputs.output_ptr[op + 1]):
            workspace.sent_until[tensor] = -1
            if away != 0:
                n_transfers, step = send(inputs, devices, tensor, source, now, timeline, workspace, n_transfers, step)
            last, n_heap = deliver(inputs, devices, tensor, workspace, first, last, n_heap)
    timeline.count[0], timeline.count[1] = n_transfers, step
    return OK if n_started == n else STUCK


@kernel
def run_many_priority(
    inputs: Inputs,
    placements,
    first,
    stop,
    rank,
    below,
    timeline: Timeline,
    workspace: Workspace[ByPriority],
    step,
    peak,
    overflow,
):
    """See :func:`simdev.sim.kernels.general.run_many`."""
    for row in range(first, stop):
        if not is_valid(inputs, placements[row]):
            return row
        if run_priority(inputs, placements[row], rank, timeline, workspace) != OK:
            return row
        measure(inputs, placements[row], row, below, timeline, workspace, step, peak, overflow)
    return -1
