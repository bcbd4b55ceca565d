"""Import execution traces of PyTorch (``ExecutionTraceObserver``, JSON), the input of Chakra's converters.

A node of the trace is an op that ran, and it names the op that called it. An operator (``aten::mm``, ``c10d::...``)
becomes an op of the graph if all operators that it calls only make views. A tensor of the trace is ``[tensor id,
storage id, offset, elements, bytes each, device]``. An op reads the tensors that were last written to the storages of
its inputs. Views share a storage, so a view is not a tensor of the graph. If a storage is read before it is written, an
``input`` op makes its tensor. The trace has no times.
"""

from __future__ import annotations

from simdev.errors import InvalidInput
from simdev.graphs.importers import Imported, importer, json_with
from simdev.graphs.importers.reading import Fields, json_object, name_of
from simdev.problem.graph import GraphBuilder

SHORT = {
    "float": "f32",
    "double": "f64",
    "c10::half": "f16",
    "c10::bfloat16": "bf16",
    "int": "i32",
    "long int": "i64",
    "bool": "b8",
    "unsigned char": "u8",
    "signed char": "i8",
}
NO_WORK = frozenset(
    "view as_strided _reshape_alias t transpose permute detach detach_ alias expand slice select unsqueeze squeeze "
    "narrow flatten reshape lift_fresh empty empty_strided empty_like set_ record_stream resolve_conj resolve_neg "
    "is_pinned".split()
)


@importer("execution-trace", detects=json_with(b'"schema"', b'"nodes"', within=65536))
def parse(data: bytes, path, *, format: str, device_kind: str) -> Imported:
    document = json_object(data, path)
    document.text("schema")
    nodes = document.rows("nodes")
    ops = _working(nodes)
    builder = GraphBuilder(name_of(path), meta={"source": "execution trace", "schema": document.table["schema"]})
    writer: dict[int, int] = {}  # by storage: the handle of the tensor last written to it
    for node in sorted(nodes, key=_number):
        kind = node.text("name").removeprefix("aten::")
        inputs, outputs = _tensors(node, "inputs"), _tensors(node, "outputs")
        if _number(node) not in ops or not (inputs or outputs):
            continue
        reads = [_source(builder, writer, one) for one in inputs]
        fresh = {one[1]: one for one in outputs}
        op = builder.op(
            f"{_number(node)} {kind}",
            kind,
            inputs=dict.fromkeys(reads),
            signature=_signature(kind, inputs, outputs),
            phase="backward" if "backward" in kind.lower() else "forward",
        )
        for storage, one in fresh.items():
            writer[storage] = builder.tensor(op, one[3] * one[4])
    if not builder._ops:
        raise InvalidInput("no op with tensors in it", source=path)
    return Imported(builder.build())


def _working(nodes: list[Fields]) -> set[int]:
    """The numbers of the operators that do work and that call no other operator that does work."""
    parent = {_number(node): _caller(node) for node in nodes}
    names = {_number(node): node.text("name") for node in nodes}
    operators = {
        number
        for number, name in names.items()
        if ("::" in name and "autograd" not in name and name.removeprefix("aten::") not in NO_WORK)
    }
    callers = set()
    for number in operators:
        above, steps = parent[number], 0
        while above in parent and above not in callers and steps < len(parent):
            callers.add(above)
            above, steps = parent[above], steps + 1
    return operators - callers


def _number(node: Fields) -> int:
    value = node.table.get("id")
    if type(value) is not int:
        raise node.fail("expected a whole number", "id")
    return value


def _caller(node: Fields) -> int | None:
    """The number of the node that called this one, or ``None`` for an outermost node."""
    key = "ctrl_deps" if "ctrl_deps" in node.table else "parent"
    value = node.table.get(key)
    if value is not None and type(value) is not int:
        raise node.fail("expected a whole number", key)
    return value


def _tensors(node: Fields, key: str) -> list[tuple]:
    """``(tensor id, storage id, offset, elements, bytes each, type)`` of each tensor, including tensors in lists."""
    section = node.table.get(key, [])
    values, types = (
        (section.get("values", []), section.get("types", []))
        if isinstance(section, dict)
        else (section, node.table.get(f"{key[:-1]}_types", []))
    )
    if not isinstance(values, list) or not isinstance(types, list):
        raise node.fail("expected lists", key)
    found = []
    for place, value in enumerate(values):
        kind = str(types[place]) if place < len(types) else ""
        if kind.startswith("Tensor("):
            found += _tensor(value, kind[7:-1])
        elif kind.startswith("GenericList[Tensor") and isinstance(value, list):
            inner = kind[len("GenericList[") : -1].split(",")
            for one, text in zip(value, inner, strict=False):
                found += _tensor(one, text[7:-1])
    return found


def _tensor(value: object, dtype: str) -> list[tuple]:
    if not isinstance(value, list) or len(value) < 5 or any(type(part) is not int for part in value[:5]):
        return []
    if value[1] < 0 or value[3] < 0 or value[4] < 0:
        return []
    return [(*value[:5], SHORT.get(dtype.lower(), dtype))]


def _source(builder: GraphBuilder, writer: dict[int, int], one: tuple) -> int:
    if one[1] not in writer:
        op = builder.op(f"storage {one[1]}", "input")
        writer[one[1]] = builder.tensor(op, one[3] * one[4])
    return writer[one[1]]


def _signature(kind: str, inputs: list[tuple], outputs: list[tuple]) -> str:
    """The signature in the form of captured graphs. The number of elements stands for the shape, because not every
    version of the trace holds shapes."""
    sides = (",".join(f"{one[5]}[{one[3]}]" for one in side) for side in (inputs, outputs))
    return "{}({})->{}".format(kind, *sides)
