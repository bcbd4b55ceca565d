"""Portfolio: the best of the constructive placers, improved by local search, all from one budget."""

from __future__ import annotations

import numpy as np

from simdev.baselines._climb import Neighbourhood, climb
from simdev.baselines._search import Record, starts
from simdev.baselines._units import choices
from simdev.errors import Unsupported
from simdev.placement import Placement
from simdev.placer import SHELF, Budget, placer

MEMBERS = ("single-gpu", "expert", "m-topo", "m-etf", "m-sct", "min-cut", "critical-path", "peft", "heft", "scotch")


@placer("portfolio", version=1, family="search", searches=True)
def portfolio(problem, *, rng, budget):
    """Evaluate what each constructive placer finds, most promising first while the budget lasts, then climb from the
    best by the moves of ``local-search``.

    A member gets no evaluations of its own, so those that would check memory with the simulator do not. Members that
    cannot handle the problem, or are not installed, are left out.
    """
    allowed = choices(problem)
    record = Record(problem, budget, starts(problem, allowed)[0])
    unit_first = np.unique(problem.graph.unit_of_op, return_index=True)[1]
    for name, seed in zip(MEMBERS, rng.integers(1 << 62, size=len(MEMBERS)).tolist(), strict=True):
        if not budget.left or name not in SHELF:
            continue
        try:
            found = SHELF[name].place(problem, rng=np.random.default_rng(seed), budget=Budget(problem))
        except Unsupported:
            continue
        record.evaluate(found.devices[unit_first][None])
    climb(record, Neighbourhood(problem, allowed), rng)
    return Placement.of_units(problem, record.best)
