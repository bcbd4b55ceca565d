"""Check the published boards; `python docs/facts.py` checks the pages that quote them.

``python tests/tools/boards.py [--sample N] [BOARD ...]``. ``simdev verify`` recomputes every row of every board (or
``--sample`` rows of each) with the fast engine; ``build/verified`` keeps which hold, so that the same command resumes.
The board ``best-known`` must hold the shortest step of each case of ``standard`` and ``order``, and no record replayed
under the other order may be shorter than the record there. The exit code is 1 if anything differs.

``--records`` verifies nothing: it moves each row of ``standard`` and ``order`` that is a new record to ``best-known``
and drops the rows that are none any more.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from simdev.baselines._order import fifo_starts, ordered, priority_of
from simdev.bench import rows
from simdev.bench.journal import Results, read_curves
from simdev.bench.run import load_problem
from simdev.problem.placement import Placement
from simdev.problem.placement_file import stored_placement
from simdev.sim import simulate

ROOT = Path(__file__).parents[2]
BOARDS = ROOT / "leaderboard"
KEPT = ROOT / "build" / "verified"
STANDARD, ORDER, RECORDS = BOARDS / "standard", BOARDS / "order", BOARDS / "best-known"
Case = tuple[str, str, str]  # workload, machine, rules


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("board", nargs="*", help="folders of leaderboard/ (default: all)")
    parser.add_argument("--sample", type=int, help="verify that many rows of each board, drawn evenly")
    parser.add_argument("--records", action="store_true", help="keep the shortest steps of the boards in best-known")
    options = parser.parse_args()
    if options.records:
        new = keep_records([BOARDS / name for name in options.board or ("standard", "order")], RECORDS)
        print("\n".join([f"{'/'.join(case)}: {ns / 1e6} ms" for case, ns in new] or ["no new record"]))
        return 0
    wrong = 0
    for folder in boards(options.board):
        wrong += not holds(folder, options.sample)
    for case, ns, best in slower_than(RECORDS, [STANDARD, ORDER]) + beaten_by_replay(RECORDS):
        print(f"best-known: {'/'.join(case)} takes {ns} ns, and {best} ns are known")
        wrong += 1
    return 1 if wrong else 0


def keep_records(sources: Iterable[Path], records: Path) -> list[tuple[Case, int]]:
    """Keep in ``records`` the row of shortest step of each case of ``sources`` and ``records``, with its placement and
    its curve, and no other row. Of equal ones, that of ``records`` stays. Returns the records that are new, ns."""
    best: dict[Case, tuple[Path, rows.Row]] = {}
    old = best_times(records)
    for folder in (*([records] if old else []), *sources):
        for row in rows.read_rows(folder / "results.csv"):
            case = row.workload, row.topology, row.rules
            if row.step_ns is not None and (case not in best or row.step_ns < best[case][1].step_ns):
                best[case] = folder, row
    new = [(case, row.step_ns) for case, (folder, row) in sorted(best.items()) if folder != records]
    with TemporaryDirectory(dir=records.parent) as made:
        results = Results(Path(made))
        curves = {folder: read_curves(folder / "curves.csv") for folder in {folder for folder, _ in best.values()}}
        for folder, row in best.values():
            results.add(row, stored_placement(folder, row.placement), curves[folder].get(row.key, []))
        results.pack()
        results.write()
        results.close()
        records.mkdir(exist_ok=True)
        for path in Path(made).iterdir():
            if path.suffix in (".csv", ".jsonl") and path.name != "journal.jsonl":
                shutil.copyfile(path, records / path.name)
    return new


def beaten_by_replay(records: Path, cases: Iterable[Case] | None = None) -> list[tuple[Case, int, int]]:
    """The records (of ``cases``, or all) that a record under the other order beats, if its placement runs under theirs:
    case, its step time, the better one, ns.

    Under ``priority``, a placement without priorities runs with the default ones and with those that repeat ``fifo``.
    """
    found = {(row.workload, row.topology, row.rules): row for row in rows.read_rows(records / "results.csv")}
    better = []
    for case, row in sorted(found.items()):
        others = [other for key, other in found.items() if key[:2] == case[:2] and key != case]
        if cases is not None and case not in cases:
            continue
        problem = load_problem(*case)
        for other in others:
            placement = stored_placement(records, other.placement)
            orders = [None] if not ordered(problem) else [None, priority_of(-fifo_starts(problem, placement.devices))]
            for priority in orders:
                run = simulate(problem, Placement(placement.devices, priority))
                if run.feasible and run.step_ns < row.step_ns:
                    better.append((case, row.step_ns, run.step_ns))
    return better


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


def best_times(folder: Path) -> dict[Case, int]:
    """The shortest step time of each case of a board, ns; of a board that is not there, nothing."""
    best: dict[Case, int] = {}
    for row in rows.read_rows(folder / "results.csv") if (folder / "results.csv").is_file() else ():
        if row.step_ns is not None:
            case = row.workload, row.topology, row.rules
            best[case] = min(row.step_ns, best.get(case, row.step_ns))
    return best


def slower_than(folder: Path, others: Iterable[Path]) -> list[tuple[Case, int, int]]:
    """The cases of ``others`` that are missing in ``folder`` (0 ns) or shorter elsewhere: case, its best step time
    here, the best one there, ns. A case under ``priority`` must not be longer than under ``fifo``, either: on the
    machines of these boards, priorities can repeat the schedule of ``fifo``."""
    mine, best = best_times(folder), {}
    for times in [best_times(other) for other in others]:
        for case, ns in times.items():
            best[case] = min(ns, best.get(case, ns))
    for (workload, topology, rules), ns in mine.items():
        ordered_case = workload, topology, rules.replace("fifo", "priority", 1)
        if ordered_case in mine:
            best[ordered_case] = min(ns, best.get(ordered_case, ns))
    return [
        (case, mine.get(case, 0), ns) for case, ns in sorted(best.items()) if mine.get(case, 0) not in range(1, ns + 1)
    ]


if __name__ == "__main__":
    sys.exit(main())
