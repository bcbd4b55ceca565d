"""A training job that wants a plan, and what a planner chooses for it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import isqrt
from typing import Any

from simdev.errors import InvalidInput, SimdevError, UnknownName, quoted
from simdev.files import write_text
from simdev.graphs.parallel_model import ParallelModel, usual_precision
from simdev.parallel.capture.kept import Packed
from simdev.parallel.capture.stage import accumulates
from simdev.parallel.cluster import Cluster
from simdev.parallel.framework import Framework, find_framework
from simdev.parallel.mesh import AXES, Mesh
from simdev.parallel.orders import SPLIT, V_SHAPED
from simdev.parallel.plan import LIGHT, RESHARD, Plan

CHOSEN = ("microbatch", "recompute")  # parameters of a model that planners choose
RECOMPUTE = ("none", "selective", "full")  # less memory and more work from left to right
MEMORIES = ("reserved", "allocated")
LOOPED = ("interleaved", "looped-bfs")  # schedules with several stages on a pipeline rank
FORMAT, VERSION = "simdev plan", 1  # of a plan's file
LONG = 8192  # tokens; shorter sequences are not split among ranks (cp)
SHARE = 4096  # tokens that each rank of cp keeps of a sequence, in a wide space


@dataclass(frozen=True)
class Choice:
    """What a planner decides: the mesh, sequences of a microbatch, recomputation, schedule, stages on a pipeline rank.

    ``stage_layers`` is the number of layers on each stage; empty: layers are spread evenly. ``reduce_each``: gradients
    are reduced after each microbatch, not with the last one alone; a rank then keeps its shard of them. ``reshard``:
    when gathered parameters are freed (:class:`~simdev.parallel.plan.Plan`).

    ``stage_meshes`` gives each stage a mesh of its own; ``mesh`` then holds ``pp`` alone, ``microbatch`` counts the
    sequences of the whole pipeline, which the replicas of each stage divide, and ``stage_recompute`` may give each
    stage its own recomputation (empty: ``recompute`` for all).
    """

    mesh: Mesh
    microbatch: int = 1
    recompute: str = "none"
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    stage_layers: tuple[int, ...] = ()
    reduce_each: bool = False
    stage_meshes: tuple[Mesh, ...] = ()
    stage_recompute: tuple[str, ...] = ()
    reshard: str = "always"

    @property
    def mesh_text(self) -> str:
        """The mesh, or those of the stages."""
        return " / ".join(map(str, self.stage_meshes)) or str(self.mesh)

    def __str__(self) -> str:
        parts = [self.mesh_text, f"microbatch={self.microbatch}"]
        kinds = "/".join(self.stage_recompute) or self.recompute
        parts += [f"recompute={kinds}"] if kinds != "none" else []
        parts += ["reduce=each"] if self.reduce_each else []
        parts += [f"reshard={self.reshard}"] if self.reshard != "always" else []
        if self.mesh["pp"] > 1:
            parts.append(self.schedule + (f" x{self.stages_per_rank}" if self.stages_per_rank > 1 else ""))
        if self.stage_layers:
            parts.append(f"layers={'/'.join(map(str, self.stage_layers))}")
        return " ".join(parts)

    @property
    def order(self) -> tuple:
        """A total order of choices, so that ties between equally good plans are broken in the same way everywhere."""
        sizes = tuple(self.mesh[axis] for axis in ("pp", "tp", "cp", "ep", "dp_shard", "dp_replicate"))
        recompute = RECOMPUTE.index(self.recompute) if self.recompute in RECOMPUTE else len(RECOMPUTE)
        rest = self.schedule, self.stages_per_rank, self.stage_layers, self.reduce_each
        own = tuple(tuple(mesh[axis] for axis in AXES) for mesh in self.stage_meshes)
        return sizes, self.microbatch, recompute, *rest, own, self.stage_recompute, self.reshard

    def to_json(self) -> dict:
        """Plain values, from which :func:`choice_from` makes the choice again."""
        own: dict[str, Any] = {}
        if self.stage_meshes:
            own["stage_meshes"] = [_sizes(mesh) for mesh in self.stage_meshes]
        if self.stage_recompute:
            own["stage_recompute"] = list(self.stage_recompute)
        if self.reshard != "always":
            own["reshard"] = self.reshard
        return {
            "mesh": _sizes(self.mesh),
            "microbatch": self.microbatch,
            "recompute": self.recompute,
            "schedule": self.schedule,
            "stages_per_rank": self.stages_per_rank,
            "stage_layers": list(self.stage_layers),
            "reduce_each": self.reduce_each,
            **own,
        }

    def save(self, path: str | os.PathLike, job: Job, figures: Mapping[str, object] | None = None) -> None:
        """Write this plan of ``job`` into a file, which :func:`simdev.load_plan` reads. ``figures`` inform its readers.

        Raises :class:`InvalidInput` for a job without the ids of its model and its cluster, which
        :func:`simdev.make_job` keeps.
        """
        if not all(job.ids):
            message = "model and cluster were not named: make the job with simdev.make_job(model, cluster, batch)"
            raise InvalidInput(message, source="job", field="ids")
        document = {
            "format": FORMAT,
            "version": VERSION,
            "model": job.ids[0],
            "cluster": job.ids[1],
            "batch": job.batch,
            "framework": job.framework,
            **({"ranks": job.ranks} if job.ranks != job.cluster.ranks else {}),
            "choice": self.to_json(),
            "figures": dict(figures or {}),
        }
        write_text(path, json.dumps(document, indent=1) + "\n")


def _sizes(mesh: Mesh) -> dict[str, int]:
    return {axis: size for axis, size in mesh.sizes.items() if size > 1}


def choice_from(values: Mapping) -> Choice:
    """The choice that :meth:`Choice.to_json` has written. Raises :class:`InvalidInput` naming the field."""
    wanted = {"mesh": dict, "microbatch": int, "recompute": str, "schedule": str, "stages_per_rank": int}
    for name, kind in {**wanted, "stage_layers": list}.items():
        if not isinstance(values.get(name), kind) or isinstance(values[name], bool):
            raise InvalidInput(f"expected {kind.__name__}, got {quoted(values.get(name))}", source="plan", field=name)
    for name in ("microbatch", "stages_per_rank"):
        if values[name] < 1:
            raise InvalidInput(f"expected a whole number from 1 on, got {values[name]}", source="plan", field=name)
    layers = values["stage_layers"]
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in layers):
        raise InvalidInput("expected whole numbers from 0 on", source="plan", field="stage_layers")
    each = values.get("reduce_each")
    if not isinstance(each, bool):
        raise InvalidInput(f"expected true or false, got {quoted(each)}", source="plan", field="reduce_each")
    given = {name: values[name] for name in list(wanted)[1:]}
    meshes = tuple(Mesh(sizes) for sizes in _listed(values, "stage_meshes", dict))
    kinds = tuple(_listed(values, "stage_recompute", str))
    reshard = values.get("reshard", "always")
    if not isinstance(reshard, str) or reshard not in RESHARD:
        raise UnknownName("reshard", str(reshard), RESHARD, source="plan")
    return Choice(Mesh(values["mesh"]), **given, stage_layers=tuple(layers), reduce_each=each, stage_meshes=meshes,
                  stage_recompute=kinds, reshard=reshard)  # fmt: skip


def _listed(values: Mapping, name: str, kind: type) -> list:
    """What each stage has of its own; nothing in rows of choices with one mesh."""
    found = values.get(name, [])
    if not isinstance(found, list) or not all(isinstance(value, kind) for value in found):
        raise InvalidInput(f"expected a list of {kind.__name__}, got {found!r:.60}", source="plan", field=name)
    return found


@dataclass(frozen=True)
class Job:
    """A model that is to be trained on ``ranks`` accelerators of ``cluster`` with ``batch`` sequences in a step.

    ``parameters`` are those of the model; ``microbatch`` and ``recompute`` in them are replaced by each choice.
    ``framework`` names the software that runs it (:mod:`simdev.parallel.framework`). ``microbatches`` are the
    microbatch sizes, ``recomputes`` the kinds of recomputation and ``schedules`` the schedules that planners may
    choose. ``memory`` is what decides whether a plan fits: ``reserved`` or ``allocated``.

    ``wide`` is the space of published plans (:meth:`choices`): parameters that stay gathered, pipelines that reduce
    gradients after each microbatch, stages down to one layer, light end stages, context parallelism of sequences that
    leave :data:`SHARE` tokens to each rank, and experts and long sequences across nodes.

    ``ids`` are those of the model and the cluster, as ``simdev plan`` takes them.
    """

    model: ParallelModel
    parameters: Mapping[str, Any]
    cluster: Cluster
    batch: int
    ranks: int = 0
    framework: str = "eager"
    microbatches: tuple[int, ...] = (1, 2, 4, 8)
    recomputes: tuple[str, ...] = RECOMPUTE
    schedules: tuple[str, ...] = ("1f1b", "interleaved")
    memory: str = "reserved"
    wide: bool = False
    ids: tuple[str, str] = field(default=("", ""), compare=False)

    def __post_init__(self):
        if not self.ranks:
            object.__setattr__(self, "ranks", self.cluster.ranks)
        if self.batch < 1:
            raise InvalidInput(f"expected a whole number from 1 on, got {self.batch}", source="job", field="batch")
        if self.memory not in MEMORIES:
            raise UnknownName("memory", self.memory, MEMORIES, source="job")
        if not self.microbatches or min(self.microbatches) < 1:
            raise InvalidInput("expected sizes from 1 on", source="job", field="microbatches")
        object.__setattr__(self, "cluster", self.software.on(self.cluster))
        self.cluster.check(self.ranks)

    def __hash__(self) -> int:
        return hash((self.model.name, self.cluster, self.batch, self.ranks))

    @property
    def name(self) -> str:
        """The model and the cluster, for readers."""
        return f"{self.ids[0] or self.model.name} on {self.ids[1] or self.cluster.name}"

    @property
    def software(self) -> Framework:
        """The framework. Raises :class:`UnknownName`."""
        return find_framework(self.framework)

    @property
    def layers(self) -> int:
        return int(self.parameters["layers"])

    @cached_property
    def known_recomputes(self) -> tuple[str, ...]:
        """Those of ``recomputes`` that the model has."""
        return tuple(kind for kind in self.recomputes if self._knows(kind))

    def _knows(self, recompute: str) -> bool:
        if "recompute" not in self.parameters:
            return recompute == "none"
        try:
            if self.model.checks is not None:
                self.model.checks({**self.parameters, "recompute": recompute}, Mesh({}))
        except SimdevError:
            return False
        return True

    def check(self) -> None:
        """Raise :class:`InvalidInput` if the job has no plan at all, with the reason and a remedy."""
        kinds = self.with_changes(recomputes=RECOMPUTE).known_recomputes
        if not kinds and self.model.checks is not None:  # no kind of recomputation is to blame: the sizes are
            self.model.checks({**self.parameters, "recompute": RECOMPUTE[0]}, Mesh({}))
        wrong = [kind for kind in self.recomputes if kind not in RECOMPUTE and not self._knows(kind)]
        if wrong or not self.known_recomputes:
            known, given = ", ".join(kinds), ",".join(wrong or self.recomputes)
            raise InvalidInput(f"{self.model.name} knows {known}, not {given!r}", source="--recompute")
        if next(self.choices(), None) is not None:
            return
        each = self.ranks * min(self.microbatches)
        twice = _divisors(2 * each)  # a packed model may have plans of two microbatches alone
        least = next((n for n in twice if next(self.with_changes(batch=n).choices(), None) is not None), 0)
        what = f"no plan of {self.model.name} on {self.ranks} GPUs"
        packed = isinstance(self.model.function, Packed)
        if least:
            near = max(1, round(self.batch / least)) * least
            message = f"{what} divides {self.batch} sequences; pass a multiple of {least}, such as --batch {near}"
            raise InvalidInput(message, source="job", field="batch")
        if packed:
            raise InvalidInput(f"{what} is possible; not offered: {'; '.join(self.model.notes)}", source="job")
        try:  # the plan that asks for least says what is wrong
            self.with_changes(batch=each).plan(
                Choice(self.meshes()[0], min(self.microbatches), self.known_recomputes[0])
            )
        except SimdevError as error:
            raise InvalidInput(f"{what} is possible: {error}", source="job") from None
        raise InvalidInput(f"{what} is possible; pass other --microbatch or --batch", source="job")

    def plan(self, choice: Choice, any_precision: bool = False) -> Plan:
        """The plan of a choice. Raises :class:`InvalidInput` if the choice does not suit model, cluster or batch, and
        unless ``any_precision`` if weights would have other data types than in the job's other plans."""
        mesh = choice.mesh
        ranks = sum(stage.ranks for stage in choice.stage_meshes)
        if ranks > self.ranks:
            message = f"the stages have {ranks} ranks, the job {self.ranks}"
            raise InvalidInput(message, source="plan", field="stage_meshes")
        if mesh.ranks != self.ranks and not choice.stage_meshes:
            raise InvalidInput(f"{mesh} has {mesh.ranks} ranks, the job {self.ranks}", source="plan", field="mesh")
        at_once = mesh.replicas * choice.microbatch
        if self.batch % at_once:
            raise InvalidInput(
                f"{self.batch} sequences do not divide by {mesh.replicas} replicas with {choice.microbatch} each",
                source="plan",
                field="microbatch",
            )
        parameters = {**self.parameters, "microbatch": choice.microbatch}
        if "recompute" in parameters:
            parameters["recompute"] = choice.recompute
        elif choice.recompute != "none" or choice.stage_recompute:
            raise InvalidInput(f"{self.model.name} does not recompute", source="plan", field="recompute")
        plan = Plan(
            self.model,
            parameters,
            self.cluster,
            mesh,
            self.batch // at_once,
            choice.schedule,
            choice.stages_per_rank,
            self.software.host,
            stage_layers=choice.stage_layers,
            reduce_each=choice.reduce_each,
            stage_meshes=choice.stage_meshes,
            stage_recompute=choice.stage_recompute,
            distributed_optimizer=self.software.distributed_optimizer,
            main_gradient_bytes=self.software.main_gradient_bytes,
            reshard=choice.reshard,
            slowdown=self.software.slowdown,
            receive_buffers=self.software.receive_buffers,
            compiled=self.software.compiled,
        )
        plan.parts  # noqa: B018  raises where a stage would have no layer
        if not any_precision and not all(map(self.same_precision, choice.stage_meshes or (mesh,))):
            raise InvalidInput(self._other_precision(mesh), source=self.model.name, field="mesh")
        return plan

    def valid(self, choice: Choice) -> bool:
        """Whether the choice suits model, cluster and batch."""
        try:
            self.plan(choice)
        except SimdevError:
            return False
        return True

    def meshes(self) -> list[Mesh]:
        """Every mesh of the job's ranks along the axes that the model knows.

        Tensor, context and expert parallelism stay in a node, and sequences of at most 8,192 tokens are not split,
        unless the job is ``wide``.
        """
        inside, known = [n for n in _divisors(self.cluster.gpus) if self.ranks % n == 0], self.model.axes
        found = []
        for pp, tp, cp, ep in product(
            [n for n in _divisors(self.ranks) if n <= self.layers] if self.model.pipeline else [1],
            inside if "tp" in known else [1],
            self.spreads("cp"),
            self.spreads("ep"),
        ):
            data, rest = divmod(self.ranks, pp * tp * cp * ep)
            if rest or not self.may_spread(tp, cp, ep):
                continue
            for shard in _divisors(data) if "dp_shard" in known else [1]:
                replicate = data // shard
                if replicate > 1 and "dp_replicate" not in known:
                    continue
                sizes = {"pp": pp, "dp_replicate": replicate, "dp_shard": shard, "cp": cp, "ep": ep, "tp": tp}
                mesh = Mesh({axis: size for axis, size in sizes.items() if size > 1})
                if self.same_precision(mesh):
                    found.append(mesh)
        return found

    def spreads(self, axis: str) -> list[int]:
        """The sizes of ``cp`` or ``ep`` that planners may choose."""
        if axis not in self.model.axes:
            return [1]
        length, most = int(self.parameters["length"]), int(self.parameters.get("experts", 0))
        inside = [n for n in _divisors(self.cluster.gpus) if self.ranks % n == 0]
        if axis == "cp":
            found = inside if length > LONG else [1]
            beyond = [n for n in _divisors(self.ranks) if length // n >= SHARE]
        else:
            found, beyond = inside, [n for n in _divisors(self.ranks) if most and most % n == 0]
        return sorted({*found, *beyond}) if self.wide else found

    def may_spread(self, tp: int, cp: int, ep: int) -> bool:
        """Whether planners may choose these sizes together: inside a node; in a wide job also experts alone across
        nodes, and sequences once tensor parallelism fills a node."""
        gpus = self.cluster.gpus
        across = (ep > gpus and tp == cp == 1) or (cp > 1 and tp == gpus and ep == 1)
        return tp * cp * ep <= gpus or (self.wide and across)

    def same_precision(self, mesh: Mesh) -> bool:
        """Whether weights and computation have the data types that they have if parameters are sharded; other types
        make another training job. Most models keep float32 weights only if they are sharded
        (:func:`~simdev.graphs.parallel_model.usual_precision`). A distributed optimizer keeps a float32 copy."""
        if self.software.distributed_optimizer:
            return mesh["dp_shard"] == 1
        if "dp_shard" not in self.model.axes or mesh["dp_shard"] > 1 or self.ranks == 1:
            return True
        kind = self.model.precision
        return kind is not usual_precision and kind(mesh) == kind(Mesh({"dp_shard": self.ranks}))

    def _other_precision(self, mesh: Mesh) -> str:
        """What to type where :meth:`same_precision` is false."""
        typed = f"simdev simulate-plan --mesh {mesh} simulates the plan as it is"
        if self.software.distributed_optimizer:
            return f"{self.framework} shards the optimizer and no parameters: leave dp_shard out of the mesh ({typed})"
        return (
            "a plan that shards no parameters keeps weights in other data types than the plans of this job: "
            f"add dp_shard=2 or more to the mesh ({typed})"
        )

    def choices(self, base: bool = False) -> Iterator[Choice]:
        """Every plan of the job with stages of equal depth, in a fixed order; of a wide job also those whose end stages
        have a layer less. ``base``: each plan of which :meth:`deeper` makes others is given without them."""
        for mesh in self.meshes():
            for microbatch, recompute in product(self.microbatches, self.known_recomputes):
                if mesh["cp"] > 1 and recompute == "full" and int(self.parameters["length"]) <= LONG:
                    continue  # which leaves little to divide
                for schedule in self.schedules if mesh["pp"] > 1 else ("1f1b",):
                    if schedule in SPLIT and recompute != "none":
                        continue  # PyTorch recomputes a layer for each group of weights
                    choice = Choice(mesh, microbatch, recompute, schedule, stages_of(schedule))
                    for one in (choice,) if base else (choice, *self.deeper(choice)):
                        if self.valid(one):
                            yield one
                            yield from self._gathering(one)
                        elif isinstance(self.model.function, Packed):  # some plans are packed and others are not
                            yield from filter(self.valid, self._gathering(one))

    def deeper(self, choice: Choice) -> Iterator[Choice]:
        """The pipeline with more stages on each rank, as many as divide the layers, and with light end stages; nothing
        unless the job is wide."""
        ranks, least = choice.mesh["pp"], stages_of(choice.schedule)
        if not self.wide or ranks == 1:
            return
        most = (self.layers + LIGHT) // ranks if choice.schedule in LOOPED else least
        for chunks in range(least, most + 1):
            stages, light = ranks * chunks, -self.layers % (ranks * chunks)
            each = (self.layers + light) // stages
            if chunks > least and light <= LIGHT:
                yield replace(choice, stages_per_rank=chunks)
            if 0 < light <= LIGHT and each > 1:  # with one layer a stage, light ends are the default
                layers = each - (light == LIGHT), *[each] * (stages - 2), each - 1
                yield replace(choice, stages_per_rank=chunks, stage_layers=layers)

    def _gathering(self, choice: Choice) -> Iterator[Choice]:
        """The choice with other times to reduce gradients and to free gathered parameters."""
        reduces = self.may_reduce_each(choice)
        if reduces:
            yield replace(choice, reduce_each=True)
        if not self.wide or choice.mesh["dp_shard"] == 1 or choice.schedule in SPLIT:
            return
        yield replace(choice, reshard="never")
        if reduces or choice.mesh["pp"] > 1:
            yield replace(choice, reduce_each=True, reshard="never")

    def may_reduce_each(self, choice: Choice) -> bool:
        """Whether it matters if gradients are reduced after each microbatch: sharded ones of a model that would keep
        whole gradients otherwise, in a step of several microbatches without a pipeline."""
        mesh = choice.mesh
        if mesh["pp"] > 1 or mesh["dp_shard"] == 1 or self.batch <= mesh.replicas * choice.microbatch:
            return False
        return accumulates(self.model, tuple(sorted(self.parameters.items())))

    def with_changes(self, **changes) -> Job:
        """The job with other fields."""
        return replace(self, **changes)


def stages_of(schedule: str) -> int:
    """The least number of stages on a pipeline rank that planners choose for a schedule."""
    return 2 if schedule in (*LOOPED, *V_SHAPED) else 1


def _divisors(n: int) -> list[int]:
    low = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


class SharedByPlans:
    """A job, the prices of its kernels and collectives, and what is known of its programs by keys of those who compute
    it: stages as captured from PyTorch, segments as timed."""

    def __init__(self, job: Job):
        self.job = job
        self.prices = job.software.prices(job.cluster, parameters=job.parameters)
        self.known: dict[tuple, Any] = {}
