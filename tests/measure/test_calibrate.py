"""Calibration: manifests, tables, traces and whole steps of measured data."""

import json

import numpy as np
import pytest

from simdev.calibrate.given_steps import fit_steps, left_out_ns, read_steps
from simdev.calibrate.imported import against_measured, operators, played_ns, trace_graph
from simdev.calibrate.manifest import held_out, load_manifest, role_of, write_manifest
from simdev.calibrate.traces import read_trace
from simdev.calibrate.whole_steps import (
    MODELS,
    MeasuredStep,
    factor,
    leave_one_out,
    read_llm_foundry,
    step_parts,
    step_seconds,
)
from simdev.cli import main as cli
from simdev.errors import InvalidInput
from simdev.problem.graph import GraphBuilder
from simdev.problem.graph_file import save_graph
from simdev.problem.opcost.device import load_calibration
from simdev.problem.opcost.physics import PRODUCTS, work_flops
from simdev.problem.topology import load_kinds
from simdev.studies.fidelity import resnet50
from simdev.studies.fidelity.memory import graph_peak, replay_memory
from simdev.studies.fidelity.triosim import convolution_cases, predicted_s, read_operators

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
    write_manifest(tmp_path, [("a*", "calibrate", "x@1"), ("*.txt", "split", "y@2")], tmp_path / "m.csv")
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
    assert (predicted_s([forward, norm, backward]) > 0).all()


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


# whole training steps of transformers: their kernels by hand, published rows, and one factor judged leave-one-out


ROW = "7b,2048,8,h100_80gb,6,2,10643,amp_bf16,{}\n"
STEPS_HEADER = (
    "Model,SeqLen (T),# GPUs,GPU,MicroBatchSize,GradAccum,Throughput (T/s/GPU),Precision,Activation Checkpointing\n"
)


def products(parts):
    return sum(
        count * work_flops(part.name, np.array([part.dims]))[0] for part, count in parts if part.name in PRODUCTS
    )


def test_a_step_does_six_operations_for_each_parameter_and_token():
    model = MODELS["7b"]
    assert model.parameters == pytest.approx(6.66e9, rel=0.01)  # as llm-foundry counts them
    assert MODELS["llama3.1-8b"].parameters == pytest.approx(8.03e9 - 128256 * 4096, rel=0.01)  # one of two embeddings
    parts = step_parts(model, 2, 1024)
    assert products(parts) == pytest.approx(6 * model.parameters * 2 * 1024)
    layers = model.parameters - model.vocabulary * model.width
    again = step_parts(model, 2, 1024, recompute="full")
    assert products(again) - products(parts) == pytest.approx(2 * layers * 2 * 1024)
    names = [part.name for part, _ in parts]
    assert names.count("flash_attention") == names.count("flash_attention_backward") == 1


def test_published_rows_become_steps(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(STEPS_HEADER + ROW.format("False") + ROW.replace("7b", "9b").format("False") + ROW.format("True"))
    plain, again = read_llm_foundry(path)
    assert plain.measured_s == pytest.approx(2 * 6 * 2048 / 10643) and plain.kind == "h100-sxm5-80gb"
    assert 0.6 < plain.predicted_s / plain.measured_s < 1.2
    assert 1.2 < again.predicted_s / plain.predicted_s < 1.4  # a third forward pass


def test_the_factor_of_the_others_judges_a_step():
    steps = [MeasuredStep(str(k), "x", "bf16", measured, 1.0) for k, measured in enumerate((1.1, 1.2, 1.6))]
    assert factor(steps) == 1.2
    assert leave_one_out(steps) == pytest.approx([1.4, 1.35, 1.15])
    assert leave_one_out(steps[:1]) == pytest.approx([1.0])


def test_less_power_slows_products_on_matrix_units():
    kinds, parts = load_kinds(), step_parts(MODELS["1b"], 2, 1024)
    seconds = [step_seconds(parts, kinds[name]) for name in ("a100-sxm4-40gb", "a100-pcie-40gb")]
    assert 1.05 < seconds[1] / seconds[0] < (400 / 250) ** (1 / 3)


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
