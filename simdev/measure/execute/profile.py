"""Profiles of whole steps: the duration of each op on a device of this computer."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from simdev.measure.execute.host import Execution, execute
from simdev.measure.execute.program import Program
from simdev.problem.costs import FREE_KINDS
from simdev.problem.graph import ComputationGraph

PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class OpProfile:
    """The durations of the ops of a program on one device, measured in whole steps on that device.

    ``op_ns`` int64 ``(n,)`` is the median of each op, with its share of the time between ops. The durations are scaled
    so that they add up to ``step_ns``, the median step. They are 1 for data that exists before the step. ``gap_ns`` is
    the median time from the end of an op to the start of the next one. ``spread`` is the mean over ops of (p90 - p10) /
    median, weighted by time.
    """

    op_ns: np.ndarray
    gap_ns: float
    step_ns: int
    spread: float


def profile_ops(program: Program, worker: str, *, repeats: int = 10, warmup: int = 3, neighbour: str = "") -> OpProfile:
    """Profile the ops of ``program`` by running the whole step on ``worker``.

    In a whole step, unlike in a loop over one op, the caches are in a realistic state. If ``neighbour`` names a second
    worker, it runs the same step at the same time.
    """
    devices = np.zeros(program.graph.n_ops, np.int32)
    with _busy(program, neighbour):
        return op_profile(program, execute(program, devices, (worker,), repeats=repeats, warmup=warmup))


def op_profile(program: Program, execution: Execution) -> OpProfile:
    """The profile that follows from an execution of all ops on one device."""
    work = np.array([bool(calls) for calls in program.calls])
    start, finish = execution.op_start[:, work], execution.op_finish[:, work]
    order = np.argsort(start, axis=1)
    begin, end = (np.take_along_axis(times, order, axis=1) for times in (start, finish))
    gap = float(np.median(begin[:, 1:] - end[:, :-1]))
    typical = np.median(finish - start, axis=0)
    step = int(np.median(execution.step_ns))
    op_ns = np.ones(program.graph.n_ops, np.int64)
    op_ns[work] = np.maximum(1, np.rint((typical + gap) * step / (typical + gap).sum()))
    low, high = np.percentile(finish - start, [10, 90], axis=0)
    return OpProfile(op_ns, gap, step, float((high - low).sum() / typical.sum()))


def by_signature(graph: ComputationGraph, op_ns: np.ndarray) -> dict[str, float]:
    """A measured cost table, ``{signature: ns}``: the mean duration over the ops of each signature.

    Ops whose data exists before the step are left out.
    """
    kinds = np.array([kind in FREE_KINDS for kind in graph.kinds])[graph.op_kind]
    total = np.bincount(graph.op_signature, op_ns, minlength=len(graph.signatures))
    count = np.bincount(graph.op_signature, minlength=len(graph.signatures))
    return {
        graph.signatures[number]: float(total[number] / count[number])
        for number in np.unique(graph.op_signature[~kinds])
    }


@contextmanager
def _busy(program: Program, worker: str):
    """While the context is open, ``worker`` repeats the step."""
    if not worker:
        yield
        return
    child = os.fork()
    if not child:
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # this process ends with its parent
            execute(program, np.zeros(program.graph.n_ops, np.int32), (worker,), repeats=2000, warmup=0)
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
