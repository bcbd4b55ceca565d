"""``simdev study``: reports about simdev itself, and comparisons with measurements, papers and other simulators."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from simdev.cli import completion
from simdev.cli.app import STUDY, command
from simdev.cli.options import (
    FolderOption,
    JsonOption,
    MachineArgument,
    RepeatsOption,
    SeedOption,
    SmallOption,
    StepArgument,
    in_a_folder,
    positive,
)
from simdev.cli.tables import print_answer, print_figures, read_figures


@command("fidelity", topic=STUDY)
def fidelity(
    data: Annotated[Path | None, typer.Option(help="Folder of public measured data (or SIMDEV_DATA).")] = None,
    out: FolderOption = Path("report"),
    cache: Annotated[Path | None, typer.Option(help="Folder that keeps the cases of unchanged files.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, max=64, help="Parts computed at the same time.")] = 2,
    as_json: JsonOption = False,
) -> None:
    """Compare predictions with public measurements.

    Writes cases, goals met and missed, and a picture.
    """
    from simdev.cli import progress
    from simdev.studies.fidelity import cases as report
    from simdev.studies.fidelity.report import write

    with progress.steps("fidelity") as tell:
        cases, notes = report.all_cases(report.data_folder(data), cache or report.cache_folder(), tell, jobs)
    write(cases, notes, out)
    header = ["goal", "group", "cases", "left out", "mean %", "worst %", "goal %", "met"]
    lines = []
    for group in report.groups(cases):
        numbers = [f"{100 * value:.2f}" if value == value else "" for value in (group.error, group.worst, group.limit)]
        lines.append([group.goal, group.group, str(group.cases), str(group.left_out), *numbers, _bold(group.met)])
    print_figures(
        header, lines, as_json, [out / "README.md", out / "cases.csv", out / "groups.csv", out / "scatter.png"]
    )


def _bold(met: str) -> str:
    """A missed goal in bold."""
    return "**no**" if met == "no" else met


@command("training-runs", topic=STUDY)
def training_runs(
    data: Annotated[Path, typer.Argument(help="Folder of public measured data, with training-runs/ in it.")],
    sets: Annotated[list[str] | None, typer.Option("--set", help="vtrain-single, vtrain-multi ... (repeat).")] = None,
    most: Annotated[int, typer.Option(min=1, help="At most this many rows of a set, spread over models.")] = 60,
    rankings: Annotated[
        bool, typer.Option("--rankings", help="Rank the plans of each model and machine: regret and Kendall's tau.")
    ] = False,
    commands: Annotated[
        bool, typer.Option("--commands", help="Print the command of each row and its measured step, and simulate none.")
    ] = False,
    fits: Annotated[
        bool, typer.Option("--fits", help="Print which jobs are said not to fit, though all ran, and simulate none.")
    ] = False,
    row: Annotated[str, typer.Option("--row", help="Only rows whose name has this text, such as gpt-22b.")] = "",
    search: Annotated[
        int,
        typer.Option(
            min=0,
            help="Let search simulate that many plans of each job, and compare its choice with the plan that ran.",
        ),
    ] = 0,
    table: Annotated[
        Path | None,
        typer.Option(
            help="Write each row, measured and simulated, as CSV; with --search, rows in it are kept.",
            callback=in_a_folder,
        ),
    ] = None,
    controls: Annotated[
        Path | None,
        typer.Option(
            help="Write the mean error of the controls for each model as CSV, and simulate none.", callback=in_a_folder
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare predictions with public measured training runs.

    Simple formulas are the control.
    """
    from simdev.errors import UnknownName
    from simdev.studies import training_runs as report

    for name in sets or ():
        if name not in report.SETS:
            raise UnknownName("set", name, report.SETS)
    if controls is not None:
        report.write_controls(controls, [run for source in report.SETS for run in report.read_runs(data, source)[0]])
        return
    chosen = [source for source in report.SETS if source in (sets or report.SETS)]
    found, given, refused = [], [], []
    beside: list = []
    instead = _print_commands if commands else _print_too_large if fits else None
    for source in report.SETS:
        if not any(source in report.CONTROL_ROWS[name] for name in chosen):
            continue
        runs, why = report.read_runs(data, source)
        given += runs  # controls are fitted to all rows of other models, simulated or not
        if source in chosen:
            runs = [run for run in runs if row in run.name]
            some = _whole_groups(runs, most) if rankings else report.spread(runs, most)
            if instead is not None:
                instead(some)
                continue
            if search:
                beside += some
                refused += why
                continue
            predictions, more = report.predict_all(some, lambda text: print(text, file=sys.stderr))
            found += predictions
            refused += why + more
    if search:
        _search_beside(beside, search, refused, table, as_json)
    if instead is not None or search:
        return
    if table is not None:
        report.write_table(table, found)
    if rankings:
        from simdev.studies.plan_rankings import HEADER, ranking_lines
        from simdev.studies.plan_rankings import rankings as rank

        print_figures(HEADER, ranking_lines(rank(found)), as_json)
        return
    notes = [*report.notes(chosen), *(f"not simulated: {why}" for why in refused)]
    if as_json:
        print_figures(report.HEADER, report.report_lines(found, given), True, notes=notes)
        return
    print_figures(report.HEADER, report.report_lines(found, given), False)
    print(
        "\nheld out: no constant and no rule was chosen on this set; other models: constants are fitted to its other "
        "models; rules chosen here: no constant is fitted, but rules were chosen after its errors were seen; fitted "
        "here: its errors are no test."
    )
    for line in notes:
        print(line)


def _print_too_large(runs: list) -> None:
    """The runs that are said not to fit, and how many were judged."""
    from simdev.studies.training_runs import too_large

    lines, judged = too_large(runs, lambda text: print(text, file=sys.stderr))
    names = ", ".join(dict.fromkeys(run.source for run in runs))
    print("\n".join([*lines, f"{names}: {len(lines)} of {judged} jobs are said not to fit; all of them ran"]))


def _print_commands(runs: list) -> None:
    """What a reader pastes for each row, and what was measured."""
    for run in runs:
        arguments = shlex.join(run.typed.arguments)
        print(f"simdev simulate-plan {arguments}  # {run.source} {run.name}: {run.step_ns / 1e6:,.1f} ms measured")


def _search_beside(runs: list, evaluations: int, refused: list[str], table: Path | None, as_json: bool) -> None:
    """Print, and write to ``table`` after each row, what ``search`` chooses for the jobs of the runs."""
    from simdev.bench.rows import read_csv, write_csv
    from simdev.errors import SimdevError
    from simdev.studies.plan_rankings import CHOSEN, chosen_beside, chosen_lines

    kept = read_csv(table, CHOSEN) if table is not None and table.exists() else ()
    known = {line["row"]: [line[name] for name in CHOSEN] for _, line in kept}
    lines = []
    for number, run in enumerate(runs):
        if run.name not in known:
            print(f"search {number + 1}/{len(runs)}: {run.name}", file=sys.stderr)
            try:
                known[run.name] = chosen_lines([chosen_beside(run, evaluations)])[0]
            except SimdevError as error:
                refused.append(str(error))
                continue
            if table is not None:
                write_csv(table, CHOSEN, [dict(zip(CHOSEN, line, strict=True)) for line in known.values()])
        lines.append(known[run.name])
    notes = [f"not compared: {why}" for why in refused]
    if as_json:
        print_figures(CHOSEN, lines, True, notes=notes)
        return
    print_figures(CHOSEN, lines, False)
    print(*notes, sep="\n")


def _whole_groups(runs: list, most: int) -> list:
    """All plans of as many groups as have at most ``most`` plans together; of the largest ones first."""
    from simdev.studies.plan_rankings import grouped

    chosen: list = []
    for members in grouped(runs):
        if len(chosen) + len(members) <= most:
            chosen += members
    return chosen


@command("physics-report", topic=STUDY)
def physics_report(
    folder: Annotated[Path, typer.Argument(help="Result folder of simdev bench.")] = Path("leaderboard/standard"),
    out: FolderOption = Path("physics"),
    as_json: JsonOption = False,
) -> None:
    """Report how the rules of other simulators change the ranks.

    Ranks stored placements under each; writes how far the rankings agree.
    """
    from simdev.studies import physics as report

    cases, notes = report.read_cases(folder, lambda text: print(text, file=sys.stderr))
    report.write(cases, notes, out)
    print_figures(
        report.SUMMARY, report.summary(cases), as_json, [out / "README.md", out / "physics.csv", out / "times.csv"]
    )


@command("cost-report", topic=STUDY)
def cost_report(
    workloads: Annotated[
        list[str] | None,
        typer.Option("-w", "--workload", help="Workload (repeat).", autocompletion=completion.workloads),
    ] = None,
    topologies: Annotated[
        list[str] | None, typer.Option("-t", "--topology", help="Machine (repeat).", autocompletion=completion.machines)
    ] = None,
    placers: Annotated[
        list[str] | None, typer.Option("-p", "--placer", help="Placer (repeat).", autocompletion=completion.placers)
    ] = None,
    evaluations: Annotated[int, typer.Option(help="Simulations that a run may spend.")] = 500,
    out: FolderOption = Path("costs"),
    as_json: JsonOption = False,
) -> None:
    """Report how the source of costs changes the ranks of placers.

    Ranks placers with costs before and after calibration; writes which of them change ranks.
    """
    from simdev.studies import cost_report as report

    positive(evaluations, "--evaluations")
    cases, notes = report.compare(
        workloads or report.WORKLOADS,
        topologies or report.TOPOLOGIES,
        placers or report.PLACERS,
        evaluations,
        lambda text: print(text, file=sys.stderr),
    )
    report.write(cases, notes, out, evaluations)
    print_figures(report.HEADER, report.table(cases), as_json, [out / "README.md", out / "times.csv"])


@command("compare-real", topic=STUDY)
def compare_real(
    step: StepArgument,
    machine: MachineArgument,
    out: FolderOption,
    placements: Annotated[int, typer.Option(help="Number of placements.")] = 40,
    repeats: RepeatsOption = 10,
    rounds: Annotated[int, typer.Option(help="Number of rounds; each runs all placements in another order.")] = 1,
    small: SmallOption = False,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare simulations with real runs on this computer.

    Simulates and runs many placements of a step, and reports how far apart the two are.
    """
    from simdev.measure.compare import compare_placements
    from simdev.measure.report import report

    for value, option in ((placements, "--placements"), (repeats, "--repeats"), (rounds, "--rounds")):
        positive(value, option)
    compare_placements(
        step, machine, out, placements=placements, repeats=repeats, rounds=rounds, seed=seed, small=small
    )
    lines = report([out], out)
    print_figures(
        list(lines[0]), [list(line.values()) for line in lines], as_json, [out / "report.md", out / "scatter.png"]
    )


@command("compare-plans", topic=STUDY)
def compare_plans(
    machine: MachineArgument,
    out: FolderOption,
    model: Annotated[str, typer.Option(help="Parallel model with its parameters.")] = "small",
    repeats: RepeatsOption = 20,
    as_json: JsonOption = False,
) -> None:
    """Run ten plans of a small model on two cores and compare measured steps with simulated ones.

    For a model of your own (--model my_model.py:make_step), the scripts of `simdev plan --write pytorch` run, too.
    """
    from simdev.integrations.configs import find_writer
    from simdev.measure.plans import PLANS, compare, write_report
    from simdev.problem.topology import load_topology

    positive(repeats, "--repeats")
    rows: list[dict] = []
    for row in compare(model, load_topology(machine), repeats, find_writer("pytorch")):
        rows.append(row)
        found = write_report(rows, out)  # after each plan: one that fails loses no other
        print(
            f"{len(rows)} of {len(PLANS)}: {row['plan']}: {row['measured_ns'] / 1e6:,.1f} ms, {row['error']:+.1%}",
            file=sys.stderr,
        )
    print_figures(
        list(found), [[f"{value:.3f}" for value in found.values()]], as_json, [out / "report.md", out / "plans.jsonl"]
    )


@command("measured", topic=STUDY)
def measured(
    folders: Annotated[list[Path], typer.Argument(help="Folders that simdev study compare-real wrote.")],
    out: FolderOption,
    as_json: JsonOption = False,
) -> None:
    """Write one report over several comparisons with real runs."""
    from simdev.measure.report import report

    lines = report(folders, out)
    print_figures(
        list(lines[0]),
        [list(line.values()) for line in lines],
        as_json,
        [out / "report.md", out / "figures.csv", out / "scatter.png", out / "parts.png"],
    )


@command("reproduce", topic=STUDY)
def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            help="mirhoseini, placeto, gdp, tarnawski, piper, learned (controls of learned-search), "
            "extensions (of placeto), ablations or speed."
        ),
    ],
    data: Annotated[Path | None, typer.Argument(help="tarnawski and piper: folder of the public inputs.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder (default: leaderboard/reproduced/NAME).")
    ] = None,
    scale: Annotated[str, typer.Option(help="tiny (seconds), small (minutes) or full (hours).")] = "small",
    as_json: JsonOption = False,
) -> None:
    """Repeat an experiment of a paper: tables, pictures and a report.

    If the command is interrupted, the same command resumes it.
    """
    from simdev.bench.release import TABLES
    from simdev.cli import progress
    from simdev.studies.reproduce import reproduce as make

    out = out or Path("leaderboard") / "reproduced" / name
    with progress.observer(0) as observer:
        report = make(name, out, scale=scale, observer=observer, data=data)
    tables = {path.stem: read_figures(path) for path in sorted(out.glob("*.csv")) if path.name not in TABLES}
    print_answer({"tables": tables, "written": [str(report)]}, [str(report)], as_json)


@command("any-model", topic=STUDY)
def any_model(
    names: Annotated[list[str] | None, typer.Argument(help="Models or kinds (default: all).")] = None,
    table: Annotated[
        list[str] | None, typer.Option("--table", help="published, kinds (repeat; default: both).")
    ] = None,
    out: FolderOption = Path("any-model"),
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, max=64, help="Rows computed at the same time.")] = 1,
    seconds: Annotated[float | None, typer.Option(help="Begin no row after this many seconds.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare captured programs of published models with the library's own models.

    Parameters, FLOPs and collectives; and which kinds of transformers' models run. The same command resumes it.
    """
    import math

    from simdev.cli import progress
    from simdev.errors import UnknownName
    from simdev.studies.any_model import study, verdicts

    tables = ["published", "kinds"]
    for one in table or ():
        if one not in tables:
            raise UnknownName("table", one, tables)
    limit = positive(seconds, "--seconds") or math.inf
    with progress.steps("any model") as tell:
        rows, left = study(out, table or tables, names or [], tell, jobs, limit)
    lines = [
        [row["table"], row["name"], str(row["seconds"]), row.get("refused", ""), _wrong(verdicts(row))]
        if row["table"] == "published"
        else [row["table"], row["name"], str(row["seconds"]), row.get("refused", ""), ""]
        for row in rows
    ]
    header = ["table", "name", "s", "refused", "differs"]
    notes = [f"{left} rows are left: the same command computes them"] if left else []
    print_figures(header, lines, as_json, [out / "README.md", out / "rows.jsonl"], notes=notes)


@command("packed", topic=STUDY)
def packed(
    names: Annotated[list[str] | None, typer.Argument(help="Models and jobs (default: all that ship packed).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Capture and pack the programs from which models are planned without PyTorch, and the captures of a few jobs.

    The archives in simdev's folder are replaced. Captures of models are kept, so that the same command resumes; those
    of a job are made anew, all of them.
    """
    from simdev.cli import progress
    from simdev.parallel.capture.kept import PACK, SHIPPED
    from simdev.studies.packed_programs import pack

    with progress.steps("packed programs") as tell:
        rows = pack(names or [], tell)
    lines = [[row["model"], f"{row['bytes']:,}"] for row in rows]
    print_figures(["model", "bytes"], lines, as_json, [PACK, SHIPPED])


def _wrong(verdicts: dict[str, bool]) -> str:
    return ", ".join(name for name, right in verdicts.items() if not right)


@command("perf", topic=STUDY)
def perf(
    ops: Annotated[list[int] | None, typer.Option("--ops", help="About how many ops a graph has.")] = None,
    topology: Annotated[
        str, typer.Option("--topology", "-t", help="Topology name or TOML file.", autocompletion=completion.machines)
    ] = "p100x4",
    rounds: Annotated[int, typer.Option(help="How many times each is timed; the shortest time counts.")] = 3,
    out: FolderOption = Path("perf"),
    as_json: JsonOption = False,
) -> None:
    """Time the engines side by side.

    The graphs are shaped like training steps. Writes perf.csv and perf.png.
    """
    from simdev.studies.perf import measure, write

    sizes = ops or [1000, 10000]
    for value, option in [*((size, "--ops") for size in sizes), (rounds, "--rounds")]:
        positive(value, option)
    rows = measure(sizes, topology, rounds=rounds)
    write(rows, out)
    header = ["contender", "placement", "ops", "us", "ns_per_op"]
    print_figures(
        header, [[str(row[name]) for name in header] for row in rows], as_json, [out / "perf.csv", out / "perf.png"]
    )


@command("dispatch", topic=STUDY)
def dispatch(
    trace: Annotated[Path, typer.Argument(help="Profiler trace (Kineto, Chrome JSON).")], as_json: JsonOption = False
) -> None:
    """List what issuing an op cost the host, by kind of op."""
    from simdev.calibrate.dispatch import dispatch_ns
    from simdev.calibrate.traces import read_trace

    rows = dispatch_ns(read_trace(trace)).items()
    lines = [[kind, str(count), f"{median / 1e3:.1f}", f"{mean / 1e3:.1f}"] for kind, (count, median, mean) in rows]
    print_figures(["kind", "ops", "median us", "mean us"], lines, as_json)


@command("links", topic=STUDY)
def links(
    files: Annotated[list[Path], typer.Argument(help="Tables of vidur, vTrain or nccl-tests.")],
    hops: Annotated[int, typer.Option(help="Number of links on the measured route.")] = 1,
    ranges: Annotated[int, typer.Option(help="Largest number of size ranges.")] = 4,
    as_json: JsonOption = False,
) -> None:
    """Fit the latency and bandwidth of a link, by ranges of sizes.

    Prints them as a machine's file takes them.
    """
    from simdev.calibrate.links import fit_table, ranges_toml, read_links

    positive(hops, "--hops")
    positive(ranges, "--ranges")
    lines = []
    for file in files:
        for table in read_links(file):
            found = fit_table(table, ranges)
            if as_json:
                for begin, latency, rate in found.ranges:
                    row = begin, latency / hops / 1e3, rate / 1e9, 100 * found.error
                    lines.append([table.name, table.operation, *map(str, row)])
                continue
            print(f"# {table.name}, {table.operation}: {100 * found.error:.1f} % on sizes not fitted to")
            print(ranges_toml(found, hops))
    if as_json:
        print_figures(["table", "operation", "from_bytes", "latency_us", "gb_per_s", "error_percent"], lines, True)
