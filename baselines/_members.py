"""The constructive placers that searches start from."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simdev.baselines._search import starts
from simdev.baselines._units import choices
from simdev.errors import Unsupported
from simdev.placers.budget import Budget
from simdev.placers.placer import SHELF
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem

MEMBERS: tuple[tuple[str, dict], ...] = (
    ("single-gpu", {}), ("expert", {}), ("m-etf", {}), ("m-etf", {"scope": "step"}), ("m-topo", {}), ("m-sct", {}),
    ("min-cut", {}), ("min-cut", {"tool": "metis"}), ("peft", {}), ("heft", {}), ("critical-path", {}), ("scotch", {}),
)  # fmt: skip


PIPELINE: tuple[tuple[str, dict], ...] = (("dpl", {}), ("pipedream", {"replicas": False}))
COPIES: tuple[tuple[str, dict], ...] = (("single-gpu", {"replicas": True}), ("hybrid", {}))


def constructed(problem: Problem, rng: np.random.Generator, microbatches: int = 0) -> Iterator[Placement]:
    """The placement of each constructive placer, most promising first, and last a contiguous split over all devices:
    where memory is short, it often is the only one that fits.

    If a score is the steady time of ``microbatches``, the contiguous stages of least largest load come first: the
    other members make one step short.

    A member gets no evaluations of its own, so members that check memory with the simulator skip that check. Members
    that cannot handle the problem, or are not installed, are left out.
    """
    seeds = rng.integers(1 << 62, size=len(MEMBERS)).tolist()
    pipeline = [(member, 0) for member in PIPELINE if microbatches]  # they draw nothing
    for (name, params), seed in (*pipeline, *zip(MEMBERS, seeds, strict=True)):
        if name in SHELF:
            try:
                yield SHELF[name].place(problem, rng=np.random.default_rng(seed), budget=Budget(problem), **params)
            except Unsupported:
                continue
    yield Placement.of_units(problem, starts(problem, choices(problem))[1])


def copied(problem: Problem, rng: np.random.Generator, microbatches: int) -> Iterator[Placement]:
    """Placements with replicas for so many ``microbatches``: of all ops, and of all but what does not fit together."""
    for name, params in COPIES if microbatches else ():
        try:
            yield SHELF[name].place(problem, rng=rng, budget=Budget(problem, microbatches=microbatches), **params)
        except Unsupported:
            continue
