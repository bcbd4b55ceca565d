"""leaderboard: the board of a result folder, as text or as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.commands import JsonOption, command, in_a_folder


@command("leaderboard")
def leaderboard(
    folder: Annotated[Path, typer.Argument(help="Result folder of a bench.")],
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page.", callback=in_a_folder)] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the leaderboard of a result folder, or write it as a page."""
    from simdev.bench import rows
    from simdev.bench import score as leaderboard
    from simdev.cli.commands.bench import print_board

    if html is not None:
        from simdev.report.page import write_page

        write_page(folder, html)
        print(html)
        return
    found = rows.read_rows(folder / "results.csv")
    if as_json:
        print(
            json.dumps({"ranking": leaderboard.ranking(found), "leaderboard": leaderboard.leaderboard(found)}, indent=1)
        )
        return
    print_board(found, folder)
