"""``simdev capture``."""

from __future__ import annotations

from typing import Annotated

import typer

from simdev.cli.app import command
from simdev.cli.options import OutOption
from simdev.errors import InvalidInput


@command("capture")
def capture(
    step: Annotated[
        str, typer.Argument(help="my_model.py:make_step, or a package's model: timm:resnet50, transformers:T5Model.")
    ],
    out: OutOption,
    name: Annotated[str | None, typer.Option(help="Name of the graph; by default that of file and function.")] = None,
    mode: Annotated[
        str, typer.Option(help="A package's model: train, inference, prefill or decode (one token).")
    ] = "train",
    batch: Annotated[int | None, typer.Option(min=1, help="A package's model: samples of a batch.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="A package's model: tokens of a sample.")] = None,
) -> None:
    """Turn a step of a PyTorch model (training, inference, a loop of your own) into a graph file."""
    from simdev.graphs.capture import capture_file, capture_package, is_package_model
    from simdev.graphs.capture.precision import precision_text
    from simdev.problem.graph_file import save_graph

    if is_package_model(step):
        graph = capture_package(step, name=name, mode=mode, batch=batch, length=length)
    else:
        if mode != "train" or batch or length:
            raise InvalidInput("--mode, --batch and --length are for models of packages; the file decides", source=step)
        graph = capture_file(step, name=name)
    save_graph(graph, out)
    print(f"{out}: {graph.n_ops} ops, {graph.n_tensors} tensors, {graph.n_edges} edges")
    print(f"precision: {precision_text(graph.meta['precision_of_classes'])}")
    if "recomputed_ops" in graph.meta:
        print(f"recomputed: {graph.meta['recomputed_ops']} ops of the forward pass run again in the backward pass")
    if graph.meta.get("values") == "real":
        print("the step depends on values: it ran for real on the inputs that were given, whose sizes the graph has")
