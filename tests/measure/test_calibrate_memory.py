"""Peak memory from a trace's allocations."""

import json

import pytest

from simdev.calibrate.traces import read_trace
from simdev.problem.graph import GraphBuilder
from simdev.studies.fidelity import resnet50
from simdev.studies.fidelity.memory import graph_peak, replay_memory


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
