"""Small problems that tests draw by hand: machines of equal devices, chains of ops, whole nanoseconds."""

import numpy as np

from simdev.problem.costs import CostTable, transfer_durations
from simdev.problem.graph import GraphBuilder
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Device, DeviceKind, Link, Topology


def machine(n_devices=2, *, memory=1000, slots=1, granularity=1, links=None, host=False):
    """``n_devices`` equal devices d0, d1 ...; by default each two joined by a 1 byte/ns link with 10 ns latency."""
    kind = DeviceKind("toy", memory, {"f32": 1e9}, 1e9, slots=slots, granularity=granularity)
    devices = tuple(Device(f"d{i}", kind, host and i == 0) for i in range(n_devices))
    if links is None:
        links = [(a, b) for a in range(n_devices) for b in range(a + 1, n_devices)]
    return Topology("toy", devices, tuple(Link((f"d{a}", f"d{b}"), 10**9, 10) for a, b in links))


def problem(builder, topology, durations, *, rules=None, dispatch=0):
    """A problem whose ops take ``durations`` ns on every device, and whose transfers cost 10 ns + 1 ns per byte."""
    graph = builder.build()
    transfer, pair = transfer_durations(graph.tensor_bytes, topology)
    costs = CostTable(
        np.array([durations]),
        np.zeros(topology.n_devices, np.int32),
        transfer,
        pair,
        np.full(graph.n_ops, dispatch, np.int64),
    )
    return Problem(graph, topology, costs, rules or Rules())


def chain(*sizes):
    """Ops o0 -> o1 -> ...; op i makes one tensor of ``sizes[i]`` bytes, which op i + 1 reads."""
    b, last = GraphBuilder("chain"), []
    for i, size in enumerate(sizes):
        last = b.outputs(b.op(f"o{i}", "op", inputs=last, outputs=[size]))
    return b
