"""Lower bounds on the step time: times that no placement beats (R12)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simdev.analysis.bottleneck import bottleneck
from simdev.analysis.levels import b_level, fastest_durations, t_level
from simdev.analysis.load import LoadModel
from simdev.analysis.transfers import gathered, stay_or_send
from simdev.problem.problem import Problem


@dataclass(frozen=True)
class Bound:
    """A step time in ns that no placement beats, and the name of the argument that proves it (see
    :func:`lower_bounds`). ``fits`` is False if no placement can hold the persistent bytes: then every run is
    infeasible."""

    ns: int
    method: str
    fits: bool = True


def lower_bound(problem: Problem) -> Bound:
    """The largest of :func:`lower_bounds`; of equal ones, the first."""
    return max(lower_bounds(problem), key=lambda bound: bound.ns)


def lower_bounds(problem: Problem) -> list[Bound]:
    """All bounds on the step time of a problem (R12), each with the argument that proves it.

    * *critical path*: an op starts after all ops of any chain before it, and no op is faster than on its fastest
      device. Transfers count nothing.
    * *load*: a device with ``s`` slots does at most ``s`` ns of work in a ns. Divide every colocation unit over devices
      at will, with the persistent bytes of the shares within each device's memory (the relaxed max-load of Tarnawski
      et al. 2020). A feasible placement is one such division, so the least possible largest load bounds it.
    * *path and transfers*: an op waits for the tensors that are sent to its device, and its device itself runs, in
      turn, the ancestors whose results would arrive too late; where that is open, choices of devices for the ancestors
      are refuted case by case (:func:`simdev.analysis.transfers.gathered`). This gives the head of each op, before
      which it cannot start, and its tail, which follows its end. The next three use them.
    * *path and load*: the ops with a head of at least ``a`` and a tail of at least ``b`` do all their work between
      ``a`` and ``b`` before the end. So ``a + b +`` the load of these ops is a bound, for the best ``a`` and ``b``.
    * *bottleneck*: when a long op ends, all ops behind it are still to be done, and so is a part of the ops that read
      the same large tensor (:func:`simdev.analysis.bottleneck.bottleneck`).
    * *stay or send*: tensors that are too expensive to send tie ops to one device, which needs its time for all of
      them (:func:`simdev.analysis.transfers.stay_or_send`). It is at least the largest of the other bounds.
    * *issue* (``eager`` only): op v starts no earlier than the sum of the dispatch times up to v, and the longest chain
      from v on follows. These sums are heads, too.

    Transfers take at least the times of :func:`simdev.analysis.transfers.least_transfers`, which follow the contention.

    The bounds are proven although a linear program is solved in floating point: its dual prices are rounded to
    integers, and weak duality is evaluated in whole numbers, so that poor prices can only lower the bound. Bounds from
    loads keep 24 significant bits, rounded down, so that they do not depend on the version of the solver.
    """
    fastest = fastest_durations(problem)
    below, head = b_level(problem.graph, fastest), t_level(problem.graph, fastest)
    bounds = [(int(below.max()), "critical path")]
    if problem.rules.runtime == "eager":
        issued = np.cumsum(problem.costs.dispatch_ns)
        bounds.append((int((issued + below).max()), "issue"))
        head = np.maximum(head, issued)
    if (problem.unit_op_ns < 0).all(axis=0).any():  # colocated ops without a common device: no placement exists
        return [Bound(ns, method, False) for ns, method in bounds]
    load = LoadModel.of(problem)
    prices = load.prices()
    fits = prices is not None
    if prices is not None:
        bounds.append((trimmed(load.dual_value(*prices)), "load"))
    if prices is None or any(prices[1]):
        load = load.without_memory()
        prices = load.prices()
        assert prices is not None, "without a limit on memory, work can always be divided"
        bounds.append((trimmed(load.dual_value(*prices)), "load"))
    head, tail = gathered(problem, head, below - fastest, fastest)
    bounds.append((int((head + fastest + tail).max()), "path and transfers"))
    bounds += _loads_between(problem, head, tail, fastest, load, prices[0])
    known = max(ns for ns, _ in bounds)
    bounds.append((stay_or_send(problem, head, tail + fastest, fastest, known), "stay or send"))
    return [Bound(ns, method, fits) for ns, method in bounds]


def _loads_between(
    problem: Problem, head: np.ndarray, tail: np.ndarray, fastest: np.ndarray, load: LoadModel, price: list[int]
) -> list[tuple[int, str]]:
    """*path and load* and *bottleneck*, with the prices of the whole problem and with those of the ops that decide."""
    windows, necks, ops = [], [], None
    for _ in range(2):
        if ops is not None:
            prices = LoadModel.of(problem, _unit_ns(problem, ops)).without_memory().prices()
            assert prices is not None, "without a limit on memory, work can always be divided"
            price = prices[0]
        cost, scale, most = load.priced(problem.costs.device_op_ns, price)
        ns, ops = _window_bound(head, tail, cost, scale)
        windows.append(ns)
        necks.append(bottleneck(problem, head, tail, fastest, cost / scale, most / scale))
    return [(trimmed(max(windows)), "path and load"), (trimmed(max(necks)), "bottleneck")]


def _unit_ns(problem: Problem, ops: np.ndarray) -> np.ndarray:
    """``problem.unit_op_ns`` with the durations of ``ops`` alone."""
    counted = np.zeros_like(problem.unit_op_ns)
    for row, durations in enumerate(problem.costs.device_op_ns):
        np.add.at(counted[row], problem.graph.unit_of_op, np.where(ops, np.maximum(durations, 0), 0))
    return np.where(problem.unit_op_ns < 0, -1, counted)


def trimmed(ns: int) -> int:
    """``ns`` rounded down to 24 significant bits."""
    return ns >> (drop := max(0, ns.bit_length() - 24)) << drop


def _window_bound(head: np.ndarray, tail: np.ndarray, cost: np.ndarray, scale: int) -> tuple[int, np.ndarray]:
    """The largest ``a + b +`` load of the ops with head >= a and tail >= b, over up to 256 values of each, and these
    ops, bool ``(n,)``.

    ``cost``, ``scale``: see :meth:`LoadModel.priced`. By weak duality, any prices give a bound.
    """
    a, b = _thresholds(head), _thresholds(tail)
    table = np.zeros((len(a), len(b)), np.int64)
    np.add.at(table, (np.searchsorted(a, head, "right") - 1, np.searchsorted(b, tail, "right") - 1), cost)
    table = table[::-1, ::-1].cumsum(axis=0).cumsum(axis=1)[::-1, ::-1]
    bound = np.where(table > 0, a[:, None] + b[None, :] + -(-table // scale), 0)
    row, column = np.unravel_index(int(bound.argmax()), bound.shape)
    return int(bound[row, column]), (head >= a[row]) & (tail >= b[column])


def _thresholds(values: np.ndarray) -> np.ndarray:
    """Up to 256 of the values, ascending; the least is among them."""
    found = np.unique(values)
    return found[np.unique(np.linspace(0, len(found) - 1, 256).astype(np.int64))]
