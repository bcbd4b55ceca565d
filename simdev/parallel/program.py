"""Rank programs: the calls that one rank issues, as segments that a schedule puts in order.

A *call* is a kernel on a stream or a collective on a communicator. A *segment* is what a rank issues without a choice
of its schedule: the forward pass of a microbatch, its backward pass, the end of the step. Waits inside a segment are
relative, so that segments can be put in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from simdev.errors import SimdevError

COMPUTE = "compute"
Made = TypeVar("Made")


class NotRepeating(SimdevError):
    """The program with one more layer is not the program with one layer inserted."""


@dataclass(slots=True, unsafe_hash=True)
class Call:
    """One kernel or collective, which nothing changes. (``frozen`` takes six times as long, and there are many.)

    ``stream`` is ``compute``, another stream's name, or for a collective the name of its communicator (its mesh axes,
    joined by ``+``). ``waits`` are pairs ``(stream, back)``: the call starts after the call on that stream after which
    ``back`` others were issued to it; where that lies before the segment, after the stream's last call before the
    segment. ``axes`` and ``payload_bytes`` (the largest buffer on one rank) are those of a collective. ``live_bytes``
    is by how much the memory in use has grown since the begin of the segment. ``is_forward`` holds for forward passes,
    recomputed ones too; ``in_backward`` for all that a backward pass issues, recomputed forward passes included.
    """

    stream: str
    kind: str
    signature: str
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    waits: tuple[tuple[str, int], ...] = ()
    axes: tuple[str, ...] = ()
    payload_bytes: int = 0
    live_bytes: int = field(default=0, compare=False)
    is_forward: bool = False
    in_backward: bool = False

    @property
    def is_collective(self) -> bool:
        return bool(self.axes)

    def row(self) -> list:
        """The fields in order, ready for JSON."""
        flags = int(self.is_forward), int(self.in_backward)
        numbers = self.flops, self.bytes_read, self.bytes_written
        return [self.stream, self.kind, self.signature, *numbers, self.waits, self.axes, self.payload_bytes,
                self.live_bytes, *flags]  # fmt: skip

    def grown(self, by: int) -> Call:
        """The call where ``by`` more bytes are in use. (``replace`` takes twice as long.)"""
        if not by:
            return self
        return Call(
            self.stream, self.kind, self.signature, self.flops, self.bytes_read, self.bytes_written, self.waits,
            self.axes, self.payload_bytes, self.live_bytes + by, self.is_forward, self.in_backward,
        )  # fmt: skip

    @classmethod
    def of_row(cls, row: list) -> Call:
        """The call that :meth:`row` describes. Raises :class:`ValueError` or :class:`TypeError` for anything else."""
        stream, kind, signature, flops, read, written, waits, axes, payload, live, forward, backward = row
        pairs = tuple([(name, back) for name, back in waits]) if waits else ()
        sizes = payload, live, bool(forward), bool(backward)
        return cls(stream, kind, signature, flops, read, written, pairs, tuple(axes), *sizes)


@dataclass(frozen=True)
class Segment:
    """Calls in the order in which the host issues them; ``live_bytes`` is by how much memory in use grows over it."""

    name: str
    calls: tuple[Call, ...]
    live_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """By how much memory in use grows at most, from the begin of the segment."""
        return max((call.live_bytes for call in self.calls), default=0)

    @property
    def distinct(self) -> tuple[Call, ...]:
        """The calls that occur, in the order of their first occurrence; ``live_bytes`` are those of the first."""
        return self.calls

    @property
    def order(self) -> np.ndarray:
        """int64: the position in :attr:`distinct` of each call."""
        return np.arange(len(self.calls))


class Stretched(Segment):
    """The calls ``distinct``, with those from position ``begin`` to ``end`` so many ``times``, each of which leaves
    ``grown`` more bytes in use.

    A hundred alike layers are timed as one; all their calls are made only for those who ask for them.
    """

    _distinct: tuple[Call, ...]
    _order: np.ndarray
    _more: np.ndarray  # int64: by how much more memory in use has grown than after the distinct call

    def __init__(
        self, name: str, distinct: tuple[Call, ...], begin: int, end: int, times: int, grown: int, live_bytes: int
    ):
        numbers = np.arange(len(distinct))
        turns = np.repeat([0, *range(times), times - 1], [begin, *[end - begin] * times, len(distinct) - end])
        order = np.concatenate([numbers[:begin], np.tile(numbers[begin:end], times), numbers[end:]])
        self.__dict__.update(name=name, live_bytes=live_bytes, _distinct=distinct, _order=order, _more=turns * grown)

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        more = zip(self.order.tolist(), self._more.tolist(), strict=True)
        return tuple([self.distinct[number].grown(by) for number, by in more])

    @property
    def peak_bytes(self) -> int:
        return int((np.array([call.live_bytes for call in self.distinct])[self.order] + self._more).max())

    @property
    def distinct(self) -> tuple[Call, ...]:
        return self._distinct

    @property
    def order(self) -> np.ndarray:
        return self._order


def once_for_each(function: Callable[..., Made]) -> Callable[..., Made]:
    """``function`` of segments or templates that outlive the result, called once for the same ones: a stage may have
    one segment for several passes."""
    known: dict[tuple[int, ...], Made] = {}

    def remembered(*given: object) -> Made:
        key = tuple(map(id, given))
        if key not in known:
            known[key] = function(*given)
        return known[key]

    return remembered


def stretch(short: Segment, long: Segment, more: int) -> Segment:
    """``short`` was captured with a few layers, ``long`` with a further one (or a further period of layers): the
    segment with ``more`` further ones.

    Where the additional layer appears as one block of calls, the block is repeated; where both have the same calls,
    their sizes grow linearly (one call over all parameters). Raises :class:`NotRepeating` otherwise.
    """
    if more == 0:
        return short
    if len(short.calls) == len(long.calls):
        return _linear(short, long, more)
    a, b = short.calls, long.calls
    head = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    if b[len(b) - (len(a) - head) :] != a[head:]:
        raise NotRepeating(f"{short.name}: a further layer changes the calls of the others")
    block = b[head : head + len(b) - len(a)]
    grown = block[-1].live_bytes - (b[head - 1].live_bytes if head else 0)
    total = short.live_bytes + (long.live_bytes - short.live_bytes) * more
    return Stretched(short.name, b, head, head + len(block), more, grown, total)


def _linear(short: Segment, long: Segment, more: int) -> Segment:
    calls = []
    for x, y in zip(short.calls, long.calls, strict=True):
        if (x.kind, x.stream, x.waits) != (y.kind, y.stream, y.waits):
            raise NotRepeating(f"{short.name}: a further layer changes call {x.kind!r}")
        if x == y:
            calls.append(x.grown((y.live_bytes - x.live_bytes) * more))
            continue
        numbers = {
            name: getattr(x, name) + (getattr(y, name) - getattr(x, name)) * more
            for name in ("flops", "bytes_read", "bytes_written", "payload_bytes", "live_bytes")
        }
        calls.append(replace(x, signature=x.kind, **numbers))
    return Segment(short.name, tuple(calls), short.live_bytes + (long.live_bytes - short.live_bytes) * more)
