"""What simulating a plan answers, small enough to keep for thousands of plans, and pictures of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Any

from simdev.planners.job import Choice

PARTS = ("computes", "waits only for its collectives", "idle")
COLOURS = ("#0072b2", "#e69f00", "#d0d0d0")  # Okabe and Ito (2008), and grey
BEST, OTHERS = "#0072b2", "#56b4e9"
MOST_MESHES = 20  # of one picture


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

    def plot(self, axes: Any = None) -> Any:
        """Draw the step of each pipeline rank. Needs matplotlib.

        A bar for each rank shows how long it computes, waits only for its own collectives, and is idle (ms); the text
        behind it is its memory. Draws on ``axes``, or on new ones, and returns the matplotlib axes. Raises
        :class:`ValueError` for a plan that was not simulated.
        """
        if self.step_ns is None:
            raise ValueError(f"{self.choice} was not simulated")
        from matplotlib import pyplot

        ranks = range(len(self.peak_bytes))
        axes = pyplot.subplots(figsize=(9, 0.4 * len(ranks) + 1.4), layout="constrained")[1] if axes is None else axes
        left = [0.0 for _ in ranks]
        for label, colour, times in zip(PARTS, COLOURS, (self.compute_ns, self.exposed_ns, self.idle_ns), strict=True):
            ms = [time / 1e6 for time in times]
            axes.barh(ranks, ms, left=left, color=colour, label=label)
            left = [before + more for before, more in zip(left, ms, strict=True)]
        for rank, peak in enumerate(self.reserved_bytes or self.peak_bytes):
            axes.text(left[rank], rank, f" {peak / 2**30:.0f} GiB", va="center", fontsize="small")
        axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.09 * max(left))
        axes.set_xlabel("ms of the step")
        axes.set_title(f"{self.choice}: {self.step_ns / 1e6:,.1f} ms", loc="left", fontsize="medium", pad=22)
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, frameon=False, fontsize="small")
        return axes

    def __lt__(self, other: Outcome) -> bool:
        return self.rank < other.rank

    @property
    def rank(self) -> tuple:
        """What outcomes are ordered by: plans that fit first, then step time, then the order of choices."""
        unknown = 0 if self.overflow_bytes else inf
        return self.overflow_bytes, self.step_ns if self.step_ns is not None else unknown, self.choice.order


def plot_meshes(outcomes: Iterable[Outcome], axes: Any = None, title: str = "") -> Any:
    """Draw the step time of each mesh. Needs matplotlib.

    A bar for each mesh ends at its fastest plan that was simulated, and has the rest of that plan and the memory of its
    fullest rank beside it; dots are other plans of the same mesh. The bar of a mesh without a plan that fits is grey.
    At most :data:`MOST_MESHES` are drawn, the fastest first. Draws on ``axes``, or on new ones, and returns the
    matplotlib axes. Raises :class:`ValueError` if no plan was simulated.
    """
    meshes: dict[str, list[Outcome]] = {}
    for outcome in sorted(one for one in outcomes if one.step_ns is not None):
        meshes.setdefault(outcome.choice.mesh_text, []).append(outcome)
    if not meshes:
        raise ValueError("no plan was simulated")
    from matplotlib import pyplot

    shown = list(meshes.items())[:MOST_MESHES]
    axes = pyplot.subplots(figsize=(11, 0.42 * len(shown) + 1.4), layout="constrained")[1] if axes is None else axes
    longest = max(one.time_ns for _, mine in shown for one in mine) / 1e9
    for row, (name, (first, *others)) in enumerate(shown):
        seconds = first.time_ns / 1e9
        axes.barh(row, seconds, color=COLOURS[2] if not first.fits else OTHERS if row else BEST)
        axes.plot([one.time_ns / 1e9 for one in others], [row] * len(others), "o", ms=4, color="0.35", clip_on=False)
        rest = str(first.choice).removeprefix(name).strip()
        held = max(first.reserved_bytes or first.peak_bytes) / 2**30
        text = f"{seconds:,.3g} s, {held:.0f} GiB{'' if first.fits else ' (too much)'}, {rest}"
        axes.text(1.02 * longest, row, text, va="center", fontsize="small")
    axes.set_yticks(range(len(shown)), [name for name, _ in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.01 * longest)
    axes.set_xlabel("step time, s (dots: other plans of the mesh)")
    name, (best, *_) = shown[0]
    message = f"{name} is fastest, {best.time_ns / 1e9:,.3g} s"
    axes.set_title((f"{title}: {message}" if title else message).replace("$", r"\$"), loc="left", fontweight="bold")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes
