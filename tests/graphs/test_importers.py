"""Where graphs come from: importers, with tiny files computed by hand, mistakes in files and the published files where
they are at hand; and drawn graphs."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from simdev import Problem, load_topology, simulate_many
from simdev.errors import InvalidInput, UnknownName
from simdev.graphs.importers import detect_format, import_graph
from simdev.graphs.importers.networkx_graph import from_networkx, to_networkx
from simdev.graphs.importers.plain import FORMAT, VERSION, op_row
from simdev.graphs.random_graphs import FAMILIES, GradientTape, family_graph, family_split
from simdev.placers.registry import load_workload
from simdev.problem.graph import PHASES, GraphBuilder
from simdev.problem.graph_file import save_graph


def write(tmp_path, name, content):
    path = tmp_path / name
    if isinstance(content, (dict, list)):
        content = json.dumps(content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def edges_of(graph):
    """(source name, reader name, bytes) of every tensor-to-reader pair."""
    rows = zip(graph.edge_source, graph.consumers, graph.tensor_bytes[graph.edge_tensor], strict=True)
    return sorted((graph.op_names[a], graph.op_names[b], int(size)) for a, b, size in rows)


def random_graph(rng, n=25):
    builder = GraphBuilder("random", meta={"seed": 1})
    tensors = []
    for op in range(n):
        inputs = rng.choice(len(tensors), min(len(tensors), 2), replace=False) if tensors else []
        handle = builder.op(
            f"op {op}",
            str(rng.choice(["mm", "add", "input"])),
            flops=int(rng.integers(1000)),
            inputs=[tensors[i] for i in inputs],
            bytes_read=int(rng.integers(1000)),
            bytes_written=7,
            persistent_bytes=int(rng.integers(3)) * 512,
            workspace_bytes=int(rng.integers(99)),
            layer=f"layer {op % 3}",
            phase=str(rng.choice(["forward", "backward", "update"])),
            signature=f"s{op % 4}",
            group=None if rng.random() < 0.5 else int(rng.integers(3)),
        )
        for _ in range(rng.integers(3)):
            flags = dict(persistent=bool(rng.random() < 0.2), result=bool(rng.random() < 0.2))
            tensors.append(builder.tensor(handle, int(rng.integers(5000)), **flags))
    return builder.build()


# --- plain JSON and CSV -----------------------------------------------------------------------------------------------

PLAIN = {
    "name": "mine",
    "ops": [
        {"name": "x", "kind": "input", "outputs": [4096]},
        {
            "name": "y",
            "kind": "mm",
            "flops": 8192,
            "outputs": [1024, {"bytes": 8, "result": True}],
            "inputs": ["x"],
            "ns": {"gpu": 2500},
            "group": "g",
            "phase": "backward",
            "persistent_bytes": 64,
        },
        {"name": "z", "kind": "add", "inputs": [["y", 1], 0], "group": "g"},
    ],
    "edges": [{"from": "x", "to": "z", "bytes": 16}, {"from": "x", "to": "y", "bytes": 16}, {"from": "y", "to": "z"}],
}


def test_plain_json(tmp_path):
    found = import_graph(write(tmp_path, "g.json", PLAIN))
    graph = found.graph
    assert graph.name == "mine" and graph.op_names == ("x", "y", "z")
    assert edges_of(graph) == [
        ("x", "y", 16),
        ("x", "y", 4096),
        ("x", "z", 16),
        ("x", "z", 4096),
        ("y", "z", 0),
        ("y", "z", 8),
    ]
    assert graph.n_tensors == 5, "the two edges of 16 bytes from x are one tensor"
    assert graph.tensor_result.tolist() == [False, False, False, True, False]
    assert graph.op_bytes_read.tolist() == [0, 4112, 4120] and graph.op_bytes_written.tolist() == [4112, 1032, 0]
    assert graph.op_group.tolist() == [-1, 0, 0] and graph.op_phase.tolist() == [0, 1, 0]
    assert found.measured == {"gpu": {"mm:y": 2500}}
    assert graph.signatures[graph.op_signature[1]] == "mm:y"


def test_plain_csv(tmp_path):
    text = "name,kind,flops,outputs,inputs,ns:gpu,group\nx,input,,4096,,,\ny,mm,8192,1024;8,x:0,2500,g\nz,add,,,y:1; x,,g\n"
    found = import_graph(write(tmp_path, "g.csv", text))
    assert edges_of(found.graph) == [("x", "y", 4096), ("x", "z", 4096), ("y", "z", 8)]
    assert found.measured == {"gpu": {"mm:y": 2500.0}} and found.graph.op_flops.tolist() == [0, 8192, 0]


def test_ops_may_come_in_any_order(tmp_path):
    ops = [{"name": "b", "kind": "add", "inputs": ["a"]}, {"name": "a", "kind": "input", "outputs": [1]}]
    assert import_graph(write(tmp_path, "g.json", {"ops": ops})).graph.op_names == ("a", "b")


@pytest.mark.parametrize("seed", range(10))
def test_graphs_survive_json_networkx_and_npz(tmp_path, seed):
    import networkx

    graph = random_graph(np.random.default_rng(seed))
    document = {"format": FORMAT, "version": VERSION, "name": graph.name, "meta": graph.meta}
    write(tmp_path, "g.json", {**document, "ops": [op_row(graph, op) for op in range(graph.n_ops)]})
    again = import_graph(tmp_path / "g.json").graph
    assert again.fingerprint == graph.fingerprint and again.meta == graph.meta and again.name == graph.name
    assert from_networkx(to_networkx(graph)).graph.fingerprint == graph.fingerprint
    for key in ("links", "edges"):
        document = networkx.node_link_data(to_networkx(graph), edges=key)
        assert import_graph(write(tmp_path, "n.json", document)).graph.fingerprint == graph.fingerprint
    save_graph(graph, tmp_path / "g.npz")
    assert import_graph(tmp_path / "g.npz").graph.fingerprint == graph.fingerprint


def test_a_plain_digraph_needs_nothing_but_edges():
    import networkx

    source = networkx.DiGraph([("a", "b"), ("b", "c")])
    source.add_edge("a", "c", bytes=100)
    source.nodes["b"].update(kind="mm", flops=10, ns={"gpu": 5})
    found = from_networkx(source, "drawn")
    assert edges_of(found.graph) == [("a", "b", 0), ("a", "c", 100), ("b", "c", 0)]
    assert found.graph.name == "drawn" and found.measured == {"gpu": {"mm:b": 5}}
    with pytest.raises(InvalidInput, match="cyclic: b -> a -> b"):
        from_networkx(networkx.DiGraph([("a", "b"), ("b", "a")]))
    with pytest.raises(InvalidInput, match="undirected"):
        from_networkx(networkx.Graph([("a", "b")]))


# --- profiles of other projects ---------------------------------------------------------------------------------------

PIPEDREAM = """\
node1 -- Input -- forward_compute_time=21.7, backward_compute_time=0.0, activation_size=999.0, parameter_size=0.000
node2 -- Conv2d(3, 64) -- forward_compute_time=1.5, backward_compute_time=2.5, activation_size=[100.0; 20.0], parameter_size=64.000
node3 -- __getitem__(1) -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=20.0, parameter_size=0.000
node4 -- Linear(1, 2) -- forward_compute_time=0.25, backward_compute_time=0.5, activation_size=8.0, parameter_size=16.000 -- stage_id=1
\tnode1 -- node2
\tnode2 -- node3
\tnode2 -- node4
\tnode3 -- node4
"""  # noqa: E501


def test_pipedream(tmp_path):
    found = import_graph(write(tmp_path, "net.graph.txt", PIPEDREAM), device_kind="v100")
    graph = found.graph
    assert graph.name == "net" and set(graph.op_names) == {
        f"node{i}{end}" for i in (2, 3, 4) for end in ("", ".backward")
    }
    assert edges_of(graph) == [
        ("node2", "node3", 20),
        ("node2", "node3.backward", 20),
        ("node2", "node4", 20),
        ("node2", "node4", 100),
        ("node2", "node4.backward", 20),
        ("node2", "node4.backward", 100),
        ("node3", "node4", 20),
        ("node3", "node4.backward", 20),
        ("node3.backward", "node2.backward", 20),
        ("node4", "node4.backward", 8),
        ("node4.backward", "node2.backward", 120),
        ("node4.backward", "node3.backward", 20),
    ]
    times = {graph.op_names[op]: found.measured["v100"][graph.signatures[graph.op_signature[op]]] for op in range(6)}
    assert times["node2"] == 1.5e6 and times["node4.backward"] == 0.5e6
    assert graph.op_persistent_bytes.sum() == 80
    gradients = {
        graph.op_names[graph.tensor_producer[t]]: int(graph.tensor_bytes[t])
        for t in np.flatnonzero(graph.tensor_result)
    }
    assert gradients == {"node2.backward": 64, "node4.backward": 16}
    assert graph.n_units == 3, "forward and backward of a layer share a device"
    assert "Conv2d_backward" in graph.kinds


PARTITIONING = {
    "maxSizePerFPGA": 100.0,
    "maxFPGAs": 2,
    "maxCPUs": 1,
    "nodes": [
        {
            "id": 7,
            "name": "a",
            "supportedOnFpga": 1,
            "cpuLatency": 10.0,
            "fpgaLatency": 1.0,
            "isBackwardNode": 0,
            "colorClass": 3,
            "size": 50.0,
        },
        {
            "id": 9,
            "name": "b",
            "supportedOnFpga": 0,
            "cpuLatency": 20.0,
            "fpgaLatency": 2.0,
            "isBackwardNode": False,
            "size": 60.0,
        },
        {
            "id": 12,
            "name": "b",
            "supportedOnFpga": True,
            "cpuLatency": 0,
            "fpgaLatency": 0,
            "isBackwardNode": 1,
            "colorClass": 3,
        },
    ],
    "edges": [
        {"sourceId": 7, "destId": 9, "cost": 2.0, "size": 4294967.296},
        {"sourceId": 7, "destId": 12, "cost": 2.0, "size": 4294967.296},
        {"sourceId": 9, "destId": 12, "cost": 1.0, "size": 99},
    ],
}


def test_dnn_partitioning(tmp_path):
    found = import_graph(write(tmp_path, "g.json", PARTITIONING))
    graph = found.graph
    assert graph.op_names == ("a", "b#9", "b#12") and graph.kinds == ("op", "cpu_only_op")
    # costs, not sizes, say how large a tensor is: 2 units of 2147483.648 bytes, rounded up
    assert edges_of(graph) == [("a", "b#12", 4294968), ("a", "b#9", 4294968), ("b#9", "b#12", 2147484)]
    assert graph.n_tensors == 2 and graph.tensor_persistent.all()
    assert graph.op_group.tolist() == [0, -1, 0] and graph.op_phase.tolist() == [0, 0, 1]
    assert graph.op_persistent_bytes.tolist() == [50, 60, 0]
    assert found.measured == {
        "accelerator": {"a": 1e6, "b#9": 2e6, "b#12": 0},
        "cpu": {"a": 1e7, "b#9": 2e7, "b#12": 0},
    }
    assert graph.meta["limits"] == {"maxSizePerFPGA": 100.0, "maxFPGAs": 2, "maxCPUs": 1}


def test_piper(tmp_path):
    choices = [
        {"id": "activation recomp", "timePerSample": 9, "memoryUsageA": 1, "memoryUsageB": 1},
        {"id": "vanilla", "timePerSample": 2.5, "parameterSize": 8, "memoryUsageA": 100.0, "memoryUsageB": 16.0},
    ]
    nodes = [{"id": i, "name": f"node{i + 1}", "TMPCs": {"1": choices, "2": []}} for i in range(2)]
    document = {"nodes": nodes, "edges": [{"sourceId": 0, "destId": 1, "communicationCost": 64.0}]}
    found = import_graph(write(tmp_path, "p.json", document))
    assert edges_of(found.graph) == [("node1#0", "node2#1", 64)]
    assert found.graph.op_persistent_bytes.tolist() == [116, 116]
    assert found.measured == {"accelerator": {"node1#0": 2.5e6, "node2#1": 2.5e6}}
    nodes[0]["name"] = "Embedding"  # not made from a profile: seconds
    assert import_graph(write(tmp_path, "p.json", document)).measured["accelerator"]["node2#1"] == 2.5e9


# --- mistakes ---------------------------------------------------------------------------------------------------------


def plain(change):
    document = json.loads(json.dumps(PLAIN))
    change(document)
    return document


def partitioning(change):
    document = json.loads(json.dumps(PARTITIONING))
    change(document)
    return document


# ruff: noqa: E501  (a mistake and its message on one line)
MISTAKES = {
    "cycle": (plain(lambda d: d["ops"][1].update(inputs=[["z", 0]]) or d["ops"][2].update(outputs=[1])), "cyclic: z -> y -> z"),
    "self": ({"ops": [{"name": "a", "kind": "k", "outputs": [1], "inputs": ["a"]}]}, "cyclic: a -> a"),
    "dangling name": (plain(lambda d: d["ops"][2].update(inputs=["w"])), "op 2: inputs: 0: 'w' is not an op of the file"),
    "dangling output": (plain(lambda d: d["ops"][2].update(inputs=[["y", 2]])), "op 2: inputs: 0: op 'y' has no output 2"),
    "negative output": (plain(lambda d: d["ops"][2].update(inputs=[["y", -1]])), "op 'y' has no output -1"),
    "dangling edge": (plain(lambda d: d["edges"][0].update(to="w")), "edge 0: to: 'w' is not an op of the file"),
    "true is no op": (plain(lambda d: d["ops"][2].update(inputs=[True])), "op 2: inputs: 0: True is not an op"),
    "negative flops": (plain(lambda d: d["ops"][1].update(flops=-1)), "op 1: flops: expected a number from 0 to 2^63, got -1"),
    "huge bytes": (plain(lambda d: d["ops"][0].update(outputs=[2**60])), "op 0: outputs: 0: 1152921504606846976 bytes is more"),
    "huge flops": (plain(lambda d: d["ops"][1].update(flops=1e300)), "op 1: flops: expected a number from 0 to 2^63"),
    "text for a number": (plain(lambda d: d["ops"][1].update(flops="8")), "op 1: flops: expected a number, got text"),
    "number for text": (plain(lambda d: d["ops"][1].update(kind=8)), "op 1: kind: expected text, got a number"),
    "no kind": (plain(lambda d: d["ops"][1].pop("kind")), "op 1: kind: missing"),
    "list for an op": (plain(lambda d: d["ops"].append([])), "op 3: expected an object, got a list"),
    "object for ops": ({"ops": {}}, "ops: expected a list, got an object"),
    "no ops": ({"ops": []}, "ops: the graph has no ops"),
    "unknown key": (plain(lambda d: d["ops"][1].update(flop=1)), "op 1: flop: unknown"),
    "phase": (plain(lambda d: d["ops"][1].update(phase="sideways")), "op 1: phase: 'sideways' is none of"),
    "group": (plain(lambda d: d["ops"][1].update(group=[1])), "op 1: group: expected text or a number"),
    "negative time": (plain(lambda d: d["ops"][1].update(ns={"gpu": -2})), "op 1: ns: gpu: expected a number from 0"),
    "version": ({"format": "simdev-graph", "version": 2, "ops": []}, "expected simdev-graph version 1"),
    "nan": ('{"ops": [{"name": "a", "kind": "k", "flops": NaN}]}', "not JSON (NaN is not JSON)"),
    "infinite": ('{"ops": [{"name": "a", "kind": "k", "flops": 1e999}]}', "not JSON (1e999 is beyond a double)"),
    "long integer": ('{"ops": [{"name": "a", "kind": "k", "flops": 1' + "0" * 9999 + "}]}", "not JSON"),
    "truncated": (json.dumps(PLAIN)[:90], "not JSON"),
    "deeply nested": ('{"ops":' + "[" * 200_000, "not JSON"),
    "other json": ({"hello": 1}, "JSON, but neither ops nor nodes of a known format"),
    "a list": ([1, 2], "JSON, but neither ops nor nodes of a known format"),
    "no utf-8": (b'{"ops": "\xff"}', "not text"),
    "empty": ("", "the file is empty"),
    "blank": (" \n", "the file is empty"),
    "binary": (bytes(range(256)) * 4, "in any known format"),
    "csv number": ("name,kind,flops\na,mm,many\n", "line 2: flops: 'many' is not a number"),
    "csv columns": ("name,kind,flops\na,mm\n", "line 2: wrong number of columns"),
    "csv header": ("name,flops\na,1\n", "line 1: column 'kind' is missing"),
    "csv nan": ("name,kind,flops\na,mm,nan\n", "op 0: flops: expected a number from 0 to 2^63, got nan"),
    "csv cycle": ("name,kind,outputs,inputs\na,k,1,b\nb,k,1,a\n", "cyclic: b -> a -> b"),
    "pipedream dangling": (PIPEDREAM + "\tnode4 -- node5\n", "line 9: 'node5' is not a node of the file"),
    "pipedream twice": (PIPEDREAM + PIPEDREAM.splitlines()[1] + "\n", "line 9: 'node2' is given twice"),
    "pipedream cycle": (PIPEDREAM + "\tnode4 -- node3\n", "cyclic: node3 -> node4 -> node3"),
    "pipedream nan": (PIPEDREAM.replace("=2.5,", "=nan,"), "line 2: backward_compute_time: expected a number from 0"),
    "pipedream negative": (PIPEDREAM.replace("=64.000", "=-64.0"), "line 2: parameter_size: expected a number from 0"),
    "pipedream text": (PIPEDREAM.replace("=2.5,", "=fast,"), "line 2: backward_compute_time: 'fast' is not a number"),
    "pipedream field": (PIPEDREAM.replace("parameter_size=64.000", ""), "line 2: parameter_size: missing"),
    "pipedream rubbish": (PIPEDREAM + "rubbish\n", "line 9: neither 'node -- layer -- times' nor 'node -- node'"),
    "pipedream inputs only": (PIPEDREAM.splitlines()[0], "node: no layers"),
    "dangling id": (partitioning(lambda d: d["edges"][1].update(destId=99)), "edge 1: destId: 99 is not the id of a node"),
    "twice": (partitioning(lambda d: d["nodes"][1].update(id=7)), "node 1: id: 7 is given twice"),
    "negative cost": (partitioning(lambda d: d["edges"][1].update(cost=-1)), "edge 1: cost: expected a number from 0"),
    "latency": (partitioning(lambda d: d["nodes"][1].pop("cpuLatency")), "node 1: cpuLatency: missing"),
    "flag": (partitioning(lambda d: d["nodes"][1].update(supportedOnFpga=2)), "node 1: supportedOnFpga: expected true or false"),
    "loop": (partitioning(lambda d: d["edges"].append({"sourceId": 12, "destId": 7, "cost": 0})), "cyclic: b#12 -> a -> b#12"),
    "piper choice": ({"nodes": [{"id": 0, "TMPCs": {"1": []}}], "edges": []}, "node 0: TMPCs: 1: no choices for degree 1"),
    "piper degree": ({"nodes": [{"id": 0, "TMPCs": {"2": []}}], "edges": []}, "node 0: TMPCs: 1: missing"),
    "undirected": ({"directed": False, "nodes": [{"id": 1}], "links": []}, "directed: an undirected graph has no order"),
    "link": ({"directed": True, "nodes": [{"id": 1}], "links": [{"source": 1, "target": 2}]}, "edge 0: 2 is not a node"),
    "ids": ({"directed": True, "nodes": [{"id": 1}, {"id": 1}], "links": []}, "nodes: two nodes have one id"),
    "list as id": ({"directed": True, "nodes": [{"id": [1]}], "links": []}, "node 0: [1] cannot name a node"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_name_the_file_and_the_place(tmp_path, case):
    content, message = MISTAKES[case]
    with pytest.raises(InvalidInput) as caught:
        import_graph(write(tmp_path, "g.txt", content))
    text = str(caught.value)
    assert message in text and str(tmp_path / "g.txt") in text and "\n" not in text


def test_huge_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("simdev.graphs.importers.reading.MAX_DOCUMENT", 1000)
    with pytest.raises(InvalidInput, match="g.json: larger than 1000 bytes: refused"):
        import_graph(write(tmp_path, "g.json", '{"ops": [' + " " * 1000))


def test_unknown_formats_and_files(tmp_path):
    with pytest.raises(UnknownName, match="unknown format 'onx'; did you mean 'onnx'"):
        import_graph(tmp_path / "x", "onx")
    with pytest.raises(InvalidInput, match="No such file"):
        import_graph(tmp_path / "x")
    with pytest.raises(InvalidInput, match="directory"):
        import_graph(tmp_path)
    assert detect_format(b"name,kind\n", "x") == "csv" and detect_format(PIPEDREAM.encode(), "x") == "pipedream"


def damaged(rng, good, alphabet):
    data = bytearray(good)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(len(data)))
        match rng.integers(3):
            case 0:
                data[at] = alphabet[rng.integers(len(alphabet))]
            case 1:
                del data[at : at + int(rng.integers(1, 20))]
            case 2:
                data[at:at] = bytes(alphabet[i] for i in rng.integers(len(alphabet), size=rng.integers(1, 6)))
    return bytes(data)


PIPER_NODE = {"id": 0, "TMPCs": {"1": [{"id": "vanilla", "timePerSample": 2.5, "memoryUsageA": 1.0}]}, "name": "a"}
GOOD = {
    "json": PLAIN,
    "networkx": {
        "directed": True,
        "nodes": [{"id": 1, "flops": 2, "outputs": [4]}, {"id": 2}, {"id": "c", "group": 3}],
        "links": [{"source": 1, "target": 2, "bytes": 3}, {"source": 1, "target": "c", "outputs": [0]}],
    },
    "dnn-partitioning": PARTITIONING,
    "piper": {
        "nodes": [PIPER_NODE, PIPER_NODE | {"id": 1}],
        "edges": [{"sourceId": 0, "destId": 1, "communicationCost": 4}],
    },
    "pipedream": PIPEDREAM,
    "csv": "name,kind,flops,outputs,inputs,ns:gpu\nx,input,,4096,,\ny,mm,8192,1024;8,x:0,2500\nz,add,,,y:1;x,\n",
}


def outcome(path, format):
    """A graph, or one sentence that names the file, and nothing else."""
    try:
        import_graph(path, format)
        return "graph"
    except InvalidInput as error:
        assert "\n" not in str(error) and str(error).startswith(str(path))
        return "refused"


@pytest.mark.parametrize("format", GOOD)
def test_random_damage_to_a_text_file_is_noticed_or_harmless(tmp_path, format):
    good = GOOD[format] if isinstance(GOOD[format], str) else json.dumps(GOOD[format])
    assert outcome(write(tmp_path, "g.txt", good), format) == "graph"
    rng = np.random.default_rng(7)
    alphabet = b'0123456789.-eE[]{}":,; =\n\tnatrufls_\xff\x00\xc3\xa9'
    found = [outcome(write(tmp_path, "g.txt", damaged(rng, good.encode(), alphabet)), format) for _ in range(300)]
    assert found.count("graph") > 3 and found.count("refused") > 100


@pytest.mark.parametrize("format", ["json", "networkx", "dnn-partitioning", "piper"])
def test_a_wrong_value_anywhere_in_a_json_file_is_noticed_or_harmless(tmp_path, format):
    wrong = [None, True, -1, 0, 2, 2.5, 1e30, 10**30, "", "x", [], [1, 2], {}, {"a": 1}, [[]], "\ud800"]

    def places(value):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            if isinstance(value[key], (dict, list)):
                yield from places(value[key])

    found = []
    for number in range(len(list(places(GOOD[format])))):
        for value in wrong:
            document = json.loads(json.dumps(GOOD[format]))
            holder, key = list(places(document))[number]
            holder[key] = value
            found.append(outcome(write(tmp_path, "g.txt", document), format))
    assert found.count("graph") > 10 and found.count("refused") > 100


# --- published files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    # layers without inputs, forward ms without inputs, backward ms, parameter MB: the sums of the published files
    "name, layers, forward, backward, parameters",
    [
        ("inception_v3", 325, 310.97 - 21.70, 399.77, 108.6),
        ("nasnetalarge", 1250, 416.13 - 7.046, 249.21, 369.0),
        ("resnet50", 176, 201.45 - 18.962, 260.93, 102.2),
        ("vgg16", 40, 251.87 - 17.972, 438.63, 553.4),
        ("gnmt", 45, 33.53, 55.88, 775.1),
    ],
)
def test_pipedream_profiles(data_dir, name, layers, forward, backward, parameters):
    found = import_graph(data_dir / "pipedream" / f"{name}.graph.txt")
    times = found.measured["accelerator"]
    back = sum(ns for signature, ns in times.items() if ".backward: " in signature)
    assert found.graph.n_ops == 2 * layers == len(times)
    assert back / 1e6 == pytest.approx(backward, abs=0.01)
    assert (sum(times.values()) - back) / 1e6 == pytest.approx(forward, abs=0.01)
    assert found.graph.op_persistent_bytes.sum() / 1e6 == pytest.approx(parameters, abs=0.06)


@pytest.mark.parametrize(
    # nodes, edges, time on one accelerator, time on one core over that: the paper's instances
    "path, nodes, edges, accelerator, ratio",
    [
        ("throughput-inputs/LayerGraphs/bert24_inference", 32, 55, 92.406, 10),
        ("throughput-inputs/LayerGraphs/bert24_training", 64, 110, 217.813, 10),
        ("throughput-inputs/LayerGraphs/gnmt_inference", 96, 122, 182.563, 10),
        ("throughput-inputs/LayerGraphs/inceptionv3_inference", 326, 363, 310.969, 10),
        ("throughput-inputs/LayerGraphs/inceptionv3_training", 652, 726, 710.738, 10),
        ("throughput-inputs/LayerGraphs/resnet50_inference", 177, 193, 201.45, 10),
        ("throughput-inputs/LayerGraphs/resnet50_training", 354, 386, 462.381, 10),
        ("throughput-inputs/OperatorGraphs/bert_l-3_inference", 235, 250, 49.3526, 23),
        ("throughput-inputs/OperatorGraphs/bert_l-3_training", 600, 817, 122.987, 23),
        ("throughput-inputs/OperatorGraphs/bert_l-6_inference", 418, 448, 77.4615, 23),
        ("throughput-inputs/OperatorGraphs/bert_l-6_training", 1071, 1462, 192.917, 23),
        ("throughput-inputs/OperatorGraphs/resnet50_inference", 604, 619, 325.132, 23),
        ("latency-inputs/LayerGraphs/bert24_inference", 32, 55, 92.406, 10),
        ("latency-inputs/LayerGraphs/inceptionv3_inference", 326, 363, 310.969, 10),
        ("latency-inputs/LayerGraphs/resnet50_inference", 177, 193, 201.45, 10),
        ("latency-inputs/OperatorGraphs/bert_l-3_inference", 235, 250, 49.3526, 23),
        ("latency-inputs/OperatorGraphs/bert_l-6_inference", 418, 448, 77.4615, 23),
        ("latency-inputs/OperatorGraphs/resnet50_inference", 604, 619, 325.132, 23),
    ],
)
def test_dnn_partitioning_instances(data_dir, path, nodes, edges, accelerator, ratio):
    found = import_graph(data_dir / "dnn-partitioning" / f"{path}.json")
    assert (found.graph.n_ops, found.graph.n_edges) == (nodes, edges)
    on_accelerator, on_cpu = (sum(found.measured[kind].values()) / 1e6 for kind in ("accelerator", "cpu"))
    assert on_accelerator == pytest.approx(accelerator, rel=1e-5)
    assert on_cpu / on_accelerator == pytest.approx(ratio, rel=1e-3)
    slip = 1000 if path.startswith("throughput-inputs/Layer") else 1
    assert found.graph.meta["bytes_per_cost"] == 2**31 / 1000 * slip


def test_the_slip_of_unit_does_not_reach_the_tensors(data_dir):
    slow, fast = (
        import_graph(data_dir / "dnn-partitioning" / f"{folder}-inputs/LayerGraphs/resnet50_inference.json").graph
        for folder in ("latency", "throughput")
    )
    assert np.array_equal(slow.tensor_bytes, fast.tensor_bytes)


@pytest.mark.parametrize(
    "name, nodes, edges, ms",
    [("resnet", 177, 193, 462.381), ("gnmt", 78, 104, 520.453), ("bert32a100", 37, 67, 972.864)],
)
def test_piper_instances(data_dir, name, nodes, edges, ms):
    found = import_graph(data_dir / "piper" / f"{name}.json")
    assert (found.graph.n_ops, found.graph.n_edges) == (nodes, edges)
    assert sum(found.measured["accelerator"].values()) / 1e6 == pytest.approx(ms, rel=1e-5)


# --- ONNX -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def onnx_model():
    """x[N,3,8,8] -> Conv 4 filters 3x3 -> Relu -> Flatten -> Gemm -> y[1,5]."""
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper

    def weights(name, *shape):
        return helper.make_tensor(name, TensorProto.FLOAT, shape, np.zeros(shape, np.float32).tobytes(), raw=True)

    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], name="net/conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], name="net/relu"),
        helper.make_node("Flatten", ["r"], ["f"], name="net/flatten"),
        helper.make_node("Gemm", ["f", "g"], ["y"], name="net/gemm", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 5])],
        [weights("w", 4, 3, 3, 3), weights("b", 4), weights("g", 5, 256)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    onnx.checker.check_model(model)
    return model


def test_onnx(tmp_path, onnx_model):
    graph = import_graph(write(tmp_path, "m.onnx", onnx_model.SerializeToString())).graph
    assert edges_of(graph) == [
        ("b", "net/conv", 16),
        ("g", "net/gemm", 5120),
        ("net/conv", "net/relu", 1024),
        ("net/relu", "net/gemm", 1024),
        ("w", "net/conv", 432),
        ("x", "net/conv", 768),
    ]
    flops = dict(zip(graph.op_names, graph.op_flops.tolist(), strict=True))
    assert flops == {"x": 0, "w": 0, "b": 0, "g": 0, "net/conv": 2 * 256 * 27, "net/relu": 256, "net/gemm": 2 * 5 * 256}
    assert graph.op_persistent_bytes.sum() == 432 + 16 + 5120
    assert [graph.op_names[graph.tensor_producer[t]] for t in np.flatnonzero(graph.tensor_result)] == ["net/gemm"]
    assert graph.tensor_bytes[graph.tensor_result].tolist() == [20]
    assert graph.n_units == 4, "parameters are colocated with their readers"
    signature = graph.signatures[graph.op_signature[graph.op_names.index("net/conv")]]
    assert signature == "Conv(f32[1,3,8,8],f32[4,3,3,3],f32[4],pads=[1,1,1,1])->f32[1,4,8,8]"


def test_the_dynamic_axes_of_an_onnx_model_need_sizes(tmp_path, onnx_model):
    for value in (*onnx_model.graph.input, *onnx_model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "N"
    path = write(tmp_path, "m.onnx", onnx_model.SerializeToString())
    one, many = (import_graph(path, sizes={"N": size}).graph for size in (1, 40))
    assert many.op_flops.sum() == 40 * one.op_flops.sum()
    assert many.tensor_bytes[many.tensor_result].tolist() == [40 * 20]
    with pytest.raises(InvalidInput, match=r"the axes N have no size; give them: simdev import .*--size N="):
        import_graph(path)
    with pytest.raises(UnknownName, match="unknown dynamic axis 'M'"):
        import_graph(path, sizes={"N": 1, "M": 2})


def test_a_published_onnx_model(tmp_path):
    """ResNet-50 has 25.56 million parameters and 4.1 billion multiplications and additions an image."""
    onnx = pytest.importorskip("onnx")
    source = Path(onnx.__file__).parent / "backend/test/data/light/light_resnet50.onnx"
    if not source.is_file():
        pytest.skip("this onnx package comes without its test models")
    graph = import_graph(source).graph
    flops = {kind: int(graph.op_flops[graph.op_kind == number].sum()) for number, kind in enumerate(graph.kinds)}
    assert graph.kinds.count("Conv") == 1 and (graph.op_kind == graph.kinds.index("Conv")).sum() == 53
    assert (flops["Conv"] + flops["Gemm"]) / 2 == pytest.approx(4.09e9, rel=0.01)
    assert graph.op_persistent_bytes.sum() / 4 == pytest.approx(25.56e6, rel=0.005)
    assert graph.meta["values_without_shape"] == []


def test_onnx_is_recognised_without_its_ending(tmp_path, onnx_model):
    assert import_graph(write(tmp_path, "model", onnx_model.SerializeToString())).graph.name == "tiny"


def test_mistakes_in_onnx_models(tmp_path, onnx_model):
    data = onnx_model.SerializeToString()
    onnx_model.graph.node[1].input[0] = "nowhere"
    cyclic = type(onnx_model).FromString(data)
    cyclic.graph.node[0].input[0] = "r"
    for content, message in [
        (data[:200], "not an ONNX model"),
        (b"\x08\x07", "the model has no nodes"),
        (onnx_model.SerializeToString(), "node 'net/relu': reads 'nowhere', which nothing makes"),
        (cyclic.SerializeToString(), "cyclic"),
    ]:
        with pytest.raises(InvalidInput) as caught:
            import_graph(write(tmp_path, "m.onnx", content))
        assert message in str(caught.value) and "m.onnx" in str(caught.value)


def test_random_damage_to_an_onnx_model_is_noticed_or_harmless(tmp_path, onnx_model):
    rng, good = np.random.default_rng(9), onnx_model.SerializeToString()
    for _ in range(200):
        outcome(write(tmp_path, "m.onnx", damaged(rng, good, bytes(range(256)))), "onnx")


def test_fix_units_of_dnn_partitioning(tmp_path):
    node = {"supportedOnFpga": 1, "cpuLatency": 10, "fpgaLatency": 1, "isBackwardNode": 0, "size": 8}
    document = {
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "maxSizePerFPGA": 100,
        "nodes": [{**node, "id": 1}, {**node, "id": 2}],
        "edges": [{"sourceId": 1, "destId": 2, "cost": 0.5, "size": 2**30}],
    }
    path = tmp_path / "slip.json"
    path.write_text(json.dumps(document))
    plain, fixed = import_graph(path).graph, import_graph(path, fix_units=True).graph
    assert plain.tensor_bytes.tolist() == fixed.tensor_bytes.tolist() == [2**30]
    assert plain.meta["bytes_per_cost"] == 2**31 and fixed.meta["bytes_per_cost"] == 2**31 / 1000
    path.write_text('{"ops": []}')
    with pytest.raises(InvalidInput, match="only dnn-partitioning files"):
        import_graph(path, fix_units=True)


def test_a_long_word_does_not_take_for_ever(tmp_path):
    """Each of its characters was tried as the beginning of a field's name: 200,000 squared steps."""
    word = "a" * 2_000_000
    with pytest.raises(InvalidInput, match="not a number"):
        import_graph(write(tmp_path, "g.txt", f"node1 -- Conv2d -- {word} forward_compute_time=x"), "pipedream")


def _kinds(graph, phase):
    return Counter(graph.kinds[kind] for kind in graph.op_kind[graph.op_phase == PHASES.index(phase)])


def test_tape_differentiates_a_linear_layer():
    tape = GradientTape("linear")
    x = tape.input("x", 2, 3)
    weights = tape.weight("f", "weight", 3, 4), tape.weight("f", "bias", 4)
    y = tape.op("addmm", "f", [x], (2, 4), flops=48, weights=weights)
    graph = tape.build(tape.op("cross_entropy", "loss", [y], (1,)))
    assert _kinds(graph, "forward") == {"input": 1, "parameter": 2, "addmm": 1, "cross_entropy": 1}
    # The input needs no gradient: one product for the weight, one sum for the bias.
    assert _kinds(graph, "backward") == {"cross_entropy_backward": 1, "mm": 1, "sum": 1}
    assert _kinds(graph, "update") == {"sgd": 2}
    assert graph.op_persistent_bytes.sum() == 2 * 4 * (3 * 4 + 4)
    product = [op for op in range(graph.n_ops) if graph.kinds[graph.op_kind[op]] == "mm"][0]
    assert graph.op_flops[product] == 48
    assert graph.tensor_bytes[graph.output_ptr[product]] == 4 * 3 * 4


def test_tape_sums_the_gradients_of_a_value_read_twice_and_joins_those_of_views():
    tape = GradientTape("shared")
    x = tape.input("x", 2, 8)
    y = tape.op("addmm", "f", [x], (2, 8), flops=1, weights=(tape.weight("f", "weight", 8, 8),))
    left, right = tape.view(y, 2, 4), tape.view(y, 2, 4)
    z = tape.op("mul", "g", [tape.op("tanh", "g", [left], (2, 4)), tape.op("sigmoid", "g", [right], (2, 4))], (2, 4))
    z = tape.op("add", "g", [z, tape.op("tanh", "h", [z], (2, 4))], (2, 4))
    graph = tape.build(tape.op("mean", "loss", [z], (1,)))
    assert _kinds(graph, "backward") == {
        "div": 1,
        "tanh_backward": 2,
        "add": 1,
        "mul": 2,
        "sigmoid_backward": 1,
        "cat": 1,
        "mm": 1,
    }


def test_update_and_its_gradient_stay_with_the_parameter():
    graph = family_graph("inception", 1)
    for op in np.flatnonzero(graph.op_phase == PHASES.index("update")):
        tensors = graph.inputs[graph.input_ptr[op] : graph.input_ptr[op + 1]]
        assert {graph.op_group[producer] for producer in graph.tensor_producer[tensors]} == {graph.op_group[op]}


@pytest.mark.parametrize("family", FAMILIES)
def test_members_differ_repeat_and_run(family):
    graphs = [family_graph(family, seed) for seed in range(3)]
    assert len({graph.fingerprint for graph in graphs}) == 3
    assert family_graph(family, 2).fingerprint == graphs[2].fingerprint
    for graph in graphs:
        updates = graph.op_phase == PHASES.index("update")
        assert updates.sum() == (graph.op_persistent_bytes > 0).sum()
        problem = Problem.build(graph, load_topology("p100x4"))
        assert simulate_many(problem, np.ones((1, graph.n_ops), np.int32)).step_ns[0] > 1_000_000
        # Backward costs more than forward and no more than three times as much.
        flops = [graph.op_flops[graph.op_phase == phase].sum() for phase in (0, 1)]
        assert 1.5 * flops[0] < flops[1] < 3 * flops[0]


def test_a_member_is_a_workload_id():
    assert load_workload("nasnet-family[seed=5]").fingerprint == family_graph("nasnet", 5).fingerprint
    with pytest.raises(UnknownName, match="nasnet"):
        load_workload("nasnat-family[seed=5]")


def test_split_is_disjoint_complete_and_repeats():
    train, test = family_split("nmt", 32)
    assert (len(train), len(test)) == (26, 6) and sorted(train + test) == list(range(32))
    assert (train, test) == family_split("nmt", 32)
    with pytest.raises(UnknownName, match="inception"):
        family_split("inceptio")
    with pytest.raises(UnknownName, match="inception"):
        family_graph("inceptio", 0)
