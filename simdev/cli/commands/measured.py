"""``simdev study measured``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import STUDY, command
from simdev.cli.options import JsonOption
from simdev.cli.steps import FolderOption
from simdev.cli.tables import print_figures


@command("measured", topic=STUDY)
def measured(
    folders: Annotated[list[Path], typer.Argument(help="Folders that simdev study compare-real wrote.")],
    out: FolderOption,
    as_json: JsonOption = False,
) -> None:
    """Write one report over several comparisons with real runs."""
    from simdev.measure.report import report

    lines = report(folders, out)
    print_figures(
        list(lines[0]),
        [list(line.values()) for line in lines],
        as_json,
        [out / "report.md", out / "figures.csv", out / "scatter.png", out / "parts.png"],
    )
