"""``simdev place``."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated, TextIO

import typer

from simdev.cli import completion
from simdev.cli.app import command
from simdev.cli.options import (
    EVALUATIONS,
    Contention,
    ContentionOption,
    CostsOption,
    GraphArgument,
    JsonOption,
    Order,
    OrderOption,
    PlacerOption,
    Runtime,
    RuntimeOption,
    in_a_folder,
    positive,
)
from simdev.cli.problems import build_problem, run_placer
from simdev.cli.tables import print_schedule
from simdev.errors import InvalidInput, UnknownName


@command("place")
def place(
    graph: GraphArgument,
    topology: Annotated[
        str | None,
        typer.Argument(help="Topology name or TOML file (default: the policy's).", autocompletion=completion.machines),
    ] = None,
    placer: PlacerOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Where to write.", callback=in_a_folder)] = None,
    policy: Annotated[Path | None, typer.Option(help="Folder of a trained policy (simdev train).")] = None,
    order: OrderOption = Order.fifo,
    contention: ContentionOption = Contention.fifo,
    runtime: RuntimeOption = Runtime.dataflow,
    costs: CostsOption = None,
    evaluations: Annotated[
        int | None,
        typer.Option(help=f"Simulations that it may spend (default: {EVALUATIONS}, or no limit with --seconds)."),
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Seconds that it may spend.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the placer.")] = 0,
    machine: Annotated[
        str | None, typer.Option("--topology", "-t", help="The same as TOPOLOGY.", autocompletion=completion.machines)
    ] = None,
    modules: Annotated[
        Path | None,
        typer.Option("--device-map", help="Write a device for each PyTorch module (JSON).", callback=in_a_folder),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run one placer or policy and write its placement. Ctrl-C ends a search, and writes the best one so far.

    The first evaluation of a policy is its most probable placement, with --evaluations 1 the only one; further
    evaluations fine-tune the policy on this graph.
    """
    from simdev import sim

    if topology is not None and machine is not None:
        raise InvalidInput("given twice", source="TOPOLOGY")
    topology = topology or machine
    if (policy is None) == (placer is None):
        raise InvalidInput("give either --placer or --policy, such as --placer local-search")
    if policy is not None:
        placer, topology = of_policy(policy, topology)
    if topology is None:
        raise InvalidInput("missing", source="TOPOLOGY")
    problem = build_problem(graph, topology, order, contention, runtime, costs)
    seconds = positive(seconds, "--seconds") or math.inf
    most = evaluations if evaluations is not None else EVALUATIONS if seconds == math.inf else math.inf
    given = {} if policy is None else {"policy": str(policy)}
    found = run_placer(problem, placer, most, seed, seconds, **given)
    if out is not None:
        found.save(out, problem)
    print_schedule(problem, found, sim.simulate(problem, found), as_json)
    if modules is not None:
        print_device_map(problem, found, modules, sys.stderr if as_json else sys.stdout)


def print_device_map(problem, placement, path: Path, file: TextIO) -> None:
    """Write the device map of a placement and say on ``file`` what it costs."""
    from simdev.integrations.torch_map import device_map, write_device_map

    found = device_map(problem, placement)
    write_device_map(path, problem, found)
    cost = f"{found.step_ns / 1e6:.3f} ms, {found.step_ns / found.placed_ns - 1:+.1%}"
    print(f"{path}: modules on devices: {len(found.modules)}; with each module on one device {cost}", file=file)
    if found.splits:
        print(f"as a pipeline {found.pipeline_ns / 1e6:.3f} ms, split before {', '.join(found.splits)}", file=file)


def of_policy(folder: Path, topology: str | None) -> tuple[str, str | None]:
    """The placer of a trained policy, and the first topology that it was trained on if none is given."""
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
