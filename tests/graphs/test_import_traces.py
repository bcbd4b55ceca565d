"""Importers of execution traces, Chakra, Moirai and TensorFlow."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from simdev.errors import InvalidInput, Unsupported
from simdev.exact.makespan import solve_makespan
from simdev.graphs.importers import detect_format, import_graph, moirai
from simdev.graphs.importers.moirai import read_problem
from simdev.placers.budget import Budget
from simdev.placers.registry import find_placer
from simdev.problem.placement import Placement
from simdev.sim import simulate, simulate_many

# importers of execution traces, Chakra and Moirai


# execution traces of PyTorch become graphs


def node(number, name, parent, inputs=(), outputs=()):
    """Tensors as (storage, elements) of float."""

    def side(tensors):
        return [[10 * storage, storage, 0, count, 4, "cuda:0"] for storage, count in tensors]

    return dict(
        id=number,
        name=name,
        parent=parent,
        inputs=side(inputs),
        outputs=side(outputs),
        input_types=["Tensor(float)"] * len(inputs),
        output_types=["Tensor(float)"] * len(outputs),
    )


def write(path, nodes, **more):
    path.write_text(json.dumps({"schema": "1.0.1", "nodes": nodes} | more))
    return path


def test_leaves_that_work_become_ops_and_views_do_not(tmp_path):
    nodes = [
        node(1, "thread", 0),
        node(2, "aten::linear", 1, [(1, 6), (2, 12)], [(3, 8)]),
        node(3, "aten::t", 2, [(2, 12)], [(2, 12)]),
        node(4, "aten::addmm", 2, [(1, 6), (2, 12)], [(3, 8)]),
        node(5, "aten::relu_", 1, [(3, 8)], [(3, 8)]),
        node(6, "aten::empty", 1, [], [(4, 8)]),
        node(7, "aten::add", 1, [(3, 8), (1, 6)], [(4, 8)]),
    ]
    found = import_graph(write(tmp_path / "et.json", nodes))
    graph = found.graph
    assert [graph.kinds[k] for k in graph.op_kind] == ["input", "input", "addmm", "relu_", "add"]
    pairs = set(zip(graph.edge_source.tolist(), graph.consumers.tolist(), strict=True))
    assert pairs == {(0, 2), (1, 2), (2, 3), (3, 4), (0, 4)}
    assert graph.signatures[graph.op_signature[2]] == "addmm(f32[6],f32[12])->f32[8]"
    assert graph.tensor_bytes.tolist() == [24, 48, 32, 32, 32] and found.measured is None


@pytest.mark.parametrize("nodes", [[], [node(1, "thread", 0)], [{"name": "x"}], [{"id": 1}]])
def test_others_are_refused(tmp_path, nodes):
    with pytest.raises(InvalidInput):
        import_graph(write(tmp_path / "et.json", nodes), "execution-trace")


def test_the_public_trace(data_dir, tmp_path):
    import tarfile

    with tarfile.open(data_dir / "param" / "dlrm_pytorch_et.tar.gz") as archive:
        member = next(one for one in archive if one.name.endswith("eg_0.json"))
        (tmp_path / "eg_0.json").write_bytes(archive.extractfile(member).read())
    graph = import_graph(tmp_path / "eg_0.json").graph
    kinds = [graph.kinds[k] for k in graph.op_kind]
    assert kinds.count("addmm") == 7 and kinds.count("mm") == 13 and graph.n_ops > 300


# chakra execution traces become graphs with measured costs


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


def chakra_node(id, name, type, data=(), control=(), micros=0, shapes="", types="", cpu=False, comm=None, packed=True):
    message = number(1, id) + text(2, name) + number(3, type) + number(7, micros)
    for place, deps in ((4, control), (5, data)):
        message += text(place, b"".join(map(varint, deps))) if packed else b"".join(number(place, d) for d in deps)
    message += text(9, text(2, shapes) + text(3, types))
    message += text(10, text(1, "is_cpu_op") + number(27, int(cpu)))
    if comm is not None:
        message += text(10, text(1, "comm_type") + number(9, comm))
    return message


def written(path, *messages):
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
    found = import_graph(
        written(tmp_path / "step.et", *(chakra_node(**row, packed=packed) for row in STEP)),
        device_kind="v100",
    )
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
    binary = import_graph(written(tmp_path / "step.et", *(chakra_node(**row) for row in STEP)))
    found = import_graph(path)
    assert found.graph.fingerprint == binary.graph.fingerprint and found.measured == binary.measured


def test_order_is_in_control_dependencies_where_there_are_no_others(tmp_path):
    rows = [chakra_node(1, "a", 4), chakra_node(2, "b", 5, control=[1]), chakra_node(3, "c", 6, control=[2])]
    graph = import_graph(written(tmp_path / "t.et", *rows)).graph
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
    path = written(tmp_path / "t.et", chakra_node(1, "a", 4))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InvalidInput, match=message):
        import_graph(path)


def test_ids_given_twice_and_unknown_ones_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match="1 is given twice"):
        import_graph(written(tmp_path / "t.et", chakra_node(1, "a", 4), chakra_node(1, "b", 4)))
    with pytest.raises(InvalidInput, match="needs 9"):
        import_graph(written(tmp_path / "t.et", chakra_node(1, "a", 4, data=[9])))
    (tmp_path / "t.json").write_text('{"type": "COMP_NODE", "id": "x"}')
    with pytest.raises(InvalidInput, match="not a Chakra trace"):
        import_graph(tmp_path / "t.json")


# moirai's spreadsheets: damaged files, the published files, the toy's optimum


DATA = Path(os.environ.get("SIMDEV_DATA", Path(__file__).parents[3] / "shared" / "data")) / "moirai"
needs_xlrd = pytest.mark.skipif(find_spec("xlrd") is None, reason="needs the package xlrd")


def published(test):
    return needs_xlrd(pytest.mark.skipif(not DATA.is_dir(), reason="SIMDEV_DATA names no folder with moirai")(test))


@needs_xlrd
@pytest.mark.parametrize("data", [moirai.MAGIC, moirai.MAGIC + bytes(600), b"PK\x03\x04" + bytes(40), b""])
def test_what_is_no_workbook_is_refused(data, tmp_path):
    with pytest.raises(InvalidInput, match="is no Excel 97 workbook, or is damaged"):
        moirai.first_sheet(data, tmp_path / "a.xls")


def test_without_xlrd_the_reader_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "xlrd", None)
    with pytest.raises(Unsupported, match=r"needs the package xlrd: pip install 'simdev\[excel\]'"):
        moirai.first_sheet(moirai.MAGIC, tmp_path / "a.xls")


@published
def test_damaged_spreadsheets_are_refused_with_a_sentence(tmp_path):
    data = (DATA / "example-1.xls").read_bytes()
    rng, path = np.random.default_rng(0), tmp_path / "a.xls"
    for _ in range(200):
        broken = bytearray(data[: int(rng.integers(8, len(data) + 1))])
        for at in rng.integers(8, len(broken), 6 if len(broken) > 8 else 0):
            broken[at] = int(rng.integers(256))
        path.write_bytes(bytes(broken))
        try:
            import_graph(path)
        except InvalidInput as error:
            assert "a.xls" in str(error)


@published
def test_the_published_files():
    problem = read_problem(DATA / "GoogLeNet.xls")
    assert problem.graph.n_ops == 140 and problem.topology.n_devices == 4
    single = [simulate(problem, Placement(np.full(140, d))).step_ns / 1e6 for d in range(4)]
    assert single == pytest.approx([2.336, 5.476, 5.547, 2.884], abs=1e-3)
    assert (problem.topology.memory_bytes / 1e9).round(1).tolist() == [62.0, 61.1, 18.0, 26.3]
    imported = import_graph(DATA / "transformer.xls")
    assert imported.graph.n_ops == 1373 and set(imported.measured) == {"p0", "p1", "p2", "p3"}


@pytest.mark.long
@published
@pytest.mark.parametrize("contention", ["fifo", "none"])
def test_the_example_of_the_paper(contention):
    """30.0 is the optimum if the order of the queues is free. With queues in order of arrival it is 31.0."""
    problem = read_problem(DATA / "example-1.xls", contention=contention)
    free = solve_makespan(problem, seconds=20)
    assert free.status == "optimal" and free.model_ns == free.bound_ns == pytest.approx(30e6, rel=1e-5)
    found, best, count = 0, None, 3**problem.graph.n_ops
    for first in range(0, count, 3**9):
        number = np.arange(first, first + 3**9)
        devices = np.stack([number // 3**op % 3 for op in range(problem.graph.n_ops)], axis=1).astype(np.int32)
        outcomes = simulate_many(problem, devices)
        found += int(outcomes.fits.sum())
        if outcomes.fits.any():
            step_ns = int(outcomes.step_ns[outcomes.fits].min())
            best = step_ns if best is None else min(best, step_ns)
    assert best == 31_000_000 and found == 2236  # of 531,441 placements
    spec, params = find_placer("portfolio")
    tries = [
        simulate(
            problem,
            spec.place(problem, rng=np.random.default_rng(seed), budget=Budget(problem, evaluations=3000), **params),
        )
        for seed in range(4)
    ]
    assert min(schedule.step_ns for schedule in tries if schedule.feasible) == best  # one or two of the four find it


# tensorFlow graphs with measured costs: Baechi's profile and CostGraphDef text, by hand, and their mistakes


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


def saved(tmp_path: Path, text: str, name="graph.pbtxt") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_cost_graph_by_hand(tmp_path):
    path = saved(tmp_path, COST_GRAPH)
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
        import_graph(saved(tmp_path, COST_GRAPH.replace(old, new, 1)), "cost-graph")


def test_nesting_is_bounded(tmp_path):
    with pytest.raises(InvalidInput, match="deep"):
        import_graph(saved(tmp_path, "node {" * 5000), "cost-graph")


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
    path = saved(tmp_path, json.dumps(profile()), "p.json")
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
        import_graph(saved(tmp_path, json.dumps(profile(**changes)), "p.json"), "baechi")


def test_the_published_profile(data_dir):
    path = data_dir / "baechi" / "gnmt_v2_l4_b128_s40_forward.json"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    found = import_graph(path)
    assert found.graph.n_ops == 1603
    assert sum(found.measured["accelerator"].values()) == pytest.approx(115.871e6)
