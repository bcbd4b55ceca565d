"""The critical path of a schedule: what the last op waited for, back to the start of the step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from simdev.problem.problem import Problem
from simdev.sim.schedule import Schedule


@dataclass(frozen=True)
class Critical:
    """``ops`` int ``(k,)``: the ops of the path, last first. ``sends`` int ``(x, 2)``: its transfers, as tensor and
    destination. ``queued`` int ``(q, 2)``: ops that waited for their device although their inputs were there, each with
    the op that ran before it."""

    ops: np.ndarray
    sends: np.ndarray
    queued: np.ndarray


def critical(problem: Problem, devices: np.ndarray, schedule: Schedule) -> Critical:
    """One critical path of ``schedule``, the schedule of ``devices`` int ``(n,)``.

    From the op that ends last, each step goes to what made the op wait: an input that arrived when the op started, else
    the op that ran before it on its device. A transfer that waited for a channel leads to one that ended when it began.
    """
    graph = problem.graph
    found = _kernel()(
        np.ascontiguousarray(devices),
        schedule.op_start,
        schedule.op_finish,
        _run_before(devices, schedule.op_start),
        graph.input_ptr,
        graph.inputs,
        graph.tensor_producer,
        schedule.transfer_tensor,
        schedule.transfer_target,
        schedule.transfer_start,
        schedule.transfer_finish,
        np.argsort(schedule.transfer_finish, kind="stable"),
    )
    return Critical(*found)


@cache
def _kernel():
    from simdev.baselines._search_kernels import critical_path

    return critical_path


def _run_before(devices: np.ndarray, start: np.ndarray) -> np.ndarray:
    """int64 ``(n,)``: the op that started before each op on its device; -1 for the first."""
    order = np.lexsort((start, devices))
    before = np.full(len(start), -1, np.int64)
    same = devices[order[1:]] == devices[order[:-1]]
    before[order[1:][same]] = order[:-1][same]
    return before
