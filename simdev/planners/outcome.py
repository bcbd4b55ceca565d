"""What simulating a plan answers, small enough to keep for thousands of plans."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from simdev.planners.job import Choice


@dataclass(frozen=True)
class Outcome:
    """A choice and its figures. Outcomes have an order: the better one is the smaller one.

    ``peak_bytes``, ``compute_ns``, ``exposed_ns`` and ``idle_ns`` are per pipeline rank, as in
    :class:`simdev.parallel.plan.PlanReport`. ``overflow_bytes`` is the sum over pipeline ranks of the bytes above the
    capacity: of reserved memory with NCCL's buffers, where ``reserved_bytes`` (per pipeline rank) holds it, else of
    allocated memory. ``step_ns`` is None, and the three times are empty, for a plan that was not simulated: it does not
    fit, or has too many ops. ``bound_ns`` is a step time that this plan cannot beat.
    """

    choice: Choice
    step_ns: int | None
    overflow_bytes: int
    peak_bytes: tuple[int, ...]
    bound_ns: int = 0
    compute_ns: tuple[int, ...] = ()
    exposed_ns: tuple[int, ...] = ()
    idle_ns: tuple[int, ...] = ()
    reserved_bytes: tuple[int, ...] = ()

    @property
    def time_ns(self) -> int:
        """The step time of a plan that was simulated."""
        assert self.step_ns is not None, f"{self.choice} was not simulated"
        return self.step_ns

    @property
    def fits(self) -> bool:
        """Whether the plan fits in memory and has a step time."""
        return self.overflow_bytes == 0 and self.step_ns is not None

    def __lt__(self, other: Outcome) -> bool:
        return self.rank < other.rank

    @property
    def rank(self) -> tuple:
        """What outcomes are ordered by: plans that fit first, then step time, then the order of choices."""
        unknown = 0 if self.overflow_bytes else inf
        return self.overflow_bytes, self.step_ns if self.step_ns is not None else unknown, self.choice.order
