"""What a long op adds to the bounds on the step time: when it ends, all that waits for it is still to be done, and so
is a part of what reads the same large tensor."""

from __future__ import annotations

import math

import numpy as np

from simdev.analysis.transfers import NEVER_NS, least_transfers
from simdev.problem.problem import Problem

LONGEST = 48  # ops that are tried, the longest first
MARGIN = 1 - 1e-9  # covers the rounding of sums of positive floats: a relative 2^-53 for each of up to 10^6 terms


def bottleneck(
    problem: Problem, head: np.ndarray, tail: np.ndarray, fastest: np.ndarray, share: np.ndarray, most: float
) -> int:
    """A bound on the step time in ns: the best over the :data:`LONGEST` longest ops and their inputs, both ways in
    time.

    ``head``, ``tail`` int64 ``(n,)`` ns: no op starts before its head, and its tail passes between its end and the end
    of the step. ``fastest``: durations on the fastest device. ``share`` float ``(n,)``: a dual solution of the load
    relaxation; the shares of ops that are done within a time add up to that time at most, in ns. ``most`` is the
    largest share of a ns of work, on any device.

    *Argument.* Let op ``p`` read a tensor of op ``u``, and suppose that they share a device. ``p`` ends no sooner than
    ``c``, its head plus its duration. After ``c``, the devices still have to do

    * all ops behind ``p``;
    * of an op that is neither before nor behind ``p``, what it cannot have done by ``c``, from its head on;
    * of the other readers of ``u``: elsewhere, they wait for the tensor, and so have done less by ``c``; with ``u``,
      they and ``p`` have the time from the end of ``u`` to ``c`` between them, and what does not fit is done after.

    For any ``b``, those of these ops that have a tail of at least ``b`` are done by ``b`` before the end. So
    ``c + b +`` the shares of what they have to do is a bound. If ``u`` and ``p`` are on two devices, ``c`` is later by
    the transfer, and the readers of ``u`` count as all others do. The lesser of both cases holds for every placement.
    The reversed graph gives the same argument for what is to be done before ``p`` starts.
    """
    from simdev.analysis.remaining import Edges, Ops, largest

    graph = problem.graph
    pairs = problem.costs.pair_class[~np.eye(problem.topology.n_devices, dtype=bool)]
    classes, least = np.unique(pairs[pairs >= 0]), least_transfers(problem)
    quickest = least[classes].min(axis=0) if len(classes) else np.full(graph.n_tensors, NEVER_NS)
    source, target, sending = graph.edge_source, graph.consumers, quickest[graph.edge_tensor]
    slots = 1 if problem.rules.runtime == "eager" else int(problem.topology.slots.max())
    longest = np.argsort(-fastest, kind="stable")[:LONGEST].astype(np.int64)
    readers = Edges(*_edges(source, target, sending, graph.n_ops))
    makers = Edges(*_edges(target, source, sending, graph.n_ops))
    value, unit, length = 0.0, graph.unit_of_op.astype(np.int64), fastest.astype(float)
    for early, late, ahead, back in ((head, tail, readers, makers), (tail, head, makers, readers)):
        by_late = np.argsort(-late, kind="stable").astype(np.int64)
        ops = Ops(early.astype(float), late.astype(float), length, by_late, unit, share, most, slots)
        found = largest(longest, ops, ahead, back)
        value = max(value, found)
    return math.ceil(value * MARGIN)


def _edges(of: np.ndarray, to: np.ndarray, sending: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The edges by the op that they are ``of``: where those of each op begin, int64 ``(n + 1,)``, their other ends and
    the ns to send."""
    order = np.argsort(of, kind="stable")
    begin = np.searchsorted(of[order], np.arange(n + 1)).astype(np.int64)
    return begin, to[order].astype(np.int64), sending[order].astype(float)
