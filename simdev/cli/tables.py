"""What commands print: tables, boards and schedules, and the same figures as JSON."""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simdev.bench.plan_rows import PlanRow
    from simdev.bench.rows import Row


def print_figures(
    header: Sequence[str], lines: Sequence[Sequence[str]], as_json: bool, written: Sequence[Path] = (), **more: object
) -> None:
    """A table and the files that were written. With ``as_json`` one JSON object instead: ``rows``, each with a value
    for every column (cells that are numbers become numbers, empty cells null), ``written`` and the values of
    ``more``."""
    if not as_json:
        print_table(list(header), [list(line) for line in lines])
        if written:
            print(", ".join(map(str, written)))
        return
    rows = [dict(zip(header, map(_value, line), strict=True)) for line in lines]
    print_json({"rows": rows, **more, **({"written": [str(path) for path in written]} if written else {})})


def read_figures(path: Path) -> list[dict]:
    """The rows of a CSV file, with cells as :func:`print_figures` gives them."""
    from simdev.files import open_text, table_errors

    with open_text(path) as file, table_errors(path):
        return [{name: _value(cell or "") for name, cell in line.items()} for line in csv.DictReader(file)]


def print_answer(facts: dict, lines: Iterable[str], as_json: bool) -> None:
    """The ``facts`` of an answer as JSON, or the ``lines`` that say them."""
    if as_json:
        print_json(facts)
        return
    for line in lines:
        print(line)


def print_json(document: object) -> None:
    """``document`` as JSON: what every ``--json`` prints. Numbers that JSON lacks (infinity, NaN) become null."""
    print(json.dumps(_finite(document), indent=1, allow_nan=False))


def _finite(value):
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_finite, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _value(cell: str) -> float | str | None:
    """What a cell says: a number if it is nothing else, None if it is empty."""
    text = cell.strip("*")
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?", text):
        text = text.replace(",", "")
    if not re.fullmatch(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?", text):
        return text or None
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)


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


def print_schedule(problem, placement, schedule, as_json: bool) -> None:
    from simdev.bench.run import overflow_text

    names = [device.name for device in problem.topology.devices]
    counts = [int((placement.devices == number).sum()) for number in range(len(names))]
    report = {
        "graph": problem.graph.name,
        "fingerprint": problem.graph.fingerprint,
        "topology": problem.topology.name,
        "cost_hash": problem.costs.hash,
        "placement": placement.hash,
        "feasible": bool(schedule.feasible),
        "step_time_s": schedule.step_ns / 1e9,
        "step_ns": int(schedule.step_ns),
        "comm_bytes": int(schedule.comm_bytes),
        "overflow": overflow_text(problem, schedule),
        "devices": {
            name: {"ops": count, "peak_memory_bytes": int(peak), "capacity_bytes": int(capacity)}
            for name, count, peak, capacity in zip(
                names, counts, schedule.peak_bytes, problem.topology.memory_bytes, strict=True
            )
        },
    }
    if as_json:
        print_json(report)
        return
    verdict = "" if schedule.feasible else f"  OUT OF MEMORY by bytes {report['overflow']}"
    print(f"{problem.graph.name} on {problem.topology.name}: {schedule.step_ns / 1e6:.3f} ms{verdict}")
    print(f"transfers {schedule.comm_bytes / 2**20:.1f} MiB")
    for name, device in report["devices"].items():
        peak, capacity = device["peak_memory_bytes"] / 2**30, device["capacity_bytes"] / 2**30
        print(f"  {name:8} {device['ops']:7} ops  peak {peak:8.3f} of {capacity:.3f} GiB")
