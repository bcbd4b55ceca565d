"""Compares the simulator with this computer: runs and simulates many placements of one step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from simdev.errors import InvalidInput
from simdev.files import write_text
from simdev.measure.execute.figures import CALM
from simdev.measure.profiles import load_costs, profile_costs, save_costs
from simdev.measure.programs import load_program, measured_problem, need_torch, workers_of
from simdev.measure.report import read_comparisons
from simdev.placers import registry
from simdev.placers.budget import Budget
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.problem.topology import Topology, load_topology

if TYPE_CHECKING:
    from simdev.measure.execute.cases import Costs
    from simdev.measure.execute.program import Program


PLACERS = ("heft", "m-etf", "min-cut", "critical-path", "local-search", "annealing")


def compare_placements(
    entry: str,
    machine: str,
    out: Path,
    *,
    placements: int,
    repeats: int,
    rounds: int,
    seed: int,
    small: bool,
    say=print,
) -> list[dict]:
    """Simulate and execute placements of one step, and return a row for each placement and round.

    Each of the ``rounds`` runs all placements in another order, ``repeats`` steps each, so that a computer that is slow
    for some minutes slows all placements alike. ``out`` receives ``costs.npz`` (op times alone and beside a busy
    neighbour), ``cases.jsonl`` (the rows, see :func:`~simdev.measure.execute.cases.run_case` and ``predict``) and
    ``about.json``. A second call resumes what ``out`` holds, and repeats runs that other processes disturbed. Steps of
    other workloads join those in ``out``.
    """
    need_torch()
    from simdev.measure.execute.cases import predict, run_case
    from simdev.measure.execute.host import check_workers

    topology = load_topology(machine)
    workers = workers_of(topology)
    check_workers(workers)
    program = load_program(entry, small=small, seed=seed)
    out.mkdir(parents=True, exist_ok=True)
    graph = program.graph
    about, cases = read_comparisons(out)
    if about.get(graph.name, {}).get("fingerprint", graph.fingerprint) != graph.fingerprint:
        raise InvalidInput("ran as another graph: take another folder", source=out / "about.json", field=graph.name)
    costs = load_costs(out / "costs.npz", graph)
    if costs is None:
        say(f"{graph.name}: {graph.n_ops} ops; profiling on {', '.join(workers)}")
        costs = profile_costs(program, topology, repeats * rounds)
        save_costs(costs, graph, out / "costs.npz")
    problem = measured_problem(program, topology, costs)
    about[graph.name] = _about(entry, program, topology, workers, costs)
    write_text(out / "about.json", json.dumps(about, indent=1) + "\n")
    known: dict[tuple[str, int], dict] = {}
    for row in cases.pop(graph.name, []):
        _keep_calmer(known, row)
    for row in known.values():  # also rows of placements that another count or seed chose
        row.update(predict(problem, _placement_of(row, program), costs))
    chosen = choose(problem, placements, seed)
    predicted = {name: predict(problem, Placement(devices), costs) for name, devices in chosen}
    rows = []
    for number in range(rounds):
        order = np.random.default_rng((seed, number)).permutation(len(chosen)) if number else range(len(chosen))
        for name, devices in (chosen[at] for at in order):
            key = Placement(devices).hash, number
            if key not in known or known[key].get("disturbed", 0.0) > CALM:
                measured = run_case(program, problem, workers, name, devices, repeats=repeats, warmup=2)
                row = {"graph": graph.name, "placement": key[0], "round": number, **measured, **predicted[name]}
                with open(out / "cases.jsonl", "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                _keep_calmer(known, row)
            row = known[key]
            rows.append(row)
            error = row["simulated_ns"] / row["measured_ns"] - 1
            say(
                f"{name:28} measured {row['measured_ns'] / 1e6:9.2f} ms  simulated {row['simulated_ns'] / 1e6:9.2f} ms "
                f" {error:+.1%}"
            )
    kept = [*(row for others in cases.values() for row in others), *known.values()]
    write_text(out / "cases.jsonl", "".join(json.dumps(row) + "\n" for row in kept))
    disturbed = sum(row.get("disturbed", 0.0) > CALM for row in rows)
    if disturbed:
        say(
            f"other processes took over {CALM:.0%} of the cores' time in {disturbed} of {len(rows)} runs; the same "
            "command repeats these"
        )
    return rows


def choose(problem: Problem, count: int, seed: int, placers=PLACERS) -> list[tuple[str, np.ndarray]]:
    """``count`` different placements, each with a name and the device per op int32 ``(n,)``.

    A sixth of them are found by ``placers``. Up to a half are these placements with more and more layers moved to other
    devices. :func:`simdev.measure.execute.sampling.sample` draws the rest.
    """
    from simdev.measure.execute.sampling import perturb, sample

    rng = np.random.default_rng(seed)
    found: list[tuple[str, np.ndarray]] = []

    def add(name: str, devices: np.ndarray, most: int) -> None:
        if len(found) < most and not any((devices == other).all() for _, other in found):
            found.append((name, devices.astype(np.int32)))

    for name in placers:
        spec, params = registry.find_placer(name)
        placement = spec.place(problem, rng=rng, budget=Budget(problem, evaluations=200), **params)
        add(name, placement.devices, count // 6)
    placed = list(found)
    for share in (0.05, 0.1, 0.2, 0.4, 0.7):
        for name, devices in placed:
            add(f"{name}, {share:.0%} elsewhere", perturb(problem, devices, share, rng), count // 2)
    for name, devices in sample(problem, 2 * count, rng):
        add(name, devices, count)
    return found


def _placement_of(row: dict, program: Program) -> Placement:
    try:
        units = np.array([int(digit, 36) for digit in row["unit_devices"]], np.int32)
        return Placement(units[program.graph.unit_of_op])
    except (TypeError, ValueError, IndexError):
        raise InvalidInput("not a placement of this graph", source="cases.jsonl", field="unit_devices") from None


def _keep_calmer(known: dict[tuple[str, int], dict], row: dict) -> None:
    key = row["placement"], row.get("round", 0)
    if key not in known or row.get("disturbed", 0.0) < known[key].get("disturbed", 0.0):
        known[key] = row


def _about(entry: str, program: Program, topology: Topology, workers, costs: Costs) -> dict:
    import torch

    from simdev.bench.provenance import machine

    return {
        "entry": entry,
        "fingerprint": program.graph.fingerprint,
        "ops": program.graph.n_ops,
        "topology": topology.name,
        "units": list(workers),
        "machine": machine(),
        "torch": torch.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "loaded": float(costs.loaded.sum() / costs.alone.sum() - 1),
    }
