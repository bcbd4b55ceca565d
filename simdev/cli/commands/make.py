"""capture, import: graphs from elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.commands import OutOption, command
from simdev.errors import InvalidInput


@command("capture")
def capture(
    step: Annotated[str, typer.Argument(help="my_model.py:make_step, a function that returns a TrainingStep.")],
    out: OutOption,
) -> None:
    """Turn a PyTorch training step into a graph file."""
    from simdev.graphs.capture import capture_file
    from simdev.problem.graph_file import save_graph

    graph = capture_file(step)
    save_graph(graph, out)
    print(f"{out}: {graph.n_ops} ops, {graph.n_tensors} tensors, {graph.n_edges} edges")


@command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="ONNX, PipeDream text, dnn-partitioning or Piper JSON, JSON or CSV.")],
    out: OutOption,
    file_format: Annotated[str | None, typer.Option("--format", "-f", help="Format, where it cannot be told.")] = None,
    costs: Annotated[Path | None, typer.Option(help="Where to write the measured times of the file.")] = None,
    device_kind: Annotated[str, typer.Option(help="What they were measured on, if it does not say.")] = "accelerator",
    fix_units: Annotated[
        bool, typer.Option("--fix-units", help="dnn-partitioning: edge costs x1000 where too small.")
    ] = False,
) -> None:
    """Turn a graph of another tool, or a profiler trace (-f kineto), into a graph file."""
    from simdev.graphs.importers import import_graph
    from simdev.problem.costs import save_measured
    from simdev.problem.graph_file import save_graph

    if file_format in ("kineto", "chrome"):
        from simdev.measure.calibrate.imported import trace_graph
        from simdev.measure.calibrate.traces import read_trace, report_problems

        trace = read_trace(file)
        for problem in report_problems(trace):
            print(f"{file}: {problem}", file=sys.stderr)
        found = trace_graph(trace, device_kind=device_kind)
    else:
        found = import_graph(file, file_format, device_kind=device_kind, fix_units=fix_units)
    if costs is not None and not found.measured:
        raise InvalidInput("holds no measured times", source=file)
    save_graph(found.graph, out)
    print(f"{out}: {found.graph.n_ops} ops, {found.graph.n_tensors} tensors, {found.graph.n_edges} edges")
    if costs is not None:
        save_measured(found.measured, costs)
        print(f"{costs}: times on {', '.join(sorted(found.measured))}")
    elif found.measured:
        print(f"measured times on {', '.join(sorted(found.measured))} left out: --costs FILE keeps them")
