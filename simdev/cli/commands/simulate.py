"""simulate, place, bound: one graph on one machine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.commands import (
    Contention,
    ContentionOption,
    CostsOption,
    Engine,
    GraphArgument,
    JsonOption,
    Order,
    OrderOption,
    PlacerOption,
    Runtime,
    RuntimeOption,
    TopologyArgument,
    build_problem,
    command,
    in_a_folder,
    run_placer,
)
from simdev.errors import InvalidInput, UnknownName


@command("simulate")
def simulate(
    graph: GraphArgument,
    topology: TopologyArgument,
    placement: Annotated[Path | None, typer.Option(help="Placement file (JSON).")] = None,
    placer: PlacerOption = None,
    engine: Annotated[Engine, typer.Option(help="Compiled, or the readable specification.")] = Engine.fast,
    order: OrderOption = Order.fifo,
    contention: ContentionOption = Contention.fifo,
    runtime: RuntimeOption = Runtime.dataflow,
    costs: CostsOption = None,
    evaluations: Annotated[int, typer.Option(help="Simulations that the placer may spend.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the placer.")] = 0,
    physics: Annotated[
        str | None, typer.Option(help="Time it by the rules of: placeto, baechi, load, ideal-links.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Step time and memory of one placement."""
    from simdev import sim
    from simdev.problem.placement import Placement

    if (placement is None) == (placer is None):
        raise InvalidInput("give either --placement or --placer")
    problem = build_problem(graph, topology, order, contention, runtime, costs)
    if placement is not None:
        found = Placement.load(placement, problem)
    else:
        found = run_placer(problem, placer, evaluations, seed)
    if physics is not None:
        from simdev.sim.presets import step_ns

        step = step_ns(problem, found, physics, engine)
        report = {"graph": problem.graph.name, "topology": problem.topology.name, "physics": physics, "step_ns": step}
        print(json.dumps(report) if as_json else f"{report['graph']} under {physics}: {step / 1e6:.3f} ms")
        return
    print_schedule(problem, found, sim.simulate(problem, found, engine=engine), as_json)


@command("place")
def place(
    graph: GraphArgument,
    topology: Annotated[str | None, typer.Argument(help="Topology name or TOML file (default: the policy's).")] = None,
    placer: PlacerOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Where to write.", callback=in_a_folder)] = None,
    policy: Annotated[Path | None, typer.Option(help="Folder of a trained policy (simdev train).")] = None,
    order: OrderOption = Order.fifo,
    contention: ContentionOption = Contention.fifo,
    runtime: RuntimeOption = Runtime.dataflow,
    costs: CostsOption = None,
    evaluations: Annotated[int, typer.Option(help="Simulations that the placer may spend.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the placer.")] = 0,
    machine: Annotated[str | None, typer.Option("--topology", "-t", help="The same as TOPOLOGY.")] = None,
    modules: Annotated[
        Path | None,
        typer.Option("--device-map", help="Write a device for each PyTorch module (JSON).", callback=in_a_folder),
    ] = None,
) -> None:
    """Run one placer, or a trained policy, and write its placement (JSON).

    A policy's most probable placement is the first evaluation, and all of it with --evaluations 1; the others tune it.
    """
    from simdev import sim

    if topology is not None and machine is not None:
        raise InvalidInput("given twice", source="TOPOLOGY")
    topology = topology or machine
    if (policy is None) == (placer is None):
        raise InvalidInput("give either --placer or --policy")
    if policy is not None:
        placer, topology = of_policy(policy, topology)
    if topology is None:
        raise InvalidInput("missing", source="TOPOLOGY")
    problem = build_problem(graph, topology, order, contention, runtime, costs)
    found = run_placer(problem, placer, evaluations, seed, **({} if policy is None else {"policy": str(policy)}))
    if out is not None:
        found.save(out, problem)
    print_schedule(problem, found, sim.simulate(problem, found), False)
    if modules is not None:
        print_device_map(problem, found, modules)


def print_device_map(problem, placement, path: Path) -> None:
    """Write the device map of a placement and say what it costs."""
    from simdev.integrations.torch_map import device_map, write_device_map

    found = device_map(problem, placement)
    write_device_map(path, problem, found)
    cost = f"{found.step_ns / 1e6:.3f} ms, {found.step_ns / found.placed_ns - 1:+.1%}"
    print(f"{path}: modules on devices: {len(found.modules)}; with whole modules on devices {cost}")
    if found.splits:
        print(f"as a pipeline {found.pipeline_ns / 1e6:.3f} ms, split before {', '.join(found.splits)}")


def of_policy(folder: Path, topology: str | None) -> tuple[str, str | None]:
    """The placer of a trained policy, and the first topology that it was trained on where none is given."""
    from simdev.placers import registry
    from simdev.placers.policy_file import read_header
    from simdev.problem.topology import topology_names

    header = read_header(folder)
    if header["placer"] not in registry.placers():  # a policy is data: it never names code that is executed
        how = f"to run a placer of your own, give -p 'FILE.py:NAME[policy={folder}]' instead"
        raise UnknownName("placer", header["placer"], (), source=f"{folder}: {how}")
    if topology is None:
        trained = header.get("trained_on")
        first = trained[0] if isinstance(trained, list) and trained else None
        topology = first.get("topology") if isinstance(first, dict) else None
        topology = topology if topology in topology_names() else None
    return header["placer"], topology


@command("bound")
def bound(
    graph: GraphArgument,
    topology: TopologyArgument,
    order: OrderOption = Order.fifo,
    contention: ContentionOption = Contention.fifo,
    runtime: RuntimeOption = Runtime.dataflow,
    costs: CostsOption = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="Let a constraint solver prove one, too, for so long (small graphs).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """A step time that no placement can beat."""
    from simdev.analysis.bounds import lower_bounds

    problem = build_problem(graph, topology, order, contention, runtime, costs)
    proven = [] if seconds is None else [solver_bound(problem, seconds)]
    found = lower_bounds(problem) + proven
    best = max(found, key=lambda bound: bound.ns)
    if as_json:
        each = [{"lower_bound_s": bound.ns / 1e9, "method": bound.method} for bound in found]
        print(json.dumps({"lower_bound_s": best.ns / 1e9, "method": best.method, "bounds": each}))
        return
    print(f"lower bound {best.ns / 1e6:.3f} ms ({best.method})")
    for bound in found:
        print(f"  {bound.ns / 1e6:.3f} ms  {bound.method}")


def solver_bound(problem, seconds: float):
    """The bound that CP-SAT proves for the whole graph by the clock: bench rows, which must be the same anywhere, have
    none of these."""
    from simdev.analysis.bounds import Bound
    from simdev.analysis.feasible import check_feasible
    from simdev.exact.makespan import solve_makespan

    most = 3000
    if problem.graph.n_ops > most:
        raise InvalidInput(
            f"{problem.graph.n_ops:,} ops: a solver takes up to {most:,}", source=problem.graph.name, field="seconds"
        )
    check_feasible(problem)
    result = solve_makespan(problem, seconds=math.inf, wall_seconds=seconds)
    return Bound(result.bound_ns, f"cp-sat, {result.status}")


def print_schedule(problem, placement, schedule, as_json: bool) -> None:
    from simdev.bench.run import overflow_text

    names = [device.name for device in problem.topology.devices]
    counts = [int((placement.devices == number).sum()) for number in range(len(names))]
    report = {
        "graph": problem.graph.name,
        "fingerprint": problem.graph.fingerprint,
        "topology": problem.topology.name,
        "cost_hash": problem.costs.hash,
        "placement": placement.hash,
        "feasible": bool(schedule.feasible),
        "step_time_s": schedule.step_ns / 1e9,
        "step_ns": int(schedule.step_ns),
        "comm_bytes": int(schedule.comm_bytes),
        "overflow": overflow_text(problem, schedule),
        "devices": {
            name: {"ops": count, "peak_memory_bytes": int(peak), "capacity_bytes": int(capacity)}
            for name, count, peak, capacity in zip(
                names, counts, schedule.peak_bytes, problem.topology.memory_bytes, strict=True
            )
        },
    }
    if as_json:
        print(json.dumps(report, indent=1))
        return
    verdict = "" if schedule.feasible else f"  OUT OF MEMORY by bytes {report['overflow']}"
    print(f"{problem.graph.name} on {problem.topology.name}: {schedule.step_ns / 1e6:.3f} ms{verdict}")
    print(f"transfers {schedule.comm_bytes / 2**20:.1f} MiB")
    for name, device in report["devices"].items():
        peak, capacity = device["peak_memory_bytes"] / 2**30, device["capacity_bytes"] / 2**30
        print(f"  {name:8} {device['ops']:7} ops  peak {peak:8.3f} of {capacity:.3f} GiB")
