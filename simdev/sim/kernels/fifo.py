"""The loop of the default rules: dataflow, policy ``fifo``, contention ``fifo`` or ``none``.

It needs no queue of events. Three facts make it exact.

1. *Places on devices are final early.* Under ``fifo`` a device runs its ops in the order (ready time, op number): that
   is the order of the ready queue. An op becomes ready when a tensor arrives, either by an op that is not yet taken
   from the queue, which finishes after the ready time at the queue's front because every op lasts at least 1 ns, or by
   a transfer that is not yet requested, which arrives after its request. So if the front of the queue is earlier than
   the earliest postponed request, no op can still get in before it: its start follows from the slots of its device.
2. *Requests in order settle transfers.* Every channel serves requests in the order in which they are made (R4). If
   requests are processed in the order (finish, op), then tensor and destination, each transfer's start is the latest of
   its request and the ends of the transfers before it on its channels, all of which are known. The earliest postponed
   request is next once no op is ready before it: ops that start at its time or later finish, and send, after it.
3. *A send that cannot be delayed needs no turn.* Tensors that stay on their device arrive at the finish of their op; no
   other device's send can delay a send whose channels no other device uses. Both are settled when the op starts.

Invariant of the loop: all transfers requested before ``next_send``, and all starts of ops that were ready before the
front of the queue, are in the timeline; all ops whose last input has a known arrival, and that have not been taken, are
in the queue. Each turn takes an op or processes the sends of one, so the loop ends.
"""

from __future__ import annotations

import numpy as np

from simdev.sim.kernels.compiled import inlined, kernel, part
from simdev.sim.kernels.memory import measure
from simdev.sim.kernels.placement import is_valid
from simdev.sim.kernels.queue import deliver, drop, enqueue_sources, insert, peek
from simdev.sim.kernels.send import lay_out, leaves, postpone, send, take_next
from simdev.sim.kernels.state import NEVER, NONE, Inputs, Timeline, Workspace


@inlined
def take_slot(inputs: Inputs, slot_free, source, op, ready_ns):
    """Start an op on the slot of ``source`` that opens first (R1); return its start and finish."""
    slot = inputs.slot_ptr[source]
    for other in range(inputs.slot_ptr[source] + 1, inputs.slot_ptr[source + 1]):
        if slot_free[other] < slot_free[slot]:
            slot = other
    start = max(ready_ns, slot_free[slot])
    finish = start + inputs.op_ns[inputs.device_row[source], op]
    slot_free[slot] = finish
    return start, finish


@inlined
def line_up(timeline: Timeline, workspace: Workspace, source, op, key):
    """Note an op as the last to start on ``source``; put it where it finishes."""
    place = np.uint64(workspace.started[source])
    timeline.start_order[place] = op
    workspace.started[source] += 1
    insert(workspace.line, np.uint64(workspace.base[source]), place, key)


@part
def run_fifo(inputs: Inputs, devices, timeline: Timeline, workspace: Workspace):
    """Simulate one placement, uint32 ``(n,)`` and valid. Every op runs."""
    lay_out(inputs, devices, workspace, 0)
    last = enqueue_sources(workspace, len(devices))
    first, n_heap, n_transfers = NONE, 0, NONE
    step, next_send = np.int64(0), np.int64(NEVER)
    queue, heap, free = workspace.queue, workspace.heap, workspace.free
    shift, mask = inputs.shift, inputs.mask

    while True:
        ready, from_heap = peek(queue, heap, first, last, n_heap)
        if (ready >> shift) < (next_send >> shift):
            # R1, R2: by fact 1 the place of this op is final.
            first, n_heap = drop(heap, first, n_heap, from_heap)
            op = np.uint32(ready & mask)
            source = devices[op]
            if inputs.slots[source] == 1:
                start = max(ready >> shift, free[source])
                now = start + inputs.op_ns[inputs.device_row[source], op]
                free[source] = now
            else:
                start, now = take_slot(inputs, workspace.slot_free, source, op, ready >> shift)
            timeline.op_start[op], timeline.op_finish[op] = start, now
            step = max(step, now)  # R6
            key = (now << shift) | op
            line_up(timeline, workspace, source, op, key)
            away = leaves(inputs, devices, op, source)
            if away != 0 and not inputs.alone[source]:
                next_send = postpone(workspace, source, key, next_send)
                continue
        elif next_send == NEVER:
            break
        else:
            # R3, R5: the next request. An op that is ready at the same instant starts after it.
            op, now, away = np.uint32(next_send & mask), next_send >> shift, np.uint32(1)
            source = devices[op]
            next_send = take_next(workspace, source)
        # R3, R4: the op's tensors are at home, and sent if this is their turn.
        workspace.arrival[source] = now << shift
        for tensor in range(inputs.output_ptr[op], inputs.output_ptr[op + 1]):
            workspace.sent_until[tensor] = -1
            if away != 0:
                n_transfers, step = send(inputs, devices, tensor, source, now, timeline, workspace, n_transfers, step)
            last, n_heap = deliver(inputs, devices, tensor, workspace, first, last, n_heap)
    timeline.count[0], timeline.count[1] = n_transfers, step


@kernel
def run_many_fifo(
    inputs: Inputs,
    placements,
    first,
    stop,
    below,
    timeline: Timeline,
    workspace: Workspace,
    step,
    peak,
    overflow,
    known,
):
    """See :func:`simdev.sim.kernels.general.run_many`. If ``known``, ``timeline`` and ``workspace`` hold the run of the
    first row already, and only its memory is computed."""
    for row in range(first, stop):
        if not (known and row == first):
            if not is_valid(inputs, placements[row]):
                return row
            run_fifo(inputs, placements[row], timeline, workspace)
        measure(inputs, placements[row], row, below, timeline, workspace, step, peak, overflow)
    return -1
