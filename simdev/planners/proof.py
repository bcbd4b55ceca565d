"""Proves that no plan of a job's space is much quicker than a given one: by bounds, and by simulating what they leave.

Each choice of the job (:meth:`simdev.planners.job.Job.choices`) has a bound, which holds however its layers are
divided (:mod:`simdev.planners.bounds`). A choice that cannot fit, by its bound of memory, or cannot be quicker by
``gain`` needs no simulation. The others are simulated, in the order of their estimates, as a search simulates: a step
of many microbatches is extrapolated from few (:meth:`simdev.planners.evaluate.Evaluator.outcome` without ``exact``).
"""

from __future__ import annotations

from dataclasses import dataclass

from simdev.errors import BudgetExhausted
from simdev.planners.budget import PlanBudget
from simdev.planners.outcome import Outcome

BATCH = 4  # plans that are handed to the workers at a time


@dataclass(frozen=True)
class Proof:
    """What is known of the ``plans`` of a space: whether one of them takes less than ``1 - gain`` times the step of the
    best one. ``excluded`` of them cannot, by their bounds. ``simulated`` of the rest were. ``left`` were not: no
    budget was left for them, or they have too many ops. The proof is complete if there are none of these."""

    gain: float
    plans: int
    excluded: int
    simulated: int
    left: int


def prove(budget: PlanBudget, best: Outcome, gain: float) -> Proof:
    """Simulate what may be quicker than ``best`` by ``gain`` (a share of its step time), within the budget.

    The plans that are found to be quicker are in the budget, whose ``best`` then is another one.
    """
    if budget.best is None or best < budget.best:
        budget.best = best
    budget.screen_no_more()  # estimates of memory prove nothing
    try:
        bounds = budget.bounds((1 - gain) * budget.best.time_ns)
    except BudgetExhausted:
        return Proof(gain, budget.total, 0, 0, budget.total)

    def order(choice):
        known = budget.estimated.get(choice)
        return known.step_ns if known else bounds[choice], choice.order

    def may_be_quicker(choice):
        assert budget.best is not None
        return bounds[choice] < (1 - gain) * budget.best.time_ns

    waiting = sorted(filter(may_be_quicker, bounds), key=order)
    try:
        while some := [choice for choice in waiting if choice not in budget.tried and may_be_quicker(choice)][:BATCH]:
            budget.evaluate_many(some)
    except BudgetExhausted:
        pass
    quicker = list(filter(may_be_quicker, bounds))
    simulated = [budget.tried[choice] for choice in quicker if choice in budget.tried]
    known = sum(one.step_ns is not None or one.overflow_bytes > 0 for one in simulated)
    return Proof(gain, len(bounds), len(bounds) - len(quicker), known, len(quicker) - known)
