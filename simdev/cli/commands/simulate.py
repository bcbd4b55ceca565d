"""``simdev simulate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import command
from simdev.cli.options import (
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
)
from simdev.cli.problems import build_problem, run_placer
from simdev.cli.schedules import print_schedule
from simdev.errors import InvalidInput


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
    """Compute step time and memory of one placement."""
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
