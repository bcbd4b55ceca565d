"""Tables on the terminal."""

from __future__ import annotations

import sys


def print_table(header: list[str], lines: list[list[str]]) -> None:
    """A table: boxed by rich on a terminal, aligned plain text elsewhere."""
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD)
        for number, name in enumerate(header):
            table.add_column(name, justify="left" if number == 0 else "right", no_wrap=number == 0)
        for line in lines:
            table.add_row(*line)
        Console().print(table)
        return
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    for line in [header, *lines]:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
