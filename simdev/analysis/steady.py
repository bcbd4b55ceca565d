"""Bounds of a saturated pipeline: the work that every microbatch brings (R10)."""

from __future__ import annotations

import numpy as np

from simdev.analysis.bounds import Bound, trimmed
from simdev.analysis.load import LoadModel
from simdev.problem.graph import PHASES, ComputationGraph
from simdev.problem.problem import Problem


def held_before(graph: ComputationGraph) -> np.ndarray:
    """bool ``(n,)``: ops whose data exists before the first microbatch (parameters, constants, optimizer state)."""
    named = np.array([kind in ("parameter", "constant") for kind in graph.kinds])[graph.op_kind]
    return (np.diff(graph.input_ptr) == 0) & ((graph.op_persistent_bytes > 0) | named)


def each_microbatch_ns(problem: Problem) -> np.ndarray:
    """int64 ``(D, n)``: duration of each op on each device; 0 for ops that run once however many microbatches there
    are, -1 without a kernel."""
    once = held_before(problem.graph) | (problem.graph.op_phase == PHASES.index("update"))
    durations = problem.costs.device_op_ns
    return np.where(once & (durations >= 0), 0, durations)


def steady_bound(problem: Problem) -> Bound:
    """A time per microbatch that no saturated pipeline beats: the least possible largest load per slot.

    Each microbatch's work may be divided over the devices at will, within the memory that persistent bytes leave free
    (:class:`simdev.analysis.load.LoadModel`). Replicated stages are such divisions too. A steady time is an average and
    need not be a whole number, so the bound is rounded down.
    """
    durations, unit = each_microbatch_ns(problem), problem.graph.unit_of_op
    unit_ns = np.array([np.bincount(unit, np.maximum(row, 0), problem.graph.n_units) for row in durations], np.int64)
    load = LoadModel.of(problem, np.where(problem.unit_op_ns < 0, -1, unit_ns))
    prices = load.prices()
    fits = prices is not None
    found = [load.dual_value(*prices, whole=False)] if prices is not None else []
    free = load.without_memory()
    prices = free.prices()
    assert prices is not None, "without a limit on memory, work can always be divided"
    return Bound(trimmed(max([*found, free.dual_value(*prices, whole=False)])), "load", fits)
