"""``simdev curve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli import completion
from simdev.cli.app import BENCHMARK, command
from simdev.cli.options import JsonOption, in_a_folder
from simdev.cli.tables import print_json, print_table


@command("curve", topic=BENCHMARK)
def curve(
    folder: Annotated[Path, typer.Argument(help="Result folder of a bench.")],
    workload: Annotated[
        str, typer.Option("--workload", "-w", help="Workload, as in the results.", autocompletion=completion.workloads)
    ],
    topology: Annotated[
        str, typer.Option("--topology", "-t", help="Topology, as in the results.", autocompletion=completion.machines)
    ],
    budget: Annotated[str | None, typer.Option("--budget", "-b", help="Budget, if the results hold several.")] = None,
    placer: Annotated[
        list[str] | None,
        typer.Option("--placer", "-p", help="Placer id (default: all).", autocompletion=completion.placers),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Draw it (PNG, SVG or PDF).", callback=in_a_folder)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show how good each search was after how much work.

    Step time against evaluations and against seconds, as a table and (with --out) as a picture.
    """
    from simdev.report.curve import HEADER, draw, searches, table

    found = searches(folder, workload, topology, budget=budget, placers=placer or ())
    if out is not None:
        draw(found, f"{workload} on {topology}", out)
    if as_json:
        print_json([{"placer": run.placer, "seed": run.seed, "points": run.points} for run in found])
        return
    print_table(list(HEADER), [list(line.values()) for line in table(found)])
    if out is not None:
        print(out)
