"""``simdev submit``."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import BENCHMARK, command
from simdev.cli.options import JsonOption, OutOption
from simdev.cli.tables import print_answer
from simdev.errors import counted


@command("submit", topic=BENCHMARK)
def submit(
    folder: Annotated[Path, typer.Argument(help="Result folder of a bench, or folder of placement files (JSON).")],
    out: OutOption,
    name: Annotated[str, typer.Option(help="Name of the placer, for placement files.")] = "",
    release: Annotated[
        bool, typer.Option("--release", help="Add checksums, the schema of the tables and a data sheet.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Pack results or placements into one archive.

    simdev verify checks such an archive without running any code of its author.
    """
    from simdev.bench.submission import submit as pack

    count = pack(folder, out, name=name, release=release)
    facts = {"written": [str(out)], "rows": count}
    lines = [f"{out}: {counted(count, 'row')}; simdev verify {out} recomputes them"]
    if release:
        facts["sha256"] = hashlib.sha256(out.read_bytes()).hexdigest()
        lines.append(f"SHA-256 {facts['sha256']}")
    print_answer(facts, lines, as_json)
