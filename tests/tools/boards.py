"""Check the published boards; `python docs/facts.py` checks the pages that quote them.

``python tests/tools/boards.py [--sample N] [BOARD ...]``. ``simdev verify`` recomputes every row of every board (or
``--sample`` rows of each) with the fast engine; ``build/verified`` keeps which hold, so that the same command resumes.
For each of its cases, the board ``long`` must hold a placement at least as fast as the best of ``standard``, and
``order`` one as fast as the best of both. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from simdev.bench import rows

ROOT = Path(__file__).parents[2]
BOARDS = ROOT / "leaderboard"
KEPT = ROOT / "build" / "verified"
STANDARD = BOARDS / "standard"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("board", nargs="*", help="folders of leaderboard/ (default: all)")
    parser.add_argument("--sample", type=int, help="verify that many rows of each board, drawn evenly")
    options = parser.parse_args()
    wrong = 0
    for folder in boards(options.board):
        wrong += not holds(folder, options.sample)
    for name, others in (("long", ["standard"]), ("order", ["standard", "long"])):
        for case, ns, best in slower_than(BOARDS / name, [BOARDS / other for other in others]):
            print(f"{name}: {'/'.join(case)} takes {ns} ns, {best} ns in the board {' or '.join(others)}")
            wrong += 1
    return 1 if wrong else 0


def boards(names: list[str]) -> list[Path]:
    """The folders of ``leaderboard/`` that ``simdev verify`` reads: those of these names, or all."""
    found = {path.parent for name in ("results.csv", "plans.csv") for path in BOARDS.glob(f"*/{name}")}
    return sorted(path for path in found if not names or path.name in names)


def holds(folder: Path, sample: int | None) -> bool:
    """Whether ``simdev verify`` finds no difference; it prints what it finds."""
    command = [sys.executable, "-m", "simdev", "verify", str(folder), "--engine", "fast"]
    KEPT.mkdir(parents=True, exist_ok=True)
    command += ["--sample", str(sample)] if sample else ["--resume", str(KEPT / f"{folder.name}.jsonl")]
    return subprocess.run(command, stdin=subprocess.DEVNULL).returncode == 0


def best_times(folder: Path) -> dict[tuple[str, str], int]:
    """The shortest step time of each case of a board, ns, by workload and topology."""
    best: dict[tuple[str, str], int] = {}
    for row in rows.read_rows(folder / "results.csv"):
        if row.step_ns is not None:
            case = row.workload, row.topology
            best[case] = min(row.step_ns, best.get(case, row.step_ns))
    return best


def slower_than(folder: Path, others: list[Path]) -> list[tuple[tuple[str, str], int, int]]:
    """The cases in which a searched board lost a result of ``others``: case, its best step time, the better one, ns.

    On the machines of ``order`` a placement can repeat its schedule of ``fifo``.
    """
    found = [best_times(other) for other in others]
    best = {case: min(times[case] for times in found if case in times) for times in found for case in times}
    return [(case, ns, best[case]) for case, ns in best_times(folder).items() if ns > best.get(case, ns)]


if __name__ == "__main__":
    sys.exit(main())
