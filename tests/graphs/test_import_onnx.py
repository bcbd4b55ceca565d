"""ONNX models as PyTorch's two exporters write them, and the FLOPs of attention and Einsum."""

import numpy as np
import pytest

from simdev.graphs.importers import import_graph

onnx = pytest.importorskip("onnx")
helper, FLOAT = onnx.helper, onnx.TensorProto.FLOAT


def imported(path):
    return import_graph(path, "onnx", device_kind="accelerator", fix_units=False).graph


def node_graph(tmp_path, node, shapes, result, opset=23):
    """The imported graph of one node, whose inputs have ``shapes``."""
    inputs = [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in shapes.items()]
    outputs = [helper.make_tensor_value_info(node.output[0], FLOAT, result)]
    graph = helper.make_graph([node], "one", inputs, outputs)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    path = tmp_path / "one.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets), path)
    return imported(path)


@pytest.mark.parametrize(
    ("equation", "shapes", "result", "flops"),
    [
        ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)], (2, 3, 5), 2 * 2 * 3 * 4 * 5),
        ("...ij,...jk->...ik", [(2, 7, 3, 4), (2, 7, 4, 5)], (2, 7, 3, 5), 2 * 2 * 7 * 3 * 4 * 5),
        ("ij,j->i", [(3, 4), (4,)], (3,), 2 * 3 * 4),
        ("ij->ji", [(3, 4)], (4, 3), 0),
    ],
)
def test_flops_of_einsum(tmp_path, equation, shapes, result, flops):
    names = [f"x{number}" for number in range(len(shapes))]
    node = helper.make_node("Einsum", names, ["y"], equation=equation)
    graph = node_graph(tmp_path, node, dict(zip(names, shapes, strict=True)), result)
    assert int(graph.op_flops.sum()) == flops


def test_flops_of_attention(tmp_path):
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"])
    shapes = {"q": (2, 4, 6, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 10)}
    assert node_graph(tmp_path, node, shapes, (2, 4, 6, 10)).op_flops.sum() == 2 * 2 * 4 * 6 * 7 * (8 + 10)
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], q_num_heads=4, kv_num_heads=2)
    flat = {"q": (2, 6, 32), "k": (2, 7, 16), "v": (2, 7, 20)}
    assert node_graph(tmp_path, node, flat, (2, 6, 40)).op_flops.sum() == 2 * 2 * 4 * 6 * 7 * (8 + 10)
    node = helper.make_node("MultiHeadAttention", ["q", "k", "v"], ["y"], num_heads=4, domain="com.microsoft")
    flat = {"q": (2, 6, 32), "k": (2, 7, 32), "v": (2, 7, 40)}
    assert node_graph(tmp_path, node, flat, (2, 6, 40)).op_flops.sum() == 2 * 2 * 4 * 6 * 7 * (8 + 10)


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_what_pytorch_exports(tmp_path, exporter):
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    from torch import nn
    from torch.utils.flop_counter import FlopCounterMode

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, stride=2)
            self.q, self.v = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.conv(x).flatten(2).transpose(1, 2)
            scores = torch.einsum("bid,bjd->bij", self.q(x), x).softmax(-1)
            return scores @ self.v(x)

    model, x = Net().eval(), torch.randn(2, 3, 9, 9)
    path = tmp_path / "net.onnx"
    options = {"dynamo": False, "opset_version": 17} if exporter == "torchscript" else {"dynamo": True}
    torch.onnx.export(model, (x,), str(path), external_data=exporter == "dynamo", **options)
    if exporter == "dynamo":  # weights in a file beside the model
        onnx.save_model(onnx.load(path), path, save_as_external_data=True, location="net.data", size_threshold=0)
    graph = imported(path)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    products = np.isin([graph.kinds[kind] for kind in graph.op_kind], ["Conv", "Gemm", "MatMul", "Einsum"])
    assert int(graph.op_flops[products].sum()) == counter.get_total_flops()
    assert int(graph.op_persistent_bytes[graph.op_flops == 0].sum()) >= 4 * sum(p.numel() for p in model.parameters())
    assert not graph.meta["values_without_shape"]
