"""Peak memory of a finished run (R7, R8), device by device.

Nothing in memory depends on the order of events at an instant, so a run is simulated without memory, and one sweep over
its timeline follows. Each allocation is freed with one completion: that of an op on the same device, or that of the
last transfer from it. So the sizes freed by each op are summed first. Then each device merges four lists, all in order
of time: its ops by start (they allocate), its copies by start of the transfer (they allocate), its ops by finish (they
free), and the transfers that end the life of one of its tensors, by finish (they free). Frees come first at an instant
(R5, R7), so the frees up to an instant precede its allocations.

The sweep finds, for each device, the peak and the first instant above the capacity; the op at fault follows from them
in :func:`simdev.sim.fast.simulate_fast` (R8).
"""

from __future__ import annotations

import numpy as np

from simdev.sim.kernels.compiled import part
from simdev.sim.kernels.heap import sort_by
from simdev.sim.kernels.state import NEVER, UNKNOWN, Inputs, Timeline, Whole, Workspace


@part
def measure(inputs: Inputs, devices, row, below, timeline: Timeline, workspace: Workspace, step, peak, overflow):
    """Write the step time of a run into row ``row`` and, if it is less than ``below``, the memory, else UNKNOWN."""
    step[row] = timeline.count[1]
    if step[row] >= below:
        peak[row] = overflow[row] = UNKNOWN
        return
    if inputs.weightless:
        overflow[row] = 0
        for device in range(len(inputs.slots)):
            peak[row, device], workspace.over_time[device] = 0, -1
        return
    sum_frees(inputs, devices, timeline, workspace)
    list_transfers(inputs, devices, timeline, workspace)
    overflow[row] = 0
    for device in range(len(inputs.slots)):
        peak[row, device] = sweep(inputs, device, timeline, workspace)
        overflow[row] += max(0, peak[row, device] - inputs.capacity[device])


@part
def sum_frees(inputs: Inputs, devices, timeline: Timeline, workspace: Workspace):
    """``freed_by_op``: the bytes that the finish of each op frees on its device. ``freed_late``: the tensors whose last
    transfer frees them at home. ``level``: the persistent bytes per device."""
    op_finish, granule, sent_until = timeline.op_finish, inputs.granule, workspace.sent_until
    freed_by_op, freed_late, last_op = workspace.freed_by_op, workspace.freed_late, workspace.last_op
    for device in range(len(inputs.slots)):
        workspace.level[device], last_op[device] = 0, -1
    for op in range(len(devices)):
        grain = granule[devices[op]]
        freed_by_op[op] = inputs.workspace_size[grain, op]
        workspace.level[devices[op]] += inputs.persistent_size[grain, op]
    for tensor in range(len(inputs.tensor_producer)):
        producer = inputs.tensor_producer[tensor]
        home = devices[producer]
        edge, stop = inputs.consumer_ptr[tensor], inputs.consumer_ptr[tensor + 1]
        until, last = op_finish[producer], producer  # the last op at home that needs it
        for where in range(edge, stop):
            op = inputs.consumers[where]
            device = devices[op]
            if device == home:
                if op_finish[op] > until:
                    until, last = op_finish[op], op
            elif last_op[device] < 0 or op_finish[op] > op_finish[last_op[device]]:
                last_op[device] = op
        if sent_until[tensor] >= 0:
            for where in range(edge, stop):  # a copy lives until its last consumer there
                device = devices[inputs.consumers[where]]
                if last_op[device] >= 0:
                    freed_by_op[last_op[device]] += inputs.tensor_size[granule[device], tensor]
                    last_op[device] = -1
        freed_late[tensor] = sent_until[tensor] > until and not inputs.tensor_result[tensor]
        if sent_until[tensor] <= until and not inputs.tensor_result[tensor]:
            freed_by_op[last] += inputs.home_size[granule[home], tensor]


@part
def list_transfers(inputs: Inputs, devices, timeline: Timeline, workspace: Workspace):
    """``copies``: the transfers to each device by start; ``freeing``: those that free a tensor on each device by
    finish. The lists of device ``d`` begin at ``copy_ptr[d]`` and ``freeing_ptr[d]``."""
    copy_ptr, copies_end, copies = workspace.copy_ptr, workspace.copies_end, workspace.copies
    freeing_ptr, freeing_end, freeing = workspace.freeing_ptr, workspace.freeing_end, workspace.freeing
    freed_late, sent_last, n_devices = workspace.freed_late, workspace.sent_last, len(inputs.slots)
    n_transfers = np.uint64(timeline.count[0])
    for device in range(n_devices + 1):
        copy_ptr[device] = freeing_ptr[device] = 0
    for transfer in range(n_transfers):
        tensor = timeline.x_tensor[transfer]
        copy_ptr[timeline.x_target[transfer] + 1] += 1
        if freed_late[tensor] and sent_last[tensor] == transfer:
            freeing_ptr[devices[inputs.tensor_producer[tensor]] + 1] += 1
    for device in range(n_devices):
        copies_end[device], freeing_end[device] = copy_ptr[device], freeing_ptr[device]
        copy_ptr[device + 1] += copy_ptr[device]
        freeing_ptr[device + 1] += freeing_ptr[device]
    for transfer in range(n_transfers):
        tensor, device = timeline.x_tensor[transfer], timeline.x_target[transfer]
        copies[copies_end[device]] = transfer
        copies_end[device] += 1
        if freed_late[tensor] and sent_last[tensor] == transfer:
            device = devices[inputs.tensor_producer[tensor]]
            freeing[freeing_end[device]] = transfer
            freeing_end[device] += 1
    for device in range(n_devices):  # nearly in order already
        sort_by(timeline.x_start, copies, workspace.spare, copy_ptr[device], copies_end[device])
        sort_by(timeline.x_finish, freeing, workspace.spare, freeing_ptr[device], freeing_end[device])


@part
def sweep(inputs: Inputs, device, timeline: Timeline, workspace: Workspace):
    """The peak of a device. Sets ``over_time``, the first instant above the capacity (-1: none, -2: the persistent
    bytes alone), and ``over_base``, the bytes in use then after the frees and before the allocations.

    Invariant: before each allocation, ``used`` counts every allocation before it and every free at or before ``now``.
    """
    grain, capacity, used = inputs.granule[device], inputs.capacity[device], workspace.level[device]
    over_time, over_base, freed_by_op = workspace.over_time, workspace.over_base, workspace.freed_by_op
    by_start, op_start, op_finish = timeline.start_order, timeline.op_start, timeline.op_finish
    copies, freeing, by_finish = workspace.copies, workspace.freeing, workspace.line
    x_tensor, x_start, x_finish = timeline.x_tensor, timeline.x_start, timeline.x_finish
    over_time[device], over_base[device] = -2 if used > capacity else -1, 0
    start = finish = np.uint64(workspace.base[device])
    ops_end = np.uint64(workspace.base[device + 1])
    copy, last_copy = np.uint64(workspace.copy_ptr[device]), np.uint64(workspace.copies_end[device])
    free, last_free = np.uint64(workspace.freeing_ptr[device]), np.uint64(workspace.freeing_end[device])
    previous: Whole = np.int64(-1)
    most, before = used, used
    while start < ops_end or copy < last_copy:
        op_time = op_start[by_start[start]] if start < ops_end else NEVER
        copy_time = x_start[copies[copy]] if copy < last_copy else NEVER
        now = min(op_time, copy_time)
        while finish < start:
            op = np.uint32(by_finish[finish] & inputs.line_mask)
            if op_finish[op] > now:
                break
            used -= freed_by_op[op]
            finish += np.uint64(1)
        while free < last_free and x_finish[freeing[free]] <= now:
            used -= inputs.home_size[grain, x_tensor[freeing[free]]]
            free += np.uint64(1)
        if now != previous:
            previous, before = now, used
        if op_time == now:
            used += inputs.start_size[grain, by_start[start]]
            start += np.uint64(1)
        else:
            used += inputs.tensor_size[grain, x_tensor[copies[copy]]]
            copy += np.uint64(1)
        if used > most:
            most = used
            if over_time[device] == -1 and used > capacity:
                over_time[device], over_base[device] = now, before
    return most
