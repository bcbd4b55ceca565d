"""Alpa (Zheng et al. 2022): the layers of each pipeline stage by a dynamic program (section 5, equation 2: the sum of
all stage latencies and ``m - 1`` times the largest), the parallelism within a stage by its costs.

The latency of a stage is the least time of its forward and backward pass on the compute stream
(:func:`simdev.planners.bounds.span_ns`), collectives that the pass waits for included.
"""

from simdev.errors import Unsupported
from simdev.parallel.plan import peak_bytes
from simdev.planners import Choice, planner
from simdev.planners.bounds import span_ns


@planner(
    "alpa",
    version=1,
    family="dynamic",
    source="Zheng et al., Alpa: Automating Inter- and Intra-Operator Parallelism, OSDI 2022, sections 4 and 5",
    departures=(
        "all stages have submeshes of the same shape, and all layers of a model the same split (dp and tp sizes): "
        "programs with other splits cannot be captured",
        "the intra-op integer program is an enumeration of these splits",
        "recomputation and microbatch are enumerated too; Alpa gets them from the user",
    ),
)
def alpa(job, *, rng, budget):
    found = []
    for choice in job.choices():
        if choice.schedule != "1f1b":
            continue
        predicted, layers = stages(job, budget.evaluator, choice)
        found.append((predicted, choice, layers))
    for _, choice, layers in sorted(found, key=lambda row: (row[0], row[1].order)):
        divided = Choice(choice.mesh, choice.microbatch, choice.recompute, stage_layers=layers)
        peak = peak_bytes(budget.evaluator.program(divided))
        if (peak <= job.cluster.kind.memory_bytes).all():
            return divided
    raise Unsupported(f"alpa: none of {len(found)} plans fits")


def stages(job, evaluator, choice):
    """``(predicted step ns, layers of each stage)``: the best division of the layers for a mesh, equation 2."""
    program = evaluator.program(choice)
    parts, microbatches = program.plan.parts, program.plan.microbatches
    update = max(span_ns(template) for template in program.finish)
    latency = [
        span_ns(forward) + min(map(span_ns, backward))
        for forward, backward in zip(program.forward, program.backward, strict=True)
    ]
    if len(parts) == 1:
        return microbatches * latency[0] + update, ()
    middle = (
        latency[1] / parts[1].layers
        if len(parts) > 2
        else min(t / p.layers for t, p in zip(latency, parts, strict=True))
    )
    fixed = [max(0.0, time - middle * part.layers) for time, part in zip(latency, parts, strict=True)]
    layers = divide(job.layers, fixed, middle)
    times = [extra + middle * n for extra, n in zip(fixed, layers, strict=True)]
    return sum(times) + (microbatches - 1) * max(times) + update, layers


def divide(layers, fixed, each):
    """Layers of each stage so that the slowest is as quick as possible; a stage with ``n`` layers takes ``fixed`` and
    ``n`` times ``each``. With equal layers the sum in equation 2 does not depend on the division."""
    count = [1] * len(fixed)
    for _ in range(layers - len(fixed)):
        stage = min(range(len(fixed)), key=lambda s: (fixed[s] + each * (count[s] + 1), s))
        count[stage] += 1
    return tuple(count)
