"""Import ops and edges from JSON or CSV, for hand-written graphs and other languages, and export graphs to JSON.

JSON::

    {"format": "simdev-graph", "version": 1, "name": "mine", "meta": {},
     "ops": [
       {"name": "x", "kind": "input", "outputs": [4096]},
       {"name": "y", "kind": "mm", "flops": 8192, "outputs": [{"bytes": 1024, "result": true}], "inputs": ["x"],
        "ns": {"p100-pcie": 2500}}],
     "edges": [{"from": "x", "to": "y", "bytes": 16}]}

Only ``ops``, their ``name`` and ``kind`` are required. Each op may have ``flops``, ``bytes_read`` and ``bytes_written``
(default: the sums over inputs and outputs), ``persistent_bytes``, ``workspace_bytes``, ``phase`` (``forward``,
``backward``, ``update``), ``layer``, ``signature``, ``group`` (text or number: ops of one group share a device),
``outputs``, ``inputs`` and ``ns`` (measured nanoseconds by device kind). An output is a number of bytes, or an object
with ``bytes`` and the flags ``persistent`` and ``result`` of :class:`simdev.problem.graph.ComputationGraph`. An input
is the name or the number of an op (its output 0), or ``[op, output]``.

``edges`` are for graphs without numbered outputs. Each edge adds a tensor of ``bytes`` bytes (default 0: a dependency
without data) from one op to another. Edges with one source and the same ``bytes`` are one tensor with several readers,
unless their ``tensor`` labels differ.

A CSV file has a line for each op, and its columns have the same names. ``outputs`` and ``inputs`` are lists separated
by semicolons, and an input is written ``op:output``. A column ``ns:KIND`` holds measured nanoseconds::

    name,kind,flops,outputs,inputs,ns:p100-pcie
    x,input,0,4096,,
    y,mm,8192,1024,x:0,2500
"""

from __future__ import annotations

import csv
from collections.abc import Hashable

from simdev.errors import InvalidInput
from simdev.files import text_of
from simdev.graphs.importers import Imported, importer, is_json, json_with
from simdev.graphs.importers.reading import Fields, json_object, name_of
from simdev.problem.graph import PHASES, ComputationGraph, GraphBuilder

FORMAT, VERSION = "simdev-graph", 1
_SIZES = ("flops", "bytes_read", "bytes_written", "persistent_bytes", "workspace_bytes")
_KEYS = {"name", "kind", "phase", "layer", "signature", "group", "outputs", "inputs", "ns", *_SIZES}


def _is_csv(data: bytes, path: str) -> bool:
    first = data[:65536].lstrip().split(b"\n", 1)[0]
    return not is_json(data) and b"," in first and b"name" in first.replace(b'"', b"").split(b",")


@importer("csv", detects=_is_csv, general=True)
@importer("json", detects=json_with(b'"ops"'), general=True)
def parse(data: bytes, path, *, format: str, device_kind: str) -> Imported:
    if format == "csv":
        return build(Fields({"name": name_of(path), "ops": _csv_ops(text_of(data, path), path)}, path, ""), path)
    document = json_object(data, path)
    if document.text("format", FORMAT) != FORMAT or document.number("version", VERSION) != VERSION:
        raise document.fail(f"expected {FORMAT} version {VERSION}", "format, version")
    return build(document, path)


def build(document: Fields, path) -> Imported:
    """The graph of a JSON document in the format that this module describes."""
    builder = GraphBuilder(document.text("name", name_of(path)), meta=document.object("meta", {}).table)
    rows = document.rows("ops")
    numbers: dict[Hashable, int] = {}
    measured: dict[str, dict[str, float]] = {}
    for number, row in enumerate(rows):
        _op(builder, row)
        numbers.setdefault(row.table["name"], number)
        for kind, ns in _measured(row).items():
            measured.setdefault(kind, {})[_signature(row)] = ns
    for number, row in enumerate(rows):
        for position, item in enumerate(row.items("inputs", [])):
            source, output = item if isinstance(item, list) and len(item) == 2 else (item, 0)
            op = _find(source, numbers, len(rows), row, f"inputs: {position}")
            tensors = builder.outputs(op)
            if type(output) is not int or not 0 <= output < len(tensors):
                raise row.fail(f"op {source!r} has no output {output!r} (dangling edge)", f"inputs: {position}")
            builder.connect(tensors[output], number)
    shared: dict[tuple, int] = {}
    for edge in document.rows("edges", []):
        ends = [_find(edge.table.get(end), numbers, len(rows), edge, end) for end in ("from", "to")]
        key = ends[0], edge.bytes("bytes", 0), str(edge.table.get("tensor"))
        if key not in shared:
            shared[key] = builder.tensor(*key[:2])
        builder.connect(shared[key], ends[1])
    return Imported(builder.build(), measured or None)


def op_row(graph: ComputationGraph, op: int) -> dict:
    """One op as an object of the JSON format, with inputs given by number."""
    outputs = range(graph.output_ptr[op], graph.output_ptr[op + 1])
    inputs = graph.inputs[graph.input_ptr[op] : graph.input_ptr[op + 1]]
    sources = graph.tensor_producer[inputs]
    row = {
        "name": graph.op_names[op],
        "kind": graph.kinds[graph.op_kind[op]],
        "phase": PHASES[graph.op_phase[op]],
        "layer": graph.layers[graph.op_layer[op]],
        "signature": graph.signatures[graph.op_signature[op]],
        "group": None if graph.op_group[op] < 0 else int(graph.op_group[op]),
        **{key: int(getattr(graph, f"op_{key}")[op]) for key in _SIZES},
        "outputs": [_output_row(graph, tensor) for tensor in outputs],
        "inputs": [[int(s), int(t - graph.output_ptr[s])] for s, t in zip(sources, inputs, strict=True)],
    }
    return {key: value for key, value in row.items() if value is not None}


def _output_row(graph: ComputationGraph, tensor: int) -> int | dict:
    size = int(graph.tensor_bytes[tensor])
    flags = {key: True for key in ("persistent", "result") if getattr(graph, f"tensor_{key}")[tensor]}
    return {"bytes": size, **flags} if flags else size


def _op(builder: GraphBuilder, row: Fields) -> None:
    unknown = sorted(set(row.table) - _KEYS)
    if unknown:
        raise row.fail(f"unknown; an op has {', '.join(sorted(_KEYS))}", unknown[0])
    group = row.table.get("group")
    if not isinstance(group, (str, int, type(None))):
        raise row.fail("expected text or a number", "group")
    phase = row.text("phase", "forward")
    if phase not in PHASES:
        raise row.fail(f"{phase!r} is none of {', '.join(PHASES)}", "phase")
    flops = row.number("flops", 0)
    handle = builder.op(
        row.text("name"),
        row.text("kind"),
        flops=round(flops),
        phase=phase,
        layer=row.text("layer", ""),
        group=group,
        signature=_signature(row),
        bytes_read=row.bytes("bytes_read", None),
        bytes_written=row.bytes("bytes_written", None),
        persistent_bytes=row.bytes("persistent_bytes", 0),
        workspace_bytes=row.bytes("workspace_bytes", 0),
    )
    for position, output in enumerate(row.items("outputs", [])):
        if isinstance(output, dict):
            tensor = Fields(output, row.source, f"{row.where}: outputs: {position}")
            flags = {key: tensor.flag(key) for key in ("persistent", "result")}
            builder.tensor(handle, tensor.bytes("bytes"), **flags)
        else:
            builder.tensor(handle, row.check_bytes(output, f"outputs: {position}"))


def _signature(row: Fields) -> str:
    """The signature in the file. Without one, an op with a measured time has a signature of its own, and all other ops
    of a kind share one."""
    return row.text(
        "signature", f"{row.table['kind']}:{row.table['name']}" if row.table.get("ns") else row.text("kind")
    )


def _measured(row: Fields) -> dict[str, float]:
    times = row.object("ns", {})
    return {kind: times.number(kind) for kind in times.table}


def _find(source: object, numbers: dict[Hashable, int], count: int, row: Fields, where: str) -> int:
    if isinstance(source, str) and source in numbers:
        return numbers[source]
    if type(source) is int and 0 <= source < count:
        return source
    raise row.fail(f"{source!r} is not an op of the file (dangling edge)", where)


def _csv_ops(text: str, path) -> list[dict]:
    try:
        reader = csv.DictReader(text.splitlines(), strict=True)
        missing = {"name", "kind"} - set(reader.fieldnames or ())
        if missing:
            raise InvalidInput(f"column {min(missing)!r} is missing", source=path, field="line 1")
        return [_csv_op(row, path, f"line {reader.line_num}") for row in reader]
    except csv.Error as error:
        raise InvalidInput(f"not CSV ({error})", source=path) from None


def _csv_op(row: dict, path, where: str) -> dict:
    if None in row or None in row.values():
        raise InvalidInput("wrong number of columns", source=path, field=where)
    op: dict = {"ns": {}}
    for key, value in row.items():
        try:
            if key.startswith("ns:"):
                op["ns"] |= {key[3:]: float(value)} if value else {}
            elif key == "outputs":
                op[key] = [float(item) for item in value.split(";") if item.strip()]
            elif key == "inputs":
                op[key] = [_csv_input(item.strip()) for item in value.split(";") if item.strip()]
            elif value or key in ("name", "kind"):
                op[key] = float(value) if key in _SIZES else value
        except ValueError:
            raise InvalidInput(f"{value!r} is not a number", source=path, field=f"{where}: {key}") from None
    return op


def _csv_input(item: str) -> list:
    name, colon, output = item.rpartition(":")
    return [name, int(output)] if colon and output.isdecimal() and len(output) < 10 else [item, 0]
