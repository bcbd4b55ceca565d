"""Small files of every kind that simdev reads, for the fuzzer to mutate."""

import io
import json
import tarfile
import zipfile
from pathlib import Path

from drawn import chain
from small_board import MACHINE, small_board

from simdev.bench.submission import submit
from simdev.problem.graph_file import save_graph
from simdev.problem.topology import DEVICES_DIR

GRAPH = {
    "name": "mine", "meta": {"seed": 1},
    "ops": [
        {"name": "x", "kind": "input", "outputs": [4096]},
        {"name": "y", "kind": "mm", "flops": 8192, "outputs": [1024, {"bytes": 8, "result": True}], "inputs": ["x"],
         "ns": {"gpu": 2500}, "group": "g", "phase": "backward", "persistent_bytes": 64},
        {"name": "z", "kind": "add", "inputs": [["y", 1], 0], "group": "g"},
    ],
    "edges": [{"from": "x", "to": "z", "bytes": 16}, {"from": "y", "to": "z", "tensor": "t"}],
}  # fmt: skip
GRAPH_CSV = "name,kind,flops,outputs,inputs,ns:gpu,group\nx,input,,4096,,,\ny,mm,8192,1024;8,x:0,2500,g\n"
NETWORKX = {
    "directed": True,
    "multigraph": False,
    "graph": {"name": "n"},
    "nodes": [{"id": 0, "outputs": [8, 16]}, {"id": "b", "kind": "mm", "flops": 3}],
    "links": [{"source": 0, "target": "b", "outputs": [1]}, {"source": 0, "target": "b", "bytes": 4}],
}
TIMES = "forward_compute_time=1.5, backward_compute_time=2.5, activation_size={}, parameter_size=400.0"
PIPEDREAM = (
    f"node1 -- Input0 -- {TIMES.format('10.0')}\nnode2 -- Conv2d(3, 4) -- {TIMES.format('[100.0; 50.0]')}\n"
    f"node3 -- __getitem__(1) -- {TIMES.format('50.0')}\n\tnode1 -- node2\n\tnode2 -- node3\n"
)
PARTITIONING = {
    "maxSizePerFPGA": 1e9,
    "maxFPGAs": 2,
    "maxCPUs": 1,
    "nodes": [
        {
            "id": 0,
            "supportedOnFpga": 1,
            "cpuLatency": 10,
            "fpgaLatency": 1.5,
            "isBackwardNode": 0,
            "colorClass": 1,
            "size": 2048,
            "name": "a",
        },
        {
            "id": 5,
            "supportedOnFpga": 1,
            "cpuLatency": 10,
            "fpgaLatency": 0.5,
            "isBackwardNode": 1,
            "colorClass": 1,
            "size": 12,
        },
    ],
    "edges": [{"sourceId": 0, "destId": 5, "cost": 0.001, "size": 2147.483648}],
}
PIPER = {
    "nodes": [
        {
            "id": number,
            "name": f"layer{number}",
            "TMPCs": {
                "1": [{"id": "vanilla", "timePerSample": 0.02, "memoryUsageA": 10, "memoryUsageB": 5, "syncTimes": {}}]
            },
        }
        for number in (0, 1)
    ],
    "edges": [{"sourceId": 0, "destId": 1, "communicationCost": 100}],
}
BAECHI = {
    "nodes": [
        {
            "name": "v",
            "op": "VariableV2",
            "inputs": [],
            "colocate": ["loc:@v"],
            "compute_us": 1,
            "output_bytes": [64],
            "temp_bytes": 8,
            "persistent_bytes": 64,
        },
        {"name": "init", "op": "Const", "inputs": [], "colocate": [], "compute_us": None},
        {
            "name": "a/mm",
            "op": "MatMul",
            "inputs": ["v:0", "^init"],
            "colocate": [],
            "compute_us": 20.5,
            "output_bytes": [4],
        },  # noqa: E501
    ]
}
COST_GRAPH = """node {
  name: "a" device: "/gpu:0" id: 0
  output_info { size: 4096 alias_input_port: -1 shape { dim { size: 1024 } } dtype: DT_FLOAT }
  temporary_memory_size: 8 persistent_memory_size: 16 compute_cost: 12
}
node { name: "b_1" id: 1 input_info { preceding_node: 0 preceding_port: 0 } compute_cost: 3 control_input: 0 }
"""
EXECUTION_TRACE = {
    "schema": "1.0.1",
    "nodes": [
        {"name": "process", "id": 1, "parent": 1, "inputs": [], "input_types": [], "outputs": [], "output_types": []},
        {
            "name": "aten::mm",
            "id": 2,
            "parent": 1,
            "inputs": [[3, 4, 0, 16, 4, "cpu"], [[7, 8, 0, 4, 4, "cpu"]]],
            "input_types": ["Tensor(float)", "GenericList[Tensor(float)]"],
            "outputs": [[5, 6, 0, 16, 4, "cpu"]],
            "output_types": ["Tensor(float)"],
        },
        {
            "name": "aten::add_",
            "id": 4,
            "ctrl_deps": 1,
            "inputs": {"values": [[5, 6, 0, 16, 4, "cpu"]], "types": ["Tensor(float)"]},  # noqa: E501
            "outputs": {"values": [[5, 6, 0, 16, 4, "cpu"]], "types": ["Tensor(float)"]},
        },
    ],
}
CHAKRA = [
    {
        "id": "1",
        "name": "aten::mm",
        "type": "COMP_NODE",
        "durationMicros": "12",
        "outputs": {"shapes": "[[4, 4]]", "types": "['Tensor(float)']"},
        "attr": [{"name": "is_cpu_op", "boolVal": False}],
    },  # noqa: E501
    {
        "id": "2",
        "name": "sum",
        "type": "COMM_COLL_NODE",
        "dataDeps": ["1"],
        "ctrlDeps": [],
        "durationMicros": 3,
        "attr": [{"name": "comm_type", "int64Val": "0"}],
    },
]
KINETO = {
    "deviceProperties": [{"id": 0, "name": "V100"}], "distributedInfo": {"rank": 0, "world_size": 1},
    "traceEvents": [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "pid": 1, "tid": 1, "ts": 1000, "dur": 900},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1010, "dur": 50,
         "args": {"External id": 7, "Input Dims": [[2, 2], [2, 2]], "Input type": ["float", "float"]}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 1020, "dur": 5.5,
         "args": {"correlation": 11}},
        {"ph": "X", "cat": "kernel", "name": "sgemm", "pid": 0, "tid": "stream 7", "ts": 1040.25, "dur": 100,
         "args": {"device": 0, "stream": 7, "correlation": 11, "bytes": 64}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "pid": 1, "tid": 1, "ts": 1100, "dur": 60,
         "args": {"correlation": 12}},
        {"ph": "i", "name": "[memory]", "ts": 1050, "args": {"Device Type": 1, "Device Id": 0, "Addr": 4096, "Bytes": 512,  # noqa: E501
         "Total Allocated": 512, "Total Reserved": 2048, "Ev Idx": 1}},
    ],
}  # fmt: skip
MEASURED_CSV = "signature,device_kind,ns\nmm,p100-pcie,2500\nadd,p100-pcie,10.5\n"
RANGES = "ranges = [{ from_bytes = 0, latency_us = 2.0, gb_per_s = 5.0 }, { from_bytes = 65536, latency_us = 9, gb_per_s = 9 }]"  # noqa: E501
TOPOLOGY = f'{MACHINE}duplex = "half"\n{RANGES}\n[[device]]\nname = "cpu"\nkind = "k"\nhost = true\n' + (
    '[[link]]\nends = [["a", "s"], ["b", "s"], ["cpu", "s"]]\ngb_per_s = 1\nlatency_us = 2\n'
)
TOPOLOGY = TOPOLOGY.replace('name = "mine"', 'name = "mine"\nswitches = ["s"]\ndescription = "two"')
DEVICE = """format = 1
name = "v"
launch_us = 2.7
[datasheet]
peak_tflops = 14.0
memory_gb_per_s = 900
units = 80
[class.gemm]
efficiency = 0.83
rows = 5168
error_mean = 0.04
source = "x"
[dispatch]
addmm = 31.5
[table]
"gemm(1,64,64,64) f32" = 12345
"""
POLICY = {"format": 1, "placer": "gdp", "version": 1, "settings": {"groups": 8}, "sha256": "0" * 64, "trained_on": []}


def onnx_model() -> bytes:
    """A model of two nodes; empty without the package onnx, which reads it."""
    try:
        from onnx import TensorProto, helper
    except ImportError:
        return b""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    w = helper.make_tensor("w", TensorProto.FLOAT, [4, 2], [0.5] * 8)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], "m"), helper.make_node("Relu", ["h"], ["y"], "r")]
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y], [w])).SerializeToString()


def chakra_protobuf() -> bytes:
    """The nodes of :data:`CHAKRA` as an ``.et`` file."""

    def field(number: int, value) -> bytes:
        if isinstance(value, int):
            return bytes([number << 3]) + varint(value)
        return bytes([number << 3 | 2]) + varint(len(value)) + value

    def varint(value: int) -> bytes:
        return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)

    nodes = [
        field(1, 1)
        + field(2, b"aten::mm")
        + field(3, 4)
        + field(7, 12)
        + field(9, field(2, b"[[4, 4]]") + field(3, b"['Tensor(float)']")),  # noqa: E501
        field(1, 2)
        + field(2, b"sum")
        + field(3, 7)
        + field(5, b"\x01")
        + field(7, 3)
        + field(10, field(1, b"comm_type") + field(9, 0)),  # noqa: E501
    ]
    messages = [field(1, b"0.0.4"), *nodes]
    return b"".join(varint(len(message)) + message for message in messages)


def tar_of(name: str, data: bytes) -> bytes:
    """A tar archive of one file."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def board_files(folder: Path) -> dict[str, bytes]:
    """The files of a small result folder, by name, and ``board.zip``, its submission."""
    small_board(folder)
    submit(folder, folder / "board.zip")
    names = ["results.csv", "curves.csv", "journal.jsonl", "placements.jsonl", "board.zip"]
    files = {name: (folder / name).read_bytes() for name in names}
    submit(folder, folder / "release.zip", release=True)
    files["datapackage.json"] = members((folder / "release.zip").read_bytes())["datapackage.json"]
    lines = [json.loads(line) for line in files["journal.jsonl"].splitlines()]
    for line in lines:
        del line["sum"]  # older journals have no checksum, which would find every mutation
    return files | {"journal.jsonl": b"".join(json_bytes(line) + b"\n" for line in lines)}


def graph_npz(folder: Path) -> bytes:
    save_graph(chain(1000, 2000, 0).build(), folder / "graph.npz")
    return (folder / "graph.npz").read_bytes()


def trees_npz() -> bytes:
    return (DEVICES_DIR / "calibrated" / "v100.npz").read_bytes()


def json_bytes(value) -> bytes:
    return json.dumps(value).encode()


def members(data: bytes) -> dict[str, bytes]:
    """The files of a zip archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


CONFIGURATION = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 1000,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "max_position_embeddings": 256,
}  # fmt: skip


def plans_csv(folder: Path) -> bytes:
    """A table of two runs of planners, one of them with a plan."""
    from simdev.bench.plan_rows import PlanRow, choices_of, write_plan_rows
    from simdev.parallel.mesh import Mesh
    from simdev.planners import Choice

    plan = json.dumps(Choice(Mesh({"dp_shard": 8}), 2).to_json(), sort_keys=True)
    key = ("llama3-8b", "dgx-a100", 512, "eager", choices_of("llama3-8b"))
    figures = {"step_ns": 9, "bound_ns": 7, "peak_bytes": 5, "evaluations": 3, "program": "0" * 16}
    rows = [
        PlanRow(*key, "fsdp", 1, "{}", 12, 0, "ok", plan=plan, **figures),
        PlanRow(*key, "ddp", 1, '{"a": [1]}', 12, 0, "skipped", error="no plan fits", evaluations=0),
    ]
    write_plan_rows(folder, rows)
    return (folder / "plans.csv").read_bytes()


def plan_file(path: Path) -> bytes:
    """A plan as ``simdev plan -o`` writes it; empty without PyTorch, which its job needs."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return b""
    from simdev.parallel.mesh import Mesh
    from simdev.planners import Choice
    from simdev.planners.plan_file import make_job

    Choice(Mesh({"dp_shard": 8}), 2).save(path, make_job("llama3-8b", "dgx-a100", 64))
    return path.read_bytes()
