"""How good a placement is: its step time and the memory that it lacks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import total_ordering


@total_ordering
@dataclass(frozen=True, slots=True)
class Score:
    """The result of one simulation. Scores have an order: the better score is the smaller one.

    ``step_ns`` is the step time. ``overflow_bytes`` is the sum over the devices of the bytes above their capacity: 0 if
    the placement fits, and None if the memory was not computed (see :meth:`simdev.placers.budget.Budget.evaluate`).

    A score with fewer overflowing bytes is better, whatever the step times. Of two scores with the same overflow, the
    shorter step time is better. An unknown overflow counts as more than any known one, so that a placement whose memory
    nobody has computed is never preferred to one whose memory is known; of two unknown ones, the shorter step time is
    better.
    """

    step_ns: int
    overflow_bytes: int | None

    @property
    def fits(self) -> bool:
        """True if the placement is known to fit in memory."""
        return self.overflow_bytes == 0

    @property
    def known_overflow_bytes(self) -> int:
        """``overflow_bytes`` where an evaluation without ``below`` has computed it. Raises :class:`ValueError` if it
        was not computed."""
        if self.overflow_bytes is None:
            raise ValueError("the memory of this placement was not computed")
        return self.overflow_bytes

    def __lt__(self, other: Score) -> bool:
        if not isinstance(other, Score):
            return NotImplemented
        return self._rank() < other._rank()

    def _rank(self) -> tuple[bool, int, int]:
        return self.overflow_bytes is None, self.overflow_bytes or 0, self.step_ns
