"""``simdev submit``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import BENCHMARK, command
from simdev.cli.options import OutOption


@command("submit", topic=BENCHMARK)
def submit(
    folder: Annotated[Path, typer.Argument(help="Result folder of a bench, or folder of placement files (JSON).")],
    out: OutOption,
    name: Annotated[str, typer.Option(help="Name of the placer, for placement files.")] = "",
) -> None:
    """Pack results or placements into one archive.

    simdev verify checks such an archive without running any code of its author.
    """
    from simdev.bench.submission import submit as pack

    print(f"{out}: {pack(folder, out, name=name)} rows; simdev verify {out} recomputes them")
