"""Simulates a captured rank program: the actions of each pipeline rank in their recorded order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from simdev.parallel.cluster import Cluster
from simdev.parallel.costs.collectives import send_ns, send_share
from simdev.parallel.costs.overlap import beside_collectives, simulate_unrolled
from simdev.parallel.costs.timing import Host, Prices, Template, make_template
from simdev.parallel.mesh import Mesh
from simdev.parallel.orders import Action
from simdev.parallel.plan import PlanReport, kernel_ns, most_bytes, stream_times
from simdev.parallel.rank_program import RankProgram
from simdev.parallel.stragglers import Slow, make_unroller
from simdev.parallel.unroll import in_turns


@dataclass(frozen=True, eq=False)
class ProgramPlan:
    """A captured program on a cluster, described as plans are."""

    program: RankProgram
    cluster: Cluster
    host: Host = field(default_factory=Host)
    slowdown: float = 1.0
    schedule: str = "as captured"

    def __post_init__(self):
        self.cluster.check(self.mesh.ranks)

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def mesh(self) -> Mesh:
        return self.program.mesh

    @property
    def shape(self) -> str:
        return str(self.mesh)

    @property
    def ranks(self) -> int:
        return self.mesh.ranks

    @property
    def microbatches(self) -> int:
        return self.program.microbatches

    @property
    def sequences(self) -> int:
        return self.program.batch * self.mesh.replicas

    @property
    def tokens(self) -> int:
        return self.sequences * self.program.length

    @property
    def flops(self) -> float:
        return self.program.flops


def simulate_rank_program(
    plan: ProgramPlan,
    prices: Prices | None = None,
    *,
    unfolded: bool = False,
    engine: str = "fast",
    slowdown: float | None = None,
    slow: Slow = MappingProxyType({}),
) -> PlanReport[ProgramPlan]:
    """Time and simulate the program of ``plan``; the options are those of
    :func:`~simdev.parallel.plan.simulate_plan`.

    Raises :class:`InvalidInput` where it does not fit the cluster, or its pipeline ranks would wait for each other for
    ever.
    """
    slowdown = beside_collectives(plan.slowdown, slowdown, slow)
    program, mesh = plan.program, plan.mesh
    prices = prices or Prices(plan.cluster)
    ranks, width = mesh["pp"], mesh.stage_ranks
    unroller = make_unroller([mesh] * ranks, unfolded, slow)
    rank_of = {piece.action: rank for rank, pieces in enumerate(program.pieces) for piece in pieces}
    needs = {action: _needs(action, rank_of) for action in rank_of}
    receiver = {need: action for action, need in needs.items() if need and (need[1] != action[1])}
    arrived: dict[Action, np.ndarray] = {}
    timed: dict[tuple[int, int], Template] = {}
    needed = {action: [need] if need else [] for action, need in needs.items()}
    for rank, piece in in_turns(program.pieces, lambda piece: needed[piece.action], lambda piece: piece.action):
        action = piece.action
        key = piece.segment, rank * width % plan.cluster.gpus
        if key not in timed:
            segment = program.segments[piece.segment]
            timed[key] = make_template(segment, plan.cluster, mesh, rank * width, plan.host, prices)
        after = [arrived.pop(action)] if action in arrived else []
        if after and plan.host.wait_ns:
            unroller.wait_on_host(rank, after[0], 1)
        unroller.add(rank, action, timed[key], after)
        last = unroller.last(rank, "compute")
        if plan.host.wait_ns and last is not None:
            unroller.wait_on_host(rank, last, plan.host.wait_ns)
        following = receiver.get(action)
        ops = unroller.last(rank, "compute")
        if following is None or ops is None:
            continue
        target = rank_of[following]
        if target != rank:
            ends = {(rank * width + copy, target * width + copy) for copy in {0, width - 1}}
            ns = max(send_ns(piece.sent_bytes, *pair, plan.cluster) for pair in ends)
            share = max(send_share(piece.sent_bytes, *pair, plan.cluster) for pair in ends)
            ops = unroller.send(rank, target, ns, share)
        arrived[following] = ops
    unrolled = unroller.build(f"{program.name} {mesh}")
    unrolled, schedule = simulate_unrolled(unrolled, slowdown, engine)
    compute, exposed = stream_times(unrolled, schedule, ranks)
    memory = tuple(_memory(program, rank) for rank in range(ranks))
    idle = schedule.step_ns - compute - exposed
    kernels = tuple(
        kernel_ns(timed[piece.segment, rank * width % plan.cluster.gpus] for piece in pieces)
        for rank, pieces in enumerate(program.pieces)
    )
    return PlanReport(
        plan, int(schedule.step_ns), most_bytes(memory), compute, exposed, idle, unrolled, schedule, memory, kernels
    )


def _needs(action: Action, known: Mapping[Action, int]) -> Action | None:
    """The action whose result ``action`` waits for: forward passes wait for the stage before, the pass that takes the
    gradient from the next stage waits for that stage. A first stage has no gradient of its input to compute: there,
    the second half of a split backward pass takes it."""
    what, stage, number = action
    if what == "F":
        return ("F", stage - 1, number) if stage else None
    halved = any((letter, stage, number) in known for letter in "BI")
    if what in "SU" or (what == "W" and halved):
        return None
    return next((a for a in (("B", stage + 1, number), ("I", stage + 1, number)) if a in known), None)


def _memory(program: RankProgram, rank: int) -> tuple[tuple[Action, int, int], ...]:
    """``(action, most bytes in use during it, bytes in use after it)`` of a pipeline rank."""
    live, found = program.resident_bytes[rank], []
    for piece in program.pieces[rank]:
        segment = program.segments[piece.segment]
        found.append((piece.action, live + max(0, segment.peak_bytes), live + segment.live_bytes))
        live += segment.live_bytes
    return tuple(found)
