"""``python -m simdev.exact FOLDER`` solves every dnn-partitioning file of a folder (throughput inputs) to optimality.

For each file, it prints: nodes, ideals, the load of one device, the linear and the contiguous optimum with seconds, and
the free optimum with its proven bound.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from simdev.errors import Unsupported
from simdev.exact.dp import best_contiguous, best_linear
from simdev.exact.load import processor_loads, read_load_problem
from simdev.exact.throughput import best_split


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m simdev.exact", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of the integer program (0: leave it out)")
    parser.add_argument("--solver", default="auto", help="highs, scip, cp-sat, gurobi or auto")
    options = parser.parse_args()
    print("| instance | nodes | ideals | one device | linear | contiguous | s | free | bound | gap | s |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for path in sorted(options.folder.rglob("*.json"), key=lambda path: path.stat().st_size):
        print(f"| {path.parent.name}/{path.stem} | {' | '.join(_cells(path, options))} |", flush=True)


def _cells(path: Path, options) -> list[str]:
    problem = read_load_problem(path)
    single = processor_loads(problem, np.zeros(problem.n_nodes, np.int64))
    cells = [str(problem.n_nodes)]
    started = time.monotonic()
    try:
        found = best_contiguous(problem)
    except Unsupported as error:
        return [*cells, str(error)]
    seconds = time.monotonic() - started
    cells += [str(found.ideals), f"{single.largest:.6g}{' (over memory)' if single.overfull else ''}"]
    cells += [f"{best_linear(problem).largest:.6g}", f"{found.largest:.6g}", f"{seconds:.2f}"]
    if options.seconds > 0:
        free = best_split(problem, seconds=options.seconds, solver=options.solver)
        cells += [f"{free.largest:.6g}", f"{free.bound:.6g}", f"{100 * free.gap:.2f} %", f"{free.seconds:.1f}"]
    else:
        cells += [""] * 4
    return cells


if __name__ == "__main__":
    main()
