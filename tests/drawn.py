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


def two_streams(kernel_ns, collective_ns, copies):
    """A kernel of 1 ns, then a kernel and a collective over both ranks side by side, on ``copies`` ranks: a step as
    :mod:`simdev.parallel.unroll` makes it."""
    from simdev.parallel.mesh import Mesh
    from simdev.parallel.timing import Template
    from simdev.parallel.unroll import Unroller

    template = Template(
        ("compute", "dp_shard"),
        ((), ("dp_shard",)),
        np.array([0, 1, 0], np.int32),
        np.array([1, collective_ns, kernel_ns]),
        np.zeros(3, np.int64),
        np.zeros(3, np.int64),
        np.zeros(3, np.int32),
        ("op",),
        np.ones(3, np.int32),
        np.array([1], np.int32),
        np.array([0], np.int32),
        0,
        0,
        0,
    )
    unroller = Unroller(Mesh({"dp_shard": 2}), 1, copies)
    unroller.add(0, ("F", 0, 0), template, [])
    return unroller.build("two streams")
