"""``simdev verify``."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import BENCHMARK, command
from simdev.cli.options import Engine, JsonOption
from simdev.cli.tables import print_json
from simdev.errors import counted


@command("verify", topic=BENCHMARK)
def verify(
    folder: Annotated[Path, typer.Argument(help="Result folder of a bench, or submission.")],
    engine: Annotated[Engine, typer.Option(help="Which engine recomputes the rows.")] = Engine.reference,
    sample: Annotated[int | None, typer.Option(help="Check that many rows, drawn evenly.")] = None,
    rerun: Annotated[bool, typer.Option("--rerun", help="Also execute the placers and planners again.")] = False,
    placer: Annotated[
        list[str] | None,
        typer.Option("--placer", "-p", help="Code of your own that may be executed, FILE.py:NAME; a configuration."),
    ] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", help="Rows at a time (default: one a core).")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="File that keeps which rows hold: if interrupted, the same command resumes.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Recompute every row of a result folder, and look at every file of it.

    A file that is not checked is a difference; texts, pictures and columns that cannot be recomputed are named.

    Nothing that a row names is executed: no placer, planner or model from a file unless you name it with --placer.
    """
    from collections import Counter

    from simdev.bench.provenance import origins
    from simdev.bench.verify import verify as recompute
    from simdev.cli import progress

    skipped: Counter = Counter()
    commits: list[str] = []
    notes: list[str] = []
    seen: list = []
    try:
        with progress.counter("verifying") as tell:

            def on_row(done: int, total: int, title: str, wrong: list) -> None:
                seen.extend(wrong)
                tell(done, total, title, wrong)

            differences = recompute(
                folder,
                engine=engine,
                sample=sample,
                rerun=rerun,
                placers=placer or (),
                jobs=jobs,
                resume=resume,
                on_row=on_row,
                on_skip=lambda title, reason: skipped.update([reason]),
                on_rows=lambda rows: commits.extend(row.commit for row in rows),
                on_note=notes.append,
            )
    except KeyboardInterrupt:
        for difference in seen:
            print(difference, file=sys.stderr if as_json else sys.stdout)
        how = "the same command resumes" if resume else "--resume FILE would have kept which rows hold"
        print(f"simdev: interrupted; {how}", file=sys.stderr)
        raise typer.Exit(130) from None
    print(origins(commits), file=sys.stderr)
    for reason, count in skipped.most_common():
        print(f"not executed again: {counted(count, 'row')}: {reason}", file=sys.stderr)
    for note in notes:
        print(f"not checked: {note}", file=sys.stderr)
    if as_json:
        print_json([asdict(difference) for difference in differences])
        raise typer.Exit(1 if differences else 0)
    for difference in differences:
        print(difference)
    if differences:
        print(f"{folder}: {counted(len(differences), 'difference')}", file=sys.stderr)
        raise typer.Exit(1)
    print(f"{folder}: every row holds ({engine} engine)")
