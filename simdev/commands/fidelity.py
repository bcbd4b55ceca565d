"""fidelity and physics-report: how far predictions are from what was measured, and what the rules change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.commands import OutOption, command, print_table


@command("fidelity")
def fidelity(
    data: Annotated[Path | None, typer.Option(help="Folder of public measured data (or SIMDEV_DATA).")] = None,
    out: OutOption = Path("report"),
) -> None:
    """Predict what public traces and tables measured; write the cases, the goals met and missed, and a picture."""
    from simdev import fidelity as report

    cases, notes = report.all_cases(report.data_folder(data))
    report.write(cases, notes, out)
    header = ["goal", "group", "cases", "left out", "mean %", "worst %", "goal %", "met"]
    lines = []
    for group in report.groups(cases):
        numbers = [f"{100 * value:.2f}" if value == value else "" for value in (group.error, group.worst, group.limit)]
        lines.append([group.goal, group.group, str(group.cases), str(group.left_out), *numbers, group.met])
    print_table(header, lines)
    print(f"{out / 'README.md'}, {out / 'cases.csv'}, {out / 'groups.csv'}, {out / 'scatter.png'}")


@command("physics-report")
def physics_report(
    folder: Annotated[Path, typer.Argument(help="Result folder of simdev bench.")] = Path("leaderboard/standard"),
    out: OutOption = Path("physics"),
) -> None:
    """Rank the placements of a result folder under the rules of other simulators; write the agreement."""
    import sys

    from simdev import physics_report as report

    cases, notes = report.read_cases(folder, lambda text: print(text, file=sys.stderr))
    report.write(cases, notes, out)
    print_table(report.SUMMARY, report.summary(cases))
    print(f"{out / 'README.md'}, {out / 'physics.csv'}, {out / 'times.csv'}")
