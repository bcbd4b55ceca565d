"""Simulates every plan with stages of equal depth and returns the best. Plans that do not fit in memory are not
simulated.
"""

from simdev.errors import Unsupported
from simdev.planners import planner

BATCH = 64  # plans that are handed to the workers at a time


@planner("grid", version=1, family="exhaustive", searches=True, source="exhaustive search")
def grid(job, *, rng, budget):
    choices = list(job.choices())
    for first in range(0, len(choices), BATCH):
        budget.evaluate_many(choices[first : first + BATCH])
    if budget.best is None:
        raise Unsupported(f"grid: none of {len(choices)} plans fits")
    return budget.best.choice
