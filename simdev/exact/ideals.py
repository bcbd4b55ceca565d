"""Ideals (down-sets) of a precedence order: an ideal that holds a node holds all nodes before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simdev.errors import Unsupported


@dataclass(frozen=True, eq=False)
class Ideals:
    """All ideals, numbered by growing size: number 0 is empty, the last one is full.

    Removing the maximal element ``removed[e]`` from ideal ``i`` gives ideal ``below[e]``, for each ``e`` in
    ``ptr[i]:ptr[i + 1]``; all int32.
    """

    ptr: np.ndarray
    removed: np.ndarray
    below: np.ndarray

    @property
    def count(self) -> int:
        return len(self.ptr) - 1


def all_ideals(predecessors: Sequence[frozenset[int]], limit: int = 200_000) -> Ideals:
    """Every ideal of the order in which node ``v`` follows ``predecessors[v]``.

    Ideals are enumerated by size; each is a bit set in a Python integer. Raises :class:`Unsupported` if there are more
    than ``limit``.
    """
    n = len(predecessors)
    needs = [sum(1 << p for p in before) for before in predecessors]
    successors: list[list[int]] = [[] for _ in range(n)]
    for node, before in enumerate(predecessors):
        for p in before:
            successors[p].append(node)
    ptr, removed, below = [0, 0], list[int](), list[int]()
    level = {0: tuple(v for v in range(n) if not needs[v])}  # ideal -> nodes that may be added
    first, total = 0, 1
    for _ in range(n):
        arcs: dict[int, list[tuple[int, int]]] = {}
        grown: dict[int, tuple[int, ...]] = {}
        for number, (ideal, addable) in enumerate(level.items(), first):
            for node in addable:
                bigger = ideal | 1 << node
                if bigger not in grown:
                    if total + len(grown) >= limit:  # a level may hold many times more than the one before it
                        raise Unsupported(
                            f"more than {limit} ideals: the graph is too wide for the exact dynamic program"
                        )
                    grown[bigger] = tuple(v for v in addable if v != node) + tuple(
                        v for v in successors[node] if needs[v] & bigger == needs[v]
                    )
                    arcs[bigger] = []
                arcs[bigger].append((node, number))
        first, total, level = total, total + len(grown), grown
        for pairs in arcs.values():
            removed.extend(pair[0] for pair in pairs)
            below.extend(pair[1] for pair in pairs)
            ptr.append(len(removed))
    return Ideals(np.array(ptr, np.int64), np.array(removed, np.int32), np.array(below, np.int32))


def prefixes(n: int) -> Ideals:
    """The ideals of the chain ``0, 1, ..., n - 1``."""
    return Ideals(
        np.maximum(np.arange(n + 2, dtype=np.int64) - 1, 0), np.arange(n, dtype=np.int32), np.arange(n, dtype=np.int32)
    )
