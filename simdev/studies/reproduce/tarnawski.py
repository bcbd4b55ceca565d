"""Tarnawski et al., NeurIPS 2020: the tables of the paper from its public inputs, with proofs and gaps.

The inputs are those of msr-fiddle/dnn-partitioning; nothing is fetched. All values are in the units of the files.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from simdev.errors import InvalidInput, Unsupported
from simdev.exact.dp import best_contiguous, best_linear
from simdev.exact.latency import best_latency, greedy_split, path_bound, split_latency
from simdev.exact.load import LoadProblem, processor_loads, read_load_problem, read_split
from simdev.exact.throughput import best_split
from simdev.files import read_json, write_text
from simdev.studies.reproduce.lab import Lab, Size

TITLE = "Tarnawski et al. 2020: optimal splits of pipelines and of one sample"


# seconds: that a solver may take for each value; ideals: beyond which the dynamic program is left out;
# nodes: beyond which an instance is left out. Small leaves open which gaps a longer time closes.
SIZES = {
    "tiny": Size(seconds=1.0, ideals=500, nodes=70),
    "small": Size(seconds=60.0, ideals=40_000, nodes=10_000),
    "full": Size(seconds=300.0, ideals=200_000, nodes=10_000),
}


def run(lab: Lab) -> Iterator[list[str]]:
    """The parts of the report."""
    for title, note, folder, name, line in (
        ("Throughput: the largest load of a processor", THROUGHPUT, "throughput-inputs", "throughput", _throughput),
        ("Latency: one sample at a time", LATENCY, "latency-inputs", "latency", _latency),
    ):
        paths = sorted((_inputs(lab) / folder).rglob("*.json"), key=lambda path: (path.stat().st_size, path.name))
        if not paths:
            raise InvalidInput(f"holds no {folder}/*/*.json (msr-fiddle/dnn-partitioning)", source=lab.data)
        lines = []
        for done, path in enumerate(paths):
            lab.observer.tick(done, len(paths), [f"{folder} {path.parent.name}/{path.stem}"])
            problem = read_load_problem(path)
            if problem.n_nodes <= lab.size.nodes:
                lines.append(_kept(lab, path, problem, line))
        if lines:
            yield [f"## {title}\n", note, lab.table(name, lines)]


THROUGHPUT = """A row is a graph on `k` accelerators and its CPU cores. *One device*: all nodes on one accelerator.
*Expert*: the published split. *Linear*: the best cut of one depth-first order (DPL). *Contiguous*: the optimum of the
dynamic program over ideals, which is a proof. *Free*: the best split found of any shape, starting from annealing;
*bound* is proven, and *gap* is what remains open. `OOM`: over the memory of an accelerator.
"""
LATENCY = """*CPU*: all nodes on the CPU. *Greedy*: the baseline that is published with the data. *One call* and *two
calls*: the best split found if an accelerator may be called once or twice (the paper's q), with the proven gap. *Path*:
the lower bound from the longest paths and the memory of an accelerator.
"""


def _kept(lab: Lab, path: Path, problem: LoadProblem, make: Callable[[Lab, Path, LoadProblem], dict]) -> dict:
    """The line of an instance: the one that an earlier call of the same scale has left, or a new one."""
    seconds = f"{lab.size.seconds:g}"
    kept = lab.folder / "instances" / f"{path.parent.parent.name}-{path.parent.name}-{path.stem}-{seconds}s.json"
    if kept.is_file():
        found = read_json(kept)
        if isinstance(found, dict) and all(isinstance(value, str) for value in found.values()):
            return found
        raise InvalidInput("is not a line of the table; delete it to make it again", source=kept)
    line = make(lab, path, problem)
    kept.parent.mkdir(exist_ok=True)
    write_text(kept, json.dumps(line) + "\n")
    return line


def _throughput(lab: Lab, path: Path, problem: LoadProblem) -> dict:
    linear = best_linear(problem)  # also compiles what the next line is timed with
    began = time.monotonic()
    try:
        contiguous = best_contiguous(problem, limit=lab.size.ideals)
    except Unsupported:
        contiguous = None
    seconds = time.monotonic() - began
    free = best_split(problem, seconds=lab.size.seconds, start=None if contiguous is None else contiguous.processor)
    return {
        "graph": f"{path.parent.name}/{path.stem}",
        "nodes": str(problem.n_nodes),
        "k": str(problem.accelerators),
        "one device": _load(problem, np.zeros(problem.n_nodes, np.int64)),
        "expert": _expert(lab, path, problem),
        "linear": _number(linear.largest),
        "contiguous": "too many ideals" if contiguous is None else _number(contiguous.largest),
        "ideals": "" if contiguous is None else str(contiguous.ideals),
        "s": "" if contiguous is None else f"{seconds:.2f}",
        "free": _number(free.largest),
        "bound": _number(free.bound),
        "gap": _gap(free.largest, free.bound),
    }


def _latency(lab: Lab, path: Path, problem: LoadProblem) -> dict:
    one = best_latency(problem, seconds=lab.size.seconds)
    two = best_latency(problem, calls=2, start=one.processor, seconds=lab.size.seconds)
    return {
        "graph": f"{path.parent.name}/{path.stem}",
        "nodes": str(problem.n_nodes),
        "k": str(problem.accelerators),
        "CPU": _number(split_latency(problem, np.full(problem.n_nodes, problem.accelerators))),
        "greedy": _number(split_latency(problem, greedy_split(problem))),
        "path": _number(path_bound(problem)),
        "one call": _number(one.latency),
        "bound": _number(one.bound),
        "gap": _gap(one.latency, one.bound),
        "two calls": _number(two.latency),
        "bound of two": _number(two.bound),
        "gap of two": _gap(two.latency, two.bound),
    }


def _inputs(lab: Lab) -> Path:
    """The folder of the public inputs, without which :func:`simdev.studies.reproduce.reproduce` does not begin."""
    if lab.data is None:
        raise InvalidInput("needs the folder of its public inputs", source="experiment tarnawski")
    return lab.data


def _expert(lab: Lab, path: Path, problem: LoadProblem) -> str:
    """The load of the published split. A training graph without a file of its own takes that of inference, whose
    colour classes its backward nodes follow."""
    for stem in (path.stem, path.stem.replace("training", "inference")):
        split = _inputs(lab) / "human-experts" / f"{stem}_expert.json"
        if path.parent.name == "LayerGraphs" and split.is_file():
            return _load(problem, read_split(split, problem))
    return ""


def _load(problem: LoadProblem, processor: np.ndarray) -> str:
    loads = processor_loads(problem, processor)
    return _number(loads.largest) + (" OOM" if loads.overfull else "")


def _number(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else "impossible"


def _gap(value: float, bound: float) -> str:
    gap = max(0.0, value - bound) / max(value, 1e-12)
    return "proven" if gap <= 1e-3 else f"{gap:.1%}"
