"""Profiles of this computer: its devices as a topology file, and measured costs of ops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simdev.errors import InvalidInput
from simdev.files import replacing, write_text
from simdev.measure.execute.figures import CALM
from simdev.measure.programs import load_program, need_torch, workers_of
from simdev.problem.graph import ComputationGraph
from simdev.problem.graph_file import read_npz
from simdev.problem.topology import Topology

if TYPE_CHECKING:
    from simdev.measure.execute.cases import Costs
    from simdev.measure.execute.program import Program


def profile_machine(
    steps: list[str], workers: tuple[str, ...], out: Path, *, repeats: int, small: bool, seed: int
) -> list[str]:
    """Measure ``workers`` by running ``steps`` on them, write the results to folder ``out``, and return them as text.

    ``out`` receives ``machine.toml`` (a topology), ``costs.csv`` (measured costs by op signature, which ``--costs``
    reads) and ``profile.json`` (links by size, time between ops, spread). CPU workers are of the kind ``core``, GPUs of
    the kind ``gpu``.
    """
    need_torch()
    from simdev.measure.execute.host import check_workers
    from simdev.measure.execute.link import device_file, granularity, profile_link, rates
    from simdev.measure.execute.profile import by_signature, profile_ops
    from simdev.problem.costs import save_measured

    check_workers(workers)
    groups = _groups(workers)
    tables: dict[str, dict[str, float]] = {kind: {} for kind in groups}
    about, lines = [], []
    for entry in steps:
        program = load_program(entry, small=small, seed=seed)
        name = program.graph.name
        for kind, table in tables.items():
            found = [profile_ops(program, worker, repeats=repeats) for worker in groups[kind]]
            table.update(by_signature(program.graph, np.mean([profile.op_ns for profile in found], axis=0)))
            for worker, profile in zip(groups[kind], found, strict=True):
                about.append(
                    {
                        "graph": name,
                        "unit": worker,
                        "step_ns": profile.step_ns,
                        "gap_ns": profile.gap_ns,
                        "spread": profile.spread,
                    }
                )
                step_ms, gap_us = profile.step_ns / 1e6, profile.gap_ns / 1e3
                lines.append(
                    f"{name} on {worker}: {step_ms:.2f} ms, {gap_us:.2f} us between ops, "
                    f"spread of op times {profile.spread:.1%}"
                )
    kinds = {}
    for kind in tables:
        flops, bandwidth, memory = rates(groups[kind][0])
        gap = float(np.median([row["gap_ns"] for row in about if row["unit"] in groups[kind]]))
        share = len(groups[kind]) if kind == "core" else 1
        kinds[kind] = {
            "units": groups[kind],
            "flop_per_s": flops,
            "bytes_per_s": bandwidth,
            "memory_bytes": memory // share,
            "gap_ns": gap,
            "granularity": granularity(groups[kind][0]),
        }
        lines.append(
            f"{kind}: {flops / 1e9:.1f} GFLOP/s (f32 product), {bandwidth / 1e9:.1f} GB/s (copy), "
            f"allocations in multiples of {kinds[kind]['granularity']} bytes"
        )
    links = {}
    for at, first in enumerate(workers):
        for second in workers[at + 1 :]:
            link = links[first, second] = profile_link(first, second, repeats=min(60, 6 * repeats))
            lines.append(
                f"{first} - {second}: {link.alpha_ns / 1e3:.2f} us + bytes / {link.bytes_per_s / 1e9:.2f} GB/s"
            )
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "machine.toml", device_file(out.name, kinds, links))
    save_measured(tables, out / "costs.csv")
    measured = [{"ends": ends, "bytes": link.sizes, "ns": link.ns} for ends, link in links.items()]
    write_text(out / "profile.json", json.dumps({"ops": about, "kinds": kinds, "links": measured}, indent=1) + "\n")
    count = sum(map(len, tables.values()))
    lines.append(f"{out / 'machine.toml'}, {out / 'costs.csv'} ({count} signatures), {out / 'profile.json'}")
    return lines


def profile_file(
    path: Path, workers: tuple[str, ...], out: Path, *, repeats: int, seed: int
) -> tuple[list[str], list[str]]:
    """Measure single ops, whose signatures file ``path`` holds, and update ``costs.csv`` in folder ``out``.

    Returns two lists of lines: what was measured, and what was left out and why.
    """
    need_torch()
    from simdev.measure.execute.alone import profile_signatures, read_signatures
    from simdev.measure.execute.host import check_workers
    from simdev.problem.costs import load_measured, save_measured

    signatures = read_signatures(path)
    check_workers(workers)
    costs = out / "costs.csv"
    tables = load_measured(costs) if costs.exists() else {}
    lines, left_out = [], []
    for kind, group in _groups(workers).items():
        found = [profile_signatures(signatures, worker, repeats=repeats, seed=seed) for worker in group]
        times = {text: float(np.mean([table[text] for table, _ in found])) for text in found[0][0]}
        tables[kind] = tables.get(kind, {}) | times
        lines.append(f"{kind}: {len(times)} of {len(signatures)} signatures measured, each op alone")
        reasons = found[0][1]
        left_out += [f"{kind}: {len(reasons)} of {len(signatures)} signatures left out"] if reasons else []
        left_out += [f"  {text}: {reason}" for text, reason in reasons.items()]
    out.mkdir(parents=True, exist_ok=True)
    save_measured(tables, costs)
    return [*lines, str(costs)], left_out


def _groups(workers: tuple[str, ...]) -> dict[str, list[str]]:
    """Workers by their kind of device in the topology file."""
    words = {"core": "cpu", "gpu": "cuda"}
    found = {kind: [worker for worker in workers if worker.startswith(word)] for kind, word in words.items()}
    return {kind: group for kind, group in found.items() if group}


def profile_costs(program: Program, topology: Topology, repeats: int) -> Costs:
    """Measure the cost of every op on every device, alone and beside a busy neighbour.

    Costs are averaged over the ops of a signature. A measurement that other processes disturb is repeated, at most
    twice.
    """
    from simdev.measure.execute.cases import Costs, others
    from simdev.measure.execute.profile import by_signature, profile_ops

    workers, graph = workers_of(topology), program.graph

    def table(worker: str, neighbour: str) -> np.ndarray:
        tries: list[tuple[float, np.ndarray]] = []
        while not tries or (tries[-1][0] > CALM and len(tries) < 3):
            with others([int(worker[4:])] if worker.startswith("cpu") else []) as taken:
                profile = profile_ops(program, worker, repeats=repeats, neighbour=neighbour)
            tries.append((taken[0], profile.op_ns))
        found = by_signature(graph, min(tries, key=lambda entry: entry[0])[1])
        mean = np.array([found.get(signature, 1.0) for signature in graph.signatures])
        return np.rint(mean[graph.op_signature]).astype(np.int64)

    alone = np.stack([table(worker, "") for worker in workers])
    neighbours = [
        next((other for other in workers if other != worker and other[:3] == worker[:3]), "") for worker in workers
    ]
    loaded = np.stack(
        [
            table(worker, other) if other else alone[row]
            for row, (worker, other) in enumerate(zip(workers, neighbours, strict=True))
        ]
    )
    return Costs(alone, loaded)


def save_costs(costs: Costs, graph: ComputationGraph, path: Path) -> None:
    """Add costs to an npz file, under the fingerprint of their graph: ``FINGERPRINT.alone`` and ``.loaded``."""
    kept: dict[str, Any] = read_npz(path, "iuf", 2) if path.exists() else {}
    kept |= {f"{graph.fingerprint}.alone": costs.alone, f"{graph.fingerprint}.loaded": costs.loaded}
    with replacing(path) as file:
        np.savez_compressed(file, **kept)


def load_costs(path: Path, graph: ComputationGraph) -> Costs | None:
    """Read what :func:`save_costs` wrote, None if the file holds no costs of this graph. Raises :class:`InvalidInput`
    if it holds half of them, or another count of ops."""
    from simdev.measure.execute.cases import Costs

    arrays = read_npz(path, "iuf", 2) if path.exists() else {}
    names = [f"{graph.fingerprint}.{name}" for name in ("alone", "loaded")]
    if not set(names) & set(arrays):
        return None
    for name in names:
        if name not in arrays:
            raise InvalidInput("missing", source=path, field=name)
        if arrays[name].ndim != 2 or arrays[name].shape[1] != graph.n_ops:
            raise InvalidInput(f"expected a row of {graph.n_ops} times for each worker", source=path, field=name)
    return Costs(*(arrays[name] for name in names))
