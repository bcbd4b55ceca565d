"""The ``simdev`` command. Each subcommand reads its arguments, calls one function of the library and prints."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simdev.errors import InvalidInput, SimdevError

if TYPE_CHECKING:
    from simdev.rows import Row

app = typer.Typer(
    help="Simulate and benchmark the placement of neural-network training graphs on devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Engine(StrEnum):
    fast = "fast"
    reference = "reference"


class Policy(StrEnum):
    fifo = "fifo"
    priority = "priority"
    program = "program"


class Contention(StrEnum):
    fifo = "fifo"
    none = "none"
    fair = "fair"


class Runtime(StrEnum):
    dataflow = "dataflow"
    eager = "eager"


GraphArgument = Annotated[str, typer.Argument(help="Workload id (simdev list workloads) or graph file.")]
TopologyArgument = Annotated[str, typer.Argument(help="Topology name (simdev list topologies) or TOML file.")]
PlacerOption = Annotated[str | None, typer.Option("--placer", "-p", help="Placer id: name or name[param=value].")]
PolicyOption = Annotated[Policy, typer.Option(help="Which ready op a device takes first.")]
ContentionOption = Annotated[Contention, typer.Option(help="How transfers share a link.")]
RuntimeOption = Annotated[Runtime, typer.Option(help="What decides when an op may start.")]
CostsOption = Annotated[Path | None, typer.Option(help="Measured costs (simdev import --costs), before the model's.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _in_a_folder(out: Path | None) -> Path | None:
    """Refuse a path that cannot be written to before the work is done rather than after."""
    if out is not None and not os.access(out.parent, os.W_OK):
        raise InvalidInput("Permission denied" if out.parent.is_dir() else "No such file or directory", source=out)
    return out


OutOption = Annotated[Path, typer.Option("--out", "-o", help="Where to write.", callback=_in_a_folder)]


def main() -> None:
    """Entry point: errors of the user's input are one line on stderr and exit code 2; Ctrl-C is 130."""
    try:
        app()
    except SimdevError as error:
        _fail(str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error))


def _fail(message: str) -> None:
    print(f"simdev: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def _command(name: str, **settings):
    """Register a subcommand that exits with 130 on Ctrl-C."""

    def register(function):
        @app.command(name, **settings)
        @functools.wraps(function)
        def run(*args, **kwargs):
            try:
                function(*args, **kwargs)
            except KeyboardInterrupt:
                print("simdev: interrupted", file=sys.stderr)
                raise typer.Exit(130) from None

        return run

    return register


@_command("bench")
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
    policy: PolicyOption = Policy.fifo,
    contention: ContentionOption = Contention.fifo,
    runtime: RuntimeOption = Runtime.dataflow,
    time_limit: Annotated[float | None, typer.Option(help="Seconds that a run may take.")] = None,
    memory_limit: Annotated[float | None, typer.Option(help="GiB that a run may take.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Run again what failed or was skipped before.")] = False,
) -> None:
    """Run placers on workloads and machines; write and print the leaderboard.

    Stopped at any time, the same command goes on where it was.
    """
    from simdev import bench as harness
    from simdev import plan, progress
    from simdev.workers import Limits

    named = plan.BUDGETS.get(budget, plan.BUDGETS["quick"])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill is Ctrl-C: what is finished is written
    limits = Limits(
        _positive(time_limit, "--time-limit") or plan.time_limit(budget),
        int((_positive(memory_limit, "--memory-limit") or named.memory_bytes / 2**30) * 2**30),
    )
    runs = plan.plan(
        workload or (), topology or (), placer or ("all",), budget=budget, seeds=seeds,
        rules=f"{policy}/{contention}/{runtime}",
    )  # fmt: skip
    out = out or Path("leaderboard") / (budget if budget in plan.BUDGETS else "custom")
    with progress.observer(len(runs)) as observer:
        try:
            found = harness.bench(runs, out, jobs=jobs, limits=limits, retry=retry, observer=observer)
        except KeyboardInterrupt:
            print(f"simdev: interrupted; finished runs are kept in {out}, the same command goes on", file=sys.stderr)
            raise typer.Exit(130) from None
    _print_board(found, out)


@_command("verify")
def verify(
    folder: Annotated[Path, typer.Argument(help="Result folder of a bench.")],
    engine: Annotated[Engine, typer.Option(help="Which engine recomputes the rows.")] = Engine.reference,
    sample: Annotated[int | None, typer.Option(help="Check that many rows, drawn evenly.")] = None,
    rerun: Annotated[bool, typer.Option("--rerun", help="Also execute the placers again.")] = False,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", help="Rows at a time (default: one a core).")] = None,
) -> None:
    """Recompute every row of a result folder from its placement; exit 1 on any difference."""
    from simdev import progress
    from simdev.verify import verify as recompute

    with progress.counter("verifying") as on_row:
        differences = recompute(folder, engine=engine, sample=sample, rerun=rerun, jobs=jobs, on_row=on_row)
    for difference in differences:
        print(difference)
    if differences:
        print(f"{folder}: {len(differences)} differences", file=sys.stderr)
        raise typer.Exit(1)
    print(f"{folder}: every row holds ({engine} engine)")


@_command("simulate")
def simulate(
    graph: GraphArgument,
    topology: TopologyArgument,
    placement: Annotated[Path | None, typer.Option(help="Placement file (JSON).")] = None,
    placer: PlacerOption = None,
    engine: Annotated[Engine, typer.Option(help="Compiled, or the readable specification.")] = Engine.fast,
    policy: PolicyOption = Policy.fifo,
    contention: ContentionOption = Contention.fifo,
    runtime: RuntimeOption = Runtime.dataflow,
    costs: CostsOption = None,
    evaluations: Annotated[int, typer.Option(help="Simulations that the placer may spend.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the placer.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Step time and memory of one placement."""
    from simdev import sim
    from simdev.placement import Placement

    if (placement is None) == (placer is None):
        raise InvalidInput("give either --placement or --placer")
    problem = _problem(graph, topology, policy, contention, runtime, costs)
    if placement is not None:
        found = Placement.load(placement, problem)
    else:
        found = _place(problem, placer, evaluations, seed)
    _print_schedule(problem, found, sim.simulate(problem, found, engine=engine), as_json)


@_command("place")
def place(
    graph: GraphArgument,
    topology: TopologyArgument,
    placer: Annotated[str, typer.Option("--placer", "-p", help="Placer id: name or name[param=value].")],
    out: OutOption,
    policy: PolicyOption = Policy.fifo,
    contention: ContentionOption = Contention.fifo,
    runtime: RuntimeOption = Runtime.dataflow,
    costs: CostsOption = None,
    evaluations: Annotated[int, typer.Option(help="Simulations that the placer may spend.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the placer.")] = 0,
) -> None:
    """Run one placer and write its placement (JSON)."""
    from simdev import sim

    problem = _problem(graph, topology, policy, contention, runtime, costs)
    found = _place(problem, placer, evaluations, seed)
    found.save(out, problem)
    _print_schedule(problem, found, sim.simulate(problem, found), False)


@_command("show")
def show(
    what: Annotated[str, typer.Argument(help="Workload id, graph file, topology name or TOML file.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Draw a topology (PNG, SVG or PDF).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Summarise a graph, or describe and draw a topology."""
    from simdev import registry
    from simdev import show as showing
    from simdev.topology import load_topology, topology_names

    if what.endswith(".toml") or what in topology_names():
        topology = load_topology(what)
        if out is not None:
            showing.draw_topology(topology, out)
        summary, text = showing.describe_topology(topology), showing.topology_text
    else:
        if out is not None:
            raise InvalidInput("only topologies are drawn", source=what)
        summary, text = showing.summarise_graph(registry.load_workload(what)), showing.graph_text
    print(json.dumps(summary, indent=1) if as_json else text(summary))


class Shelf(StrEnum):
    workloads = "workloads"
    topologies = "topologies"
    placers = "placers"


@_command("list")
def list_(
    what: Annotated[Shelf | None, typer.Argument(help="Which shelf (default: all).")] = None,
    as_json: JsonOption = False,
) -> None:
    """What can be named: workloads, topologies, placers."""
    listing = {shelf: _LISTS[shelf]() for shelf in ([what.value] if what else _LISTS)}
    if as_json:
        print(json.dumps(listing, indent=1))
        return
    for shelf, lines in listing.items():
        print(f"{shelf}:")
        width = max((len(line["name"]) for line in lines), default=0)
        for line in lines:
            rest = "  ".join(str(value) for key, value in line.items() if key != "name" and value not in ("", {}, []))
            print(f"  {line['name']:{width}}  {rest}".rstrip())


@_command("capture")
def capture(
    step: Annotated[str, typer.Argument(help="my_model.py:make_step, a function that returns a TrainingStep.")],
    out: OutOption,
) -> None:
    """Turn a PyTorch training step into a graph file."""
    from simdev.capture import capture_file
    from simdev.graph_file import save_graph

    graph = capture_file(step)
    save_graph(graph, out)
    print(f"{out}: {graph.n_ops} ops, {graph.n_tensors} tensors, {graph.n_edges} edges")


@_command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="ONNX, PipeDream text, dnn-partitioning or Piper JSON, JSON or CSV.")],
    out: OutOption,
    file_format: Annotated[str | None, typer.Option("--format", "-f", help="Format, where it cannot be told.")] = None,
    costs: Annotated[Path | None, typer.Option(help="Where to write the measured times of the file.")] = None,
    device_kind: Annotated[str, typer.Option(help="What they were measured on, if it does not say.")] = "accelerator",
    fix_units: Annotated[
        bool, typer.Option("--fix-units", help="dnn-partitioning: edge costs x1000 where too small.")
    ] = False,
) -> None:
    """Turn a graph of another tool into a graph file."""
    from simdev.costs import save_measured
    from simdev.graph_file import save_graph
    from simdev.importers import import_graph

    found = import_graph(file, file_format, device_kind=device_kind, fix_units=fix_units)
    if costs is not None and not found.measured:
        raise InvalidInput("holds no measured times", source=file)
    save_graph(found.graph, out)
    print(f"{out}: {found.graph.n_ops} ops, {found.graph.n_tensors} tensors, {found.graph.n_edges} edges")
    if costs is not None:
        save_measured(found.measured, costs)
        print(f"{costs}: times on {', '.join(sorted(found.measured))}")
    elif found.measured:
        print(f"measured times on {', '.join(sorted(found.measured))} left out: --costs FILE keeps them")


@_command("compare")
def compare(
    before: Annotated[Path, typer.Argument(help="Result folder, or placement file.")],
    after: Annotated[Path, typer.Argument(help="Result folder, or placement file.")],
    graph: Annotated[str | None, typer.Option(help="Workload or graph file, for placements.")] = None,
    topology: Annotated[str | None, typer.Option(help="Topology, for placements.")] = None,
    as_json: JsonOption = False,
) -> None:
    """What changed from one result folder (or placement) to another: better or worse, and by how much."""
    from simdev import leaderboard

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
        lines = _compare_placements(_problem(graph, topology), before, after)
    if as_json:
        print(json.dumps(lines, indent=1))
    elif lines:
        _print_table(list(lines[0]), [list(line.values()) for line in lines])
        print(f"{len(lines)} differences, {sum(line['verdict'] == 'worse' for line in lines)} worse")
    else:
        print("no difference")


@_command("bound")
def bound(
    graph: GraphArgument,
    topology: TopologyArgument,
    policy: PolicyOption = Policy.fifo,
    contention: ContentionOption = Contention.fifo,
    runtime: RuntimeOption = Runtime.dataflow,
    costs: CostsOption = None,
    as_json: JsonOption = False,
) -> None:
    """A step time that no placement can beat."""
    from simdev.analysis import lower_bounds

    found = lower_bounds(_problem(graph, topology, policy, contention, runtime, costs))
    best = max(found, key=lambda bound: bound.ns)
    if as_json:
        each = [{"lower_bound_s": bound.ns / 1e9, "method": bound.method} for bound in found]
        print(json.dumps({"lower_bound_s": best.ns / 1e9, "method": best.method, "bounds": each}))
        return
    print(f"lower bound {best.ns / 1e6:.3f} ms ({best.method})")
    for bound in found:
        print(f"  {bound.ns / 1e6:.3f} ms  {bound.method}")


def _problem(graph, topology, policy="fifo", contention="fifo", runtime="dataflow", costs=None):
    from simdev import registry
    from simdev.costs import CostModel, load_measured
    from simdev.problem import Problem, Rules
    from simdev.topology import load_topology

    model = CostModel() if costs is None else CostModel(measured=load_measured(costs))
    rules = Rules(policy, contention, runtime)
    return Problem.build(registry.load_workload(graph), load_topology(topology), model, rules)


def _place(problem, entry: str, evaluations: int, seed: int):
    import numpy as np

    from simdev import registry
    from simdev.placer import Budget

    if evaluations < 0 or seed < 0:
        raise InvalidInput("evaluations and seed cannot be negative")
    spec, params = registry.find_placer(entry)
    budget = Budget(problem, evaluations=evaluations)
    return spec.place(problem, rng=np.random.default_rng(seed), budget=budget, **params)


def _compare_placements(problem, before: Path, after: Path) -> list[dict]:
    from simdev import sim
    from simdev.placement import Placement

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


@_command("perf")
def perf(
    ops: Annotated[list[int] | None, typer.Option("--ops", help="About how many ops a graph has.")] = None,
    topology: Annotated[str, typer.Option("--topology", "-t", help="Topology name or TOML file.")] = "p100x4",
    rounds: Annotated[int, typer.Option(help="How often each is timed; the least counts.")] = 3,
    out: OutOption = Path("perf"),
) -> None:
    """Time the engines side by side on graphs shaped like training steps; write perf.csv and perf.png."""
    from simdev.perf import measure, write

    sizes = ops or [1000, 10000]
    for value, option in [*((size, "--ops") for size in sizes), (rounds, "--rounds")]:
        _positive(value, option)
    rows = measure(sizes, topology, rounds=rounds)
    write(rows, out)
    header = ["contender", "placement", "ops", "us", "ns_per_op"]
    _print_table(header, [[str(row[name]) for name in header] for row in rows])
    print(f"{out / 'perf.csv'}, {out / 'perf.png'}")


def _print_schedule(problem, placement, schedule, as_json: bool) -> None:
    from simdev.bench import overflow_text

    names = [device.name for device in problem.topology.devices]
    counts = [int((placement.devices == number).sum()) for number in range(len(names))]
    report = {
        "graph": problem.graph.name,
        "fingerprint": problem.graph.fingerprint,
        "topology": problem.topology.name,
        "cost_hash": problem.costs.hash,
        "placement": placement.hash,
        "feasible": bool(schedule.feasible),
        "step_time_s": schedule.step_ns / 1e9,
        "step_ns": int(schedule.step_ns),
        "comm_bytes": int(schedule.comm_bytes),
        "overflow": overflow_text(problem, schedule),
        "devices": {
            name: {"ops": count, "peak_memory_bytes": int(peak), "capacity_bytes": int(capacity)}
            for name, count, peak, capacity in zip(
                names, counts, schedule.peak_bytes, problem.topology.memory_bytes, strict=True
            )
        },
    }
    if as_json:
        print(json.dumps(report, indent=1))
        return
    verdict = "" if schedule.feasible else f"  OUT OF MEMORY by bytes {report['overflow']}"
    print(f"{problem.graph.name} on {problem.topology.name}: {schedule.step_ns / 1e6:.3f} ms{verdict}")
    print(f"transfers {schedule.comm_bytes / 2**20:.1f} MiB")
    for name, device in report["devices"].items():
        peak, capacity = device["peak_memory_bytes"] / 2**30, device["capacity_bytes"] / 2**30
        print(f"  {name:8} {device['ops']:7} ops  peak {peak:8.3f} of {capacity:.3f} GiB")


def _list_workloads() -> list[dict]:
    from simdev import registry

    return [
        {"name": spec.name, "family": spec.family, "params": dict(spec.defaults),
         "graph": "ships" if registry.graph_path(spec.name).is_file() else "needs capture"}
        for spec in registry.workloads().values()
    ]  # fmt: skip


def _list_topologies() -> list[dict]:
    from simdev.topology import load_topology, topology_names

    return [{"name": name, "description": load_topology(name).description} for name in topology_names()]


def _list_placers() -> list[dict]:
    from simdev import registry

    return [
        {"name": spec.name, "version": f"v{spec.version}", "family": spec.family, "params": dict(spec.defaults),
         "memory": "" if spec.memory_aware else "ignores memory",
         "repeatable": "" if spec.repeatable else "may stop by the clock", "source": spec.source}
        for spec in registry.placers().values()
    ]  # fmt: skip


_LISTS = {"workloads": _list_workloads, "topologies": _list_topologies, "placers": _list_placers}


def _print_board(found: list[Row], out: Path) -> None:
    from simdev.board import LEGEND, board, failures, headline

    for title, header, lines in board(found):
        print(f"\n{title}")
        _print_table(header, lines)
    print(LEGEND)
    for line in failures(found):
        print(line, file=sys.stderr)
    print(headline(found, out))


def _print_table(header: list[str], lines: list[list[str]]) -> None:
    """A table: boxed by rich on a terminal, aligned plain text elsewhere."""
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD)
        for number, name in enumerate(header):
            table.add_column(name, justify="left" if number == 0 else "right", no_wrap=number == 0)
        for line in lines:
            table.add_row(*line)
        Console().print(table)
        return
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    for line in [header, *lines]:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _positive(value: float | None, option: str) -> float | None:
    if value is not None and not 0 < value < float("inf"):
        raise InvalidInput(f"{value} is not positive", source=option)
    return value
