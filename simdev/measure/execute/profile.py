"""Profiles of ops: what the ops of a step cost on a device of this machine."""

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
    """What the ops of a program cost on one device, from ``r`` whole steps there.

    ``op_ns`` int64 ``(n,)`` is the median of each op with its share of the time between ops, scaled so that they add up
    to ``step_ns``, the median step (1 for data that is there already). ``gap_ns`` is the median time from the end of an
    op to the start of the next. ``spread`` is the mean over ops of (p90 - p10) / median, weighted by time.
    """

    op_ns: np.ndarray
    gap_ns: float
    step_ns: int
    spread: float


def profile_ops(program: Program, unit: str, *, repeats: int = 10, warmup: int = 3, neighbour: str = "") -> OpProfile:
    """Run the whole step on ``unit``: caches are as in real steps, which they are not in a loop over one op. If a
    ``neighbour`` is named, it runs the same step at the same time."""
    devices = np.zeros(program.graph.n_ops, np.int32)
    with _busy(program, neighbour):
        return op_profile(program, execute(program, devices, (unit,), repeats=repeats, warmup=warmup))


def op_profile(program: Program, execution: Execution) -> OpProfile:
    """The profile that a run of all ops on one device gives."""
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
    """``{signature: ns}``, the mean over the ops of a signature: a measured cost table. Data that is there already is
    left out."""
    kinds = np.array([kind in FREE_KINDS for kind in graph.kinds])[graph.op_kind]
    total = np.bincount(graph.op_signature, op_ns, minlength=len(graph.signatures))
    count = np.bincount(graph.op_signature, minlength=len(graph.signatures))
    return {graph.signatures[number]: float(total[number] / count[number])
            for number in np.unique(graph.op_signature[~kinds])}  # fmt: skip


@contextmanager
def _busy(program: Program, unit: str):
    """While inside, ``unit`` runs the step again and again."""
    if not unit:
        yield
        return
    child = os.fork()
    if not child:
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # whoever ends the parent ends this
            execute(program, np.zeros(program.graph.n_ops, np.int32), (unit,), repeats=2000, warmup=0)
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
