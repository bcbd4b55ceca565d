"""``simdev study physics-report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import STUDY, command
from simdev.cli.options import JsonOption, OutOption
from simdev.cli.tables import print_figures


@command("physics-report", topic=STUDY)
def physics_report(
    folder: Annotated[Path, typer.Argument(help="Result folder of simdev bench.")] = Path("leaderboard/standard"),
    out: OutOption = Path("physics"),
    as_json: JsonOption = False,
) -> None:
    """Report how the rules of other simulators change the ranks.

    Ranks stored placements under each; writes how far the rankings agree.
    """
    import sys

    from simdev.studies import physics as report

    cases, notes = report.read_cases(folder, lambda text: print(text, file=sys.stderr))
    report.write(cases, notes, out)
    print_figures(
        report.SUMMARY, report.summary(cases), as_json, [out / "README.md", out / "physics.csv", out / "times.csv"]
    )
