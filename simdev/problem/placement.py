"""A placement: the device of each op, optionally with a priority per op and with replicas of devices."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import numpy as np

from simdev.errors import InvalidInput, UnknownName, quoted
from simdev.files import read_json, write_text
from simdev.problem.problem import Problem


@dataclass(frozen=True, eq=False)
class Placement:
    """The device of each op: the answer of a placer.

    ``devices`` int32 ``(n,)`` holds a device number for each op. ``priority`` int64 ``(n,)``, or None, matters only
    under the order ``priority``: of the ready ops, the one with the highest priority runs first.

    ``replica_of`` int32 ``(D,)``, or None, matters only in pipelines of microbatches (R10): a device ``d`` with
    ``replica_of[d] != d`` is a replica of that other device. It holds a copy of the ops there and takes its share of
    the microbatches. ``replicated`` bool ``(n,)`` says of which ops there are copies; an op without copies runs for all
    microbatches on the device that ``devices`` names, which may be a replica. None: all ops on a device with replicas
    have copies. Raises :class:`InvalidInput` unless all hold whole numbers, ``replicated`` of 0 and 1.
    """

    devices: np.ndarray
    priority: np.ndarray | None = None
    replica_of: np.ndarray | None = None
    replicated: np.ndarray | None = None

    def __post_init__(self) -> None:
        kinds: dict[str, type[np.integer]] = {
            "devices": np.int32,
            "priority": np.int64,
            "replica_of": np.int32,
            "replicated": np.int8,
        }
        for name, dtype in kinds.items():
            values = getattr(self, name)
            if values is None:
                continue
            array = np.asarray(values)
            if name == "replicated" and array.dtype == bool:
                array = array.astype(dtype)
            if array.ndim != 1 or array.dtype.kind not in "iu":
                what = "device" if name == "replica_of" else "op"
                raise InvalidInput(f"expected one whole number per {what}", source="placement", field=name)
            if array.size and not np.iinfo(dtype).min <= int(array.min()) <= int(array.max()) <= np.iinfo(dtype).max:
                raise InvalidInput(f"a number does not fit {np.dtype(dtype)}", source="placement", field=name)
            if name == "replicated" and array.size and not 0 <= int(array.min()) <= int(array.max()) <= 1:
                raise InvalidInput("a number is neither 0 nor 1", source="placement", field=name)
            array = array.astype(bool if name == "replicated" else dtype)
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    @classmethod
    def of_units(cls, problem: Problem, unit_devices: np.ndarray) -> Placement:
        """The placement that puts each placement unit (colocation group or single op) on the given device."""
        return cls(np.asarray(unit_devices)[problem.graph.unit_of_op])

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex, 16 characters) of all that the placement says."""
        digest = hashlib.sha256(self.devices.tobytes())
        if self.priority is not None:
            digest.update(self.priority.tobytes())
        if self.replica_of is not None:
            digest.update(b"replica_of" + self.replica_of.tobytes())
        if self.replicated is not None:
            digest.update(b"replicated" + self.replicated.tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def has_copies(self) -> np.ndarray:
        """bool ``(n,)``: the ops of which replicas hold copies, if their device has replicas."""
        every = np.ones(len(self.devices), bool) if self.replicated is None else self.replicated
        return every if self.replica_of is not None else np.zeros(len(self.devices), bool)

    def check(self, problem: Problem, *, source: object = "placement") -> None:
        """Raise :class:`InvalidInput` unless every op is on a device that exists and supports it, colocated ops share
        a device, and every tensor that must travel has a route."""
        graph, topology, costs = problem.graph, problem.topology, problem.costs
        devices = self.devices
        for name in ("devices", "priority", "replicated"):
            values = getattr(self, name)
            if values is not None and len(values) != graph.n_ops:
                raise InvalidInput(f"length {len(values)}, expected {graph.n_ops}", source=source, field=name)
        bad = np.flatnonzero((devices < 0) | (devices >= topology.n_devices))
        if len(bad):
            raise InvalidInput(
                f"op {graph.op_names[bad[0]]!r} is on device {devices[bad[0]]}, which {topology.name} does not have",
                source=source,
                field="devices",
            )
        bad = np.flatnonzero(costs.of_ops(devices) < 0)
        if len(bad):
            raise InvalidInput(
                f"op {graph.op_names[bad[0]]!r} has no kernel on {topology.devices[devices[bad[0]]].name!r}",
                source=source,
                field="devices",
            )
        first = np.zeros(graph.n_units, np.int32)
        first[graph.unit_of_op[::-1]] = devices[::-1]
        bad = np.flatnonzero(first[graph.unit_of_op] != devices)
        if len(bad):
            raise InvalidInput(
                f"op {graph.op_names[bad[0]]!r} is not on the device of its colocation group",
                source=source,
                field="devices",
            )
        source_device, target_device = devices[graph.edge_source], devices[graph.consumers]
        bad = np.flatnonzero((source_device != target_device) & (costs.pair_class[source_device, target_device] < 0))
        if len(bad):
            edge = bad[0]
            raise InvalidInput(
                f"a tensor of op {graph.op_names[graph.edge_source[edge]]!r} must travel from "
                f"{topology.devices[source_device[edge]].name!r} to {topology.devices[target_device[edge]].name!r}, "
                "which have no route",
                source=source,
                field="devices",
            )
        if self.replica_of is not None:
            self._check_replicas(problem, source)
        elif self.replicated is not None:
            raise InvalidInput(
                "says which ops have copies, but there are no replicas", source=source, field="replicated"
            )

    def _check_replicas(self, problem: Problem, source: object) -> None:
        """Each replica must have kernels for the ops that it copies and routes to all devices in use; ops that are
        placed on it, and whole colocation groups, have no copies or all. What the backward phase changes has none."""
        graph, topology, costs, of = problem.graph, problem.topology, problem.costs, self.replica_of
        assert of is not None

        def fail(message: str) -> NoReturn:
            raise InvalidInput(message, source=source, field="replica_of")

        if len(of) != topology.n_devices:
            fail(f"length {len(of)}, expected {topology.n_devices}")
        if of.min() < 0 or of.max() >= len(of):
            fail(f"names a device that {topology.name} does not have")
        replicas = np.flatnonzero(of != np.arange(len(of)))
        for replica in replicas.tolist():
            name, original = topology.devices[replica].name, int(of[replica])
            if of[original] != original:
                fail(f"{name!r} is a replica of {topology.devices[original].name!r}, which is a replica itself")
            if (self.has_copies & (self.devices == replica)).any():
                fail(f"{name!r} is a replica, but ops with copies are placed on it")
            mine = np.flatnonzero(self.has_copies & (self.devices == original))
            missing = mine[costs.op_ns[costs.device_row[replica], mine] < 0]
            if len(missing):
                fail(f"op {graph.op_names[missing[0]]!r} has no kernel on {name!r}")
        copies = np.zeros(graph.n_units, bool)
        copies[graph.unit_of_op[::-1]] = self.has_copies[::-1]
        bad = np.flatnonzero(copies[graph.unit_of_op] != self.has_copies)
        if len(bad):
            name = graph.op_names[bad[0]]
            raise InvalidInput(f"op {name!r} differs from its colocation group", source=source, field="replicated")
        shared = np.isin(self.devices, of[replicas]) & self.has_copies
        bad = np.flatnonzero(shared & graph.updated_in_backward)
        if len(bad):
            raise InvalidInput(
                f"op {graph.op_names[bad[0]]!r} is one of a colocation group whose persistent bytes the backward phase "
                "changes: its copies would differ",
                source=source,
                field="replicated",
            )
        holds = np.isin(np.arange(len(of)), self.devices)
        used = np.flatnonzero(holds | np.isin(of, np.unique(self.devices[self.has_copies])))
        apart = (costs.pair_class[np.ix_(used, used)] < 0) & ~np.eye(len(used), dtype=bool)
        if len(replicas) and apart.any():
            one, other = (topology.devices[used[end[0]]].name for end in np.nonzero(apart))
            fail(f"{one!r} and {other!r} have no route")

    def to_json(self, problem: Problem) -> str:
        """The text of a placement file: graph fingerprint, topology, device names and the device number of each op."""
        document = {
            "graph": problem.graph.name,
            "fingerprint": problem.graph.fingerprint,
            "topology": problem.topology.name,
            "device_names": [device.name for device in problem.topology.devices],
            "devices": self.devices.tolist(),
        }
        if self.priority is not None:
            document["priority"] = self.priority.tolist()
        if self.replica_of is not None:
            document["replica_of"] = self.replica_of.tolist()
        if self.replicated is not None:
            document["replicated"] = self.replicated.astype(int).tolist()
        return json.dumps(document) + "\n"

    def save(self, path: str | os.PathLike, problem: Problem) -> None:
        """Write a placement file, as :meth:`to_json` describes it."""
        write_text(path, self.to_json(problem))

    @classmethod
    def load(cls, path: str | os.PathLike, problem: Problem) -> Placement:
        """Read a JSON placement and check it against ``problem``.

        ``devices`` may be a list (number or device name per op) or an object from op name to device name or number.
        """
        document = read_json(path)
        if not isinstance(document, dict) or "devices" not in document:
            raise InvalidInput("expected an object with 'devices'", source=path)
        found = document.get("fingerprint", problem.graph.fingerprint)
        if found != problem.graph.fingerprint:
            raise InvalidInput(
                f"made for graph {found!r}, not {problem.graph.fingerprint!r} ({problem.graph.name})",
                source=path,
                field="fingerprint",
            )
        names = document["devices"]
        if isinstance(names, dict):
            missing = [name for name in problem.graph.op_names if name not in names]
            if missing:
                raise InvalidInput(f"op {missing[0]!r} has no device", source=path, field="devices")
            names = [names[name] for name in problem.graph.op_names]
        if not isinstance(names, list):
            raise InvalidInput("expected a list or an object", source=path, field="devices")
        devices = [_device_number(value, problem, path) for value in names]
        names = ("priority", "replica_of", "replicated")
        more = {name: document[name] for name in names if document.get(name) is not None}
        for name, values in more.items():
            if not (isinstance(values, list) and all(type(value) is int for value in values)):
                raise InvalidInput("expected a list of whole numbers", source=path, field=name)
        try:
            placement = cls(np.asarray(devices), **{name: np.asarray(values) for name, values in more.items()})
        except InvalidInput as error:
            raise InvalidInput(error.message, source=path, field=error.field) from None
        placement.check(problem, source=path)
        return placement


def _device_number(value: object, problem: Problem, source: object) -> int:
    index: Mapping[str, int] = problem.topology.device_index
    if isinstance(value, str):
        if value not in index:
            raise UnknownName("device", value, index, source=source, field="devices")
        return index[value]
    if type(value) is not int or not 0 <= value < problem.topology.n_devices:
        raise InvalidInput(
            f"{quoted(value)} is not a device of {problem.topology.name}", source=source, field="devices"
        )
    return value
