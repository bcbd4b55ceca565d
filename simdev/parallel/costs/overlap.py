"""What runs at the same time slows each other: kernels beside a collective, and collectives that share an adapter.

*Kernels* that run beside a collective take longer: its kernels occupy multiprocessors and memory bandwidth. A factor
says by how much. Lee et al. 2025 (arXiv 2507.03114, abstract) measured GPT and Llama training on four A100, H100, MI210
and MI250: computation slows down by 18.9 % on average and 40 % at most while it overlaps with communication. This mean
over GPUs, models and precisions is the ``slowdown`` of the frameworks in :mod:`simdev.parallel.framework`. Only
``megatron`` has none: its host times were fitted to whole training runs and contain it already. A kernel pays for the
time that it really runs beside a collective, so a job without such traffic pays nothing, whatever its framework.

*An adapter* to the network serves all communicators of its rank. One communicator runs its collectives one after
another, but those of several, and sends between stages, may want more than an adapter has. Each of them then runs
slower by the same factor: by how many times they want what there is. It sends and receives at full rate at once; a
collective does both, a send loads the adapter of its sender in one direction and that of its receiver in the other.
Links inside a node are not shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from simdev.errors import InvalidInput
from simdev.parallel.unroll import UnrolledJob
from simdev.sim import Schedule, simulate

Users = tuple[np.ndarray, np.ndarray]
PASSES = 5  # simulations; each leaves at most 1 - 1 / factor of the error of the one before it


def simulate_unrolled(
    unrolled: UnrolledJob, slowdown: float = 1.0, engine: str = "fast"
) -> tuple[UnrolledJob, Schedule]:
    """Simulate a step in which kernels beside a collective of their rank run ``slowdown`` times slower, and in which
    communicators share the adapter of their rank.

    How long an op runs beside others follows from the schedule, and the schedule from the ops: the step is simulated
    up to :data:`PASSES` times, and each pass takes the overlap from the one before it. Returns the problem with the
    longer ops, and its schedule. Raises :class:`InvalidInput` for a factor below 1 or above 10.
    """
    check_slowdown(slowdown)
    users = adapter_users(unrolled)
    if slowdown > 1 or users:
        costs = replace(unrolled.problem.costs, op_ns=_longer(unrolled, users, slowdown, engine)[None])
        unrolled = replace(unrolled, problem=replace(unrolled.problem, costs=costs))
    return unrolled, simulate(unrolled.problem, unrolled.placement, engine=engine)


class _Times(NamedTuple):
    """When ops start and finish, int64 ``(n,)``, as in a :class:`~simdev.sim.Schedule`."""

    op_start: np.ndarray
    op_finish: np.ndarray


def _longer(unrolled: UnrolledJob, users: list[Users], slowdown: float, engine: str) -> np.ndarray:
    """int64 ns of each op beside those that run at the same time, after all passes but the last one."""
    alone = ns = unrolled.problem.costs.op_ns[0]
    for _ in range(PASSES - 1):
        times = _times(unrolled, ns) if engine == "fast" else _simulated(unrolled, ns, engine)
        longer = _on_adapters(unrolled, users, times, alone)
        if slowdown > 1:
            for first, copies in zip(unrolled.first.tolist(), unrolled.copies, strict=True):
                _lengthen(longer, unrolled, times, first, copies, slowdown)
        if np.array_equal(longer, ns):
            break
        ns = longer
    return ns


def _simulated(unrolled: UnrolledJob, ns: np.ndarray, engine: str) -> _Times:
    """When ops run that take ``ns``, by an engine: a verification owes nothing to :func:`_times`."""
    problem = replace(unrolled.problem, costs=replace(unrolled.problem.costs, op_ns=ns[None]))
    schedule = simulate(problem, unrolled.placement, engine=engine)
    return _Times(schedule.op_start, schedule.op_finish)


def _times(unrolled: UnrolledJob, ns: np.ndarray) -> _Times:
    """What :func:`~simdev.sim.simulate` finds of ops that take ``ns``. An unrolled step needs no search for the op that
    runs next: devices run their ops by number, an op reads ops of smaller numbers alone, and messages do not share
    links. So one pass over the ops suffices; a schedule with all its messages takes several times as long."""
    from simdev.parallel.costs._adapter_kernel import in_order

    graph, costs = unrolled.problem.graph, unrolled.problem.costs
    hops = costs.transfer_ns[0] if len(costs.transfer_ns) else np.zeros(0, np.int64)
    source = graph.tensor_producer[graph.inputs]
    return _Times(*in_order(unrolled.placement.devices, ns, graph.input_ptr, source, hops[graph.inputs]))


def adapter_users(unrolled: UnrolledJob) -> list[Users]:
    """For the first copy of each pipeline rank, the ops that load its adapter in one direction (int64 ascending) and
    their communicators (int64 from 0 on), where there is more than one. The other copies do the same at the same
    times."""
    if not unrolled.adapter.any():
        return []
    used = np.flatnonzero(unrolled.adapter)
    device, rank, receiver = unrolled.placement.devices[used], unrolled.rank[used], unrolled.receiver[used]
    found = []
    for first in unrolled.first.tolist():
        collective = (rank == first) & (receiver < 0)
        for one_way in ((rank == first) & (receiver >= 0), receiver == first):
            both = np.flatnonzero(collective | one_way)
            communicators, queue = np.unique(device[both], return_inverse=True)
            if len(communicators) > 1:
                found.append((used[both], queue.astype(np.int64)))
    return found


def _on_adapters(unrolled: UnrolledJob, users: list[Users], times: _Times, alone: np.ndarray) -> np.ndarray:
    """int64 ns of each op, ``alone`` or longer by what it waits for others on its adapters, if it begins when it did in
    ``times``, or at the end of the one before it on its communicator."""
    longer = alone.copy()
    if not users:
        return longer
    from simdev.parallel.costs._adapter_kernel import shared_ns

    for found, queue in users:
        order = np.argsort(times.op_start[found], kind="stable")
        ops = found[order]
        ns = shared_ns(times.op_start[ops], alone[ops], unrolled.adapter[ops], queue[order])
        longer[ops] = np.maximum(longer[ops], np.rint(ns).astype(np.int64))
    if max(unrolled.copies) > 1:  # ops of one item follow one another; the first is that of the first copy
        used = np.flatnonzero(unrolled.adapter)
        leads = np.isin(unrolled.rank[used], unrolled.first)
        longer[used] = longer[used[np.maximum.accumulate(np.where(leads, np.arange(len(used)), 0))]]
    return longer


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


def _lengthen(longer: np.ndarray, unrolled: UnrolledJob, times: _Times, first: int, copies: int, factor: float):
    """Add to the durations of the kernels of a pipeline rank, whose first copy is the rank ``first``. All copies run
    the same kernels in the same order."""
    kernels = np.flatnonzero(unrolled.is_compute & (unrolled.rank == first))
    graph = unrolled.problem.graph
    sends = graph.kinds.index("send") if "send" in graph.kinds else -1
    beside = np.flatnonzero(unrolled.is_communication & (unrolled.rank == first) & (graph.op_kind != sends))
    if not len(beside) or not len(kernels):
        return
    begin, end = times.op_start[kernels], times.op_finish[kernels]
    covered = covered_until(times.op_start[beside], times.op_finish[beside])
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
