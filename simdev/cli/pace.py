"""The time left of a long command, from the time that it took so far."""

from __future__ import annotations

import time


class Pace:
    """Estimates the time left from the time that the steps before took."""

    def __init__(self) -> None:
        self.begin = time.monotonic()

    def left(self, done: int, total: int) -> str:
        """``, about 3 min left``, or nothing at the beginning and at the end."""
        if not 0 < done < total:
            return ""
        return f", {left((time.monotonic() - self.begin) / done * (total - done))}"


def left(seconds: float | None) -> str:
    """An estimate of the time left, in words; empty if there is none."""
    if seconds is None:
        return ""
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {max(1, seconds):.0f} s left"
