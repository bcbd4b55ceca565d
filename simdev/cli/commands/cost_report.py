"""``simdev cost-report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import command
from simdev.cli.options import OutOption, positive
from simdev.cli.tables import print_table


@command("cost-report", hidden=True)
def cost_report(
    workloads: Annotated[list[str] | None, typer.Option("-w", "--workload", help="Workload (repeat).")] = None,
    topologies: Annotated[list[str] | None, typer.Option("-t", "--topology", help="Machine (repeat).")] = None,
    placers: Annotated[list[str] | None, typer.Option("-p", "--placer", help="Placer (repeat).")] = None,
    evaluations: Annotated[int, typer.Option(help="Simulations that a run may spend.")] = 500,
    out: OutOption = Path("costs"),
) -> None:
    """Rank placers with costs before and after calibration; write which of them change ranks."""
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
    print_table(report.HEADER, report.table(cases))
    print(f"{out / 'README.md'}, {out / 'times.csv'}")
