"""bench, verify, compare: result folders."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simdev.cli.commands import (
    Backend,
    BackendOption,
    Contention,
    ContentionOption,
    Engine,
    JsonOption,
    Order,
    OrderOption,
    Runtime,
    RuntimeOption,
    SchedulerOption,
    build_problem,
    command,
    positive,
    print_table,
    use_dask,
)
from simdev.errors import InvalidInput

if TYPE_CHECKING:
    from simdev.bench.rows import Row


@command("bench")
def bench(
    workload: Annotated[
        list[str] | None, typer.Option("--workload", "-w", help="Workload, graph file, or all.")
    ] = None,
    topology: Annotated[list[str] | None, typer.Option("--topology", "-t", help="Topology, .toml, or all.")] = None,
    placer: Annotated[list[str] | None, typer.Option("--placer", "-p", help="Placer id, or all (default).")] = None,
    budget: Annotated[
        str, typer.Option("--budget", "-b", help="quick, standard, full, evaluations=N or seconds=S, for each run.")
    ] = "quick",
    seeds: Annotated[int, typer.Option(help="Repetitions of each run.")] = 1,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", help="Runs at a time (default: one a core).")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder (default: leaderboard/BUDGET).")] = None,
    order: OrderOption = Order.fifo,
    contention: ContentionOption = Contention.fifo,
    runtime: RuntimeOption = Runtime.dataflow,
    time_limit: Annotated[float | None, typer.Option(help="Seconds that a run may take.")] = None,
    memory_limit: Annotated[float | None, typer.Option(help="GiB that a run may take.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Run again what failed or was skipped before.")] = False,
    backend: BackendOption = Backend.local,
    scheduler: SchedulerOption = None,
) -> None:
    """Run placers on workloads and machines; write and print the leaderboard.

    If the command is interrupted, even by a crash, the same command resumes it.
    """
    from simdev.bench import plan
    from simdev.bench.bench import Incomplete
    from simdev.bench.bench import bench as execute_all
    from simdev.bench.dask_cluster import dask_backend
    from simdev.bench.workers import Limits
    from simdev.cli import progress

    away = use_dask(backend, scheduler)
    named = plan.BUDGETS.get(budget, plan.BUDGETS["quick"])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: finished runs are written first
    limits = Limits(
        positive(time_limit, "--time-limit") or plan.time_limit(budget),
        int((positive(memory_limit, "--memory-limit") or named.memory_bytes / 2**30) * 2**30),
    )
    runs = plan.plan(
        workload or (), topology or (), placer or ("all",), budget=budget, seeds=seeds,
        rules=f"{order}/{contention}/{runtime}",
    )  # fmt: skip
    out = out or Path("leaderboard") / (budget if budget in plan.BUDGETS else "custom")
    with progress.observer(len(runs)) as observer:
        try:
            found = execute_all(
                runs, out, jobs=jobs, limits=limits, retry=retry, observer=observer,
                backend=dask_backend(scheduler) if away else None,
            )  # fmt: skip
        except KeyboardInterrupt:
            print(f"simdev: interrupted; {out} keeps all finished runs, the same command resumes", file=sys.stderr)
            raise typer.Exit(130) from None
        except Incomplete as error:
            print(f"simdev: {error}", file=sys.stderr)
            raise typer.Exit(3) from None
    print_board(found, out)


@command("verify")
def verify(
    folder: Annotated[Path, typer.Argument(help="Result folder of a bench, or submission.")],
    engine: Annotated[Engine, typer.Option(help="Which engine recomputes the rows.")] = Engine.reference,
    sample: Annotated[int | None, typer.Option(help="Check that many rows, drawn evenly.")] = None,
    rerun: Annotated[bool, typer.Option("--rerun", help="Also execute the placers again.")] = False,
    placer: Annotated[
        list[str] | None,
        typer.Option("--placer", "-p", help="Placer of your own that --rerun may execute, FILE.py:NAME."),
    ] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", help="Rows at a time (default: one a core).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Recompute every row of a result folder from its placement; exit 1 on any difference.

    Nothing that a row names is executed: no placer from a file unless you name it with --placer.
    """
    from collections import Counter

    from simdev.bench.verify import verify as recompute
    from simdev.cli import progress

    skipped: Counter = Counter()
    with progress.counter("verifying") as on_row:
        differences = recompute(
            folder, engine=engine, sample=sample, rerun=rerun, placers=placer or (), jobs=jobs, on_row=on_row,
            on_skip=lambda title, reason: skipped.update([reason]),
        )  # fmt: skip
    for reason, count in skipped.most_common():
        print(f"not executed again: {count} rows: {reason}", file=sys.stderr)
    if as_json:
        print(json.dumps([asdict(difference) for difference in differences], indent=1))
        raise typer.Exit(1 if differences else 0)
    for difference in differences:
        print(difference)
    if differences:
        print(f"{folder}: {len(differences)} differences", file=sys.stderr)
        raise typer.Exit(1)
    print(f"{folder}: every row holds ({engine} engine)")


@command("compare")
def compare(
    before: Annotated[Path, typer.Argument(help="Result folder, or placement file.")],
    after: Annotated[Path, typer.Argument(help="Result folder, or placement file.")],
    graph: Annotated[str | None, typer.Option(help="Workload or graph file, for placements.")] = None,
    topology: Annotated[str | None, typer.Option(help="Topology, for placements.")] = None,
    as_json: JsonOption = False,
) -> None:
    """What changed from one result folder (or placement) to another: better or worse, and by how much."""
    from simdev.bench import score as leaderboard

    for path in (before, after):
        if not path.exists():
            raise InvalidInput("No such file or directory", source=path)
    if before.is_dir() != after.is_dir():
        raise InvalidInput("one is a folder, the other is not", source=f"{before}, {after}")
    if before.is_dir():
        lines = leaderboard.compare(before, after)
    elif graph is None or topology is None:
        raise InvalidInput("comparing placements needs --graph and --topology")
    else:
        lines = _compare_placements(build_problem(graph, topology), before, after)
    if as_json:
        print(json.dumps(lines, indent=1))
    elif lines:
        print_table(list(lines[0]), [list(line.values()) for line in lines])
        print(f"{len(lines)} differences, {sum(line['verdict'] == 'worse' for line in lines)} worse")
    else:
        print("no difference")


def _compare_placements(problem, before: Path, after: Path) -> list[dict]:
    from simdev import sim
    from simdev.problem.placement import Placement

    old, new = Placement.load(before, problem), Placement.load(after, problem)
    old_run, new_run = sim.simulate(problem, old), sim.simulate(problem, new)
    sizes = {
        "step_time_s": (old_run.step_ns / 1e9, new_run.step_ns / 1e9),
        "overflow_bytes": (int(old_run.overflow_bytes.sum()), int(new_run.overflow_bytes.sum())),
        "peak_memory_bytes": (int(old_run.peak_bytes.max()), int(new_run.peak_bytes.max())),
        "comm_bytes": (int(old_run.comm_bytes), int(new_run.comm_bytes)),
        "moved_ops": (0, int((old.devices != new.devices).sum())),
    }
    return [
        {"what": name, "before": str(left), "after": str(right),
         "change": f"{right / left - 1:.4f}" if left else "",
         "verdict": "" if name == "moved_ops" else "worse" if right > left else "better"}
        for name, (left, right) in sizes.items() if left != right
    ]  # fmt: skip


def print_board(found: list[Row], out: Path) -> None:
    from simdev.report.summary import LEGEND, board, failures, headline

    for title, header, lines in board(found):
        print(f"\n{title}")
        print_table(header, lines)
    print(LEGEND)
    for line in failures(found):
        print(line, file=sys.stderr)
    print(headline(found, out))
