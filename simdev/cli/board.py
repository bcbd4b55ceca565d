"""The board of a result folder on the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simdev.bench.plan_rows import PlanRow
    from simdev.bench.rows import Row
from simdev.cli.tables import print_table


def board_answer(rows: list[Row | PlanRow]) -> dict:
    """What ``--json`` prints of a board: the ranking, and the best result of each case."""
    from simdev.bench import score
    from simdev.bench.plan_rows import as_row

    found = list(map(as_row, rows))
    return {"ranking": score.ranking(found), "leaderboard": score.leaderboard(found)}


def print_board(rows: list[Row | PlanRow], out: Path) -> None:
    """The tables of rows of placers, of planners, or of both."""
    from simdev.bench.plan_rows import as_row
    from simdev.report.summary import LEGEND, PLAN_LEGEND, board, failures, headline

    found = [as_row(row) for row in rows]
    for title, header, lines in board(found):
        print(f"\n{title}")
        print_table(header, lines)
    plans = {row.objective == "plan" for row in found}
    print("\n".join([LEGEND] * (False in plans) + [PLAN_LEGEND] * (True in plans)))
    for line in failures(found):
        print(line, file=sys.stderr)
    print(headline(found, out))
