"""Inputs of the DNN partitioning algorithms of Tarnawski et al., NeurIPS 2020 (msr-fiddle/dnn-partitioning), JSON.

A node becomes an op, a colour class a colocation group. Latencies are milliseconds, on an accelerator (filed under
``device_kind``) and on a CPU core (filed under ``cpu``; in the published files 10 or 23 times the accelerator, not a
measurement). ``size`` is all the memory that the node takes on an accelerator, added up over the nodes of a device: it
becomes the op's persistent bytes, and its outputs take no further memory at home.

Edges carry a cost and, where the authors give it, the bytes; the two disagree on backward edges of the training layer
graphs, where only the cost is right. The bytes of a tensor are therefore its cost times the bytes for one unit of cost
that most edges of the file agree on: 2^31 / 1000 in most files (2 GiB/s in ms), 1000 times more in the throughput layer
graphs, which looks like a slip of unit. ``meta["bytes_per_cost"]`` says which; ``fix_units`` takes those files' costs a
thousandfold, which leaves the bytes and makes them 2^31 / 1000 for a unit of cost, as in the other files.
"""

from __future__ import annotations

from collections import Counter

from simdev.graphs.importers import Imported
from simdev.graphs.importers.reading import Fields, json_object, name_of
from simdev.problem.graph import GraphBuilder

BYTES_PER_COST = 2**31 / 1000


def parse(data: bytes, path, *, format: str, device_kind: str, fix_units: bool = False) -> Imported:
    document = json_object(data, path)
    nodes, edges = document.rows("nodes"), document.rows("edges")
    limits = {key: document.number(key, None) for key in ("maxSizePerFPGA", "maxFPGAs", "maxCPUs")}
    unit = _bytes_per_cost(edges)
    told = min(unit, BYTES_PER_COST) if fix_units else unit
    builder = GraphBuilder(
        name_of(path), meta={"source": "dnn-partitioning JSON", "bytes_per_cost": told, "limits": limits}
    )
    names = Counter(node.text("name", "") for node in nodes)
    ops: dict[int, int] = {}
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
        source, target = (ops.get(edge.number(end)) for end in ("sourceId", "destId"))
        for end, op in (("sourceId", source), ("destId", target)):
            if op is None:
                raise edge.fail(f"{edge.table[end]!r} is not the id of a node (dangling edge)", end)
        cost = edge.number("cost")
        if (source, cost) not in tensors:
            size = edge.check_bytes(cost * unit - 1e-6 if cost else 0, "cost")
            tensors[source, cost] = builder.tensor(source, size, persistent=True)
        builder.connect(tensors[source, cost], target)
    return Imported(builder.build(), {device_kind: accelerator, "cpu": cpu})


def _bytes_per_cost(edges: list[Fields]) -> float:
    """What most edges that give both a cost and bytes agree on."""
    votes = Counter()
    for edge in edges:
        cost, size = edge.number("cost"), edge.number("size", None)
        if cost and size:
            for unit in (BYTES_PER_COST, 1000 * BYTES_PER_COST):
                votes[unit] += abs(size / cost / unit - 1) < 1e-3
    return max(votes, key=votes.get) if any(votes.values()) else BYTES_PER_COST
