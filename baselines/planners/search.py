"""simdev's own planner: simulate the plans of people's rules and the ones that are estimated to be the quickest.

The plans of ``fsdp`` and ``megatron`` come first, so that a budget that suffices for them gives no worse plan. Then the
plans with stages of equal depth are ranked by a cost model (:mod:`simdev.planners.estimate`). If plans of ``alpa``,
whose stages have degrees of their own, may be quicker than all of them, some are simulated next. Jobs for which Alpa's
program would take long (:data:`LARGEST`) do without. The ranked plans follow in their order until ``patience`` plans in
a row bring nothing better. In a wide job (:class:`simdev.planners.Job`) the first :data:`CUT` pipelines among them are
also ranked with more stages on each rank, light end stages, and stages cut by time: layers are spread so that the cost
model's longest stage is as short as possible. At the end, layers are moved from the rank
that computes the longest to the one that computes the shortest, as long as that helps.
"""

from contextlib import suppress
from dataclasses import replace
from math import inf

from simdev.baselines.planners._alpa import least_step, submeshes
from simdev.baselines.planners._rules import fully_sharded, megatron_rule
from simdev.baselines.planners._stages import TIGHTER, choice_of, pipelines
from simdev.errors import BudgetExhausted, Unsupported
from simdev.parallel.mesh import Mesh
from simdev.parallel.orders import V_SHAPED
from simdev.planners import planner
from simdev.planners.estimate import most_estimated, stage_costs

CUT = 64  # ranked pipelines that are also tried deeper and cut by time
BATCH = 4  # plans that are handed to the workers at a time
CLOSE = 1.02  # how many times longer than the best estimate Alpa's equation may say that a plan takes
OWN = 4  # of Alpa's plans that are simulated
LARGEST = 6000  # layers times ranks of a job for which Alpa's program is run


@planner(
    "search",
    version=6,
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
        ranked = rank(job, budget, job.choices(base=True))
        if job.wide:
            ranked = cut(job, budget, ranked)
        if job.layers * job.ranks <= LARGEST:
            simulate_own_degrees(job, budget, ranked)
        simulate_first(budget, [choice for choice in ranked if choice not in budget.tried], patience)
        if budget.best is not None:
            balance(job, budget)
    except BudgetExhausted:
        pass
    return budget.answer("search")


def rank(job, budget, choices=None):
    """The choices (all with stages of equal depth) that are estimated to fit, the quickest first; then the others, by
    the memory that they lack."""
    limit = most_estimated(job)
    found = budget.estimates(job.choices() if choices is None else choices).values()
    return [
        one.choice for one in sorted(found, key=lambda e: (max(0.0, e.peak_bytes - limit), e.step_ns, e.choice.order))
    ]


def simulate_own_degrees(job, budget, ranked):
    """Simulate Alpa's plans, if they may be quicker than those that are ranked: the first :data:`OWN` of all that its
    program makes, which may fill the memory by the cost model, or leave some of it."""
    capacity = job.cluster.kind.memory_bytes
    fitting = (one.step_ns for one in (budget.estimated[choice] for choice in ranked) if one.peak_bytes <= capacity)
    below = CLOSE * min(fitting, default=inf)
    found = []
    for pipeline in pipelines(job, budget, sizes=submeshes(job)):
        for share in TIGHTER:
            _, stages = least_step(pipeline, share * capacity, below)
            if stages:
                chosen = [(pipeline.options[option], layers) for option, layers in stages]
                found.append(choice_of(job, pipeline.sequences, chosen))
    budget.evaluate_many(rank(job, budget, filter(job.valid, dict.fromkeys(found)))[:OWN])


def cut(job, budget, ranked):
    """The ranked choices, with the pipelines among the first of them also deeper and cut by time, in the order of
    estimates."""
    pipelines = [c for c in ranked if c.mesh["pp"] > 1 and c.schedule not in V_SHAPED][:CUT]
    found = [choice for one in pipelines for choice in (one, *job.deeper(one)) if job.valid(choice)]
    found += filter(None, [by_time(job, budget, choice) for choice in found if not choice.stage_layers])
    kept = [choice for choice in ranked if choice not in set(pipelines)]
    return merged(budget, rank(job, budget, filter(job.valid, found)), kept)


def merged(budget, some, others):
    """Two rankings as one, by the estimates that there are."""
    limit = most_estimated(budget.job)

    def key(choice):
        one = budget.estimated[choice]
        return max(0.0, one.peak_bytes - limit), one.step_ns, choice.order

    return sorted((*some, *others), key=key)


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
    while stages > 1:
        plan = job.plan(here.choice)
        layers, rank = [part.layers for part in plan.parts], plan.rank_of
        busy = here.compute_ns
        full = [s for s in range(plan.stages) if layers[s] > 1]
        most = max(full, key=lambda s: (busy[rank(s)], layers[s], -s), default=None)
        least = min(range(plan.stages), key=lambda s: (busy[rank(s)], layers[s], s))
        if most is None or rank(most) == rank(least):
            return
        layers[most] -= 1
        layers[least] += 1
        moved = budget.evaluate(replace(here.choice, stage_layers=tuple(layers)))
        if not moved < here:
            return
        here = moved


def by_time(job, budget, choice):
    """The choice with its layers spread so that the longest stage is as short as possible by the cost model: the last
    stage, which has the head, gets fewer. None where that is what it has already."""
    plan = job.plan(choice)
    stages, mesh = plan.stages, Mesh({axis: size for axis, size in choice.mesh.inner})
    costs = stage_costs(budget.evaluator, mesh, choice.microbatch, choice.recompute).pass_ns

    def longest(last):
        return max(costs[0, -(-(job.layers - last) // (stages - 1))], costs[1, last])

    last = min(range(max(1, job.layers - stages + 2)), key=lambda n: (longest(n), -n))
    share, more = divmod(job.layers - last, stages - 1)
    layers = (*(share + (stage < more) for stage in range(stages - 1)), last)
    if layers == tuple(part.layers for part in plan.parts):
        return None
    return replace(choice, stage_layers=layers)
