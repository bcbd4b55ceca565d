"""The compiled loops of the bound from bottlenecks (:func:`simdev.analysis.bottleneck.bottleneck` has the argument)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

BEFORE, BESIDE, BEHIND = 0, 1, 2

part = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)  # called by kernels only


class Ops(NamedTuple):
    """The ops, seen in one direction of time. ``head``, ``tail`` and ``length`` float ``(n,)`` ns; ``by_tail`` int64
    ``(n,)`` the ops, longest tail first; ``unit`` int64 ``(n,)`` their colocation units; ``share`` float ``(n,)`` the
    shares of their work, of which a ns on one slot holds at most ``most``, and a device has at most ``slots``."""

    head: np.ndarray
    tail: np.ndarray
    length: np.ndarray
    by_tail: np.ndarray
    unit: np.ndarray
    share: np.ndarray
    most: float
    slots: int


class Edges(NamedTuple):
    """The edges of each op ``v`` are ``begin[v]:begin[v + 1]``: the ``other`` ends, the ns to ``send`` the tensor."""

    begin: np.ndarray
    other: np.ndarray
    send: np.ndarray


class Scratch(NamedTuple):
    """Working arrays ``(n,)``: the ``side`` of each op, a ``stack``, and when a reader can have the tensor on another
    device (``arrives``, -1 for all ops that do not read it)."""

    side: np.ndarray
    stack: np.ndarray
    arrives: np.ndarray


@njit(cache=True)
def largest(longest, ops: Ops, readers: Edges, makers: Edges):
    """The bound in ns, float, before its margin: the best over the ops ``longest`` and their inputs. ``readers`` and
    ``makers`` are the edges of each op to those that read its tensors, and to those whose tensors it reads."""
    n, best = len(ops.head), 0.0
    scratch = Scratch(np.empty(n, np.int8), np.empty(n, np.int64), np.full(n, -1.0))
    for p in longest:
        scratch.side[:] = BESIDE
        _mark(p, BEHIND, readers, scratch)
        _mark(p, BEFORE, makers, scratch)
        for e in range(makers.begin[p], makers.begin[p + 1]):
            best = max(best, _after(p, makers.other[e], makers.send[e], ops, readers, scratch))
    return best


@part
def _after(p, u, send, ops: Ops, readers: Edges, scratch: Scratch):
    """The bound from op ``p``, which reads from ``u``: the lesser of both cases, that they share a device, and that the
    tensor is sent in ``send`` ns."""
    end, c = ops.head[u] + ops.length[u], ops.head[p] + ops.length[p]
    for i in range(readers.begin[u], readers.begin[u + 1]):
        v = readers.other[i]
        there = end + readers.send[i] if ops.unit[v] != ops.unit[u] else np.inf
        scratch.arrives[v] = max(scratch.arrives[v], ops.head[v], there)
    room = max(0.0, ops.slots * (c - end) - ops.length[p]) * ops.most
    found = _to_do(c, room, ops, scratch)
    for i in range(readers.begin[u], readers.begin[u + 1]):
        scratch.arrives[readers.other[i]] = -1.0
    if ops.unit[u] != ops.unit[p]:
        c = max(c, end + send + ops.length[p])
        found = min(found, _to_do(c, 0.0, ops, scratch))
    return found


@part
def _mark(p, value, edges: Edges, scratch: Scratch):
    """Set the side of ``p`` and of all ops that its edges lead to."""
    side, stack = scratch.side, scratch.stack
    side[p] = value
    stack[0], top = p, 1
    while top:
        top -= 1
        u = stack[top]
        for i in range(edges.begin[u], edges.begin[u + 1]):
            v = edges.other[i]
            if side[v] != value:
                side[v] = value
                stack[top] = v
                top += 1


@part
def _to_do(c, room, ops: Ops, scratch: Scratch):
    """The largest ``c + b +`` shares of what is to be done after ``c`` and by ``b`` before the end. The readers of the
    tensor have ``room`` in shares on the maker's device."""
    best, others, alone, together, behind = 0.0, 0.0, 0.0, 0.0, False
    head, length, share, arrives = ops.head, ops.length, ops.share, scratch.arrives
    for v in ops.by_tail:
        if scratch.side[v] == BEHIND:
            others += share[v]
            behind = True
        elif scratch.side[v] == BESIDE:
            left = 1 - min(1.0, max(0.0, c - head[v]) / length[v])
            if arrives[v] < 0:
                others += share[v] * left
            else:
                alone += share[v] * left
                together += share[v] * (1 - min(1.0, max(0.0, c - arrives[v]) / length[v]))
        if behind:
            best = max(best, c + ops.tail[v] + others + max(alone, together - room))
    return best
