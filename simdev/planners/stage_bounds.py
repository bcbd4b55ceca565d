"""A step time that no plan of a job can beat, also if its stages have meshes and recomputation of their own.

The argument counts the time that kernels of all ranks take together. A stage has ``d`` replicas of ``k = tp * cp``
ranks each, and gives each replica a *share* of ``s`` sequences of a microbatch of ``d s``. If the kernels of one rank
take ``c`` ns for one layer and such a share, forward and backward, the ``d k`` ranks spend ``d k c`` ns on ``d s``
sequences: ``k c / s`` ns for each sequence, whatever ``d`` is. Each of the ``B`` sequences of a step passes each of the
``L`` layers in some stage, with some ``k``, ``s`` and recomputation, and passes the embedding and the head. The kernels
of a rank run one at a time, so that a step of ``T`` ns on ``R`` ranks has room for ``R T`` ns of them. Hence
``T >= B (L min k c / s + min k e / s + min k h / s) / R``, where ``e`` and ``h`` are the times of embedding and head,
and each minimum is over all degrees, shares and kinds of recomputation. Ranks that a plan leaves over and stages that
wait for each other only lengthen ``T``.

The same holds for the time of the host, which issues the kernels of its rank one after another. A rank needs at least
the longer of both for its layers, so ``c`` may be the longer one if ``e`` and ``h`` are the shorter ones: a second
bound. The larger bound counts.

What the minima are over: tensor, context and expert parallelism inside a node (of a wide job also those of
:meth:`simdev.planners.job.Job.may_spread`); shares from the least to the largest of
the job's microbatch sizes that divide the batch (``d s`` does, for every plan); the job's kinds of recomputation. All
of these are captured and costed; nothing is interpolated. Data parallelism adds collectives and copies to a rank, which
are left out, and replaces none of its kernels; the optimizer is left out. Memory is not looked at.

A plan with one mesh for all stages is a special case. For those :func:`simdev.planners.bounds.job_bound_ns` also counts
the collectives that kernels wait for, the fill and drain of the pipeline, and memory, and is the larger bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from simdev.errors import InvalidInput, SimdevError
from simdev.graphs.parallel_model import Part
from simdev.parallel.capture.stage import FEW, capture_stage
from simdev.parallel.costs.timing import make_template
from simdev.parallel.mesh import Mesh
from simdev.planners.bounds import copies_of
from simdev.planners.job import LONG, Job, SharedByPlans


def any_plan_bound_ns(shared: SharedByPlans) -> int:
    """A step time that no plan of the job can beat (see the top). Passes are whole: schedules that split the backward
    pass are not covered."""
    job = shared.job
    if job.model.kinds is not None or job.layers == 1:
        return 0  # the bound counts equal layers
    each = np.array([ns for option in stage_options(job) if (ns := _per_sequence_ns(shared, *option)) is not None])
    if not len(each):
        return 0
    layer, ends = each[:, 0], each[:, 1:]  # (options, 2), (options, 2, 2): kernels and host
    kernels = job.layers * layer[:, 0].min() + ends[:, :, 0].min(axis=0).sum()
    longer = job.layers * layer.max(axis=1).min() + ends.min(axis=2).min(axis=0).sum()
    return int(job.batch * max(kernels, longer) / job.ranks)


def stage_options(job: Job) -> Iterator[tuple[Mesh, int, str]]:
    """``(mesh, share, recomputation)`` of every stage that a plan may have, as far as its kernels depend on it: with
    one replica, and with two."""
    gpus, long = min(job.cluster.gpus, job.ranks), int(job.parameters["length"]) > LONG
    wide = job.wide
    least, most = min(job.microbatches), max(job.microbatches)
    shares = [n for n in range(least, most + 1) if job.batch % n == 0]
    degrees = [
        sorted({*range(1, gpus + 1), *(job.spreads(axis) if axis != "tp" else ())}) if axis in job.model.axes else [1]
        for axis in ("tp", "cp", "ep")
    ]
    data = "dp_shard" if "dp_shard" in job.model.axes else "dp_replicate"
    for tp, cp, ep, replicas in product(*degrees, (1, 2) if data in job.model.axes else (1,)):
        sizes = {data: replicas, "cp": cp, "ep": ep, "tp": tp}
        mesh = Mesh({axis: size for axis, size in sizes.items() if size > 1})
        if mesh.ranks > job.ranks or not job.same_precision(mesh):
            continue
        if not (job.may_spread(tp, cp, ep) if wide else tp * cp * ep <= gpus and (cp == 1 or long)):
            continue
        for share, kind in product(shares, job.known_recomputes):
            if _builds(job, mesh, share, kind):
                yield mesh, share, kind


def _builds(job: Job, mesh: Mesh, share: int, recompute: str) -> bool:
    """Whether the model can be divided in this way."""
    try:
        if job.model.checks is not None:
            job.model.checks(_parameters(job, share, recompute), mesh)
    except SimdevError:
        return False
    return True


def _parameters(job: Job, share: int, recompute: str) -> dict[str, Any]:
    found = {**job.parameters, "microbatch": share}
    return found | ({"recompute": recompute} if "recompute" in found else {})


def _per_sequence_ns(shared: SharedByPlans, mesh: Mesh, share: int, recompute: str) -> np.ndarray | None:
    """float ``(3, 2)``: a layer, the embedding, the head; least time of kernels and of the host, summed over the ranks
    that divide a sequence. None if the model cannot be built so."""
    few = min(FEW, max(1, shared.job.layers - 1))
    parameters = _parameters(shared.job, share, recompute)
    parts = Part(few), Part(few + 1), Part(1, first=True, last=False)
    try:
        short, long, begin = (_ns(shared, {**parameters, "layers": n.layers}, mesh, n) for n in parts)
    except InvalidInput:
        return None
    layer = long - short
    embedding = begin - layer
    head = short - few * layer - embedding
    least = np.stack([part.min(axis=0) for part in (layer, embedding, head)])
    return np.maximum(least, 0.0) * mesh["tp"] * mesh["cp"] / share


def _ns(shared: SharedByPlans, parameters: dict, mesh: Mesh, part: Part) -> np.ndarray:
    """float ``(4, 2)``: for each kind of backward pass, the time of the kernels of both passes, and of the host to
    issue them."""
    job = shared.job
    cluster, host = replace(job.cluster, nodes=0), job.software.host
    program = capture_stage(job.model, parameters, mesh, part)

    def of(segment) -> np.ndarray:
        template = make_template(segment, cluster, mesh, 0, host, shared.prices, merge=False)
        counted = (template.stream == 0) & ~copies_of(template)
        issued = template.issue_ns + template.rest_ns
        return np.array([template.ns[counted].sum(), issued[counted].sum()], float)

    return of(program.forward) + np.array([of(segment) for segment in program.backward])
