"""FlexFlow (Jia et al. 2019): Markov chain Monte Carlo over the bounds and degrees of pipeline stages.

A proposal replaces the configuration of a part of the model by a random one (section 6.2): the degrees or the
recomputation of a stage, a bound between two stages, two stages in place of one or one in place of two, the sequences
of a microbatch. A slower one is accepted with probability ``exp(-beta (T' - T) / T)``. A chain starts from data
parallelism and another one from a random plan; each ends after ``proposals``, or when it has not improved for half as
many. The simulator of the chain is the cost model; the best plans that it met are then simulated in full.
"""

import math

from simdev.baselines.planners._rules import data_axis
from simdev.baselines.planners._stages import Option, choice_of, stage_sizes
from simdev.parallel.mesh import Mesh
from simdev.planners import planner
from simdev.planners.estimate import Estimate, most_estimated
from simdev.planners.job import Choice

MET = 8  # plans that are simulated
MOVES = ("degrees", "recompute", "bound", "split", "merge", "trade", "sequences")
TRIES = 200  # draws, until a proposal is a plan of the job


@planner(
    "flexflow",
    version=2,
    family="search",
    searches=True,
    defaults={"beta": 20.0, "proposals": 2000},
    source="Jia et al., Beyond Data and Model Parallelism for Deep Neural Networks, MLSys 2019, section 6",
    departures=(
        "the parts of the model are pipeline stages of whole layers, not ops; ops of a stage share its degrees",
        "the chain is guided by the cost model, and only the best plans that it met are simulated",
        "times in the acceptance rule are relative to the current step time; what lacks memory is never accepted "
        "unless it lacks less",
        "where stages exchange ranks, their layers are divided in proportion: a random bound as well would hardly ever "
        "be accepted; so proposals are not symmetric, as they are in the paper",
        "a pipeline of microbatches with one flush a step; FlexFlow has no microbatches",
    ),
)
def flexflow(job, *, rng, budget, beta, proposals):
    met: dict[Choice, Estimate] = {}
    for start in (data_parallel(job), random_plan(job, rng)):
        if start is not None:
            chain(job, rng, budget, met, start, beta, proposals)
    limit = most_estimated(job)
    ranked = sorted(met.values(), key=lambda one: (max(0.0, one.peak_bytes - limit), one.step_ns, one.choice.order))
    for one in ranked:
        if not budget.open or (budget.best is not None and budget.used >= MET):
            break
        budget.evaluate(one.choice)
    return budget.answer("flexflow")


def chain(job, rng, budget, met, here, beta, proposals):
    """Walk from the plan ``here``, ``(sequences, ((mesh, recompute, layers) of each stage))``; ``met`` collects the
    estimates of the plans on the way, by choice."""
    now = judged(job, budget, met, here)
    best, improved = now, 0
    for number in range(1, proposals + 1):
        if number - improved > proposals / 2:
            return
        drawn = (proposal(job, rng, here) for _ in range(TRIES))
        there = next((new for new in drawn if new != here and suits(job, new)), None)
        if there is None:
            return
        new = judged(job, budget, met, there)
        if new < now or (new[0] == now[0] and rng.random() < math.exp(-beta * (new[1] - now[1]) / now[1])):
            here, now = there, new
        if now < best:
            best, improved = now, number


def judged(job, budget, met, plan):
    """``(bytes that are lacking, ns of a step)`` by the cost model."""
    choice = as_choice(job, plan)
    if choice not in met:
        met |= budget.estimates([choice])
    one = met[choice]
    return max(0.0, one.peak_bytes - job.cluster.kind.memory_bytes), one.step_ns


def as_choice(job, plan):
    sequences, stages = plan
    return choice_of(job, sequences, [(Option(m, sequences // m.replicas, kind), n) for m, kind, n in stages])


def suits(job, plan):
    """Whether it is a plan of the job whose replicas process no fewer and no more sequences than they may."""
    sequences, stages = plan
    shares = [divmod(sequences, mesh.replicas) for mesh, _, _ in stages]
    if job.batch % sequences or any(rest for _, rest in shares) or min(n for _, _, n in stages) < 1:
        return False
    least, most = min(job.microbatches), max(job.microbatches)
    return all(least <= share <= most for share, _ in shares) and job.valid(as_choice(job, plan))


def data_parallel(job):
    """One stage on all ranks with the least microbatch; None if the job has no such plan."""
    mesh = Mesh({data_axis(job): job.ranks} if job.ranks > 1 else {})
    plan = job.ranks * min(job.microbatches), ((mesh, job.known_recomputes[-1], job.layers),)
    return plan if suits(job, plan) else None


def random_plan(job, rng):
    """A plan with random stages; None if none is found."""
    for _ in range(TRIES):
        count = int(rng.integers(1, min(job.layers, job.ranks) + 1))
        cuts = sorted(rng.choice(job.layers - 1, count - 1, replace=False) + 1) if count > 1 else []
        layers = [int(b - a) for a, b in zip([0, *cuts], [*cuts, job.layers], strict=True)]
        stages = tuple((random_mesh(job, rng, job.ranks // count), random_kind(job, rng), n) for n in layers)
        plan = random_sequences(job, rng), stages
        if suits(job, plan):
            return plan
    return None


def random_sequences(job, rng):
    """Sequences of a microbatch: any divisor of the batch that the ranks can share."""
    most = max(job.microbatches) * job.ranks
    sizes = [n for n in range(1, min(job.batch, most) + 1) if job.batch % n == 0]
    return sizes[rng.integers(len(sizes))]


def random_kind(job, rng):
    return job.known_recomputes[rng.integers(len(job.known_recomputes))]


def random_mesh(job, rng, most):
    """A mesh of at most ``most`` ranks."""
    sizes = [n for n in stage_sizes(job) if n <= most]
    ranks = sizes[rng.integers(len(sizes))]
    inside = [t for t in range(1, job.cluster.gpus + 1) if ranks % t == 0 and (t == 1 or "tp" in job.model.axes)]
    t = inside[rng.integers(len(inside))]
    return Mesh({axis: size for axis, size in ((data_axis(job), ranks // t), ("tp", t)) if size > 1})


def proposal(job, rng, plan):
    """A plan with a random change; it may not suit the job. One time in three the sequences are drawn anew as well:
    other degrees may need others."""
    sequences, stages = plan
    sequences = sequences if rng.integers(3) else random_sequences(job, rng)
    place = int(rng.integers(len(stages)))
    mesh, kind, n = stages[place]
    free = job.ranks - sum(mesh.ranks for mesh, _, _ in stages)
    move = MOVES[rng.integers(len(MOVES))]
    new: tuple[tuple, ...]  # the stages in place of the drawn one, or of it and the next
    if move == "sequences":
        return sequences, stages
    if move == "degrees":
        new = ((random_mesh(job, rng, mesh.ranks + free), kind, n),)
        return sequences, (*stages[:place], *new, *stages[place + 1 :])
    if move == "recompute":
        return sequences, (*stages[:place], (mesh, random_kind(job, rng), n), *stages[place + 1 :])
    if move == "split" and n > 1 and mesh.ranks > 1:
        first = random_mesh(job, rng, mesh.ranks - 1)
        new = shared(n, (first, kind), (random_mesh(job, rng, mesh.ranks - first.ranks), kind))
        return sequences, (*stages[:place], *new, *stages[place + 1 :])
    if place + 1 == len(stages):
        return plan
    other, also, m = stages[place + 1]
    if move == "bound" and n + m > 2:
        by = int(rng.integers(1 - n, m))
        new = (mesh, kind, n + by), (other, also, m - by)
    elif move == "merge":
        new = ((random_mesh(job, rng, mesh.ranks + other.ranks), kind, n + m),)
    else:
        first = random_mesh(job, rng, mesh.ranks + other.ranks + free - 1)
        second = random_mesh(job, rng, mesh.ranks + other.ranks + free - first.ranks)
        new = shared(n + m, (first, kind), (second, also))
    return sequences, (*stages[:place], *new, *stages[place + 2 :])


def shared(layers, *parts):
    """Two stages with ``layers`` layers, in proportion to the ranks of their ``(mesh, recompute)``."""
    (first, kind), (second, also) = parts
    left = min(max(1, round(layers * first.ranks / (first.ranks + second.ranks))), layers - 1)
    return (first, kind, left), (second, also, layers - left)
