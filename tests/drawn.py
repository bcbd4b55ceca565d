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
    return beside_kernels([("dp_shard", 0, collective_ns, 0.0)], [1, kernel_ns], copies == 1)


def beside_kernels(collectives, kernels, folded, sends=()):
    """Kernels of ``kernels`` ns one after another, and collectives ``(axis, kernel, ns, share of the adapter)``, each
    on the communicator of its axis and begun by the end of a kernel. Every axis has two ranks; ``folded`` simulates one
    rank. ``sends`` are ``(stage, ns, share)``, each from the end of the kernels of one of two stages to the other."""
    from simdev.parallel.costs.timing import Template
    from simdev.parallel.mesh import Mesh
    from simdev.parallel.unroll import Unroller

    axes = tuple(dict.fromkeys(axis for axis, *_ in collectives))
    items = [(1 + number, 0, ns, 0.0, -1) for number, ns in enumerate(kernels)]
    items += [(2 + after, 1 + axes.index(axis), ns, share, after) for axis, after, ns, share in collectives]
    items.sort(key=lambda item: (item[0], item[4] < 0))  # a collective is issued before the kernels that follow
    number_of = {place: n for n, place in enumerate([n for n, item in enumerate(items) if item[4] < 0])}
    kernel_at = {number: place for place, number in number_of.items()}
    waits = [(n, kernel_at[item[4]]) for n, item in enumerate(items) if item[4] >= 0]
    count = len(items)
    template = Template(
        ("compute", *axes),
        ((), *((axis,) for axis in axes)),
        np.array([item[1] for item in items], np.int32),
        np.array([item[2] for item in items]),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        np.zeros(count, np.int32),
        ("op",),
        np.ones(count, np.int32),
        np.array([item for item, _ in waits], np.int32),
        np.array([kernel for _, kernel in waits], np.int32),
        0,
        0,
        0,
        np.array([item[3] for item in items]),
    )
    unroller = Unroller([Mesh(dict.fromkeys(axes, 2))] * (2 if sends else 1), folded)
    for stage in range(2 if sends else 1):
        unroller.add(stage, ("F", stage, 0), template, [])
    for stage, ns, share in sends:
        unroller.send(stage, 1 - stage, ns, share)
    return unroller.build("beside kernels")


# The example of Moirai (Zhang et al. 2023): task: (readers, ms on three devices, bytes); (task, reader): ms between
# devices 0 and 1, 0 and 2, 1 and 2. Its virtual source and sink, which cost nothing, are left out.
TASKS = {
    1: ([5], (8, 9, 7), 5), 2: ([5], (7, 6, 8), 2), 5: ([11], (8, 5, 6), 4), 6: ([11], (5, 8, 6), 5),
    7: ([11], (5, 4, 3), 3), 11: ([14], (3, 3, 5), 4), 13: ([19], (6, 7, 8), 2), 14: ([19, 23], (1, 2, 4), 1),
    18: ([22], (7, 9, 6), 4), 19: ([22], (2, 5, 4), 6), 22: ([], (7, 5, 8), 5), 23: ([], (6, 7, 5), 3),
}  # fmt: skip
SENDS = {
    (1, 5): (3, 4, 2), (2, 5): (1, 3, 2), (5, 11): (2, 4, 2), (6, 11): (1, 3, 2), (7, 11): (2, 1, 1),
    (11, 14): (4, 3, 1), (13, 19): (4, 2, 3), (14, 19): (1, 2, 4), (14, 23): (3, 2, 3),
    (18, 22): (2, 2, 4), (19, 22): (1, 3, 2),
}  # fmt: skip


def moirai_example(rules=None):
    """Twelve tasks on three unequal devices whose memories they fill to the last byte. The optimum is 30.0 ms; a ms is
    1,000 ns here."""
    kinds = [DeviceKind(f"p{i}", bytes_, {"f32": 1e9}, 1e12, granularity=1) for i, bytes_ in enumerate((14, 14, 16))]
    links = tuple(Link((f"d{i}", "switch"), 10**9, 0) for i in range(3))  # one transfer leaves or enters at a time
    topology = Topology("moirai", tuple(Device(f"d{i}", kind) for i, kind in enumerate(kinds)), links, ("switch",))
    b, handle = GraphBuilder("moirai"), {}
    for task, (_, _, size) in TASKS.items():
        handle[task] = b.op(str(task), "op", persistent_bytes=size)
    for task, reader in SENDS:
        b.connect(b.tensor(handle[task], 0), handle[reader])
    graph = b.build()
    op_ns = np.array([[1000 * TASKS[int(name)][1][d] for name in graph.op_names] for d in range(3)])
    names = [int(name) for name in graph.op_names]
    sends = [
        SENDS[names[graph.tensor_producer[t]], names[graph.consumers[graph.consumer_ptr[t]]]]
        for t in range(graph.n_tensors)
    ]
    pair = np.array([[-1, 0, 1], [0, -1, 2], [1, 2, -1]])
    costs = CostTable(op_ns, np.arange(3), 1000 * np.array(sends).T, pair, np.zeros(graph.n_ops, np.int64))
    return Problem(graph, topology, costs, rules or Rules())
