"""Execution traces of PyTorch become graphs."""

import json

import pytest

from simdev.errors import InvalidInput
from simdev.graphs.importers import import_graph


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
