"""``simdev capture``."""

from __future__ import annotations

from typing import Annotated

import typer

from simdev.cli.app import command
from simdev.cli.options import OutOption


@command("capture")
def capture(
    step: Annotated[str, typer.Argument(help="my_model.py:make_step, a function that returns a TrainingStep.")],
    out: OutOption,
) -> None:
    """Capture a PyTorch training step as a graph file."""
    from simdev.graphs.capture import capture_file
    from simdev.problem.graph_file import save_graph

    graph = capture_file(step)
    save_graph(graph, out)
    print(f"{out}: {graph.n_ops} ops, {graph.n_tensors} tensors, {graph.n_edges} edges")
