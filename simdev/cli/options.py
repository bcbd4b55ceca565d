"""Arguments and options that several commands take, and their checks."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from simdev.cli import completion
from simdev.errors import InvalidInput

EVALUATIONS = 200  # of a placer that a command runs once


class Engine(StrEnum):
    fast = "fast"
    reference = "reference"


class Order(StrEnum):
    fifo = "fifo"
    priority = "priority"
    program = "program"


class Contention(StrEnum):
    fifo = "fifo"
    none = "none"
    fair = "fair"


class Runtime(StrEnum):
    dataflow = "dataflow"
    eager = "eager"


class Aim(StrEnum):
    step = "step"
    throughput = "throughput"
    latency = "latency"
    serve = "serve"

    def named(self, schedule: str, microbatches: int) -> str:
        """The objective as rows name it."""
        parts = {Aim.throughput: ("throughput", schedule, microbatches), Aim.serve: ("serve", microbatches)}
        return "/".join(map(str, parts.get(self, (self.value,))))


class Backend(StrEnum):
    local = "local"
    dask = "dask"


def in_a_folder(out: Path | None) -> Path | None:
    """Refuse a file that cannot be written before the work is done, not after it."""
    if out is not None and out.is_dir():
        raise InvalidInput("is a folder; name a file", source=out)
    return writable(out)


def writable(out: Path | None) -> Path | None:
    """Refuse a file or folder that cannot be written before the work is done, not after it."""
    if out is not None and not os.access(out.parent, os.W_OK):
        raise InvalidInput("Permission denied" if out.parent.is_dir() else "No such file or directory", source=out)
    return out


def given(ctx: typer.Context, name: str) -> bool:
    """Whether the user gave the option of the parameter ``name``, even with its default value."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def positive(value: float | None, option: str) -> float | None:
    """``value``. Raises :class:`InvalidInput` that names the option if the value is not above zero."""
    if value is not None and not 0 < value < float("inf"):
        raise InvalidInput(f"{value} is not positive", source=option)
    return value


def refuse_chosen(model: str, options: bool) -> None:
    """Raise :class:`InvalidInput` if a model's id says what planners choose, which would be ignored. ``options``:
    whether the command has options for it."""
    from simdev.planners.job import CHOSEN
    from simdev.shelf import parse_id

    for name, value in parse_id(model)[2].items():
        if name in CHOSEN:
            remedy = f"pass --{name} {value}" if options else "leave it out"
            raise InvalidInput(f"a planner chooses it; {remedy}", source=model, field=name)


def dask_address(backend: Backend, scheduler: str | None) -> str | None:
    """The scheduler of the Dask cluster that is wanted, or None. Raises :class:`InvalidInput` if only one of the two
    options is given."""
    if (backend == Backend.dask) != (scheduler is not None):
        raise InvalidInput("--backend dask and --scheduler ADDRESS go together")
    return scheduler


GraphArgument = Annotated[
    str, typer.Argument(help="Workload id, graph file, or my_model.py:make_step.", autocompletion=completion.workloads)
]
TopologyArgument = Annotated[
    str, typer.Argument(help="Topology name (simdev list topologies) or TOML file.", autocompletion=completion.machines)
]
PlacerOption = Annotated[
    str | None,
    typer.Option("--placer", "-p", help="Placer id: name or name[param=value].", autocompletion=completion.placers),
]
OrderOption = Annotated[Order, typer.Option(help="The order in which a device takes its ready ops.")]
ContentionOption = Annotated[Contention, typer.Option(help="How transfers share a link.")]
RuntimeOption = Annotated[Runtime, typer.Option(help="What decides when an op may start.")]
CostsOption = Annotated[Path | None, typer.Option(help="Measured costs (simdev import --costs), before the model's.")]
FrameworkOption = Annotated[
    str,
    typer.Option(
        help="Software that runs the plan: eager, compiled, torchtitan[compiled], nemo[24.09] ... or a TOML file.",
        autocompletion=completion.frameworks,
    ),
]
BackendOption = Annotated[Backend, typer.Option(help="Processes of this machine, or a Dask cluster.")]
SchedulerOption = Annotated[str | None, typer.Option(help="Address of the Dask scheduler.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Where to write.", callback=in_a_folder)]

# of the commands that execute training steps
StepArgument = Annotated[
    str, typer.Argument(help="Workload id, or my_model.py:make_step.", autocompletion=completion.workloads)
]
MachineArgument = Annotated[
    str,
    typer.Argument(help="Topology of this computer (simdev profile writes one).", autocompletion=completion.machines),
]
SmallOption = Annotated[bool, typer.Option("--small", help="Use a size at which a step takes 0.1 to 2 s on one core.")]
RepeatsOption = Annotated[int, typer.Option(help="Number of measured steps.")]
SeedOption = Annotated[int, typer.Option(help="Seed of the parameters, the batch and the placements.")]
FolderOption = Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.", callback=writable)]
