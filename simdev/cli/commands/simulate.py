"""``simdev simulate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import command
from simdev.cli.options import (
    EVALUATIONS,
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
from simdev.cli.tables import print_answer, print_json, print_schedule
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
    evaluations: Annotated[int, typer.Option(help="Simulations that the placer may spend.")] = EVALUATIONS,
    seed: Annotated[int, typer.Option(help="Seed of the placer.")] = 0,
    physics: Annotated[
        str | None, typer.Option(help="Time it by the rules of: placeto, baechi, load, ideal-links.")
    ] = None,
    pipeline: Annotated[
        int | None, typer.Option(min=1, help="Send this many microbatches through the placement as a pipeline.")
    ] = None,
    schedule: Annotated[str, typer.Option(help="Schedule of the pipeline: gpipe or 1f1b.")] = "1f1b",
    as_json: JsonOption = False,
) -> None:
    """Compute step time and memory of one placement."""
    from simdev import sim
    from simdev.problem.placement import Placement

    if (placement is None) == (placer is None):
        raise InvalidInput("give either --placement or --placer, such as --placer heft")
    problem = build_problem(graph, topology, order, contention, runtime, costs)
    if placement is not None:
        found = Placement.load(placement, problem)
    else:
        found = run_placer(problem, placer, evaluations, seed)
    if pipeline is not None:
        print_pipeline(problem, found, pipeline, schedule, engine, as_json)
        return
    if physics is not None:
        from simdev.sim.presets import step_ns

        step = step_ns(problem, found, physics, engine)
        report = {"graph": problem.graph.name, "topology": problem.topology.name, "physics": physics, "step_ns": step}
        print_answer(report, [f"{report['graph']} under {physics}: {step / 1e6:.3f} ms"], as_json)
        return
    print_schedule(problem, found, sim.simulate(problem, found, engine=engine), as_json)


def print_pipeline(problem, placement, microbatches: int, schedule: str, engine: str, as_json: bool) -> None:
    """Print what a pipeline of microbatches takes, and which ops spoil it."""
    from simdev.parallel.against_flow import ops_against_flow
    from simdev.sim.pipeline import simulate_pipeline
    from simdev.sim.unroll import teams_of

    report = simulate_pipeline(problem, placement, microbatches, schedule, engine=engine)
    names = [problem.topology.devices[device].name for device in report.stages]
    teams = teams_of(placement, problem.topology.n_devices, microbatches)
    members = [[problem.topology.devices[device].name for device in teams[stage]] for stage in report.stages]
    wrong = ops_against_flow(problem, placement, report.stages)
    found = {
        "graph": problem.graph.name,
        "topology": problem.topology.name,
        "schedule": schedule,
        "microbatches": microbatches,
        "total_ns": int(report.total_ns),
        "steady_ns": float(report.steady_ns),
        "bubble_fraction": report.bubble_fraction,
        "stages": names,
        "stage_devices": members,
        "exchange_ns": int(report.exchange_ns),
        "feasible": report.feasible,
        "against_flow": [vars(op) for op in wrong],
    }
    if as_json:
        print_json(found)
        return
    verdict = "" if report.feasible else "  OUT OF MEMORY"
    stages = " -> ".join(map(" + ".join, members))
    print(f"{problem.graph.name}: {microbatches} microbatches, {schedule}, stages {stages}{verdict}")
    print(f"{report.total_ns / 1e6:.3f} ms in all, {report.steady_ns / 1e6:.3f} ms for each further microbatch")
    exchange = f", replicas exchange gradients for {report.exchange_ns / 1e6:.3f} ms" if report.exchange_ns else ""
    print(f"bubble {report.bubble_fraction:.1%}{exchange}")
    for op in wrong[:5]:
        layer = f"layer {op.layer!r}" if op.layer else "no layer"
        print(
            f"warning: op {op.op!r} ({layer}, {op.phase}) is on stage {op.stage} ({names[op.stage]}), but stage "
            f"{op.reader_stage} ({names[op.reader_stage]}) reads it: the stages wait for each other",
            file=sys.stderr,
        )
    if len(wrong) > 5:
        print(f"warning: {len(wrong) - 5} more such ops (--json lists them)", file=sys.stderr)
