"""``simdev study compare-plans``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from simdev.cli.app import STUDY, command
from simdev.cli.options import JsonOption, positive
from simdev.cli.steps import FolderOption, MachineArgument, RepeatsOption
from simdev.cli.tables import print_figures


@command("compare-plans", topic=STUDY)
def compare_plans(
    machine: MachineArgument,
    out: FolderOption,
    model: Annotated[str, typer.Option(help="Parallel model with its parameters.")] = "small",
    repeats: RepeatsOption = 20,
    as_json: JsonOption = False,
) -> None:
    """Run ten plans of a small model on two cores and compare measured steps with simulated ones."""
    from simdev.measure.plans import PLANS, compare, write_report
    from simdev.problem.topology import load_topology

    positive(repeats, "--repeats")
    rows = []
    for row in compare(model, load_topology(machine), repeats):
        rows.append(row)
        print(
            f"{len(rows)} of {len(PLANS)}: {row['plan']}: {row['measured_ns'] / 1e6:,.1f} ms, {row['error']:+.1%}",
            file=sys.stderr,
        )
    found = write_report(rows, out)
    print_figures(
        list(found), [[f"{value:.3f}" for value in found.values()]], as_json, [out / "report.md", out / "plans.jsonl"]
    )
