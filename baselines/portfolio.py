"""Portfolio: the best of the constructive placers, improved by local search, all from one budget."""

from __future__ import annotations

import numpy as np

from simdev.baselines._climb import Neighbourhood, climb
from simdev.baselines._search import Incumbent, starts
from simdev.baselines._units import choices
from simdev.errors import Unsupported
from simdev.placers.budget import Budget
from simdev.placers.placer import SHELF, placer
from simdev.placers.score import Score
from simdev.problem.placement import Placement

MEMBERS: tuple[tuple[str, dict], ...] = (
    ("single-gpu", {}), ("expert", {}), ("m-etf", {}), ("m-etf", {"scope": "step"}), ("m-topo", {}), ("m-sct", {}),
    ("min-cut", {}), ("min-cut", {"tool": "metis"}), ("peft", {}), ("heft", {}), ("critical-path", {}), ("scotch", {}),
)  # fmt: skip


CLIMBS = 3


@placer("portfolio", version=1, family="search", searches=True)
def portfolio(problem, *, rng, budget):
    """Evaluate the placement of each constructive placer, most promising first, then climb from the best.

    The climb uses the moves of ``local-search``: each of the three best placements gets a sixth of the remaining
    budget, and the best of all the rest. A member gets no evaluations of its own, so members that check memory with the
    simulator skip that check. Members that cannot handle the problem, or are not installed, are left out.
    """
    allowed = choices(problem)
    best = Incumbent(problem, budget, starts(problem, allowed)[0])
    tried: dict[Score, np.ndarray] = {}  # for equal scores, the first placement
    unit_first = np.unique(problem.graph.unit_of_op, return_index=True)[1]
    for (name, params), seed in zip(MEMBERS, rng.integers(1 << 62, size=len(MEMBERS)).tolist(), strict=True):
        if not budget.open or name not in SHELF:
            continue
        try:
            found = SHELF[name].place(problem, rng=np.random.default_rng(seed), budget=Budget(problem), **params)
        except Unsupported:
            continue
        devices = found.devices[unit_first]
        tried.setdefault(best.evaluate(devices[None])[0], devices)
    neighbourhood, share = Neighbourhood(problem, allowed), budget.share(2 * CLIMBS)
    for score in sorted(tried)[:CLIMBS]:
        climb(best, neighbourhood, rng, tried[score], score, share)
    if tried:
        climb(best, neighbourhood, rng, best.devices, best.score, budget.share(1))
    return Placement.of_units(problem, best.devices)
