"""The subcommands of ``simdev``: one file per group, each found by its presence; what they share is here."""

from __future__ import annotations

import functools
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from simdev.errors import InvalidInput

EXAMPLES = """\b
Examples:
  simdev bench --placer all
  simdev leaderboard leaderboard/quick --html board.html
  simdev capture my_model.py:make_step -o my_model.npz
  simdev place my_model.npz my_machine.toml -p local-search -o found.json
  simdev explain found.json

\b
Exit codes: 0 done, 1 a check found differences, 2 wrong input, 3 runs were lost, 130 interrupted.
"""

app = typer.Typer(
    help="Simulate and benchmark the placement of neural networks on devices.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from simdev import __version__

        print(f"simdev {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None: ...


class Engine(StrEnum):
    fast = "fast"
    reference = "reference"


class Order(StrEnum):
    fifo = "fifo"
    priority = "priority"
    program = "program"


class Contention(StrEnum):
    fifo = "fifo"
    none = "none"
    fair = "fair"


class Runtime(StrEnum):
    dataflow = "dataflow"
    eager = "eager"


class Backend(StrEnum):
    local = "local"
    dask = "dask"


GraphArgument = Annotated[str, typer.Argument(help="Workload id, graph file, or my_model.py:make_step.")]
TopologyArgument = Annotated[str, typer.Argument(help="Topology name (simdev list topologies) or TOML file.")]
PlacerOption = Annotated[str | None, typer.Option("--placer", "-p", help="Placer id: name or name[param=value].")]
OrderOption = Annotated[Order, typer.Option(help="The order in which a device takes its ready ops.")]
ContentionOption = Annotated[Contention, typer.Option(help="How transfers share a link.")]
RuntimeOption = Annotated[Runtime, typer.Option(help="What decides when an op may start.")]
CostsOption = Annotated[Path | None, typer.Option(help="Measured costs (simdev import --costs), before the model's.")]
BackendOption = Annotated[Backend, typer.Option(help="Processes of this machine, or a Dask cluster.")]
SchedulerOption = Annotated[str | None, typer.Option(help="Address of the Dask scheduler.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def in_a_folder(out: Path | None) -> Path | None:
    """Refuse a path that cannot be written to before the work is done rather than after."""
    if out is not None and not os.access(out.parent, os.W_OK):
        raise InvalidInput("Permission denied" if out.parent.is_dir() else "No such file or directory", source=out)
    return out


OutOption = Annotated[Path, typer.Option("--out", "-o", help="Where to write.", callback=in_a_folder)]


def use_dask(backend: Backend, scheduler: str | None) -> bool:
    if (backend == Backend.dask) != (scheduler is not None):
        raise InvalidInput("--backend dask and --scheduler ADDRESS go together")
    return backend == Backend.dask


def command(name: str, **settings):
    """Register a subcommand that exits with 130 on Ctrl-C."""

    def register(function):
        @app.command(name, **settings)
        @functools.wraps(function)
        def run(*args, **kwargs):
            try:
                function(*args, **kwargs)
            except KeyboardInterrupt:
                print("simdev: interrupted", file=sys.stderr)
                raise typer.Exit(130) from None

        return run

    return register


def build_problem(graph, topology, order="fifo", contention="fifo", runtime="dataflow", costs=None):
    """The problem that a command's arguments name."""
    from simdev.placers import registry
    from simdev.problem.costs import CostModel, load_measured
    from simdev.problem.problem import Problem, Rules
    from simdev.problem.topology import load_topology

    model = CostModel() if costs is None else CostModel(measured=load_measured(costs))
    rules = Rules(order, contention, runtime)
    return Problem.build(registry.load_workload(graph), load_topology(topology), model, rules)


def run_placer(problem, entry: str, evaluations: int, seed: int, **more):
    """The placement that the placer ``entry``, with ``more`` parameters, finds within ``evaluations`` simulations."""
    import numpy as np

    from simdev.analysis.feasible import check_feasible
    from simdev.placers import registry
    from simdev.placers.budget import Budget

    if evaluations < 0 or seed < 0:
        raise InvalidInput("evaluations and seed cannot be negative")
    spec, params = registry.find_placer(entry)
    check_feasible(problem)
    budget = Budget(problem, evaluations=evaluations)
    return spec.place(problem, rng=np.random.default_rng(seed), budget=budget, **{**params, **more})


def print_table(header: list[str], lines: list[list[str]]) -> None:
    """A table: boxed by rich on a terminal, aligned plain text elsewhere."""
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD)
        for number, name in enumerate(header):
            table.add_column(name, justify="left" if number == 0 else "right", no_wrap=number == 0)
        for line in lines:
            table.add_row(*line)
        Console().print(table)
        return
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    for line in [header, *lines]:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def positive(value: float | None, option: str) -> float | None:
    """``value``, or an error that names the option where it is not above zero."""
    if value is not None and not 0 < value < float("inf"):
        raise InvalidInput(f"{value} is not positive", source=option)
    return value
