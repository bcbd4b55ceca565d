"""Compute the step time of a placement under the rules of other simulators (presets).

A preset converts a problem and a placement to another problem and placement, which the same engine simulates. Presets
model step times, not memory.

* ``placeto`` (Addanki et al. 2019; the simulator in Park): an op costs the same on every device (here: its duration on
  the first accelerator), and its device stays closed for 5.7 us after it. A device has one outgoing bus. A tensor
  crosses the bus once, however many devices read it, at 7,600 bytes/us, and the bus stays closed for 25 us after it.
  Queues are first come, first served; nothing waits at the receiver.
* ``baechi`` (Jeon et al. 2020): each device has one channel for both directions, with 134 us and 0.0001754 us per byte
  in total. A tensor is sent once to each device that reads it.
* ``load`` (Tarnawski et al. 2020): the step time is the largest load. The load of an accelerator is the time of its ops
  plus one crossing for each tensor that it receives or sends. The load of a host is the time of its ops. Nothing waits.
  A crossing costs as much as a transfer between the device and the host (without a host, the most expensive transfer
  from the device).
* ``ideal-links`` (GiPH, 2023; Doppler, 2026): transfers never wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from simdev.errors import InvalidInput, UnknownName
from simdev.problem.costs import FREE_KINDS, CostTable, transfer_durations
from simdev.problem.graph import ComputationGraph
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Device, Link, Topology
from simdev.sim import simulate

PLACETO_GAP_NS, PLACETO_BUS_GAP_NS, PLACETO_BYTES_PER_US = 5_700, 25_000, 7_600
BAECHI_LATENCY_NS, BAECHI_NS_PER_BYTE = 134_000, 0.1754


def under(problem: Problem, placement: Placement, preset: str) -> tuple[Problem, Placement]:
    """The problem and placement that the engine simulates for ``placement`` under a preset. Raises :class:`UnknownName`
    for an unknown preset, and :class:`InvalidInput` if the placement is not valid for ``problem``."""
    if preset not in PRESETS:
        raise UnknownName("physics", preset, PRESETS)
    placement.check(problem)
    return PRESETS[preset](problem, placement)


def step_ns(problem: Problem, placement: Placement, preset: str, engine: str = "fast") -> int:
    """The step time of ``placement`` under a preset."""
    return simulate(*under(problem, placement, preset), engine=engine).step_ns


def placeto(problem: Problem, placement: Placement) -> tuple[Problem, Placement]:
    """Each device gets a bus: a device of its own, on which the transfers from the device are ops."""
    graph, n_devices = problem.graph, problem.topology.n_devices
    n, home = graph.n_ops, placement.devices[graph.tensor_producer]
    away = placement.devices[graph.consumers] != home[graph.edge_tensor]
    sent = np.unique(graph.edge_tensor[away])  # tensors that leave their device
    # The number of a bus op follows that of its tensor's producer; consumers on other devices read the bus op's tensor.
    owner = np.concatenate([np.arange(n), graph.tensor_producer[sent]])
    order = np.argsort(owner, kind="stable")
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    bus_of = np.full(graph.n_tensors, -1)
    bus_of[sent] = np.arange(n, len(order))
    producer = np.concatenate([graph.tensor_producer, np.arange(n, len(order))])
    size = np.concatenate([graph.tensor_bytes, np.zeros(len(sent), np.int64)])
    tensor = np.concatenate([np.where(away, graph.n_tensors + bus_of[graph.edge_tensor] - n, graph.edge_tensor), sent])
    reader = np.concatenate([graph.consumers, bus_of[sent]])
    built = _graph(graph.name, len(order), number[producer], size, tensor, number[reader])
    # The engine's two hops to and from the bus take 1 ns each.
    whole = -(-graph.tensor_bytes[sent] * 1000 // PLACETO_BYTES_PER_US)
    busy = np.maximum(1, whole - 2)
    free = np.array([kind in FREE_KINDS for kind in graph.kinds])[graph.op_kind]
    ns = np.concatenate([_durations(problem), busy])[order]
    gap = np.concatenate([np.where(free, 0, PLACETO_GAP_NS), PLACETO_BUS_GAP_NS + np.maximum(0, whole - busy)])[order]
    device = np.concatenate([placement.devices, n_devices + home[sent]])[order]
    devices = [Device(one.name, one.kind) for one in problem.topology.devices]
    devices += [Device(f"bus of {one.name}", one.kind) for one in problem.topology.devices]
    topology = _hub("placeto", devices, Link(("", ""), 1 << 50, 0))
    pair = np.zeros((2 * n_devices, 2 * n_devices), np.int32)
    table = CostTable(
        ns[None],
        np.zeros(2 * n_devices, np.int32),
        np.ones((1, built.n_tensors), np.int64),
        pair,
        np.zeros(built.n_ops, np.int64),
        gap,
    )
    return Problem(built, topology, table, Rules(contention="none")), Placement(device.astype(np.int32))


def baechi(problem: Problem, placement: Placement) -> tuple[Problem, Placement]:
    """Each device has one half-duplex link; a transfer occupies the links of both of its ends."""
    rate = round(1e9 / BAECHI_NS_PER_BYTE)
    topology = _hub("baechi", list(problem.topology.devices), Link(("", ""), rate, BAECHI_LATENCY_NS // 2, "half"))
    costs = problem.costs
    transfer_ns, pair_class = transfer_durations(problem.graph.tensor_bytes, topology)
    table = CostTable(costs.op_ns, costs.device_row, transfer_ns, pair_class, costs.dispatch_ns)
    return Problem(problem.graph, topology, table, Rules()), Placement(placement.devices)


def load(problem: Problem, placement: Placement) -> tuple[Problem, Placement]:
    """Every op and every crossing becomes an op without inputs, on the device whose load it is."""
    graph, topology, n_devices = problem.graph, problem.topology, problem.topology.n_devices
    home = placement.devices[graph.tensor_producer]
    target = placement.devices[graph.consumers]
    away = target != home[graph.edge_tensor]
    into = graph.edge_tensor[away].astype(np.int64) * n_devices + target[away]
    out = graph.edge_tensor[away].astype(np.int64) * n_devices + home[graph.edge_tensor[away]]
    tensor, bearer = np.divmod(np.unique(np.concatenate([into, out])), n_devices)
    hosts = np.array([device.host for device in topology.devices])
    tensor, bearer = tensor[~hosts[bearer]], bearer[~hosts[bearer]]
    own = problem.costs.of_ops(placement.devices)
    ns = np.concatenate([own, _crossing_ns(problem, np.flatnonzero(hosts).tolist())[bearer, tensor]])
    none = np.zeros(0, np.int64)
    built = _graph(graph.name, len(ns), none, none, none, none)
    table = CostTable(
        ns[None],
        np.zeros(n_devices, np.int32),
        np.zeros((0, 0), np.int64),
        np.full((n_devices, n_devices), -1),
        np.zeros(len(ns), np.int64),
    )
    device = np.concatenate([placement.devices, bearer]).astype(np.int32)
    return Problem(built, Topology("load", topology.devices), table, Rules(contention="none")), Placement(device)


def ideal_links(problem: Problem, placement: Placement) -> tuple[Problem, Placement]:
    """The same problem without contention."""
    return Problem(problem.graph, problem.topology, problem.costs, Rules(contention="none")), Placement(
        placement.devices
    )


PRESETS: dict[str, Callable[[Problem, Placement], tuple[Problem, Placement]]] = {
    "placeto": placeto,
    "baechi": baechi,
    "load": load,
    "ideal-links": ideal_links,
}


def _durations(problem: Problem) -> np.ndarray:
    """int64 ``(n,)``: the time of each op on the first accelerator, or else on the first device with a kernel."""
    table = problem.costs.device_op_ns
    order = [*problem.topology.accelerators, *range(problem.topology.n_devices)]
    ns = table[order[0]].copy()
    for device in order[1:]:
        ns = np.where(ns < 0, table[device], ns)
    return ns


def _crossing_ns(problem: Problem, hosts: list[int]) -> np.ndarray:
    """int64 ``(D, m)``: the time to send each tensor from a device to the host; without a host, over its slowest
    route."""
    costs, topology = problem.costs, problem.topology
    rows = []
    for device in range(topology.n_devices):
        targets = hosts[:1] or [other for other in range(topology.n_devices) if other != device]
        classes = {int(costs.pair_class[device, target]) for target in targets if target != device} - {-1}
        found = [costs.transfer_ns[number] for number in sorted(classes)]
        rows.append(np.max(found, axis=0) if found else np.ones(problem.graph.n_tensors, np.int64))
    return np.stack(rows)


def _graph(name: str, n: int, producer, size, tensor, reader) -> ComputationGraph:
    """A graph of ``n`` ops named by their numbers. ``producer`` and ``size`` ``(m,)`` are its tensors, in any order;
    ``tensor`` (an index into them) and ``reader`` ``(e,)`` are its edges."""
    order = np.argsort(producer, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    edges = np.lexsort((reader, rank[tensor]))
    count = np.bincount(rank[tensor], minlength=len(order))
    zeros, m = np.zeros(n, np.int64), len(order)
    columns: dict[str, Any] = {column: zeros for column in ComputationGraph.OP_COLUMNS} | {"op_group": zeros - 1}
    return ComputationGraph(
        name=name,
        kinds=("op",),
        signatures=("op",),
        layers=("",),
        op_names=tuple(str(op) for op in range(n)),
        **columns,
        tensor_producer=producer[order],
        tensor_bytes=size[order],
        tensor_persistent=np.zeros(m, bool),
        tensor_result=np.zeros(m, bool),
        consumer_ptr=np.concatenate([[0], np.cumsum(count)]),
        consumers=reader[edges],
    )


def _hub(name: str, devices: list[Device], like: Link) -> Topology:
    """All devices around one switch, each on a link like ``like``."""
    if any(device.name == "hub" for device in devices):
        raise InvalidInput("a device is named 'hub'", source=name)
    links = tuple(Link((device.name, "hub"), like.bytes_per_s, like.latency_ns, like.duplex) for device in devices)
    return Topology(name, tuple(devices), links, ("hub",))
