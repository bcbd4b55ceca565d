"""Experiments of the papers on learned placement, made again: a file for each, run by :func:`reproduce`.

An experiment plans its runs, a :class:`~simdev.studies.reproduce.lab.Lab` executes what its folder does not hold yet, and the
tables, pictures and the report are written anew from all of them. What the papers claim stands beside what came out.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

from simdev.bench.bench import Observer
from simdev.errors import UnknownName
from simdev.studies.reproduce.lab import Lab

EXPERIMENTS = ("gdp", "mirhoseini", "placeto", "speed")
SCALES = ("tiny", "small", "full")
UNFINISHED = "The rest of this experiment has not been run yet; the same command goes on.\n"


def reproduce(name: str, out: str | os.PathLike, *, scale: str = "small", observer: Observer | None = None) -> Path:
    """Run what experiment ``name`` still lacks in folder ``out`` and write its report there; the report's path.

    ``scale`` is how much: ``tiny`` (seconds, to try it), ``small`` (what is committed) or ``full`` (hours). Stopped at
    any time, the same call goes on. Raises :class:`UnknownName` for a name that does not exist.
    """
    if name not in EXPERIMENTS:
        raise UnknownName("experiment", name, EXPERIMENTS)
    if scale not in SCALES:
        raise UnknownName("scale", scale, SCALES)
    experiment = import_module(f"simdev.studies.reproduce.{name}")
    with Lab(Path(out), experiment.SIZES[scale], observer or Observer()) as lab:
        command, parts = f"simdev reproduce {name} --scale {scale}", []
        for part in experiment.run(lab):  # a report that says so after each part: what is finished is never lost
            parts += part
            lab.report(experiment.TITLE, command, [*parts, UNFINISHED])
        return lab.report(experiment.TITLE, command, parts)
