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

from dataclasses import dataclass, replace
from itertools import groupby
from math import inf

import numpy as np

from simdev.parallel.capture.stage import StageProgram
from simdev.parallel.costs.collectives import collective_ns
from simdev.parallel.costs.timing import Template
from simdev.parallel.mesh import Mesh
from simdev.parallel.plan import WHOLE, PlanProgram, prepare
from simdev.planners.job import Choice, Job, SharedByPlans

# Kernels that FSDP adds to copy parameters and gradients; a plan without FSDP has none of them.
COPIES = frozenset(
    {"split_with_sizes_copy", "all_gather_copy_in", "chunk_cat", "_chunk_cat", "cat", "copy_", "_to_copy"}
)
GRADIENT_BYTES = 2  # of one gradient that replicas exchange, at least


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
    recomputation it has and however it divides the layers.

    For each way to split a layer (``tp``, ``cp``, ``ep``), microbatch and recomputation, the whole model is captured
    on one stage with two data-parallel ranks. Its passes take at least their spans at the cost of each kernel, without
    the copies of FSDP and the collectives of data parallelism. Every mesh that can hold the model then has a bound: the
    passes, divided among its stages (see the top), and the exchange of gradients among its replicas. A mesh cannot hold
    the model if the mean over its ranks of parameters, optimizer state and what one microbatch keeps for its backward
    pass exceeds the capacity. If no mesh can hold a microbatch, larger ones are not looked at: they keep no less.
    """
    least = inf
    groups: dict[tuple, list[Choice]] = {}
    for choice in shared.job.choices():
        groups.setdefault((*(choice.mesh[axis] for axis in ("cp", "ep", "tp")), choice.recompute), []).append(choice)
    for group in groups.values():
        for _, same in groupby(sorted(group, key=_size), key=_size):
            bound = _microbatch_bound(shared, list(same))
            if bound == inf:
                break
            least = min(least, bound)
    return 0 if least == inf else int(least)


def _size(choice: Choice) -> int:
    return choice.microbatch


def _microbatch_bound(shared: SharedByPlans, choices: list[Choice]) -> float:
    """The least bound of choices with the same microbatch, recomputation and split of a layer."""
    wholes: dict[Mesh, _Whole] = {}
    least = inf
    for choice in choices:
        mesh = small_mesh(choice.mesh)
        if mesh not in wholes:
            wholes[mesh] = _whole(shared, choice, mesh)
        least = min(least, _choice_bound(shared.job, choice, wholes[mesh]))
    return least


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
        (stage.parameters * WHOLE if plan.distributed_optimizer else stage.resident_bytes) * shards,
        stage.forward.live_bytes,
        min(GRADIENT_BYTES * stage.parameters, gradient_bytes(stage)) * shards,
    )


def gradient_bytes(stage: StageProgram) -> int:
    """Bytes of the gradients that a rank of a stage keeps for its update, which frees them. Frozen parameters have
    none."""
    return -min(0, stage.finish.live_bytes)


def _kernels_ns(template: Template) -> int:
    """The span of a segment if what data parallelism adds took no time."""
    return span_ns(replace(template, ns=np.where(_of_data(template), 0, template.ns)))


def _kernels_issue_ns(template: Template) -> int:
    """Host time to issue the kernels of a segment, without those on other streams and the copies of FSDP."""
    counted = (template.stream == 0) & ~copies_of(template)
    return int((template.issue_ns + template.rest_ns)[counted].sum())


def _of_data(template: Template) -> np.ndarray:
    """bool per item: copies of FSDP and collectives of data parallelism."""
    axes = [bool(set(axes) & {"dp_shard", "dp_replicate"}) for axes in template.axes]
    return np.array(axes, bool)[template.stream] | copies_of(template)


def copies_of(template: Template) -> np.ndarray:
    """bool per item: whether it is a copy that FSDP adds."""
    return np.array([kind in COPIES for kind in template.kinds], bool)[template.kind]


def _choice_bound(job: Job, choice: Choice, whole: _Whole) -> float:
    mesh, passes = choice.mesh, whole.passes_ns
    ranks, microbatches = mesh["pp"], job.batch // (mesh.replicas * choice.microbatch)
    if (whole.resident_bytes / mesh["dp_shard"] + whole.kept_bytes) / ranks > job.cluster.kind.memory_bytes:
        return inf
    simple = set(job.schedules) <= {"gpipe", "1f1b"}
    bound = passes / (1 - (1 - 1 / microbatches) ** ranks) if simple else passes * microbatches / ranks
    bound = max(bound, whole.issue_ns * microbatches / ranks)
    axes = [axis for axis in ("dp_replicate", "dp_shard") if mesh[axis] > 1]
    if axes and not job.software.distributed_optimizer:  # whose traffic is taken to overlap
        payload = whole.exchanged_bytes // ranks
        bound = max(bound, collective_ns("reduce_scatter", payload, mesh.lines(axes)[0], job.cluster))
    return bound
