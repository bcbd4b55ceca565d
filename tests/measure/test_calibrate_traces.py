"""Profiler traces: small hand-written ones, damaged ones, and the public ones where they are."""

import gzip
import io
import json
import tarfile

import numpy as np
import pytest

from simdev.calibrate.traces import PIECE, read_trace, read_traces, report_problems
from simdev.errors import InvalidInput


def x(cat, name, ts, dur, pid=1, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}


def small_events():
    """One step: an op launches a kernel at 10 us, which runs from 20 to 25."""
    return [
        x("user_annotation", "ProfilerStep#3", 0, 100),
        x(
            "cpu_op",
            "aten::mm",
            5,
            20,
            **{"External id": 7, "Input Dims": [[2, 3], [3, 4]], "Input type": ["float"] * 2},
        ),
        x("cuda_runtime", "cudaLaunchKernel", 10, 4, correlation=42),
        x("kernel", "gemm", 20, 5, pid=0, tid=7, device=0, stream=7, correlation=42),
        {"ph": "i", "name": "[memory]", "ts": 6, "args": {"Device Type": 1, "Device Id": 0, "Bytes": 512, "Addr": 99}},
        {"ph": "s", "cat": "ac2g", "id": 42, "ts": 10},
    ]


def write(path, document, zipped=False):
    data = json.dumps(document).encode()
    path.write_bytes(gzip.compress(data) if zipped else data)
    return path


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("bare", [False, True])
def test_a_small_trace(tmp_path, zipped, bare):
    head = {"deviceProperties": [{"id": 0, "name": "V100"}], "distributedInfo": {"rank": 2, "world_size": 8}}
    document = small_events() if bare else head | {"traceEvents": small_events()} | {"traceName": "after"}
    trace = read_trace(write(tmp_path / "t.json", document, zipped))
    assert (trace.device_name, trace.rank, trace.world) == (("", 0, 1) if bare else ("V100", 2, 8))
    assert trace.step_ns.tolist() == [100_000]
    assert [trace.names[n] for n in trace.ops.name] == ["ProfilerStep#3", "aten::mm"]
    assert "[2,3]" in trace.details[trace.ops.detail[1]]
    assert (trace.work.begin[0], trace.work.end[0], trace.streams) == (20_000, 25_000, ((0, 7),))
    assert trace.work.correlation[0] == trace.calls.correlation[0] == 42
    assert trace.memory.size.tolist() == [512] and trace.memory.allocated.tolist() == [-1]
    assert trace.problems == {}


def test_steps_without_marks_run_from_one_optimizer_call_to_the_next(tmp_path):
    events = [x("user_annotation", "Optimizer.step#SGD.step", ts, 10) for ts in (90, 190, 310)]
    events += [x("user_annotation", "Optimizer.step#Other.step", 400, 10)]
    trace = read_trace(write(tmp_path / "t.json", events))
    assert trace.steps == ((0, 100_000, 200_000), (1, 200_000, 320_000))
    assert "without a ProfilerStep" in report_problems(trace)[0]
    assert read_trace(write(tmp_path / "u.json", events[:2])).steps == ()


def test_a_step_marked_on_two_threads_counts_once_and_threads_may_have_any_name(tmp_path):
    events = [x("user_annotation", "ProfilerStep#3", 0, 100), x("cpu_op", "ProfilerStep#3", 2, 90, tid="thread 8 (py)")]
    trace = read_trace(write(tmp_path / "t.json", events))
    assert trace.steps == ((3, 0, 100_000),) and trace.problems == {}


def test_times_keep_every_digit(tmp_path):
    text = json.dumps({"traceEvents": small_events()}).replace('"ts": 20,', '"ts": 1712195495519689.123,')
    (tmp_path / "t.json").write_text(text)
    assert read_trace(tmp_path / "t.json").work.begin[0] == 1712195495519689123


def test_what_is_missing_is_counted(tmp_path):
    bad = x("kernel", "orphan", 30, 5, pid=0, tid=7, device=0, stream=7, correlation=43)
    no_time = x("kernel", "timeless", 30, 5)
    del no_time["ts"]
    events = [
        *small_events(),
        bad,
        no_time,
        x("hocus", "pocus", 1, 1),
        x("cuda_runtime", "c", "soon", 1, correlation=1),
        5,
    ]
    trace = read_trace(write(tmp_path / "t.json", {"traceEvents": events}))
    assert trace.problems == {
        "kernel without 'ts'": 1,
        "event of the unknown category 'hocus'": 1,
        "call with a field of the wrong type": 1,
        "event that is no object": 1,
        "kernel or copy whose launching call is not in the trace": 1,
    }
    assert len(report_problems(trace)) == 5


def test_a_truncated_file_gives_what_came_before(tmp_path):
    events = [x("cpu_op", f"op{i}", i, 1, pad="".join(map(str, range(i, i + 50)))) for i in range(3000)]
    whole = write(tmp_path / "t.json.gz", {"traceEvents": [*small_events(), *events]}, zipped=True)
    whole.write_bytes(whole.read_bytes()[: len(whole.read_bytes()) // 2])
    trace = read_trace(whole)
    assert 2 < len(trace.ops) < 3002 and len(trace.work) == 1
    assert any("ends too early" in what for what in trace.problems)


@pytest.mark.parametrize("text", ["", "nonsense", "5", "{}", '{"traceEvents": []}', '{"traceEvents": 3}'])
def test_what_is_no_trace_is_refused(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(InvalidInput, match="not a trace"):
        read_trace(tmp_path / "t.json")


def test_an_archive_is_one_trace_per_rank(tmp_path):
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as archive:
        for rank in (1, 0):
            data = json.dumps({"distributedInfo": {"rank": rank}, "traceEvents": small_events()}).encode()
            info = tarfile.TarInfo(f"r{rank}.json")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    assert [trace.rank for trace in read_traces(tmp_path / "all.tar.gz")] == [0, 1]


def test_a_long_trace_takes_little_memory(tmp_path):
    tracemalloc = pytest.importorskip("tracemalloc")
    row = json.dumps(x("python_function", "f" * 900, 1, 1))
    with gzip.open(tmp_path / "long.json.gz", "wt", compresslevel=1) as file:
        file.write('{"traceEvents": [' + ",".join(json.dumps(event) for event in small_events()))
        for _ in range(100):
            file.write("," + ",".join([row] * 1000))
        file.write("]}")
    tracemalloc.start()
    trace = read_trace(tmp_path / "long.json.gz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(trace.ops) == 2
    assert peak < 16 * PIECE  # the file has 100 MB


def test_a_public_trace(data_dir):
    trace = read_trace(next((data_dir / "kineto").glob("*1623143089861*")))
    assert trace.device_name == "Tesla V100-DGXS-32GB"
    assert np.array_equal(trace.step_ns // 1000, [176078, 173992, 176918, 181259, 176468, 164261])
    assert len(trace.work) == 9096 and trace.problems == {}
