"""Calibration: manifests, tables, links, kernels, traces and whole steps of measured data."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest

from simdev.calibrate.build import datasheets, save_calibration
from simdev.calibrate.dispatch import dispatch_ns
from simdev.calibrate.given_steps import fit_steps, left_out_ns, read_steps
from simdev.calibrate.imported import against_measured, operators, played_ns, trace_graph
from simdev.calibrate.kernel_tables import fitted, read_kernel_tables
from simdev.calibrate.links import LinkFit, fit, fit_table, ranges_toml, read_links
from simdev.calibrate.manifest import held_out, load_manifest, role_of, sha256_of
from simdev.calibrate.matrix_units import predicted_s, with_matrix_units
from simdev.calibrate.observations import Observations
from simdev.calibrate.traces import read_trace
from simdev.cli import main as cli
from simdev.errors import InvalidInput
from simdev.problem.costs import calibration_of, datasheet_of, transfer_durations
from simdev.problem.graph import GraphBuilder
from simdev.problem.graph_file import save_graph
from simdev.problem.opcost.device import Calibration, ClassFit, load_calibration
from simdev.problem.opcost.parts import KernelPart
from simdev.problem.opcost.physics import baseline_s
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.problem.topology import Device, Topology, load_kinds, load_topology, parse_topology
from simdev.sim import simulate
from simdev.studies.fidelity import resnet50
from simdev.studies.fidelity.kernels import kernel_cases, power_cases
from simdev.studies.fidelity.label_graph import graph_of, time_graph
from simdev.studies.fidelity.memory import graph_peak, replay_memory
from simdev.studies.fidelity.tables import teacher_of
from simdev.studies.fidelity.triosim import convolution_cases, read_operators
from simdev.studies.fidelity.triosim import predicted_s as table_s

# calibration: manifests, tables, traces and whole steps of measured data


# the split of measured files into fitting and judging


def test_a_fifth_of_the_keys_is_held_out():
    share = sum(held_out(f"mm(f32[{i},{i}])") for i in range(4000)) / 4000
    assert 0.18 < share < 0.22


def test_the_shipped_manifest_judges_by_whole_models_and_ranks():
    manifest = load_manifest()
    assert len(manifest) > 100
    assert {entry.role for name, entry in manifest.items() if name.startswith(("neusight/labels", "param"))} == {
        "validate"
    }


def test_unlisted_and_changed_files_validate(tmp_path):
    (tmp_path / "a.txt").write_text("1")
    (tmp_path / "b.txt").write_text("2")
    sums = {name: sha256_of(tmp_path / name) for name in ("a.txt", "b.txt")}
    listed = [f"a.txt,{sums['a.txt']},calibrate,x@1", f"b.txt,{sums['b.txt']},split,y@2"]
    (tmp_path / "m.csv").write_text("\n".join(["file,sha256,role,source", *listed, ""]))
    manifest = load_manifest(tmp_path / "m.csv")
    assert role_of(tmp_path / "a.txt", tmp_path, manifest) == "calibrate"
    assert role_of(tmp_path / "b.txt", tmp_path, manifest) == "split"
    (tmp_path / "b.txt").write_text("3")
    (tmp_path / "c.txt").write_text("2")
    assert role_of(tmp_path / "b.txt", tmp_path, manifest) == "validate"
    assert role_of(tmp_path / "c.txt", tmp_path, manifest) == "validate"


@pytest.mark.parametrize("text, field", [("a,b\n", "line 1"), ("file,sha256,role,source\nf,0,fit,s\n", "line 2")])
def test_a_wrong_manifest_is_refused(tmp_path, text, field):
    (tmp_path / "m.csv").write_text(text)
    with pytest.raises(InvalidInput) as error:
        load_manifest(tmp_path / "m.csv")
    assert error.value.field == field


# trioSim's operator tables


TENSORS = """Index,TensorID,TensorShape,TensorNumElement,TensorEachByte,TensorType,TensorStorgeid,gpuid
0,4,"[8, 3, 32, 32]",24576,4,input,5,0
1,6,"[16, 3, 3, 3]",432,4,weight,7,0
2,13,"[8, 16, 16, 16]",32768,4,output,14,0
"""
HEADER = "OperatorName,Operator_input,Operator_output,Operator_cudatime,Operator_cudatimenooverlap,OutputSize\n"
ROWS = """aten::conv2d,[4; 6],[13],12,10,[32768]
aten::view,[4],[4],1,1,[1]
aten::batch_norm,[13; 6],[13],20,20,[32768]
autograd::engine::evaluate_function: ConvolutionBackward0,[13; 4; 6],[9; 6; 9],99,30,[0; 432; 0]
"""


def write(folder, rows=ROWS):
    (folder / "h100_bs128_resnet50_tensors.csv").write_text(TENSORS)
    path = folder / "h100_bs128_resnet50.csv"
    path.write_text(HEADER + rows)
    return path


def test_operators_have_the_signatures_of_captured_graphs(tmp_path):
    forward, norm, backward = read_operators(write(tmp_path))
    text = "convolution(f32[8,3,32,32],f32[16,3,3,3],stride=[2,2],groups=1)->f32[8,16,16,16]"
    assert forward.signature == text and forward.flops == 2 * 32768 * 27
    assert forward.measured_s == pytest.approx(10e-6)  # without overlap
    assert norm.signature == "native_batch_norm" and norm.flops == 0
    assert "output_mask=[False,True,False]" in backward.signature and backward.flops == forward.flops
    assert (table_s([forward, norm, backward]) > 0).all()


def test_what_was_used_for_the_device_does_not_count(tmp_path):
    write(tmp_path)
    cases = {case["group"]: case for case in convolution_cases(tmp_path)}
    assert len(cases) == 3 and not cases["H100, convolutions (TrioSim)"]["left_out"]
    assert cases["H100, batch norm (TrioSim)"]["left_out"]


def test_damaged_tables_are_refused(tmp_path):
    with pytest.raises(InvalidInput):
        read_operators(write(tmp_path, "aten::conv2d,[4; 77],[13],12,10,[32768]\n"))
    path = write(tmp_path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InvalidInput):
        read_operators(path)


# kernels on a board with a smaller power limit


@pytest.mark.parametrize(
    "name, dims", [("gemm", (1, 2048, 8192, 2048)), ("attention", (2, 32, 32, 4096, 4096, 128, 128, 1))]
)
def test_less_power_slows_kernels_on_matrix_units(name, dims):
    kinds, part = load_kinds(), [KernelPart(name, dims, "bf16")]
    ns = [
        calibration_of(kind).durations(part, datasheet_of(kind), kind.launch_ns)[0][0]
        for kind in (kinds[name] for name in ("a100-sxm4-40gb", "a100-pcie-40gb"))
    ]
    assert 1.05 < ns[1] / ns[0] < (400 / 250) ** (1 / 3) + 1e-6


def test_a_chip_under_two_power_limits_judges_the_rule():
    shapes, slower = [(1, 4096 * more, 8192, 8192) for more in (1, 2, 3)], (1200 / 1000) ** (1 / 3)

    def table(device, seconds):
        return Observations(device, "gemm", "bf16", np.array([*shapes, (1, 64, 64, 64)]), np.array(seconds), "x")

    # the last shape is short and the first one an outlier: neither counts
    high, low = [0.5e-3, 1e-3, 2e-3, 1e-6], [0.9e-3, 1e-3 * slower, 2e-3 * slower, 9e-6]
    plain, ruled = power_cases([table("NVIDIA_B200", low), table("NVIDIA_GB200", high)])
    assert plain["case"] == "x: 3 shapes" and plain["group"].startswith("products bf16, b200 from gb200")
    assert plain["predicted_s"] / plain["measured_s"] == pytest.approx(1 / slower)
    assert ruled["predicted_s"] / ruled["measured_s"] == pytest.approx(1)
    assert power_cases([table("NVIDIA_B200", low), table("NVIDIA_H200", high)]) == []


# peak memory from a trace's allocations


def trace_of(path, rows, totals=True):
    """Rows of (address, bytes); totals start at 10,240."""
    events, total = [dict(ph="X", cat="cpu_op", name="op", ts=0, dur=1, pid=1, tid=1)], 10240
    for time, (address, size) in enumerate(rows):
        total += size
        args = {"Device Type": 1, "Device Id": 0, "Bytes": size} | ({"Addr": address} if address else {})
        args |= {"Total Allocated": total, "Total Reserved": 1 << 20} if totals else {}
        events.append(dict(ph="i", name="[memory]", ts=time, args=args))
    path.write_text(json.dumps({"traceEvents": events}))
    return read_trace(path)


def test_the_peak_is_before_and_what_lives_at_once(tmp_path):
    rows = [(1, 1024), (2, 2048), (1, -1024), (3, 512), (2, -2048), (1, 4096), (3, -512)]
    (peak,) = replay_memory(trace_of(tmp_path / "t.json", rows))
    assert (peak.before_bytes, peak.unknown, peak.events) == (10240, 0, 7)
    assert peak.measured_bytes == peak.predicted_bytes == 10240 + 512 + 4096


def test_blocks_from_before_the_trace_are_freed_in_it(tmp_path):
    (peak,) = replay_memory(trace_of(tmp_path / "t.json", [(9, -4096), (1, 1024), (1, -1024)]))
    assert peak.unknown == 1
    # the recorder's first total is after the release: nothing recorded shows what was there before it
    assert peak.measured_bytes == 10240 - 4096 + 1024 and peak.predicted_bytes == 10240


def test_without_addresses_blocks_match_by_size_and_without_totals_nothing_is_measured(tmp_path):
    rows = [(0, 1024), (0, 1024), (0, -1024), (0, 2048), (0, -2048), (0, -1024)]
    (peak,) = replay_memory(trace_of(tmp_path / "t.json", rows, totals=False))
    assert (peak.measured_bytes, peak.predicted_bytes, peak.unknown) == (-1, 3072, 0)


@pytest.mark.slow
def test_the_public_trace(data_dir):
    (peak,) = replay_memory(read_trace(data_dir / "hta" / "df_index_resolver.json.gz"))
    assert peak.measured_bytes == 6629508096
    assert abs(peak.predicted_bytes / peak.measured_bytes - 1) < 0.02


def test_the_peak_of_a_graph_is_without_what_is_always_there():
    builder = GraphBuilder("g")
    w = builder.op("w", "parameter", persistent_bytes=5000)
    first = builder.op("a", "mm", outputs=[1024], workspace_bytes=512)
    second = builder.op("b", "mm", inputs=builder.outputs(first), outputs=[2048])
    builder.control(w, first)
    builder.op("c", "mm", inputs=builder.outputs(second), outputs=[512])
    assert graph_peak(builder.build()) == 1024 + 2048


def test_resnet50_takes_the_memory_that_traces_show():
    assert abs(graph_peak(resnet50.load()) / 2791636480 - 1) < 0.05  # the public ResNet-50 trace, replayed


@pytest.mark.slow
def test_the_shipped_graph_is_what_is_captured():
    pytest.importorskip("torch")
    from simdev.graphs.capture import capture

    assert capture(resnet50.make_step(), name="x").fingerprint == resnet50.load().fingerprint


# traces as graphs


def x(cat, name, ts, dur, tid=1, **args):
    return dict(ph="X", cat=cat, name=name, ts=ts, dur=dur, pid=0 if cat == "kernel" else 1, tid=tid, args=args)


def small(path):
    """Two steps of two kernels on two streams, then a synchronising call."""
    events = []
    for step in range(2):
        at, number = 1000 * step, 10 * step
        events += [
            x("user_annotation", f"ProfilerStep#{step}", at, 900),
            x("cpu_op", "aten::linear", at + 10, 100),
            x("cpu_op", "aten::addmm", at + 20, 60),
            x("cuda_runtime", "cudaLaunchKernel", at + 30, 10, correlation=number + 1),
            x("kernel", "gemm", at + 50, 100, tid=7, device=0, stream=7, correlation=number + 1),
            x("cuda_runtime", "cudaLaunchKernel", at + 120, 10, correlation=number + 2),
            x("kernel", "copy", at + 140, 50, tid=20, device=0, stream=20, correlation=number + 2),
            x("cuda_runtime", "cudaDeviceSynchronize", at + 150, 60, correlation=number + 3),
        ]
    path.write_text(json.dumps({"traceEvents": events}))
    return read_trace(path)


def test_work_takes_the_kind_of_its_innermost_operator(tmp_path):
    trace = small(tmp_path / "t.json")
    names = [trace.names[trace.ops.name[row]] if row >= 0 else None for row in operators(trace)[:3]]
    assert names == ["aten::addmm", "ProfilerStep#0", "ProfilerStep#0"]


def test_a_step_becomes_a_graph_with_times(tmp_path):
    found = trace_graph(small(tmp_path / "t.json"), 0, "v100")
    graph = found.graph
    assert [graph.kinds[k] for k in graph.op_kind] == ["host", "addmm", "host", "kernel", "host", "host"]
    edges = set(zip(graph.edge_source.tolist(), graph.consumers.tolist(), strict=True))
    assert edges == {(0, 1), (0, 2), (2, 3), (2, 4), (1, 4), (3, 4), (4, 5)}
    times = [found.measured["v100"].get(graph.signatures[s]) for s in graph.op_signature]
    assert times == [None, 100_000, None, 50_000, None, None]
    # 30 before and 10 in the first call, 80 and 10, 20 before and 20 after the end of the copy at 190, 690 to the end
    host = [found.measured["host"].get(graph.signatures[s]) for s in graph.op_signature]
    assert host == [40_000, None, 90_000, None, 40_000, 690_000]


def test_a_step_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="has 2 steps"):
        trace_graph(small(tmp_path / "t.json"), 5)


def test_the_graph_takes_as_long_as_the_step(tmp_path):
    trace = small(tmp_path / "t.json")
    found = trace_graph(trace, 1)
    assert played_ns(found) == pytest.approx(900_000, rel=0.02)
    assert against_measured(trace, found) == "step 1 took 0.90 ms; its graph takes 0.91 ms"  # within 2 %: no reason


def test_work_that_ends_after_its_step_is_named(tmp_path):
    events = []
    for step in range(2):
        at = 1000 * step
        events += [
            x("user_annotation", f"ProfilerStep#{step}", at, 900),
            x("cuda_runtime", "cudaLaunchKernel", at + 800, 10, correlation=step + 1),
            x("kernel", "gemm", at + 820, 500, tid=7, device=0, stream=7, correlation=step + 1),
        ]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = read_trace(path)
    said = against_measured(trace, trace_graph(trace, 0))
    assert said == "step 0 took 0.90 ms; its graph takes 1.31 ms: its own GPU work ended 0.42 ms after the step"


# factors of a device file from measured whole steps


KIND = "a100-sxm4-80gb"


def written(folder, measured_ms):
    """Graphs of products in bf16 and a file that says how long their steps took."""
    lines = ["graph,precision,step_ms"]
    for number, ms in enumerate(measured_ms):
        builder, size = GraphBuilder(f"g{number}"), 4096 * (number + 1)
        text = f"mm(bf16[{size},4096],bf16[4096,4096])->bf16[{size},4096]"
        moved = dict(bytes_read=2 * 4096 * (size + 4096), bytes_written=2 * size * 4096)
        builder.op("product", "mm", signature=text, flops=2 * size * 4096**2, **moved)
        save_graph(builder.build(), folder / f"g{number}.npz")
        lines.append(f"{folder / f'g{number}.npz'},bf16,{ms}")
    path = folder / "steps.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def alone_ms(folder, count):
    _, steps = fit_steps(read_steps(written(folder, [0.7 * (n + 1) for n in range(count)])), KIND)
    return [step.alone_ns / 1e6 for step in steps]


def test_the_factor_is_the_median_of_what_the_steps_ask_for(tmp_path):
    times = alone_ms(tmp_path, 3)
    path = written(tmp_path, [ms * slower for ms, slower in zip(times, (1.1, 1.2, 1.5), strict=True)])
    calibration, steps = fit_steps(read_steps(path), KIND)
    assert calibration.steps["bf16"] == pytest.approx(1.2, rel=0.01)  # launches are not multiplied
    left_out = np.array(left_out_ns(steps)) / [step.step_ns for step in steps]
    assert left_out == pytest.approx([1.35 / 1.1, 1.3 / 1.2, 1.15 / 1.5], rel=0.01)
    assert calibration.classes["product bf16"] is load_calibration("a100").classes["product bf16"]


def test_a_single_step_has_no_other_to_be_judged_by(tmp_path):
    _, steps = fit_steps(read_steps(written(tmp_path, [0.7])), KIND)
    assert np.isnan(left_out_ns(steps)).all()


@pytest.mark.parametrize(
    "change, message",
    [
        (("bf16,0.7", "f8,0.7"), "no kernel of the graph is costed in f8"),
        (("bf16,0.7", "bf16,700"), "would need a factor of"),
        (("bf16,0.7", "bf16,-1"), "line 2, step_ms"),
        (("bf16,0.7", "b16,0.7"), "line 2.*precision"),
        (("step_ms", "ms"), "step_ms"),
    ],
)
def test_steps_that_say_nothing_are_refused(tmp_path, change, message):
    path = written(tmp_path, [0.7])
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(InvalidInput, match=message):
        fit_steps(read_steps(path), KIND)


def test_the_command_writes_a_device_file(tmp_path, monkeypatch, capsys):
    path, out = written(tmp_path, [0.7, 1.4]), tmp_path / "mine.toml"

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["simdev", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        return code, capsys.readouterr()

    code, said = run("calibrate", "--steps", path, "--kind", KIND, "-o", out)
    assert code == 0 and "factor of the others" in said.out
    assert load_calibration(str(out)).steps["bf16"] > 0
    code, said = run("calibrate", "--steps", path)
    assert code == 2 and "--steps needs --kind" in said.err


# ``calibrated = "auto"`` is one path: the fidelity report, ``simulate`` and the bench cost a board alike


def test_a_board_without_a_file_is_costed_alike_by_the_report_and_for_users(tmp_path):
    parts = [
        (KernelPart("linear", (1, 4096, 1024, 4096)), 3),
        (KernelPart("bmm", (64, 512, 512, 64)), 3),
        (KernelPart("softmax", (32768, 512)), 3),
        (KernelPart("vector", (1 << 26, 1 << 25)), 3),
        (KernelPart("gemm", (1, 4096, 4096, 4096), "bf16"), 2),
    ]
    graph, (known,) = graph_of("a model", parts), [sheet for sheet in datasheets().values() if sheet.model == "l4"]
    save_calibration(teacher_of(known), tmp_path / "stand-in.toml")
    reported_s = time_graph(graph, known, str(tmp_path / "stand-in.toml")).seconds
    kind = replace(load_kinds()["l4"], memory_bytes=1 << 50)
    assert kind.calibrated == "auto"
    problem = Problem.build(graph, Topology("one board", (Device("board0", kind),)))
    users_s = simulate(problem, Placement(np.zeros(graph.n_ops, np.int64))).step_ns / 1e9
    assert users_s == pytest.approx(reported_s, rel=1e-5)  # files round efficiencies to six digits


# link tables and their fits; links whose figures depend on the size


TWO = {
    "name": "two",
    "kind": {"g": {"memory_gib": 1, "peak_tflops": {"f32": 1}, "memory_gb_per_s": 1}},
    "switches": ["s"],
    "device": [{"names": ["a", "b"], "kind": "g"}],
}
RANGES = [
    {"from_bytes": 0, "latency_us": 2, "gb_per_s": 1},
    {"from_bytes": 1000, "latency_us": -0.5, "gb_per_s": 2},
]


def test_one_line_is_found_exactly():
    size = np.arange(1, 101) * 1000
    assert fit(size, 5000 + size / 2) == ((0, pytest.approx(5000), pytest.approx(2e9)),)


def test_a_change_of_protocol_is_found():
    size = np.arange(1, 201) * 1000
    ns = np.where(size <= 60_000, 3000 + size, 20_000 + size / 10) * (1 + 0.001 * np.sin(size))
    ranges = fit(size, ns)
    assert [begin for begin, _, _ in ranges] == [0, 60_500]
    assert [rate for _, _, rate in ranges] == pytest.approx([1e9, 1e10], rel=0.02)
    link = LinkFit("x", ranges)
    assert np.abs(link.ns(size) / ns - 1).max() < 0.01


def test_times_in_whole_microseconds_may_look_flat():
    size = np.arange(1, 101) * 100
    ((_, latency, rate),) = fit(size, np.full(100, 7000.0))
    assert latency == pytest.approx(7000, rel=1e-3) and rate > 1e12


def test_three_kinds_of_files(tmp_path):
    sizes = [2**k for k in range(10, 24)]
    head = "time_stats.send_recv.median,size,num_workers,devices_per_node,collective\n"
    rows = "".join(f"{0.01 + size / 1e8},{size},2,{per},send_recv\n" for size in sizes for per in (1, 2))
    (tmp_path / "v.csv.gz").write_bytes(gzip.compress((head + rows + "x,1,2,1,send_recv\n").encode()))
    one, two = read_links(tmp_path / "v.csv.gz")
    assert (one.per_node, two.per_node, one.skipped, two.operation) == (1, 2, 1, "send_recv")
    assert one.ns[0] == pytest.approx(1e4 + 1024 / 1e2)
    rows = "".join(f"{size},1,float,{size * 2},1,{size},1\n" for size in sizes)
    (tmp_path / "x_8gpu.txt").write_text("size(B),count,type,time(ns),busbw(GB/s),time(ns),busbw(GB/s)\n" + rows)
    (table,) = read_links(tmp_path / "x_8gpu.txt")
    assert (table.workers, table.operation, table.ns[0]) == (8, "all_reduce", 2048)
    rows = "".join(f"{size} {size // 4} float sum -1 {size / 1e3:.2f} 1.0 1.0 0\n" for size in sizes)
    text = "#  Rank  0\n#  Rank  1\n#       size         count      type   redop\n" + rows
    (tmp_path / "n.txt").write_text(text)
    (table,) = read_links(tmp_path / "n.txt")
    assert table.workers == 2 and table.ns[-1] == pytest.approx(sizes[-1], rel=1e-3)


@pytest.mark.parametrize("text", ["", "hello", "size(B),count\n5,5\n"])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "t.txt").write_text(text)
    with pytest.raises(InvalidInput):
        read_links(tmp_path / "t.txt")


def test_a_link_with_ranges_times_each_size_by_its_own():
    links = [
        {"ends": ["a", "s"], "gb_per_s": 1, "latency_us": 1, "ranges": RANGES},
        {"ends": ["s", "b"], "gb_per_s": 1.5, "latency_us": 1},
    ]
    topology = parse_topology(TWO | {"link": links}, source="t")
    ns, pair = transfer_durations(np.array([0, 500, 3000]), topology)
    # 2 + 1 us at 1 GB/s; from 1000 bytes -0.5 + 1 us at the smaller of 2 and 1.5 GB/s
    assert ns[pair[0, 1]].tolist() == [3000, 3500, 2500]
    assert ns[pair[1, 0]].tolist() == [3000, 3500, 2500]


def test_equal_routes_share_a_class():
    topology = load_topology("h100x8-nvswitch")
    _, pair = transfer_durations(np.array([1]), topology)
    gpus = pair[1:, 1:][~np.eye(8, dtype=bool)]
    assert len(set(gpus.tolist())) == 1


@pytest.mark.parametrize(
    "ranges, words",
    [
        ([RANGES[1]], "begin at 0"),
        ([RANGES[0], RANGES[0]], "rise"),
        ([RANGES[0] | {"gb_per_s": 0}], "positive"),
        ([RANGES[0] | {"x": 0}], "unknown key"),
    ],
)
def test_wrong_ranges_are_refused(ranges, words):
    link = {"ends": ["a", "b"], "gb_per_s": 1, "latency_us": 1, "ranges": ranges}
    with pytest.raises(InvalidInput, match=words):
        parse_topology(TWO | {"switches": [], "link": [link]}, source="t")


def test_ranges_are_written_as_a_topology_reads_them():
    import tomllib

    text = ranges_toml(LinkFit("x", ((0, 4000.0, 1e9), (100, -200.0, 2e9))), hops=2)
    rows = tomllib.loads(text)["ranges"]
    assert rows[1] == {"from_bytes": 100, "latency_us": -0.1, "gb_per_s": 2.0} and rows[0]["latency_us"] == 2.0


def test_the_public_tables_are_predicted_on_sizes_not_fitted_to(data_dir):
    """Send/recv tables and nccl-tests tables; vidur's all-reduce tables step between algorithms and are missed."""
    for path in sorted((data_dir / "links").glob("*/*_dgx.send_recv*")) + sorted(
        (data_dir / "links").glob("*/*gpu.txt")
    ):
        for table in read_links(path):
            assert fit_table(table).error < max(0.03, 1.3 * table.noise), table.name


# readers of kernel tables on matrix units, and the fits to them: small tables made by a known law


H100 = "NVIDIA_H100_80GB_HBM3"
VIDUR = "num_tokens,n_embd,n_expanded_embd,n_head,n_kv_head,num_tensor_parallel_workers,use_gated_mlp"


def vidur_table(path, rows):
    """Rows of ``(tokens, split, ms of attn_pre_proj, ms of add)`` of a model of width 1,024."""
    lines = [f"{VIDUR},time_stats.attn_pre_proj.median,time_stats.add.median"]
    lines += [f"{tokens},1024,4096,16,4,{split},True,{float(one)!r},{float(two)!r}" for tokens, split, one, two in rows]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))


def test_vidur_rows_become_products_and_passes(tmp_path):
    vidur_table(tmp_path / "vidur_h100_toy_mlp.csv.gz", [(2048, 2, 0.5, 0.25)])
    tables = {rows.name: rows for rows in read_kernel_tables([tmp_path])}
    assert set(tables) == {"gemm", "vector"}
    gemm, vector = tables["gemm"], tables["vector"]
    assert gemm.dims.tolist() == [[1, 2048, (16 + 8) * 64 // 2, 1024]] and gemm.seconds.tolist() == [0.0005]
    assert (gemm.device, gemm.dtype, gemm.source) == (H100, "f16", "vidur toy")
    assert vector.dims.tolist() == [[2 * 2 * 2048 * 1024, 2 * 2048 * 1024]]


def test_openxla_rows_become_products_by_precision(tmp_path):
    (tmp_path / "openxla_matmul.csv").write_text(
        "device,batch,m,n,k,dtypes,flop_per_s\n"
        "sm_90,2,256,512,1024,bf16xbf16->bf16,1e14\nsm_90,1,256,256,256,f32xf32->f32,1e14\nother,1,1,1,1,x,1\n"
    )
    tables = read_kernel_tables([tmp_path])
    assert [(rows.name, rows.dtype) for rows in tables] == [("bmm", "bf16"), ("gemm", "tf32")]
    assert tables[0].seconds[0] == pytest.approx(2 * 2 * 256 * 512 * 1024 / 1e14)
    assert not any(map(fitted, tables))


def test_parquet_tables_of_a_stack(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def write(stack, what, table, **columns):
        folder = tmp_path / "h100_sxm" / what / stack / "1.0"
        folder.mkdir(parents=True, exist_ok=True)
        columns["device"] = ["NVIDIA H100 80GB HBM3"] * len(columns["m"])
        parquet.write_table(pa.table(columns), folder / f"{table}_perf.parquet")

    kinds, latency = ["bfloat16", "fp8", "fp8", "fp8", "int8_wo"], [1.0, 2.0, 2.0, 2.0, 3.0]
    for stack in ("vllm", "trtllm"):
        write(stack, "gemm", "gemm", gemm_dtype=kinds, m=[1, 2, 3, 4, 5], n=[4] * 5, k=[7] * 5, latency=latency)
        write(stack, "quantize", "scale_matrix", m=[2, 3], k=[7, 7], latency=[0.25, 1.5])
        write(stack, "quantize", "computescale", m=[2, 3], k=[7, 7], latency=[0.5, 0.5])
    first, one, _, two = read_kernel_tables([tmp_path])  # in order of stacks
    assert (first.dtype, first.dims.tolist(), first.seconds.tolist()) == ("bf16", [[1, 1, 4, 7]], [0.001])
    # the cast is left out, and products whose cast is not known or takes most of the reading
    assert one.dims.tolist() == two.dims.tolist() == [[1, 2, 4, 7]]
    assert (one.dtype, one.source, fitted(one)) == ("f8", "aiconfigurator trtllm", True)
    assert one.seconds.tolist() == pytest.approx([0.002 - 0.00075])
    assert (two.source, fitted(two)) == ("aiconfigurator vllm", False)
    assert two.seconds.tolist() == pytest.approx([0.002 - 0.00025])


def test_damaged_tables_are_named(tmp_path):
    (tmp_path / "openxla_matmul.csv").write_text("device,batch\nsm_90,x\n")
    with pytest.raises(InvalidInput, match="openxla"):
        read_kernel_tables([tmp_path])
    with pytest.raises(InvalidInput, match="no such"):
        read_kernel_tables([tmp_path / "absent"])


def test_a_fit_finds_the_efficiency_and_is_judged_by_other_sources(tmp_path):
    pytest.importorskip("sklearn")
    known = datasheets()[H100]
    rng = np.random.default_rng(0)

    def law(tokens, split, efficiency):
        dims = np.array([[1, tokens, (16 + 8) * 64 // split, 1024]])
        return 1e3 * (known.launch_s + baseline_s("gemm", dims, known.sheet, "f16")[0] / efficiency)

    shapes = [
        (int(tokens), int(split)) for tokens, split in zip(rng.integers(512, 4096, 200), [1, 2] * 100, strict=True)
    ]
    vidur_table(tmp_path / "vidur_h100_phi-2_mlp.csv.gz", [(t, s, law(t, s, 0.6), 0.25) for t, s in shapes])
    vidur_table(tmp_path / "vidur_h100_other_mlp.csv.gz", [(t, s, law(t, s, 0.5), 0.25) for t, s in shapes])
    device = Calibration("h100", known.sheet, 2500, {"gemm": ClassFit(0.5)})
    fit = with_matrix_units(device, read_kernel_tables([tmp_path])).classes["product bf16"]
    assert fit.efficiency == pytest.approx(0.6, rel=0.02)
    assert fit.error_mean == pytest.approx(1 - 0.5 / 0.6, abs=0.03)  # of the source that was not fitted to
    assert "other" not in fit.source


def test_the_smallest_products_of_a_table_show_the_constant_of_its_timer(tmp_path):
    calibration, known = load_calibration("b200"), datasheets()["NVIDIA_B200"]
    calibration = replace(calibration, steps={})
    sides = [(256, 256, 256), (256, 256, 512), (256, 512, 256), (512, 256, 256), (2048, 2048, 2048), (4096, 4096, 2048)]
    dims = np.array([(1, *side) for side in sides])
    rows = Observations("NVIDIA_B200", "gemm", "bf16", dims, np.ones(len(dims)), "OpenXLA")
    kernel = predicted_s(calibration, rows, known.sheet, 0.0)

    def error(constant_s, few=0):
        lines = [
            f"sm_100_B200,1,{m},{n},{k},bf16xbf16->bf16,{2 * m * n * k / (seconds + constant_s)!r}"
            for (m, n, k), seconds in zip(sides[few:], kernel[few:].tolist(), strict=True)
        ]
        text = "\n".join(["device,batch,m,n,k,dtypes,flop_per_s", *lines])
        (tmp_path / "openxla_matmul.csv").write_text(text)
        (case,) = kernel_cases(tmp_path, [])
        assert case["case"] == "OpenXLA: gemm bf16, 2 shapes"
        return case["mean_error"]

    assert error(9e-6) < 1e-6 and error(1e-6) < 1e-6
    assert error(9e-6, few=2) > 0.05  # too few small products: a launch is taken


def test_an_op_costs_the_time_since_the_op_before(tmp_path):
    def x(cat, name, ts, dur, tid=1, **args):
        return dict(ph="X", cat=cat, name=name, ts=ts, dur=dur, pid=0 if cat == "kernel" else 1, tid=tid, args=args)

    events, number = [x("user_annotation", "ProfilerStep#0", 0, 2000)], 0
    for turn in range(6):
        at = 300 * turn
        # conv: begins 50 after the last call of the relu before, two launches end 60 and 80 in; relu: one at 140
        events += [x("cpu_op", "aten::conv2d", at + 10, 90), x("cpu_op", "aten::convolution", at + 20, 70)]
        events += [x("cpu_op", "aten::relu", at + 120, 40)]
        for begin in (50, 70, 130):
            number += 1
            events.append(x("cuda_runtime", "cudaLaunchKernel", at + begin, 10, correlation=number))
            events.append(x("kernel", "k", at + begin + 15, 2, tid=7, device=0, stream=7, correlation=number))
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    found = dispatch_ns(read_trace(tmp_path / "t.json"))
    assert found["relu"] == (6, 60_000, 60_000)  # from 80 to 140
    # from the relu's 140 to 300 + 80; the first from the begin of the step
    assert found["convolution"] == (6, 240_000, (5 * 240_000 + 80_000) // 6)
    assert list(found) == ["(all)", "convolution", "relu"] and found["(all)"][0] == 12


def test_an_update_costs_the_time_of_its_optimizer_for_each_parameter(tmp_path):
    events = [
        dict(ph="X", cat="user_annotation", name="Optimizer.step#SGD.step", ts=10, dur=100, pid=1, tid=1, args={}),
    ]
    for number, at in enumerate((20, 40, 60, 80)):  # two launches for each of two parameters
        args = {"Input Dims": [[4, 4], [4, 4]]}
        name = ("aten::mul_", "aten::add_")[number % 2]
        events += [
            dict(ph="X", cat="cpu_op", name=name, ts=at, dur=15, pid=1, tid=1, args=args),
            dict(ph="X", cat="cuda_runtime", name="cudaLaunchKernel", ts=at + 5, dur=5, pid=1, tid=1)
            | {"args": {"correlation": number}},
            dict(ph="X", cat="kernel", name="k", ts=at + 12, dur=2, pid=0, tid=7)
            | {"args": {"correlation": number, "device": 0, "stream": 7}},
        ]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    found = dispatch_ns(read_trace(tmp_path / "t.json"))
    # from the begin of the first call, 20 + 5, to the end of the last one, 80 + 10, for two parameters
    assert found["(all)"][:2] == (2, 32_500)
