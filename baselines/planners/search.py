"""simdev's own planner: simulate the plans of people's rules and the ones that are estimated to be the quickest.

The plans of ``fsdp`` and ``megatron`` come first, so that a budget that suffices for them gives no worse plan. Then the
plans with stages of equal depth are ranked by a cost model (:mod:`simdev.planners.estimate`), which has to capture each
way to split a layer (``tp``, ``cp``, ``ep``) with each kind of recomputation; those are left out that seem far from the
best (:func:`estimate`). If plans of ``alpa``, whose stages have degrees of their own, may be quicker than all of them,
some are simulated next. Jobs for which Alpa's program would take long (:data:`LARGEST`) do without. The ranked plans
follow in their order until ``patience`` plans in a row bring nothing better. In a wide job
(:class:`simdev.planners.Job`) the first :data:`CUT` pipelines among them are also ranked with more stages on each rank,
light end stages, and stages cut by time: layers are spread so that the cost model's longest stage is as short as
possible. At the end, layers are moved from the rank that computes the longest to the one that computes the shortest, as
long as that helps.
"""

from contextlib import suppress
from dataclasses import replace
from itertools import chain
from math import inf

from simdev.baselines.planners._alpa import least_step, submeshes
from simdev.baselines.planners._rules import fully_sharded, megatron_rule
from simdev.baselines.planners._stages import TIGHTER, choice_of, pipelines
from simdev.errors import BudgetExhausted, Unsupported
from simdev.parallel.mesh import Mesh
from simdev.parallel.orders import V_SHAPED
from simdev.planners import planner
from simdev.planners.bounds import small_mesh
from simdev.planners.estimate import group_of, most_estimated, stage_costs

CUT = 64  # ranked pipelines that are also tried deeper and cut by time
BATCH = 4  # plans that are handed to the workers at a time
CLOSE = 1.02  # how many times longer than the best estimate Alpa's equation may say that a plan takes
OWN = 4  # of Alpa's plans that are simulated
LARGEST = 6000  # layers times ranks of a job for which Alpa's program is run
WORTH = 1.1  # times the best estimate that a group of plans may take by a guess, to be estimated


@planner(
    "search",
    version=7,
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
        estimates, splits = estimate(job, budget)
        ranked = rank(job, estimates.values())
        if job.wide:
            ranked = cut(job, budget, ranked)
        if job.layers * job.ranks <= LARGEST:
            simulate_own_degrees(job, budget, ranked, splits)
        simulate_first(budget, [choice for choice in ranked if choice not in budget.tried], patience)
        if budget.best is not None:
            balance(job, budget)
    except BudgetExhausted:
        pass
    return budget.answer("search")


def estimate(job, budget):
    """The estimates that decide, by choice: of all that split no layer (or have the least split that the job allows),
    and of what may be nearly as good as the best of these that fits. Also returns the splits with their recomputation,
    ``(tp, cp, ep, recompute)``, of which there are estimates.

    A split is captured once, with the least microbatch and the first kind of recomputation, for a guess: the time of
    its passes if data parallelism cost nothing. Other kinds are taken to lengthen it as they do without a split.
    """
    groups: dict[tuple, dict[str, list]] = {}
    for choice in job.choices(base=True):
        split = group_of(choice)[:-1]
        groups.setdefault(split, {}).setdefault(choice.recompute, []).append(choice)
    # Without a split, or with the least one that the job allows; meshes come in the order of their stages.
    whole, *others = (groups[split] for split in sorted(groups)) if groups else [{}]
    kind, least = job.known_recomputes[0], min(job.microbatches)

    def guess(choices):
        """Of those with the least microbatch, inf if there are none."""
        small = [one for one in choices if one.microbatch == least]
        if not small:
            return inf
        one = max(small, key=lambda choice: choice.mesh.replicas)
        mesh = small_mesh(one.mesh)
        passes = stage_costs(budget.evaluator, mesh, least, one.recompute).pass_ns[1, job.layers]
        return passes * job.batch / (least * mesh.replicas) * mesh.ranks / job.ranks

    found = budget.estimates(chain(*whole.values()))
    limit = most_estimated(job)
    best = min((one.step_ns for one in found.values() if one.peak_bytes <= limit), default=inf)
    if not others:
        return found, {group_of(choice) for choice in chain(*whole.values())}
    plain = guess(whole.get(kind, ()))
    longer = {recompute: guess(choices) / plain for recompute, choices in whole.items()} if plain < inf else {}
    worth = []
    for kinds in others:
        if budget.elapsed >= budget.seconds:
            break
        first = guess(kinds.get(kind, ())) if best < inf else 0.0
        for recompute, choices in kinds.items():
            if first == inf or recompute not in longer or first * longer[recompute] <= WORTH * best:
                worth += choices
    splits = {group_of(choice) for choice in chain(*whole.values(), worth)}
    return found | budget.estimates(worth), splits


def rank(job, estimates):
    """The choices that are estimated to fit, the quickest first; then the others, by the memory that they lack."""
    limit = most_estimated(job)
    in_order = sorted(estimates, key=lambda one: (max(0.0, one.peak_bytes - limit), one.step_ns, one.choice.order))
    return [one.choice for one in in_order]


def simulate_own_degrees(job, budget, ranked, splits=None):
    """Simulate Alpa's plans, if they may be quicker than those that are ranked: the first :data:`OWN` of all that its
    program makes of ``splits`` (:func:`estimate`), which may fill the memory by the cost model, or leave some of it."""
    capacity = job.cluster.kind.memory_bytes
    fitting = (one.step_ns for one in (budget.estimated[choice] for choice in ranked) if one.peak_bytes <= capacity)
    below = CLOSE * min(fitting, default=inf)
    found = []
    for pipeline in pipelines(job, budget, sizes=submeshes(job), splits=splits):
        for share in TIGHTER:
            _, stages = least_step(pipeline, share * capacity, below)
            if stages:
                chosen = [(pipeline.options[option], layers) for option, layers in stages]
                found.append(choice_of(job, pipeline.sequences, chosen))
    estimates = budget.estimates(filter(job.valid, dict.fromkeys(found)))
    budget.evaluate_many(rank(job, estimates.values())[:OWN])


def cut(job, budget, ranked):
    """The ranked choices, with the pipelines among the first of them also deeper and cut by time, in the order of
    estimates."""
    pipelines = [c for c in ranked if c.mesh["pp"] > 1 and c.schedule not in V_SHAPED][:CUT]
    found = [choice for one in pipelines for choice in (one, *job.deeper(one)) if job.valid(choice)]
    found += filter(None, [by_time(job, budget, choice) for choice in found if not choice.stage_layers])
    kept = [choice for choice in ranked if choice not in set(pipelines)]
    return merged(budget, rank(job, budget.estimates(filter(job.valid, found)).values()), kept)


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
