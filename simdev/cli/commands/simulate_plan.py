"""``simdev simulate-plan``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simdev.cli import completion
from simdev.cli.app import JOBS, command
from simdev.cli.options import FrameworkOption, JsonOption, in_a_folder
from simdev.cli.tables import print_json, print_table
from simdev.errors import InvalidInput

if TYPE_CHECKING:
    from simdev.parallel import PlanReport


@command("simulate-plan", topic=JOBS)
def simulate_plan(
    model: Annotated[
        str,
        typer.Argument(
            help="Model, size and parameters: llama3-70b, gpt-3.6b[microbatch=4]; or a captured program.",
            autocompletion=completion.models,
        ),
    ],
    cluster: Annotated[
        str,
        typer.Argument(
            help="Topology of a node, or file: dgx-h100, dgx-h100[nodes=8].", autocompletion=completion.machines
        ),
    ],
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Sizes of the mesh axes: dp_shard=8,tp=8,pp=4; with / between stages that have meshes of their own: "
            "tp=4/dp_replicate=2,tp=2. A captured program has its own."
        ),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers of each stage: 14/10 (default: evenly); the ends may have 0.")
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(
            help="Recomputation: none, selective, full or every-2; of stages with meshes of their own: full/none."
        ),
    ] = None,
    microbatches: Annotated[
        int, typer.Option(help="Microbatches of each replica in a step; with / in --mesh: of the whole pipeline.")
    ] = 1,
    schedule: Annotated[
        str, typer.Option(help="gpipe, 1f1b, interleaved, looped-bfs, zero-bubble, zbv or dualpipe-v.")
    ] = "1f1b",
    stages_per_rank: Annotated[int, typer.Option(help="Stages on a pipeline rank (zbv and dualpipe-v: 2).")] = 1,
    framework: FrameworkOption = "eager",
    float8: Annotated[
        str | None, typer.Option(help="Linear layers in FP8: dynamic (torchao) or delayed (Transformer Engine) scales.")
    ] = None,
    reduce: Annotated[
        str, typer.Option(help="Microbatches after which gradients are reduced: last or each (ZeRO 2, 3).")
    ] = "last",
    reshard: Annotated[
        str,
        typer.Option(
            help="When FSDP frees gathered parameters: always (after each pass: ZeRO 3), or never within a step "
            "(ZeRO 1, 2; torchtitan's pipelines)."
        ),
    ] = "always",
    slowdown: Annotated[
        float | None,
        typer.Option(help="How much slower kernels run beside a collective.", show_default="that of the framework"),
    ] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(help="RANK=FACTOR: a rank whose kernels take longer, such as 3=1.2; may be repeated."),
    ] = None,
    unfolded: Annotated[bool, typer.Option("--unfolded", help="Simulate every rank, not one for each stage.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write a Perfetto trace.", callback=in_a_folder)] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the pipeline (PNG, SVG or PDF).", callback=in_a_folder)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict speed and memory of a parallel training job.

    The program of one rank of each pipeline stage is captured from PyTorch on a fake process group; no GPU is needed.
    The first capture of a model takes some seconds (a large model: half a minute); it is kept.
    """
    from simdev.parallel.rank_program import is_rank_program
    from simdev.parallel.stragglers import parse_slow

    stragglers = parse_slow(slow or [])
    report: PlanReport
    if is_rank_program(model):
        from simdev.parallel import load_cluster
        from simdev.parallel.costs.float8 import Float8
        from simdev.parallel.framework import find_framework
        from simdev.parallel.rank_program import load_rank_program
        from simdev.parallel.replay import ProgramPlan, simulate_rank_program

        if (mesh or layers or recompute) is not None or (
            microbatches, schedule, stages_per_rank, reduce, reshard,
        ) != (1, "1f1b", 1, "last", "always"):  # fmt: skip
            message = "a captured program has its mesh, microbatches and schedule; capture it anew for others"
            raise InvalidInput(message, source=model)
        software = find_framework(framework)
        where = software.on(load_cluster(cluster))
        program = ProgramPlan(load_rank_program(model), where, software.host, software.slowdown)
        prices = software.prices(where, Float8(float8) if float8 else None)
        report = simulate_rank_program(program, prices, unfolded=unfolded, slowdown=slowdown, slow=stragglers)
        reserved = None
    else:
        from simdev.parallel import simulate_plan as simulate
        from simdev.parallel.costs.reserved import reserved_bytes
        from simdev.parallel.typed_plan import TypedPlan

        if mesh is None:
            raise InvalidInput("a model needs --mesh, such as dp_shard=8,tp=8", source=model)
        typed = TypedPlan(
            model, cluster, mesh, microbatches, schedule, stages_per_rank, layers or "", recompute or "", framework,
            float8 or "", reduce, reshard,
        )  # fmt: skip
        report = simulate(typed.plan, typed.prices(), unfolded=unfolded, slowdown=slowdown, slow=stragglers)
        reserved = reserved_bytes(typed.plan)
    if trace is not None:
        from simdev.report.perfetto import plan_trace_events, write_trace

        write_trace(trace, plan_trace_events(report))
    if picture is not None:
        from simdev.parallel.picture import draw_pipeline

        draw_pipeline(report, picture)
    if as_json:
        print_json(report.summary(reserved))
        return
    print_report(report.summary(reserved))


RESERVED = ("reserved_memory_bytes", "nccl_bytes")


def print_report(found: dict) -> None:
    """The figures of a plan as text."""
    print(f"{found['model']} on {found['ranks']} x {found['cluster']}, {found['mesh']}, {found['schedule']}")
    batch = f", global batch {found['global_batch']:,} sequences" if found["global_batch"] else ""
    print(f"step time         {found['step_time_s'] * 1e3:,.1f} ms{batch}")
    tokens = f"{found['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU, " if found["tokens_per_s"] else ""
    print(f"throughput        {tokens}MFU {found['mfu']:.1%}")
    if not found["fits"]:
        print(f"OUT OF MEMORY     more than {found['capacity_bytes'] / 2**30:.1f} GiB")
    rows = [
        [
            f"{row['rank']}",
            f"{row['peak_memory_bytes'] / 2**30:.1f}",
            *([f"{row[name] / 2**30:.1f}" for name in RESERVED] if RESERVED[0] in row else []),
            f"{row['compute_share']:.1%}",
            f"{row['exposed_communication_share']:.1%}",
            f"{row['idle_share']:.1%}",
        ]
        for row in found["pipeline_ranks"]
    ]
    memory = ["allocated GiB", *(["reserved GiB", "NCCL GiB"] if RESERVED[0] in found["pipeline_ranks"][0] else [])]
    print_table(["pipeline rank", *memory, "computes", "exposed communication", "idle (bubble, host)"], rows)
    longest = max(found["pipeline_ranks"], key=lambda row: row["compute_share"])
    shares = ", ".join(f"{name} {share:.1%}" for name, share in longest["kernel_shares"].items() if share >= 0.0005)
    print(f"kernels, rank {longest['rank']:<3} {shares}")
