"""A device file from a trace of one's own board, by hand and on public traces."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from simdev.calibrate.own_trace import own_calibration, read_own_traces
from simdev.calibrate.traces import read_trace
from simdev.cli.main import main as command_line
from simdev.errors import InvalidInput
from simdev.problem.costs import CostModel
from simdev.problem.graph import GraphBuilder
from simdev.problem.opcost.device import load_calibration
from simdev.problem.topology import load_kinds

KIND = "v100-sxm2-16gb"


@pytest.fixture
def simdev(monkeypatch):
    """Runs a command; returns its exit code."""

    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["simdev", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            command_line()
        return done.value.code or 0

    return call


def trace_of(tmp_path, ops, name="t.json", shapes=True):
    """A trace of ``(operator, operand shapes, kernel us)``, 100 us of host time each, the host far ahead."""
    events, free = [], 100_000
    for number, (operator, operands, us) in enumerate(ops):
        at = 100 * number
        args = {"Input Dims": operands, "Input type": ["float"] * len(operands)} if shapes else {}
        events.append(dict(ph="X", cat="cpu_op", name=operator, ts=at, dur=90, pid=1, tid=1, args=args))
        call = {"correlation": number + 1}
        events.append(
            dict(ph="X", cat="cuda_runtime", name="cudaLaunchKernel", ts=at + 5, dur=5, pid=1, tid=1, args=call)
        )
        work = {**call, "device": 0, "stream": 7}
        events.append(dict(ph="X", cat="kernel", name="k", ts=free, dur=us, pid=0, tid=7, args=work))
        free += us + 2  # two us between kernels
    (tmp_path / name).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    return tmp_path / name


def costs_of(signatures, calibrated):
    """The ns of ops of 4 MiB in, 4 MiB out."""
    builder = GraphBuilder("g")
    for number, text in enumerate(signatures):
        kind = text.partition("(")[0]
        builder.op(str(number), kind, signature=text, bytes_read=1 << 22, bytes_written=1 << 22)
    kind = replace(load_kinds()[KIND], calibrated=calibrated, launch_ns=2000)
    return CostModel().op_costs(builder.build(), kind)[0].tolist()


def test_shapes_of_the_trace_keep_their_time_and_others_take_the_factor(tmp_path, simdev):
    wide, narrow = [1024, 1024], [512, 1024]
    ops = [("aten::relu", [wide], 30), ("aten::relu_", [wide], 34), ("aten::gelu", [narrow], 16)]
    path = trace_of(tmp_path, ops * 20)
    out = tmp_path / "mine.toml"
    assert simdev("calibrate", str(path), "--kind", KIND, "-o", str(out)) == 0
    mine = load_calibration(str(out))
    assert mine.ops == {"relu(1024x1024) f32": 32_000, "gelu(512x1024) f32": 16_000}
    assert mine.launch_ns == pytest.approx(2000, rel=0.03)
    texts = ["relu_(f32[1024,1024])->f32[1024,1024]", "tanh(f32[1024,1024])->f32[1024,1024]"]
    seen, unseen = costs_of(texts, str(out))
    before = costs_of(texts, "v100")[1]
    assert seen == 2000 + 32_000  # both runs of relu: the median, in place or not
    assert unseen == pytest.approx(before * mine.factors["elementwise"], abs=2)
    # 30 + 34 + 16 us and three launches, over what the file said of two wide ops and a narrow one
    launch = load_kinds()[KIND].launch_ns
    wide_ns, narrow_ns = launch + before - 2000, launch + (before - 2000) / 2
    assert mine.factors["elementwise"] == pytest.approx(86_000 / (2 * wide_ns + narrow_ns), rel=0.02)


def test_a_convolution_is_costed_by_its_gradients_shapes(tmp_path):
    """The profiler names no strides: the result's shape is that of the gradient in the backward op."""
    image, weight, result = [8, 64, 56, 56], [128, 64, 3, 3], [8, 128, 28, 28]
    ops = [("aten::convolution", [image, weight], 100), ("aten::convolution_backward", [result, image, weight], 250)]
    calibration, _ = own_calibration(read_own_traces([read_trace(trace_of(tmp_path, ops))]), load_kinds()[KIND])
    assert set(calibration.factors) == {"conv", "conv_backward"}
    numbers = "stride=[2,2],padding=[1,1],dilation=[1,1],transposed=False,output_padding=[0,0],groups=1"
    text = f"convolution(f32[8,64,56,56],f32[128,64,3,3],{numbers})->f32[8,128,28,28]"
    kind = load_kinds()[KIND]
    builder = GraphBuilder("g")
    builder.op("c", "convolution", signature=text, bytes_read=1, bytes_written=1)
    before = CostModel().op_costs(builder.build(), kind)[0][0]
    assert calibration.factors["conv"] == pytest.approx((100_000 + calibration.launch_ns) / before, rel=1e-3)


def test_what_cannot_be_used_is_refused(tmp_path, capsys, simdev):
    bare = trace_of(tmp_path, [("aten::relu", [[64, 64]], 10)], "bare.json", shapes=False)
    with pytest.raises(InvalidInput, match="record_shapes"):
        read_own_traces([read_trace(bare)])
    slow = trace_of(tmp_path, [("aten::relu", [[64, 64]], 10_000)], "slow.json")
    assert simdev("calibrate", str(slow), "--kind", KIND, "-o", str(tmp_path / "x.toml")) == 2
    assert "another board" in capsys.readouterr().err and not (tmp_path / "x.toml").exists()
    assert simdev("calibrate", str(slow), "--kind", "v10") == 2
    assert "unknown device kind 'v10'" in capsys.readouterr().err


def test_a_log_of_nccl_tests_is_a_link(tmp_path, simdev):
    """Four devices, 3 us for each of six hops and 10 ns for each KiB of a quarter: 100 GB/s."""
    lines = ["#       size         count      type   redop    root     time   algbw   busbw"]
    lines += [f"#  Rank  {rank} Group  0 Pid 1 on node device  {rank} [0x00]" for rank in range(4)]
    for size in (1 << power for power in range(12, 28)):
        us = 6 * (3 + size / 4 / 1e5)
        lines.append(f"{size} {size // 4} float sum -1 {us:.3f} 0.00 0.00 0")
    (tmp_path / "log.txt").write_text("\n".join(lines), encoding="utf-8")
    out = tmp_path / "link.toml"
    assert simdev("calibrate", str(tmp_path / "log.txt"), "-o", str(out)) == 0
    text = out.read_text(encoding="utf-8")
    assert "latency_us = 3.0" in text and "gb_per_s = 100.0" in text


DATA = Path(os.environ.get("SIMDEV_DATA", ""))
MACHINE = """
name = "my-v100"
[kind.mine]
memory_gib = 32
peak_tflops = { f32 = 15.7, f16 = 125 }
memory_gb_per_s = 900
multiprocessors = 80
launch_us = 1.21
calibrated = "mine.toml"
[[device]]
name = "gpu0"
kind = "mine"
"""


@pytest.mark.slow
def test_a_trace_of_one_v100_predicts_a_step_of_another(tmp_path, simdev, monkeypatch, capsys):
    """Kineto's ResNet-50 on a DGX Station calibrates, HTA's on an SXM2 board of 2023 judges: 95.6 ms."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    traces = [DATA / "kineto/resnet50_num_workers_0__worker0.1623143089861.pt.trace.json.gz"]
    traces.append(DATA / "hta/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz")
    if not os.environ.get("SIMDEV_DATA") or not all(trace.exists() for trace in traces):
        pytest.skip("without the public traces (SIMDEV_DATA)")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "my.toml").write_text(MACHINE, encoding="utf-8")
    graph = tmp_path / "resnet.npz"
    assert simdev("calibrate", traces[0], "--kind", KIND, "-o", tmp_path / "mine.toml") == 0
    model = "transformers:ResNetForImageClassification[num_labels=1000]"
    assert simdev("capture", model, "--batch", 32, "-o", graph) == 0
    capsys.readouterr()
    assert simdev("simulate", graph, tmp_path / "my.toml", "--placer", "single-gpu", "--json") == 0
    predicted = json.loads(capsys.readouterr().out)["step_ns"]
    assert predicted == pytest.approx(sorted(read_trace(traces[1]).step_ns)[-3], rel=0.1)
