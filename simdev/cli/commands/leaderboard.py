"""``simdev leaderboard``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import BENCHMARK, command
from simdev.cli.board import print_board
from simdev.cli.options import JsonOption, in_a_folder


@command("leaderboard", topic=BENCHMARK)
def leaderboard(
    folder: Annotated[Path, typer.Argument(help="Result folder of a bench.")],
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page.", callback=in_a_folder)] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a leaderboard, or write it as a page."""
    from simdev.bench import rows, score

    if html is not None:
        from simdev.report.page import write_page

        write_page(folder, html)
        print(html)
        return
    found = rows.read_rows(folder / "results.csv")
    if as_json:
        print(json.dumps({"ranking": score.ranking(found), "leaderboard": score.leaderboard(found)}, indent=1))
        return
    print_board(found, folder)
