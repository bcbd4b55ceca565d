"""What a device that must run a set of ops still has to send: the ops beside the set run there, too, and take time, or
elsewhere, and then tensors pass the channels of the device one at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simdev.problem.problem import Problem

NEIGHBOURS = 12  # sets beside the first that are tried on both sides, those with most work first
CASES = 1024  # choices that are looked at; where they do not suffice, nothing is refuted


def doors(problem: Problem, alike: np.ndarray) -> np.ndarray:
    """int64 ``(2, k)``: how many tensors at most leave, and reach, a device of each type at once; 0: any number.

    ``alike`` int ``(D,)``: the type of each device. Under ``fifo`` a transfer holds the first channel of its route, and
    the last one, for its whole duration (R4).
    """
    most = np.zeros((2, int(alike.max()) + 1), np.int64)
    if problem.rules.contention != "fifo":
        return most
    ptr, route = problem.topology.route_csr
    count = problem.topology.n_devices
    pair = np.arange(count**2).reshape(count, count)
    linked = problem.costs.pair_class >= 0
    np.fill_diagonal(linked, False)
    unlimited = np.zeros_like(most, bool)  # a device of the type has a transfer without a channel
    for device, kind in enumerate(alike):
        for side, pairs in enumerate((pair[device][linked[device]], pair[:, device][linked[:, device]])):
            if (ptr[pairs] == ptr[pairs + 1]).any():
                unlimited[side, kind] = True
            else:
                ends = route[ptr[pairs] if side == 0 else ptr[pairs + 1] - 1]
                most[side, kind] = max(most[side, kind], len(np.unique(ends)))
    return np.where(unlimited, 0, most)


@dataclass(frozen=True)
class Crossings:
    """Edges by op: the ``maker`` of a ``tensor`` and its ``reader``, int ``(e,)``. ``ready`` int64 ``(e,)`` ns: the
    maker does not end before. ``rest``: at least so much passes from the reader's start to the end of the step.
    ``length``: the least time to send the tensor."""

    maker: np.ndarray
    reader: np.ndarray
    tensor: np.ndarray
    ready: np.ndarray
    rest: np.ndarray
    length: np.ndarray

    def between(self, place: np.ndarray) -> Crossings:
        """The edges of which both ends have a ``place`` int ``(n,)``, and not the same; -1 is none."""
        maker, reader = place[self.maker], place[self.reader]
        kept = (maker >= 0) & (reader >= 0) & (maker != reader)
        rest = (values[kept] for values in (self.tensor, self.ready, self.rest, self.length))
        return Crossings(maker[kept], reader[kept], *rest)


class Vicinity:
    """A set of ops that share a device, and the sets beside it. Each of those is on that device or elsewhere.

    ``place`` int ``(n,)``: 0 for the ops of the set, 1, 2, ... for those of its neighbours, -1 for all others.
    ``work``, ``head``, ``tail`` int64 ``(n,)`` ns; a ``work`` below 0 stands for an op that cannot run there. ``doors``
    int ``(2,)`` of the device (:func:`doors`).
    """

    def __init__(
        self, place: np.ndarray, work: np.ndarray, head, tail, edges: Crossings, slots: int, doors: np.ndarray
    ):
        near = np.flatnonzero(place >= 0)
        self.place, self.work, self.head, self.tail = place[near], work[near], head[near], tail[near]
        self.edges, self.slots, self.doors = edges.between(place), slots, doors
        self.count = int(place.max()) + 1

    def refutes(self, limit: int) -> bool:
        """Whether the step takes longer than ``limit`` ns wherever the neighbours are.

        *Argument.* The ops on the device with a head of at least ``a`` and a tail of at least ``b`` run between ``a``
        and ``limit - b``. So do the transfers of tensors that an op there sends to one elsewhere: if it is sent no
        sooner than ``a``, and ``b`` passes after it arrives, it holds one of the device's doors in between. The same
        holds for what the device receives. For each choice of sides, one of these three must take too long. A
        neighbour whose side is open counts nothing.
        """
        if self._busy(np.ones(self.count, np.int8)) <= limit:
            return False
        here = np.zeros(self.count, np.int8)  # 1: on the device, 0: open, -1: elsewhere
        here[0] = 1
        cases, waiting = 0, [here]
        while waiting:
            here, cases = waiting.pop(), cases + 1
            if cases > CASES:
                return False
            if self._busy(here) > limit or self._passed(here, limit):
                continue
            still_open = np.flatnonzero(here == 0)
            if not len(still_open):
                return False
            for side in (1, -1):
                choice = here.copy()
                choice[still_open[0]] = side
                waiting.append(choice)
        return True

    def _busy(self, here: np.ndarray) -> int:
        ops = here[self.place] == 1
        work = self.work[ops]
        if (work < 0).any():
            return np.iinfo(np.int64).max
        return window(self.head[ops], self.tail[ops], work, self.slots)

    def _passed(self, here: np.ndarray, limit: int) -> bool:
        """Whether what must leave or reach the device takes longer than ``limit``."""
        maker, reader = here[self.edges.maker], here[self.edges.reader]
        for doors, crossing in zip(
            self.doors, ((maker == 1) & (reader == -1), (maker == -1) & (reader == 1)), strict=True
        ):
            if not doors or not crossing.any():
                continue
            tensor, of = np.unique(self.edges.tensor[crossing], return_inverse=True)
            ready, rest, length = np.zeros((3, len(tensor)), np.int64)
            ready[of], length[of] = self.edges.ready[crossing], self.edges.length[crossing]
            np.maximum.at(rest, of, self.edges.rest[crossing])  # the transfer to the reader that is waited for most
            if window(ready, rest, length, int(doors)) > limit:
                return True
        return False


def window(head: np.ndarray, tail: np.ndarray, work: np.ndarray, slots: int) -> int:
    """Largest ``a + b + work / slots`` of those with head >= a (b the least of their tails), or the reverse; int64
    ``(j,)`` ns each."""
    value = 0
    for near, far in ((head, tail), (tail, head)):
        order = np.argsort(-near, kind="stable")
        done = np.cumsum(work[order])
        value = max(value, int((near[order] + np.minimum.accumulate(far[order]) - (-done // slots)).max(initial=0)))
    return value
