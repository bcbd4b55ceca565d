"""``simdev study training-runs``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import STUDY, command
from simdev.cli.options import JsonOption
from simdev.cli.tables import print_figures


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
    chosen = [source for source in report.SETS if source in (sets or report.SETS)]
    found, given, refused = [], [], []
    for source in report.SETS:
        if not any(source in report.CONTROL_ROWS[name] for name in chosen):
            continue
        runs, why = report.read_runs(data, source)
        given += runs  # controls are fitted to all rows of other models, simulated or not
        if source in chosen:
            some = _whole_groups(runs, most) if rankings else report.spread(runs, most)
            if commands:
                _print_commands(some)
                continue
            predictions, more = report.predict_all(some, lambda text: print(text, file=sys.stderr))
            found += predictions
            refused += why + more
    if commands:
        return
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


def _print_commands(runs: list) -> None:
    """What a reader pastes for each row, and what was measured."""
    for run in runs:
        arguments = shlex.join(run.typed.arguments)
        print(f"simdev simulate-plan {arguments}  # {run.source} {run.name}: {run.step_ns / 1e6:,.1f} ms measured")


def _whole_groups(runs: list, most: int) -> list:
    """All plans of as many groups as have at most ``most`` plans together; of the largest ones first."""
    from simdev.studies.plan_rankings import grouped

    chosen: list = []
    for members in grouped(runs):
        if len(chosen) + len(members) <= most:
            chosen += members
    return chosen
