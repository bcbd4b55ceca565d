"""The graph: numbering, arrays and checks on drawn graphs, then on random ones against plain Python."""

import numpy as np
import pytest

from simdev.errors import InvalidInput
from simdev.problem.graph import ComputationGraph, GraphBuilder


def test_ops_are_numbered_topologically_keeping_the_order_given():
    builder = GraphBuilder("g")
    last = builder.op("last", "k")
    first = builder.op("first", "k", outputs=[4, 8])
    middle = builder.op("middle", "k", inputs=builder.outputs(first)[1:], outputs=[2])
    builder.connect(builder.outputs(middle)[0], last)
    builder.connect(builder.outputs(first)[0], last)
    free = builder.op("free", "k")
    graph = builder.build()
    assert graph.op_names == ("first", "middle", "last", "free") and free == 3
    assert graph.tensor_producer.tolist() == [0, 0, 1] and graph.tensor_bytes.tolist() == [4, 8, 2]
    assert graph.consumer_ptr.tolist() == [0, 1, 2, 3] and graph.consumers.tolist() == [2, 1, 2]
    assert graph.output_ptr.tolist() == [0, 2, 3, 3, 3]
    assert graph.input_ptr.tolist() == [0, 0, 1, 3, 3] and graph.inputs.tolist() == [1, 0, 2]
    assert graph.edge_source.tolist() == [0, 0, 1]
    assert graph.op_bytes_read.tolist() == [0, 8, 6, 0] and graph.op_bytes_written.tolist() == [12, 2, 0, 0]
    assert (graph.n_ops, graph.n_tensors, graph.n_edges) == (4, 3, 3)


def test_a_tensor_is_read_once_by_an_op_that_names_it_twice():
    builder = GraphBuilder("g")
    x = builder.op("x", "k", outputs=[4])
    builder.op("square", "mul", inputs=builder.outputs(x) * 2)
    graph = builder.build()
    assert graph.n_edges == 1 and graph.op_bytes_read.tolist() == [0, 4]


def test_control_edges_share_one_empty_tensor():
    builder = GraphBuilder("g")
    a, b, c = (builder.op(name, "k") for name in "abc")
    builder.control(a, b)
    builder.control(a, c)
    graph = builder.build()
    assert graph.tensor_bytes.tolist() == [0] and graph.consumers.tolist() == [1, 2]


def test_units_are_groups_and_single_ops_in_order():
    builder = GraphBuilder("g")
    for number, group in enumerate(["w", None, "v", "w", None, "v"]):
        builder.op(str(number), "k", group=group)
    graph = builder.build()
    assert graph.op_group.tolist() == [0, -1, 1, 0, -1, 1]
    assert graph.unit_of_op.tolist() == [0, 1, 2, 0, 3, 2] and graph.n_units == 4


def test_the_fingerprint_sees_everything_but_the_name():
    def build(name="g", size=4, kind="k", meta=None):
        builder = GraphBuilder(name, meta)
        builder.op("x", kind, outputs=[size])
        return builder.build().fingerprint

    assert build() == build("h", meta={"a": 1})
    assert len({build(), build(size=5), build(kind="j")}) == 3


def test_arrays_cannot_be_written_to():
    builder = GraphBuilder("g")
    builder.op("x", "k", outputs=[4])
    graph = builder.build()
    for name in ("op_flops", "tensor_bytes", "consumers", "unit_of_op", "output_ptr", "inputs"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(graph, name)[...] = 1


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(flops=-1), "g: op 'x': flops: -1 is out of range"),
        (dict(flops=float("nan")), "g: op 'x': flops: nan is not a whole number"),
        (dict(flops=float("inf")), "g: op 'x': flops: inf is not a whole number"),
        (dict(flops=1.5), "g: op 'x': flops: 1.5 is not a whole number"),
        (dict(flops="7"), "g: op 'x': flops: '7' is not a whole number"),
        (dict(flops=True), "g: op 'x': flops: True is not a whole number"),
        (dict(flops=2**63), "g: op 'x': flops: 9223372036854775808 is out of range"),
        (dict(persistent_bytes=-8), "g: op 'x': persistent_bytes: -8 is out of range"),
        (dict(workspace_bytes=2**51), "g: op_workspace_bytes: larger than 1125899906842624 bytes at op 'x'"),
        (dict(outputs=[-4]), "g: op 'x': bytes: -4 is out of range"),
        (dict(outputs=[float("nan")]), "g: op 'x': bytes: nan is not a whole number"),
        (dict(outputs=[2**51]), "g: "),
        (dict(phase="later"), "g: op 'x': unknown phase 'later'"),
        (dict(inputs=[9]), "g: op 'x': reads tensor 9, which does not exist (dangling tensor)"),
    ],
)
def test_ops_that_make_no_sense(options, message):
    with pytest.raises(InvalidInput) as caught:
        builder = GraphBuilder("g")
        builder.op("x", "k", **options)
        builder.build()
    assert str(caught.value).startswith(message)


def test_cycles_are_named():
    builder = GraphBuilder("g")
    a, b, c, d = (builder.op(name, "k", outputs=[1]) for name in "abcd")
    for source, target in [(a, b), (b, c), (c, b), (c, d)]:
        builder.connect(builder.outputs(source)[0], target)
    with pytest.raises(InvalidInput, match=r"g: ops: the graph is cyclic: (b -> c -> b|c -> b -> c)$"):
        builder.build()


def test_a_graph_needs_ops():
    with pytest.raises(InvalidInput, match="g: ops: the graph has no ops"):
        GraphBuilder("g").build()


def test_columns_must_be_whole_numbers_of_one_dimension():
    builder = GraphBuilder("g")
    builder.op("x", "k", outputs=[4])
    graph = builder.build()
    columns = {
        name: getattr(graph, name)
        for names in (graph.OP_COLUMNS, graph.TENSOR_COLUMNS, graph.EDGE_COLUMNS, graph.STRINGS)
        for name in names
    }
    assert ComputationGraph(name="h", **columns).fingerprint == graph.fingerprint
    for value, message in [
        (np.array([1.0]), "expected whole numbers, got dtype float64"),
        (np.array([[1]]), "expected one dimension, got 2"),
        (np.array([1, 2]), "length 2, expected 1"),
        (np.array([True]), "expected whole numbers, got dtype bool"),
    ]:
        with pytest.raises(InvalidInput, match=message):
            ComputationGraph(name="h", **columns | {"op_flops": value})
    with pytest.raises(InvalidInput, match="h: op_kind: value out of range of int32"):
        ComputationGraph(name="h", **columns | {"op_kind": np.array([2**40])})


def test_random_graphs_keep_every_edge():
    rng = np.random.default_rng(2)
    for _ in range(50):
        builder, wanted = GraphBuilder("g"), set()
        rank = rng.permutation(20)  # op i may read from ops of lower rank, whatever its number
        ops = [
            builder.op(f"{i}", "k", outputs=[int(s) for s in rng.integers(0, 9, rng.integers(3))]) for i in range(20)
        ]
        for op in ops:
            for other in ops:
                if rank[other] < rank[op] and rng.random() < 0.2:
                    for number, tensor in enumerate(builder.outputs(other)):
                        builder.connect(tensor, op)
                        wanted.add((f"{other}", number, f"{op}"))
        graph = builder.build()
        producers = graph.edge_source
        output = graph.edge_tensor - graph.output_ptr[producers]
        rows = zip(producers, output, graph.consumers, strict=True)
        assert {(graph.op_names[a], int(n), graph.op_names[b]) for a, n, b in rows} == wanted
        assert np.all(producers < graph.consumers)
        backwards = [
            (int(graph.tensor_producer[t]), op)
            for op in range(graph.n_ops)
            for t in graph.inputs[graph.input_ptr[op] : graph.input_ptr[op + 1]]
        ]
        assert sorted(backwards) == sorted(zip(producers.tolist(), graph.consumers.tolist(), strict=True))


def test_arrays_for_graph_learning():
    """What torch_geometric.data.Data(x=features, edge_index=edge_index), dgl.graph(tuple(edge_index)) and
    jraph.GraphsTuple(senders=edge_index[0], receivers=edge_index[1]) take."""
    b = GraphBuilder("three")
    x = b.op("x", "input", outputs=[7, 9])
    y = b.op("y", "relu", inputs=b.outputs(x), flops=3, outputs=[1])
    b.op("z", "relu", inputs=[b.outputs(x)[1], *b.outputs(y)])
    graph = b.build()
    arrays = graph.to_arrays()
    assert arrays["edge_index"].tolist() == [[0, 0, 0, 1], [1, 1, 2, 2]]
    assert arrays["edge_bytes"].tolist() == [7, 9, 9, 1] and arrays["edge_tensor"].tolist() == [0, 1, 1, 2]
    assert arrays["features"].shape == (3, 5) and arrays["features"].dtype == np.float32
    assert arrays["features"][1, 0] == 2.0  # log2(1 + 3)
    assert arrays["unit"].tolist() == [0, 1, 2] and arrays["kind"][1] == arrays["kind"][2] != arrays["kind"][0]
    assert all(array.flags.writeable and array.flags.c_contiguous for array in arrays.values())


def test_networkx_there_and_back():
    from simdev import from_networkx, to_networkx

    graph = GraphBuilder("one")
    graph.op("x", "input", outputs=[7])
    graph = graph.build()
    assert from_networkx(to_networkx(graph)).graph.fingerprint == graph.fingerprint
