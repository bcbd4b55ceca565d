"""``simdev import``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import OWN, command
from simdev.cli.options import JsonOption, OutOption
from simdev.cli.problems import graph_figures
from simdev.cli.tables import print_answer
from simdev.errors import InvalidInput


@command("import", topic=OWN)
def import_(
    file: Annotated[
        Path, typer.Argument(help="ONNX, PipeDream text, Moirai .xls, partitioning or Piper JSON, JSON, CSV.")
    ],
    out: OutOption,
    file_format: Annotated[
        str | None, typer.Option("--format", "-f", help="Format, if the file name does not show it.")
    ] = None,
    costs: Annotated[Path | None, typer.Option(help="Where to write the measured times of the file.")] = None,
    device_kind: Annotated[
        str, typer.Option(help="Device kind of the measured times, if the file does not name it.")
    ] = "accelerator",
    fix_units: Annotated[
        bool, typer.Option("--fix-units", help="dnn-partitioning: multiply edge costs by 1000 if they are too small.")
    ] = False,
    size: Annotated[
        list[str] | None, typer.Option("--size", metavar="AXIS=N", help="ONNX: the size of a dynamic axis (batch=8).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Convert a graph or trace of another tool.

    Reads the formats listed below and profiler traces (-f kineto), and writes a graph file.
    """
    from simdev.graphs.importers import import_graph
    from simdev.problem.costs import save_measured
    from simdev.problem.graph_file import save_graph

    if file_format in ("kineto", "chrome"):
        from simdev.calibrate.imported import against_measured, trace_graph
        from simdev.calibrate.traces import read_trace, report_problems

        trace = read_trace(file)
        for problem in report_problems(trace):
            print(f"{file}: {problem}", file=sys.stderr)
        found = trace_graph(trace, device_kind=device_kind)
        said = against_measured(trace, found)
        if said:
            print(f"{file}: {said}", file=sys.stderr)
    else:
        found = import_graph(file, file_format, device_kind=device_kind, fix_units=fix_units, sizes=_sizes(size))
    measured = found.measured or {}
    if costs is not None and not measured:
        raise InvalidInput("holds no measured times", source=file)
    save_graph(found.graph, out)
    facts, line = graph_figures(found.graph, out)
    lines = [line]
    if costs is not None:
        save_measured(measured, costs)
        facts["written"].append(str(costs))
        lines.append(f"{costs}: times on {', '.join(sorted(measured))}")
    elif measured:
        lines.append(f"measured times on {', '.join(sorted(measured))} are not kept; --costs FILE writes them")
    print_answer({**facts, "measured_on": sorted(measured)}, lines, as_json)


def _sizes(given: list[str] | None) -> dict[str, int]:
    sizes = {}
    for text in given or ():
        name, _, number = text.rpartition("=")
        if not name or not number.isdecimal() or not 0 < int(number) < 1 << 40:
            raise InvalidInput(f"expected AXIS=N with a positive whole number, got {text!r}", field="--size")
        sizes[name] = int(number)
    return sizes
