"""Placers that minimise the largest load instead of the step time: from problem to max-load split to placement."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from simdev.errors import Unsupported
from simdev.exact.dp import Split
from simdev.exact.load import LoadProblem
from simdev.exact.training import alike_accelerators, load_of
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem

MEMORY_SHARES = (1.0, 0.85, 0.7)


def place_by_load(problem: Problem, budget, solve: Callable[[LoadProblem], Split]) -> Placement:
    """Place by ``solve`` and, while the simulator finds a device too full, again with less memory to fill.

    The model adds up what each op keeps, the simulator knows when it is kept. Each try takes one evaluation of the
    budget. If no split fits the model, the split that ignores memory is returned; its row is infeasible.
    """
    accelerators = alike_accelerators(problem)
    best = least = None
    for share in MEMORY_SHARES:
        try:
            devices = _devices(problem, accelerators, solve(load_of(problem, accelerators, memory_share=share)))
        except Unsupported:
            if best is None:
                return Placement(
                    _devices(problem, accelerators, solve(load_of(problem, accelerators, memory_share=np.inf)))
                )
            break
        if not budget.open:
            return Placement(devices if best is None else best)
        score = budget.evaluate(devices)
        if best is None or score < least:
            best, least = devices, score
        if score.fits:
            break
    return Placement(best)


def _devices(problem: Problem, accelerators: list[int], split: Split) -> np.ndarray:
    """int32 ``(n,)``: machines as devices. Nodes of a class are on one machine, so colocated ops are too."""
    return np.array([*accelerators, problem.topology.host], np.int32)[split.machine]
