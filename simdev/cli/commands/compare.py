"""``simdev compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simdev.errors import InvalidInput, counted

if TYPE_CHECKING:
    pass
from simdev.cli.app import BENCHMARK, command
from simdev.cli.options import JsonOption
from simdev.cli.problems import build_problem
from simdev.cli.tables import print_json, print_table


@command("compare", topic=BENCHMARK)
def compare(
    before: Annotated[Path, typer.Argument(help="Result folder, or placement file.")],
    after: Annotated[Path, typer.Argument(help="Result folder, or placement file.")],
    graph: Annotated[str | None, typer.Option(help="Workload or graph file, for placements.")] = None,
    topology: Annotated[str | None, typer.Option(help="Topology, for placements.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two result folders, or two placements.

    Lists the runs that differ: which became better or worse, and by how much.
    """
    from simdev.bench import score

    for path in (before, after):
        if not path.exists():
            raise InvalidInput("No such file or directory", source=path)
    if before.is_dir() != after.is_dir():
        raise InvalidInput("one is a folder, the other is not", source=f"{before}, {after}")
    if before.is_dir():
        lines = score.compare(before, after)
    elif graph is None or topology is None:
        raise InvalidInput("comparing placements needs --graph and --topology")
    else:
        lines = _compare_placements(build_problem(graph, topology), before, after)
    if as_json:
        print_json(lines)
    elif lines:
        print_table(list(lines[0]), [list(line.values()) for line in lines])
        print(f"{counted(len(lines), 'difference')}, {sum(line['verdict'] == 'worse' for line in lines)} worse")
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
        {
            "what": name,
            "before": str(left),
            "after": str(right),
            "change": f"{right / left - 1:.4f}" if left else "",
            "verdict": "" if name == "moved_ops" else "worse" if right > left else "better",
        }
        for name, (left, right) in sizes.items()
        if left != right
    ]
