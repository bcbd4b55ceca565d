"""What the kernels of moves read and write: the inputs, the recorded run, and the working arrays of one thread.

The conventions are those of :mod:`simdev.sim.kernels.state`. Arrays that are read together are columns of one record
array, because each array that a kernel knows is seven values to its compiler. This module does not import Numba.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np

EVERY = 64  # finishes between two snapshots of the base


def _rows(long: str, short: str = "") -> np.dtype:
    return np.dtype(
        [(name, np.int64) for name in long.split()] + [(name, np.int32) for name in short.split()], align=True
    )


def _records(length: int, rows: np.dtype) -> np.ndarray:
    """Zeros. Without Numba's compilation, as for debugging, only a recarray has its columns as attributes."""
    records = np.zeros(length, rows)
    return records if os.environ.get("NUMBA_DISABLE_JIT", "0") == "0" else records.view(np.recarray)


BASE_OP = _rows("finish ready early_ready late_ready", "complete")
BASE_TRANSFER = _rows("finish", "tensor target")
BASE_DEVICE = _rows("first early_end")
BASE_SIZE = _rows("early readers late_readers senders step_ns")
OP = _rows("finish ready loaded touched early_ready carried_ready", "missing after listed")
DEVICE = _rows("running waiting free arrival early_end first_added last_added touched")
EDGE = _rows("touched arrival")
MOVE = _rows("number total reached spent most fresh reordered windows news carried channels_differ")
WINDOW = _rows("number first under_way begin done shift now suspects enqueued")
TALLY = _rows("given_up pause windows full_runs")


class MoveInputs(NamedTuple):
    """What does not depend on a placement. The fields up to ``route`` are those of the same name in
    :class:`simdev.sim.kernels.state.Inputs`, so the functions of :mod:`.send` take this tuple, too."""

    contention: int
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
    producer: np.ndarray  # of each input of each op, as input_ptr lists them: the op that makes it
    edge: np.ndarray  # and its place in consumers
    sources: np.ndarray  # the ops without inputs, in order
    rest_ns: np.ndarray  # [k]: the least duration of all ops but the first k sources
    seeds: np.ndarray  # the ops that read from sources only, then all sources, last first
    tail: np.ndarray  # a lower bound of the time from the end of an op to that of the step


class BaseRun(NamedTuple):
    """The recorded run. Its finishes are numbered in the order (time, op); ``n`` ops, ``D`` devices.

    * ``op`` ``(n,)``: ``finish``; ``ready``, when its last input arrives; ``complete``, the number of the finish that
      makes its last input; ``early_ready``, when the last of its inputs arrives that the prologue sends from other
      devices, and ``late_ready``, the last of those that are made after the prologue.
    * ``order`` ``(n,)``: the ops by number of their finish, and ``position``, its inverse. ``sequence`` ``(n,)``: the
      ops by device and start, from ``device.first`` on. ``device`` has a row more than there are devices.
    * ``arrival``: when each consumer of each tensor has it. ``transfer``: the transfers in the order of their requests;
      those from ``sent[i]`` on are requested at finish ``i``.
    * Snapshots: row ``i`` holds what is just before finish ``i * EVERY``: ``channel_end``; ``running`` and ``waiting``,
      per device, the place in ``sequence`` of the first op that has not finished and of the first that is not ready
      before; ``under_way``, the first transfer that has not ended.
    * The prologue: ``size.early`` finishes. It ends at ``device.early_end``. ``readers[:size.readers]`` are the ops
      with an ``early_ready``, by ``complete``; ``late_readers[:size.late_readers]`` those of them whose last input it
      is; ``senders[:size.senders]`` the finishes of ops that send. ``size.step_ns`` is the step time.
    """

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
    size: np.ndarray
    readers: np.ndarray
    late_readers: np.ndarray
    senders: np.ndarray


class MoveWork(NamedTuple):
    """The working arrays of one thread. ``move``, ``window`` and ``tally`` have one row.

    * ``move``, the move at hand: its ``number`` (moves and windows are numbered together); ``total``, the sum of the
      shifts so far; ``reached``, the finishes of the base that are known to hold but for that sum; ``spent``, the
      finishes that it has cost, of at most ``most``; ``fresh``, 1 if the next window begins where the prologue ends;
      ``reordered``, 1 if an op of the prologue moves; the ``windows`` so far; the length of ``news``, and of
      ``carried``; ``channels_differ``, 1 if a channel is free at another time than in the base.
    * ``window``, the window at hand: its ``number``; the finish of the base that it begins at (``first``, at time
      ``begin``) and the first transfer ``under_way`` then; the finishes ``done``, the time ``now`` and the ``shift``
      from the base; the number of ``suspects``, and of ops ``enqueued`` before the first event.
    * ``op``: ``finish`` is -1 until the op is taken from the queue; ``missing`` and ``ready`` are its state if
      ``loaded`` is the number of the window; ``after`` is the next op of its device; ``listed``: it is a suspect.
      ``early_ready`` is what it is in the base, after the move, if ``touched`` is the number of the move; so is
      ``edge.arrival``. ``carried_ready``: the latest arrival of the inputs that a carried op has.
    * ``device``: ``running`` and ``waiting`` as in the base; ops that are taken from the queue stand behind those, from
      ``first_added`` to ``last_added``. ``first_finish`` is the key of the first op that has not finished.
      ``early_end`` is the end of the prologue. ``touched``: a move of the prologue takes an op to or from the device.
    * ``suspects``: the ops whose state may differ from the base. ``carried``: those whose difference waits for an input
      after the window. ``news``: the readers of tensors of the prologue that arrive at another time.
    * ``channel_end``: of the move; ``base_channel_end``: of the base, at the same finish; ``carried_channel_end``: of
      the move, after a window, with the shift taken off.
    * ``tally``: the moves ``given_up`` of late, the moves still to be run in full (``pause``), and since the start the
      ``windows`` and the ``full_runs`` asked for.
    """

    op: np.ndarray
    device: np.ndarray
    edge: np.ndarray
    suspects: np.ndarray
    queue: np.ndarray
    heap: np.ndarray
    carried: np.ndarray
    news: np.ndarray
    first_finish: np.ndarray
    channel_end: np.ndarray
    base_channel_end: np.ndarray
    carried_channel_end: np.ndarray
    move: np.ndarray
    window: np.ndarray
    tally: np.ndarray


def new_base_run(n_ops: int, n_edges: int, n_devices: int, n_channels: int) -> BaseRun:
    """Arrays for the record of one run."""
    short, rows = np.uint32, n_ops // EVERY + 1
    return BaseRun(
        op=_records(n_ops, BASE_OP),
        **{name: np.zeros(n_ops, short) for name in ("position", "order", "sequence")},
        arrival=np.zeros(n_edges, np.int64),
        transfer=_records(n_edges, BASE_TRANSFER),
        sent=np.zeros(n_ops + 1, short),
        device=_records(n_devices + 1, BASE_DEVICE),
        channel_end=np.zeros((rows, n_channels), np.int64),
        running=np.zeros((rows, n_devices), short),
        waiting=np.zeros((rows, n_devices), short),
        under_way=np.zeros(rows, short),
        size=_records(1, BASE_SIZE),
        **{name: np.zeros(n_ops, short) for name in ("readers", "late_readers", "senders")},
    )


def new_move_work(n_ops: int, n_edges: int, n_devices: int, n_channels: int) -> MoveWork:
    """Working arrays of one thread."""
    return MoveWork(
        op=_records(n_ops, OP),
        device=_records(n_devices, DEVICE),
        edge=_records(n_edges, EDGE),
        suspects=np.zeros(n_ops, np.uint32),
        queue=np.zeros(n_ops, np.int64),
        heap=np.zeros(n_ops, np.int64),
        carried=np.zeros(n_ops, np.uint32),
        news=np.zeros(n_ops, np.uint32),
        first_finish=np.zeros(n_devices, np.int64),
        **{name: np.zeros(n_channels, np.int64) for name in ("channel_end", "base_channel_end", "carried_channel_end")},
        move=_records(1, MOVE),
        window=_records(1, WINDOW),
        tally=_records(1, TALLY),
    )
