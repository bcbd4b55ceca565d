"""``simdev capture``."""

from __future__ import annotations

from typing import Annotated

import typer

from simdev.cli.app import OWN, command
from simdev.cli.options import JsonOption, OutOption
from simdev.cli.problems import graph_figures
from simdev.cli.tables import print_answer
from simdev.errors import InvalidInput

# What a captured graph holds about its step, besides its ops.
FIGURES = ("precision_of_classes", "compiled", "recomputed_ops", "step_before_flops", "first_call_flops", "values")


@command("capture", topic=OWN)
def capture(
    step: Annotated[
        str,
        typer.Argument(
            help="FILE.py:FUNCTION, a package's model (timm:resnet50, transformers:T5Model), or a script (train.py)."
        ),
    ],
    out: OutOption,
    arguments: Annotated[list[str] | None, typer.Argument(help="After --: the arguments of a script.")] = None,
    at_step: Annotated[int, typer.Option("--step", min=2, help="A script: which of its training steps.")] = 3,
    scale: Annotated[
        str | None, typer.Option(metavar="batch=N", help="A script: the size of its batch, by its own option.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the graph; by default that of file and function.")] = None,
    mode: Annotated[
        str, typer.Option(help="A package's model: train, inference, prefill or decode (one token).")
    ] = "train",
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of a batch (a package's model; with --mesh: of each replica).")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sample (a package's model, or with --mesh).")
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(help="Sizes of mesh axes (dp_shard=8,tp=8): capture the program of each rank of make_step(mesh)."),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Fuse elementwise ops into kernels as torch.compile does: an estimate.")
    ] = False,
    allow_empty: Annotated[
        bool, typer.Option("--allow-empty", help="Accept a graph without a matrix product or without an update.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Turn a step of a PyTorch model into a graph file.

    The step trains, infers, or is a loop of your own.

    A script runs unchanged on the CPU until a training step of it has ended.

    With --mesh, turn a parallel step into a rank program, which `simdev simulate-plan` takes in place of a model.
    With --mesh and --compiled, the runs of elementwise kernels between products and collectives are one kernel each.
    """
    is_script = step.endswith(".py")
    if not is_script and (arguments or scale):
        raise InvalidInput("arguments after -- and --scale are for scripts (train.py)", source=step)
    if mesh is not None:
        _capture_ranks(step, out, mesh, name, mode, batch, length, compiled, as_json)
        return
    from simdev.graphs.capture import capture_file, capture_package, capture_script, is_package_model
    from simdev.problem.graph_file import save_graph

    if is_script:
        if mode != "train" or batch or length:
            raise InvalidInput("--mode, --batch and --length are for models of packages; use --scale", source=step)
        graph = capture_script(
            step, arguments or [], step=at_step, batch=_scale(scale), name=name, allow_empty=allow_empty
        )
    elif is_package_model(step):
        graph = capture_package(step, name=name, allow_empty=allow_empty, mode=mode, batch=batch, length=length)
    else:
        if mode != "train" or batch or length:
            raise InvalidInput("--mode, --batch and --length are for models of packages; the file decides", source=step)
        graph = capture_file(step, name=name, allow_empty=allow_empty)
    eager = graph
    if compiled:
        from simdev.graphs.capture.fuse import fuse_elementwise

        graph = fuse_elementwise(eager)
    save_graph(graph, out)
    from simdev.graphs.capture.precision import precision_text  # imports PyTorch, which the capture has found

    facts, line = graph_figures(graph, out)
    lines = [line]
    if compiled:
        lines += _fused(eager, graph)
    lines.append(f"precision: {precision_text(graph.meta['precision_of_classes'])}")
    if "recomputed_ops" in graph.meta:
        lines.append(
            f"recomputed: {graph.meta['recomputed_ops']} ops of the forward pass run again in the backward pass"
        )
    if is_script:
        lines.append(f"step {at_step} of {step}, which ends with a step of {graph.meta['marked_by']}; it ran for real")
        if "step_before_flops" in graph.meta:
            before = graph.meta["step_before_flops"]
            lines.append(f"steps vary: the step before had {before:,} FLOPs of products; choose another by --step")
    elif is_package_model(step):
        made = [text.removeprefix("input()->") for text in _input_signatures(graph)]
        lines.append(f"inputs are made up from the configuration: {', '.join(made) or 'none that the step reads'}")
    if not is_script and "values" in graph.meta:
        ran = {"forward": "its forward pass", "real": "it"}[graph.meta["values"]]
        lines.append(f"the step depends on values: {ran} ran for real on the given inputs, whose sizes the graph has")
    if "first_call_flops" in graph.meta:
        lines.append(f"the step varies: its first call had {graph.meta['first_call_flops']:,} FLOPs of products")
    figures = {name: graph.meta[name] for name in FIGURES if name in graph.meta}
    print_answer({**facts, **figures, "notes": lines[1:]}, lines, as_json)


def _input_signatures(graph) -> list[str]:
    """``input()->i64[4,512]`` for each input of a step."""
    kinds = [graph.kinds[kind] for kind in graph.op_kind]
    return [graph.signatures[graph.op_signature[op]] for op, kind in enumerate(kinds) if kind == "input"]


def _scale(text: str | None) -> int | None:
    if text is None:
        return None
    name, _, number = text.partition("=")
    if name != "batch" or not number.isdecimal() or not 0 < int(number) < 1 << 40:
        raise InvalidInput(f"expected batch=N, got {text!r}", field="--scale")
    return int(number)


def _fused(eager, graph) -> list[str]:
    """What fusion did, and what it assumes."""
    before, after = (int((g.op_bytes_read + g.op_bytes_written).sum()) for g in (eager, graph))
    facts = graph.meta["compiled"]
    return [
        f"compiled: {facts['ops']:,} ops in {facts['kernels']:,} kernels, {1 - after / max(1, before):.0%} fewer bytes",
        f"assumption: {facts['assumption']}",
    ]


def _capture_ranks(
    step: str,
    out,
    mesh: str,
    name: str | None,
    mode: str,
    batch: int | None,
    length: int | None,
    compiled: bool,
    as_json: bool,
) -> None:
    from dataclasses import replace

    from simdev.graphs.capture import is_package_model
    from simdev.parallel import parse_mesh
    from simdev.parallel.capture.step import capture_package_step, capture_step_file
    from simdev.parallel.costs.fusion import ASSUMPTION, fused_segment
    from simdev.parallel.rank_program import save_rank_program

    if mode != "train":
        raise InvalidInput("--mode is for models of packages without --mesh", source=step)
    capture = capture_package_step if is_package_model(step) else capture_step_file
    program = capture(step, parse_mesh(mesh), name=name, batch=batch or 0, length=length or 0)
    eager = program
    if compiled:
        program = replace(eager, segments=tuple(map(fused_segment, eager.segments)))
    save_rank_program(program, out)
    calls = [call for piece in program.pieces[0] for call in program.segments[piece.segment].calls]
    collectives = sum(call.is_collective for call in calls)
    kernels = len(calls) - collectives
    lines = [f"{out}: {program.mesh.ranks} ranks ({program.mesh}), {len(program.pieces)} pipeline ranks"]
    if compiled:
        before, after = (sum(len(segment.calls) for segment in one.segments) for one in (eager, program))
        lines += [f"compiled: {before:,} calls became {after:,}", f"assumption: {ASSUMPTION}"]
    lines.append(f"rank 0: {kernels} kernels, {collectives} collectives; {program.flops:.4g} FLOPs on all ranks")
    facts = {"written": [str(out)], "ranks": program.mesh.ranks, "pipeline_ranks": len(program.pieces)}
    of_rank = {"kernels": kernels, "collectives": collectives}
    print_answer({**facts, "rank_0": of_rank, "flops": program.flops, "notes": lines[1:]}, lines, as_json)
