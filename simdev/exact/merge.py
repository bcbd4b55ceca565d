"""Fewer classes for the exact methods: first merges that lose nothing, then merges of the cheapest neighbours."""

from __future__ import annotations

import heapq

import numpy as np

from simdev.exact.contract import Classes, in_order, joined, without_cycles


def merge_dominated(classes: Classes) -> Classes:
    """Merge classes that some optimal contiguous split on accelerators keeps together, if memory does not bind.

    Let ``v`` be the only successor of ``u``. Moving ``u`` from another accelerator to that of ``v`` keeps the split
    contiguous. The borders that join only ``u`` and ``v`` are no longer crossed, which reduces the load of both
    accelerators by their cost. Every other border of ``u`` adds its cost to either accelerator at most, and the
    accelerator of ``v`` takes the time of ``u``. If the time plus the other borders do not exceed the joining borders,
    no load grows. The same holds for ``v`` if ``u`` is its only predecessor.
    """
    merger = _Merger(classes)
    waiting = list(range(classes.n_classes))
    while waiting:
        small = waiting.pop()
        if merger.into[small] != small:
            continue
        for near, far in ((merger.after, merger.before), (merger.before, merger.after)):
            if len(near[small]) == 1 and merger.dominated(small, other := next(iter(near[small]))):
                waiting.extend({*near[small], *far[small], *near[other], *far[other]})
                merger.merge(small, other)
                break
    return merger.result()


def merge_cheapest(classes: Classes, target: int) -> Classes:
    """Merge neighbours, those of least total time first, until ``target`` classes or no more pairs are left.

    Only pairs that cannot close a cycle are merged: ``v`` is the only successor of ``u``, or ``u`` the only
    predecessor of ``v``. Merging may lose the optimum.
    """
    merger = _Merger(classes)
    heap = [(merger.pair_time(u, v), u, v) for u in range(classes.n_classes) for v in sorted(merger.after[u])]
    heapq.heapify(heap)
    left = classes.n_classes
    while heap and left > target:
        time, u, v = heapq.heappop(heap)
        if merger.into[u] != u or merger.into[v] != v or v not in merger.after[u] or time != merger.pair_time(u, v):
            continue
        if len(merger.after[u]) > 1 and len(merger.before[v]) > 1:
            continue
        merger.merge(u, v)
        left -= 1
        for w in merger.before[v]:
            heapq.heappush(heap, (merger.pair_time(w, v), w, v))
        for w in merger.after[v]:
            heapq.heappush(heap, (merger.pair_time(v, w), v, w))
    return merger.result()


def regroup(classes: Classes, label: np.ndarray) -> Classes:
    """Merge the classes of equal ``label`` int ``(c,)``, and then the classes that lie on a common cycle."""
    label = np.unique(label, return_inverse=True)[1]
    label = without_cycles(label, *component_arcs(classes, label))
    label, before, after = in_order(label, *component_arcs(classes, label))
    borders: dict[tuple[int, ...], float] = {}
    for b, cost in enumerate(classes.border_cost.tolist()):
        members = classes.members[classes.member_ptr[b] : classes.member_ptr[b + 1]]
        key = tuple(sorted(set(label[members].tolist())))
        if len(key) > 1:
            borders[key] = borders.get(key, 0.0) + cost
    return joined(classes, label, (before, after), borders, label[classes.class_of])


def component_arcs(classes: Classes, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Precedence between labels as two arrays, without self-loops."""
    pairs = {(int(label[p]), int(label[c])) for c, before in enumerate(classes.predecessors) for p in before}
    arcs = sorted((a, b) for a, b in pairs if a != b)
    before, after = np.array(arcs, np.int64).reshape(-1, 2).T
    return before, after


class _Merger:
    """Merges classes step by step: records which class was merged ``into`` which, and the graph of the others."""

    def __init__(self, classes: Classes):
        self.classes = classes
        count = classes.n_classes
        self.into = list(range(count))
        self.time = classes.accelerator_time.tolist()
        self.before = [set(p) for p in classes.predecessors]
        self.after: list[set[int]] = [set() for _ in range(count)]
        for c, predecessors in enumerate(classes.predecessors):
            for p in predecessors:
                self.after[p].add(c)
        ptr = classes.member_ptr
        self.members = [set(classes.members[ptr[b] : ptr[b + 1]].tolist()) for b in range(len(classes.border_cost))]
        self.cost = classes.border_cost.tolist()
        self.borders: list[set[int]] = [set() for _ in range(count)]
        for b, members in enumerate(self.members):
            for c in members:
                self.borders[c].add(b)

    def pair_time(self, u: int, v: int) -> float:
        return self.time[u] + self.time[v]

    def dominated(self, small: int, other: int) -> bool:
        joining = sum(
            self.cost[b] for b in self.borders[small] if len(self.members[b]) == 2 and other in self.members[b]
        )
        every = sum(self.cost[b] for b in self.borders[small])
        return self.time[small] + (every - joining) <= joining

    def merge(self, small: int, other: int) -> None:
        self.into[small] = other
        self.time[other] += self.time[small]
        for near, far in ((self.before, self.after), (self.after, self.before)):
            for c in near[small]:
                far[c].discard(small)
                if c != other:
                    far[c].add(other)
                    near[other].add(c)
            near[other].discard(small)
        for b in self.borders[small]:
            self.members[b].discard(small)
            self.members[b].add(other)
            if len(self.members[b]) == 1:
                self.borders[other].discard(b)
            else:
                self.borders[other].add(b)

    def result(self) -> Classes:
        into = np.array(self.into)
        while not np.array_equal(into[into], into):
            into = into[into]
        return regroup(self.classes, into)
