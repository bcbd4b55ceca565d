"""gaps: how far the best placement of each instance is from its proven bound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.commands import JsonOption, command


@command("gaps", hidden=True)
def gaps(
    folder: Annotated[Path, typer.Argument(help="Result folder of a bench.")],
    as_json: JsonOption = False,
) -> None:
    """Print, for each workload on each machine, the best step time, the proven bound and the gap between them."""
    from simdev.bench import rows
    from simdev.bench import score as leaderboard

    found = leaderboard.gaps(rows.read_rows(folder / "results.csv"))
    if as_json:
        print(json.dumps(found, indent=1))
        return
    print("| " + " | ".join(leaderboard.GAPS) + " |")
    print("|" + "---|" * len(leaderboard.GAPS))
    for line in found:
        print("| " + " | ".join(line.values()) + " |")
