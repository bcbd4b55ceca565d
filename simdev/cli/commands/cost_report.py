"""``simdev study cost-report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli import completion
from simdev.cli.app import STUDY, command
from simdev.cli.options import JsonOption, OutOption, positive
from simdev.cli.tables import print_figures


@command("cost-report", topic=STUDY)
def cost_report(
    workloads: Annotated[
        list[str] | None,
        typer.Option("-w", "--workload", help="Workload (repeat).", autocompletion=completion.workloads),
    ] = None,
    topologies: Annotated[
        list[str] | None, typer.Option("-t", "--topology", help="Machine (repeat).", autocompletion=completion.machines)
    ] = None,
    placers: Annotated[
        list[str] | None, typer.Option("-p", "--placer", help="Placer (repeat).", autocompletion=completion.placers)
    ] = None,
    evaluations: Annotated[int, typer.Option(help="Simulations that a run may spend.")] = 500,
    out: OutOption = Path("costs"),
    as_json: JsonOption = False,
) -> None:
    """Report how the source of costs changes the ranks of placers.

    Ranks placers with costs before and after calibration; writes which of them change ranks.
    """
    import sys

    from simdev.studies import cost_report as report

    positive(evaluations, "--evaluations")
    cases, notes = report.compare(
        workloads or report.WORKLOADS,
        topologies or report.TOPOLOGIES,
        placers or report.PLACERS,
        evaluations,
        lambda text: print(text, file=sys.stderr),
    )
    report.write(cases, notes, out, evaluations)
    print_figures(report.HEADER, report.table(cases), as_json, [out / "README.md", out / "times.csv"])
