"""``simdev execute``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import REAL, command
from simdev.cli.options import (
    EVALUATIONS,
    JsonOption,
    MachineArgument,
    Order,
    OrderOption,
    PlacerOption,
    RepeatsOption,
    SeedOption,
    SmallOption,
    StepArgument,
    in_a_folder,
    positive,
)
from simdev.cli.problems import run_placer
from simdev.cli.tables import print_json
from simdev.errors import InvalidInput


@command("execute", topic=REAL)
def execute(
    step: StepArgument,
    machine: MachineArgument,
    placement: Annotated[Path | None, typer.Option(help="Placement file (JSON).")] = None,
    placer: PlacerOption = None,
    order: OrderOption = Order.fifo,
    repeats: RepeatsOption = 10,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write the measured and the simulated step to this file, for Perfetto.", callback=in_a_folder
        ),
    ] = None,
    small: SmallOption = False,
    seed: SeedOption = 0,
    mesh: Annotated[
        str | None,
        typer.Option(help="Run a parallel model (small) with one process for each rank: dp_shard=2, tp=2, pp=2 ..."),
    ] = None,
    microbatches: Annotated[int, typer.Option(help="With --mesh: microbatches of each replica in a step.")] = 1,
    schedule: Annotated[
        str, typer.Option(help="With --mesh: gpipe, 1f1b, interleaved, looped-bfs, zero-bubble, zbv or dualpipe-v.")
    ] = "1f1b",
    stages_per_rank: Annotated[int, typer.Option(help="With --mesh: stages on a pipeline rank.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Run a placed step, or a parallel one (--mesh), on this computer; compare with its simulation."""
    if mesh is not None:
        if placement is not None or placer is not None or trace is not None:
            raise InvalidInput("a plan (--mesh) has no placement, placer or trace", source="execute")
        _execute_plan(step, machine, mesh, microbatches, schedule, stages_per_rank, repeats, as_json)
        return
    if (microbatches, schedule, stages_per_rank) != (1, "1f1b", 1):
        raise InvalidInput("--microbatches, --schedule and --stages-per-rank need --mesh", source="execute")
    from simdev.measure.profiles import profile_costs
    from simdev.measure.programs import load_program, measured_problem, workers_of
    from simdev.measure.run import execute_placement, report_text, write_trace_of_both
    from simdev.problem.placement import Placement
    from simdev.problem.topology import load_topology

    if (placement is None) == (placer is None):
        raise InvalidInput("give either --placement or --placer, such as --placer heft")
    positive(repeats, "--repeats")
    topology = load_topology(machine)
    workers_of(topology)
    program = load_program(step, small=small, seed=seed)
    costs = profile_costs(program, topology, repeats)
    problem = measured_problem(program, topology, costs, order)
    found = Placement.load(placement, problem) if placement else run_placer(problem, placer, EVALUATIONS, seed)
    report, measured, simulated = execute_placement(program, problem, found, repeats)
    if trace is not None:
        write_trace_of_both(trace, problem, found, measured, simulated)
    if as_json:
        print_json(report)
        return
    for line in report_text(report):
        print(line)
    if trace is not None:
        print(f"{trace}: open it at https://ui.perfetto.dev")


def _execute_plan(model, machine, mesh, microbatches, schedule, stages_per_rank, repeats, as_json) -> None:
    from simdev.measure.plans import execute_plan
    from simdev.parallel import parse_mesh
    from simdev.problem.topology import load_topology

    positive(repeats, "--repeats")
    report = execute_plan(
        model, load_topology(machine), parse_mesh(mesh), microbatches, schedule, stages_per_rank, repeats
    )
    if as_json:
        print_json(report)
        return
    low, high = report["measured_p10_ns"] / 1e6, report["measured_p90_ns"] / 1e6
    print(f"{report['model']}, {report['mesh']}, {report['schedule']}, {report['microbatches']} microbatches")
    print(f"measured    {report['measured_ns'] / 1e6:,.2f} ms (10 to 90 %: {low:,.2f} to {high:,.2f} ms)")
    print(f"simulated   {report['simulated_ns'] / 1e6:,.2f} ms ({report['error']:+.1%})")
    both = (report[f"{kind}_compute_ns"] / 1e6 for kind in ("measured", "simulated"))
    print("of it computing, on the rank that computes longest: {:,.2f} and {:,.2f} ms".format(*both))
    if report["disturbed"] > 0.05:
        print(f"other processes took {report['disturbed']:.0%} of the cores: repeat this on a quiet machine")
