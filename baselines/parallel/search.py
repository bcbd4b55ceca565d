"""simdev's own planner: simulate the plans of people's rules and the ones that are estimated to be the quickest.

The plans of ``fsdp`` and ``megatron`` come first, so that a budget that suffices for them gives no worse plan. Then the
plans with stages of equal depth are ranked by a cost model (:mod:`simdev.planners.estimate`) and simulated in this
order until ``patience`` plans in a row bring nothing better. Then layers are moved from the stage that computes the
longest to the one that computes the shortest, as long as that helps.
"""

from contextlib import suppress
from dataclasses import replace

from simdev.baselines.parallel._rules import fully_sharded, megatron_rule
from simdev.errors import BudgetExhausted, Unsupported
from simdev.planners import planner
from simdev.planners.estimate import MARGIN

BATCH = 4  # plans that are handed to the workers at a time


@planner(
    "search",
    version=3,
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
        ranked = [choice for choice in rank(job, budget) if choice not in budget.tried]
        simulate_first(budget, ranked, patience)
        if budget.best is not None:
            balance(job, budget)
    except BudgetExhausted:
        pass
    if budget.best is None:
        raise Unsupported(f"search: none of {budget.used} plans fits")
    return budget.best.choice


def rank(job, budget):
    """The choices that are estimated to fit, the quickest first; then the others, by the memory that they lack."""
    limit = MARGIN * job.cluster.kind.memory_bytes
    found = budget.estimates(job.choices()).values()
    return [
        one.choice for one in sorted(found, key=lambda e: (max(0.0, e.peak_bytes - limit), e.step_ns, e.choice.order))
    ]


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
