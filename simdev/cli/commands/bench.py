"""``simdev bench``."""

from __future__ import annotations

import math
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    pass
from simdev.cli import completion
from simdev.cli.app import BENCHMARK, command
from simdev.cli.board import print_board
from simdev.cli.options import (
    Aim,
    Backend,
    BackendOption,
    Contention,
    ContentionOption,
    FrameworkOption,
    Order,
    OrderOption,
    Runtime,
    RuntimeOption,
    SchedulerOption,
    positive,
    use_dask,
)
from simdev.errors import InvalidInput


@command("bench", topic=BENCHMARK)
def bench(
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
        typer.Option("--placer", "-p", help="Placer id, or all (default).", autocompletion=completion.placers),
    ] = None,
    planner: Annotated[
        list[str] | None,
        typer.Option("--planner", help="Planner id, or all: parallel plans of the models -w on the clusters -t."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences in a step, with --planner and -w.")] = 512,
    framework: FrameworkOption = "eager",
    budget: Annotated[
        str,
        typer.Option(
            "--budget", "-b", help="Of each run: quick, standard, long, full, evaluations=N, seconds=S or both."
        ),
    ] = "quick",
    seeds: Annotated[int, typer.Option(help="How many times each run is repeated, each time with another seed.")] = 1,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", help="Runs at the same time (default: one per core).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder (default: leaderboard/BUDGET or /throughput).")
    ] = None,
    order: OrderOption = Order.fifo,
    contention: ContentionOption = Contention.fifo,
    runtime: RuntimeOption = Runtime.dataflow,
    objective: Annotated[Aim, typer.Option(help="The score: a step's time, or a full pipeline's per microbatch.")] = (
        Aim.step
    ),
    microbatches: Annotated[int, typer.Option(min=3, help="Microbatches of --objective throughput.")] = 32,
    schedule: Annotated[str, typer.Option(help="Schedule of --objective throughput: gpipe or 1f1b.")] = "1f1b",
    time_limit: Annotated[float | None, typer.Option(help="Seconds that one run may take.")] = None,
    memory_limit: Annotated[float | None, typer.Option(help="Memory that one run may use, in GiB.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Execute runs again that failed or were skipped.")] = False,
    backend: BackendOption = Backend.local,
    scheduler: SchedulerOption = None,
) -> None:
    """Run placers on workloads and machines, or planners on models and clusters.

    Each finished run is a line on the screen and a row in the result folder; the leaderboard is printed at the end.

    If the command is interrupted, even by a crash, the same command resumes it.
    """
    from simdev.bench import matrix
    from simdev.bench.bench import Incomplete
    from simdev.bench.bench import bench as execute_all
    from simdev.bench.dask_cluster import dask_backend
    from simdev.bench.workers import Limits
    from simdev.cli import progress

    if planner:
        _bench_planners(planner, workload, topology, batch, framework, budget, seeds, jobs, out)
        return
    away = use_dask(backend, scheduler)
    named = matrix.BUDGETS.get(budget, matrix.BUDGETS["quick"])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: finished runs are written first
    limits = Limits(
        positive(time_limit, "--time-limit") or matrix.time_limit(budget),
        int((positive(memory_limit, "--memory-limit") or named.memory_bytes / 2**30) * 2**30),
    )
    runs = matrix.plan(
        workload or (),
        topology or (),
        placer or ("all",),
        budget=budget,
        seeds=seeds,
        rules=f"{order}/{contention}/{runtime}",
        objective="step" if objective == Aim.step else f"throughput/{schedule}/{microbatches}",
    )
    named_folder = budget if budget in matrix.BUDGETS else "custom"
    out = out or Path("leaderboard") / ("throughput" if objective == Aim.throughput else named_folder)
    with progress.observer(len(runs)) as observer:
        try:
            found = execute_all(
                runs,
                out,
                jobs=jobs,
                limits=limits,
                retry=retry,
                observer=observer,
                backend=dask_backend(scheduler) if away else None,
            )
        except KeyboardInterrupt:
            print(f"simdev: interrupted; {out} keeps all finished runs, the same command resumes", file=sys.stderr)
            raise typer.Exit(130) from None
        except Incomplete as error:
            print(f"simdev: {error}", file=sys.stderr)
            raise typer.Exit(3) from None
    print_board(found, out)


def _bench_planners(planner, workload, topology, batch, framework, budget, seeds, jobs, out) -> None:
    from simdev.bench.matrix import parse_budget
    from simdev.bench.plan_bench import BOARD, Task, bench_plans
    from simdev.bench.plan_rows import markdown
    from simdev.planners import planners

    out = out or Path("leaderboard") / "parallel"
    evaluations, seconds = (60, math.inf) if budget == "quick" else parse_budget(budget)
    if not evaluations < math.inf or seconds < math.inf:
        raise InvalidInput("planners take evaluations=N, so that rows can be verified", source="--budget")
    shipped = [(model, cluster, size) for model, clusters, size, _ in BOARD for cluster in clusters]
    chosen = [(model, cluster, batch) for model in workload or () for cluster in topology or ()]
    if bool(workload) != bool(topology):
        raise InvalidInput("models (-w) and clusters (-t) go together; without both, the whole board is run")
    try:
        rows = bench_plans(
            [Task(*entry, framework) for entry in chosen or shipped],
            list(planners()) if "all" in planner else planner,
            out,
            evaluations=int(evaluations),
            seeds=seeds,
            workers=jobs or 1,
            tell=lambda text: print(text, file=sys.stderr, flush=True),
        )
    except KeyboardInterrupt:
        print(f"simdev: interrupted; {out} keeps all finished runs, the same command resumes", file=sys.stderr)
        raise typer.Exit(130) from None
    print("\n".join(markdown(rows)))
