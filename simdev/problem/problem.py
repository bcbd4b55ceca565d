"""A placement problem: graph, topology, costs and the rules of execution; what every placer receives."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from simdev.errors import InvalidInput, UnknownName
from simdev.problem.costs import CostModel, CostTable
from simdev.problem.graph import ComputationGraph
from simdev.problem.topology import Topology, load_topology

ORDERS = ("fifo", "priority", "program")
CONTENTIONS = ("fifo", "none", "fair")
RUNTIMES = ("dataflow", "eager")


@dataclass(frozen=True)
class Rules:
    """The variant of the execution model: the order of the ready ops (R2), link contention (R4) and runtime (R11).

    ``order`` says which ready op a device takes first: ``fifo`` the one that became ready first, ``priority`` the one
    of highest priority, ``program`` the next in program order, even if others are ready before it.
    """

    order: str = "fifo"
    contention: str = "fifo"
    runtime: str = "dataflow"

    def __post_init__(self) -> None:
        for name, known in (("order", ORDERS), ("contention", CONTENTIONS), ("runtime", RUNTIMES)):
            if getattr(self, name) not in known:
                raise UnknownName(name, str(getattr(self, name)), known, source="rules")


@dataclass(frozen=True, eq=False)
class Problem:
    """What a placer receives: find the device of each op so that the step is fastest and fits in memory.

    Raises :class:`InvalidInput` if the costs do not have the shapes of the graph and the topology, or if the rules need
    a device or a cost that is missing.
    """

    graph: ComputationGraph
    topology: Topology
    costs: CostTable
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        n, m, d = self.graph.n_ops, self.graph.n_tensors, self.topology.n_devices
        shapes = {
            "op_ns": (len(self.costs.op_ns), n),
            "device_row": (d,),
            "transfer_ns": (len(self.costs.transfer_ns), m),
            "pair_class": (d, d),
            "dispatch_ns": (n,),
            "gap_ns": (n,),
        }
        for name, shape in shapes.items():
            if getattr(self.costs, name).shape != shape:
                raise InvalidInput(
                    f"shape {getattr(self.costs, name).shape}, expected {shape}", source="costs", field=name
                )
        if self.rules.runtime == "eager" and self.topology.host < 0:
            raise InvalidInput("the eager runtime needs a host device", source=self.topology.name, field="device: host")
        if self.rules.runtime == "eager" and self.costs.gap_ns.any():
            raise InvalidInput("gaps after ops need the dataflow runtime", source="costs", field="gap_ns")

    @classmethod
    def build(
        cls,
        graph: ComputationGraph | str,
        topology: Topology | str,
        model: CostModel | None = None,
        rules: Rules | None = None,
    ) -> Problem:
        """The problem of ``graph`` on ``topology`` under ``rules``, with the costs of ``model``.

        Both may be named: ``Problem.build("nmt", "p100x4")`` loads them as :func:`simdev.load_workload` and
        :func:`simdev.load_topology` do, and raises what they raise. The default model reads the shipped device files,
        and uses rooflines for devices that have none.
        """
        if isinstance(graph, str):
            import simdev  # the front door: names of workloads belong to a room below this one

            graph = simdev.load_workload(graph)
        topology = load_topology(topology) if isinstance(topology, str) else topology
        return cls(graph, topology, (model or CostModel()).table(graph, topology), rules or Rules())

    @cached_property
    def unit_op_ns(self) -> np.ndarray:
        """int64 ``(D, units)``: summed duration of each placement unit on each device; -1 if one of
        its ops has no kernel there."""
        durations, unit = self.costs.device_op_ns, self.graph.unit_of_op
        table = np.zeros((self.topology.n_devices, self.graph.n_units), np.int64)
        for device, row in enumerate(durations):
            np.add.at(table[device], unit, np.maximum(row, 0))
            table[device, unit[row < 0]] = -1
        return table

    @cached_property
    def unit_persistent_bytes(self) -> np.ndarray:
        """int64 ``(units,)``: persistent bytes of each placement unit (before rounding to a device's granularity)."""
        totals = np.zeros(self.graph.n_units, np.int64)
        np.add.at(totals, self.graph.unit_of_op, self.graph.op_persistent_bytes)
        return totals
