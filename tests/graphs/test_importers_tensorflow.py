"""TensorFlow graphs with measured costs: Baechi's profile and CostGraphDef text, by hand, and their mistakes."""

import json
from pathlib import Path

import pytest

from simdev.errors import InvalidInput
from simdev.graphs.importers import detect_format, import_graph

COST_GRAPH = """
# a step
node { name: "x" id: 0 output_info { size: 4096 alias_input_port: -1 shape { dim { size: 1024 } } dtype: DT_FLOAT } }
node {
  name: "layer/MatMul_1" device: "/gpu:0" id: 1
  input_info { preceding_node: 0 }
  output_info { size: 2048 alias_input_port: -1 } output_info { size: -1 }
  temporary_memory_size: 64 persistent_memory_size: 512
  compute_cost: 12 is_final: false inaccurate: true
}
node { name: 'view' id: 7
       input_info < preceding_node: 1 preceding_port: 0 > output_info { size: 2048 alias_input_port: 0 }
       control_input: [0, 1] compute_cost: 3 }
"""


def write(tmp_path: Path, text: str, name="graph.pbtxt") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_cost_graph_by_hand(tmp_path):
    path = write(tmp_path, COST_GRAPH)
    assert detect_format(path.read_bytes(), path) == "cost-graph"
    assert detect_format(b"cost_graph { node { id: 0 } }", "x") == "cost-graph"
    found = import_graph(path, device_kind="gpu")
    graph = found.graph
    assert graph.op_names == ("x", "layer/MatMul_1", "view") and graph.kinds == ("x", "matmul", "view")
    assert found.measured == {"gpu": {"x (0)": 0, "layer/MatMul_1 (1)": 12_000, "view (7)": 3_000}}
    assert graph.op_workspace_bytes.tolist() == [0, 64, 0] and graph.op_persistent_bytes.tolist() == [0, 512, 0]
    assert sorted(graph.tensor_bytes.tolist()) == [0, 0, 0, 2048, 4096], "two unknown or aliased, one control edge"
    readers = {name: set() for name in graph.op_names}
    for source, target in zip(graph.edge_source, graph.consumers, strict=True):
        readers[graph.op_names[source]].add(graph.op_names[target])
    assert readers == {"x": {"layer/MatMul_1", "view"}, "layer/MatMul_1": {"view"}, "view": set()}


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("id: 7", "id: 1", "given twice"),
        ("preceding_node: 1", "preceding_node: 5", "dangling"),
        ("[0, 1]", "[0, 9]", "dangling"),
        ("preceding_port: 0", "preceding_port: 4", "no output 4"),
        ("size: 4096", "size: 4x", "whole number"),
        ('name: "x"', "name { }", "name"),
        ("compute_cost: 3 }", "compute_cost: 3", "ends inside"),
        ("id: 0", "id: ]", "expected a value"),
        ("id: 0", "id: 0 @", "protobuf text"),
        ("input_info {", "input_info: 3 other {", "object"),
    ],
)
def test_damaged_cost_graphs_are_refused(tmp_path, old, new, message):
    with pytest.raises(InvalidInput, match=message):
        import_graph(write(tmp_path, COST_GRAPH.replace(old, new, 1)), "cost-graph")


def test_nesting_is_bounded(tmp_path):
    with pytest.raises(InvalidInput, match="deep"):
        import_graph(write(tmp_path, "node {" * 5000), "cost-graph")


def profile(**changes):
    def node(name, op, inputs=(), us=None, outputs=None, colocate=()):
        return {
            "name": name,
            "op": op,
            "inputs": list(inputs),
            "colocate": list(colocate),
            "compute_us": us,
            "output_bytes": outputs,
            "temp_bytes": 8 if us else None,
            "persistent_bytes": 16 if us else None,
        }

    nodes = [
        node("w", "VariableV2", us=2, outputs=[100], colocate=["loc:@w"]),
        node("read", "Identity", ["w"], colocate=["loc:@w"]),
        node("mul", "MatMul", ["read", "^init"], us=10, outputs=[40, 4], colocate=["loc:@w"]),
        node("init", "NoOp"),
        node("add", "Add", ["mul:1", "^w"], us=1.5, outputs=[4]),
    ]
    return {"nodes": [dict(row, **changes.get(row["name"], {})) for row in nodes]}


def test_a_baechi_profile_by_hand(tmp_path):
    path = write(tmp_path, json.dumps(profile()), "p.json")
    assert detect_format(path.read_bytes(), path) == "baechi"
    found = import_graph(path)
    graph = found.graph
    assert graph.op_names == ("w", "mul", "add") and graph.kinds == ("VariableV2", "MatMul", "Add")
    assert found.measured["accelerator"] == {"w: VariableV2": 2000, "mul: MatMul": 10_000, "add: Add": 1500}
    assert graph.unit_of_op.tolist() == [0, 0, 1]
    edges = [
        (int(s), int(graph.tensor_bytes[t]), int(c))
        for s, t, c in zip(graph.edge_source, graph.edge_tensor, graph.consumers, strict=True)
    ]
    assert sorted(edges) == [(0, 0, 2), (0, 100, 1), (1, 4, 2)], "through the node that never ran; control is empty"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"add": {"inputs": ["gone"]}}, "dangling"),
        ({"add": {"inputs": ["mul:x"]}}, "no port"),
        ({"add": {"inputs": [3]}}, "text"),
        ({"add": {"name": "w"}}, "given twice"),
        ({"add": {"compute_us": -1}}, "compute_us"),
        ({name: {"compute_us": None} for name in ("w", "mul", "add")}, "no node"),
        ({"w": {"inputs": ["add"]}}, "cyclic"),
    ],
)
def test_damaged_profiles_are_refused(tmp_path, changes, message):
    with pytest.raises(InvalidInput, match=message):
        import_graph(write(tmp_path, json.dumps(profile(**changes)), "p.json"), "baechi")


def test_the_published_profile(data_dir):
    path = data_dir / "baechi" / "gnmt_v2_l4_b128_s40_forward.json"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    found = import_graph(path)
    assert found.graph.n_ops == 1603
    assert sum(found.measured["accelerator"].values()) == pytest.approx(115.871e6)
