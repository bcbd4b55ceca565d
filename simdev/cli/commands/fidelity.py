"""fidelity, physics-report, cost-report, dispatch, links: what was measured, and what other rules would say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.commands import OutOption, command, print_table


@command("fidelity", hidden=True)
def fidelity(
    data: Annotated[Path | None, typer.Option(help="Folder of public measured data (or SIMDEV_DATA).")] = None,
    out: OutOption = Path("report"),
) -> None:
    """Predict what public traces and tables measured; write the cases, the goals met and missed, and a picture."""
    from simdev.studies import fidelity as report

    cases, notes = report.all_cases(report.data_folder(data))
    report.write(cases, notes, out)
    header = ["goal", "group", "cases", "left out", "mean %", "worst %", "goal %", "met"]
    lines = []
    for group in report.groups(cases):
        numbers = [f"{100 * value:.2f}" if value == value else "" for value in (group.error, group.worst, group.limit)]
        lines.append([group.goal, group.group, str(group.cases), str(group.left_out), *numbers, group.met])
    print_table(header, lines)
    print(f"{out / 'README.md'}, {out / 'cases.csv'}, {out / 'groups.csv'}, {out / 'scatter.png'}")


@command("physics-report", hidden=True)
def physics_report(
    folder: Annotated[Path, typer.Argument(help="Result folder of simdev bench.")] = Path("leaderboard/standard"),
    out: OutOption = Path("physics"),
) -> None:
    """Rank the placements of a result folder under the rules of other simulators; write the agreement."""
    import sys

    from simdev.studies import physics as report

    cases, notes = report.read_cases(folder, lambda text: print(text, file=sys.stderr))
    report.write(cases, notes, out)
    print_table(report.SUMMARY, report.summary(cases))
    print(f"{out / 'README.md'}, {out / 'physics.csv'}, {out / 'times.csv'}")


@command("cost-report", hidden=True)
def cost_report(
    workloads: Annotated[list[str] | None, typer.Option("-w", "--workload", help="Workload (repeat).")] = None,
    topologies: Annotated[list[str] | None, typer.Option("-t", "--topology", help="Machine (repeat).")] = None,
    placers: Annotated[list[str] | None, typer.Option("-p", "--placer", help="Placer (repeat).")] = None,
    evaluations: Annotated[int, typer.Option(help="Simulations that a run may spend.")] = 500,
    out: OutOption = Path("costs"),
) -> None:
    """Rank placers with costs before and after calibration; write which of them trade places."""
    import sys

    from simdev.cli.commands import positive
    from simdev.studies import cost_report as report

    positive(evaluations, "--evaluations")
    cases, notes = report.compare(
        workloads or report.WORKLOADS, topologies or report.TOPOLOGIES, placers or report.PLACERS, evaluations,
        lambda text: print(text, file=sys.stderr),
    )  # fmt: skip
    report.write(cases, notes, out, evaluations)
    print_table(report.HEADER, report.table(cases))
    print(f"{out / 'README.md'}, {out / 'times.csv'}")


@command("dispatch", hidden=True)
def dispatch(trace: Annotated[Path, typer.Argument(help="Profiler trace (Kineto, Chrome JSON).")]) -> None:
    """What issuing an op cost the host in a profiler trace, by kind of op."""
    from simdev.measure.calibrate.dispatch import dispatch_ns
    from simdev.measure.calibrate.traces import read_trace

    rows = dispatch_ns(read_trace(trace)).items()
    lines = [[kind, str(count), f"{median / 1e3:.1f}", f"{mean / 1e3:.1f}"] for kind, (count, median, mean) in rows]
    print_table(["kind", "ops", "median us", "mean us"], lines)


@command("links", hidden=True)
def links(
    files: Annotated[list[Path], typer.Argument(help="Tables of vidur, vTrain or nccl-tests.")],
    hops: Annotated[int, typer.Option(help="Links on the route that was measured.")] = 1,
    ranges: Annotated[int, typer.Option(help="Ranges of sizes at most.")] = 4,
) -> None:
    """Fit a link's latency and bandwidth in ranges of sizes; print them as a machine's file takes them."""
    from simdev.cli.commands import positive
    from simdev.measure.calibrate.links import fit_table, ranges_toml, read_links

    positive(hops, "--hops")
    positive(ranges, "--ranges")
    for file in files:
        for table in read_links(file):
            found = fit_table(table, ranges)
            print(f"# {table.name}, {table.operation}: {100 * found.error:.1f} % on sizes not fitted to")
            print(ranges_toml(found, hops))
