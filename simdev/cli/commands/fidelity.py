"""``simdev study fidelity``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import STUDY, command
from simdev.cli.options import JsonOption, OutOption
from simdev.cli.tables import print_figures


@command("fidelity", topic=STUDY)
def fidelity(
    data: Annotated[Path | None, typer.Option(help="Folder of public measured data (or SIMDEV_DATA).")] = None,
    out: OutOption = Path("report"),
    cache: Annotated[Path | None, typer.Option(help="Folder that keeps the cases of unchanged files.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, max=64, help="Parts computed at the same time.")] = 2,
    as_json: JsonOption = False,
) -> None:
    """Compare predictions with public measurements.

    Writes cases, goals met and missed, and a picture.
    """
    from simdev.cli import progress
    from simdev.studies.fidelity import cases as report
    from simdev.studies.fidelity.report import write

    with progress.steps("fidelity") as tell:
        cases, notes = report.all_cases(report.data_folder(data), cache or report.cache_folder(), tell, jobs)
    write(cases, notes, out)
    header = ["goal", "group", "cases", "left out", "mean %", "worst %", "goal %", "met"]
    lines = []
    for group in report.groups(cases):
        numbers = [f"{100 * value:.2f}" if value == value else "" for value in (group.error, group.worst, group.limit)]
        lines.append([group.goal, group.group, str(group.cases), str(group.left_out), *numbers, _bold(group.met)])
    print_figures(
        header, lines, as_json, [out / "README.md", out / "cases.csv", out / "groups.csv", out / "scatter.png"]
    )


def _bold(met: str) -> str:
    """A missed goal in bold."""
    return "**no**" if met == "no" else met
