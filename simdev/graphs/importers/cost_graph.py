"""Import TensorFlow's CostGraphDef in protobuf text form, as in ``RunMetadata`` and REGAL (Paliwal et al. 2020).

Source: tensorflow ``core/framework/cost_graph.proto``. A message of the file::

    node {
      name: "a" device: "/gpu:0" id: 0
      input_info { preceding_node: 1 preceding_port: 0 }
      output_info { size: 4096 alias_input_port: -1 shape { dim { size: 1024 } } dtype: DT_FLOAT }
      temporary_memory_size: 0 persistent_memory_size: 0 compute_cost: 12 control_input: 3
    }

``compute_cost`` is in microseconds, sizes are in bytes. A size that is missing or negative (unknown) counts as 0. An
output with ``alias_input_port`` of 0 or more shares the memory of that input and needs none of its own. All other
fields are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from simdev.errors import InvalidInput, quoted
from simdev.files import text_of
from simdev.graphs.importers import Imported, importer
from simdev.graphs.importers.reading import Fields, name_of
from simdev.problem.graph import GraphBuilder

_TOKEN = re.compile(
    r"""\s*(?:\#[^\n]*)?(?:([A-Za-z_][\w.]*)|(-?[\w.+-]+)|"((?:[^"\\\n]|\\.)*)"|'((?:[^'\\\n]|\\.)*)'|([:{}<>\[\],;]))"""
)
MAX_DEPTH = 32


def _detects(data: bytes, path: str) -> bool:
    return re.match(rb"(#[^\n]*\n\s*)*(node|cost_graph)\s*:?\s*[{<]", data[:65536].lstrip()) is not None


@importer("cost-graph", detects=_detects)
def parse(data: bytes, path, *, format: str, device_kind: str) -> Imported:
    nodes = [Fields(_flat(node), path, f"node {number}") for number, node in enumerate(read_nodes(data, path))]
    builder = GraphBuilder(name_of(path), meta={"source": "TensorFlow CostGraphDef"})
    handles, times = {}, {}
    for row in nodes:
        name, number = row.text("name"), _whole(row, "id", 0)
        if number in handles:
            raise row.fail(f"{number} is given twice", "id")
        signature = f"{name} ({number})"
        times[signature] = 1e3 * max(0.0, float(_whole(row, "compute_cost", 0)))
        sizes = [_output_bytes(row, output) for output in row.table.get("output_info", [])]
        handles[number] = builder.op(
            name,
            _kind_of(name),
            signature=signature,
            outputs=sizes,
            workspace_bytes=_size(row, "temporary_memory_size", "device_temp_memory_size"),
            persistent_bytes=_size(row, "persistent_memory_size", "device_persistent_memory_size"),
        )
    if not handles:
        raise InvalidInput("no node", source=path, field="node")
    for row in nodes:
        op = handles[_whole(row, "id", 0)]
        for number, entry in enumerate(row.table.get("input_info", [])):
            read = Fields(_flat(entry), path, f"{row.where}: input_info {number}")
            before, port = _known(read, "preceding_node", handles), _whole(read, "preceding_port", 0)
            outputs = builder.outputs(handles[before])
            if port < 0:
                builder.control(handles[before], op)
            elif port < len(outputs):
                builder.connect(outputs[port], op)
            else:
                raise read.fail(f"node {before} has no output {port}", "preceding_port")
        for before in row.table.get("control_input", []):
            builder.control(handles[_known(Fields({"x": before}, path, row.where), "x", handles)], op)
    return Imported(builder.build(), {device_kind: times})


REPEATED = ("input_info", "output_info", "control_input")


def _flat(message) -> object:
    """A message with the last value of each single field (protobuf's rule for merging) and lists of the repeated
    fields. A value that is no message is returned unchanged."""
    if not isinstance(message, dict):
        return message
    return {key: values if key in REPEATED else values[-1] for key, values in message.items()}


def _whole(row: Fields, key: str, default: int) -> int:
    value = row.table.get(key, default)
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
        value = int(value)
    if not isinstance(value, int):
        raise row.fail(f"{quoted(value)} is not a whole number", key)
    return value


def _known(row: Fields, key: str, handles: dict[int, int]) -> int:
    number = _whole(row, key, 0)
    if number not in handles:
        raise row.fail(f"{number} is not a node of the file (dangling edge)", None if key == "x" else key)
    return number


def _size(row: Fields, *keys: str) -> int:
    return row.check_bytes(sum(max(0, _whole(row, key, 0)) for key in keys), keys[0])


def _output_bytes(row: Fields, entry) -> int:
    read = Fields(_flat(entry), row.source, f"{row.where}: output_info")
    return 0 if _whole(read, "alias_input_port", -1) >= 0 else _size(read, "size")


def _kind_of(name: str) -> str:
    """The op type, guessed from the name because the file has no types: TensorFlow names a node by its type and a
    number."""
    return re.sub(r"_\d+$", "", name.rsplit("/", 1)[-1]).lower() or "op"


def read_nodes(data: bytes, path) -> list[dict[str, list]]:
    """The ``node`` messages of a text document, each a dictionary from field to the list of its values, in order."""
    tokens = _tokens(text_of(data, path), path)
    document = _message(tokens, path, depth=0)
    graph = document.get("cost_graph", [document])[0]
    nodes = graph.get("node", []) if isinstance(graph, dict) else []
    if not nodes or not all(isinstance(node, dict) for node in nodes):
        raise InvalidInput("no node { ... } message", source=path, field="node")
    return nodes


def _tokens(text: str, path) -> Iterator[tuple[str, str]]:
    """The tokens as ``(sort, text)``: words, numbers, strings and punctuation."""
    place, text = 0, re.sub(r"(?m)^[ \t]*#.*$", "", text).rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None or match.end() == place:
            line = text.count("\n", 0, place) + 1
            raise InvalidInput("not protobuf text", source=path, field=f"line {line}")
        place = match.end()
        word, number, double, single, mark = match.groups()
        if word is not None:
            yield "word", word
        elif number is not None:
            yield "number", number
        elif mark is not None:
            yield "mark", mark
        else:
            yield "string", double if double is not None else single


def _message(tokens: Iterator[tuple[str, str]], path, depth: int, close: str = "") -> dict[str, list]:
    if depth > MAX_DEPTH:
        raise InvalidInput(f"messages nested over {MAX_DEPTH} deep", source=path)
    fields: dict[str, list] = {}
    for sort, text in tokens:
        if sort == "mark" and text == close and close:
            return fields
        if sort == "mark" and text in ",;":
            continue
        if sort != "word":
            raise InvalidInput(f"expected a field, found {text!r}", source=path)
        fields.setdefault(text, []).extend(_values(tokens, path, depth, text))
    if close:
        raise InvalidInput(f"the text ends inside a message (no {close!r})", source=path)
    return fields


def _values(tokens, path, depth: int, name: str) -> list:
    sort, text = next(tokens, ("end", "the end"))
    if (sort, text) == ("mark", ":"):
        sort, text = next(tokens, ("end", "the end"))
    if sort == "mark" and text in "{<":
        return [_message(tokens, path, depth + 1, "}" if text == "{" else ">")]
    if (sort, text) == ("mark", "["):
        values: list = []
        for sort, text in tokens:
            if (sort, text) == ("mark", "]"):
                return values
            if sort != "mark":
                values.append(text)
            elif text != ",":
                break
    elif sort in ("word", "number", "string"):
        return [text]
    raise InvalidInput(f"field {name!r}: expected a value, found {text!r}", source=path)
