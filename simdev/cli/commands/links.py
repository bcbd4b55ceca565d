"""``simdev study links``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import STUDY, command
from simdev.cli.options import JsonOption, positive
from simdev.cli.tables import print_figures


@command("links", topic=STUDY)
def links(
    files: Annotated[list[Path], typer.Argument(help="Tables of vidur, vTrain or nccl-tests.")],
    hops: Annotated[int, typer.Option(help="Number of links on the measured route.")] = 1,
    ranges: Annotated[int, typer.Option(help="Largest number of size ranges.")] = 4,
    as_json: JsonOption = False,
) -> None:
    """Fit the latency and bandwidth of a link, by ranges of sizes.

    Prints them as a machine's file takes them.
    """
    from simdev.calibrate.links import fit_table, ranges_toml, read_links

    positive(hops, "--hops")
    positive(ranges, "--ranges")
    lines = []
    for file in files:
        for table in read_links(file):
            found = fit_table(table, ranges)
            if as_json:
                for begin, latency, rate in found.ranges:
                    row = begin, latency / hops / 1e3, rate / 1e9, 100 * found.error
                    lines.append([table.name, table.operation, *map(str, row)])
                continue
            print(f"# {table.name}, {table.operation}: {100 * found.error:.1f} % on sizes not fitted to")
            print(ranges_toml(found, hops))
    if as_json:
        print_figures(["table", "operation", "from_bytes", "latency_us", "gb_per_s", "error_percent"], lines, True)
