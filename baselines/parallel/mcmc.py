"""Markov chain Monte Carlo over whole plans, with the acceptance rule and the end of FlexFlow (Jia et al. 2019,
section 6). FlexFlow itself chooses a split for each op.

A random neighbour of the current plan is proposed; a slower one is accepted with probability
``exp(-beta (T' - T) / T)``. The chain ends with the budget, or when it has not improved for half of its length
(section 6.2), ``patience`` proposals at least.
"""

import math

from simdev.baselines.parallel._fit import mesh
from simdev.baselines.parallel._moves import neighbours
from simdev.errors import Unsupported
from simdev.planners import Choice, planner


@planner(
    "mcmc",
    version=2,
    family="search",
    searches=True,
    defaults={"beta": 20.0, "patience": 40},
    source="Jia et al., Beyond Data and Model Parallelism for Deep Neural Networks, MLSys 2019, section 6",
    departures=(
        "a proposal changes the plan of the whole model; FlexFlow changes the split of one op",
        "times in the acceptance rule are relative to the current step time",
        "starts from data parallelism alone, not also from an expert's plan or a random one",
    ),
)
def mcmc(job, *, rng, budget, beta, patience):
    start = Choice(mesh(job), min(job.microbatches), job.known_recomputes[-1])
    here = budget.evaluate(start if job.valid(start) else next(job.choices()))
    proposals, improved = 0, 0
    while budget.open and proposals - improved < max(patience, improved):
        around = neighbours(job, here.choice)
        if not around:
            break
        proposals += 1
        best = budget.best
        there = budget.evaluate(around[rng.integers(len(around))])
        if budget.best is not best:
            improved = proposals
        if there < here or rng.random() < accept(here, there, beta):
            here = there
    if budget.best is None:
        raise Unsupported(f"mcmc: none of {budget.used} plans fits")
    return budget.best.choice


def accept(here, there, beta):
    """The probability with which a plan that is not better replaces the current one; 0 if it fits less well."""
    if there.overflow_bytes > here.overflow_bytes or not (here.step_ns and there.step_ns):
        return 0.0
    return math.exp(-beta * (there.step_ns - here.step_ns) / here.step_ns)
