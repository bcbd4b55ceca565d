"""``simdev study perf``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli import completion
from simdev.cli.app import STUDY, command
from simdev.cli.options import JsonOption, OutOption, positive
from simdev.cli.tables import print_figures


@command("perf", topic=STUDY)
def perf(
    ops: Annotated[list[int] | None, typer.Option("--ops", help="About how many ops a graph has.")] = None,
    topology: Annotated[
        str, typer.Option("--topology", "-t", help="Topology name or TOML file.", autocompletion=completion.machines)
    ] = "p100x4",
    rounds: Annotated[int, typer.Option(help="How many times each is timed; the shortest time counts.")] = 3,
    out: OutOption = Path("perf"),
    as_json: JsonOption = False,
) -> None:
    """Time the engines side by side.

    The graphs are shaped like training steps. Writes perf.csv and perf.png.
    """
    from simdev.studies.perf import measure, write

    sizes = ops or [1000, 10000]
    for value, option in [*((size, "--ops") for size in sizes), (rounds, "--rounds")]:
        positive(value, option)
    rows = measure(sizes, topology, rounds=rounds)
    write(rows, out)
    header = ["contender", "placement", "ops", "us", "ns_per_op"]
    print_figures(
        header, [[str(row[name]) for name in header] for row in rows], as_json, [out / "perf.csv", out / "perf.png"]
    )
