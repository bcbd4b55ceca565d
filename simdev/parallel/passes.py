"""Which forward and backward passes of one stage execute different programs, in which order they run.

Between passes, FSDP2 remembers two things. Parameters outside of layers stay gathered from a forward pass to the next
backward pass. And every forward pass leaves a record of its modules: a backward pass takes the last record that is left
and gathers ahead along it, at its end into the record before, if there is one. The passes of a stage are therefore
named by the pass before them and by the record that they take, and two passes with one name execute the same calls.

An order is a string with a letter for each pass of one stage, ``F`` and ``B``: ``FFBFBB``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

STEP = "FBFBFB"  # several microbatches without a pipeline
PIPELINE = "FFFBFBBB"  # those of most stages of a pipeline
MOST = 8  # microbatches in the shortest order that has given passes


@lru_cache(maxsize=4096)
def pass_names(order: str, forgets: bool) -> tuple[tuple[str, str], ...]:
    """``(kind, state)`` of each pass. Kinds are ``forward`` and ``backward first``, ``further``, ``last`` and ``only``.
    ``forgets``: every backward pass ends as the last one of a step does, and no record is left after it."""
    names, records, forwards, backwards, before = [], [], 0, 0, "start"
    for letter in order:
        if letter == "F":
            names.append(("forward", f"after {before}"))
            records.append(forwards)
            forwards, before = forwards + 1, "forward"
            continue
        backwards += 1
        record = records.pop() if records else -1
        which = "ahead" if record > 0 else "of the first record" if record == 0 else "without a record"
        names.append((f"backward {_which(backwards, order.count('B'))}", f"after {before}, {which}"))
        before = "backward ahead" if record > 0 and not forgets else "backward"
        if forgets:
            records, forwards = [], 0
    return tuple(names)


def _which(number: int, count: int) -> str:
    if count == 1:
        return "only"
    return "first" if number == 1 else "last" if number == count else "further"


@lru_cache(maxsize=4096)
def shortest_order(order: str) -> str:
    """A short order that has all passes of ``order``: one that many stages share, if it has."""
    wanted = _all_names(order)
    if len(order) <= 2:
        return order
    for common in (STEP, PIPELINE):
        if wanted <= _all_names(common):
            return common
    fitting = ((len(found), len(_all_names(found)), found) for found in _orders() if wanted <= _all_names(found))
    return min(fitting, default=(0, 0, order))[2]


@lru_cache(maxsize=4096)
def _all_names(order: str) -> frozenset:
    """The passes of an order, whether records are forgotten or not."""
    return frozenset((forgets, name) for forgets in (False, True) for name in pass_names(order, forgets))


@lru_cache(maxsize=1)
def _orders() -> tuple[str, ...]:
    """All orders of up to :data:`MOST` microbatches."""

    def longer(begun: str, forwards: int, backwards: int, count: int) -> Iterable[str]:
        if backwards == count:
            yield begun
        if forwards < count:
            yield from longer(begun + "F", forwards + 1, backwards, count)
        if backwards < forwards:
            yield from longer(begun + "B", forwards, backwards + 1, count)

    return tuple(found for count in range(2, MOST + 1) for found in longer("", 0, 0, count))
