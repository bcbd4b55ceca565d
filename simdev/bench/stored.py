"""The graphs and machines that a result folder keeps, and how its rows find them again without running any code.

A row is data: it may come from anywhere. Its workload, machine and placer are resolved to what ships with simdev, to
what an installed package registers, or to the files that the folder keeps; never to a path that the row names.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from simdev.bench.matrix import parse_rules
from simdev.bench.rows import NAME, Row
from simdev.errors import InvalidInput, UnknownName, quoted
from simdev.files import read_json, read_text, read_toml, replacing, write_text
from simdev.placers import registry
from simdev.placers.placer import PlacerSpec
from simdev.problem.graph import ComputationGraph
from simdev.problem.graph_file import load_graph
from simdev.problem.problem import Problem
from simdev.problem.topology import (
    Topology,
    kept_device_file,
    load_topology,
    split_choices,
    split_nodes,
    topology_names,
)


def kept_graph(out: Path, fingerprint: str) -> Path:
    """Where a result folder keeps a graph that does not ship with simdev."""
    if not NAME.fullmatch(fingerprint):
        raise InvalidInput(f"{quoted(fingerprint)} is not the fingerprint of a graph", source=out)
    return out / "graphs" / f"{fingerprint}.npz"


def kept_machine(out: Path, topology: str) -> Path:
    """Where a result folder keeps a machine that does not ship with simdev, named by its path."""
    return out / "machines" / f"{hashlib.sha256(topology.encode()).hexdigest()[:16]}.toml"


def keep_machine(topology: str, out: Path) -> None:
    """Copy a machine of the user's own, with the device files that it names, into a result folder, so that its rows can
    be verified elsewhere."""
    file, _ = split_choices(topology)
    if file in topology_names():
        return
    path = kept_machine(out, topology)
    path.parent.mkdir(exist_ok=True)
    for kind in read_toml(file).get("kind", {}).values():
        name = kind.get("calibrated", "")
        if name.endswith(".toml"):
            source, target = Path(file).parent / name, Path(kept_device_file(str(path), name))
            for ending in (".toml", ".npz"):
                if source.with_suffix(ending).is_file():
                    with open(source.with_suffix(ending), "rb") as old, replacing(target.with_suffix(ending)) as new:
                        shutil.copyfileobj(old, new)
    write_text(path, read_text(file))


def ships(workload: str) -> bool:
    """Whether the graph of a workload id comes with simdev. Raises :class:`UnknownName` for one that does not exist."""
    if registry.is_file(workload):
        return False
    spec, params = registry.find_workload(workload)
    return (
        all(spec.defaults[key] == value for key, value in params.items()) and registry.graph_path(spec.name).is_file()
    )


def is_registered(workload: str) -> bool:
    """Whether the graph of a workload id comes with simdev or is drawn from a family; False for every other text."""
    try:
        return not registry.is_file(workload) and (registry.is_member(workload) or ships(workload))
    except InvalidInput:  # nobody registers that name
        return False


def registered_graph(workload: str) -> ComputationGraph | None:
    """The graph of a workload id if it comes with simdev or is drawn from a family; None for every other text."""
    try:
        return registry.load_workload(workload) if is_registered(workload) else None
    except InvalidInput:  # a family with other parameters than it has
        return None


def stored_graph(out: Path, row: Row) -> ComputationGraph:
    """The graph of a row. Raises :class:`InvalidInput` if it neither ships with simdev nor lies in the folder, and
    :class:`UnknownName` for a workload that is neither registered nor the name of a file."""
    graph = registered_graph(row.workload)
    if graph is not None:
        return graph
    if not registry.is_file(row.workload):
        registry.find_workload(row.workload)  # with other parameters than those of the shipped graph
    path = kept_graph(out, row.fingerprint)
    if not path.is_file():
        raise InvalidInput("the graph is not kept with the results", source=row.workload)
    graph = load_graph(path)
    if graph.fingerprint != row.fingerprint:
        raise InvalidInput(f"holds the graph {graph.fingerprint}", source=path)
    return graph


def stored_machine(out: Path, row: Row) -> Topology:
    """The machine of a row. Raises :class:`InvalidInput` if it neither ships with simdev nor lies in the folder."""
    name, nodes = split_nodes(row.topology)
    if name in topology_names():
        return load_topology(row.topology)
    path = kept_machine(out, row.topology)
    if not path.is_file():
        raise InvalidInput("the machine is not kept with the results", source=row.topology)
    return load_topology(path if nodes is None else f"{path}[nodes={nodes}]", kept=True)


def stored_problem(out: Path, row: Row) -> Problem:
    """The problem of a row of a result folder."""
    return Problem.build(stored_graph(out, row), stored_machine(out, row), rules=parse_rules(row.rules))


def named_in(path: Path) -> tuple[str, str]:
    """The workload and the topology that a placement file names. They are names: nothing is loaded from a path."""
    document = read_json(path)
    names = [document.get(key) for key in ("graph", "topology")] if isinstance(document, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise InvalidInput("does not name its graph and topology", source=path)
    return names[0], names[1]


def registered_workload(name: str) -> ComputationGraph:
    """The graph of a workload that a file names. Raises :class:`UnknownName` unless it comes with simdev."""
    graph = registered_graph(name)
    if graph is None:
        raise UnknownName("workload", name, registry.workloads())
    return graph


def registered_machine(name: str) -> Topology:
    """A machine that a file names. Raises :class:`UnknownName` unless it comes with simdev."""
    if split_nodes(name)[0] not in topology_names():
        raise UnknownName("topology", name, topology_names())
    return load_topology(name)


def registered_placer(row: Row) -> PlacerSpec | None:
    """The placer of a row if simdev or an installed package registers it, else None."""
    return registry.placers().get(row.placer)
