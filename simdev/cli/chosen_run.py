"""The run that ``simdev view`` and ``simdev explain`` are to show."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli import completion
from simdev.errors import InvalidInput, UnknownName

RunArgument = Annotated[Path, typer.Argument(help="Result folder of a bench, or placement file.")]
WorkloadOption = Annotated[
    str | None, typer.Option("--workload", "-w", help="Workload or graph file.", autocompletion=completion.workloads)
]
MachineOption = Annotated[
    str | None, typer.Option("--topology", "-t", help="Topology name or TOML file.", autocompletion=completion.machines)
]
EntryOption = Annotated[
    str | None,
    typer.Option("--placer", "-p", help="Placer, in a folder (default: the best).", autocompletion=completion.placers),
]


def chosen_run(run: Path, workload: str | None, topology: str | None, placer: str | None):
    """What is to be shown: an :class:`Explanation` of a placement or, of a planner's row, the
    :class:`simdev.parallel.PlanReport` of its plan."""
    from simdev import sim
    from simdev.bench.plan_rows import PlanRow
    from simdev.bench.plan_verify import report_of
    from simdev.report.explain import Explanation

    if run.is_dir():
        row = _best_row(run, workload, topology, placer)
        return report_of(run, row) if isinstance(row, PlanRow) else _explained(run, row)
    problem, placement = _from_file(run, workload, topology, placer)
    return Explanation(problem, placement, sim.simulate(problem, placement))


def compared_runs(folder: Path, workload: str | None, topology: str | None, before: str, placer: str | None):
    """The runs of two placers on one problem of a result folder, as :class:`Explanation`, and the names of both.

    The first is that of ``before``, the second that of ``placer`` (default: the best)."""
    from simdev.bench.rows import Row

    if not folder.is_dir():
        raise InvalidInput("--before compares the runs of a result folder", source=folder)
    rows = [_best_row(folder, workload, topology, name) for name in (before, placer)]
    if not all(isinstance(row, Row) for row in rows):
        raise InvalidInput("--before compares placements, not plans", source=folder)
    return *(_explained(folder, row) for row in rows), (rows[0].entry, rows[1].entry)


def _best_row(folder: Path, workload: str | None, topology: str | None, placer: str | None):
    """The best stored run of a result folder among those that the options name."""
    from simdev.bench.plan_rows import as_row, full_name, read_folder

    origin = {as_row(row).key: row for row in read_folder(folder)}
    found = list(map(as_row, origin.values()))
    workload = workload and full_name(workload, found)
    for column, wanted in (("workload", workload), ("topology", topology), ("entry", placer)):
        names = sorted({getattr(row, column) for row in found})
        if wanted is None and column != "entry" and len(names) > 1:
            raise InvalidInput(f"has several: choose one with --{column} ({', '.join(names)})", source=folder)
        if wanted is not None and wanted not in names:
            raise UnknownName(column.replace("entry", "placer"), wanted, names, source=folder)
        found = [row for row in found if wanted is None or getattr(row, column) == wanted]
    found = [row for row in found if row.placement and row.simulated_ns is not None]
    if not found:
        raise InvalidInput("no such run has a placement or a plan that fits", source=folder)
    return origin[min(found, key=lambda row: (row.step_ns is None, row.simulated_ns, row.key)).key]


def _explained(folder: Path, row):
    """The run of a row as its objective runs it: a step, or all microbatches of a pipeline."""
    from simdev.bench import stored
    from simdev.bench.objective import parse_objective
    from simdev.problem.placement_file import placement_file, stored_placement
    from simdev.report.explain import Explanation

    problem, objective = stored.stored_problem(folder, row), parse_objective(row.objective)
    placement = stored_placement(folder, row.placement)
    placement.check(problem, source=placement_file(folder, row.placement))
    return Explanation(*objective.run(problem, placement))


def _from_file(path: Path, workload: str | None, topology: str | None, placer: str | None):
    """A placement file, on the graph and the machine that the options name, else on those that the file names."""
    from simdev.bench import stored
    from simdev.placers import registry
    from simdev.problem.placement import Placement
    from simdev.problem.problem import Problem
    from simdev.problem.topology import load_topology

    if placer is not None:
        raise InvalidInput("--placer chooses a run of a folder", source=path)
    names = ("", "") if workload and topology else stored.named_in(path)
    graph = registry.load_workload(workload) if workload else stored.registered_workload(names[0])
    machine = load_topology(topology) if topology else stored.registered_machine(names[1])
    problem = Problem.build(graph, machine)
    return problem, Placement.load(path, problem)
