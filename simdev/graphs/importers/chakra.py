"""Import Chakra execution traces (MLCommons, ``schema/protobuf/et_def.proto``): ``.et`` files, or the jsonizer's
output.

An ``.et`` file is a sequence of protobuf messages, each preceded by its length. The first message is the metadata of
the file, every other message is a node. A node is a piece of work (``COMP_NODE``), a transfer or a collective
(``COMM_*``), or memory traffic (``MEM_*``). Its field ``data_deps`` names the nodes that it depends on, and
``duration_micros`` is its measured time. Nodes with the attribute ``is_cpu_op`` ran on the host, and their times are
stored under the device kind ``host``. If no node has ``data_deps``, the importer uses ``ctrl_deps``. The bytes of a
dependency are known only if the node gives the shapes and types of its outputs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from simdev.errors import InvalidInput, quoted
from simdev.files import text_of
from simdev.graphs.importers import Imported, importer, is_json
from simdev.graphs.importers.reading import name_of, varint, whole_number
from simdev.problem.graph import MAX_BYTES, MAX_OPS, GraphBuilder

TYPES = (
    "INVALID_NODE",
    "METADATA_NODE",
    "MEM_LOAD_NODE",
    "MEM_STORE_NODE",
    "COMP_NODE",
    "COMM_SEND_NODE",
    "COMM_RECV_NODE",
    "COMM_COLL_NODE",
)
KINDS = {"MEM_LOAD_NODE": "load", "MEM_STORE_NODE": "store", "COMM_SEND_NODE": "send", "COMM_RECV_NODE": "recv"}
COLLECTIVES = (
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "broadcast",
    "all_to_all",
    "reduce_scatter",
    "reduce_scatter_block",
    "barrier",
)
NO_WORK = ("INVALID_NODE", "METADATA_NODE")
ITEM_BYTES = {"float": 4, "double": 8, "half": 2, "c10::half": 2, "bfloat16": 2, "c10::bfloat16": 2, "int": 4,
              "long": 8, "long int": 8, "bool": 1, "unsigned char": 1, "signed char": 1}  # fmt: skip
SCALARS = (3, 5, 7, 9, 11, 13, 15, 17, 27)  # fields of an attribute that hold one number


@dataclass
class ChakraNode:
    """One node. ``control`` and ``data`` are the ids of its dependencies; ``outputs`` holds two texts, the shapes and
    the types of its outputs."""

    id: int = 0
    name: str = ""
    type: str = "INVALID_NODE"
    control: list[int] = field(default_factory=list)
    data: list[int] = field(default_factory=list)
    micros: int = 0
    outputs: tuple[str, str] = ("", "")
    attributes: dict[str, object] = field(default_factory=dict)


def _detects(data: bytes, path: str) -> bool:
    return path.endswith(".et") or (is_json(data) and b'_NODE"' in data[:65536])


@importer("chakra", detects=_detects)
def parse(data: bytes, path, *, format: str, device_kind: str) -> Imported:
    nodes = _from_json(data, path) if data.lstrip()[:1] in (b"{", b"[") else _from_protobuf(data, path)
    work = [node for node in nodes if node.type not in NO_WORK]
    if not work:
        raise InvalidInput("no node that does work", source=path)
    by_data = any(node.data for node in work)
    known = {node.id for node in nodes}
    builder = GraphBuilder(name_of(path), meta={"source": "Chakra execution trace"})
    times: dict[str, dict[str, float]] = {device_kind: {}}
    handles: dict[int, int] = {}
    for node in work:
        if node.id in handles:
            raise InvalidInput(f"{node.id} is given twice", source=path, field="id")
        kind = _kind(node)
        signature = f"{kind}:{node.name} ({node.id})"
        handles[node.id] = builder.op(f"{node.id} {node.name}", kind, signature=signature, outputs=_output_bytes(node))
        place = "host" if node.attributes.get("is_cpu_op") else device_kind
        times.setdefault(place, {})[signature] = 1e3 * node.micros
    for node in work:
        for before in dict.fromkeys(node.data if by_data else node.control):
            if before not in known:
                raise InvalidInput(f"needs {before}, which is no node", source=path, field=f"node {node.id}")
            if before in handles and before != node.id:
                _join(builder, handles[before], handles[node.id])
    return Imported(builder.build(), times)


def _join(builder: GraphBuilder, before: int, after: int) -> None:
    tensors = builder.outputs(before)
    for tensor in tensors:
        builder.connect(tensor, after)
    if not tensors:
        builder.control(before, after)


def _kind(node: ChakraNode) -> str:
    if node.type == "COMM_COLL_NODE":
        number = node.attributes.get("comm_type", -1)
        return COLLECTIVES[number] if isinstance(number, int) and 0 <= number < len(COLLECTIVES) else "collective"
    return KINDS.get(node.type) or node.name.removeprefix("aten::") or "node"


def _output_bytes(node: ChakraNode) -> list[int]:
    """The sizes of the outputs whose shape and type are known."""
    try:
        shapes, types = (json.loads(text.replace("'", '"')) if text else [] for text in node.outputs)
        sizes = []
        for shape, kind in zip(shapes, types, strict=False):
            item = ITEM_BYTES.get(str(kind).removeprefix("Tensor(").removesuffix(")").lower())
            if item and isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape):
                sizes.append(_product(item, shape))
        return sizes
    except (ValueError, TypeError, RecursionError):
        return []


def _product(size: int, shape: list[int]) -> int:
    """The product of ``size`` and all numbers of ``shape``, at most :data:`MAX_BYTES`."""
    for extent in [0] if 0 in shape else shape:
        size = min(size * extent, MAX_BYTES)
    return size


# Protobuf -------------------------------------------------------------------------------------------------------------


def _from_protobuf(data: bytes, path) -> list[ChakraNode]:
    nodes, at, first = [], 0, True
    try:
        while at < len(data):
            length, at = varint(data, at)
            if at + length > len(data):
                raise ValueError("the file ends inside a node")
            if not first:  # the first message is the file's metadata
                nodes.append(_node(data[at : at + length]))
            if len(nodes) > MAX_OPS:
                raise ValueError(f"more than {MAX_OPS} nodes")
            at, first = at + length, False
    except (ValueError, IndexError) as error:
        where = f"message {len(nodes) + 1}"
        raise InvalidInput(f"not a Chakra trace ({error})", source=path, field=where) from None
    return nodes


def _node(message: bytes) -> ChakraNode:
    node = ChakraNode()
    for number, value in _fields(message):
        if number == 1:
            node.id = _whole(value)
        elif number == 2:
            node.name = _text(value)
        elif number == 3:
            node.type = TYPES[_whole(value)] if _whole(value) < len(TYPES) else "INVALID_NODE"
        elif number == 4:
            node.control += _wholes(value)
        elif number == 5:
            node.data += _wholes(value)
        elif number == 7:
            node.micros = _whole(value)
        elif number == 9:
            parts = dict(_fields(_message(value)))
            node.outputs = (_text(parts.get(2, b"")), _text(parts.get(3, b"")))
        elif number == 10:
            parts = dict(_fields(_message(value)))
            numbers = [parts[place] for place in SCALARS if place in parts]
            node.attributes[_text(parts.get(1, b""))] = numbers[0] if numbers else _text(parts.get(29, b""))
    return node


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """``(field number, value)``: an int for numbers, bytes for the rest."""
    value: int | bytes
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = varint(message, at)
        elif wire in (1, 5):
            width = 8 if wire == 1 else 4
            value, at = message[at : at + width], at + width
        elif wire == 2:
            length, at = varint(message, at)
            value, at = message[at : at + length], at + length
        else:
            raise ValueError(f"wire type {wire}")
        if at > len(message):
            raise ValueError("a field ends early")
        yield number, value


def _whole(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("bytes where a number belongs")
    return value


def _wholes(value: int | bytes) -> list[int]:
    """A repeated number, packed or not."""
    if isinstance(value, int):
        return [value]
    numbers, at = [], 0
    while at < len(value):
        number, at = varint(value, at)
        numbers.append(number)
    return numbers


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where a message belongs")
    return value


def _text(value: int | bytes) -> str:
    return _message(value).decode("utf-8", errors="replace")


# JSON -----------------------------------------------------------------------------------------------------------------


def _from_json(data: bytes, path) -> list[ChakraNode]:
    """Read a sequence of objects in the JSON form of protobuf, in which integers of 64 bits are text."""
    text, at, decoder, nodes = text_of(data, path), 0, json.JSONDecoder(), []
    try:
        while at < len(text):
            table, at = decoder.raw_decode(text, at)
            rows = table if isinstance(table, list) else table.get("nodes", [table]) if isinstance(table, dict) else []
            nodes += [_json_node(row) for row in rows if isinstance(row, dict) and "type" in row]
            while at < len(text) and text[at] in " \t\r\n,":
                at += 1
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(f"not a Chakra trace ({error})", source=path, field=f"node {len(nodes)}") from None
    return nodes


def _json_node(row: dict) -> ChakraNode:
    outputs = row.get("outputs") or {}
    attributes = {}
    for entry in row.get("attr", []):
        values = [value for key, value in entry.items() if key.endswith(("Val", "_val"))]
        value = values[0] if values else None
        if isinstance(value, str) and value.isdecimal() and len(value) < 20:
            value = int(value)
        attributes[str(entry.get("name", ""))] = value
    return ChakraNode(
        id=_json_number(row.get("id", 0)),
        name=str(row.get("name", "")),
        type=str(row["type"]),
        control=[_json_number(one) for one in row.get("ctrlDeps", row.get("ctrl_deps", []))],
        data=[_json_number(one) for one in row.get("dataDeps", row.get("data_deps", []))],
        micros=max(0, _json_number(row.get("durationMicros", row.get("duration_micros", 0)))),
        outputs=(str(outputs.get("shapes", "")), str(outputs.get("types", ""))),
        attributes=attributes,
    )


def _json_number(value: object) -> int:
    """An integer of 64 bits, given as a number or as text."""
    number = whole_number(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not -(2**63) <= number < 2**63:
        raise ValueError(f"{quoted(value)} is not a number of 64 bits")
    return int(number)
