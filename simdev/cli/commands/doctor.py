"""``simdev doctor``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from simdev.cli.app import ABOUT, command
from simdev.cli.options import JsonOption
from simdev.cli.tables import print_answer


@command("doctor", topic=ABOUT)
def doctor(
    warm: Annotated[bool, typer.Option("--warm", help="First compile every kernel (a minute or two).")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check this installation.

    Lists the installed packages, the placers and solvers that cannot run here with the reason, the cache of
    compiled kernels, and which limits of a run this system keeps.
    """
    from simdev.cli.doctor import diagnose, report

    if warm:
        from simdev.bench.warm import warm_all

        for step in warm_all():
            print(f"compiling: {step}", file=sys.stderr, flush=True)
    found = diagnose()
    print_answer(found, [report(found)], as_json)
