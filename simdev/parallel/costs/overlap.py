"""Kernels that run beside a collective take longer: its kernels occupy multiprocessors and memory bandwidth.

A factor says by how much. Lee et al. 2025 (arXiv 2507.03114, abstract) measured GPT and Llama training on four A100,
H100, MI210 and MI250: computation slows down by 18.9 % on average and 40 % at most while it overlaps with
communication. This mean over GPUs, models and precisions is the ``slowdown`` of the frameworks in
:mod:`simdev.parallel.framework`. Those with factors or host times that were fitted to whole training runs have none, as
their figures contain it already (``llm-foundry``, ``torchtitan``, ``megatron``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from simdev.errors import InvalidInput
from simdev.parallel.unroll import UnrolledJob
from simdev.sim import Schedule, simulate

PASSES = 5  # simulations; each leaves at most 1 - 1 / factor of the error of the one before it


def simulate_unrolled(
    unrolled: UnrolledJob, slowdown: float = 1.0, engine: str = "fast"
) -> tuple[UnrolledJob, Schedule]:
    """Simulate a step in which kernels beside a collective of their rank run ``slowdown`` times slower.

    How long a kernel runs beside a collective follows from the schedule, and the schedule from the kernels: the step is
    simulated up to :data:`PASSES` times, and each pass takes the overlap from the one before it. Returns the problem
    with the longer kernels, and its schedule. Raises :class:`InvalidInput` for a factor below 1 or above 10.
    """
    check_slowdown(slowdown)
    schedule = simulate(unrolled.problem, unrolled.placement, engine=engine)
    if slowdown == 1:
        return unrolled, schedule
    alone = unrolled.problem.costs.op_ns[0]
    for _ in range(PASSES - 1):
        longer = alone.copy()
        for first, copies in zip(unrolled.first.tolist(), unrolled.copies, strict=True):
            _lengthen(longer, unrolled, schedule, first, copies, slowdown)
        if np.array_equal(longer, unrolled.problem.costs.op_ns[0]):
            break
        costs = replace(unrolled.problem.costs, op_ns=longer[None])
        unrolled = replace(unrolled, problem=replace(unrolled.problem, costs=costs))
        schedule = simulate(unrolled.problem, unrolled.placement, engine=engine)
    return unrolled, schedule


def beside_collectives(usual: float, given: float | None, slow: Mapping[int, float]) -> float:
    """The factor of a simulation: the ``given`` one, or else the ``usual`` one of the framework. Slow ranks are
    simulated without, as the overlap of one rank stands for that of all; a given factor is refused beside them.

    Raises :class:`InvalidInput` for a factor below 1 or above 10."""
    if slow and given not in (None, 1):
        raise InvalidInput("slow ranks and a slowdown beside collectives exclude each other", source="plan")
    found = 1.0 if slow else usual if given is None else given
    check_slowdown(found)
    return found


def check_slowdown(slowdown: float) -> None:
    """Raise :class:`InvalidInput` for a factor below 1 or above 10."""
    if not 1 <= slowdown <= 10:
        raise InvalidInput(f"expected a factor from 1 to 10, got {slowdown}", source="plan", field="slowdown")


def _lengthen(longer: np.ndarray, unrolled: UnrolledJob, schedule: Schedule, first: int, copies: int, factor: float):
    """Add to the durations of the kernels of a pipeline rank, whose first copy is the rank ``first``. All copies run
    the same kernels in the same order."""
    kernels = np.flatnonzero(unrolled.is_compute & (unrolled.rank == first))
    graph = unrolled.problem.graph
    sends = graph.kinds.index("send") if "send" in graph.kinds else -1
    beside = np.flatnonzero(unrolled.is_communication & (unrolled.rank == first) & (graph.op_kind != sends))
    if not len(beside) or not len(kernels):
        return
    begin, end = schedule.op_start[kernels], schedule.op_finish[kernels]
    covered = covered_until(schedule.op_start[beside], schedule.op_finish[beside])
    overlap = covered(end) - covered(begin)
    # Of t ns beside a collective, a kernel that is f times slower loses t (1 - 1 / f).
    lost = np.rint(overlap * (1 - 1 / factor)).astype(np.int64)
    for copy in range(copies):
        mine = kernels if not copy else np.flatnonzero(unrolled.is_compute & (unrolled.rank == first + copy))
        longer[mine] += lost


def covered_until(start: np.ndarray, finish: np.ndarray):
    """A function of times: how much of ``[0, time]`` the union of the intervals covers."""
    order = np.argsort(start, kind="stable")
    begin, end = start[order], np.maximum.accumulate(finish[order])
    fresh = np.r_[True, begin[1:] > end[:-1]]
    left, right = begin[fresh], end[np.r_[np.flatnonzero(fresh)[1:] - 1, len(end) - 1]]
    points = np.stack([left, right], axis=1).ravel()
    total = np.stack([np.r_[0, np.cumsum(right - left)[:-1]], np.cumsum(right - left)], axis=1).ravel()
    return lambda time: np.interp(time, points, total)
