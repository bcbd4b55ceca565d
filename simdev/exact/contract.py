"""Contracts a max-load problem to classes that a contiguous split keeps whole, with their precedence.

The rules are those of Tarnawski et al. (NeurIPS 2020, section 5) and of the program published with it. Nodes of a
colour class share a processor, so a class with its backward nodes is one unit of work. The precedence is that of the
forward part; a class without forward nodes gets the mirror image of its backward edges. Classes on a common cycle are
merged. A zero-time source or sink with a single neighbour joins that neighbour.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from simdev.exact.load import LoadProblem

NEGLIGIBLE = 1e-6  # times below this count as zero when trivial nodes are merged, as in the published program


@dataclass(frozen=True, eq=False)
class Classes:
    """``c`` classes in a topological order of the precedence.

    ``accelerator_time``, ``cpu_time``, ``size`` float ``(c,)``. ``predecessors``: the classes directly before each.
    Border ``b`` costs ``border_cost[b]`` on an accelerator that holds some but not all of its classes
    ``members[member_ptr[b]:member_ptr[b + 1]]``. ``class_of`` int ``(n,)``: the class of each node.
    """

    accelerator_time: np.ndarray
    cpu_time: np.ndarray
    size: np.ndarray
    predecessors: tuple[frozenset[int], ...]
    border_cost: np.ndarray
    member_ptr: np.ndarray
    members: np.ndarray
    class_of: np.ndarray

    @property
    def n_classes(self) -> int:
        return len(self.size)

    def borders(self) -> tuple[np.ndarray, np.ndarray]:
        """``(ptr, border)``: class ``c`` touches the borders ``border[ptr[c]:ptr[c + 1]]``."""
        order = np.argsort(self.members, kind="stable")
        border = np.repeat(np.arange(len(self.border_cost)), np.diff(self.member_ptr))[order]
        return np.searchsorted(self.members[order], np.arange(self.n_classes + 1)), border


def contract(problem: LoadProblem, *, merge_trivial: bool = True) -> Classes:
    """The classes of ``problem``. If ``merge_trivial`` is false, zero-time sources and sinks are not merged."""
    # Merging may give an orphan class a forward node, which removes its mirrored edges. The paper merges once. The
    # edges that remain are a subset, so the result has no cycle either.
    class_of = without_cycles(problem.class_of, *_precedence(problem, problem.class_of))
    if merge_trivial:
        class_of = _without_trivial(problem, class_of)
    return classes_of(problem, *in_order(class_of, *_precedence(problem, class_of)))


def _precedence(problem: LoadProblem, class_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Class edges of the forward part, and mirrored edges of classes that have no forward node."""
    source, target, _ = problem.edges
    forward = ~problem.backward
    has_forward = np.zeros(int(class_of.max()) + 1, bool)
    has_forward[class_of[forward]] = True
    plain = forward[source] & forward[target]
    orphan = ~has_forward[class_of]
    mirrored = ~forward[source] & ~forward[target] & (orphan[source] | orphan[target])
    before = np.concatenate([class_of[source[plain]], class_of[target[mirrored]]])
    after = np.concatenate([class_of[target[plain]], class_of[source[mirrored]]])
    apart = before != after
    return before[apart], after[apart]


def without_cycles(label: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """``label`` int ``(n,)`` with one number for all labels on a common cycle of the arcs from ``before`` to
    ``after``."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = int(label.max()) + 1
    arcs = coo_array((np.ones(len(before)), (before, after)), (count, count))
    return np.unique(connected_components(arcs, connection="strong")[1][label], return_inverse=True)[1]


def in_order(label: np.ndarray, before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The three with labels numbered in the :func:`topological` order of the arcs."""
    order = topological(int(label.max()) + 1, before, after)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank[label], rank[before], rank[after]


def _without_trivial(problem: LoadProblem, class_of: np.ndarray) -> np.ndarray:
    """Merge each zero-time class that has one neighbour and only forward edges into that neighbour."""
    source, target, _ = problem.edges
    time = np.nan_to_num(problem.accelerator_time, posinf=1.0) + np.nan_to_num(problem.cpu_time, posinf=1.0)
    count = int(class_of.max()) + 1
    idle = np.bincount(class_of, time, count) < NEGLIGIBLE
    to_backward = np.zeros(count, bool)
    mixed = problem.backward[source] != problem.backward[target]
    to_backward[class_of[source[mixed]]] = to_backward[class_of[target[mixed]]] = True
    before, after = _precedence(problem, class_of)
    neighbours: list[set[int]] = [set() for _ in range(count)]
    for a, b in zip(before.tolist(), after.tolist(), strict=True):
        neighbours[a].add(b)
        neighbours[b].add(a)
    into = list(range(count))
    waiting = [c for c in range(count) if idle[c] and not to_backward[c]]
    while waiting:
        small = waiting.pop(0)
        if into[small] != small or len(neighbours[small]) != 1:
            continue
        other = neighbours[small].pop()
        into[small] = other
        neighbours[other].discard(small)
        idle[other] = idle[other] and idle[small]
        to_backward[other] |= to_backward[small]
        if idle[other] and not to_backward[other]:
            waiting.append(other)
    for c in range(count):
        while into[into[c]] != into[c]:
            into[c] = into[into[c]]
    return np.unique(np.array(into)[class_of], return_inverse=True)[1]


def last_first(n: int, arcs: Iterable[tuple[int, int]], *, lowest: bool = False) -> list[int]:
    """The topological order of the programs published with the papers: the node that became ready last is taken first;
    ``arcs`` are followed in the given order, as often as they are given. It begins with the highest number that is
    ready, or with the ``lowest``."""
    after: list[list[int]] = [[] for _ in range(n)]
    waiting = [0] * n
    for a, b in arcs:
        after[a].append(b)
        waiting[b] += 1
    ready = [node for node in range(n) if not waiting[node]][:: -1 if lowest else 1]
    order = []
    while ready:
        order.append(ready.pop())
        for node in after[order[-1]]:
            waiting[node] -= 1
            if not waiting[node]:
                ready.append(node)
    return order


def topological(count: int, before: np.ndarray, after: np.ndarray) -> list[int]:
    """Depth first: a class follows the one visited last if possible, so that prefixes cut few tensors."""
    order = last_first(count, sorted(set(zip(before.tolist(), after.tolist(), strict=True))), lowest=True)
    assert len(order) == count, "the classes have a cycle"
    return order


def joined(
    costs: Classes | LoadProblem,
    label: np.ndarray,
    arcs: tuple[np.ndarray, np.ndarray],
    borders: dict[tuple[int, ...], float],
    class_of: np.ndarray,
) -> Classes:
    """The classes that ``label`` makes of the nodes of ``costs``: their sums, the ``arcs`` between them as int
    ``(before, after)``, and the cost of each border by the classes that touch it. ``class_of`` is as in
    :class:`Classes`."""
    count = int(label.max()) + 1
    predecessors: list[set[int]] = [set() for _ in range(count)]
    for a, b in zip(*(ends.tolist() for ends in arcs), strict=True):
        predecessors[b].add(a)
    return Classes(
        accelerator_time=np.bincount(label, costs.accelerator_time, count),
        cpu_time=np.bincount(label, costs.cpu_time, count),
        size=np.bincount(label, costs.size, count),
        predecessors=tuple(frozenset(p) for p in predecessors),
        border_cost=np.array(list(borders.values()), float),
        member_ptr=np.cumsum([0, *(len(key) for key in borders)]).astype(np.int64),
        members=np.array([c for key in borders for c in key], np.int64),
        class_of=class_of,
    )


def classes_of(problem: LoadProblem, class_of: np.ndarray, before: np.ndarray, after: np.ndarray) -> Classes:
    """The classes ``class_of`` int ``(n,)`` of nodes, with the arcs between them."""
    _, target, _ = problem.edges
    touched: dict[tuple[int, ...], float] = {}
    reader = class_of[target]
    for t, start in enumerate(problem.consumer_ptr[:-1]):
        members = {int(class_of[problem.tensor_producer[t]]), *reader[start : problem.consumer_ptr[t + 1]].tolist()}
        if len(members) > 1 and problem.tensor_cost[t] > 0:
            key = tuple(sorted(members))
            touched[key] = touched.get(key, 0.0) + float(problem.tensor_cost[t])
    return joined(problem, class_of, (before, after), touched, class_of)
