"""``simdev measured``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import REAL, command
from simdev.cli.steps import FolderOption
from simdev.cli.tables import print_table


@command("measured", topic=REAL)
def measured(
    folders: Annotated[list[Path], typer.Argument(help="Folders that simdev compare-real wrote.")],
    out: FolderOption,
) -> None:
    """Write one report over several comparisons with real runs."""
    from simdev.measure.report import report

    lines = report(folders, out)
    print_table(list(lines[0]), [list(line.values()) for line in lines])
    print(f"{out / 'report.md'}, {out / 'figures.csv'}, {out / 'scatter.png'}, {out / 'parts.png'}")
