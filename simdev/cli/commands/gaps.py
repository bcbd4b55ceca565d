"""``simdev gaps``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import BENCHMARK, command
from simdev.cli.options import JsonOption


@command("gaps", topic=BENCHMARK)
def gaps(
    folder: Annotated[Path, typer.Argument(help="Result folder of a bench.")],
    as_json: JsonOption = False,
) -> None:
    """Print how far the best result of each case is from its bound."""
    from simdev.bench import rows, score

    found = score.gaps(rows.read_rows(folder / "results.csv"))
    if as_json:
        print(json.dumps(found, indent=1))
        return
    print("| " + " | ".join(score.GAPS) + " |")
    print("|" + "---|" * len(score.GAPS))
    for line in found:
        print("| " + " | ".join(line.values()) + " |")
