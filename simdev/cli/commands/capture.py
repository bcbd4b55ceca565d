"""``simdev capture``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from simdev.cli.app import OWN, command
from simdev.cli.options import JsonOption, OutOption
from simdev.cli.problems import graph_figures
from simdev.cli.tables import print_answer
from simdev.errors import InvalidInput, UnknownName

# What a captured graph holds about its step, besides its ops.
FIGURES = (
    "precision_of_classes",
    "compiled",
    "recomputed_ops",
    "step_before_flops",
    "first_call_flops",
    "values",
    "recurrent_ops",
    "unrolled_ops",
    "inputs_from",
    "uncounted_ops",
    "whole_layers",
    "unknown_numbers",
    "taken_as_finite",
)


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
    fake: Annotated[
        bool,
        typer.Option("--fake", help="A script: parameters without memory or values; only its data are real."),
    ] = False,
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
    inputs: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="A package's model: a function of the model that returns its inputs (a dictionary or a tuple).",
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(help="Sizes of mesh axes (dp_shard=8,tp=8): capture each rank of make_step(mesh) or of a script."),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Fuse elementwise ops into kernels as torch.compile does: an estimate.")
    ] = False,
    unroll: Annotated[
        bool,
        typer.Option("--unroll", help="Keep every op of recurrent layers: by default each is one op, as in cuDNN."),
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
    _refuse_names(step)
    is_script = step.endswith(".py")
    if not is_script and (arguments or scale or fake):
        raise InvalidInput("arguments after --, --scale and --fake are for scripts (train.py)", source=step)
    if mesh is not None:
        if inputs:
            raise InvalidInput("--inputs is for models of packages without --mesh", source=step)
        script = (arguments or [], at_step, _scale(scale), fake) if is_script else None
        _capture_ranks(step, out, mesh, name, mode, batch, length, compiled, as_json, script)
        return
    from simdev.graphs.capture import capture_file, capture_package, capture_script, is_package_model
    from simdev.problem.graph_file import save_graph

    common: dict[str, Any] = {"name": name, "allow_empty": allow_empty, "unroll": unroll}
    if is_package_model(step):
        graph = capture_package(step, mode=mode, batch=batch, length=length, inputs=inputs, **common)
    elif mode != "train" or batch or length or inputs:
        rest = "use --scale" if is_script else "the file decides"
        raise InvalidInput(f"--mode, --batch, --length and --inputs are for models of packages; {rest}", source=step)
    elif is_script:
        graph = capture_script(step, arguments or [], step=at_step, batch=_scale(scale), fake=fake, **common)
    else:
        graph = capture_file(step, **common)
    eager = graph
    if compiled:
        from simdev.graphs.capture.fuse import fuse_elementwise

        graph = fuse_elementwise(eager)
    save_graph(graph, out)
    facts, line = graph_figures(graph, out)
    lines = [line, *(_fused(eager, graph) if compiled else ()), *_notes(step, graph)]
    figures = {name: graph.meta[name] for name in FIGURES if name in graph.meta}
    print_answer({**facts, **figures, "notes": lines[1:]}, lines, as_json)


def _refuse_names(step: str) -> None:
    """Say of the name of a workload or a model to plan that it needs no capture, and of an unknown package which one
    is meant."""
    from simdev.graphs.capture.packages import PACKAGES
    from simdev.parallel.models import model_names
    from simdev.placers.registry import workloads

    package, colon, _ = step.partition(":")
    if step in workloads():
        raise InvalidInput(f"its graph ships with simdev and needs no capture: simdev show {step}", source=step)
    if step in model_names():
        command = f"simdev simulate-plan {step} dgx-h100 --mesh dp_shard=8"
        raise InvalidInput(f"a model to plan, which needs no capture: {command}", source=step)
    if colon and package.isidentifier() and package not in PACKAGES:
        raise UnknownName("package", package, PACKAGES, source=step)


def _notes(step: str, graph) -> list[str]:
    """What the capture took for granted, made up or found out."""
    from simdev.graphs.capture.precision import precision_text  # imports PyTorch, which the capture has found

    meta = graph.meta
    lines = [f"precision: {precision_text(meta['precision_of_classes'])}"]
    if "recurrent_ops" in meta:
        lines.append(
            f"recurrent layers: {meta['unrolled_ops']:,} ops as {meta['recurrent_ops']:,} of cuDNN's (--unroll)"
        )
    if "recomputed_ops" in meta:
        lines.append(f"recomputed: {meta['recomputed_ops']} ops of the forward pass run again in the backward pass")
    if "uncounted_ops" in meta:
        calls = ", ".join(f"{label} ({count} calls)" for label, count in meta["uncounted_ops"].items())
        lines.append(
            f"FLOPs of {calls} are unknown and taken as one per element of the largest tensor; if they are products, "
            "give them a formula with torch.utils.flop_counter.register_flop_formula in your file"
        )
    if "marked_by" in meta:
        ran = "for real" if meta["values"] == "real" else "on fake tensors"
        lines.append(f"step {meta['step']} of {step}, which ends with a step of {meta['marked_by']}; it ran {ran}")
        if "unknown_numbers" in meta:
            read = ", ".join(meta["unknown_numbers"])
            lines.append(f"numbers that it does not have were read and steered nothing: {read}")
        if "taken_as_finite" in meta:
            lines.append(f"such numbers were taken as finite: {', '.join(meta['taken_as_finite'])}")
        if "step_before_flops" in meta:
            before = meta["step_before_flops"]
            lines.append(f"steps vary: the step before had {before:,} FLOPs of products; choose another by --step")
    elif "inputs_from" in meta:
        made = ", ".join(_inputs(graph)) or "none that the step reads"
        lines.append(f"inputs are {meta['inputs_from']}: {made}")
    if "whole_layers" in meta:
        shares = ", ".join(f"{field}={share}" for field, share in meta["whole_layers"].items())
        lines.append(f"the step has every layer, of which training leaves some out at random ({shares})")
    if meta.get("values") == "even routers":
        lines.append(
            "the step depends on values, and its parameters are too large to run it: its routers are taken to choose "
            "all experts in turn; if these are of one size, its products have the same FLOPs whichever are chosen"
        )
    elif "marked_by" not in meta and "values" in meta:
        ran = {"forward": "its forward pass", "real": "it"}[meta["values"]]
        lines.append(f"the step depends on values: {ran} ran for real on the given inputs, whose sizes the graph has")
    if "first_call_flops" in meta:
        lines.append(f"the step varies: its first call had {meta['first_call_flops']:,} FLOPs of products")
    return lines


def _inputs(graph) -> list[str]:
    """``input_ids i64[4,512]`` for each input of a step."""
    kinds = [graph.kinds[kind] for kind in graph.op_kind]
    rows = [
        (graph.op_names[op], graph.signatures[graph.op_signature[op]])
        for op, kind in enumerate(kinds)
        if kind == "input"
    ]
    return [f"{name.rpartition('.')[2]} {text.removeprefix('input()->')}" for name, text in rows]


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
    script: tuple[list[str], int, int | None, bool] | None,
) -> None:
    """``script``: its arguments, the number of the step, the size of its batch, and whether its tensors are fake."""
    from dataclasses import replace

    from simdev.graphs.capture import is_package_model, need_torch
    from simdev.parallel import parse_mesh
    from simdev.parallel.capture.step import capture_package_step, capture_step_file
    from simdev.parallel.costs.fusion import ASSUMPTION, fused_segment
    from simdev.parallel.rank_program import save_rank_program

    if mode != "train":
        raise InvalidInput("--mode is for models of packages without --mesh", source=step)
    sizes: dict[str, Any] = {"name": name, "batch": batch or 0, "length": length or 0}
    if script is not None:
        need_torch()
        from simdev.parallel.capture.script import capture_script_ranks

        arguments, at_step, scaled, fake = script
        program = capture_script_ranks(
            step, parse_mesh(mesh), arguments, step=at_step, scale=scaled, fake=fake, **sizes
        )
    else:
        capture = capture_package_step if is_package_model(step) else capture_step_file
        program = capture(step, parse_mesh(mesh), **sizes)
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
