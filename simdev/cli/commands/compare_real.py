"""``simdev study compare-real``."""

from __future__ import annotations

from typing import Annotated

import typer

from simdev.cli.app import STUDY, command
from simdev.cli.options import JsonOption, positive
from simdev.cli.steps import FolderOption, MachineArgument, RepeatsOption, SeedOption, SmallOption, StepArgument
from simdev.cli.tables import print_figures


@command("compare-real", topic=STUDY)
def compare_real(
    step: StepArgument,
    machine: MachineArgument,
    out: FolderOption,
    placements: Annotated[int, typer.Option(help="Number of placements.")] = 40,
    repeats: RepeatsOption = 10,
    rounds: Annotated[int, typer.Option(help="Number of rounds; each runs all placements in another order.")] = 1,
    small: SmallOption = False,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare simulations with real runs on this computer.

    Simulates and runs many placements of a step, and reports how far apart the two are.
    """
    from simdev.measure.compare import compare_placements
    from simdev.measure.report import report

    for value, option in ((placements, "--placements"), (repeats, "--repeats"), (rounds, "--rounds")):
        positive(value, option)
    compare_placements(
        step, machine, out, placements=placements, repeats=repeats, rounds=rounds, seed=seed, small=small
    )
    lines = report([out], out)
    print_figures(
        list(lines[0]), [list(line.values()) for line in lines], as_json, [out / "report.md", out / "scatter.png"]
    )
