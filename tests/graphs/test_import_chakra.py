"""Chakra execution traces become graphs with measured costs."""

import json

import pytest

from simdev.errors import InvalidInput
from simdev.graphs.importers import import_graph


def varint(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def number(place, value):
    return varint(place << 3) + varint(value)


def text(place, value):
    value = value.encode() if isinstance(value, str) else value
    return varint(place << 3 | 2) + varint(len(value)) + value


def node(id, name, type, data=(), control=(), micros=0, shapes="", types="", cpu=False, comm=None, packed=True):
    message = number(1, id) + text(2, name) + number(3, type) + number(7, micros)
    for place, deps in ((4, control), (5, data)):
        message += text(place, b"".join(map(varint, deps))) if packed else b"".join(number(place, d) for d in deps)
    message += text(9, text(2, shapes) + text(3, types))
    message += text(10, text(1, "is_cpu_op") + number(27, int(cpu)))
    if comm is not None:
        message += text(10, text(1, "comm_type") + number(9, comm))
    return message


def write(path, *messages):
    path.write_bytes(b"".join(varint(len(m)) + m for m in (text(1, "0.0.4"), *messages)))
    return path


STEP = (
    dict(id=0, name="## process_group:init ##", type=1),
    dict(
        id=300, name="aten::mm", type=4, micros=40, shapes="[[8, 300]]", types="['Tensor(float)']", cpu=True, data=[0]
    ),
    dict(id=301, name="volta_sgemm", type=4, micros=700, data=[300]),
    dict(id=302, name="ncclKernel", type=7, micros=90, data=[301, 300], comm=0),
)


@pytest.mark.parametrize("packed", [True, False])
def test_nodes_become_ops_with_times(tmp_path, packed):
    found = import_graph(write(tmp_path / "step.et", *(node(**row, packed=packed) for row in STEP)), device_kind="v100")
    graph = found.graph
    assert graph.op_names == ("300 aten::mm", "301 volta_sgemm", "302 ncclKernel")
    assert [graph.kinds[k] for k in graph.op_kind] == ["mm", "volta_sgemm", "all_reduce"]
    assert found.measured["host"] == {"mm:aten::mm (300)": 40_000}
    assert list(found.measured["v100"].values()) == [700_000, 90_000]
    assert graph.tensor_bytes.tolist().count(8 * 300 * 4) == 1
    assert sorted(zip(graph.edge_source.tolist(), graph.consumers.tolist(), strict=True)) == [(0, 1), (0, 2), (1, 2)]


def test_the_jsonizers_text_is_the_same_graph(tmp_path):
    names = {1: "METADATA_NODE", 4: "COMP_NODE", 7: "COMM_COLL_NODE"}
    parts = [json.dumps({"version": "0.0.4"})]
    for row in STEP:
        attributes = [{"name": "is_cpu_op", "boolVal": row.get("cpu", False)}]
        attributes += [{"name": "comm_type", "int64Val": str(row["comm"])}] if "comm" in row else []
        table = {"name": row["name"], "type": names[row["type"]], "attr": attributes}
        table |= {"id": str(row["id"])} if row["id"] else {}  # zero is left out
        table |= {"dataDeps": [str(d) for d in row.get("data", ())], "durationMicros": str(row.get("micros", 0))}
        table["outputs"] = {"shapes": row.get("shapes", ""), "types": row.get("types", "")}
        parts.append(json.dumps(table, indent=1))
    path = tmp_path / "step.json"
    path.write_text("\n".join(parts))
    binary = import_graph(write(tmp_path / "step.et", *(node(**row) for row in STEP)))
    found = import_graph(path)
    assert found.graph.fingerprint == binary.graph.fingerprint and found.measured == binary.measured


def test_order_is_in_control_dependencies_where_there_are_no_others(tmp_path):
    rows = [node(1, "a", 4), node(2, "b", 5, control=[1]), node(3, "c", 6, control=[2])]
    graph = import_graph(write(tmp_path / "t.et", *rows)).graph
    assert [graph.kinds[k] for k in graph.op_kind] == ["a", "send", "recv"] and graph.n_ops == 3


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda data: data[:-3], "ends inside a node"),
        (lambda data: b"\xff" * 20, "not a Chakra trace"),
        (lambda data: data[:8], "no node that does work"),
    ],
)
def test_damage_is_told(tmp_path, change, message):
    path = write(tmp_path / "t.et", node(1, "a", 4))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InvalidInput, match=message):
        import_graph(path)


def test_ids_given_twice_and_unknown_ones_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match="1 is given twice"):
        import_graph(write(tmp_path / "t.et", node(1, "a", 4), node(1, "b", 4)))
    with pytest.raises(InvalidInput, match="needs 9"):
        import_graph(write(tmp_path / "t.et", node(1, "a", 4, data=[9])))
    (tmp_path / "t.json").write_text('{"type": "COMP_NODE", "id": "x"}')
    with pytest.raises(InvalidInput, match="not a Chakra trace"):
        import_graph(tmp_path / "t.json")
