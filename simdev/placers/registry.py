"""Finds placers and workloads by name: on the two shelves, in entry points of other packages, and in files of the user.

An id is ``name``, ``name@version`` or ``name[param=value,...]``.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TypeVar

from simdev.errors import InvalidInput, UnknownName
from simdev.graphs import workload
from simdev.graphs.importers import import_graph
from simdev.graphs.random_graphs import family_graph
from simdev.placers import placer
from simdev.problem.graph import ComputationGraph
from simdev.problem.graph_file import load_graph

Found = TypeVar("Found")

_ID = re.compile(r"(?P<name>[^@\[\]]+)(@(?P<version>\d+))?(\[(?P<params>[^\[\]]*)\])?")

_MEMBER = re.compile(r"(?P<family>\w+)-family\[seed=(?P<seed>\d{1,9})\]")


@cache
def load_shelf(shelf: str) -> None:
    """Import every entry of a shelf, ``baselines`` or ``workloads``, with its folders; entries register themselves."""
    package = importlib.import_module(f"simdev.{shelf}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.rpartition(".")[2].startswith("_"):  # helpers are for those who import them
            importlib.import_module(module.name)
    group = "simdev.placers" if shelf == "baselines" else "simdev.workloads"
    for entry in entry_points(group=group):
        entry.load()


def placers() -> dict[str, placer.PlacerSpec]:
    """Every registered placer, by name."""
    load_shelf("baselines")
    return dict(sorted(placer.SHELF.items()))


def workloads() -> dict[str, workload.WorkloadSpec]:
    """Every registered workload, by name."""
    load_shelf("workloads")
    return dict(sorted(workload.SHELF.items()))


def find_placer(entry: str) -> tuple[placer.PlacerSpec, dict]:
    """The placer and the parameters that an id names. Raises :class:`UnknownName` or :class:`InvalidInput`.

    ``my_placers.py:name`` takes the placer from the user's own file, which is executed.
    """
    name, version, params = parse_id(entry)
    path, colon, inside = name.rpartition(".py:")
    if colon:
        spec = _find("placer", inside, _load_file(f"{path}.py"), source=f"{path}.py")
    else:
        spec = _find("placer", name, placers())
    if version is not None and version != spec.version:
        raise InvalidInput(f"version {version} is not here; this is version {spec.version}", source=f"placer {name}")
    _known_params("placer", name, params, spec.defaults)
    return spec, params


def find_workload(entry: str) -> tuple[workload.WorkloadSpec, dict]:
    """The workload and the parameters that an id names."""
    name, _, params = parse_id(entry)
    spec = _find("workload", name, workloads())
    _known_params("workload", name, params, spec.defaults)
    return spec, params


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
    return ".py:" in entry


def is_graph_file(entry: str) -> bool:
    """Whether an entry names a graph file, by the end of its name."""
    return not is_step_file(entry) and entry.endswith((".npz", ".json", ".csv", ".onnx", ".txt"))


def is_file(entry: str) -> bool:
    """Whether an entry names a file of either kind, and not a workload."""
    return is_step_file(entry) or is_graph_file(entry)


def is_member(entry: str) -> bool:
    """Whether an entry names a member of a family of random graphs, as ``nmt-family[seed=3]``."""
    return _MEMBER.fullmatch(entry) is not None


def parse_id(entry: str) -> tuple[str, int | None, dict]:
    """Split ``name@version[param=value,...]``; values are read as JSON where they are JSON, else as text."""
    match = _ID.fullmatch(entry.strip())
    if not match:
        raise InvalidInput(f"{entry!r} is not an id like name or name[param=value]")
    params = {}
    for part in filter(None, (match["params"] or "").split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise InvalidInput(f"{part!r} is not param=value", source=entry)
        try:
            params[key.strip()] = json.loads(value)
        except ValueError:
            params[key.strip()] = value.strip()
    return match["name"].strip(), int(match["version"]) if match["version"] else None, params


@cache
def _load_file(path: str) -> dict[str, placer.PlacerSpec]:
    """The placers that a file of the user registers. The shelf itself is left unchanged."""
    spec = importlib.util.spec_from_file_location(f"simdev_user_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise InvalidInput("not a Python file", source=path)
    module = importlib.util.module_from_spec(spec)
    before = dict(placer.SHELF)
    placer.SHELF.clear()
    try:
        spec.loader.exec_module(module)
        return dict(placer.SHELF)
    except OSError as error:
        raise InvalidInput(error.strerror or str(error), source=path) from None
    except InvalidInput:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise InvalidInput(f"cannot be executed ({type(error).__name__}: {error})", source=path) from None
    finally:
        placer.SHELF.clear()
        placer.SHELF.update(before)


def _find(what: str, name: str, known: Mapping[str, Found], *, source: str | None = None) -> Found:
    if name not in known:
        raise UnknownName(what, name, known, source=source)
    return known[name]


def _known_params(what: str, name: str, params: Mapping[str, object], defaults: Mapping[str, object]) -> None:
    for key in params:
        if key not in defaults:
            raise UnknownName("parameter", key, defaults, source=f"{what} {name}")
