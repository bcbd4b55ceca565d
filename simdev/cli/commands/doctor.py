"""``simdev doctor``."""

from __future__ import annotations

import json

from simdev.cli.app import command
from simdev.cli.options import JsonOption


@command("doctor")
def doctor(as_json: JsonOption = False) -> None:
    """Check this installation.

    Lists the installed packages, the placers and solvers that cannot run here with the reason, and the cache of
    compiled kernels.
    """
    from simdev.cli.doctor import diagnose, report

    found = diagnose()
    print(json.dumps(found, indent=1) if as_json else report(found))
