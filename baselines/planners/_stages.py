"""Dynamic programs over the layers of pipeline stages, each with degrees of its own, shared by planners.

Layers are alike, so what a stage costs depends on its number of layers, on its place (the last stage also computes the
loss) and on its :class:`Option`: data degree, tensor degree, recomputation. The costs are those of the cost model
(:func:`simdev.planners.estimate.stage_costs`). A microbatch is one of the whole pipeline: a stage with data degree
``d`` divides its sequences among ``d`` replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from simdev.baselines.planners._rules import data_axis
from simdev.errors import Unsupported
from simdev.parallel.capture.reshard import slice_of
from simdev.parallel.costs.collectives import route
from simdev.parallel.mesh import Mesh
from simdev.parallel.plan import peak_bytes
from simdev.planners import Choice, Job, PlanBudget
from simdev.planners.estimate import StageCosts, stage_costs

TIGHTER = (1.0, 0.92, 0.84, 0.7)  # shares of the capacity that the cost model may fill, until the captured program fits


@dataclass(frozen=True)
class Option:
    """How a stage may run: its mesh, the sequences of a microbatch on each replica, its recomputation."""

    mesh: Mesh
    share: int
    recompute: str

    @property
    def ranks(self) -> int:
        return self.mesh.ranks


@dataclass(frozen=True, eq=False)
class Pipeline:
    """All that a dynamic program knows about pipelines with microbatches of ``sequences`` sequences.

    ``costs`` of each of ``options``; ``sent_ns`` is the time to send a replica's share of the activations over a border
    of its stage, ``sent_bytes`` its size, float per option.
    """

    job: Job
    sequences: int
    microbatches: int
    options: tuple[Option, ...]
    costs: tuple[StageCosts, ...]
    sent_ns: np.ndarray
    sent_bytes: np.ndarray

    @property
    def received_bytes(self) -> np.ndarray:
        """Bytes of the buffers that a stage with a next one keeps for its gradients, float per option."""
        return self.sent_bytes * (self.microbatches if self.job.software.receive_buffers else 1)

    @cached_property
    def all_costs(self) -> StageCosts:
        """The costs of all options as one, whose arrays are float ``(2, options, layers + 1)``."""
        rows = zip(*((one.pass_ns, one.step_ns, *one.peaks.values()) for one in self.costs), strict=True)
        pass_ns, step_ns, *peaks = (np.stack(row, axis=1) for row in rows)
        return StageCosts(pass_ns, step_ns, dict(zip(self.costs[0].peaks, peaks, strict=True)))


def stage_sizes(job: Job) -> list[int]:
    """Numbers of ranks that a stage may have: those that fit a node or fill nodes."""
    return [n for n in range(1, job.ranks + 1) if n <= job.cluster.gpus or n % job.cluster.gpus == 0]


def pipelines(
    job: Job,
    budget: PlanBudget,
    *,
    tensor: bool = True,
    recompute: bool = True,
    sizes: Iterable[int] = (),
    splits: Collection[tuple] | None = None,
) -> Iterator[Pipeline]:
    """A pipeline for each number of sequences that a microbatch may have.

    Replicas process between the least and the largest of the job's microbatch sizes. Without ``tensor`` stages have
    tensor degree 1, without ``recompute`` nothing is recomputed. ``sizes``: numbers of ranks that a stage may have;
    otherwise all that fit a node or fill nodes. ``splits``: those that a stage may have, as
    :func:`~simdev.planners.estimate.group_of` names them; otherwise all.
    """
    if not job.model.pipeline:
        return
    data, most = data_axis(job), max(job.microbatches)
    allowed = set(sizes) or set(stage_sizes(job))
    tensors = [t for t in range(1, job.cluster.gpus + 1) if t == 1 or (tensor and "tp" in job.model.axes)]
    kinds = job.known_recomputes if recompute else job.known_recomputes[:1]
    degrees = [d for d in range(1, job.ranks + 1) if job.batch % d == 0]
    known: dict[Option, tuple[StageCosts, float, int] | None] = {}

    def cost(option: Option) -> tuple[StageCosts, float, int] | None:
        if option not in known:
            known[option] = _cost(job, budget, option)
        return known[option]

    for sequences in sorted({d * share for d in degrees for share in job.microbatches if job.batch % (d * share) == 0}):
        found = []
        for d in degrees:
            share, rest = divmod(sequences, d)
            if rest or not min(job.microbatches) <= share <= most:
                continue
            for t in tensors:
                mesh = Mesh({axis: n for axis, n in ((data, d), ("tp", t)) if n > 1})
                if mesh.ranks in allowed:
                    found += [
                        Option(mesh, share, kind) for kind in kinds if splits is None or (t, 1, 1, kind) in splits
                    ]
        priced = [(option, price) for option in found if (price := cost(option)) is not None]
        if priced:
            options = tuple(option for option, _ in priced)
            costs, *sent = zip(*(price for _, price in priced), strict=True)
            yield Pipeline(job, sequences, job.batch // sequences, options, costs, *map(np.array, sent))


def _cost(job: Job, budget: PlanBudget, option: Option) -> tuple[StageCosts, float, int] | None:
    """The costs of an option, and time and bytes of a send; None where the job has no such stage."""
    alone = Choice(Mesh({"pp": 1}), option.share * option.mesh.replicas, option.recompute, stage_meshes=(option.mesh,))
    if not job.valid(alone):
        return None
    parameters = job.plan(alone).parameters_of(0)
    size = slice_of(job.model, parameters, option.mesh).size
    rate, latency = route(0, min(option.ranks, job.ranks - 1), job.cluster)
    sent = latency + size / rate * 1e9 if option.ranks < job.ranks else 0.0
    return stage_costs(budget.evaluator, option.mesh, option.share, option.recompute), sent, size


StageNs = Callable[[Pipeline, int, int], np.ndarray]


def loads(pipeline: Pipeline, ns: np.ndarray, progress: int, limit: float, last: bool) -> tuple:
    """What a stage takes: the times by number of ranks and layers, float ``(sizes, layers + 1)``, inf where it does not
    fit; the option of each; and the sizes.

    ``ns`` float ``(options, layers + 1)`` are the times of the options; ``progress`` counts the microbatches in
    progress.
    """
    ranks = np.array([option.ranks for option in pipeline.options])
    sizes = sorted(set(ranks.tolist()))
    held = pipeline.all_costs.peak_bytes(progress, last)
    held += 0.0 if last else pipeline.received_bytes[:, None]
    fitting = np.where(held <= limit, ns, np.inf)
    best = np.full((len(sizes), pipeline.job.layers + 1), np.inf)
    chosen = np.zeros(best.shape, np.int64)
    for row, size in enumerate(sizes):
        own = np.flatnonzero(ranks == size)
        best[row] = fitting[own].min(axis=0)
        chosen[row] = np.where(np.isfinite(best[row]), own[fitting[own].argmin(axis=0)], 0)
    best[:, 0] = np.inf
    return best, chosen, sizes


def least_bottleneck(tables: list[tuple], layers: int, ranks: int) -> tuple[float, list[tuple[int, int]]]:
    """The pipeline of the least slowest stage, on at most ``ranks`` ranks: see :func:`best_pipeline`."""
    begin = np.full((layers + 1, ranks + 1), np.inf)
    begin[layers] = 0.0
    return best_pipeline(tables, begin, add=False)


def least_sum(tables: list[tuple], layers: int, ranks: int, most: float) -> tuple[float, list[tuple[int, int]]]:
    """The pipeline whose stages take the least time together, none of them more than ``most``, on ``ranks`` ranks
    exactly: see :func:`best_pipeline`."""
    begin = np.full((layers + 1, ranks + 1), np.inf)
    begin[layers, 0] = 0.0
    below = [(np.where(table <= most, table, np.inf), chosen, sizes) for table, chosen, sizes in tables]
    return best_pipeline(below, begin, add=True)


def best_pipeline(tables: list[tuple], begin: np.ndarray, add: bool) -> tuple[float, list[tuple[int, int]]]:
    """The least value of a pipeline, and ``(option, layers)`` of each of its stages.

    ``tables[s - 1]`` is what :func:`loads` gives for a stage that is the last but ``s - 1``; there are at most
    ``len(tables)`` stages. The state is the layers from ``i`` on with ``k`` ranks for them; ``begin`` float
    ``(layers + 1, ranks + 1)`` holds the values of no stages. A value is the sum of the stages, or without ``add``
    their largest. ``(inf, [])`` if there is no pipeline.
    """
    from simdev.baselines.planners._kernel import with_a_stage

    ranks = begin.shape[1] - 1
    values, came = [begin], []
    for table, _, sizes in tables:
        value, row, layers = np.full_like(begin, np.inf), *np.zeros((2, *begin.shape), np.int64)
        with_a_stage(table, np.array(sizes, np.int64), values[-1], add, value, row, layers)
        values.append(value)
        came.append((row, layers))
    best = int(np.argmin([value[0, ranks] for value in values]))
    total = float(values[best][0, ranks])
    return total, _stages(tables, came, best, ranks) if np.isfinite(total) else []


def _stages(tables: list[tuple], came: list[tuple], count: int, ranks: int) -> list[tuple[int, int]]:
    """``(option, layers)`` of ``count`` stages, from the rows and the layers that ``came`` remembers of each."""
    found, i, k = [], 0, ranks
    for s in range(count, 0, -1):
        row, n = (int(of[i, k]) for of in came[s - 1])
        found.append((int(tables[s - 1][1][row, n]), n))
        i, k = i + n, k - tables[s - 1][2][row]
    return found


def choice_of(job: Job, sequences: int, stages: Sequence[tuple[Option, int]]) -> Choice:
    """The choice with these options and numbers of layers, and ``sequences`` in a microbatch of the pipeline; one mesh
    where all stages are alike and occupy all ranks."""
    options = [option for option, _ in stages]
    layers = tuple(n for _, n in stages)
    total, count = sum(layers), len(layers)
    even = layers == tuple(total // count + (s < total % count) for s in range(count))
    spread, first = () if even else layers, options[0]
    if len(set(options)) == 1 and count * first.ranks == job.ranks:
        mesh = Mesh({**({"pp": count} if count > 1 else {}), **first.mesh.sizes})
        return Choice(mesh, first.share, first.recompute, stage_layers=spread)
    kinds = tuple(option.recompute for option in options)
    common = kinds[0] if len(set(kinds)) == 1 else "none"
    return Choice(
        Mesh({"pp": count}),
        sequences,
        common,
        stage_layers=spread,
        stage_meshes=tuple(option.mesh for option in options),
        stage_recompute=kinds if len(set(kinds)) > 1 else (),
    )


def first_that_fits(
    name: str,
    job: Job,
    budget: PlanBudget,
    found: Iterable[Pipeline],
    plan: Callable[[Pipeline, float], tuple[float, list[tuple[int, int]]]],
) -> Choice:
    """The plan of least predicted time per sequence whose captured program fits in memory.

    ``plan(pipeline, limit)`` gives ``(ns of a microbatch, stages)`` with at most ``limit`` bytes by the cost model. The
    limit is lowered (:data:`TIGHTER`) for pipelines whose captured program needs more than the cost model says. Raises
    :class:`Unsupported` if nothing fits.
    """
    capacity, known = job.cluster.kind.memory_bytes, list(found)
    for share in TIGHTER:
        ranked = []
        for pipeline in known:
            ns, stages = plan(pipeline, share * capacity)
            if stages and np.isfinite(ns):
                chosen = [(pipeline.options[option], layers) for option, layers in stages]
                ranked.append((ns / pipeline.sequences, choice_of(job, pipeline.sequences, chosen)))
        for _, choice in sorted(ranked, key=lambda row: (row[0], row[1].order)):
            for one in (choice, *([replace(choice, reduce_each=True)] if job.may_reduce_each(choice) else [])):
                if job.valid(one) and (peak_bytes(budget.evaluator.program(one)) <= capacity).all():
                    return one
    raise Unsupported(f"{name}: no plan fits")


def in_progress(stages: int, microbatches: int) -> int:
    """Microbatches that a stage keeps, if it is the last but ``stages - 1`` of a 1F1B pipeline."""
    return min(stages, microbatches)


def with_borders(pipeline: Pipeline, option: int, last: int) -> np.ndarray:
    """Passes, transfers over both borders in both directions, and the share of what a step adds."""
    costs = pipeline.costs[option]
    borders = (2 if last else 4) * pipeline.sent_ns[option]
    return costs.pass_ns[last] + borders + costs.step_ns[last] / pipeline.microbatches


def bottleneck_plan(stage_ns: StageNs, progress: Callable[..., int]):
    """A ``plan`` for :func:`first_that_fits` that minimises the slowest stage. ``progress(stages, microbatches)``
    counts the microbatches in progress on a stage that is the last but ``stages - 1``."""

    def plan(pipeline: Pipeline, limit: float):
        job = pipeline.job
        return least_bottleneck(all_loads(pipeline, stage_ns, progress, limit), job.layers, job.ranks)

    return plan


def all_loads(pipeline: Pipeline, stage_ns: StageNs, progress: Callable[..., int], limit: float) -> list[tuple]:
    """:func:`loads` of the last stage, the last but one, and so on; ``stage_ns(pipeline, option, last)`` is the time
    of an option, float ``(layers + 1,)``. Stages with as many microbatches in progress are alike."""
    count = range(len(pipeline.options))
    end, before = (np.array([stage_ns(pipeline, option, last) for option in count]) for last in (1, 0))
    found: dict[int, tuple] = {}
    tables = []
    for stages in range(1, min(pipeline.job.layers, pipeline.job.ranks) + 1):
        kept = progress(stages, microbatches=pipeline.microbatches)
        if stages == 1:
            tables.append(loads(pipeline, end, kept, limit, last=True))
            continue
        if kept not in found:
            found[kept] = loads(pipeline, before, kept, limit, last=False)
        tables.append(found[kept])
    return tables
