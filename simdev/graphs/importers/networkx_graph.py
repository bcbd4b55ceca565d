"""Convert a ``networkx.DiGraph`` or its node-link JSON to a computation graph, and a computation graph to a
``DiGraph``.

A node is an op. Its attributes are the fields of an op in :mod:`simdev.graphs.importers.plain`: ``flops``, ``outputs``,
``group`` and so on; ``kind`` defaults to ``op``, and ``name`` to the node itself. An edge is a dependency. It has
either ``outputs``, a list of positions in the ``outputs`` of its source, or ``bytes`` (default 0: a dependency without
data). Edges of one source with the same ``bytes`` (and the same ``tensor`` label, if any) are one tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simdev.errors import InvalidInput
from simdev.graphs.importers import Imported, importer, is_json
from simdev.graphs.importers.plain import build, op_row
from simdev.graphs.importers.reading import Fields, json_object, name_of
from simdev.problem.graph import ComputationGraph

if TYPE_CHECKING:
    import networkx


def _detects(data: bytes, path: str) -> bool:
    return is_json(data) and (b'"directed"' in data or b'"links"' in data)


@importer("networkx", detects=_detects, general=True)
def parse(data: bytes, path, *, format: str, device_kind: str) -> Imported:
    document = json_object(data, path)
    if not document.flag("directed", True):
        raise document.fail("an undirected graph has no order of execution", "directed")
    nodes = [(row.table.get("id"), row.table) for row in document.rows("nodes")]
    key = "links" if "links" in document.table else "edges"
    edges = [(row.table.get("source"), row.table.get("target"), row.table) for row in document.rows(key)]
    attributes = document.object("graph", {}).table
    return _import(str(attributes.get("name") or name_of(path)), nodes, edges, path)


def from_networkx(graph: networkx.DiGraph, name: str | None = None) -> Imported:
    """The computation graph of a ``DiGraph`` or ``MultiDiGraph`` with the attributes that this module describes."""
    title = str(name or graph.name or "graph")
    if not graph.is_directed():
        raise InvalidInput("an undirected graph has no order of execution", source=title)
    return _import(title, list(graph.nodes(data=True)), list(graph.edges(data=True)), title)


def to_networkx(graph: ComputationGraph) -> networkx.DiGraph:
    """A ``DiGraph`` whose nodes are op numbers. :func:`from_networkx` makes a graph with the same fingerprint from
    it."""
    import networkx

    result = networkx.DiGraph(name=graph.name)
    for op in range(graph.n_ops):
        row = op_row(graph, op)
        inputs = row.pop("inputs")
        result.add_node(op, **row)
        for source, output in inputs:
            if result.has_edge(source, op):
                result.edges[source, op]["outputs"].append(output)
            else:
                result.add_edge(source, op, outputs=[output])
    return result


def _import(name: str, nodes: list, edges: list, source) -> Imported:
    ops, index = [], {}
    for number, (node, attributes) in enumerate(nodes):
        try:
            index[node] = number
        except TypeError:
            raise InvalidInput(f"{node!r} cannot name a node", source=source, field=f"node {number}") from None
        ops.append(
            {"kind": "op", "name": str(node), **{k: v for k, v in attributes.items() if k != "id"}, "inputs": []}
        )
    if len(index) < len(ops):
        raise InvalidInput("two nodes have one id", source=source, field="nodes")
    plain_edges = []
    for number, (before, after, attributes) in enumerate(edges):
        row = Fields(attributes, source, f"edge {number}")
        for end in (before, after):
            if not isinstance(end, (str, int, float, tuple)) or end not in index:
                raise row.fail(f"{end!r} is not a node (dangling edge)")
        if "outputs" in attributes:
            ops[index[after]]["inputs"] += [[index[before], output] for output in row.items("outputs")]
        else:
            plain = {key: attributes[key] for key in ("bytes", "tensor") if key in attributes}
            plain_edges.append({"from": index[before], "to": index[after], **plain})
    return build(Fields({"name": name, "ops": ops, "edges": plain_edges}, source, ""), source)
