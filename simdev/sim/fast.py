"""The fast engine: runs one placement, or many at once, through the compiled loops in :mod:`simdev.sim.kernels`."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

import numpy as np

from simdev.errors import InvalidInput
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.sim.inputs import default_rank, priority_rank, problem_arrays
from simdev.sim.kernels.state import (
    FAIR_LOOP,
    FIFO_LOOP,
    GENERAL_LOOP,
    IN_ORDER_LOOP,
    PRIORITY_LOOP,
    Timeline,
    Workspace,
    new_timeline,
    new_workspace,
)
from simdev.sim.schedule import Outcomes, Schedule

NO_LIMIT = int(np.iinfo(np.int64).max)
_KEPT = threading.local()


def simulate_fast(problem: Problem, placement: Placement) -> Schedule:
    """See :func:`simdev.sim.simulate`."""
    placement.check(problem)
    devices = placement.devices
    timeline, workspace = new_buffers(problem)
    step, peak, _ = run_rows(problem, devices[None].astype(np.uint32), placement.priority, timeline, workspace)
    count = int(timeline.count[0])
    order = _by_tensor(problem, timeline.x_tensor[:count], timeline.x_target[:count])
    tensor, target = (column[:count][order].view(np.int32) for column in (timeline.x_tensor, timeline.x_target))
    start, finish = timeline.x_start[:count][order], timeline.x_finish[:count][order]
    overflow_op = np.full(problem.topology.n_devices, -1, np.int32)
    for device in np.flatnonzero(workspace.over_time >= 0):
        copies = tensor[(target == device) & (start == workspace.over_time[device])]
        starting = np.flatnonzero((devices == device) & (timeline.op_start == workspace.over_time[device]))
        overflow_op[device] = _first_overflow(problem, int(device), int(workspace.over_base[device]), starting, copies)
    return Schedule(
        step_ns=int(step[0]),
        op_start=timeline.op_start,
        op_finish=timeline.op_finish,
        transfer_tensor=tensor,
        transfer_source=devices[problem.graph.tensor_producer[tensor]],
        transfer_target=target,
        transfer_start=start,
        transfer_finish=finish,
        peak_bytes=peak[0],
        overflow_bytes=np.maximum(peak[0] - problem.topology.memory_bytes, 0),
        overflow_op=overflow_op,
        comm_bytes=int(problem.graph.tensor_bytes[tensor].sum()),
    )


def simulate_many_fast(
    problem: Problem,
    devices: np.ndarray,
    threads: int | None = None,
    below: int | None = None,
    priority: np.ndarray | None = None,
) -> Outcomes:
    """See :func:`simdev.sim.simulate_many`."""
    placements = np.asarray(devices)
    if priority is not None and (priority.shape != placements.shape or priority.dtype.kind not in "iu"):
        raise InvalidInput(
            f"expected whole numbers of shape {placements.shape}, got {priority.dtype} {priority.shape}",
            source="priorities",
        )
    if placements.ndim != 2 or placements.shape[1] != problem.graph.n_ops or placements.dtype.kind not in "iu":
        raise InvalidInput(
            f"expected whole numbers of shape (k, {problem.graph.n_ops}), got {placements.dtype} {placements.shape}",
            source="placements",
        )
    if len(placements) and not (0 <= placements.min() and placements.max() < problem.topology.n_devices):
        row = int(np.flatnonzero(((placements < 0) | (placements >= problem.topology.n_devices)).any(axis=1))[0])
        Placement(placements[row]).check(problem, source=f"placement {row}")
    placements = placements.astype(np.uint32, order="C")
    k, workers = len(placements), max(1, min(threads or 1, len(placements)))
    limit = NO_LIMIT if below is None else below
    step, overflow, peak = _answers(problem, k)
    problem_arrays(problem)  # built once, before several threads ask for it

    def work(first: int, stop: int) -> int:
        buffers = _kept_buffers(problem)
        if priority is None or problem.rules.order != "priority":
            return _run(problem, placements, first, stop, None, limit, *buffers, step, peak, overflow)
        for row in range(first, stop):
            if _run(problem, placements, row, row + 1, priority[row], limit, *buffers, step, peak, overflow) >= 0:
                return row
        return -1

    bounds = [k * part // workers for part in range(workers + 1)]
    if workers == 1:
        failed = [work(0, k)]
    else:
        with ThreadPoolExecutor(workers) as pool:
            failed = list(pool.map(work, bounds[:-1], bounds[1:]))
    for row in failed:
        if row >= 0:
            Placement(placements[row]).check(problem, source=f"placement {row}")
            raise InvalidInput("an op can never run", source=f"placement {row}")
    return Outcomes(step, peak, overflow)


def run_rows(problem: Problem, placements: np.ndarray, priority, timeline, workspace):
    """Step times, peaks and overflows of valid placements, uint32 ``(k, n)``. The last run stays in ``timeline``."""
    step, overflow, peak = _answers(problem, len(placements))
    if (
        _run(problem, placements, 0, len(placements), priority, NO_LIMIT, timeline, workspace, step, peak, overflow)
        >= 0
    ):
        raise InvalidInput("an op can never run", source=problem.graph.name)
    return step, peak, overflow


def _run(problem: Problem, placements, first, stop, priority, below, timeline, workspace, step, peak, overflow) -> int:
    """Simulate the rows ``first:stop`` with the loop for the problem's rules; return the first row that failed, or
    -1."""
    inputs = problem_arrays(problem)
    if inputs.loop == FIFO_LOOP:
        from simdev.sim.kernels.fifo import run_many_fifo

        return run_many_fifo(inputs, placements, first, stop, below, timeline, workspace, step, peak, overflow, False)
    if inputs.loop == FAIR_LOOP:
        from simdev.sim.kernels.fair import run_many_fair

        return run_many_fair(inputs, placements, first, stop, below, timeline, workspace, step, peak, overflow)
    rank = np.zeros(0, np.int64)
    if problem.rules.order == "priority":
        rank = default_rank(problem) if priority is None else priority_rank(priority)
    if inputs.loop == PRIORITY_LOOP:
        from simdev.sim.kernels.priority import run_many_priority as run_many
    elif inputs.loop == IN_ORDER_LOOP:
        from simdev.sim.kernels.in_order import run_many_in_order as run_many
    else:
        from simdev.sim.kernels.general import run_many
    return run_many(inputs, placements, first, stop, rank, below, timeline, workspace, step, peak, overflow)


def new_buffers(problem: Problem) -> tuple[Timeline, Workspace]:
    """What one thread writes to: a timeline, and the workspace of the loop that serves the problem."""
    graph, topology, loop = problem.graph, problem.topology, problem_arrays(problem).loop
    n_ops, n_edges, n_devices, n_channels = graph.n_ops, graph.n_edges, topology.n_devices, len(topology.channels)
    own: tuple | None = None
    if loop == FAIR_LOOP:
        from simdev.sim.kernels.fair import new_fair

        own = new_fair(problem)
    elif loop == PRIORITY_LOOP:
        from simdev.sim.kernels.priority import new_by_priority

        own = new_by_priority(n_ops, n_devices)
    elif loop == IN_ORDER_LOOP:
        from simdev.sim.kernels.in_order import new_in_order

        own = new_in_order(n_ops, n_edges, n_devices, eager=problem.rules.runtime == "eager")
    elif loop == GENERAL_LOOP:
        from simdev.sim.kernels.general import new_general

        own = new_general(n_ops, n_edges, n_devices, n_channels, fair=problem.rules.contention == "fair")
    sizes = n_ops, graph.n_tensors, n_edges, n_devices, n_channels, int(topology.slots.sum())
    return new_timeline(n_ops, n_edges), new_workspace(*sizes, own)


def _kept_buffers(problem: Problem) -> tuple[Timeline, Workspace]:
    """The buffers of this thread, kept as long as the problem: a search evaluates placements one by one."""
    if not hasattr(_KEPT, "buffers"):
        _KEPT.buffers = WeakKeyDictionary()
    if problem not in _KEPT.buffers:
        _KEPT.buffers[problem] = new_buffers(problem)
    return _KEPT.buffers[problem]


def _answers(problem: Problem, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Step times, summed overflows and peaks of ``k`` runs."""
    return np.empty(k, np.int64), np.empty(k, np.int64), np.empty((k, problem.topology.n_devices), np.int64)


def _by_tensor(problem: Problem, tensor: np.ndarray, target: np.ndarray) -> np.ndarray:
    """int64: the order of transfers by (tensor, target), in which a schedule lists them."""
    if problem.rules.runtime == "eager":
        return np.lexsort((target, tensor))
    # All transfers of a tensor are requested at one instant, in the order of their targets: they stand together.
    begin = np.flatnonzero(np.diff(tensor.view(np.int32), prepend=-1))
    run = np.full(problem.graph.n_tensors, -1)
    run[tensor[begin]] = np.arange(len(begin))
    run = run[run >= 0]
    length = np.diff(begin, append=len(tensor))[run]
    return np.arange(len(tensor)) + np.repeat(begin[run] - np.cumsum(length) + length, length)


def _first_overflow(problem: Problem, device: int, used: int, starting: np.ndarray, copies: np.ndarray) -> int:
    """The op at fault on ``device`` (R8): ``used`` bytes are in use, then the ops ``starting`` allocate in order of op
    number, and then the copies of the tensors ``copies`` in order of tensor number."""
    p = problem_arrays(problem)
    row = p.granule[device]
    owners = np.concatenate([starting, problem.graph.tensor_producer[copies]])
    level = used + np.cumsum(np.concatenate([p.start_size[row, starting], p.tensor_size[row, copies]]))
    return int(owners[np.searchsorted(level, problem.topology.memory_bytes[device], side="right")])
