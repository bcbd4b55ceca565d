"""A plan of a training job, and what simulating it answers.

A plan is everything that decides what each rank executes: model and size, mesh, microbatches, schedule, recomputation.
The simulation answers step time, tokens per second, model FLOPs utilisation, memory, bubble and exposed communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from simdev.errors import InvalidInput, UnknownName, quoted
from simdev.graphs.parallel_model import ParallelModel, Part
from simdev.graphs.routing import routing_by_node
from simdev.graphs.selective import READ, SELECTIVE
from simdev.parallel.capture.kept import Packed, lacks, place
from simdev.parallel.capture.reshard import reshard_ns, slice_of
from simdev.parallel.capture.resize import AXIS, capture_resized, captured_meshes, few_shards
from simdev.parallel.capture.stage import FIRST_FORWARD, StageProgram, capture_stage, few_captures, known_by
from simdev.parallel.cluster import Cluster
from simdev.parallel.costs.collectives import send_ns, send_share
from simdev.parallel.costs.overlap import beside_collectives, simulate_unrolled
from simdev.parallel.costs.timing import Host, Prices, Template, make_template
from simdev.parallel.mesh import Mesh
from simdev.parallel.orders import SPLIT, Action, pipeline_order, stage_rank
from simdev.parallel.passes import STEP, shortest_order
from simdev.parallel.stragglers import Slow, check_slow, make_unroller
from simdev.parallel.unroll import UnrolledJob, execution_order, gradient_actions
from simdev.problem.costs import peak_flops
from simdev.sim import Schedule

if TYPE_CHECKING:
    from simdev.parallel.costs.allocator import Reserved

Memory = tuple[tuple[tuple[Action, int, int], ...], ...]


MAX_MICROBATCHES = 1 << 20
LIGHT = 2  # stages without a layer: the first and the last one
RESHARD = ("always", "never")  # what FSDP does with parameters that a pass has gathered


@dataclass(frozen=True)
class Plan:
    """``microbatches`` is how many microbatches each data-parallel replica processes in a step; ``stages_per_rank`` is
    the number of stages on a pipeline rank (virtual stages). ``stage_layers`` is the number of layers on each stage;
    empty: layers are spread evenly, earlier stages take what is left over. The first and the last stage may have no
    layer: they are *light*, with the embedding or the head alone. If the stages are one or two more than the layers,
    the last one is light, or both are. ``reduce_each``: FSDP reduces gradients after each microbatch, so that a rank
    keeps its shard of them alone; otherwise with the last microbatch.

    ``reshard`` says when FSDP frees gathered parameters: ``always`` after each pass (ZeRO 3), so that forward and
    backward pass of each microbatch gather them; ``never`` before the last backward pass of the step, so that the first
    forward pass gathers them for all (ZeRO 1; with ``reduce_each`` ZeRO 2). Schedules that split backward passes never
    free them, as in PyTorch.

    ``distributed_optimizer``: each replica holds whole parameters and gradients, as Megatron-Core does. The optimizer's
    state and its update are divided among the replicas, whose traffic overlaps: their program is that of one replica.
    ``main_gradient_bytes``: what the replica then keeps of a gradient, 4 (float32) or 2.

    ``receive_buffers``: a stage keeps a buffer for the activation of each microbatch of the step, and one for its
    gradient, as far as other stages send them, as PyTorch's pipelines do (``torch.distributed.pipelining``,
    ``PipelineStage._setup_forward_recv_info`` and ``_setup_backward_recv_info``). Otherwise what was received is freed
    by the backward pass of its microbatch.

    ``compiled``: layers run under ``torch.compile``, which keeps less of selective recomputation
    (:mod:`simdev.graphs.selective`).

    ``stage_meshes`` gives each pipeline rank a mesh of its own (without ``pp``; ``mesh`` then holds ``pp`` alone), and
    ``stage_recompute`` its own recomputation. Their ranks follow one another, and some of the cluster's may be left
    over. A microbatch is then one of the whole pipeline: its sequences (the parameter ``microbatch``) are divided among
    the replicas of each stage, and ``microbatches`` is how many the pipeline processes in a step.
    """

    model: ParallelModel
    parameters: Mapping[str, Any]
    cluster: Cluster
    mesh: Mesh
    microbatches: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    host: Host = field(default_factory=Host)
    stage_layers: tuple[int, ...] = ()
    reduce_each: bool = False
    stage_meshes: tuple[Mesh, ...] = ()
    stage_recompute: tuple[str, ...] = ()
    distributed_optimizer: bool = False
    main_gradient_bytes: int = 4
    reshard: str = "always"
    slowdown: float = 1.0
    receive_buffers: bool = True
    compiled: bool = False

    def __post_init__(self):
        if self.stage_meshes or self.stage_recompute:
            self._check_stages()
        for axis in dict.fromkeys(axis for mesh in self.meshes for axis, _ in mesh.inner):
            if axis not in self.model.axes:
                known = ", ".join((*self.model.axes, "pp"))
                raise InvalidInput(
                    f"{self.model.name} is not parallelised along it; known: {known}", source="mesh", field=axis
                )
        if self.mesh["pp"] > 1 and not self.model.pipeline:
            known = ", ".join(self.model.axes)
            raise InvalidInput(f"{self.model.name} has no pipeline stages; known: {known}", source="mesh", field="pp")
        if not 1 <= self.microbatches <= MAX_MICROBATCHES:
            raise InvalidInput(
                f"expected a whole number from 1 to {MAX_MICROBATCHES}, got {quoted(self.microbatches)}",
                source="plan",
                field="microbatches",
            )
        self.cluster.check(self.ranks, fewer=bool(self.stage_meshes))
        if self.model.checks is not None:
            for rank, mesh in enumerate(self.meshes if self.stage_meshes else (self.mesh,)):
                self.model.checks(self.parameters_of(rank), self._program_mesh(mesh))
        if self.reduce_each and self.schedule in SPLIT:
            message = f"{self.schedule} reduces gradients at the end of the step"
            raise InvalidInput(message, source="plan", field="reduce_each")
        if self.reshard not in RESHARD:
            raise UnknownName("reshard", self.reshard, RESHARD, source="plan")
        pipeline_order(self.schedule, self.mesh["pp"], self.microbatches, self.stages_per_rank)
        if isinstance(self.model.function, Packed):
            self._check_packed(self.model.function)

    def _check_packed(self, packed: Packed) -> None:
        """Raise :class:`InvalidInput` where the archive of programs lacks one that the plan needs."""
        for _, parameters, mesh, part, *options in captures_of(self, resized=False):
            name = known_by(parameters, tuple(options))
            if packed.has(place(name, mesh, part)):
                continue
            few = few_shards(mesh)
            padded = len(few) == 1 or packed.header["shard_unit"] % mesh[AXIS]
            if padded or not all(packed.has(place(name, one, part)) for one in few):
                raise InvalidInput(lacks(packed.name))

    def _check_stages(self) -> None:
        """Raise :class:`InvalidInput` where stages with degrees of their own contradict each other."""
        if self.mesh.inner or len(self.stage_meshes) != self.mesh["pp"] or any(m["pp"] > 1 for m in self.stage_meshes):
            message = f"expected a mesh for each of {self.mesh['pp']} pipeline ranks, and only pp in the plan's own"
            raise InvalidInput(message, source="plan", field="stage_meshes")
        if self.stages_per_rank != 1:
            raise InvalidInput("a rank with a mesh of its own has one stage", source="plan", field="stages per rank")
        sequences = int(self.parameters["microbatch"])
        for rank, mesh in enumerate(self.stage_meshes):
            if sequences % mesh.replicas:
                message = f"{sequences} sequences do not divide among {mesh.replicas} replicas of stage {rank}"
                raise InvalidInput(message, source="plan", field="microbatch")
        if self.stage_recompute and len(self.stage_recompute) != self.mesh["pp"]:
            message = f"expected one for each of {self.mesh['pp']} stages, got {len(self.stage_recompute)}"
            raise InvalidInput(message, source="plan", field="stage_recompute")
        if self.stage_recompute and "recompute" not in self.parameters:
            raise InvalidInput(f"{self.model.name} does not recompute", source="plan", field="stage_recompute")

    @property
    def stages(self) -> int:
        return self.mesh["pp"] * self.stages_per_rank

    @property
    def gathered(self) -> bool:
        """Whether stages are captured with parameters that stay gathered; split schedules always are."""
        return self.reshard == "never" and self.schedule not in SPLIT

    @cached_property
    def meshes(self) -> tuple[Mesh, ...]:
        """The mesh of each pipeline rank: the plan's own, or those of its stages."""
        return self.stage_meshes or (self.mesh,) * self.mesh["pp"]

    @cached_property
    def first_ranks(self) -> tuple[int, ...]:
        """The global number of the first rank of each pipeline rank."""
        return (0, *accumulate(mesh.stage_ranks for mesh in self.meshes[:-1]))

    @property
    def shares_of_update(self) -> int:
        """Ranks among which the optimizer's state and its update are divided, beyond what the captured program does."""
        return max(mesh["dp_replicate"] for mesh in self.meshes) if self.distributed_optimizer else 1

    @property
    def bytes_on_replica(self) -> int:
        """Bytes of a parameter and its gradient that each replica keeps under a distributed optimizer."""
        return WHOLE + self.main_gradient_bytes

    def _program_mesh(self, mesh: Mesh) -> Mesh:
        """The part of a mesh that the captured program knows of."""
        if not self.distributed_optimizer:
            return mesh
        return Mesh({axis: size for axis, size in mesh.sizes.items() if axis != "dp_replicate"})

    def captured_mesh(self, rank: int) -> Mesh:
        """The mesh of one stage of a pipeline rank, as far as the capture depends on it: replicas run the same program
        however many there are."""
        mesh = self._program_mesh(self.meshes[rank])
        return Mesh({axis: min(size, 2) if axis == "dp_replicate" else size for axis, size in mesh.inner})

    @property
    def ranks(self) -> int:
        """Ranks that the plan occupies."""
        return sum(mesh.stage_ranks for mesh in self.meshes)

    @property
    def shape(self) -> str:
        """The mesh, or those of the stages, as text."""
        return " / ".join(map(str, self.stage_meshes)) or str(self.mesh)

    def parameters_of(self, rank: int) -> dict[str, object]:
        """The model's parameters as the ranks of a pipeline rank have them: with their share of a microbatch, and with
        their recomputation."""
        found = dict(self.parameters)
        if self.stage_meshes:
            found["microbatch"] = int(self.parameters["microbatch"]) // self.stage_meshes[rank].replicas
        if self.stage_recompute:
            found["recompute"] = self.stage_recompute[rank]
        if self.compiled and self.model.selective and found["recompute"] == SELECTIVE:
            found["recompute"] = READ
        return found

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds ``stage``."""
        return stage_rank(self.schedule, self.mesh["pp"], stage)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The piece of the model on each stage."""
        layers, stages = int(self.parameters["layers"]), self.stages
        if self.stage_layers:
            inner = self.stage_layers[1:-1] if stages > 1 else self.stage_layers
            wrong = len(self.stage_layers) != stages or sum(self.stage_layers) != layers
            if wrong or min(self.stage_layers) < 0 or min(inner, default=1) < 1:
                counts = "/".join(map(str, self.stage_layers))
                message = (
                    f"{counts} do not spread {layers} layers over {stages} stages, one or more on each but the ends"
                )
                raise InvalidInput(message, source="plan", field="stage_layers")
            return self._parts_of(self.stage_layers)
        light = stages - layers  # the head is the heavier end
        if 0 < light <= min(LIGHT, layers):
            return self._parts_of([0] * (light - 1) + [1] * layers + [0])
        if layers < stages:
            raise InvalidInput(
                f"{layers} layers on {stages} stages leave a stage without work", source="plan", field="pp"
            )
        share, more = divmod(layers, stages)
        return self._parts_of([share + (s < more) for s in range(stages)])

    def _parts_of(self, counts: Sequence[int]) -> tuple[Part, ...]:
        starts, last = accumulate(counts, initial=0), len(counts) - 1
        return tuple(
            replace(self.model.part(self.parameters, n, start), first=stage == 0, last=stage == last)
            for stage, (n, start) in enumerate(zip(counts, starts, strict=False))
        )

    @property
    def sequences(self) -> int:
        """Sequences in a step, over all replicas (the global batch)."""
        return int(self.parameters["microbatch"]) * self.microbatches * self.mesh.replicas  # 1 with stage_meshes

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def tokens(self) -> int:
        """Tokens in a step, over all replicas."""
        return self.sequences * int(self.parameters["length"])

    @property
    def flops(self) -> float:
        """Model FLOPs of a step, without recomputation."""
        return self.model.flops(self.parameters) * self.sequences


class Planned(Protocol):
    """What a report asks of the plan that it is about."""

    @property
    def name(self) -> str: ...
    @property
    def cluster(self) -> Cluster: ...
    @property
    def shape(self) -> str: ...
    @property
    def ranks(self) -> int: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def schedule(self) -> str: ...
    @property
    def sequences(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def flops(self) -> float: ...


AnyPlan = TypeVar("AnyPlan", bound=Planned)


@dataclass(frozen=True, eq=False)
class PlanReport(Generic[AnyPlan]):
    """What a plan does in one step.

    ``peak_bytes``, ``compute_ns``, ``exposed_ns`` and ``bubble_ns`` are int64 per pipeline rank: most memory in use;
    time in which its compute stream runs kernels; time in which that stream is idle while one of the rank's collectives
    runs; the rest of the step. ``memory`` holds for each pipeline rank its actions in order, each with the most bytes
    in use during it and the bytes in use after it. ``kernel_ns`` holds for each pipeline rank how long its compute
    stream runs the kernels of a class of op (:func:`~simdev.problem.costs.op_class`), none of them slowed down.
    """

    plan: AnyPlan
    step_ns: int
    peak_bytes: np.ndarray
    compute_ns: np.ndarray
    exposed_ns: np.ndarray
    bubble_ns: np.ndarray
    unrolled: UnrolledJob
    schedule: Schedule
    memory: Memory = ()
    kernel_ns: tuple[Mapping[str, int], ...] = ()

    @property
    def tokens_per_s(self) -> float:
        return self.plan.tokens / self.step_ns * 1e9

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the accelerators' datasheet allows in the step (bf16)."""
        return self.plan.flops / (self.step_ns / 1e9 * self.plan.ranks * peak_flops(self.plan.cluster.kind, "bf16"))

    @property
    def fits(self) -> bool:
        return bool((self.peak_bytes <= self.plan.cluster.kind.memory_bytes).all())

    def summary(self, reserved: Sequence[Reserved] | None = None) -> dict[str, Any]:
        """The figures, ready for JSON. ``reserved`` is the reserved memory of each pipeline rank
        (:func:`simdev.parallel.costs.reserved.reserved_bytes`): it then decides whether the plan fits."""
        found = self._figures()
        for row, times in zip(found["pipeline_ranks"], self.kernel_ns, strict=True):
            total = sum(times.values()) or 1
            row["kernel_shares"] = {name: ns / total for name, ns in sorted(times.items(), key=lambda item: -item[1])}
        if reserved is None:
            return found
        for row, one in zip(found["pipeline_ranks"], reserved, strict=True):
            row |= {"reserved_memory_bytes": one.reserved, "nccl_bytes": one.buffers}
        found["fits"] = all(one.total <= self.plan.cluster.kind.memory_bytes for one in reserved)
        return found

    def _figures(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "model": plan.name, "cluster": plan.cluster.name, "mesh": plan.shape, "ranks": plan.ranks,
            "microbatches": plan.microbatches, "schedule": plan.schedule, "global_batch": plan.sequences,
            "step_ns": self.step_ns, "step_time_s": self.step_ns / 1e9, "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_gpu": self.tokens_per_s / plan.ranks, "mfu": self.mfu, "fits": self.fits,
            "capacity_bytes": plan.cluster.kind.memory_bytes,
            "pipeline_ranks": [
                {"rank": rank, "peak_memory_bytes": int(peak), "compute_share": compute / self.step_ns,
                 "exposed_communication_share": exposed / self.step_ns, "idle_share": idle / self.step_ns}
                for rank, (peak, compute, exposed, idle) in enumerate(zip(
                    self.peak_bytes.tolist(), self.compute_ns.tolist(), self.exposed_ns.tolist(),
                    self.bubble_ns.tolist(), strict=True))
            ],
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class PlanProgram:
    """A plan's stages, captured and timed: what a simulation puts in order."""

    plan: Plan
    stages: tuple[StageProgram, ...]
    forward: tuple[Template, ...]
    backward: tuple[tuple[Template, ...], ...]
    split: tuple[tuple[Template, ...], ...]
    finish: tuple[Template, ...]
    passes: tuple[Mapping[str, Template], ...] = ()  # by their names in the stage's program

    def passes_of(self, phase: str) -> list[dict[str, Template]]:
        """For each stage, its forward or backward passes (``phase``) by name."""
        return [{name: one for name, one in stage.items() if name.startswith(phase)} for stage in self.passes]


def prepare(
    plan: Plan, prices: Prices | None = None, merge: bool = True, known: dict[tuple, Any] | None = None
) -> PlanProgram:
    """Capture the stages of ``plan`` and time their segments.

    Pass the same ``known`` for many plans of one model on one cluster with the same host and prices: captured stages
    and timed segments are kept in it, and plans that differ in pipeline depth, replicas or microbatches share them.
    Two captured sizes of ``dp_shard`` then serve all others (:mod:`simdev.parallel.capture.resize`).
    """
    return time_stages(plan, capture_stages(plan, known), prices, merge, known)


def capture_stages(plan: Plan, known: dict[tuple, Any] | None = None) -> tuple[StageProgram, ...]:
    """The programs of a plan's stages; ``known`` as for :func:`prepare`."""
    capture_one = capture_stage if known is None else capture_resized
    known = {} if known is None else known
    split = plan.schedule in SPLIT
    programs = []
    for stage, part in enumerate(plan.parts):
        rank = plan.rank_of(stage)
        given, inner = plan.parameters_of(rank), plan.captured_mesh(rank)
        how = order_of_capture(plan, stage), split, plan.reduce_each, plan.gathered
        key = "stage", _fixed(given), inner, part, *how
        if key not in known:
            known[key] = capture_one(plan.model, given, inner, part, *how)
        programs.append(known[key])
    return tuple(programs)


def order_of_capture(plan: Plan, stage: int) -> str:
    """The order of passes in which a stage is captured. The passes depend on the schedule if data-parallel ranks gather
    parameters for them."""
    if plan.schedule in SPLIT:
        return STEP
    if plan.microbatches == 1:
        return STEP[:2]
    alone = plan.stages == 1 or plan.captured_mesh(plan.rank_of(stage)).replicas == 1
    return STEP if alone or plan.gathered else shortest_order(_letters(plan, stage))


def _letters(plan: Plan, stage: int) -> str:
    """The order of a stage's passes."""
    orders = pipeline_order(plan.schedule, plan.mesh["pp"], plan.microbatches, plan.stages_per_rank)
    return "".join(what for what, number, _ in orders[plan.rank_of(stage)] if number == stage)


def _fixed(parameters: Mapping[str, object]) -> tuple:
    """The parameters in order of their names, without the number of layers."""
    return tuple(sorted((name, value) for name, value in parameters.items() if name != "layers"))


def captures_of(plan: Plan, resized: bool = True) -> list[tuple]:
    """The arguments of :func:`~simdev.parallel.capture.stage.captured` for all that :func:`prepare` captures with
    ``known``, as far as layers repeat and (``resized``) shards are alike."""
    how = plan.schedule in SPLIT, plan.reduce_each, plan.gathered
    kinds = dict.fromkeys(
        (_fixed(plan.parameters_of(rank)), plan.captured_mesh(rank), part, order_of_capture(plan, stage))
        for rank, stage, part in ((plan.rank_of(stage), stage, part) for stage, part in enumerate(plan.parts))
    )
    return [
        (plan.model, parameters, mesh, few, order, *how)
        for parameters, inner, part, order in kinds
        for few in few_captures(part)
        for mesh in (captured_meshes(plan.model, parameters, inner, few, order, *how) if resized else (inner,))
    ]


def time_stages(
    plan: Plan,
    programs: tuple[StageProgram, ...],
    prices: Prices | None = None,
    merge: bool = True,
    known: dict[tuple, Any] | None = None,
) -> PlanProgram:
    """The programs of a plan's stages with the duration of each of their items."""
    prices = prices or Prices(plan.cluster, routing=routing_by_node(plan.parameters))
    known = {} if known is None else known

    def time(segment, stage):
        rank = plan.rank_of(stage)
        mesh, first = plan.meshes[rank], plan.first_ranks[rank]
        key = "template", id(segment), mesh.inner, first % plan.cluster.gpus, merge
        if key not in known:
            template = make_template(segment, plan.cluster, mesh, first, plan.host, prices, merge)
            known[key] = template, segment  # the segment stays alive, so that its id stays its own
        return known[key][0]

    return PlanProgram(
        plan,
        programs,
        tuple(time(program.forward, s) for s, program in enumerate(programs)),
        tuple(tuple(time(segment, s) for segment in program.backward) for s, program in enumerate(programs)),
        tuple(tuple(time(segment, s) for segment in program.split) for s, program in enumerate(programs)),
        tuple(_divided(time(program.finish, s), plan.shares_of_update) for s, program in enumerate(programs)),
        tuple(
            {name: time(segment, s) for name, segment in program.passes.items()} for s, program in enumerate(programs)
        ),
    )


def _divided(update: Template, shares: int) -> Template:
    """The update of a rank that has one of so many shares of it."""
    if shares == 1:
        return update
    kernels = {name: ns // shares for name, ns in update.kernel_ns.items()}
    return replace(update, ns=np.maximum(1, update.ns // shares), kernel_ns=kernels)


def simulate_plan(
    plan: Plan,
    prices: Prices | None = None,
    *,
    unfolded: bool = False,
    engine: str = "fast",
    slowdown: float | None = None,
    slow: Slow = MappingProxyType({}),
) -> PlanReport[Plan]:
    """Capture, time and simulate one step of ``plan``. ``unfolded`` simulates every rank, not one for each stage;
    ``slowdown`` is the factor by which kernels beside a collective take longer
    (:func:`~simdev.parallel.costs.overlap.beside_collectives`);
    ``slow`` maps ranks to the factor by which all their kernels do (:mod:`simdev.parallel.stragglers`).

    Raises :class:`InvalidInput` where the mesh does not fit model or cluster, or ranks would wait for each other for
    ever.
    """
    check_slow(plan.ranks, slow)
    factor = beside_collectives(plan.slowdown, slowdown, slow)  # before a model is captured in vain
    return simulate_program(prepare(plan, prices), unfolded=unfolded, engine=engine, slowdown=factor, slow=slow)


def simulate_program(
    program: PlanProgram,
    *,
    unfolded: bool = False,
    engine: str = "fast",
    slowdown: float | None = None,
    slow: Slow = MappingProxyType({}),
) -> PlanReport[Plan]:
    """:func:`simulate_plan` of stages that are captured already."""
    plan = program.plan
    slowdown = beside_collectives(plan.slowdown, slowdown, slow)
    ranks = plan.mesh["pp"]
    orders = pipeline_order(plan.schedule, ranks, plan.microbatches, plan.stages_per_rank)
    unroller = make_unroller(plan.meshes, unfolded, slow)
    sends: dict[tuple[int, int], tuple[int, float]] = {}
    templates = _templates(program, orders)
    gradient = gradient_actions(orders)
    arrived: dict[Action, np.ndarray] = {}
    for rank, action in execution_order(orders, plan.stages):
        what, stage, microbatch = action
        after = [arrived.pop(action)] if action in arrived else []
        if what == "I" and not stage:  # no gradient of the input is needed: all is left to the second half
            arrived["W", 0, microbatch] = after[0] if after else np.zeros(0, np.int64)
            continue
        if after and plan.host.wait_ns:
            unroller.wait_on_host(rank, after[0], 1)
        # PyTorch's pipelines gather parameters that stay before the activations of the first microbatch arrive.
        first = program.passes[stage].get(FIRST_FORWARD)
        ahead = what == "F" and plan.gathered and templates[action] is first
        unroller.add(rank, action, templates[action], after, ahead)
        last = unroller.last(rank, "compute")
        if plan.host.wait_ns and last is not None:
            unroller.wait_on_host(rank, last, plan.host.wait_ns)
        following = ("F", stage + 1, microbatch) if what == "F" else gradient.get((stage - 1, microbatch))
        if what != "W" and following and following[1] < plan.stages:
            target = plan.rank_of(following[1])
            ops = unroller.last(rank, "compute")
            if target != rank:
                if (rank, target) not in sends:
                    size = program.stages[min(stage, following[1])].output_bytes
                    sends[rank, target] = _send(plan, size, rank, target)
                together = plan.meshes[rank] != plan.meshes[target]
                ops = unroller.send(rank, target, *sends[rank, target], together)
            if ops is not None:
                arrived[following] = ops
    for rank in range(ranks):
        for stage in sorted({action[1] for action in orders[rank]}):
            unroller.add(rank, ("U", stage, 0), program.finish[stage], [])
    unrolled = unroller.build(f"{plan.model.name} {plan.shape}")
    unrolled, schedule = simulate_unrolled(unrolled, slowdown, engine)
    return _report(program, orders, templates, unrolled, schedule)


def _send(plan: Plan, size: int, source: int, target: int) -> tuple[int, float]:
    """ns of the longest of the sends between the copies of two pipeline ranks, or of the redistribution between stages
    with different meshes, and how much of the adapters to the network it takes."""
    first = plan.first_ranks
    if plan.meshes[source] != plan.meshes[target]:
        made, wanted = (slice_of(plan.model, plan.parameters_of(rank), plan.meshes[rank]) for rank in (source, target))
        ns = reshard_ns(made, wanted, first[source], first[target], plan.cluster)
        # One rank's link decides how long it takes; if any piece leaves a node, that link is taken to be an adapter.
        ends = first[source], first[target] + plan.meshes[target].stage_ranks - 1
        return ns, float(ends[0] // plan.cluster.gpus != ends[1] // plan.cluster.gpus)
    width = plan.meshes[source].stage_ranks
    copies = range(width) if plan.stage_meshes else {0, width - 1}
    pairs = [(first[source] + copy, first[target] + copy) for copy in copies]
    ns = max(send_ns(size, *pair, plan.cluster) for pair in pairs)
    return ns, max(send_share(size, *pair, plan.cluster) for pair in pairs)


def _templates(program: PlanProgram, orders) -> dict[Action, Template]:
    """What each action runs. The first backward pass of a stage makes its gradients, further ones add to them; the last
    one also reduces them, unless the schedule splits backward passes."""
    of_stage: dict[int, list[Action]] = {}
    for action in (action for actions in orders for action in actions):
        of_stage.setdefault(action[1], []).append(action)
    found: dict[Action, Template] = {}
    for stage, actions in of_stage.items():
        passes = program.passes[stage]
        if program.plan.schedule not in SPLIT:
            names = program.stages[stage].named("".join(what for what, *_ in actions))
            found |= dict(zip(actions, map(passes.__getitem__, names), strict=True))
            continue
        halves = {"I": program.split[stage][:3], "W": program.split[stage][3:]}
        first = passes.get(FIRST_FORWARD, passes["forward"]), passes["backward first"]
        kinds = {"F": (first[0], passes["forward"]), "B": (first[1], passes["backward further"])}
        seen = dict.fromkeys("FIW", 0)
        for action in actions:
            letters = "IW" if action[0] == "B" else action[0]  # a whole backward pass counts as both halves
            times = (kinds | halves)[action[0]]
            found[action] = times[min(seen[letters[0]], len(times) - 1)]
            for letter in letters:
                seen[letter] += 1
    return found


HALF = 2  # bytes of a gradient that the program of a replica leaves
# Bytes that Megatron-Core's distributed optimizer keeps for each parameter, beside its gradient: the bf16 parameter on
# each replica; a float32 copy and Adam's two moments divided among the replicas ("6 + 12/d" in its documentation).
WHOLE, DIVIDED = 2, 12


class Stored(Protocol):
    """What a stage stores: bytes of parameters, optimizer state and inputs, and the number of parameters."""

    @property
    def resident_bytes(self) -> int: ...
    @property
    def parameters(self) -> int: ...


def resident_bytes(plan: Plan, stage: Stored) -> int:
    """Bytes that a rank of the stage holds through a step: parameters, optimizer state and inputs."""
    if not plan.distributed_optimizer:
        return stage.resident_bytes
    return stage.parameters * plan.bytes_on_replica + -(-stage.parameters * DIVIDED // plan.shares_of_update)


def received_bytes(program: PlanProgram, stage: int) -> tuple[int, int]:
    """Bytes that a rank of the stage receives for each microbatch: the activation from the stage before it, and the
    gradient from the stage after it."""
    sent = [one.output_bytes for one in program.stages]
    return sent[stage - 1] if stage else 0, sent[stage] if stage + 1 < len(sent) else 0


def peak_bytes(program: PlanProgram) -> np.ndarray:
    """int64 per pipeline rank: most bytes in use in a step. Needs no simulation."""
    plan = program.plan
    orders = pipeline_order(plan.schedule, plan.mesh["pp"], plan.microbatches, plan.stages_per_rank)
    templates = _templates(program, orders)
    return most_bytes(tuple(_memory(program, actions, templates) for actions in orders))


def most_bytes(memory: Memory) -> np.ndarray:
    """int64 per pipeline rank: most bytes in use."""
    return np.array([max(most for _, most, _ in steps) for steps in memory], np.int64)


def _report(program: PlanProgram, orders, templates, unrolled: UnrolledJob, schedule: Schedule) -> PlanReport[Plan]:
    plan = program.plan
    ranks = plan.mesh["pp"]
    compute, exposed = stream_times(unrolled, schedule, ranks)
    memory = tuple(_memory(program, orders[rank], templates) for rank in range(ranks))
    idle = schedule.step_ns - compute - exposed
    kernels = tuple(kernel_ns(one for _, one in _steps(program, orders[rank], templates)) for rank in range(ranks))
    return PlanReport(
        plan, int(schedule.step_ns), most_bytes(memory), compute, exposed, idle, unrolled, schedule, memory, kernels
    )


def kernel_ns(templates: Iterable[Template]) -> dict[str, int]:
    """The summed duration of the kernels of ``templates`` on the compute stream, by class of op."""
    found: dict[str, int] = {}
    for template in templates:
        for name, ns in template.kernel_ns.items():
            found[name] = found.get(name, 0) + ns
    return found


def _steps(program: PlanProgram, actions: tuple[Action, ...], templates: Mapping[Action, Template]) -> list:
    """``(action, template)`` of all that a pipeline rank runs, the updates at the end."""
    stages = sorted({action[1] for action in actions})
    steps = [(action, templates[action]) for action in actions if action[0] != "I" or action[1]]
    return steps + [(("U", stage, 0), program.finish[stage]) for stage in stages]


def stream_times(unrolled: UnrolledJob, schedule: Schedule, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 per pipeline rank, for its first copy: time in which its compute stream runs kernels, and in which that
    stream is idle while one of the rank's collectives runs."""
    compute, exposed = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    for rank in range(ranks):
        mine = unrolled.rank == unrolled.first[rank]
        busy = mine & unrolled.is_compute
        compute[rank] = int((schedule.op_finish[busy] - schedule.op_start[busy]).sum())
        either = busy | (mine & unrolled.is_communication)
        exposed[rank] = _covered(schedule.op_start[either], schedule.op_finish[either]) - compute[rank]
    return compute, exposed


def _covered(start: np.ndarray, finish: np.ndarray) -> int:
    """Length of the union of intervals."""
    if not len(start):
        return 0
    order = np.argsort(start, kind="stable")
    begin, end = start[order], np.maximum.accumulate(finish[order])
    gap = np.maximum(begin[1:] - end[:-1], 0).sum()
    return int(end[-1] - begin[0] - gap)


def _memory(program: PlanProgram, actions: tuple[Action, ...], templates: dict[Action, Template]) -> tuple:
    """``(action, most bytes in use during it, bytes in use after it)`` of a pipeline rank: kernels are issued in
    program order, and so is their memory."""
    stages = sorted({action[1] for action in actions})
    plan = program.plan
    live = sum(resident_bytes(plan, program.stages[stage]) for stage in stages)
    received = {stage: received_bytes(program, stage) for stage in stages}
    if plan.receive_buffers:
        live += plan.microbatches * sum(map(sum, received.values()))
    met: set[int] = set()
    found = []
    for action, template in _steps(program, actions, templates):
        activation, gradient = received[action[1]]
        if not plan.receive_buffers and action[0] != "U":
            halved = action[0] == "W" and action[1]  # the first half received the gradient
            live += activation if action[0] == "F" else 0 if halved else gradient
        after = live + template.live_bytes
        if action[0] in "BW":  # the program frees the gradient and does not know of the activation
            after += gradient if plan.receive_buffers else -activation
        if plan.distributed_optimizer and action[0] in "BW" and action[1] not in met:
            met.add(action[1])
            after -= HALF * program.stages[action[1]].parameters  # its gradients are resident already
        found.append((action, live + max(0, template.peak_bytes), after))
        live = after
    return tuple(found)
