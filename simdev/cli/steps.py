"""Arguments and options of the commands that execute training steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli import completion
from simdev.cli.options import in_a_folder

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
FolderOption = Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.", callback=in_a_folder)]
