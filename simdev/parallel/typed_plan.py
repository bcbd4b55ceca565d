"""A plan as it is typed: the arguments of ``simdev simulate-plan``, and the plan and the prices that they stand for.

Commands and studies make their plans here, so that the figure of a study is what the command prints.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from simdev.errors import InvalidInput, UnknownName
from simdev.parallel.cluster import load_cluster
from simdev.parallel.costs.float8 import Float8
from simdev.parallel.costs.timing import Prices
from simdev.parallel.framework import Framework, find_framework
from simdev.parallel.mesh import parse_meshes
from simdev.parallel.models import find_model
from simdev.parallel.plan import Plan

REDUCE = ("last", "each")  # microbatches with which gradients are reduced


@dataclass(frozen=True)
class TypedPlan:
    """The fields are the command's arguments and options, as text where the command takes text; empty: not given."""

    model: str
    cluster: str
    mesh: str
    microbatches: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    layers: str = ""
    recompute: str = ""
    framework: str = "eager"
    float8: str = ""
    reduce: str = "last"
    reshard: str = "always"

    @property
    def arguments(self) -> list[str]:
        """What follows ``simdev simulate-plan``: options with their defaults are left out."""
        found = [self.model, self.cluster, "--mesh", self.mesh]
        for one in fields(self)[3:]:
            value = getattr(self, one.name)
            if value != one.default:
                found += [f"--{one.name.replace('_', '-')}", str(value)]
        return found

    @property
    def software(self) -> Framework:
        return find_framework(self.framework)

    @cached_property
    def plan(self) -> Plan:
        """Raises :class:`InvalidInput` or :class:`UnknownName` naming what does not suit."""
        software = self.software
        model = self._model
        spec, parameters = find_model(model)
        whole, stages = parse_meshes(self.mesh)
        return Plan(
            spec,
            software.parameters_of(spec.name, parameters, model),
            software.on(load_cluster(self.cluster)),
            whole,
            self.microbatches,
            self.schedule,
            self.stages_per_rank,
            software.host,
            stage_layers=_counts(self.layers),
            stage_meshes=stages,
            stage_recompute=tuple(self.recompute.split("/")) if model == self.model and self.recompute else (),
            distributed_optimizer=software.distributed_optimizer,
            main_gradient_bytes=software.main_gradient_bytes,
            slowdown=software.slowdown,
            receive_buffers=software.receive_buffers,
            compiled=software.compiled,
            reduce_each=self._reduces_each,
            reshard=self.reshard,
        )

    @property
    def _model(self) -> str:
        """The model's id; the recomputation of a job whose stages share a mesh is one of its parameters."""
        if not self.recompute or "/" in self.mesh + self.recompute:
            return self.model
        name, _, typed = self.model.rstrip("]").partition("[")
        if "recompute" in (part.partition("=")[0].strip() for part in typed.split(",")):
            raise InvalidInput(f"{self.model} says how it recomputes", source="--recompute")
        return f"{name}[{typed},recompute={self.recompute}]"

    @property
    def _reduces_each(self) -> bool:
        if self.reduce not in REDUCE:
            raise UnknownName("--reduce", self.reduce, REDUCE)
        return self.reduce == "each"

    @property
    def scales(self) -> Float8 | None:
        """How linear layers multiply in FP8, if they do."""
        if not self.float8:
            return None
        plan = self.plan
        keep = int(plan.parameters.get("vocabulary", 0)) // plan.meshes[-1]["tp"]
        kept = plan.parameters.get("build") == "megatron"  # which keeps weights in FP8 through a step
        tokens = int(plan.parameters["microbatch"]) * int(plan.parameters["length"]) if kept else 0
        return Float8(self.float8, keep, tokens)

    def prices(self) -> Prices:
        """What kernels and collectives take."""
        plan = self.plan
        return self.software.prices(plan.cluster, self.scales, plan.parameters)


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split("/")) if text else ()
    except ValueError:
        raise InvalidInput(f"expected whole numbers with / between them, got {text!r}", source="--layers") from None
