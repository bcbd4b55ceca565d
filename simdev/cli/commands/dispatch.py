"""``simdev study dispatch``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import STUDY, command
from simdev.cli.options import JsonOption
from simdev.cli.tables import print_figures


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
