"""Traces as graphs."""

import json

import pytest

from simdev.calibrate.imported import against_measured, operators, played_ns, trace_graph
from simdev.calibrate.traces import read_trace
from simdev.errors import InvalidInput


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
