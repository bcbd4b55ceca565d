"""``simdev gaps``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import BENCHMARK, command
from simdev.cli.options import JsonOption
from simdev.cli.tables import print_json
from simdev.errors import counted


@command("gaps", topic=BENCHMARK)
def gaps(
    folder: Annotated[Path, typer.Argument(help="Result folder of a bench.")],
    other: Annotated[
        list[Path] | None, typer.Option("--with", help="Another result folder, whose results are known, too.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print how far the best result of each case is from its bound, and why.

    A gap has three parts. Placement weak: a better placement is known. Bound weak: no bound of this kind can close it,
    because the best known placement takes so much longer than without contention. Open: either may be weak.
    """
    from simdev.bench.gaps import PARTS, gap_parts
    from simdev.bench.score import GAPS

    found = gap_parts(folder, other or ())
    if as_json:
        print_json(found)
        return
    columns = (*GAPS, *PARTS)
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for line in found:
        print("| " + " | ".join(line[name] for name in columns) + " |")
    print(f"\n{summary(found)}")


def summary(lines: list[dict[str, str]]) -> str:
    """How many cases are within 10 and 20 % of their bounds, and the median gap."""
    from statistics import median

    shares = [float(line["gap"].rstrip("%")) for line in lines if line["gap"]]
    if not shares:
        return "no case has a result and a bound"
    near, nearer = (sum(share <= most for share in shares) for most in (20, 10))
    middle = f"median gap {median(shares):.1f} %"
    return f"{counted(len(shares), 'case')}: {nearer} within 10 %, {near} within 20 % of the bound; {middle}"
