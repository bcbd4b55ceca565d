"""reproduce: the papers' experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.commands import command


@command("reproduce", hidden=True)
def reproduce(
    name: Annotated[str, typer.Argument(help="mirhoseini, placeto, gdp, or speed (of the learned placers).")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder (default: leaderboard/reproduced/NAME).")
    ] = None,
    scale: Annotated[str, typer.Option(help="tiny (seconds), small (as committed) or full (hours).")] = "small",
) -> None:
    """Make an experiment of a paper again: tables, pictures and a report; stopped at any time, it goes on."""
    from simdev.cli import progress
    from simdev.studies.reproduce import reproduce as make

    with progress.observer(0) as observer:
        print(make(name, out or Path("leaderboard") / "reproduced" / name, scale=scale, observer=observer))
