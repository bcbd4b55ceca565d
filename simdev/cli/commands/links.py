"""``simdev links``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import REAL, command
from simdev.cli.options import positive


@command("links", topic=REAL)
def links(
    files: Annotated[list[Path], typer.Argument(help="Tables of vidur, vTrain or nccl-tests.")],
    hops: Annotated[int, typer.Option(help="Number of links on the measured route.")] = 1,
    ranges: Annotated[int, typer.Option(help="Largest number of size ranges.")] = 4,
) -> None:
    """Fit the latency and bandwidth of a link, by ranges of sizes.

    Prints them as a machine's file takes them.
    """
    from simdev.calibrate.links import fit_table, ranges_toml, read_links

    positive(hops, "--hops")
    positive(ranges, "--ranges")
    for file in files:
        for table in read_links(file):
            found = fit_table(table, ranges)
            print(f"# {table.name}, {table.operation}: {100 * found.error:.1f} % on sizes not fitted to")
            print(ranges_toml(found, hops))
