"""execute, profile, compare-real, measured: placements on the devices of this computer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.commands import (
    JsonOption,
    Order,
    OrderOption,
    PlacerOption,
    command,
    in_a_folder,
    positive,
    print_table,
    run_placer,
)
from simdev.errors import InvalidInput

StepArgument = Annotated[str, typer.Argument(help="Workload id, or my_model.py:make_step.")]
MachineArgument = Annotated[str, typer.Argument(help="Topology of this computer (simdev profile writes one).")]
SmallOption = Annotated[bool, typer.Option("--small", help="Use a size at which a step takes 0.1 to 2 s on one core.")]
RepeatsOption = Annotated[int, typer.Option(help="Number of measured steps.")]
SeedOption = Annotated[int, typer.Option(help="Seed of the parameters, the batch and the placements.")]
FolderOption = Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.", callback=in_a_folder)]


@command("execute")
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
    as_json: JsonOption = False,
) -> None:
    """Run a training step under a placement on this computer and compare it with its simulation."""
    from simdev.measure.profiles import profile_costs
    from simdev.measure.programs import load_program, measured_problem, workers_of
    from simdev.measure.run import execute_placement, report_text, write_trace_of_both
    from simdev.problem.placement import Placement
    from simdev.problem.topology import load_topology

    if (placement is None) == (placer is None):
        raise InvalidInput("give either --placement or --placer")
    positive(repeats, "--repeats")
    topology = load_topology(machine)
    workers_of(topology)
    program = load_program(step, small=small, seed=seed)
    costs = profile_costs(program, topology, repeats)
    problem = measured_problem(program, topology, costs, order)
    found = Placement.load(placement, problem) if placement else run_placer(problem, placer, 200, seed)
    report, measured, simulated = execute_placement(program, problem, found, repeats)
    if trace is not None:
        write_trace_of_both(trace, problem, found, measured, simulated)
    if as_json:
        print(json.dumps(report, indent=1))
        return
    for line in report_text(report):
        print(line)
    if trace is not None:
        print(f"{trace}: open it at https://ui.perfetto.dev")


@command("profile", hidden=True)
def profile(
    out: FolderOption,
    steps: Annotated[list[str] | None, typer.Argument(help="Workload ids, or my_model.py:make_step.")] = None,
    ops: Annotated[
        Path | None,
        typer.Option(help="Cost table, or text with one op signature per line: measure these ops, each alone."),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", help="cpu:CORE or cuda:GPU; may be repeated. cpu and cuda name the first of each."),
    ] = None,
    repeats: RepeatsOption = 10,
    small: SmallOption = False,
    seed: SeedOption = 0,
) -> None:
    """Measure ops and transfers on this computer; writes a topology file and a cost table."""
    from simdev.measure.profiles import profile_file, profile_machine
    from simdev.measure.programs import workers_named

    positive(repeats, "--repeats")
    if bool(steps) == (ops is not None):
        raise InvalidInput("give either steps or --ops")
    workers = workers_named(device or ["cpu"])
    if ops is None:
        found, left_out = profile_machine(steps, workers, out, repeats=repeats, small=small, seed=seed), []
    else:
        found, left_out = profile_file(ops, workers, out, repeats=repeats, seed=seed)
    for line in found:
        print(line)
    for line in left_out:
        print(line, file=sys.stderr)


@command("compare-real", hidden=True)
def compare_real(
    step: StepArgument,
    machine: MachineArgument,
    out: FolderOption,
    placements: Annotated[int, typer.Option(help="Number of placements.")] = 40,
    repeats: RepeatsOption = 10,
    rounds: Annotated[int, typer.Option(help="Number of rounds; each runs all placements in another order.")] = 1,
    small: SmallOption = False,
    seed: SeedOption = 0,
) -> None:
    """Simulate and run many placements of a step on this computer, and report how far apart the two are."""
    from simdev.measure.compare import compare_placements
    from simdev.measure.report import report

    for value, option in ((placements, "--placements"), (repeats, "--repeats"), (rounds, "--rounds")):
        positive(value, option)
    compare_placements(
        step, machine, out, placements=placements, repeats=repeats, rounds=rounds, seed=seed, small=small
    )
    lines = report([out], out)
    print_table(list(lines[0]), [list(line.values()) for line in lines])
    print(f"{out / 'report.md'}, {out / 'scatter.png'}")


@command("measured", hidden=True)
def measured(
    folders: Annotated[list[Path], typer.Argument(help="Folders that simdev compare-real wrote.")],
    out: FolderOption,
) -> None:
    """Write one report, with pictures, over several comparisons with real runs."""
    from simdev.measure.report import report

    lines = report(folders, out)
    print_table(list(lines[0]), [list(line.values()) for line in lines])
    print(f"{out / 'report.md'}, {out / 'figures.csv'}, {out / 'scatter.png'}, {out / 'parts.png'}")
