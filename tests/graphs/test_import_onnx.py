"""ONNX models as PyTorch's two exporters write them, and the FLOPs of attention and Einsum."""

import numpy as np
import pytest

from simdev.errors import InvalidInput
from simdev.graphs.importers import import_graph
from simdev.graphs.importers.onnx_payload import read_model

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

    class Sized(nn.Module):
        """Computes sizes from shapes: the old exporter writes them as nodes, and ONNX infers none of them."""

        def __init__(self):
            super().__init__()
            self.conv, self.net = nn.Conv2d(4, 3, 1), Net()

        def forward(self, x):
            batch, channels, height, width = x.shape
            x = nn.functional.pad(x, (0, -width % 4, 0, -height % 4, 0, 1))
            half = x.shape[1] // 2
            x = torch.cat([self.conv(x), x[:, :half], x[:, half:]], 1)[:, : channels + batch // 2]
            return self.net(self.conv(x.view(batch, -1, 2, x.shape[2] // 2, x.shape[3]).flatten(2, 3)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, stride=2)
            self.q, self.v = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.conv(x).flatten(2).transpose(1, 2)
            scores = torch.einsum("bid,bjd->bij", self.q(x), x).softmax(-1)
            return scores @ self.v(x)

    model, x = (Net() if exporter == "dynamo" else Sized()).eval(), torch.randn(2, 3, 9, 9)
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


def model_file(tmp_path, nodes, inputs, initializers=(), opset=17):
    inputs = [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in inputs.items()]
    outputs = [helper.make_tensor_value_info("y", FLOAT, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(initializers))
    path = tmp_path / "g.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]), path)
    return path


def constant(name, values):
    return helper.make_tensor(name, onnx.TensorProto.INT64, [len(values)], values)


def test_sizes_that_the_graph_computes(tmp_path):
    """x[4,6,10] becomes [4,2,30], as Shape, Slice and Concat say; only the products remain, and read no shape."""
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Shape", ["r"], ["s"]),
        helper.make_node("Slice", ["s", "zero", "one"], ["batch"]),
        helper.make_node("Concat", ["batch", "two", "rest"], ["sizes"], axis=0),
        helper.make_node("Reshape", ["r", "sizes"], ["v"]),
        helper.make_node("Transpose", ["v"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["v", "t"], ["y"]),
    ]
    numbers = [constant("zero", [0]), constant("one", [1]), constant("two", [2]), constant("rest", [-1])]
    graph = imported(model_file(tmp_path, nodes, {"x": (4, 6, 10)}, numbers))
    assert [graph.kinds[kind] for kind in graph.op_kind] == ["input", "Relu", "Transpose", "MatMul"]
    assert graph.op_flops.tolist() == [0, 4 * 6 * 10, 4 * 2 * 30, 2 * 4 * 2 * 2 * 30]
    assert graph.tensor_bytes[graph.tensor_result].tolist() == [4 * 4 * 2 * 2]


def test_a_product_of_unknown_size_is_refused(tmp_path):
    nodes = [
        helper.make_node("NonZero", ["x"], ["where"], name="found"),
        helper.make_node("Cast", ["where"], ["f"], to=FLOAT),
        helper.make_node("MatMul", ["f", "w"], ["y"], name="product"),
    ]
    path = model_file(tmp_path, nodes, {"x": (4, 6), "w": (24, 3)})
    with pytest.raises(InvalidInput, match="'product': the FLOPs of this MatMul are unknown, .* shape of 'f'"):
        imported(path)
    harmless = model_file(tmp_path, [*nodes[:1], helper.make_node("Cast", ["where"], ["y"], to=FLOAT)], {"x": (4, 6)})
    assert imported(harmless).meta["values_without_shape"] == ["where", "y"]


def test_sizes_take_no_memory(tmp_path):
    """Values that a file claims to be huge are not computed."""
    nodes = [
        helper.make_node("ConstantOfShape", ["huge"], ["zeros"]),
        helper.make_node("ReduceSum", ["zeros"], ["y"]),
    ]
    graph = imported(model_file(tmp_path, nodes, {}, [constant("huge", [1 << 40])]))
    assert graph.n_ops == 3


def test_weights_are_not_read(tmp_path):
    """A file above 128 MiB, whose zeros take no disk, and a constant inside a node."""
    weights = helper.make_tensor("w", FLOAT, [256, 1], bytes(1024), raw=True)
    inside = helper.make_tensor("value", FLOAT, [4096, 2], bytes(32768), raw=True)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Constant", [], ["c"], value=inside),
        helper.make_node("MatMul", ["h", "c"], ["y"]),
    ]
    path = model_file(tmp_path, nodes, {"x": (3, 8192)}, [weights])
    assert len(read_model(path)) < 2000
    model = onnx.load(path)
    model.graph.initializer[0].dims[:] = [8192, 4096]
    model.graph.initializer[0].raw_data = bytes(8192 * 4096 * 4)
    path.write_bytes(model.SerializeToString())
    assert path.stat().st_size > 128 << 20
    graph = imported(path)
    assert graph.op_flops.max() == 2 * 3 * 8192 * 4096
    assert graph.op_persistent_bytes.sum() == 4 * (8192 * 4096 + 4096 * 2)


def test_flops_of_quantized_products(tmp_path):
    inputs = {"x": (1, 4, 8, 8), "s": (), "z": (), "w": (6, 4, 3, 3)}
    node = helper.make_node("QLinearConv", ["x", "s", "z", "w", "s", "z", "s", "z"], ["y"], pads=[1, 1, 1, 1])
    assert node_graph(tmp_path, node, inputs, (1, 6, 8, 8)).op_flops.sum() == 2 * 6 * 64 * 4 * 9
