"""Import Baechi's profile of a TensorFlow graph (JSON): every node of the GraphDef with its measurements.

Source: the cost file of chiragcshetty/baechi_tf (Jeon et al. 2020), converted from a pickle to JSON. The document is
``{"nodes": [...]}``. A node has ``name``, ``op``, ``inputs`` (``node``, ``node:port``, or ``^node`` for a control
edge), ``colocate`` (``loc:@...``), ``compute_us``, ``output_bytes`` (one number for each port), ``temp_bytes`` and
``persistent_bytes``. The last four are null in nodes that never ran.

Nodes that never ran (initialisers, folded constants) are left out: their readers read their inputs instead. Nodes that
name the same ``loc:@`` are colocated.
"""

from __future__ import annotations

from simdev.errors import InvalidInput
from simdev.graphs.importers import Imported, importer, json_with
from simdev.graphs.importers.reading import Fields, json_object, name_of
from simdev.problem.graph import GraphBuilder


@importer("baechi", detects=json_with(b'"compute_us"'))
def parse(data: bytes, path, *, format: str, device_kind: str) -> Imported:
    nodes: dict[str, Fields] = {}
    for row in json_object(data, path).rows("nodes"):
        name = row.text("name")
        if name in nodes:
            raise row.fail(f"{name!r} is given twice", "name")
        nodes[name] = row
    builder = GraphBuilder(name_of(path), meta={"source": "Baechi profile of a TensorFlow graph"})
    handles, times = {}, {}
    for name, row in nodes.items():
        if row.table.get("compute_us") is None:
            continue
        kind = row.text("op")
        signature = f"{name}: {kind}"
        times[signature] = 1e3 * row.number("compute_us")
        places = sorted(str(place) for place in row.items("colocate", []))
        handles[name] = builder.op(
            name,
            kind,
            signature=signature,
            layer=name.rsplit("/", 1)[0],
            group=places[0] if places else None,
            outputs=[row.check_bytes(size, "output_bytes") for size in row.items("output_bytes", [])],
            workspace_bytes=row.bytes("temp_bytes", 0),
            persistent_bytes=row.bytes("persistent_bytes", 0),
        )
    if not handles:
        raise InvalidInput("no node has a compute_us", source=path, field="nodes")
    for name, op in handles.items():
        for before, port in _sources(name, nodes, handles):
            outputs = builder.outputs(handles[before])
            if 0 <= port < len(outputs):
                builder.connect(outputs[port], op)
            else:
                builder.control(handles[before], op)
    return Imported(builder.build(), {device_kind: times})


def _sources(name: str, nodes: dict[str, Fields], handles: dict[str, int]) -> list[tuple[str, int]]:
    """Each ``(node, port)`` that a node reads. Nodes that never ran are replaced by their inputs. Port -1 is
    control."""
    found, seen, waiting = [], {name}, _inputs(nodes[name])[::-1]
    while waiting:
        before, port, row = waiting.pop()
        if before not in nodes:
            raise row.fail(f"{before!r} is not a node of the file (dangling edge)", "inputs")
        if before in handles:
            found.append((before, port))
        elif before not in seen:
            seen.add(before)
            waiting += _inputs(nodes[before])[::-1]
    return found


def _inputs(row: Fields) -> list[tuple[str, int, Fields]]:
    found = []
    for text in row.items("inputs", []):
        if not isinstance(text, str):
            raise row.fail(f"expected text, got {text!r}", "inputs")
        name, _, port = text.removeprefix("^").partition(":")
        if port and not (port.isdecimal() and len(port) < 10):
            raise row.fail(f"{text!r} names no port", "inputs")
        found.append((name, -1 if text.startswith("^") else int(port or 0), row))
    return found
