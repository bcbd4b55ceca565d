"""Graphs and their files."""

import io
import json
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest

from simdev.errors import InvalidInput
from simdev.problem.graph import ComputationGraph, GraphBuilder
from simdev.problem.graph_file import load_graph, read_npz, save_graph, write_npz

# the graph: numbering, arrays and checks on drawn graphs, then on random ones against plain Python


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


# graph files: what is written is read back; anything else is refused in one sentence


def small_graph():
    builder = GraphBuilder("small", meta={"batch": 2, "note": "naïve"})
    x = builder.op("x", "input", outputs=[4096, 0])
    for number in range(20):
        op = builder.op(
            f"op{number}", "mm", inputs=builder.outputs(x), flops=number * 10**12, group=number // 2, layer=f"l{number}"
        )
        x = op
        builder.tensor(op, 2**40 + number, result=number == 19, persistent=number == 3)
    return builder.build()


@pytest.fixture
def path(tmp_path):
    save_graph(small_graph(), tmp_path / "g.npz")
    return tmp_path / "g.npz"


def members(path):
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def rewrite(path, contents, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in contents.items() if isinstance(contents, dict) else contents:
            archive.writestr(name, data)


def npy(array, **options):
    out = io.BytesIO()
    np.lib.format.write_array(out, np.asarray(array), **options)
    return out.getvalue()


def refused(path):
    with pytest.raises(InvalidInput) as caught:
        load_graph(path)
    text = str(caught.value)
    assert text.startswith(str(path)) and "\n" not in text
    return text.removeprefix(f"{path}: ")


def test_a_file_gives_the_same_graph_back(path):
    graph, again = small_graph(), load_graph(path)
    assert again.fingerprint == graph.fingerprint and again.meta == graph.meta and again.name == "small"
    assert again.op_flops.dtype == np.int64 and np.array_equal(again.tensor_bytes, graph.tensor_bytes)
    with pytest.raises(ValueError):
        again.op_flops[0] = 1


def test_the_same_graph_gives_the_same_bytes(path, tmp_path):
    save_graph(small_graph(), tmp_path / "h.npz")
    assert (tmp_path / "h.npz").read_bytes() == path.read_bytes()
    assert all(info.compress_type == zipfile.ZIP_DEFLATED for info in zipfile.ZipFile(path).infolist())


def test_writing_is_all_or_nothing(path, tmp_path):
    before = path.read_bytes()
    with pytest.raises(ValueError, match="allow_pickle"):
        write_npz(path, {"fine": np.arange(3), "not": np.array([object()])})
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["g.npz"]
    with pytest.raises(InvalidInput, match="none/g.npz: No such file"):
        save_graph(small_graph(), tmp_path / "none" / "g.npz")


def test_files_that_are_not_there_or_not_readable(tmp_path, path, monkeypatch):
    assert refused(tmp_path / "none.npz") == "No such file or directory"
    assert "directory" in refused(tmp_path)

    def denied(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(zipfile, "ZipFile", denied)
    assert refused(path) == "Permission denied"


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"hello" * 100, pickle.dumps({"a": 1})])
def test_files_that_are_no_archive(path, content):
    path.write_bytes(content)
    assert "truncated or corrupted archive" in refused(path)


def test_truncated_files(path):
    data = path.read_bytes()
    for length in (10, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        assert "truncated or corrupted" in refused(path)


def test_a_pickle_is_never_opened(path, tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    trap = io.BytesIO()
    np.lib.format.write_array(trap, np.array([Trap()], dtype=object), allow_pickle=True)
    rewrite(path, members(path) | {"op_flops.npy": trap.getvalue()})
    assert refused(path) == "op_flops: holds a pickle, which is never loaded"
    rewrite(path, members(path) | {"op_flops.npy": pickle.dumps(Trap())})
    assert "op_flops: the magic string is not correct" in refused(path)
    assert not (tmp_path / "sprung").exists()


def header_of(descr, shape, fortran=False):
    text = f"{{'descr': {descr!r}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


@pytest.mark.parametrize(
    "content, message",
    [
        (npy(np.ones(21)), "expected whole numbers, got dtype float64"),
        (npy(np.array(["a"] * 21)), "expected whole numbers, got dtype <U1"),
        (npy(np.zeros(21, "M8[s]")), "expected whole numbers"),
        (npy(np.zeros(21, [("a", "i4")])), "expected whole numbers"),
        (npy(np.zeros(21, bool)), "expected whole numbers, got dtype bool"),
        (npy(np.zeros((3, 7), int)), "shape (3, 7) does not match the data"),
        (npy(np.int64(3)), "shape () does not match the data"),
        (npy(np.zeros(20, int)), "length 20, expected 21"),
        (npy(np.full(21, -1)), "negative value at op 'x'"),
        (npy(np.full(21, 2**64 - 1, np.uint64)), "value out of range of int64"),
        (header_of("<i8", "(21,)"), "shape (21,) does not match the data"),
        (header_of("<i8", "(-1,)") + bytes(8), "shape (-1,) does not match the data"),
        (header_of("<i8", "(-1, -21)") + bytes(168), "shape (-1, -21) does not match the data"),
        (header_of("<i8", f"({10**30},)") + bytes(8), "does not match the data"),
        (header_of("<i8", f"({10**18},)") + bytes(8), "does not match the data"),
        (header_of("<i8", "(21,)", True) + bytes(168), "does not match the data"),
        (header_of("<i8", "(" * 5000), ""),
        (header_of("<i8", "('21',)"), "shape is not valid"),
        (header_of("|O", "(1,)") + bytes(8), "holds a pickle, which is never loaded"),
        (header_of("|V0", "(21,)"), ""),
        (b"\x93NUMPY\x03\x00" + bytes(10), "npy version (3, 0)"),
        (b"\x93NUMPY\x02\x00" + b"\xff" * 4, "EOF"),
        (npy(np.zeros(21, int)) + b"more", "does not match the data"),
        (b"", "EOF"),
    ],
)
def test_columns_that_are_wrong(path, content, message):
    rewrite(path, members(path) | {"op_flops.npy": content})
    text = refused(path)
    assert text.startswith("op_flops: ") and message in text


def test_missing_double_and_unknown_columns(path):
    contents = members(path)
    rewrite(path, {name: data for name, data in contents.items() if name != "op_kind.npy"})
    assert refused(path) == "op_kind: missing"
    rewrite(path, contents | {"extra.npy": npy(np.arange(3))})
    assert refused(path) == "extra: not a column of a graph"
    with pytest.warns(UserWarning, match="Duplicate"):
        rewrite(path, [*contents.items(), ("op_kind.npy", contents["op_kind.npy"])])
    assert refused(path) == "op_kind: given twice"
    rewrite(path, {**contents, "op_kind": contents["op_kind.npy"]})
    assert refused(path) == "op_kind: given twice"
    rewrite(path, {})
    assert refused(path) == "header: missing"


@pytest.mark.parametrize(
    "column, index, value, message",
    [
        ("op_kind", 0, 9, "op_kind: index out of range of kinds"),
        ("op_kind", 0, -1, "op_kind: index out of range of kinds"),
        ("op_phase", 3, 3, "op_phase: unknown phase"),
        ("op_persistent_bytes", 2, 2**51, "op_persistent_bytes: larger than"),
        ("tensor_bytes", 0, -5, "tensor_bytes: negative or too large"),
        ("tensor_producer", 0, -1, "tensor_producer: a tensor's producer is not an op"),
        ("tensor_producer", -1, 99, "tensor_producer: a tensor's producer is not an op"),
        ("tensor_producer", 0, 5, "tensor_producer: tensors are not numbered by producer"),
        ("consumers", 0, 99, "consumers: a tensor's consumer is not an op"),
        ("consumers", 3, -2, "consumers: a tensor's consumer is not an op"),
        ("consumers", 5, 0, "consumers: an op reads a tensor made at or after it"),
        ("consumer_ptr", 1, 9, "consumer_ptr: decreases"),
        ("consumer_ptr", -1, 2, "consumer_ptr: does not match"),
        ("op_flops", 5, 7, "header: fingerprint: does not match the contents"),
    ],
)
def test_contents_that_make_no_graph(path, column, index, value, message):
    array = read_npz(path)[column].astype(np.int64)
    array[index] = value
    rewrite(path, members(path) | {f"{column}.npy": npy(array)})
    assert refused(path).startswith(message)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda h: h | {"format": 2}, "header: format: format 2, expected 1"),
        (lambda h: [h], "header: format: format 'list', expected 1"),
        (lambda h: h | {"kinds": "mm"}, "header: kinds: expected a list of strings"),
        (lambda h: h | {"op_names": [1] * 21}, "header: op_names: expected a list of strings"),
        (lambda h: h | {"op_names": h["op_names"][1:]}, "op_names: length 20, expected 21"),
        (lambda h: h | {"layers": None}, "header: layers: expected a list of strings"),
        (lambda h: h | {"meta": []}, "header: name, meta: expected a string and an object"),
        (lambda h: h | {"name": 3}, "header: name, meta: expected a string and an object"),
        (lambda h: h | {"fingerprint": None}, "header: fingerprint: does not match the contents: the file was altered"),
        (lambda h: {k: v for k, v in h.items() if k != "signatures"}, "header: signatures: expected a list of strings"),
    ],
)
def test_headers_that_are_wrong(path, change, message):
    header = json.loads(read_npz(path)["header"].tobytes())
    changed = np.frombuffer(json.dumps(change(header)).encode(), np.uint8)
    rewrite(path, members(path) | {"header.npy": npy(changed)})
    assert refused(path) == message


@pytest.mark.parametrize("text", [b"[" * 100_000, b"{", b"\xff\xfe", b'{"a": ' + b"9" * 10_000 + b"}"])
def test_headers_that_are_not_json(path, text):
    rewrite(path, members(path) | {"header.npy": npy(np.frombuffer(text, np.uint8))})
    assert refused(path).startswith("header: not JSON")


def test_a_bomb_is_refused_before_it_is_unpacked(path, monkeypatch):
    import tracemalloc

    monkeypatch.setattr("simdev.problem.graph_file.MAX_UNPACKED", 1 << 25)
    rewrite(path, {f"c{number}.npy": bytes(1 << 24) for number in range(3)})
    tracemalloc.start()
    text = refused(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert text == f"unpacks to {3 << 24} bytes in 3 members: refused" and peak < 1 << 21
    rewrite(path, {f"c{number}.npy": b"" for number in range(257)})
    assert refused(path) == "unpacks to 0 bytes in 257 members: refused"


def test_a_bomb_that_lies_about_its_size_is_not_unpacked(path):
    import tracemalloc

    column = npy(np.zeros(1 << 23, np.int64))  # 64 MiB, packed into some 64 KiB
    rewrite(path, {"op_flops.npy": column})
    small = 21 * 8 + 128
    data = path.read_bytes().replace(struct.pack("<L", len(column)), struct.pack("<L", small))
    path.write_bytes(data.replace(b"8388608", b"21     "))
    tracemalloc.start()
    text = refused(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 21, peak
    assert "op_flops" in text


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_methods_that_unpack_without_limit_are_refused(path, method):
    rewrite(path, members(path), method)
    assert "compression method" in refused(path)


def test_an_archive_inside_an_archive_is_no_array(path):
    rewrite(path, members(path) | {"op_flops.npy": path.read_bytes()})
    assert "op_flops: the magic string is not correct" in refused(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_random_damage_is_noticed_or_harmless(path, method):
    """Flip, drop or insert bytes anywhere: the same graph, or :class:`InvalidInput`, and nothing else."""
    rewrite(path, members(path), method)
    good, fingerprint = path.read_bytes(), small_graph().fingerprint
    rng = np.random.default_rng(17)
    outcomes = {"same": 0, "refused": 0}
    for _ in range(500):
        data = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(len(data)))
            match rng.integers(4):
                case 0 | 1:
                    data[at] ^= 1 << int(rng.integers(8))
                case 2:
                    del data[at : at + int(rng.integers(1, 9))]
                case 3:
                    data[at:at] = rng.bytes(int(rng.integers(1, 9)))
        path.write_bytes(bytes(data))
        try:
            assert load_graph(path).fingerprint == fingerprint
            outcomes["same"] += 1
        except InvalidInput as error:
            assert "\n" not in str(error)
            outcomes["refused"] += 1
    assert outcomes["refused"] > 300


def test_random_damage_inside_a_column_is_noticed(path):
    """The same with intact checksums: what the archive cannot notice, the graph does."""
    contents, fingerprint = members(path), small_graph().fingerprint
    rng = np.random.default_rng(18)
    for _ in range(300):
        name = str(rng.choice(list(contents)))
        data = bytearray(contents[name])
        for at in rng.integers(len(data), size=rng.integers(1, 4)):
            data[at] = rng.integers(256)
        rewrite(path, contents | {name: bytes(data)}, zipfile.ZIP_STORED)
        try:
            assert load_graph(path).fingerprint == fingerprint
        except InvalidInput as error:
            assert "\n" not in str(error)
