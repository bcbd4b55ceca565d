"""Check the published boards, and the tables of the pages that quote them.

``python tests/tools/boards.py [--sample N] [BOARD ...]``. ``simdev verify`` recomputes every row of every board (or
``--sample`` rows of each) with the fast engine. The boards ``order`` and ``long`` must hold, for each of their cases, a
placement at least as fast as the best of ``standard``. The tables of README.md and docs/pages/results.md must follow
from the rows of ``standard``: ``--write`` brings them up to date, and ``--tables`` checks nothing else. The exit code
is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from simdev.bench import rows, score

ROOT = Path(__file__).parents[2]
BOARDS = ROOT / "leaderboard"
STANDARD = BOARDS / "standard"
PAGES = {"README.md": False, "docs/pages/results.md": True}  # whether the page names every placer
TABLE = re.compile(r"^\| placer \|.*\n(?:\|.*\n)+", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("board", nargs="*", help="folders of leaderboard/ (default: all)")
    parser.add_argument("--sample", type=int, help="verify that many rows of each board, drawn evenly")
    parser.add_argument("--tables", action="store_true", help="only compare the tables of the pages")
    parser.add_argument("--write", action="store_true", help="bring the tables of the pages up to date")
    options = parser.parse_args()
    wrong = 0
    if not options.tables:
        for folder in boards(options.board):
            wrong += not holds(folder, options.sample)
        for name in ("order", "long"):
            for case, ns, best in slower_than_standard(BOARDS / name):
                print(f"{name}: {'/'.join(case)} takes {ns} ns, {best} ns in the board standard")
                wrong += 1
    for page, whole in PAGES.items():
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        fresh = with_table(text, STANDARD, whole)
        if fresh != text:
            print(f"{page}: the table {'was' if options.write else 'is not'} brought up to date with the rows")
            wrong += not options.write
        if options.write:
            path.write_text(fresh, encoding="utf-8")
    return 1 if wrong else 0


def boards(names: list[str]) -> list[Path]:
    """The folders of ``leaderboard/`` that ``simdev verify`` reads: those of these names, or all."""
    found = {path.parent for name in ("results.csv", "plans.csv") for path in BOARDS.glob(f"*/{name}")}
    return sorted(path for path in found if not names or path.name in names)


def holds(folder: Path, sample: int | None) -> bool:
    """Whether ``simdev verify`` finds no difference; it prints what it finds."""
    command = [sys.executable, "-m", "simdev", "verify", str(folder), "--engine", "fast"]
    command += ["--sample", str(sample)] if sample else []
    return subprocess.run(command, stdin=subprocess.DEVNULL).returncode == 0


def best_times(folder: Path) -> dict[tuple[str, str], int]:
    """The shortest step time of each case of a board, ns, by workload and topology."""
    best: dict[tuple[str, str], int] = {}
    for row in rows.read_rows(folder / "results.csv"):
        if row.step_ns is not None:
            case = row.workload, row.topology
            best[case] = min(row.step_ns, best.get(case, row.step_ns))
    return best


def slower_than_standard(folder: Path) -> list[tuple[tuple[str, str], int, int]]:
    """The cases in which a searched board lost a result of ``standard``: case, its best step time, the better one, ns.

    On the machines of ``order`` a placement can repeat its schedule of ``fifo``.
    """
    best = best_times(STANDARD)
    return [(case, ns, best[case]) for case, ns in best_times(folder).items() if ns > best[case]]


def with_table(text: str, folder: Path, whole: bool) -> str:
    """A page with the first table that has a column "placer" made again from the rows of ``folder``.

    The table keeps its columns, which are workloads on ``p100x4``. It keeps its placers, unless it is ``whole``.
    """
    head, rule, *lines = TABLE.search(text)[0].splitlines()
    _, _, *workloads, _, _, _ = (cell.strip() for cell in head.split("|"))
    shown = [line.split("|")[1].strip(" `") for line in lines]
    expected = expected_lines(folder, workloads)
    names = [name for name in expected if whole or name in shown]
    return TABLE.sub("\n".join([head, rule, *(expected[name] for name in names)]).replace("\\", r"\\") + "\n", text, 1)


def expected_lines(folder: Path, workloads: list[str], topology: str = "p100x4") -> dict[str, str]:
    """The lines of such a table, best placer first: step times in ms, mean ratio to the best, how many cases fit."""
    found = rows.read_rows(folder / "results.csv")
    lines_there = (line for line in score.leaderboard(found) if line["topology"] == topology)
    case = {(line["workload"], line["placer"]): line for line in lines_there}
    lines = {}
    for place in score.ranking(found):
        name = place["placer"]
        cells = [milliseconds(case[workload, name], "step_time_s") for workload in workloads]
        cells += [f"{float(place['geomean_ratio_to_best']):.3f}", f"{place['solved']}/{place['instances']}"]
        lines[name] = f"| `{name}` | {' | '.join(cells)} |"
    bounds = [milliseconds(case[workload, "single-gpu"], "lower_bound_s") for workload in workloads]
    lines["proven lower bound"] = f"| proven lower bound | {' | '.join(bounds)} | | |"
    return lines


def milliseconds(line: dict[str, str], column: str) -> str:
    value = float(line[column] or "nan") * 1e3
    return line["status"].upper() if value != value else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
