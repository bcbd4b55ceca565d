"""Comparisons of the simulator with this machine: profiles, placements run for real, and the report on both."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from simdev.errors import InvalidInput, Unsupported
from simdev.files import write_text
from simdev.measure.execute.figures import CALM
from simdev.placers import registry
from simdev.placers.placer import Budget
from simdev.problem.graph import ComputationGraph
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Topology, load_topology

if TYPE_CHECKING:
    from simdev.measure.execute.compare import Costs
    from simdev.measure.execute.program import Program

# Sizes at which a step takes 0.1 to 2 s on one core of a recent CPU.
SMALL = {
    "inception-v3": {"batch": 2, "size": 139, "aux": False},
    "nmt": {"batch": 16, "length": 8, "units": 384, "vocabulary": 4000},
    "gnmt-4": {"batch": 32, "length": 8, "units": 384, "vocabulary": 4000},
    "transformer-xl-2": {"batch": 4, "length": 128, "memory": 128},
    "transformer-xl-4": {"batch": 2, "length": 64, "memory": 64},
    "wavenet-2x18": {"batch": 1, "length": 1024, "channels": 128, "skips": 128},
    "nasnet-a-mobile": {"batch": 4, "size": 96, "cells": 3, "aux": False},
    "amoebanet-d": {"batch": 2, "size": 128, "cells": 3, "filters": 96},
    "rnnlm": {"batch": 32, "length": 8, "units": 512, "vocabulary": 4000},
    "gpt2-medium": {"batch": 1, "length": 128, "layers": 4, "units": 512, "heads": 8, "vocabulary": 4000,
                    "precision": "f32"},
}  # fmt: skip
MEASURED = {
    "placement",
    "unit_devices",
    "measured_ns",
    "samples_ns",
    "ops_ns",
    "channel_ns",
    "copies_ns",
    "gaps_ns",
    "peak_bytes",
}
PLACERS = ("heft", "m-etf", "min-cut", "critical-path", "local-search", "annealing")


def _need_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise Unsupported("running a step needs PyTorch: pip install 'simdev[capture]'") from error


def load_program(entry: str, *, small: bool = False, seed: int = 0) -> Program:
    """Record the step of a workload id or of ``my_model.py:make_step``; ``small`` takes the workload's size from
    :data:`SMALL` where the id does not give it."""
    _need_torch()
    from simdev.graphs.capture import file_step, workload_step
    from simdev.measure.execute.record import record

    if ".py:" in entry:
        return record(*file_step(entry), seed=seed)
    if registry.is_graph_file(entry):
        raise InvalidInput("a graph file holds no kernels to run; name a workload or FILE.py:FUNCTION", source=entry)
    spec, params = registry.find_workload(entry)
    if small and spec.name not in SMALL:
        raise InvalidInput(f"no small size is known; there is one for {', '.join(SMALL)}", source=spec.name)
    return record(*workload_step(spec, {**(SMALL[spec.name] if small else {}), **params}), seed=seed)


def units_of(topology: Topology) -> tuple[str, ...]:
    """The device of this machine that each device of ``topology`` is, by its name: ``cpu0`` is core 0, ``cuda1`` GPU 1.

    Raises :class:`InvalidInput` for any other name.
    """
    units = []
    for device in topology.devices:
        kind = device.name.rstrip("0123456789")
        number = device.name[len(kind) :]
        if kind not in ("cpu", "cuda") or not number:
            raise InvalidInput(
                f"{device.name!r} is no device of this machine, whose devices are called cpu0, cuda0 and so on; "
                "simdev profile writes such a topology", source=topology.name, field="device",
            )  # fmt: skip
        units.append(f"{kind}:{number}")
    return tuple(units)


def units_named(names: list[str]) -> tuple[str, ...]:
    """Units by what a user calls them: ``cpu`` is the first core that this process may use, ``cuda`` GPU 0."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
    first = {"cpu": f"cpu:{min(cores)}", "cuda": "cuda:0"}
    return tuple(first.get(name, name) for name in names)


def real_problem(program: Program, topology: Topology, costs: Costs | None = None, policy: str = "fifo") -> Problem:
    """The placement problem of a program on the machine ``topology``, with measured op costs if there are any, and with
    the memory that an op of several calls needs between them."""
    from simdev.measure.execute.compare import with_costs

    graph = replace(program.graph, op_workspace_bytes=program.workspace_bytes())
    problem = Problem.build(graph, topology, None, Rules(policy))
    return problem if costs is None else with_costs(problem, costs.alone)


def profile_costs(program: Program, topology: Topology, repeats: int) -> Costs:
    """Costs of every op on every device, alone and beside the others, averaged over the ops of a signature. Measured
    again, twice at most, where other processes take the device's core."""
    from simdev.measure.execute.compare import Costs, others
    from simdev.measure.execute.profile import by_signature, profile_ops

    units, graph = units_of(topology), program.graph

    def table(unit: str, neighbour: str) -> np.ndarray:
        tries: list[tuple[float, np.ndarray]] = []
        while not tries or (tries[-1][0] > CALM and len(tries) < 3):
            with others([int(unit[4:])] if unit.startswith("cpu") else []) as taken:
                profile = profile_ops(program, unit, repeats=repeats, neighbour=neighbour)
            tries.append((taken[0], profile.op_ns))
        found = by_signature(graph, min(tries, key=lambda entry: entry[0])[1])
        mean = np.array([found.get(signature, 1.0) for signature in graph.signatures])
        return np.rint(mean[graph.op_signature]).astype(np.int64)

    alone = np.stack([table(unit, "") for unit in units])
    neighbours = [next((other for other in units if other != unit and other[:3] == unit[:3]), "") for unit in units]
    loaded = np.stack(
        [
            table(unit, other) if other else alone[row]
            for row, (unit, other) in enumerate(zip(units, neighbours, strict=True))
        ]
    )
    return Costs(alone, loaded)


def save_costs(costs: Costs, graph: ComputationGraph, path: Path) -> None:
    """Costs as an npz file, with the fingerprint of the graph that they are for."""
    with open(path, "wb") as file:
        np.savez_compressed(file, alone=costs.alone, loaded=costs.loaded, fingerprint=np.array(graph.fingerprint))


def load_costs(path: Path, graph: ComputationGraph) -> Costs:
    """What :func:`save_costs` wrote. Raises :class:`InvalidInput` for another graph's."""
    from simdev.measure.execute.compare import Costs

    try:
        with np.load(path, allow_pickle=False) as file:
            alone, loaded, fingerprint = file["alone"], file["loaded"], str(file["fingerprint"])
    except (OSError, ValueError, KeyError) as error:
        raise InvalidInput(f"cannot be read ({error})", source=path) from None
    if fingerprint != graph.fingerprint:
        raise InvalidInput(f"made for graph {fingerprint!r}, not {graph.fingerprint!r}", source=path)
    return Costs(alone, loaded)


def choose(problem: Problem, count: int, seed: int, placers=PLACERS) -> list[tuple[str, np.ndarray]]:
    """``count`` different placements: what several placers find (a sixth), these with more and more of their layers put
    elsewhere (up to a half in all), the rest by :func:`simdev.measure.execute.sampling.sample`."""
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


def compare_real(
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
    """Simulate and execute placements of one step; resumes what ``out`` holds. Returns the rows.

    All placements are run ``rounds`` times, ``repeats`` steps each time and every time in another order, so that a
    machine that is slower for some minutes is so for all of them. ``out`` gets ``costs.npz`` (op times alone and beside
    a busy neighbour), ``cases.jsonl`` (a row per placement and round, see :func:`simdev.measure.execute.compare.run_case` and
    ``predict``) and ``about.json``. What was run while other processes were busy is run again when resumed.
    """  # fmt: skip
    _need_torch()
    from simdev.measure.execute.compare import predict, run_case
    from simdev.measure.execute.host import check_units

    topology = load_topology(machine)
    units = units_of(topology)
    check_units(units)
    program = load_program(entry, small=small, seed=seed)
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "costs.npz").exists():
        say(f"{program.graph.name}: {program.graph.n_ops} ops; profiling on {', '.join(units)}")
        save_costs(profile_costs(program, topology, repeats * rounds), program.graph, out / "costs.npz")
    costs = load_costs(out / "costs.npz", program.graph)
    problem = real_problem(program, topology, costs)
    write_text(out / "about.json", json.dumps(_about(entry, program, topology, units, costs), indent=1) + "\n")
    known: dict[tuple[str, int], dict] = {}
    for row in _read_rows(out / "cases.jsonl"):
        _keep_calmer(known, row)
    for row in known.values():  # also of placements that another number or seed chose
        row.update(predict(problem, _placement_of(row, program), costs))
    chosen = choose(problem, placements, seed)
    predicted = {name: predict(problem, Placement(devices), costs) for name, devices in chosen}
    rows = []
    for number in range(rounds):
        order = np.random.default_rng((seed, number)).permutation(len(chosen)) if number else range(len(chosen))
        for name, devices in (chosen[at] for at in order):
            key = Placement(devices).hash, number
            if key not in known or known[key].get("disturbed", 0.0) > CALM:
                measured = run_case(program, problem, units, name, devices, repeats=repeats, warmup=2)
                row = {"placement": key[0], "round": number, **measured, **predicted[name]}
                with open(out / "cases.jsonl", "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                _keep_calmer(known, row)
            row = known[key]
            rows.append(row)
            error = row["simulated_ns"] / row["measured_ns"] - 1
            say(f"{name:28} measured {row['measured_ns'] / 1e6:9.2f} ms  simulated {row['simulated_ns'] / 1e6:9.2f} ms "
                f" {error:+.1%}")  # fmt: skip
    write_text(out / "cases.jsonl", "".join(json.dumps(row) + "\n" for row in known.values()))
    disturbed = sum(row.get("disturbed", 0.0) > CALM for row in rows)
    if disturbed:
        say(f"other processes took over {CALM:.0%} of the cores' time in {disturbed} of {len(rows)} runs; the same "
            "command again runs these again")  # fmt: skip
    return rows


def _placement_of(row: dict, program: Program) -> Placement:
    try:
        units = np.array([int(digit, 36) for digit in row["unit_devices"]], np.int32)
        return Placement(units[program.graph.unit_of_op])
    except (TypeError, ValueError, IndexError):
        raise InvalidInput("no placement of this graph", source="cases.jsonl", field="unit_devices") from None


def _keep_calmer(known: dict[tuple[str, int], dict], row: dict) -> None:
    key = row["placement"], row.get("round", 0)
    if key not in known or row.get("disturbed", 0.0) < known[key].get("disturbed", 0.0):
        known[key] = row


def _about(entry: str, program: Program, topology: Topology, units, costs: Costs) -> dict:
    import torch

    from simdev.bench.provenance import machine

    return {
        "entry": entry, "graph": program.graph.name, "fingerprint": program.graph.fingerprint,
        "ops": program.graph.n_ops, "topology": topology.name, "units": list(units), "machine": machine(),
        "torch": torch.__version__, "cores": len(os.sched_getaffinity(0)),
        "loaded": float(costs.loaded.sum() / costs.alone.sum() - 1),
    }  # fmt: skip


def _read_about(path: Path) -> dict:
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        return {"graph": str(about["graph"]), "loaded": float(about["loaded"])}
    except (OSError, ValueError, KeyError, TypeError):
        raise InvalidInput("expected JSON with graph and loaded, as compare-real writes it", source=path) from None


def _read_rows(path: Path) -> list[dict]:
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            raise InvalidInput("not JSON", source=path, field=f"line {number}") from None
        missing = MEASURED - set(row) if isinstance(row, dict) else MEASURED
        if missing:
            raise InvalidInput(f"{', '.join(sorted(missing))} missing", source=path, field=f"line {number}")
        rows.append(row)
    return rows


def execute_real(program: Program, problem: Problem, placement: Placement, repeats: int):
    """Run a placement and one device alone, and simulate it: (report, measured schedule, simulated schedule)."""
    from simdev.measure.execute.host import execute
    from simdev.measure.execute.measure import difference, step_schedule
    from simdev.sim import simulate

    units = units_of(problem.topology)
    devices = placement.devices
    options = {"policy": problem.rules.order, "priority": placement.priority}
    if problem.rules.order == "priority" and placement.priority is None:
        from simdev.analysis.levels import b_level

        options["priority"] = b_level(problem.graph, np.maximum(problem.costs.device_op_ns, 0).mean(axis=0).astype(int))
    execution = execute(program, devices, units, repeats=repeats, **options)
    alone = execute(program, np.zeros_like(devices), units[:1], repeats=1, warmup=0)
    measured, simulated = (
        step_schedule(program, execution, devices, problem.topology),
        simulate(problem, placement),
    )
    same, theirs = difference(program, execution, alone), difference(program, execution)
    low, median, high = np.percentile(execution.step_ns, [0, 50, 95])
    report = {
        "graph": problem.graph.name,
        "machine": problem.topology.name,
        "step_time_s": {"min": low / 1e9, "median": median / 1e9, "p95": high / 1e9, "repeats": repeats},
        "simulated_step_time_s": simulated.step_ns / 1e9,
        "same_as_one_device": same.same,
        "same_as_pytorch": theirs.same,
        "difference_in_tolerances": {"one_device": [same.result, same.parameter],
                                     "pytorch": [theirs.result, theirs.parameter]},
        "comm_bytes": measured.comm_bytes,
        "transfer_s": float((measured.transfer_finish - measured.transfer_start).sum() / 1e9),
        "devices": {
            device.name: {"ops": int((devices == number).sum()),
                          "busy_s": float((measured.op_finish - measured.op_start)[devices == number].sum() / 1e9),
                          "peak_bytes": int(measured.peak_bytes[number]),
                          "simulated_peak_bytes": int(simulated.peak_bytes[number])}
            for number, device in enumerate(problem.topology.devices)
        },
    }  # fmt: skip
    return report, measured, simulated


def write_both(path: Path, problem: Problem, placement: Placement, measured, simulated) -> None:
    """Both schedules as two processes of one trace."""
    from simdev.report.perfetto import trace_events, write_trace

    parts = [
        trace_events(problem.graph, problem.topology, placement.devices, schedule, name, number)
        for number, (name, schedule) in enumerate([("measured", measured), ("simulated", simulated)])
    ]
    write_trace(path, *parts)


def report_text(report: dict) -> list[str]:
    """The report of an execution as lines."""
    times, simulated = report["step_time_s"], report["simulated_step_time_s"]
    lines = [
        f"{report['graph']} on {report['machine']}: {times['median'] * 1e3:.2f} ms "
        f"(min {times['min'] * 1e3:.2f}, p95 {times['p95'] * 1e3:.2f}, {times['repeats']} steps); "
        f"simulated {simulated * 1e3:.2f} ms ({simulated / times['median'] - 1:+.1%})",
        f"results: {'the same as' if report['same_as_one_device'] else 'DIFFERENT from'} those of one device, "
        f"{'the same as' if report['same_as_pytorch'] else 'DIFFERENT from'} PyTorch's",
        f"transfers {report['comm_bytes'] / 2**20:.1f} MiB, {report['transfer_s'] * 1e3:.2f} ms",
    ]
    for name, device in report["devices"].items():
        lines.append(
            f"  {name:8} {device['ops']:6} ops  busy {device['busy_s'] * 1e3:9.2f} ms  peak "
            f"{device['peak_bytes'] / 2**20:8.1f} MiB  simulated {device['simulated_peak_bytes'] / 2**20:8.1f} MiB"
        )
    return lines


def profile_machine(
    steps: list[str], units: tuple[str, ...], out: Path, *, repeats: int, small: bool, seed: int
) -> list[str]:
    """Measure the devices ``units``: writes ``machine.toml`` (a topology), ``costs.csv`` (measured costs by op
    signature, read by ``--costs``) and ``profile.json`` (links by size, time between ops, spread). CPU workers are of
    the kind ``core``, GPUs of the kind ``gpu``. Returns lines that say what was found."""
    _need_torch()
    from simdev.measure.execute.host import check_units
    from simdev.measure.execute.link import device_file, granularity, profile_link, rates
    from simdev.measure.execute.profile import by_signature, profile_ops
    from simdev.problem.costs import save_measured

    check_units(units)
    groups = _groups(units)
    tables: dict[str, dict[str, float]] = {kind: {} for kind in groups}
    about, lines = [], []
    for entry in steps:
        program = load_program(entry, small=small, seed=seed)
        name = program.graph.name
        for kind, table in tables.items():
            found = [profile_ops(program, unit, repeats=repeats) for unit in groups[kind]]
            table.update(by_signature(program.graph, np.mean([profile.op_ns for profile in found], axis=0)))
            for unit, profile in zip(groups[kind], found, strict=True):
                about.append({"graph": name, "unit": unit, "step_ns": profile.step_ns, "gap_ns": profile.gap_ns,
                              "spread": profile.spread})  # fmt: skip
                lines.append(f"{name} on {unit}: {profile.step_ns / 1e6:.2f} ms, {profile.gap_ns / 1e3:.2f} us between "
                             f"ops, spread of op times {profile.spread:.1%}")  # fmt: skip
    kinds = {}
    for kind in tables:
        flops, bandwidth, memory = rates(groups[kind][0])
        gap = float(np.median([row["gap_ns"] for row in about if row["unit"] in groups[kind]]))
        share = len(groups[kind]) if kind == "core" else 1
        kinds[kind] = {"units": groups[kind], "flop_per_s": flops, "bytes_per_s": bandwidth,
                       "memory_bytes": memory // share, "gap_ns": gap,
                       "granularity": granularity(groups[kind][0])}  # fmt: skip
        lines.append(f"{kind}: {flops / 1e9:.1f} GFLOP/s (f32 product), {bandwidth / 1e9:.1f} GB/s (copy), "
                     f"memory by {kinds[kind]['granularity']} bytes")  # fmt: skip
    links = {}
    for at, first in enumerate(units):
        for second in units[at + 1 :]:
            link = links[first, second] = profile_link(first, second, repeats=min(60, 6 * repeats))
            lines.append(
                f"{first} - {second}: {link.alpha_ns / 1e3:.2f} us + bytes / {link.bytes_per_s / 1e9:.2f} GB/s"
            )
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "machine.toml", device_file(out.name, kinds, links))
    save_measured(tables, out / "costs.csv")
    told = [{"ends": ends, "bytes": link.sizes, "ns": link.ns} for ends, link in links.items()]
    write_text(out / "profile.json", json.dumps({"ops": about, "kinds": kinds, "links": told}, indent=1) + "\n")
    count = sum(map(len, tables.values()))
    lines.append(f"{out / 'machine.toml'}, {out / 'costs.csv'} ({count} signatures), {out / 'profile.json'}")
    return lines


def _groups(units: tuple[str, ...]) -> dict[str, list[str]]:
    """Units by the kind that they are in a machine file."""
    words = {"core": "cpu", "gpu": "cuda"}
    found = {kind: [unit for unit in units if unit.startswith(word)] for kind, word in words.items()}
    return {kind: group for kind, group in found.items() if group}


def profile_file(
    path: Path, units: tuple[str, ...], out: Path, *, repeats: int, seed: int
) -> tuple[list[str], list[str]]:
    """Measure the ops whose signatures ``path`` holds, each alone, and write them into ``costs.csv``, over what it has
    of them. Returns lines that say what was found, and lines that say what was left out and why."""
    _need_torch()
    from simdev.measure.execute.alone import profile_signatures, read_signatures
    from simdev.measure.execute.host import check_units
    from simdev.problem.costs import load_measured, save_measured

    signatures = read_signatures(path)
    check_units(units)
    costs = out / "costs.csv"
    tables = load_measured(costs) if costs.exists() else {}
    lines, told = [], []
    for kind, group in _groups(units).items():
        found = [profile_signatures(signatures, unit, repeats=repeats, seed=seed) for unit in group]
        times = {text: float(np.mean([table[text] for table, _ in found])) for text in found[0][0]}
        tables[kind] = tables.get(kind, {}) | times
        lines.append(f"{kind}: {len(times)} of {len(signatures)} signatures measured, each op alone")
        reasons = found[0][1]
        told += [f"{kind}: {len(reasons)} of {len(signatures)} signatures left out"] if reasons else []
        told += [f"  {text}: {reason}" for text, reason in reasons.items()]
    out.mkdir(parents=True, exist_ok=True)
    save_measured(tables, costs)
    return [*lines, str(costs)], told


# Column of the report -> its name among the figures, and how the report writes it (figures.csv has plain numbers).
COLUMNS = {
    "graph": ("graph", ""), "predictor": ("predictor", ""), "placements": ("placements", ""),
    "step ms": ("step_ms", ".0f"), "noise": ("noise", ".1%"), "error": ("error", ".1%"), "worst": ("worst", ".1%"),
    "bias": ("bias", "+.1%"), "tau": ("tau", ".3f"), "tau p10": ("tau_p10", ".3f"),
    "tau noise": ("tau_noise", ".3f"), "pairs": ("pairs", ".1%"), "regret": ("regret", ".1%"),
    "peak error": ("peak_error", ".1%"), "missed OOM": ("missed", ".1%"), "false alarms": ("false_alarms", ".1%"),
}  # fmt: skip
PREDICTORS = {"simulated_ns": "model", "machine_ns": "model + machine"}  # simulate, simulate_machine
PARTS = {"ops": "#d62728", "channel": "#1f77b4", "copies": "#9467bd", "dispatch": "#7f7f7f", "rest": "#c7c7c7"}


def report(folders: list[Path], out: Path) -> list[dict[str, str]]:
    """Write ``report.md``, ``figures.csv``, ``scatter.png`` and ``parts.png`` over comparisons; returns the table's
    lines."""
    from simdev.measure.execute.figures import error_parts, figures, over_rounds

    found, loads = {}, {}
    for folder in folders:
        rows = _read_rows(folder / "cases.jsonl")
        if rows:
            about = _read_about(folder / "about.json")
            found[about["graph"]] = over_rounds([row for row in rows if "simulated_ns" in row])
            loads[about["graph"]] = about["loaded"]
    if not found:
        raise InvalidInput("no cases.jsonl here", source=folders[0])
    lines, parts = [], {}
    for graph, rows in found.items():
        parts[graph] = error_parts(rows)
        step_ms = float(np.median([row["measured_ns"] for row in rows]) / 1e6)
        for key, predictor in PREDICTORS.items():
            got = {**figures(rows, key), "graph": graph.partition("[")[0], "predictor": predictor, "step_ms": step_ms}
            lines.append({column: got[name] for column, (name, _) in COLUMNS.items()})
    out.mkdir(parents=True, exist_ok=True)
    _draw_scatter(found, out / "scatter.png")
    _draw_parts(parts, out / "parts.png")
    _write_figures(lines, out / "figures.csv")
    told = [{column: format(line[column], form) for column, (_, form) in COLUMNS.items()} for line in lines]
    write_text(out / "report.md", _markdown(told, parts, loads))
    return told


def _write_figures(lines: list[dict], path: Path) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(COLUMNS), lineterminator="\n")
        writer.writeheader()
        for line in lines:
            rounded = {column: round(x, 5) if isinstance(x, float) else x for column, x in line.items()}
            writer.writerow(rounded)


def _markdown(lines: list[dict[str, str]], parts: dict[str, dict[str, float]], loads: dict[str, float]) -> str:
    def table(header, rows):
        return ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]]

    text = ["# Simulated against measured", "", *table(list(lines[0]), [list(line.values()) for line in lines]), "",
            "![Simulated against measured step times](scatter.png)", "",
            "## What the error of the model is made of", "",
            "Mean signed shares of the measured step; they add up to the bias.", ""]  # fmt: skip
    text += table(["graph", *PARTS], [
        [graph.partition("[")[0], *(f"{part[key]:+.1%}" for key in PARTS)] for graph, part in parts.items()
    ])  # fmt: skip
    text += ["", "The same ops beside a core that runs the same step, against alone, summed over the step: "
             + ", ".join(f"{graph.partition('[')[0]} {load:+.1%}" for graph, load in loads.items()) + "."]  # fmt: skip
    return "\n".join([*text, "", "![Parts of the error](parts.png)", ""])


def _draw_scatter(found: dict[str, list[dict]], path: Path) -> None:
    from matplotlib.figure import Figure

    columns = min(4, len(found))
    down = -(-len(found) // columns)
    figure = Figure(figsize=(3.4 * columns, 3.4 * down), layout="constrained")
    for number, (graph, rows) in enumerate(found.items(), 1):
        axes = figure.add_subplot(down, columns, number)
        measured = np.array([row["measured_ns"] for row in rows]) / 1e6
        low, high = np.transpose([np.percentile(row["samples_ns"], [10, 90]) / 1e6 for row in rows])
        for (key, label), colour in zip(PREDICTORS.items(), ("#1f77b4", "#d62728"), strict=True):
            predicted = np.array([row[key] for row in rows]) / 1e6
            reach = [np.maximum(measured - low, 0), np.maximum(high - measured, 0)]
            axes.errorbar(measured, predicted, xerr=reach, fmt="o", ms=3, lw=0.5, color=colour, label=label)
        ends = [0.9 * min(measured.min(), predicted.min()), 1.05 * max(measured.max(), predicted.max())]
        axes.plot(ends, ends, color="black", lw=0.8)
        axes.set_title(graph.partition("[")[0], fontsize=9)
        axes.set_xlabel("measured step, ms (bar: 10 to 90 % of repeats)", fontsize=7)
        axes.set_ylabel("simulated step, ms", fontsize=7)
        axes.tick_params(labelsize=7)
        if number == 1:
            axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def _draw_parts(parts: dict[str, dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.5 * len(parts) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    for row, part in enumerate(parts.values()):
        ends = {True: 0.0, False: 0.0}
        for label, colour in PARTS.items():
            share = part[label]
            axes.barh(row, 100 * share, left=100 * ends[share > 0], color=colour, label=label if not row else None)
            ends[share > 0] += share
    axes.set_yticks(range(len(parts)), [graph.partition("[")[0] for graph in parts], fontsize=8)
    axes.axvline(0, color="black", lw=0.8)
    axes.set_xlabel("simulated less measured, % of the measured step, mean over placements")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)
