"""``simdev study reproduce``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import STUDY, command
from simdev.cli.options import JsonOption
from simdev.cli.tables import print_answer, read_figures


@command("reproduce", topic=STUDY)
def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            help="mirhoseini, placeto, gdp, tarnawski, piper, learned (controls of learned-search), "
            "extensions (of placeto) or speed."
        ),
    ],
    data: Annotated[Path | None, typer.Argument(help="tarnawski and piper: folder of the public inputs.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder (default: leaderboard/reproduced/NAME).")
    ] = None,
    scale: Annotated[str, typer.Option(help="tiny (seconds), small (as committed) or full (hours).")] = "small",
    as_json: JsonOption = False,
) -> None:
    """Repeat an experiment of a paper: tables, pictures and a report.

    If the command is interrupted, the same command resumes it.
    """
    from simdev.bench.release import TABLES
    from simdev.cli import progress
    from simdev.studies.reproduce import reproduce as make

    out = out or Path("leaderboard") / "reproduced" / name
    with progress.observer(0) as observer:
        report = make(name, out, scale=scale, observer=observer, data=data)
    tables = {path.stem: read_figures(path) for path in sorted(out.glob("*.csv")) if path.name not in TABLES}
    print_answer({"tables": tables, "written": [str(report)]}, [str(report)], as_json)
