"""What every kernel reads and writes: the inputs of a problem, the timeline of a run, and one workspace.

The loops agree on a few conventions.

* A *key* is a time and an op number in one int64: ``time << shift | op``. Keys order as (time, op) does, which is the
  order of R2 and R3. ``Inputs.shift`` is as many bits as the op numbers need, at least ``SHIFT``. The loops that use
  keys serve only problems whose times fit into the other bits: 2.4 hours up to 2^20 ops, nine minutes at 2^24.
* The *state* of an op is a key with, in place of the op number, the number of inputs that are still missing:
  ``latest arrival so far << shift | missing inputs``. An op is ready when the low bits are 0. Where states are the only
  keys (devices that run their ops by number and send over channels of their own), ``shift`` is what this number needs.
* Indices are unsigned, because Numba tests signed indices for being negative. So are the constants that indices are
  compared with.

This module does not import Numba.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import numpy as np

SHIFT, MASK = 20, (1 << 20) - 1  # of all problems of up to 2**20 ops, the only ones that the kernel of moves serves
NEVER = np.iinfo(np.int64).max
NONE, ONE = np.uint64(0), np.uint64(1)

FIFO, PRIORITY, PROGRAM = 0, 1, 2  # positions in ORDERS
SHARED, FREE, FAIR = 0, 1, 2  # positions in CONTENTIONS: fifo, none, fair
GENERAL_LOOP, FIFO_LOOP, FAIR_LOOP, PRIORITY_LOOP, IN_ORDER_LOOP = range(5)  # values of Inputs.loop

OK, STUCK = 0, 1
UNKNOWN = -1  # peaks and overflows that were not computed

Whole = int | np.integer  # what a kernel counts with: a Python int here, an integer of fixed width once compiled
Own = TypeVar("Own", bound=tuple | None)


class Inputs(NamedTuple):
    """Everything that a kernel reads except the placement. ``n`` ops, ``m`` tensors, ``D`` devices, ``G`` distinct
    granularities; ``*_ptr`` arrays hold where the entries of each row begin. The other arrays are those of the
    problem's graph, topology and costs."""

    shift: int  # the bits of a key that hold the op number
    mask: int  # 2**shift - 1
    line_mask: int  # the bits of an entry of Workspace.line that hold the op number
    loop: int  # the loop that serves the problem: one of the five constants above
    weightless: bool  # no op and no tensor takes memory, as in steps of parallel programs
    anywhere: bool  # every device runs every op, and no op is colocated with another
    all_routed: bool  # every two devices have a route
    order: int  # position in ORDERS
    contention: int  # position in CONTENTIONS
    host: int  # the issuing host under the eager runtime, else -1
    op_ns: np.ndarray
    device_row: np.ndarray
    transfer_ns: np.ndarray
    pair_class: np.ndarray
    dispatch_ns: np.ndarray
    gap_ns: np.ndarray
    output_ptr: np.ndarray
    input_ptr: np.ndarray
    inputs: np.ndarray
    tensor_producer: np.ndarray
    tensor_bytes: np.ndarray
    tensor_result: np.ndarray
    consumer_ptr: np.ndarray
    consumers: np.ndarray
    unit_first: np.ndarray  # int32 (n,): the first op of the op's colocation group
    slots: np.ndarray
    slot_ptr: np.ndarray  # int64 (D + 1,): sums of slots
    alone: np.ndarray  # bool (D,): the sends of the device wait for no other device's sends
    route_ptr: np.ndarray
    route: np.ndarray
    pair_latency: np.ndarray
    channel_rate: np.ndarray
    granule: np.ndarray  # int32 (D,): the device's row in the tables below
    tensor_size: np.ndarray  # int64 (G, m): rounded bytes of a copy
    home_size: np.ndarray  # int64 (G, m): rounded bytes at home (0 if the tensor is persistent)
    start_size: np.ndarray  # int64 (G, n): outputs and workspace, allocated when the op starts
    workspace_size: np.ndarray  # int64 (G, n)
    persistent_size: np.ndarray  # int64 (G, n)
    capacity: np.ndarray


class Timeline(NamedTuple):
    """What one run writes: the result. Transfers stand in the order of their requests. ``count`` int64 ``(2,)`` holds
    the number of transfers and the step time in ns. ``start_order`` uint32 ``(n,)`` holds the ops of each device in the
    order of their starts, device by device."""

    op_start: np.ndarray
    op_finish: np.ndarray
    start_order: np.ndarray
    x_tensor: np.ndarray
    x_target: np.ndarray
    x_start: np.ndarray
    x_finish: np.ndarray
    count: np.ndarray  # type: ignore[assignment]  # hides tuple.count, which no one calls


class Workspace(NamedTuple, Generic[Own]):
    """The working arrays of one thread, for all loops. A run fills them anew.

    * Ops: ``state`` ``(n,)``, see above. ``queue`` and ``heap`` ``(n,)``: the ready queue (:mod:`.queue`).
    * Devices: the ops of device ``d`` occupy the places ``base[d]:base[d + 1]`` of ``line``, in the order of their
      finishes. The entries are keys of (finish, op); the general loop and :mod:`.in_order` leave the time out.
      ``started[d]`` is the next free place. ``free[d]`` (one slot) and ``slot_free`` (several) are the times at which
      slots open. ``arrival[d]`` is when the tensor at hand is on ``d``, shifted like a key.
    * Sends (:mod:`.send`): ``sends[head[d]:end[d]]`` are the keys of the ops of ``d`` whose sends are not yet
      requested, and ``first_send[d]`` is the first of them. ``channel_end``: when each channel is free.
      ``sent_until`` and ``sent_last`` ``(m,)``: the end and the number of the tensor's last transfer; -1 without
      transfers.
    * Memory (:mod:`.memory`): the other arrays. ``over_time`` and ``over_base`` ``(D,)`` are results (R8).
    * ``own``: what a single loop needs besides; None for the default rules.
    """

    state: np.ndarray
    queue: np.ndarray
    heap: np.ndarray
    base: np.ndarray
    line: np.ndarray
    started: np.ndarray
    free: np.ndarray
    slot_free: np.ndarray
    arrival: np.ndarray
    sends: np.ndarray
    head: np.ndarray
    end: np.ndarray
    first_send: np.ndarray
    channel_end: np.ndarray
    sent_until: np.ndarray
    sent_last: np.ndarray
    freed_by_op: np.ndarray
    freed_late: np.ndarray
    last_op: np.ndarray
    level: np.ndarray
    over_time: np.ndarray
    over_base: np.ndarray
    copy_ptr: np.ndarray
    copies_end: np.ndarray
    copies: np.ndarray
    freeing_ptr: np.ndarray
    freeing_end: np.ndarray
    freeing: np.ndarray
    spare: np.ndarray
    own: Own


def new_timeline(n_ops: int, n_edges: int) -> Timeline:
    """Arrays for the run of a graph of ``n_ops`` ops and ``n_edges`` tensor-to-consumer pairs."""
    short, edges = np.uint32, (lambda: np.empty(n_edges, np.int64))
    return Timeline(
        np.empty(n_ops, np.int64),
        np.empty(n_ops, np.int64),
        np.empty(n_ops, short),
        np.empty(n_edges, short),
        np.empty(n_edges, short),
        edges(),
        edges(),
        np.zeros(2, np.int64),
    )


def new_workspace(
    n_ops: int, n_tensors: int, n_edges: int, n_devices: int, n_channels: int, n_slots: int, own: Own
) -> Workspace[Own]:
    """Working arrays for one thread. ``own``: what the loop makes for itself."""

    def ints(length, dtype=np.int64):
        return np.zeros(length, dtype)

    per_device = ["started", "head", "end", "first_send", "free", "arrival"]
    per_device += ["last_op", "level", "over_time", "over_base", "copies_end", "freeing_end"]
    return Workspace(
        queue=ints(n_ops),
        heap=ints(n_ops),
        line=ints(n_ops),
        sends=ints(n_ops),
        state=ints(n_ops),
        slot_free=ints(n_slots),
        channel_end=ints(n_channels),
        sent_until=ints(n_tensors),
        sent_last=ints(n_tensors, np.uint32),
        freed_by_op=ints(n_ops),
        copies=ints(n_edges, np.uint32),
        freeing=ints(n_tensors, np.uint32),
        freed_late=ints(n_tensors, np.bool_),
        spare=ints(n_tensors, np.uint32),
        **{name: ints(n_devices + 1) for name in ("base", "copy_ptr", "freeing_ptr")},
        **{name: ints(n_devices) for name in per_device},
        own=own,
    )
