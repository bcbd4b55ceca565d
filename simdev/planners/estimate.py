"""A quick estimate of a plan, for planners that compare hundreds of plans before they simulate a few.

Layers are alike, so the whole model is captured with three and with four of them on one stage, and everything is linear
in the number of layers: time on each stream, host time, memory. These two captures serve all numbers of stages, layers,
replicas and shards; the two smallest microbatches of a job serve larger ones
(:func:`simdev.parallel.capture.resize.of_microbatch`). A pass of a stage is then one number, and the schedule is
simulated with passes as ops. Collectives are priced for their real groups.

What is left out: overlap across the borders of passes, gathers of the first layer of each stage, the time that
embeddings take on the first stage (all that is no layer counts for the last one, also the memory of gathered parameters
and gradients: the first stage of a deep pipeline may need a sixth more). So an estimate ranks plans; it is no result.
``search`` simulates the plans that it ranks first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise, product
from math import prod
from typing import Any

import numpy as np

from simdev.errors import InvalidInput
from simdev.graphs.parallel_model import Part
from simdev.parallel.capture.kept import Packed
from simdev.parallel.capture.resize import of_microbatch
from simdev.parallel.capture.stage import StageProgram, accumulates, capture_stage, few_captures, few_parts, is_kept
from simdev.parallel.costs.collectives import collective_ns, send_ns
from simdev.parallel.costs.timing import Template, make_template, on_mesh
from simdev.parallel.mesh import Mesh
from simdev.parallel.orders import SPLIT, pipeline_order, round_of
from simdev.parallel.passes import STEP
from simdev.parallel.plan import DIVIDED, WHOLE, Plan, resident_bytes
from simdev.parallel.program import NotRepeating, Segment, once_for_each
from simdev.parallel.unroll import execution_order
from simdev.planners.bounds import gradient_bytes, small_mesh, span_ns
from simdev.planners.job import Choice, Job, SharedByPlans

SHARDS = 2  # of the captures (small_mesh); what a rank stores is scaled to other numbers
# Estimated memory over the capacity, up to which a plan is simulated, by what decides whether it fits. An allocator
# reserves more than tensors take: in the plans that were tried, 1.05 to 1.6 times as much.
MARGIN = {"allocated": 1.05, "reserved": 1.0}
GATHERED_BYTES = 2  # of a parameter that stays gathered
GATHERS = frozenset({"split_with_sizes_copy", "all_gather_copy_in"})  # copies of FSDP around an all-gather
PASSES = ("F", "B first", "B further", "B last", "U")
LIVE, PEAK = 4, 5  # what comes before are times


@dataclass(frozen=True)
class Estimate:
    """The estimated step time and the largest peak of memory of a choice."""

    choice: Choice
    step_ns: int
    peak_bytes: int


@dataclass(frozen=True, eq=False)
class _Passes:
    """What a pass of a stage takes and keeps: ``base`` for three layers, ``layer`` for each further one.

    Both are float ``(6,)``: ns of the longest path, ns of the host, ns of the busiest stream, ns of the exchange of
    gradients among replicas of sharded groups (on a communicator of its own); growth (``LIVE``) and peak (``PEAK``) of
    memory in bytes. What a stage stores is a single number.
    """

    base: np.ndarray
    layer: np.ndarray

    def of(self, part: Part, few: int) -> np.ndarray:
        """The figures of a stage: what is no layer belongs to the last one."""
        ends = self.base - few * self.layer
        return part.layers * self.layer + (ends if part.last else 0.0)


def estimates(shared: SharedByPlans, choices: Iterable[Choice]) -> Iterator[Estimate | None]:
    """The estimates of choices with the same split of a layer and the same recomputation, in order of their
    microbatches. Once no plan with a microbatch fits, larger microbatches are not looked at: None."""
    fitting = True
    capacity = most_estimated(shared.job)
    for _, group in groupby(choices, key=lambda choice: choice.microbatch):
        same = list(group)
        if not fitting:
            yield from (None for _ in same)
            continue
        found = [estimate(shared, choice) for choice in same]
        fitting = any(one.peak_bytes <= capacity for one in found)
        yield from found


def most_estimated(job: Job) -> float:
    """Bytes that a plan may be estimated to take if it is to be simulated."""
    return MARGIN[job.memory] * job.cluster.kind.memory_bytes


def group_of(choice: Choice) -> tuple:
    """Choices with equal groups share captures of :func:`estimate`."""
    if choice.stage_meshes:
        return (choice.order,)  # alone
    return (*(choice.mesh[axis] for axis in ("tp", "cp", "ep")), choice.recompute)


def estimate(shared: SharedByPlans, choice: Choice) -> Estimate:
    """The estimate of a choice. Raises :class:`InvalidInput` if it does not suit the job."""
    plan = shared.job.plan(choice)
    figures, gather_ns = _figures_of(shared, plan)
    times = {name: [_pass_ns(values) for values in rows] for name, rows in figures.items() if name in PASSES}
    return Estimate(choice, int(_step_ns(plan, times) + gather_ns), int(_peak_bytes(plan, figures, _stored(figures))))


def estimated_bytes(shared: SharedByPlans, choice: Choice) -> int:
    """The peak of memory of :func:`estimate`, without its time."""
    plan = shared.job.plan(choice)
    figures, _ = _figures_of(shared, plan)
    return int(_peak_bytes(plan, figures, _stored(figures)))


def _stored(figures: dict[str, list[np.ndarray]]) -> list[float]:
    return [stage[0] for stage in figures["resident"]]


def _figures_of(shared: SharedByPlans, plan: Plan) -> tuple[dict[str, list[np.ndarray]], float]:
    """The figures of each stage of a plan, by the kind of its passes, and how long gathers of the whole step take."""
    parts, few = plan.parts, _few(shared.job, plan.parameters)[0].layers
    if plan.stage_meshes:
        own = [_passes(shared, one_stage(plan, stage)) for stage in range(plan.stages)]
    else:
        own = [_passes(shared, plan)] * plan.stages
    figures = {name: [one[name].of(part, few) for one, part in zip(own, parts, strict=True)] for name in own[0]}
    gather_ns = 0.0  # of the first microbatch, by the rank that gathers longest
    if _stay(plan):
        always = _passes(shared, replace(plan, reshard="always", schedule="1f1b", stages_per_rank=1))["F"]
        more = [
            max(0.0, _pass_ns(always.of(part, few)) - _pass_ns(row))
            for part, row in zip(parts, figures["F"], strict=True)
        ]
        gather_ns = max(
            sum(more[s] for s in range(plan.stages) if plan.rank_of(s) == r) for r in range(plan.mesh["pp"])
        )
    if plan.reduce_each:
        figures |= _reducing(figures)
    if not _keeps_whole(shared.job):
        pairs = zip(figures["B first"], figures["B further"], strict=True)
        figures["B first"] = [_at_least(first, further) for first, further in pairs]
    return figures, gather_ns


def _reducing(figures: dict[str, list[np.ndarray]]) -> dict[str, list[np.ndarray]]:
    """The backward passes of a plan that reduces gradients after each microbatch: each takes as long as the last one of
    another plan; the first one leaves a rank's shard of the gradients, the others nothing."""
    kept = [forward[LIVE] for forward in figures["F"]]
    shard = [values[0] for values in figures["gradients"]]
    reduced = {}
    for name in ("B first", "B further", "B last"):
        rows = [values.copy() for values in figures["B last"]]
        for row, live, gradients in zip(rows, kept, shard, strict=True):
            row[LIVE] = (gradients if name == "B first" else 0.0) - live
            row[PEAK] -= 0.0 if name == "B first" else gradients  # they are there already
        reduced[name] = rows
    return reduced


def _keeps_whole(job: Job) -> bool:
    """Whether ranks keep whole gradients until the last microbatch, unless they are asked to reduce each."""
    return accumulates(job.model, tuple(sorted(job.parameters.items())))


def _at_least(first: np.ndarray, further: np.ndarray) -> np.ndarray:
    """The figures of a first backward pass, whose peak is at its beginning if the shards of the gradients that it
    leaves are smaller than the activations that it frees: there, it is that of a further pass."""
    row = first.copy()
    row[PEAK] = max(first[PEAK], further[PEAK])
    return row


def _few(job: Job, parameters: Mapping[str, Any]) -> tuple[Part, Part]:
    """The whole model with a few layers, and with one more or one more period of layers; twice the whole model where
    its layers do not repeat."""
    whole = job.model.part({**job.parameters, "recompute": parameters.get("recompute")}, job.layers)
    few, more = few_parts(whole)
    if more:
        return few[0], few[1]
    if whole.kinds or job.layers == 1:
        return whole, whole
    return replace(whole, layers=job.layers - 1), whole


def one_stage(plan: Plan, rank: int) -> Plan:
    """The whole model on the mesh of one pipeline rank, with its share of a microbatch and its recomputation."""
    return replace(
        plan,
        mesh=plan.meshes[rank],
        parameters=plan.parameters_of(rank),
        cluster=replace(plan.cluster, nodes=0),
        microbatches=max(2, plan.microbatches),
        schedule="1f1b",
        stage_layers=(),
        stage_meshes=(),
        stage_recompute=(),
    )


@dataclass(frozen=True, eq=False)
class StageCosts:
    """What a stage of a pipeline costs, by its number of layers: float ``(2, layers + 1)``, in the first row for a
    stage that is not the last one. What is no layer counts for the last stage.

    ``pass_ns``: forward and backward pass of a microbatch; ``step_ns``: what a step adds, the exchange of gradients
    and the update; ``peaks``: see :meth:`peak_bytes`.
    """

    pass_ns: np.ndarray
    step_ns: np.ndarray
    peaks: Mapping[str, np.ndarray]

    def peak_bytes(self, progress: int, last: bool) -> np.ndarray:
        """float ``(layers + 1,)``: the most memory with ``progress`` microbatches in progress (1F1B)."""
        of = {name: values[int(last)] for name, values in self.peaks.items()}
        full = of["resident"] + progress * of["kept"]
        begun = full + np.maximum(of["forward"] - of["kept"], of["first"])
        return np.maximum(begun, full + of["gradients"] + np.maximum(of["further"], of["forward"] - of["kept"]))


def stage_costs(shared: SharedByPlans, mesh: Mesh, microbatch: int, recompute: str) -> StageCosts:
    """The costs of stages on ``mesh`` with ``microbatch`` sequences on each replica."""
    job = shared.job
    parameters = {**job.parameters, "microbatch": microbatch}
    if "recompute" in parameters:
        parameters["recompute"] = recompute
    anywhere = replace(job.cluster, nodes=0)
    software = job.software
    plan = Plan(job.model, parameters, anywhere, mesh, 2, host=software.host,
                distributed_optimizer=software.distributed_optimizer,
                main_gradient_bytes=software.main_gradient_bytes, compiled=software.compiled)  # fmt: skip
    passes = _passes(shared, plan)
    few, counts = _few(job, parameters)[0].layers, np.arange(job.layers + 1)

    def of(name: str) -> np.ndarray:
        """float ``(2, layers + 1, 6)``"""
        one = passes[name]
        layers = counts[:, None] * one.layer
        return np.stack([layers, layers + one.base - few * one.layer])

    def ns(name: str) -> np.ndarray:
        return np.maximum(of(name)[..., :LIVE].max(axis=-1), 0.0)

    forward, first, further = of("F"), of("B first"), of("B further")
    kept = forward[..., LIVE]
    return StageCosts(
        ns("F") + ns("B further"),
        np.maximum(ns("B last") - ns("B further"), 0.0) + ns("U"),
        {
            "resident": of("resident")[..., 0],
            "kept": kept,
            "forward": forward[..., PEAK],
            "first": first[..., PEAK],
            "further": further[..., PEAK],
            "gradients": np.maximum(first[..., LIVE] + kept, 0.0),
        },
    )


def least_bytes(shared: SharedByPlans) -> float:
    """Bytes of parameters, optimizer state and gradients that the ranks of the job hold together at the end of a step,
    in every plan: those of one copy of the model. 0 if no mesh of the job leaves the layers whole.

    A rank of every plan holds at least this divided by the number of ranks. Two captures with few layers are needed,
    which estimates also need: those with the recomputation that planners try first; or, if the FLOPs of the model say
    that it is too large, those with the recomputation by which a message names a machine that suffices.
    """
    if ("least",) not in shared.known:
        shared.known["least",] = _least_bytes(shared)
    return shared.known["least",]


def _least_bytes(shared: SharedByPlans) -> float:
    job = shared.job
    # 6 FLOPs of a parameter for each token; models of other packages have to be built for it
    weights = 0.0 if job.model.identity else job.model.flops(job.parameters) / (6 * int(job.parameters["length"]))
    bytes_each = WHOLE + job.software.main_gradient_bytes + DIVIDED
    large = weights * bytes_each > job.ranks * job.cluster.kind.memory_bytes
    kinds = job.known_recomputes[::-1] if large else job.known_recomputes
    size = min(job.microbatches)
    whole = [mesh for mesh in job.meshes() if mesh["tp"] == mesh["cp"] == mesh["ep"] == 1]
    for recompute, mesh in product(kinds, whole):
        with suppress(InvalidInput):
            plan = job.plan(Choice(mesh, size, recompute))
            break
    else:
        return 0.0
    small = small_mesh(mesh)

    def held(part: Part) -> float:
        stage = _captured(shared, plan, small, part, size)
        if plan.distributed_optimizer:
            return stage.parameters * (plan.bytes_on_replica + DIVIDED)
        return (stage.resident_bytes + gradient_bytes(stage)) * small["dp_shard"]

    few, more = _few(job, plan.parameters)
    short, long = held(few), held(more)
    each = short / few.layers if few == more else (long - short) / (more.layers - few.layers)
    return short + (job.layers - few.layers) * each


def _passes(shared: SharedByPlans, plan: Plan) -> dict[str, _Passes]:
    """The figures of each kind of pass, by name; ``resident`` and ``gradients`` hold bytes that a stage stores."""
    known, small = shared.known, small_mesh(plan.mesh)
    p: Mapping[str, Any] = plan.parameters
    key = "passes", small, plan.mesh.inner, p["microbatch"], p.get("recompute"), _stay(plan)
    if key not in known:
        known[key] = _figures(shared, plan, _timed_captures(shared, plan, small))
    return known[key]


@dataclass(frozen=True, eq=False)
class _TimedCapture:
    """What the figures of a plan are computed from: the timed passes of a capture by name, on one of the meshes that
    share it, bytes of parameters and optimizer state, the number of parameters, and bytes of their gradients: frozen
    parameters have none."""

    passes: Mapping[str, Template]
    resident_bytes: int
    parameters: int
    gradient_bytes: int


def _timed_captures(shared: SharedByPlans, plan: Plan, small: Mesh) -> list[_TimedCapture]:
    """The two captures of :func:`_captures` with the times of their kernels, which all numbers of shards and replicas
    share. Kernels that run one after another are one item, unless gathers have to be found among them."""
    known, p, alone = shared.known, plan.parameters, _stay(plan)
    key = "timed", small, p["microbatch"], p.get("recompute"), alone
    if key not in known:

        @once_for_each
        def time(segment: Segment) -> Template:
            return make_template(segment, plan.cluster, plan.mesh, 0, plan.host, shared.prices, merge=not alone)

        def timed(one: StageProgram) -> _TimedCapture:
            passes = one.forward, *one.backward[:3], one.finish
            times = dict(zip(PASSES, map(time, passes), strict=True))
            return _TimedCapture(times, one.resident_bytes, one.parameters, gradient_bytes(one))

        captures = _captures(shared, plan, small, int(p["microbatch"]))
        known[key] = [timed(one) for one in captures]
    return known[key]


def _captures(shared: SharedByPlans, plan: Plan, mesh: Mesh, microbatch: int) -> list[StageProgram]:
    """The whole model with a few layers, and with one more; from two smaller microbatches, where they differ in numbers
    alone (PyTorch issues other kernels for some tensors of one sequence)."""
    few = _few(shared.job, plan.parameters)
    packed = isinstance(plan.model.function, Packed)  # with the microbatches that were packed alone
    smaller = [] if packed else [size for size in sorted(shared.job.microbatches) if size < microbatch]
    for first, second in pairwise(smaller):
        with suppress(NotRepeating):
            return [
                of_microbatch(
                    _captured(shared, plan, mesh, part, first),
                    _captured(shared, plan, mesh, part, second),
                    (first, second),
                    microbatch,
                )
                for part in few
            ]
    return [_captured(shared, plan, mesh, part, microbatch) for part in few]


def captures_are_kept(job: Job, choice: Choice) -> bool:
    """Whether the captures with which the estimate of a choice begins need not be made."""
    plan = job.plan(choice)
    own = [one_stage(plan, stage) for stage in range(plan.stages)] if plan.stage_meshes else [plan]
    for one in own:
        parameters = tuple(sorted((name, value) for name, value in one.parameters_of(0).items() if name != "layers"))
        parts = dict.fromkeys(few for part in _few(job, one.parameters) for few in few_captures(part))
        if not all(is_kept(one.model, parameters, small_mesh(one.mesh), few, STEP) for few in parts):
            return False
    return True


def _captured(shared: SharedByPlans, plan: Plan, mesh: Mesh, part: Part, microbatch: int) -> StageProgram:
    known, parameters = shared.known, {**plan.parameters_of(0), "layers": part.layers, "microbatch": microbatch}
    key = "few", part, mesh, tuple(sorted(parameters.items()))
    if key not in known:
        known[key] = capture_stage(plan.model, parameters, mesh, part)
    return known[key]


def _figures(shared: SharedByPlans, plan: Plan, captures: list[_TimedCapture]) -> dict[str, _Passes]:
    """The figures of the two captures."""
    shards, whole = plan.mesh["dp_shard"], _keeps_whole(shared.job)
    left = SHARDS / shards if shards > 1 else 1.0  # of what a rank of the captures stores

    @once_for_each
    def measured(timed: Template) -> tuple[float, float, float, Template]:
        """Times of the longest path, the host and the busiest stream, and the template on the plan's mesh."""
        template = on_mesh(timed, plan.mesh, 0, plan.host, shared.prices)
        if _stay(plan):
            template = _without_gathers(template)
        host = float((template.issue_ns + template.rest_ns).sum())
        span, busy = slowed(span_ns(template), np.bincount(template.stream, template.ns, 1), plan.slowdown)
        return span, host, float(busy.max()), template

    def figures(timed: Template, gradients: int, leaves: bool, reduces: bool, factor: float) -> np.ndarray:
        span, host, busiest, template = measured(timed)
        saved = gradients * (1 - left) if leaves and shards > 1 else 0.0
        exchange = _exchange_ns(plan, gradients * left) if reduces and shards > 1 else 0.0
        times = np.array([factor * span, host, factor * busiest, exchange])
        return np.concatenate([times, [template.live_bytes - saved, template.peak_bytes - saved]])

    counts = [part.layers for part in _few(shared.job, plan.parameters)]

    def layer(short: np.ndarray, long: np.ndarray) -> np.ndarray:
        """What a layer adds; on average where several kinds of layers repeat, or none does."""
        if counts[0] == counts[1]:
            return short / counts[0]
        return (long - short) / (counts[1] - counts[0])

    def both(name: str, leaves: bool = False, reduces: bool = False, factor: float = 1.0) -> _Passes:
        """``leaves``: the pass leaves shards of gradients that were not there before; ``reduces``: it reduces them."""
        short, long = (figures(one.passes[name], one.gradient_bytes, leaves, reduces, factor) for one in captures)
        return _Passes(short, layer(short, long))

    whole_bytes = GATHERED_BYTES * SHARDS if _stay(plan) and shards > 1 else 0  # of each parameter in the captures
    stored = [np.array([resident_bytes(plan, stage) * left + whole_bytes * stage.parameters]) for stage in captures]
    shard = [np.array([stage.gradient_bytes * left]) for stage in captures]
    return {
        "F": both("F"),
        "B first": both("B first", leaves=not whole, reduces=not whole),
        "B further": both("B further", reduces=not whole),
        "B last": both("B last", leaves=whole, reduces=True),
        "U": both("U", factor=left / plan.shares_of_update),  # the optimizer updates a rank's shard
        "resident": _Passes(stored[0], layer(*stored)),
        "gradients": _Passes(shard[0], layer(*shard)),
    }


def slowed(span: float, busy: np.ndarray, factor: float) -> tuple[float, np.ndarray]:
    """The longest path of a pass, and the time of its streams (the first one runs its kernels), where kernels are
    slowed down beside collectives (:mod:`simdev.parallel.costs.overlap`): these run beside kernels as far as the path
    is shorter than both together. What kernels lose makes a path longer that consists of kernels."""
    kernels, collectives = float(busy[0]), float(busy[1:].sum())
    beside = max(0.0, kernels + collectives - span)
    lost = min(kernels * (factor - 1), beside * (1 - 1 / factor))
    return span + lost * min(1.0, kernels / span if span else 0.0), np.concatenate([[kernels + lost], busy[1:]])


def _stay(plan: Plan) -> bool:
    """Whether gathered parameters stay gathered for the whole step."""
    return plan.gathered or plan.schedule in SPLIT


def _without_gathers(template: Template) -> Template:
    """The template of a pass whose parameters are gathered already. Memory is left as it is: it contains the gathered
    parameters of about two layers, so that an estimate is rather too large."""
    copies = np.array([kind in GATHERS for kind in template.kinds], bool)[template.kind]
    gathers = np.array([kind == "all_gather" for kind in template.kinds], bool)[template.kind]
    axes = np.array(["dp_shard" in one for one in template.axes], bool)[template.stream]
    none = copies | (gathers & axes)
    issue, rest = (np.where(none, 0, of) for of in (template.issue_ns, template.rest_ns))
    return replace(template, ns=np.where(none, 0, template.ns), issue_ns=issue, rest_ns=rest)


def _exchange_ns(plan: Plan, gradients: float) -> float:
    """An all-reduce of ``gradients``, in bytes, among the replicas of sharded groups."""
    if plan.mesh["dp_replicate"] < 2:
        return 0.0
    line = plan.mesh.lines(("dp_replicate",))[0]
    return float(collective_ns("all_reduce", int(gradients), line, plan.cluster))


def _pass_ns(figures: np.ndarray) -> float:
    """Time of a pass: its longest path, or its host, or its busiest stream, or its exchange of gradients."""
    return float(figures[:LIVE].max())


def _step_ns(plan: Plan, times: dict[str, list[float]]) -> float:
    """The step time with each pass as one op; many microbatches continue the steady state of few."""
    ranks = plan.mesh["pp"]
    update = max(
        sum(times["U"][stage] for stage in range(plan.stages) if plan.rank_of(stage) == rank) for rank in range(ranks)
    )
    one = round_of(plan.schedule, ranks)
    first = plan.microbatches % one + one * -(-max(2 * ranks, 2) // one)
    rounds = (plan.microbatches - first) // one
    if rounds < 2:
        return _schedule_ns(plan, plan.microbatches, times) + update
    short, long = (_schedule_ns(plan, first + n * one, times) for n in (0, 1))
    return short + rounds * (long - short) + update


def _schedule_ns(plan: Plan, microbatches: int, times: dict[str, list[float]]) -> float:
    from simdev.planners._kernel import end_ns

    ranks, first = plan.mesh["pp"], (*plan.first_ranks, 0)
    size = max(_sent_bytes(plan, rank) for rank in {0, ranks - 1})
    sent = max(send_ns(size, first[r], first[r + 1], plan.cluster) for r in range(ranks))
    table = np.array([times[name] for name in PASSES[:4]], float)
    return float(end_ns(*_laid_out(plan, microbatches).timed, table, float(sent), ranks))


@dataclass(frozen=True, eq=False)
class _LaidOut:
    """The actions of all ranks in an order in which each finds its inputs, as arrays ``(n,)``.

    ``rank`` and ``stage``; ``before``, the number of the action of another stage that it waits for, or -1;
    ``pass_of_time`` and ``pass_of_memory``, the rows of :data:`PASSES`; ``share`` of that time. What a backward
    pass frees, its second half does: the memory of the first one is not counted (-1).
    """

    rank: np.ndarray
    stage: np.ndarray
    before: np.ndarray
    pass_of_time: np.ndarray
    pass_of_memory: np.ndarray
    share: np.ndarray

    @property
    def timed(self) -> tuple[np.ndarray, ...]:
        return self.rank, self.stage, self.before, self.pass_of_time, self.share


def _laid_out(plan: Plan, microbatches: int) -> _LaidOut:
    return _layout(plan.schedule, plan.mesh["pp"], microbatches, plan.stages_per_rank, plan.stages)


@lru_cache(maxsize=64)
def _layout(schedule: str, ranks: int, microbatches: int, stages_per_rank: int, stages: int) -> _LaidOut:
    orders = pipeline_order(schedule, ranks, microbatches, stages_per_rank)
    done: dict[tuple, int] = {}
    rows = []
    for rank, (kind, stage, number) in execution_order(orders, stages):
        memory = 0 if kind == "F" else 3 if number == microbatches - 1 else 2 if number else 1
        if kind == "W":  # half of a backward pass, which no other rank waits for
            rows.append((rank, stage, -1, 2, memory, 0.5 if stage else 1.0))
            continue
        what, share = ("B", 0.5 if stage else 0.0) if kind == "I" else (kind, 1.0)
        before = done.get((what, stage - 1 if what == "F" else stage + 1, number), -1)
        done[what, stage, number] = len(rows)
        rows.append((rank, stage, before, memory, -1 if kind == "I" else memory, share))
    *numbers, shares = zip(*rows, strict=True)
    rank_of, stage_of, before_of, timed, counted = np.array(numbers, np.int64)
    return _LaidOut(rank_of, stage_of, before_of, timed, counted, np.array(shares, float))


def _sent_bytes(plan: Plan, rank: int) -> int:
    """Bytes that a rank sends for a microbatch: activations in 16 bits, divided as the tokens of a rank are."""
    p: Mapping[str, Any] = plan.parameters_of(rank)
    mesh = plan.meshes[rank]
    if (ends := getattr(plan.model.function, "ends", None)) is not None:  # a plain module, whose width has no name
        return 2 * int(p["microbatch"]) * prod(ends.shape)
    tokens = int(p["microbatch"]) * int(p["length"]) // mesh["cp"]
    split = "dp_shard" in plan.model.axes and plan.model.splits_tokens
    return 2 * tokens * int(p.get("width", 0)) // (mesh["tp"] if split else 1)


def _peak_bytes(plan: Plan, figures: dict[str, list[np.ndarray]], resident: list[float]) -> float:
    """The most memory of a pipeline rank, its passes in the order of the schedule."""
    from simdev.planners._kernel import most_bytes

    ranks = plan.mesh["pp"]
    few = min(plan.microbatches, (2 * plan.stages if plan.schedule == "looped-bfs" else 2 * ranks) + 2 * ranks)
    few -= (few - plan.microbatches) % round_of(plan.schedule, ranks)
    laid = _laid_out(plan, few)
    live = np.zeros(ranks)
    for stage, stored in enumerate(resident):
        rank = plan.rank_of(stage)
        live[rank] += stored
        if plan.receive_buffers:
            live[rank] += plan.microbatches * _sent_bytes(plan, rank) * ((stage > 0) + (stage + 1 < plan.stages))
    left, most = (np.array([[f[row] for f in figures[name]] for name in PASSES[:4]], float) for row in (LIVE, PEAK))
    return float(most_bytes(laid.rank, laid.stage, laid.pass_of_memory, left, most, live))
