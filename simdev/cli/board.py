"""The board of a result folder on the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simdev.bench.rows import Row
from simdev.cli.tables import print_table


def print_board(found: list[Row], out: Path) -> None:
    from simdev.report.summary import LEGEND, board, failures, headline

    for title, header, lines in board(found):
        print(f"\n{title}")
        print_table(header, lines)
    print(LEGEND)
    for line in failures(found):
        print(line, file=sys.stderr)
    print(headline(found, out))
