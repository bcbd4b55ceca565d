"""Import the JSON inputs of DNN partitioning (Tarnawski et al., NeurIPS 2020; msr-fiddle/dnn-partitioning).

A node becomes an op, and a colour class becomes a colocation group. Latencies are in milliseconds. Those on an
accelerator are stored under ``device_kind``, those on a CPU core under ``cpu``; the published CPU latencies are 10 or
23 times the accelerator latency and were not measured. ``size`` is the whole memory of the node on an accelerator, and
the sizes of the nodes on a device add up. It becomes the persistent bytes of the op, so the outputs of the op need no
further memory on its device.

An edge has a cost and, in some files, bytes. The two disagree on backward edges of the training layer graphs, where
only the cost is right. The importer therefore computes the bytes of a tensor as its cost times the bytes per unit of
cost that most edges of the file agree on. This factor is 2^31 / 1000 in most files (2 GiB/s in ms). It is 1000 times
larger in the throughput layer graphs, apparently because their unit is wrong. ``meta["bytes_per_cost"]`` holds the
factor. ``fix_units`` multiplies the costs of those files by 1000. The bytes stay as they are, and the factor becomes
2^31 / 1000 as in the other files.
"""

from __future__ import annotations

from collections import Counter

from simdev.graphs.importers import Imported, importer, json_with
from simdev.graphs.importers.reading import Fields, json_object, name_of
from simdev.problem.graph import GraphBuilder

BYTES_PER_COST = 2**31 / 1000


@importer("dnn-partitioning", detects=json_with(b'"fpgaLatency"'))
def parse(data: bytes, path, *, format: str, device_kind: str, fix_units: bool = False) -> Imported:
    document = json_object(data, path)
    nodes, edges = document.rows("nodes"), document.rows("edges")
    limits = {key: document.number(key, None) for key in ("maxSizePerFPGA", "maxFPGAs", "maxCPUs")}
    unit = _bytes_per_cost(edges)
    bytes_per_cost = min(unit, BYTES_PER_COST) if fix_units else unit
    builder = GraphBuilder(
        name_of(path), meta={"source": "dnn-partitioning JSON", "bytes_per_cost": bytes_per_cost, "limits": limits}
    )
    names = Counter(node.text("name", "") for node in nodes)
    ops: dict[float, int] = {}  # by id
    accelerator, cpu = {}, {}
    for node in nodes:
        number = node.number("id")
        if number in ops:
            raise node.fail(f"{number!r} is given twice", "id")
        name = node.text("name", "") or f"node{number}"
        signature = name if names[name] == 1 else f"{name}#{number}"
        group = node.number("colorClass", None)
        ops[number] = builder.op(
            signature,
            "op" if node.flag("supportedOnFpga", True) else "cpu_only_op",
            signature=signature,
            persistent_bytes=node.bytes("size", 0),
            phase="backward" if node.flag("isBackwardNode") else "forward",
            group=None if group is None else ("colour", group),
        )
        accelerator[signature] = node.number("fpgaLatency") * 1e6
        cpu[signature] = node.number("cpuLatency") * 1e6
    tensors: dict[tuple[int, float], int] = {}
    for edge in edges:
        source, target = edge.end("sourceId", ops), edge.end("destId", ops)
        cost = edge.number("cost")
        if (source, cost) not in tensors:
            size = edge.check_bytes(cost * unit - 1e-6 if cost else 0, "cost")
            tensors[source, cost] = builder.tensor(source, size, persistent=True)
        builder.connect(tensors[source, cost], target)
    return Imported(builder.build(), {device_kind: accelerator, "cpu": cpu})


def _bytes_per_cost(edges: list[Fields]) -> float:
    """The bytes per unit of cost that most edges with both figures agree on."""
    votes: Counter[float] = Counter()
    for edge in edges:
        cost, size = edge.number("cost"), edge.number("size", None)
        if cost and size:
            for unit in (BYTES_PER_COST, 1000 * BYTES_PER_COST):
                votes[unit] += abs(size / cost / unit - 1) < 1e-3
    return max(votes, key=lambda unit: votes[unit]) if any(votes.values()) else BYTES_PER_COST
