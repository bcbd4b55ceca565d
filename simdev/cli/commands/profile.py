"""``simdev profile``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import REAL, command
from simdev.cli.options import FolderOption, JsonOption, RepeatsOption, SeedOption, SmallOption, positive
from simdev.cli.tables import print_answer
from simdev.errors import InvalidInput


@command("profile", topic=REAL)
def profile(
    out: FolderOption,
    steps: Annotated[list[str] | None, typer.Argument(help="Workload ids, or my_model.py:make_step.")] = None,
    ops: Annotated[
        Path | None,
        typer.Option(help="Cost table, or text with one op signature per line: measure these ops, each alone."),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", help="cpu:CORE or cuda:GPU; may be repeated. cpu and cuda name the first of each."),
    ] = None,
    repeats: RepeatsOption = 10,
    small: SmallOption = False,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure ops and transfers on this computer.

    Writes a topology file and a cost table.
    """
    from simdev.files import read_json
    from simdev.measure.profiles import profile_file, profile_machine
    from simdev.measure.programs import workers_named
    from simdev.problem.costs import load_measured

    positive(repeats, "--repeats")
    if bool(steps) == (ops is not None):
        raise InvalidInput("give either steps or --ops")
    workers = workers_named(device or ["cpu"])
    if ops is None:
        lines = profile_machine(steps or [], workers, out, repeats=repeats, small=small, seed=seed)
        left_out: list[str] = []
    else:
        lines, left_out = profile_file(ops, workers, out, repeats=repeats, seed=seed)
    facts: dict = {"costs": load_measured(out / "costs.csv")}
    if ops is None:
        facts |= read_json(out / "profile.json")
    print_answer(facts, lines, as_json)
    for line in left_out:
        print(line, file=sys.stderr)
