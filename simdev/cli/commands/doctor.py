"""doctor: the state of this installation."""

from __future__ import annotations

import json

from simdev.cli.commands import JsonOption, command


@command("doctor")
def doctor(as_json: JsonOption = False) -> None:
    """What is installed, which placers and solvers work here and why not, and the cache of compiled kernels."""
    from simdev.cli.doctor import diagnose, report

    found = diagnose()
    print(json.dumps(found, indent=1) if as_json else report(found))
