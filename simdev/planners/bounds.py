"""Step times that no plan can beat, without simulation.

In every plan the kernels of a rank's compute stream run in program order, one at a time, and a kernel that waits for a
collective of its own segment stalls those behind it. So each forward and backward pass occupies the stream for at
least its longest path from its first to its last kernel (:func:`span_ns`). These spans add up.

A pipeline adds its fill and its drain. Stage ``r`` cannot begin before the forward passes of one microbatch on all
earlier stages, and they cannot end before their backward passes of its last one. With ``m`` microbatches and ``w_r``
the span of both passes on stage ``r``, the step time ``T`` obeys ``T >= m w_r + w_0 + ... + w_(r-1)`` for each stage.
However the sum ``W`` of all ``w_r`` is divided among ``p`` stages, this gives
``T >= W / (1 - (1 - 1/m)^p)``: each stage takes as much as the inequality allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import inf
from typing import Any, NamedTuple

import numpy as np

from simdev.graphs.parallel_model import Part, every_nth
from simdev.parallel.capture.stage import FEW, StageProgram, accumulates, capture_stage
from simdev.parallel.costs.collectives import collective_ns
from simdev.parallel.costs.timing import Template, make_template, on_mesh
from simdev.parallel.mesh import Mesh
from simdev.parallel.orders import SPLIT, V_SHAPED
from simdev.parallel.plan import Plan, PlanProgram, prepare
from simdev.parallel.program import Segment, once_for_each
from simdev.planners.job import Choice, Job, SharedByPlans

# Kernels that FSDP adds to copy parameters and gradients; a plan without FSDP has none of them.
COPIES = frozenset(
    {"split_with_sizes_copy", "all_gather_copy_in", "chunk_cat", "_chunk_cat", "cat", "copy_", "_to_copy"}
)
# Those of them that copy whole parameters and gradients, however many shards these have.
WHOLE_COPIES = frozenset({"split_with_sizes_copy", "chunk_cat", "_chunk_cat"})
GRADIENT_BYTES = 2  # of one gradient that replicas exchange, at least
ONE_STAGE = frozenset({"gpipe", "1f1b"})  # schedules with one stage on each rank
PRECISION = 1e-6  # of a bound that is found by bisection, relative


def span_ns(template: Template) -> int:
    """Least time between the first start and the last finish of a segment's kernels on the compute stream.

    The longest path through the segment that begins at a kernel on the compute stream. Items that wait for nothing
    on this path, and everything before the segment, count as finished when the segment begins; the host is never late.
    """
    from simdev.planners._kernel import longest_ns

    waits = template.wait_item, template.wait_for
    return int(longest_ns(template.stream, template.ns, *waits, len(template.streams)))


def plan_bound_ns(program: PlanProgram) -> int:
    """A step time that no plan with the mesh, microbatch and recomputation of ``program`` can beat, however its layers
    are divided among the stages. For stages with meshes of their own the layers are those of ``program``: a bound of
    this plan alone."""
    plan = program.plan
    spans: dict[int, int] = {}

    def span(template: Template) -> int:
        if id(template) not in spans:
            spans[id(template)] = span_ns(template)
        return spans[id(template)]

    ranks, microbatches = plan.mesh["pp"], plan.microbatches
    forward = np.array([min(map(span, one.values())) for one in program.passes_of("forward")])
    backward = np.array([min(map(span, one.values())) for one in program.passes_of("backward")])
    if plan.stage_meshes:
        spans_of = forward + backward
        ends = microbatches * spans_of + np.array([span(template) for template in program.finish])
        return int(np.maximum(ends, microbatches * spans_of + np.cumsum(spans_of) - spans_of).max())
    passes = int((forward + backward).sum())
    update = sum(span(template) for template in program.finish)
    busy = max((microbatches * passes + update) / ranks, microbatches * _issue_ns(program) / ranks)
    if plan.stages_per_rank > 1:
        return int(busy)
    filled = passes / (1 - (1 - 1 / microbatches) ** ranks)
    return int(max(busy, filled))


def _issue_ns(program: PlanProgram) -> int:
    """Host time to issue one forward and one backward pass of all stages: each rank's host issues its own."""
    return sum(
        min(int(one.issue_ns.sum() + one.rest_ns.sum()) for one in stage.values())
        for phase in ("forward", "backward")
        for stage in program.passes_of(phase)
    )


def job_bound_ns(shared: SharedByPlans) -> int:
    """A step time that no plan of the job with one mesh for all stages can beat, whichever mesh, microbatch and
    recomputation it has and however it divides the layers. Gradients are reduced when planners may choose: pipelines
    reduce them with the last microbatch unless the job is wide (:meth:`~simdev.planners.job.Job.choices`).

    For each way to split a layer (``tp``, ``cp``, ``ep``), microbatch and recomputation, stages of few layers are
    captured with two data-parallel ranks (:class:`_PerLayer`). Their passes take at least their spans at the
    cost of each kernel, without the collectives of data parallelism and the copies of FSDP that depend on the number of
    shards; and at least the time of FSDP's gathers, or reductions, of each microbatch. Every mesh then has a bound
    (:func:`_pipeline_bound`), and the exchange of gradients among its replicas is another one. A mesh has none if no
    division of the layers fits into memory. Where a mesh cannot hold a microbatch, larger ones are not looked at: they
    keep no less.

    Models whose layers differ, or that have one, are captured whole. Their layers count as if they could be divided
    evenly, and a mesh cannot hold them if the mean over its ranks of parameters, optimizer state and what one
    microbatch keeps for its backward pass exceeds the capacity.
    """
    least = min((bound for _, bound in choice_bounds_ns(shared)), default=inf)
    return 0 if least == inf else int(least)


def choice_bounds_ns(shared: SharedByPlans, below: float | None = None) -> Iterator[tuple[Choice, float]]:
    """Each choice of the job, and a step time that it cannot beat, with any division of its layers; infinite for one
    that cannot fit. A bound that is not less than ``below`` (without one, the least that was given before) need not be
    as large as it could be."""
    least = inf
    groups: dict[tuple, list[Choice]] = {}
    for choice in shared.job.choices():
        groups.setdefault((*(choice.mesh[axis] for axis in ("cp", "ep", "tp")), choice.recompute), []).append(choice)
    for group in groups.values():
        too_large: set[Choice] = set()  # with any microbatch: larger ones keep no less
        for _, same in groupby(sorted(group, key=_size), key=_size):
            choices = list(same)
            left = [choice for choice in choices if replace(choice, microbatch=0) not in too_large]
            bounds = dict(_choice_bounds(shared, left, least if below is None else below)) if left else {}
            too_large |= {replace(choice, microbatch=0) for choice in choices if choice not in bounds}
            for choice in choices:
                least = min(least, bounds.get(choice, inf))
                yield choice, bounds.get(choice, inf)


def _size(choice: Choice) -> int:
    return choice.microbatch


def _choice_bounds(shared: SharedByPlans, choices: list[Choice], below: float) -> Iterator[tuple[Choice, float]]:
    """Bounds of the choices that fit, which have the same microbatch, recomputation and split of a layer. A bound that
    is not less than ``below`` need not be as large as it could be."""
    job, model = shared.job, shared.job.model
    alike = model.pipeline and model.kinds is None and job.layers > 1 and not every_nth(job.plan(choices[0]).parameters)
    known: dict[tuple, Any] = {}

    def once(function: Callable, *given: Any, key: tuple) -> Any:
        if (function, *key) not in known:
            known[function, *key] = function(shared, *given)
        return known[function, *key]

    for choice in choices:
        mesh = small_mesh(choice.mesh)
        if alike:
            parts, each = _parts(job, choice), choice.reduce_each
            timed = once(_timed_stages, choice, mesh, *parts, key=(mesh, each, parts))
            key = choice.mesh.inner, each, parts, choice.reshard, choice.schedule in SPLIT
            layers = once(_layers, choice, timed, key=key)
            bound, exchanged = _pipeline_bound(job, choice, layers, below), job.layers * layers.layer[EXCHANGED]
        else:
            whole = once(_whole, choice, mesh, key=(mesh,))
            bound, exchanged = _whole_bound(job, choice, whole), float(whole.exchanged_bytes)
        if bound < inf:
            yield choice, max(bound, _exchange_ns(job, choice, exchanged))


def small_mesh(mesh: Mesh) -> Mesh:
    """One stage of the mesh with two ranks along one data-parallel axis: what all its sizes have in common."""
    sizes = {axis: mesh[axis] for axis in ("cp", "ep", "tp")}
    data = "dp_shard" if mesh["dp_shard"] > 1 else "dp_replicate"
    sizes[data] = min(2, mesh[data])
    return Mesh({axis: size for axis, size in sizes.items() if size > 1})


@dataclass(frozen=True)
class _Whole:
    """The whole model on one stage: least time of both passes of a microbatch on the device and on the host, bytes of
    parameters and optimizer state, bytes kept for the backward pass, bytes of gradients that replicas exchange at
    least."""

    passes_ns: int
    issue_ns: int
    resident_bytes: int
    kept_bytes: int
    exchanged_bytes: int


def _whole(shared: SharedByPlans, choice: Choice, mesh: Mesh) -> _Whole:
    job, shards = shared.job, mesh["dp_shard"]
    whole = replace(job.plan(choice), mesh=mesh, cluster=replace(job.cluster, nodes=0), stage_layers=())
    plan = replace(whole, stages_per_rank=1, microbatches=2, schedule="1f1b", reduce_each=False, reshard="always")
    program = prepare(plan, shared.prices, merge=False, known=shared.known)
    forward, backward, stage = program.forward[0], program.backward[0], program.stages[0]
    return _Whole(
        _kernels_ns(forward) + min(map(_kernels_ns, backward)),
        _kernels_issue_ns(forward) + min(map(_kernels_issue_ns, backward)),
        _resident_bytes(stage, shards, plan),
        stage.forward.live_bytes,
        _exchanged_bytes(stage, shards),
    )


@dataclass(frozen=True)
class _PerLayer:
    """What stages of equal layers take at least: float ``(8,)`` each, in the order of :data:`NS` to :data:`EXCHANGED`.

    A stage of ``n`` layers takes ``n`` times ``layer`` and once ``start``, which is not positive: at its borders, a
    stage does not wait for the collectives that kernels of the next layer wait for. The first one takes ``embedding``
    more, and the last one ``head``; without a pipeline, all that is no layer is in ``head``.
    """

    layer: np.ndarray
    start: np.ndarray
    embedding: np.ndarray
    head: np.ndarray

    def of(self, layers: np.ndarray, stages: np.ndarray, first: bool, last: bool) -> np.ndarray:
        """float ``(n, 8)`` of a rank that has these numbers of layers on at most these numbers of stages."""
        found = layers[:, None] * self.layer + np.minimum(layers, stages)[:, None] * self.start
        return found + first * self.embedding + last * self.head


# Least time of both passes of a microbatch on the device, on the host, and of its collectives of FSDP; bytes of
# parameters and optimizer state on all shards; bytes that a microbatch keeps for its backward pass; bytes of gradients
# on a rank that keeps them whole, and on all shards; bytes of gradients that replicas exchange.
NS, ISSUE, SHARDING, RESIDENT, KEPT, KEPT_GRADIENTS, GRADIENTS, EXCHANGED = range(8)


class _TimedStage(NamedTuple):
    """A captured stage, and its forward and backward passes as timed on the mesh of the capture."""

    stage: StageProgram
    forward: tuple[Template, ...]
    backward: tuple[Template, ...]


def _timed_stages(shared: SharedByPlans, choice: Choice, mesh: Mesh, *parts: Part) -> tuple[_TimedStage, ...]:
    """Stages of the choice, captured on ``mesh``."""
    job, cluster = shared.job, replace(shared.job.cluster, nodes=0)

    @once_for_each
    def time(segment: Segment) -> Template:
        return make_template(segment, cluster, mesh, 0, job.software.host, shared.prices, merge=False)

    found = []
    for part in parts:
        parameters = {**job.plan(choice).parameters, "layers": part.layers}
        stage = capture_stage(job.model, parameters, mesh, part, each=choice.reduce_each)
        forward = tuple(time(one) for name, one in stage.passes.items() if name.startswith("forward"))
        found.append(_TimedStage(stage, forward, tuple(map(time, stage.backward))))
    return tuple(found)


def _parts(job: Job, choice: Choice) -> tuple[Part, ...]:
    """What is captured for a choice: two stages that differ by a layer, and the first and the last one of a pipeline.
    Without a pipeline, they are the model with a few layers, which estimates need, too."""
    if choice.mesh["pp"] == 1:
        few = min(FEW, job.layers - 1)
        return Part(few), Part(few + 1)
    return Part(1, False, False), Part(2, False, False), Part(1, True, False), Part(1, False, True)


def _layers(shared: SharedByPlans, choice: Choice, timed: tuple[_TimedStage, ...]) -> _PerLayer:
    """``timed`` are the stages of :func:`_parts`."""
    short, long, *ends = map(partial(_stage_figures, shared, choice), timed)
    layer, none = long - short, np.zeros_like(short)
    if not ends:
        return _PerLayer(layer, none, none, short - min(FEW, shared.job.layers - 1) * layer)
    embedding, head = np.maximum(np.stack(ends) - np.maximum(short, layer), 0.0)
    embedding[SHARDING] = head[SHARDING] = 0.0  # perhaps on other communicators than those of the layers
    return _PerLayer(layer, np.minimum(short - layer, 0.0), embedding, head)


def _stage_figures(shared: SharedByPlans, choice: Choice, timed: _TimedStage) -> np.ndarray:
    """float ``(8,)``, see :data:`NS`."""
    job, stage, shards = shared.job, timed.stage, small_mesh(choice.mesh)["dp_shard"]
    # A pass before which parameters were gathered already frees them, too.
    kept = max(one.live_bytes for one in timed.forward)
    divided = job.software.distributed_optimizer
    stays = choice.reshard != "always" or choice.schedule in SPLIT

    def kernels(template: Template) -> int:
        return _kernels_ns(template, frozenset() if stays else WHOLE_COPIES)

    def collectives(template: Template) -> float:
        return _sharding_ns(on_mesh(template, choice.mesh, 0, job.software.host, shared.prices))

    def least(of: Callable[[Template], float]) -> float:
        return min(map(of, timed.forward)) + min(map(of, timed.backward))

    return np.array(
        [
            least(kernels),
            least(_kernels_issue_ns),
            0.0 if stays or choice.mesh["dp_shard"] == 1 else least(collectives),
            _resident_bytes(stage, shards, job.plan(choice)),
            kept,
            0 if divided else kept + stage.backward[stage.FIRST].live_bytes,  # a replica's resident bytes contain them
            0 if divided else gradient_bytes(stage) * shards,
            _exchanged_bytes(stage, shards),
        ],
        float,
    )


def _sharding_ns(template: Template) -> float:
    """Time of the gathers of parameters, or of the reductions of gradients if these take longer: one of each kind runs
    after another."""
    of_data = np.array(["dp_shard" in axes for axes in template.axes], bool)[template.stream] & (template.stream > 0)
    return float(np.bincount(template.stream, np.where(of_data, template.ns, 0), 1).max())


def _resident_bytes(stage: StageProgram, shards: int, plan: Plan) -> int:
    """Bytes of parameters and optimizer state on all shards; of a distributed optimizer, those that no rank divides."""
    divided = plan.distributed_optimizer
    return (stage.parameters * plan.bytes_on_replica if divided else stage.resident_bytes) * shards


def _exchanged_bytes(stage: StageProgram, shards: int) -> int:
    return min(GRADIENT_BYTES * stage.parameters, gradient_bytes(stage)) * shards


def gradient_bytes(stage: StageProgram) -> int:
    """Bytes of the gradients that a rank of a stage keeps for its update, which frees them. Frozen parameters have
    none."""
    return -min(0, stage.finish.live_bytes)


def _kernels_ns(template: Template, counted: frozenset[str] = frozenset()) -> int:
    """The span of a segment if what data parallelism adds took no time, except the ``counted`` kinds of copies."""
    copies = copies_of(template, COPIES - counted)
    return span_ns(replace(template, ns=np.where(_of_data(template) | copies, 0, template.ns)))


def _kernels_issue_ns(template: Template) -> int:
    """Host time to issue the kernels of a segment, without those on other streams and the copies of FSDP."""
    counted = (template.stream == 0) & ~copies_of(template)
    return int((template.issue_ns + template.rest_ns)[counted].sum())


def _of_data(template: Template) -> np.ndarray:
    """bool per item: collectives of data parallelism."""
    axes = [bool(set(axes) & {"dp_shard", "dp_replicate"}) for axes in template.axes]
    return np.array(axes, bool)[template.stream]


def copies_of(template: Template, kinds: frozenset[str] = COPIES) -> np.ndarray:
    """bool per item: whether it is a copy that FSDP adds, of one of these kinds."""
    return np.array([kind in kinds for kind in template.kinds], bool)[template.kind]


def _whole_bound(job: Job, choice: Choice, whole: _Whole) -> float:
    mesh, passes = choice.mesh, whole.passes_ns
    ranks, microbatches = mesh["pp"], _microbatches(job, choice)
    if (whole.resident_bytes / mesh["dp_shard"] + whole.kept_bytes) / ranks > job.cluster.kind.memory_bytes:
        return inf
    simple = set(job.schedules) <= ONE_STAGE
    bound = passes / (1 - (1 - 1 / microbatches) ** ranks) if simple else passes * microbatches / ranks
    return max(bound, whole.issue_ns * microbatches / ranks)


def _pipeline_bound(job: Job, choice: Choice, model: _PerLayer, below: float) -> float:
    """A step time that no plan with the mesh, microbatch, recomputation and schedule of a choice beats, with whole
    layers on each rank; infinite if none fits, ``below`` if it is at least this.

    *Memory.* Before its first backward pass, a rank has computed ``min(m, p - r)`` microbatches on each of its stages
    (1F1B, and all schedules that begin with more), and again with gradients of all its stages if ``m >= 2 p``.
    Schedules that split backward passes have at least one.

    *Time.* A rank begins after one forward pass on the first stages of the ranks before it, and their backward passes
    follow its last one, unless the schedule splits these. To give each rank as many layers as a step time allows, from
    the first one on, is best: if an earlier rank had a layer less, a later one could have at most one more.
    """
    mesh, capacity = choice.mesh, job.cluster.kind.memory_bytes
    ranks, microbatches = mesh["pp"], _microbatches(job, choice)
    one_stage, split = choice.schedule in ONE_STAGE, choice.schedule in SPLIT
    layers = np.arange(job.layers + 1)
    stages = np.minimum(layers, 1) if one_stage else layers
    whole = accumulates(job.model, tuple(sorted(job.parameters.items()))) and not choice.reduce_each

    def figures(rank: int) -> tuple[np.ndarray, np.ndarray, int]:
        """By the number of layers the time of a microbatch's kernels, and of what runs beside them, the host and FSDP's
        collectives; and the most layers."""
        found = model.of(layers, stages, not rank, rank == (0 if choice.schedule in V_SHAPED else ranks - 1))
        begun = 1 if split else min(microbatches, ranks - rank)
        held = found[:, RESIDENT] / mesh["dp_shard"] + begun * found[:, KEPT]
        if microbatches >= 2 * ranks and choice.schedule in (*ONE_STAGE, "interleaved"):
            held += found[:, KEPT_GRADIENTS] if whole else found[:, GRADIENTS] / mesh["dp_shard"]
        most = int(np.searchsorted(held, capacity, side="right")) - 1
        return found[:, NS], found[:, [ISSUE, SHARDING]].max(axis=1), most

    of_rank = [figures(rank) for rank in range(ranks)]
    chunk = float(model.layer[NS] + model.start[NS])

    def suffices(ns: float) -> bool:
        begin, left = 0.0, job.layers
        for rank, (passes, beside, most) in enumerate(of_rank):
            if not one_stage:
                begin = 0.0 if split else max(0, rank - 1) * chunk  # the first stage may be light
            needs = np.maximum(begin + microbatches * passes, microbatches * beside)
            count = min(most, int(np.searchsorted(needs, ns, side="right")) - 1)
            if count < 0:
                return False
            begin, left = begin + passes[count], left - count
        return left <= 0

    total = model.of(layers[-1:], np.zeros(1), True, True)[0]
    low, high = 0.0, float((microbatches + 1) * (total[[NS, ISSUE, SHARDING]].sum()))
    if not suffices(high):
        return inf
    if below < high and not suffices(below):
        return below
    high = min(high, below)
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return low


def _microbatches(job: Job, choice: Choice) -> int:
    return job.batch // (choice.mesh.replicas * choice.microbatch)


def _exchange_ns(job: Job, choice: Choice, exchanged_bytes: float) -> float:
    """Time of the exchange of gradients among the replicas of a rank, at least."""
    mesh = choice.mesh
    axes = [axis for axis in ("dp_replicate", "dp_shard") if mesh[axis] > 1]
    if not axes or job.software.distributed_optimizer:  # whose traffic is taken to overlap
        return 0.0
    return float(collective_ns("reduce_scatter", int(exchanged_bytes / mesh["pp"]), mesh.lines(axes)[0], job.cluster))
