"""Maintainers: ``python -m simdev.capture NAME... | --all`` captures workloads anew into ``workloads/graphs`` and
records their fingerprints in ``workloads/fingerprints.csv``."""

from __future__ import annotations

import csv
import sys
import time

from simdev import registry
from simdev.capture import capture_workload
from simdev.graph_file import save_graph

COLUMNS = ("workload", "fingerprint", "ops", "tensors", "edges", "parameters", "flops", "torch")


def main(names: list[str]) -> None:
    """Capture the named workloads, or all of them."""
    specs = registry.workloads()
    for name in specs if names == ["--all"] else names:
        spec, _ = registry.find_workload(name)
        started = time.perf_counter()
        graph = capture_workload(spec)
        path = registry.graph_path(spec.name)
        path.parent.mkdir(exist_ok=True)
        save_graph(graph, path)
        row = (
            spec.name, graph.fingerprint, graph.n_ops, graph.n_tensors, graph.n_edges, graph.meta["parameters"],
            graph.meta["flops"], graph.meta["torch"],
        )  # fmt: skip
        record(row)
        seconds = time.perf_counter() - started
        print(*row, f"{seconds:.1f} s", f"{path.stat().st_size} bytes", sep="  ", flush=True)


def record(row: tuple) -> None:
    """Replace or add a workload's row in ``fingerprints.csv``."""
    path = registry.graph_path("x").parents[1] / "fingerprints.csv"
    rows = {}
    if path.is_file():
        with path.open(newline="") as file:
            rows = {old[0]: old for old in list(csv.reader(file))[1:]}
    rows[row[0]] = row
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows[name] for name in sorted(rows))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m simdev.capture NAME... | --all")
    main(sys.argv[1:])
