"""A quick estimate of a plan, for planners that compare hundreds of plans before they simulate a few.

Layers are alike, so the whole model is captured with three and with four of them on one stage, and everything is linear
in the number of layers: time on each stream, host time, memory. These two captures serve all numbers of stages, layers,
replicas and shards; microbatches larger than the two smallest of a job continue from these two. A pass of a stage is
then one number, and the schedule is simulated with passes as ops. Collectives are priced for their real groups.

What is left out: overlap across the borders of passes, gathers of the first layer of each stage, the time that
embeddings take on the first stage (all that is no layer counts for the last one). So an estimate ranks plans; it is no
result. ``search`` simulates the plans that it ranks first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from simdev.graphs.parallel_model import Part
from simdev.parallel.capture import FEW, StageProgram, capture_stage
from simdev.parallel.collectives import collective_ns, send_ns
from simdev.parallel.mesh import Mesh
from simdev.parallel.orders import pipeline_order
from simdev.parallel.plan import Plan
from simdev.parallel.program import Segment
from simdev.parallel.timing import Template, make_template
from simdev.parallel.unroll import execution_order
from simdev.planners.bounds import copies_of, small_mesh, span_ns
from simdev.planners.job import RECOMPUTE, Choice, Job

if TYPE_CHECKING:
    from simdev.planners.evaluate import Evaluator

SHARDS = 2  # of the captures (small_mesh); what a rank stores is scaled to other numbers
MARGIN = 1.05  # by how much the estimated memory may exceed the capacity of a plan that is still simulated
GRADIENT_BYTES = 4  # of a sharded gradient
DATA = ("dp_replicate", "dp_shard")
PASSES = ("F", "B first", "B further", "B last", "U")


@dataclass(frozen=True)
class Estimate:
    """The estimated step time and the largest peak of memory of a choice."""

    choice: Choice
    step_ns: int
    peak_bytes: int


@dataclass(frozen=True, eq=False)
class _Passes:
    """What a pass of a stage takes and keeps: ``base`` for three layers, ``layer`` for each further one.

    Both are float ``(5,)``: ns of the longest path, ns of the host, growth and peak of memory in bytes, ns of the
    busiest stream. What a stage stores is a single number.
    """

    base: np.ndarray
    layer: np.ndarray

    def of(self, part: Part, few: int) -> np.ndarray:
        """The figures of a stage: what is no layer belongs to the last one."""
        ends = self.base - few * self.layer
        return part.layers * self.layer + (ends if part.last else 0.0)


def estimates(evaluator: Evaluator, choices: Iterable[Choice]) -> Iterator[Estimate | None]:
    """The estimates of choices with the same split of a layer and the same recomputation, in order of their
    microbatches. Once no plan with a microbatch fits, larger microbatches are not looked at: None."""
    fitting = True
    capacity = MARGIN * evaluator.job.cluster.kind.memory_bytes
    for _, group in groupby(choices, key=lambda choice: choice.microbatch):
        same = list(group)
        if not fitting:
            yield from (None for _ in same)
            continue
        found = [estimate(evaluator, choice) for choice in same]
        fitting = any(one.peak_bytes <= capacity for one in found)
        yield from found


def group_of(choice: Choice) -> tuple:
    """Choices with equal groups share captures of :func:`estimate`."""
    return (*(choice.mesh[axis] for axis in ("tp", "cp", "ep")), RECOMPUTE.index(choice.recompute))


def estimate(evaluator: Evaluator, choice: Choice) -> Estimate:
    """The estimate of a choice. Raises :class:`InvalidInput` if it does not suit the job."""
    plan = evaluator.job.plan(choice)
    passes = _passes(evaluator, choice, plan)
    parts = plan.parts
    figures = {name: [one.of(part, _few(evaluator.job)) for part in parts] for name, one in passes.items()}
    if plan.reduce_each:
        figures |= _reducing(figures)
    resident = [figures["resident"][stage][0] for stage in range(len(parts))]
    times = {name: [_pass_ns(values) for values in rows] for name, rows in figures.items() if name in PASSES}
    return Estimate(choice, int(_step_ns(plan, times)), int(_peak_bytes(plan, figures, resident)))


def _reducing(figures: dict[str, list[np.ndarray]]) -> dict[str, list[np.ndarray]]:
    """The backward passes of a plan that reduces gradients after each microbatch: each takes as long as the last one of
    another plan; the first one leaves a rank's shard of the gradients, the others nothing."""
    kept = [forward[2] for forward in figures["F"]]
    shard = [values[0] for values in figures["gradients"]]
    reduced = {}
    for name in ("B first", "B further", "B last"):
        rows = [values.copy() for values in figures["B last"]]
        for row, live, gradients in zip(rows, kept, shard, strict=True):
            row[2] = (gradients if name == "B first" else 0.0) - live
            row[3] -= 0.0 if name == "B first" else gradients  # they are there already
        reduced[name] = rows
    return reduced


def _few(job: Job) -> int:
    return min(FEW, max(1, job.layers - 1))


def _passes(evaluator: Evaluator, choice: Choice, plan: Plan) -> dict[str, _Passes]:
    """The figures of each kind of pass, by name; ``resident`` and ``gradients`` hold bytes that a stage stores."""
    job, known = evaluator.job, evaluator.known
    sizes = sorted(job.microbatches)[:2]
    size, small = min(choice.microbatch, sizes[-1]), small_mesh(choice)
    key = "passes", small, plan.mesh.inner, choice.microbatch, choice.recompute
    if key not in known:
        captures = _captures(evaluator, plan, small, size)
        beyond, less = 0.0, captures
        if choice.microbatch > size and len(sizes) == 2:
            beyond = (choice.microbatch - size) / (sizes[1] - sizes[0])
            less = _captures(evaluator, plan, small, sizes[0])
        known[key] = _figures(evaluator, plan, captures, less, beyond)
    return known[key]


def _captures(evaluator: Evaluator, plan: Plan, mesh: Mesh, microbatch: int) -> list[StageProgram]:
    """The whole model with a few layers, and with one more."""
    known, few = evaluator.known, _few(evaluator.job)
    parameters = {**plan.parameters, "microbatch": microbatch}
    names = tuple(sorted((name, value) for name, value in parameters.items() if name != "layers"))
    found = []
    for layers in (few, few + 1):
        key = "few", layers, mesh, names
        if key not in known:
            known[key] = capture_stage(plan.model, {**parameters, "layers": layers}, mesh, Part(layers))
        found.append(known[key])
    return found


def _kernels_ns(evaluator: Evaluator, plan: Plan, stage: StageProgram) -> int:
    """Time of the kernels of a forward pass."""
    calls = [call for call in stage.forward.calls if not call.is_collective]
    return sum(evaluator.prices.of(tuple(calls), plan.mesh, 0))


def _figures(
    evaluator: Evaluator, plan: Plan, captures: list[StageProgram], less: list[StageProgram], beyond: float
) -> dict[str, _Passes]:
    """The figures of ``captures`` and, ``beyond`` times, of what they have more than ``less``."""
    shards = plan.mesh["dp_shard"]
    left = SHARDS / shards if shards > 1 else 1.0  # of what a rank of the captures stores
    slower = 1.0
    if beyond:
        before, now = (_kernels_ns(evaluator, plan, stages[1]) for stages in (less, captures))
        slower += beyond * (now - before) / now

    def figures(segment: Segment, smaller: Segment, parameters: int, reduces: bool, factor: float) -> np.ndarray:
        template = make_template(segment, plan.cluster, plan.mesh, 0, plan.host, evaluator.prices, merge=False)
        template = _scaled(template, factor)
        saved = GRADIENT_BYTES * parameters * (1 - left) if reduces and shards > 1 else 0.0
        live = segment.live_bytes + beyond * (segment.live_bytes - smaller.live_bytes) - saved
        peak = segment.peak_bytes + beyond * (segment.peak_bytes - smaller.peak_bytes) - saved
        exchange = _exchange_ns(plan, parameters * left) if reduces and shards > 1 else 0.0
        host = float((template.issue_ns + template.rest_ns).sum())
        busy = np.bincount(template.stream, template.ns, minlength=len(template.streams))
        most = float(busy.max()) if len(busy) else 0.0
        return np.array([span_ns(template), host, live, peak, exchange + most])

    def both(of, reduces: bool = False, factor: float = slower) -> _Passes:
        pairs = zip(captures, less, strict=True)
        short, long = (figures(of(stage), of(other), stage.parameters, reduces, factor) for stage, other in pairs)
        return _Passes(short, long - short)

    stored = [np.array([stage.resident_bytes * left]) for stage in captures]
    shard = [np.array([GRADIENT_BYTES * stage.parameters * left]) for stage in captures]
    first, further, last, only = range(4)
    return {
        "F": both(lambda stage: stage.forward),
        "B first": both(lambda stage: stage.backward[first]),
        "B further": both(lambda stage: stage.backward[further]),
        "B last": both(lambda stage: stage.backward[last], reduces=True),
        "U": both(lambda stage: stage.finish, factor=left),  # the optimizer updates a rank's shard
        "resident": _Passes(stored[0], stored[1] - stored[0]),
        "gradients": _Passes(shard[0], shard[1] - shard[0]),
    }


def _scaled(template: Template, factor: float) -> Template:
    """The template with kernels and with collectives inside a layer that take ``factor`` times as long; copies of
    parameters and collectives among replicas stay as they are."""
    if factor == 1:
        return template
    data = np.array([bool(set(axes) & set(DATA)) for axes in template.axes], bool)[template.stream]
    grows = ~data & ~copies_of(template)
    return replace(template, ns=np.where(grows, np.rint(template.ns * factor), template.ns).astype(np.int64))


def _exchange_ns(plan: Plan, parameters: float) -> float:
    """An all-reduce of the gradients of ``parameters`` among the replicas of sharded groups."""
    if plan.mesh["dp_replicate"] < 2:
        return 0.0
    line = plan.mesh.lines(("dp_replicate",))[0]
    return float(collective_ns("all_reduce", int(GRADIENT_BYTES * parameters), line, plan.cluster))


def _pass_ns(figures: np.ndarray) -> float:
    """Time of a pass: its longest path, or its host, or its busiest stream."""
    return float(max(figures[0], figures[1], figures[4]))


def _step_ns(plan: Plan, times: dict[str, list[float]]) -> float:
    """The step time with each pass as one op; many microbatches continue the steady state of few."""
    ranks = plan.mesh["pp"]
    update = max(
        sum(times["U"][stage] for stage in range(plan.stages) if plan.rank_of(stage) == rank) for rank in range(ranks)
    )
    one = 1 if plan.stages_per_rank == 1 else ranks
    first = plan.microbatches % one + one * -(-max(2 * ranks, 2) // one)
    rounds = (plan.microbatches - first) // one
    if rounds < 2:
        return _schedule_ns(plan, plan.microbatches, times) + update
    short, long = (_schedule_ns(plan, first + n * one, times) for n in (0, 1))
    return short + rounds * (long - short) + update


def _schedule_ns(plan: Plan, microbatches: int, times: dict[str, list[float]]) -> float:
    ranks, width = plan.mesh["pp"], plan.mesh.stage_ranks
    orders = pipeline_order(plan.schedule, ranks, microbatches, plan.stages_per_rank)
    size = _sent_bytes(plan)
    sent = [max(send_ns(size, r * width, (r + 1) * width % (ranks * width), plan.cluster) for r in range(ranks))]
    done: dict[tuple, float] = {}
    free = [0.0] * ranks
    for rank, (what, stage, number) in execution_order(orders, plan.stages):
        name = "F" if what == "F" else "B last" if number == microbatches - 1 else "B further" if number else "B first"
        before = (what, stage - 1 if what == "F" else stage + 1, number)
        start = max(free[rank], done[before] + sent[0] if before in done else 0.0)
        free[rank] = done[what, stage, number] = start + times[name][stage]
    return max(free)


def _sent_bytes(plan: Plan) -> int:
    """Bytes that a stage sends for a microbatch: activations in 16 bits, divided as the tokens of a rank are."""
    p: Mapping[str, Any] = plan.parameters
    tokens = int(p["microbatch"]) * int(p["length"]) // plan.mesh["cp"]
    return 2 * tokens * int(p.get("width", 0)) // (plan.mesh["tp"] if "dp_shard" in plan.model.axes else 1)


def _peak_bytes(plan: Plan, figures: dict[str, list[np.ndarray]], resident: list[float]) -> float:
    """The most memory of a pipeline rank, its passes in the order of the schedule."""
    ranks = plan.mesh["pp"]
    few = min(plan.microbatches, 2 * plan.stages + 2 * ranks)
    few -= (few - plan.microbatches) % (ranks if plan.stages_per_rank > 1 else 1)
    peak = 0.0
    for rank, actions in enumerate(pipeline_order(plan.schedule, ranks, few, plan.stages_per_rank)):
        live = sum(resident[stage] for stage in range(plan.stages) if plan.rank_of(stage) == rank)
        for what, stage, number in actions:
            name = "F" if what == "F" else "B last" if number == few - 1 else "B further" if number else "B first"
            figure = figures[name][stage]
            peak = max(peak, live + figure[3])
            live += figure[2]
    return peak
