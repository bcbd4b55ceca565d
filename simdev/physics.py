"""The rules of other simulators, as presets of this one: the same placement, timed as they would time it.

A preset turns a problem and a placement into another problem and placement for the same engine. Step times are
compared; memory is not part of a preset.

* ``placeto`` (Addanki et al. 2019; the simulator in Park): an op costs the same everywhere (here: what it costs on the
  first accelerator) and keeps its device closed for 5.7 us after it. A device has one outgoing bus: a tensor goes over
  it once, whoever reads it, at 7,600 bytes/us, and the bus stays closed for 25 us after it. Queues are first come,
  first served; nothing waits on the receiving side.
* ``baechi`` (Jeon et al. 2020): one channel per device for both directions, 134 us and 0.0001754 us per byte in all. A
  tensor is sent once to each device that reads it.
* ``load`` (Tarnawski et al. 2020): the largest load. An accelerator bears its ops and each tensor that crosses its
  border, once in and once out; a host bears its ops. Nothing waits for anything. A crossing costs what a transfer
  between device and host costs (without a host, the dearest transfer from the device).
* ``ideal-links`` (GiPH, 2023; Doppler, 2026): transfers never wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from simdev.costs import FREE_KINDS, CostTable, transfer_durations
from simdev.errors import InvalidInput, UnknownName
from simdev.graph import ComputationGraph, GraphBuilder
from simdev.placement import Placement
from simdev.problem import Problem, Rules
from simdev.sim import simulate
from simdev.topology import Device, Link, Topology

PLACETO_GAP_NS, PLACETO_BUS_GAP_NS, PLACETO_BYTES_PER_US = 5_700, 25_000, 7_600
BAECHI_LATENCY_NS, BAECHI_NS_PER_BYTE = 134_000, 0.1754


def under(problem: Problem, placement: Placement, preset: str) -> tuple[Problem, Placement]:
    """What the engine simulates for ``placement`` under a preset. Raises :class:`UnknownName` for another name, and
    :class:`InvalidInput` where the placement is not one of ``problem``."""
    if preset not in PRESETS:
        raise UnknownName("physics", preset, PRESETS)
    placement.check(problem)
    return PRESETS[preset](problem, placement)


def step_ns(problem: Problem, placement: Placement, preset: str, engine: str = "fast") -> int:
    """The step time of ``placement`` under a preset."""
    return simulate(*under(problem, placement, preset), engine=engine).step_ns


def placeto(problem: Problem, placement: Placement) -> tuple[Problem, Placement]:
    """Each device gets a bus, a device of its own on which the sends of the device are ops."""
    graph, n_devices = problem.graph, problem.topology.n_devices
    home = placement.devices[graph.tensor_producer]
    readers = placement.devices[graph.consumers]
    leaves = np.zeros(graph.n_tensors, bool)
    leaves[graph.edge_tensor[readers != home[graph.edge_tensor]]] = True
    free = np.array([kind in FREE_KINDS for kind in graph.kinds])[graph.op_kind]
    builder = _copy_ops(graph)
    device, ns = placement.devices.tolist(), _durations(problem)
    gap = np.where(free, 0, PLACETO_GAP_NS).tolist()
    for tensor in range(graph.n_tensors):
        local = builder.tensor(int(graph.tensor_producer[tensor]), int(graph.tensor_bytes[tensor]))
        remote = local
        if leaves[tensor]:
            # The engine's two hops to and from the bus take 1 ns each.
            whole = -(-int(graph.tensor_bytes[tensor]) * 1000 // PLACETO_BYTES_PER_US)
            bus = builder.op(f"bus {tensor}", "bus", inputs=[local], outputs=[0])
            remote = builder.outputs(bus)[0]
            device.append(n_devices + int(home[tensor]))
            ns.append(max(1, whole - 2))
            gap.append(PLACETO_BUS_GAP_NS + min(2, max(0, whole - 1)))
        for edge in range(graph.consumer_ptr[tensor], graph.consumer_ptr[tensor + 1]):
            builder.connect(local if readers[edge] == home[tensor] else remote, int(graph.consumers[edge]))
    names = [one.name for one in problem.topology.devices]
    devices = [Device(name, one.kind) for name, one in zip(names, problem.topology.devices, strict=True)]
    devices += [Device(f"bus of {name}", one.kind) for name, one in zip(names, problem.topology.devices, strict=True)]
    topology = _hub("placeto", devices, Link(("", ""), 1 << 50, 0))
    built, order = _built(builder)
    pair = np.zeros((2 * n_devices, 2 * n_devices), np.int32)
    table = CostTable(
        np.array([ns], np.int64)[:, order], np.zeros(2 * n_devices, np.int32), np.ones((1, built.n_tensors), np.int64),
        pair, np.zeros(built.n_ops, np.int64), np.array(gap, np.int64)[order],
    )  # fmt: skip
    return Problem(built, topology, table, Rules(contention="none")), Placement(np.array(device, np.int32)[order])


def baechi(problem: Problem, placement: Placement) -> tuple[Problem, Placement]:
    """Each device hangs on one half-duplex link, which it holds at both ends of a transfer."""
    rate = round(1e9 / BAECHI_NS_PER_BYTE)
    topology = _hub("baechi", list(problem.topology.devices), Link(("", ""), rate, BAECHI_LATENCY_NS // 2, "half"))
    costs = problem.costs
    transfer_ns, pair_class = transfer_durations(problem.graph.tensor_bytes, topology)
    table = CostTable(costs.op_ns, costs.device_row, transfer_ns, pair_class, costs.dispatch_ns)
    return Problem(problem.graph, topology, table, Rules()), Placement(placement.devices)


def load(problem: Problem, placement: Placement) -> tuple[Problem, Placement]:
    """Every op and every crossing is an op without inputs on the device that bears it."""
    graph, topology = problem.graph, problem.topology
    builder = GraphBuilder(graph.name)
    device, ns = [], []
    for op in range(graph.n_ops):
        builder.op(str(op), "op")
        device.append(int(placement.devices[op]))
        ns.append(int(problem.costs.device_op_ns[device[op], op]))
    hosts = [number for number, one in enumerate(topology.devices) if one.host]
    crossing = _crossing_ns(problem, hosts)
    home = placement.devices[graph.tensor_producer]
    for tensor in range(graph.n_tensors):
        edges = slice(graph.consumer_ptr[tensor], graph.consumer_ptr[tensor + 1])
        there = set(placement.devices[graph.consumers[edges]].tolist()) - {int(home[tensor])}
        for bearer in sorted(there | {int(home[tensor])}) if there else ():
            if bearer not in hosts:
                builder.op(f"crossing {tensor} {bearer}", "crossing")
                device.append(bearer)
                ns.append(int(crossing[bearer, tensor]))
    built, order = _built(builder)
    n_devices = topology.n_devices
    table = CostTable(
        np.array([ns], np.int64)[:, order], np.zeros(n_devices, np.int32), np.zeros((0, 0), np.int64),
        np.full((n_devices, n_devices), -1, np.int32), np.zeros(built.n_ops, np.int64),
    )  # fmt: skip
    alone = Topology("load", topology.devices)
    return Problem(built, alone, table, Rules(contention="none")), Placement(np.array(device, np.int32)[order])


def ideal_links(problem: Problem, placement: Placement) -> tuple[Problem, Placement]:
    """No contention."""
    return Problem(problem.graph, problem.topology, problem.costs, Rules(contention="none")), Placement(
        placement.devices
    )


PRESETS: dict[str, Callable[[Problem, Placement], tuple[Problem, Placement]]] = {
    "placeto": placeto,
    "baechi": baechi,
    "load": load,
    "ideal-links": ideal_links,
}


def _durations(problem: Problem) -> list[int]:
    """The time of each op on the first accelerator, or where it has no kernel there, on the first device that has."""
    table = problem.costs.device_op_ns
    order = [*problem.topology.accelerators, *range(problem.topology.n_devices)]
    ns = table[order[0]].copy()
    for device in order[1:]:
        ns = np.where(ns < 0, table[device], ns)
    return ns.tolist()


def _crossing_ns(problem: Problem, hosts: list[int]) -> np.ndarray:
    """int64 ``(D, m)``: sending each tensor from a device to the host, or else over its dearest route."""
    costs, topology = problem.costs, problem.topology
    rows = []
    for device in range(topology.n_devices):
        targets = hosts[:1] or [other for other in range(topology.n_devices) if other != device]
        classes = {int(costs.pair_class[device, target]) for target in targets if target != device} - {-1}
        found = [costs.transfer_ns[number] for number in sorted(classes)]
        rows.append(np.max(found, axis=0) if found else np.ones(problem.graph.n_tensors, np.int64))
    return np.stack(rows)


def _copy_ops(graph: ComputationGraph) -> GraphBuilder:
    builder = GraphBuilder(graph.name)
    for op in range(graph.n_ops):
        builder.op(str(op), graph.kinds[graph.op_kind[op]])
    return builder


def _built(builder: GraphBuilder) -> tuple[ComputationGraph, np.ndarray]:
    """The graph, and int ``(n,)`` the handle of each of its ops: numbering anew may move them."""
    names = [record["name"] for record in builder._ops]
    graph = builder.build()
    handle = {name: number for number, name in enumerate(names)}
    return graph, np.array([handle[name] for name in graph.op_names])


def _hub(name: str, devices: list[Device], like: Link) -> Topology:
    """All devices around one switch, each on a link as ``like``."""
    if any(device.name == "hub" for device in devices):
        raise InvalidInput("a device is named 'hub'", source=name)
    links = tuple(Link((device.name, "hub"), like.bytes_per_s, like.latency_ns, like.duplex) for device in devices)
    return Topology(name, tuple(devices), links, ("hub",))
