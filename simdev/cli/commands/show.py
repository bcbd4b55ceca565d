"""``simdev show``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli import completion
from simdev.cli.app import command
from simdev.cli.options import JsonOption
from simdev.cli.tables import print_answer
from simdev.errors import InvalidInput


@command("show")
def show(
    what: Annotated[
        str,
        typer.Argument(
            help="Workload id, graph file, topology name or TOML file.", autocompletion=completion.workloads_or_machines
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also draw the topology (PNG, SVG or PDF).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Describe a graph or a topology."""
    from simdev.placers import registry
    from simdev.problem.topology import load_topology, topology_names
    from simdev.report import describe

    if what.endswith(".toml") or what in topology_names():
        topology = load_topology(what)
        if out is not None:
            describe.draw_topology(topology, out)
        summary, text = describe.describe_topology(topology), describe.topology_text
    else:
        if out is not None:
            raise InvalidInput("only topologies are drawn", source=what)
        summary, text = describe.summarise_graph(registry.load_workload(what)), describe.graph_text
    print_answer(summary, [text(summary)], as_json)
