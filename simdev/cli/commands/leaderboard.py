"""``simdev leaderboard``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import BENCHMARK, command
from simdev.cli.options import JsonOption, in_a_folder
from simdev.cli.tables import board_answer, print_answer, print_board, print_json
from simdev.errors import InvalidInput


@command("leaderboard", topic=BENCHMARK)
def leaderboard(
    folders: Annotated[list[Path], typer.Argument(help="Result folder of a bench; with --html, one or more.")],
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write a page, and the placements that it loads into a folder beside it.", callback=in_a_folder
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a leaderboard of placers or planners, or write it as a page."""
    from simdev.bench.plan_rows import read_folder

    if html is not None:
        from simdev.report.page import write_page

        write_page(folders, html)
        print_answer({"written": [str(html)]}, [str(html)], as_json)
        return
    if len(folders) > 1:
        raise InvalidInput("several folders need --html", source="leaderboard")
    (folder,) = folders
    rows = read_folder(folder)
    if as_json:
        print_json(board_answer(rows))
        return
    print_board(rows, folder)
