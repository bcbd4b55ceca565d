"""A placement: the device of each op, optionally with a priority per op."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from simdev.errors import InvalidInput, UnknownName, quoted
from simdev.files import read_json, write_text
from simdev.problem.problem import Problem


@dataclass(frozen=True, eq=False)
class Placement:
    """The device of each op: the answer of a placer.

    ``devices`` int32 ``(n,)`` holds a device number for each op. ``priority`` int64 ``(n,)``, or None, matters only
    under the order ``priority``: of the ready ops, the one with the highest priority runs first. Raises
    :class:`InvalidInput` unless both hold whole numbers.
    """

    devices: np.ndarray
    priority: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name, dtype in (("devices", np.int32), ("priority", np.int64)):
            values = getattr(self, name)
            if values is None:
                continue
            array = np.asarray(values)
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise InvalidInput("expected one whole number per op", source="placement", field=name)
            if array.size and not np.iinfo(dtype).min <= int(array.min()) <= int(array.max()) <= np.iinfo(dtype).max:
                raise InvalidInput(f"a number does not fit {np.dtype(dtype)}", source="placement", field=name)
            array = array.astype(dtype)
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    @classmethod
    def of_units(cls, problem: Problem, unit_devices: np.ndarray) -> Placement:
        """The placement that puts each placement unit (colocation group or single op) on the given device."""
        return cls(np.asarray(unit_devices)[problem.graph.unit_of_op])

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex, 16 characters) of the devices and priorities."""
        digest = hashlib.sha256(self.devices.tobytes())
        if self.priority is not None:
            digest.update(self.priority.tobytes())
        return digest.hexdigest()[:16]

    def check(self, problem: Problem, *, source: object = "placement") -> None:
        """Raise :class:`InvalidInput` unless every op is on a device that exists and supports it, colocated ops share
        a device, and every tensor that must travel has a route."""
        graph, topology, costs = problem.graph, problem.topology, problem.costs
        devices = self.devices
        for name in ("devices", "priority"):
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
        bad = np.flatnonzero(costs.device_op_ns[devices, np.arange(graph.n_ops)] < 0)
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
        priority = document.get("priority")
        if priority is not None and not (isinstance(priority, list) and all(type(value) is int for value in priority)):
            raise InvalidInput("expected a list of whole numbers", source=path, field="priority")
        try:
            placement = cls(np.asarray(devices), None if priority is None else np.asarray(priority))
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
