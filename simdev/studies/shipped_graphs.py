"""For maintainers: captures workloads again and stores their graphs in ``workloads/graphs``.

``python -m simdev.studies.shipped_graphs NAME... | --all`` also records their fingerprints in
``workloads/fingerprints.csv`` and writes their table into ``workloads/README.md``.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Sequence

import numpy as np

from simdev.graphs.capture import capture_workload
from simdev.placers import registry
from simdev.problem.graph import ComputationGraph
from simdev.problem.graph_file import load_graph, save_graph

COLUMNS = ("workload", "fingerprint", "ops", "tensors", "edges", "parameters", "flops", "torch")
PRODUCTS = ("convolution", "mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention")
INTRODUCTION = """# Workloads

One training step each: forward, loss, backward and optimiser update, at the parameters in the file of its family. Names
that end in `-inference`, `-prefill` or `-decode` are one query each: forward ops only.
`python -m simdev.studies.shipped_graphs --all` writes the graphs, the fingerprints and this table.

*reads* are pairs of a tensor and an op that reads it; *TFLOP* is the whole step; *forward* counts the multiply-adds of
matrix products, convolutions and attention in the forward pass per sample; *published* are the figures of the papers,
whose sources are given in the file; tests compare them.

| workload | batch | ops | tensors | reads | parameters | TFLOP | forward | published |
|---|--:|--:|--:|--:|--:|--:|--:|---|
"""


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
            spec.name,
            graph.fingerprint,
            graph.n_ops,
            graph.n_tensors,
            graph.n_edges,
            graph.meta["parameters"],
            graph.meta["flops"],
            graph.meta["torch"],
        )
        record(row)
        seconds = time.perf_counter() - started
        print(*row, f"{seconds:.1f} s", f"{path.stat().st_size} bytes", sep="  ", flush=True)
    shelf("README.md").write_text(table(), encoding="utf-8")


def shelf(file: str):
    """A file of the workload shelf."""
    return registry.graph_path("x").parents[1] / file


def record(row: Sequence) -> None:
    """Replace or add a workload's row in ``fingerprints.csv``."""
    path = shelf("fingerprints.csv")
    rows: dict[str, Sequence] = {}
    if path.is_file():
        with path.open(newline="") as file:
            rows = {old[0]: old for old in list(csv.reader(file))[1:]}
    rows[row[0]] = row
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows[name] for name in sorted(rows))


def table() -> str:
    """The text of ``workloads/README.md``, from the shipped graphs."""
    lines = []
    for name, spec in registry.workloads().items():
        graph = load_graph(registry.graph_path(name))
        batch, macs = graph.meta["batch"], forward_macs(graph)
        published = ", ".join(f"{key} {_figure(value)}" for key, value in spec.published.items())
        cells = (
            name,
            batch,
            f"{graph.n_ops:,}",
            f"{graph.n_tensors:,}",
            f"{graph.n_edges:,}",
            f"{graph.meta['parameters']:,}",
            f"{graph.meta['flops'] / 1e12:.3f}",
            f"{macs / batch / 1e9:.4g} G",
            published,
        )
        lines.append(f"| {' | '.join(map(str, cells))} |\n")
    return INTRODUCTION + "".join(lines)


def forward_macs(graph: ComputationGraph) -> float:
    """Multiply-adds of the products in the forward pass (PyTorch counts two FLOPs each)."""
    product = np.array([kind in PRODUCTS for kind in graph.kinds])[graph.op_kind]
    return graph.op_flops[product & (graph.op_phase == 0)].sum() / 2


def _figure(value) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m simdev.studies.shipped_graphs NAME... | --all")
    main(sys.argv[1:])
