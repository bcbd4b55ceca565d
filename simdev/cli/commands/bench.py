"""``simdev bench``."""

from __future__ import annotations

import math
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simdev.cli import completion
from simdev.cli.app import BENCHMARK, command
from simdev.cli.options import (
    Aim,
    Backend,
    BackendOption,
    Contention,
    ContentionOption,
    FrameworkOption,
    JsonOption,
    Order,
    OrderOption,
    Runtime,
    RuntimeOption,
    SchedulerOption,
    dask_address,
    given,
    positive,
    refuse_chosen,
)
from simdev.cli.tables import board_answer, print_board, print_json
from simdev.errors import InvalidInput

if TYPE_CHECKING:
    from simdev.bench.work import Work

FOR_PLACERS = ("placer", "order", "contention", "runtime", "objective", "microbatches", "schedule")
FOR_PLANNERS = ("batch", "framework")
FOLDERS = {Aim.throughput: "throughput", Aim.latency: "inference", Aim.serve: "inference"}
PLAN_LIMITS = 3600.0, 16.0  # seconds and GiB of one run of a planner, which may capture a large model
PLAN_EVALUATIONS, BATCH = 60, 512
IMPORT_S, IMPORT_BYTES = 30.0, 4 << 30  # to import one file of a folder of placers


@command("bench", topic=BENCHMARK)
def bench(
    ctx: typer.Context,
    workload: Annotated[
        list[str] | None,
        typer.Option("--workload", "-w", help="Workload, graph file, or all.", autocompletion=completion.workloads),
    ] = None,
    topology: Annotated[
        list[str] | None,
        typer.Option("--topology", "-t", help="Topology, .toml, or all.", autocompletion=completion.machines),
    ] = None,
    placer: Annotated[
        list[str] | None,
        typer.Option(
            "--placer", "-p", help="Placer id, folder of files, or all (default).", autocompletion=completion.placers
        ),
    ] = None,
    planner: Annotated[
        list[str] | None,
        typer.Option(
            "--planner",
            help="Planner id, or all: parallel plans of the models -w on the clusters -t.",
            autocompletion=completion.planners,
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences in a step, with --planner and -w (512).")] = None,
    framework: FrameworkOption = "eager",
    budget: Annotated[
        str,
        typer.Option(
            "--budget",
            "-b",
            help="Of each run: quick, standard, long, full, evaluations=N, seconds=S, processor=S, or two of them.",
        ),
    ] = "quick",
    seeds: Annotated[int, typer.Option(help="How many times each run is repeated, each time with another seed.")] = 1,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Runs at the same time (default: one per core).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder (default: leaderboard/BUDGET or /throughput).")
    ] = None,
    order: OrderOption = Order.fifo,
    contention: ContentionOption = Contention.fifo,
    runtime: RuntimeOption = Runtime.dataflow,
    objective: Annotated[Aim, typer.Option(help="What is scored (below).")] = Aim.step,
    microbatches: Annotated[int, typer.Option(min=3, help="Microbatches of throughput, queries of serve.")] = 32,
    schedule: Annotated[str, typer.Option(help="Schedule of --objective throughput: gpipe or 1f1b.")] = "1f1b",
    time_limit: Annotated[float | None, typer.Option(help="Seconds that one run may take.")] = None,
    memory_limit: Annotated[float | None, typer.Option(help="Memory that one run may use, in GiB.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Execute runs again that failed or were skipped.")] = False,
    backend: BackendOption = Backend.local,
    scheduler: SchedulerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run placers on workloads and machines, or planners on models and clusters.

    Each finished run is a line on the screen and a row in the result folder; the leaderboard is printed at the end.

    Objectives: step is the time of one training step; throughput is the time per microbatch in a full pipeline; latency
    is the time of one query and serve the time per query of a stream, both on graphs of forward ops only.

    If the command is interrupted, even by a crash, the same command resumes it.
    """
    from simdev.bench import matrix
    from simdev.bench.bench import Incomplete
    from simdev.bench.bench import bench as execute_all
    from simdev.bench.dask_cluster import dask_backend
    from simdev.bench.run import PLACING
    from simdev.bench.workers import Limits
    from simdev.cli import progress

    for option in FOR_PLACERS if planner else FOR_PLANNERS:
        if given(ctx, option):
            reason = "is for placers, not planners" if planner else "is for planners; add --planner"
            raise InvalidInput(reason, source=f"--{option.replace('_', '-')}")
    away = dask_address(backend, scheduler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: finished runs are written first
    work: Work
    if planner:
        from simdev.bench.plan_run import PLANNING

        work, usual = PLANNING, PLAN_LIMITS
        evaluations = _evaluations(budget)
        jobs_named = workload or (), topology or ()
        runs = _plan_runs(*jobs_named, planner, batch, framework, evaluations, seeds)
        out = out or Path("leaderboard") / "parallel"
    else:
        placer = _with_candidates(placer or ["all"])
        named = matrix.BUDGETS.get(budget, matrix.BUDGETS["quick"])
        work, usual = PLACING, (matrix.time_limit(budget), named.memory_bytes / 2**30)
        runs = matrix.plan(
            workload or (),
            topology or (),
            placer,
            budget=budget,
            seeds=seeds,
            rules=f"{order}/{contention}/{runtime}",
            objective=objective.named(schedule, microbatches),
        )
        named_folder = budget if budget in matrix.BUDGETS else "custom"
        out = out or Path("leaderboard") / FOLDERS.get(objective, named_folder)
    limits = Limits(
        positive(time_limit, "--time-limit") or usual[0],
        int((positive(memory_limit, "--memory-limit") or usual[1]) * 2**30),
    )
    with progress.observer(len(runs)) as observer:
        try:
            found = execute_all(
                runs,
                out,
                work=work,
                jobs=jobs,
                limits=limits,
                retry=retry,
                observer=observer,
                backend=dask_backend(away) if away else None,
            )
        except KeyboardInterrupt:
            print(f"simdev: interrupted; {out} keeps all finished runs, the same command resumes", file=sys.stderr)
            raise typer.Exit(130) from None
        except Incomplete as error:
            print(f"simdev: {error}", file=sys.stderr)
            raise typer.Exit(3) from None
    if as_json:
        print_json(board_answer(found))
        return
    print_board(found, out)


def _with_candidates(entries: list[str]) -> list[str]:
    """The placers, with those of all files of a folder in place of the folder. Files that cannot be loaded are left
    out, with a line for each."""
    found = []
    for entry in entries:
        if not Path(entry).is_dir():
            found.append(entry)
            continue
        from simdev.bench.candidates import candidates
        from simdev.bench.workers import Limits

        names, refused = candidates(Path(entry), Limits(IMPORT_S, IMPORT_BYTES))
        found += names
        for path, reason in refused.items():
            print(f"simdev: {path} is left out: {reason}", file=sys.stderr)
    return found


def _evaluations(budget: str) -> int:
    """The plans that a planner may simulate."""
    from simdev.bench.matrix import BUDGETS, parse_budget

    if budget == "quick":
        return PLAN_EVALUATIONS
    if budget in BUDGETS:
        raise InvalidInput(f"{budget} is a budget of placers; planners take evaluations=N", source="--budget")
    granted = parse_budget(budget)
    if not granted.evaluations < math.inf or granted.seconds < math.inf:
        raise InvalidInput("planners take evaluations=N, so that rows can be verified", source="--budget")
    return int(granted.evaluations)


def _plan_runs(models, clusters, entries, batch: int | None, framework: str, evaluations: int, seeds: int) -> list:
    from simdev.bench.plan_matrix import plan_jobs

    if bool(models) != bool(clusters):
        raise InvalidInput("models (-w) and clusters (-t) go together; without both, the whole board is run")
    if batch is not None and not models:
        raise InvalidInput("goes with -w and -t; the jobs of the board have batches of their own", source="--batch")
    for model in models:
        refuse_chosen(model, options=False)
    size = BATCH if batch is None else batch
    jobs = [(model, cluster, size) for model in models for cluster in clusters]
    return plan_jobs(jobs, entries, evaluations=evaluations, seeds=seeds, framework=framework)
