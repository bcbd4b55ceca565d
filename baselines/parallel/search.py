"""simdev's own planner: the quickest neighbour, again and again, from the plans that rules of thumb suggest.

A plan is replaced by its best neighbour until none is better; a neighbour that does not fit is tried once more with the
next stronger recomputation. Then layers are moved from the stage that computes the longest to the one that computes
the shortest, as long as that helps.
"""

from dataclasses import replace

from simdev.baselines.parallel._fit import data_axis, mesh
from simdev.baselines.parallel._moves import neighbours
from simdev.errors import BudgetExhausted, Unsupported
from simdev.planners import Choice, planner


@planner(
    "search",
    version=1,
    family="search",
    searches=True,
    source="simdev: best-neighbour descent on simulated plans, from several rules of thumb",
)
def search(job, *, rng, budget):
    try:
        for start in starts(job):
            descend(job, budget, start)
        if budget.best is not None:
            balance(job, budget)
    except BudgetExhausted:
        pass
    if budget.best is None:
        raise Unsupported(f"search: none of {budget.used} plans fits")
    return budget.best.choice


def starts(job):
    """Data parallelism alone; tensor parallelism over a node; a pipeline in addition."""
    found, tensor = [], job.cluster.gpus if "tp" in job.model.axes else 1
    for tp, pp in ((1, 1), (tensor, 1), (tensor, 2), (tensor, 4), (1, 4)):
        if job.ranks % (tp * pp) == 0 and pp <= job.layers:
            divided, size = mesh(job, tp, pp, data_axis(job)), min(job.microbatches)
            found.append(Choice(divided, size, job.known_recomputes[-1]))
    valid = [choice for choice in dict.fromkeys(found) if job.valid(choice)]
    return valid or list(job.choices())[:1]


def descend(job, budget, choice):
    """Go to the best neighbour until there is no better one."""
    here = budget.evaluate(choice)
    while True:
        around = budget.evaluate_many(neighbours(job, here.choice))
        repairs = [stronger(job, outcome.choice) for outcome in around if not outcome.fits]
        around += budget.evaluate_many([choice for choice in repairs if choice is not None])
        if not around or not min(around) < here:
            return
        here = min(around)


def stronger(job, choice):
    """The choice with the next stronger recomputation, if there is one."""
    place = job.known_recomputes.index(choice.recompute) + 1
    if place == len(job.known_recomputes):
        return None
    return replace(choice, recompute=job.known_recomputes[place])


def balance(job, budget):
    """Move layers between the stages of the best plan."""
    here = budget.best
    stages = here.choice.mesh["pp"]
    while stages > 1 and here.choice.stages_per_rank == 1:
        layers = list(here.choice.stage_layers or even(job.layers, stages))
        busy = here.compute_ns
        most = max((s for s in range(stages) if layers[s] > 1), key=lambda s: (busy[s], -s), default=None)
        least = min(range(stages), key=lambda s: (busy[s], s))
        if most is None or most == least:
            return
        layers[most] -= 1
        layers[least] += 1
        moved = budget.evaluate(replace(here.choice, stage_layers=tuple(layers)))
        if not moved < here:
            return
        here = moved


def even(layers, stages):
    """Layers of each stage where they are spread evenly."""
    share, more = divmod(layers, stages)
    return tuple(share + (stage < more) for stage in range(stages))
