"""Finds placers and workloads by name: the shipped ones, those of other packages, and those in files of the user."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from simdev.graphs import workload
from simdev.graphs.importers import import_graph
from simdev.graphs.random_graphs import family_graph
from simdev.placers import placer
from simdev.problem.graph import ComputationGraph
from simdev.problem.graph_file import load_graph
from simdev.shelf import parse_id as parse_id
from simdev.user_file import is_file_entry

_MEMBER = re.compile(r"(?P<family>\w+)-family\[seed=(?P<seed>\d{1,9})\]")


def placers() -> dict[str, placer.PlacerSpec]:
    """Every registered placer, by name."""
    return placer.SHELF.load()


def workloads() -> dict[str, workload.WorkloadSpec]:
    """Every registered workload, by name."""
    return workload.SHELF.load()


def find_placer(entry: str) -> tuple[placer.PlacerSpec, dict]:
    """The placer and the parameters that an id names. Raises :class:`UnknownName` or :class:`InvalidInput`.

    ``my_placers.py:name`` takes the placer from the user's own file, which is executed.
    """
    return placer.SHELF.find(entry)


def find_workload(entry: str) -> tuple[workload.WorkloadSpec, dict]:
    """The workload and the parameters that an id names."""
    return workload.SHELF.find(entry)


def graph_path(name: str) -> Path:
    """The path of the graph file that ships with a workload; the file need not exist."""
    package = importlib.import_module("simdev.workloads")
    return Path(package.__path__[0]) / "graphs" / f"{name}.npz"


def load_workload(entry: str) -> ComputationGraph:
    """The graph that ``entry`` names. Raises :class:`InvalidInput` or :class:`UnknownName`.

    * A workload id, as ``nmt[batch=64]``: read from the shipped file for the default parameters, and captured with
      PyTorch (the extra ``capture``) for others.
    * A graph file in any format of :mod:`simdev.graphs.importers`.
    * ``my_model.py:make_step``: a training step in a file of the user, which is executed.
    * ``nmt-family[seed=3]``: a random graph of a family, see :mod:`simdev.graphs.random_graphs`.
    """
    if is_step_file(entry):
        from simdev.graphs.capture import capture_file

        return capture_file(entry)
    if ":" in entry:
        from simdev.graphs.capture import capture_package, is_package_model

        if is_package_model(entry):
            return capture_package(entry)
    if is_graph_file(entry):
        return load_graph(entry) if entry.endswith(".npz") else import_graph(entry).graph
    member = _MEMBER.fullmatch(entry)
    if member:
        return family_graph(member["family"], int(member["seed"]))
    spec, params = find_workload(entry)
    if all(spec.defaults[key] == value for key, value in params.items()) and graph_path(spec.name).is_file():
        return load_graph(graph_path(spec.name))
    from simdev.graphs.capture import capture_workload

    return capture_workload(spec, params)


def is_step_file(entry: str) -> bool:
    """Whether an entry names a training step in a file of the user: ``my_model.py:make_step``."""
    return is_file_entry(entry)


def is_graph_file(entry: str) -> bool:
    """Whether an entry names a graph file, by the end of its name."""
    return not is_step_file(entry) and entry.endswith((".npz", ".json", ".csv", ".onnx", ".txt"))


def is_file(entry: str) -> bool:
    """Whether an entry names a file of either kind, and not a workload."""
    return is_step_file(entry) or is_graph_file(entry)


def is_member(entry: str) -> bool:
    """Whether an entry names a member of a family of random graphs, as ``nmt-family[seed=3]``."""
    return _MEMBER.fullmatch(entry) is not None
