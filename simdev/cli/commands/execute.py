"""execute, profile, compare-real: placements on the devices of this machine."""

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
MachineArgument = Annotated[str, typer.Argument(help="Topology of this machine (simdev profile writes one).")]
SmallOption = Annotated[bool, typer.Option("--small", help="A size that takes 0.1 to 2 s a step on one core.")]
RepeatsOption = Annotated[int, typer.Option(help="Steps that are measured.")]
SeedOption = Annotated[int, typer.Option(help="Seed of parameters, batch and placements.")]
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
        typer.Option(help="Where to write the measured and the simulated step for Perfetto.", callback=in_a_folder),
    ] = None,
    small: SmallOption = False,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Run a training step under a placement on this machine, measure it and put it beside the simulation."""
    from simdev.measure import compare as real
    from simdev.problem.placement import Placement
    from simdev.problem.topology import load_topology

    if (placement is None) == (placer is None):
        raise InvalidInput("give either --placement or --placer")
    positive(repeats, "--repeats")
    topology = load_topology(machine)
    real.units_of(topology)
    program = real.load_program(step, small=small, seed=seed)
    costs = real.profile_costs(program, topology, repeats)
    problem = real.real_problem(program, topology, costs, order)
    found = Placement.load(placement, problem) if placement else run_placer(problem, placer, 200, seed)
    report, measured, simulated = real.execute_real(program, problem, found, repeats)
    if trace is not None:
        real.write_both(trace, problem, found, measured, simulated)
    if as_json:
        print(json.dumps(report, indent=1))
        return
    for line in real.report_text(report):
        print(line)
    if trace is not None:
        print(f"{trace}: open it at https://ui.perfetto.dev")


@command("profile", hidden=True)
def profile(
    out: FolderOption,
    steps: Annotated[list[str] | None, typer.Argument(help="Workload ids, or my_model.py:make_step.")] = None,
    ops: Annotated[
        Path | None, typer.Option(help="Cost table, or text with an op signature a line: these ops, each alone.")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", help="cpu:CORE or cuda:GPU, as often as needed; cpu and cuda are the first of each."),
    ] = None,
    repeats: RepeatsOption = 10,
    small: SmallOption = False,
    seed: SeedOption = 0,
) -> None:
    """Measure ops, the way between devices and the time between ops: a machine file and a cost table."""
    from simdev.measure import compare as real

    positive(repeats, "--repeats")
    if bool(steps) == (ops is not None):
        raise InvalidInput("give either steps or --ops")
    units = real.units_named(device or ["cpu"])
    if ops is None:
        found, left_out = real.profile_machine(steps, units, out, repeats=repeats, small=small, seed=seed), []
    else:
        found, left_out = real.profile_file(ops, units, out, repeats=repeats, seed=seed)
    for line in found:
        print(line)
    for line in left_out:
        print(line, file=sys.stderr)


@command("compare-real", hidden=True)
def compare_real(
    step: StepArgument,
    machine: MachineArgument,
    out: FolderOption,
    placements: Annotated[int, typer.Option(help="How many placements.")] = 40,
    repeats: RepeatsOption = 10,
    rounds: Annotated[int, typer.Option(help="How often all placements are run, each time in another order.")] = 1,
    small: SmallOption = False,
    seed: SeedOption = 0,
) -> None:
    """Simulate and run many placements of a step on this machine: how far is the simulator from it?"""
    from simdev.measure import compare as real

    for value, option in ((placements, "--placements"), (repeats, "--repeats"), (rounds, "--rounds")):
        positive(value, option)
    real.compare_real(step, machine, out, placements=placements, repeats=repeats, rounds=rounds, seed=seed, small=small)
    lines = real.report([out], out)
    print_table(list(lines[0]), [list(line.values()) for line in lines])
    print(f"{out / 'report.md'}, {out / 'scatter.png'}")


@command("measured", hidden=True)
def measured(
    folders: Annotated[list[Path], typer.Argument(help="Folders that compare-real wrote.")],
    out: FolderOption,
) -> None:
    """One report, with its pictures, over several comparisons with real runs."""
    from simdev.measure import compare as real

    lines = real.report(folders, out)
    print_table(list(lines[0]), [list(line.values()) for line in lines])
    print(f"{out / 'report.md'}, {out / 'figures.csv'}, {out / 'scatter.png'}, {out / 'parts.png'}")
