"""The conformance check of planners: for tests, also of your own planners."""

from __future__ import annotations

import numpy as np

from simdev.errors import InvalidInput, Unsupported
from simdev.planners.budget import PlanBudget
from simdev.planners.evaluate import Evaluator
from simdev.planners.job import Choice, Job
from simdev.planners.planner import PlannerSpec


def check_planner(spec: PlannerSpec, job: Job, evaluator: Evaluator | None = None, evaluations: float = 60) -> None:
    """Raise :class:`InvalidInput` unless the planner keeps its contract on ``job``: the same seed gives the same
    choice, the choice suits the job, the budget is kept, and a planner that searches returns a plan that fits.

    A planner may refuse the job with :class:`Unsupported`.
    """
    evaluator = evaluator or Evaluator(job)
    found: list[tuple[Choice | None, int]] = []
    for _ in range(2):
        budget = PlanBudget(evaluator, evaluations=evaluations)
        try:
            choice = spec.plan(job, rng=np.random.default_rng(7), budget=budget)
        except Unsupported:
            found.append((None, budget.used))
            continue
        if budget.used > evaluations:
            raise InvalidInput(f"{budget.used} evaluations of {evaluations}", source=f"planner {spec.name}")
        if spec.searches and not evaluator.outcome(choice).fits:
            raise InvalidInput(f"{choice} does not fit", source=f"planner {spec.name}")
        found.append((choice, budget.used))
    if found[0] != found[1]:
        raise InvalidInput(f"two runs with one seed differ: {found}", source=f"planner {spec.name}")
    if not spec.source:
        raise InvalidInput("cites no source", source=f"planner {spec.name}")
