"""Placers that minimise the largest load instead of the step time: they solve a max-load problem and place its
split."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from simdev.errors import Unsupported
from simdev.exact.dp import Split
from simdev.exact.load import LoadProblem
from simdev.exact.training import alike_accelerators, load_of
from simdev.placers.score import Score
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem

MEMORY_SHARES = (1.0, 0.85, 0.7)

Solved = tuple[Split, str]  # and how good the split is: see :attr:`simdev.placers.budget.Budget.proof`


def place_by_load(problem: Problem, budget, solve: Callable[[LoadProblem], Solved]) -> Placement:
    """Place the split that ``solve`` finds, and retry with less memory while the simulator finds a device too full.

    The model adds up all bytes that the ops keep; the simulator knows when they are kept. Each try takes one evaluation
    of the budget. If no split fits the model, the split that ignores memory is returned, and its row is infeasible.
    The budget's ``proof`` says how good the split is for the model.
    """
    accelerators = alike_accelerators(problem)
    best: tuple[Score, np.ndarray] | None = None
    for share in MEMORY_SHARES:
        limits = "" if share == 1 else f", {share:.0%} of the memory"
        try:
            split, proof = solve(load_of(problem, accelerators, memory_share=share))
        except Unsupported:
            if best is None:
                split, proof = solve(load_of(problem, accelerators, memory_share=np.inf))
                budget.proof = f"{proof}, without a limit on memory"
                return Placement(_devices(problem, accelerators, split))
            break
        devices = _devices(problem, accelerators, split)
        if not budget.open:
            if best is None:
                budget.proof = proof + limits
            break
        score = budget.evaluate(devices)
        if best is None or score < best[0]:
            best, budget.proof = (score, devices), proof + limits
        if score.fits:
            break
    return Placement(devices if best is None else best[1])


def _devices(problem: Problem, accelerators: list[int], split: Split) -> np.ndarray:
    """int32 ``(n,)``: the device of each op. Nodes of a class share a processor, so colocated ops share a device."""
    return np.array([*accelerators, problem.topology.host], np.int32)[split.processor]
