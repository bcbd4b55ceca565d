"""simdev's own planner: simulate the plans of people's rules and the ones that are estimated to be the quickest.

The plans of ``fsdp`` and ``megatron`` come first, so that a budget that suffices for them gives no worse plan. Then the
plans with stages of equal depth are ranked by a cost model (:mod:`simdev.planners.estimate`). If a plan of ``alpa``,
whose stages have degrees of their own, may be quicker than all of them, it is simulated next. Jobs for which Alpa's
program would take long (:data:`LARGEST`) do without. The ranked plans follow in their order until ``patience`` plans in
a row bring nothing better. Then layers are moved from the stage that computes the longest to the one that computes the
shortest, as long as that helps.
"""

from contextlib import suppress
from dataclasses import replace
from math import inf

from simdev.baselines.planners._alpa import least_step, submeshes
from simdev.baselines.planners._rules import fully_sharded, megatron_rule
from simdev.baselines.planners._stages import choice_of, pipelines
from simdev.errors import BudgetExhausted, Unsupported
from simdev.planners import planner
from simdev.planners.estimate import most_estimated

BATCH = 4  # plans that are handed to the workers at a time
CLOSE = 1.02  # how many times longer than the best estimate Alpa's equation may say that a plan takes
FILLED = (1.0, 0.84)  # shares of the capacity that the cost model may fill in Alpa's program
LARGEST = 6000  # layers times ranks of a job for which Alpa's program is run


@planner(
    "search",
    version=4,
    family="search",
    searches=True,
    defaults={"patience": 8},
    source="simdev: simulation of the plans that a cost model ranks first",
)
def search(job, *, rng, budget, patience):
    try:
        for rule in (fully_sharded, megatron_rule):
            with suppress(Unsupported):
                rule(job, budget)
        ranked = rank(job, budget)
        if job.layers * job.ranks <= LARGEST:
            simulate_own_degrees(job, budget, ranked)
        simulate_first(budget, [choice for choice in ranked if choice not in budget.tried], patience)
        if budget.best is not None:
            balance(job, budget)
    except BudgetExhausted:
        pass
    if budget.best is None:
        raise Unsupported(f"search: none of {budget.used} plans fits")
    return budget.best.choice


def rank(job, budget, choices=None):
    """The choices (all with stages of equal depth) that are estimated to fit, the quickest first; then the others, by
    the memory that they lack."""
    limit = most_estimated(job)
    found = budget.estimates(job.choices() if choices is None else choices).values()
    return [
        one.choice for one in sorted(found, key=lambda e: (max(0.0, e.peak_bytes - limit), e.step_ns, e.choice.order))
    ]


def simulate_own_degrees(job, budget, ranked):
    """Simulate Alpa's plans, if they may be quicker than those that are ranked: one that may fill the memory by the
    cost model, and one that leaves some, in case the captured program needs more."""
    capacity = job.cluster.kind.memory_bytes
    fitting = (one.step_ns for one in (budget.estimated[choice] for choice in ranked) if one.peak_bytes <= capacity)
    below = CLOSE * min(fitting, default=inf)
    known, quickest = list(pipelines(job, budget, sizes=submeshes(job))), []
    for share in FILLED:
        found = []
        for pipeline in known:
            _, stages = least_step(pipeline, share * capacity, below)
            if stages:
                chosen = [(pipeline.options[option], layers) for option, layers in stages]
                found.append(choice_of(job, pipeline.sequences, chosen))
        quickest += rank(job, budget, filter(job.valid, found))[:1]
    budget.evaluate_many(quickest)


def simulate_first(budget, ranked, patience):
    """Simulate the choices in order until ``patience`` of them in a row are not better than the best."""
    since = 0
    for first in range(0, len(ranked), BATCH):
        best = budget.best
        budget.evaluate_many(ranked[first : first + BATCH])
        since = 0 if budget.best is not best else since + BATCH
        if budget.best is not None and since >= patience:
            return


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
