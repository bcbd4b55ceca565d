"""Placements of a result folder, as starts for a search."""

from __future__ import annotations

import csv
import io
import os
import re
from pathlib import Path

from simdev.errors import InvalidInput
from simdev.files import read_text
from simdev.problem.placement import Placement
from simdev.problem.placement_file import placement_file, stored_placement
from simdev.problem.problem import Problem

MOST = 12


def stored_starts(folder: str | os.PathLike, problem: Problem) -> list[Placement]:
    """The placements with the shortest step times that a result folder of the bench holds for the graph and the costs
    of ``problem``, at most :data:`MOST`, fastest first; those under other rules count, too.

    Raises :class:`InvalidInput` if the folder holds none, or a file of it is missing or malformed.
    """
    path = Path(folder) / "results.csv"
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    wanted = {"fingerprint", "cost_hash", "step_time_s", "placement"}
    if not wanted <= set(reader.fieldnames or ()):
        raise InvalidInput(f"column {min(wanted - set(reader.fieldnames or ()))!r} is missing", source=path)
    found = set()
    for line in reader:
        same = (line["fingerprint"], line["cost_hash"]) == (problem.graph.fingerprint, problem.costs.hash)
        same &= (line.get("objective") or "step") == "step"  # the steady time of a pipeline is no step time
        if same and line["step_time_s"] and re.fullmatch(r"[0-9a-f]{16}", line["placement"] or ""):
            seconds, _, fraction = line["step_time_s"].partition(".")
            found.add((len(seconds), seconds, fraction, line["placement"]))
    if not found:
        raise InvalidInput(f"no placement of {problem.graph.name} on {problem.topology.name}", source=path)
    keys = dict.fromkeys(key for *_, key in sorted(found))
    return [_placement(folder, key, problem) for key in list(keys)[:MOST]]


def _placement(folder: str | os.PathLike, key: str, problem: Problem) -> Placement:
    placement = stored_placement(folder, key)
    placement.check(problem, source=placement_file(folder, key))
    return placement
