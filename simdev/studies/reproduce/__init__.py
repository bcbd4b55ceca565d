"""Repeats the experiments of the papers on learned placement; one file for each experiment.

An experiment plans its runs. A :class:`~simdev.studies.reproduce.lab.Lab` executes the runs that its folder does not
hold yet, and writes tables, pictures and the report from all of them. The report states the claims of the paper beside
the results.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

from simdev.bench.bench import Observer
from simdev.errors import InvalidInput, UnknownName
from simdev.studies.reproduce.lab import Lab

EXPERIMENTS = ("ablations", "extensions", "gdp", "learned", "mirhoseini", "piper", "placeto", "speed", "tarnawski")
OF_PUBLIC_INPUTS = ("piper", "tarnawski")  # experiments that read a folder of them
SCALES = ("tiny", "small", "full")
UNFINISHED = "The rest of this experiment has not run yet; the same command resumes it.\n"


def reproduce(
    name: str,
    out: str | os.PathLike,
    *,
    scale: str = "small",
    observer: Observer | None = None,
    data: str | os.PathLike | None = None,
) -> Path:
    """Run experiment ``name`` in folder ``out``, write its report there, and return the path of the report.

    ``scale`` is the size of the experiment: ``tiny`` (seconds, to try it), ``small`` (minutes) or ``full`` (hours, to
    answer what ``small`` leaves open).
    ``data`` is the folder of public inputs that ``tarnawski`` (msr-fiddle/dnn-partitioning) and ``piper``
    (msr-fiddle/piper) read. If the call is interrupted, the same call resumes it. Raises :class:`UnknownName` for an
    unknown experiment or scale.
    """
    if (data is None) != (name not in OF_PUBLIC_INPUTS):
        what = "needs the folder of its public inputs" if data is None else "takes no folder of inputs"
        raise InvalidInput(what, source=f"experiment {name}")
    if name not in EXPERIMENTS:
        raise UnknownName("experiment", name, EXPERIMENTS)
    if scale not in SCALES:
        raise UnknownName("scale", scale, SCALES)
    experiment = import_module(f"simdev.studies.reproduce.{name}")
    with Lab(Path(out), experiment.SIZES[scale], observer or Observer(), data) as lab:
        folder = "" if data is None else " FOLDER"
        command, parts = f"simdev study reproduce {name}{folder} --scale {scale}", []
        for part in experiment.run(lab):  # write a report after each part, so that finished parts are never lost
            parts += part
            lab.report(experiment.TITLE, command, [*parts, UNFINISHED])
        return lab.report(experiment.TITLE, command, parts)
