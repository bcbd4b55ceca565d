"""Execution for real: the placement computes what PyTorch computes, and the measured step is a step. No time is
asserted: only order, structure and results."""

import json
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest

from simdev import Placement, Problem, simulate
from simdev.errors import InvalidInput, SimdevError
from simdev.graphs.workload import TrainingStep
from simdev.problem.topology import Device, DeviceKind, Link, Topology
from simdev.report.perfetto import trace_events, write_trace

torch = pytest.importorskip("torch")
nn = torch.nn
CORES = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


def two_cpus():
    kind = DeviceKind("core", 1 << 30, {"f32": 1e11}, 1e10, granularity=64)
    return Topology("two", (Device("cpu0", kind), Device("cpu1", kind)), (Link(("cpu0", "cpu1"), 5 * 10**9, 1000),))


class Net(nn.Module):
    """Branches, in-place ops on tensors that others read, batch statistics, random draws, scalars and a table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.register_buffer("offset", torch.arange(8.0))

    def forward(self, tokens):
        x = self.table(tokens)
        a = self.left(x)
        b = torch.sigmoid(a)
        a.mul_(0.5)  # b's backward needs b, not a
        y = torch.cat([self.norm(a + self.offset), self.drop(torch.relu_(self.right(x)))], dim=1)
        padded = y.new_zeros(y.shape[0], 20)
        padded[:, :16] = y
        return (padded.t() @ padded).sum() + b.mean() + torch.tensor(0.25)


def net_step():
    model = Net()
    return TrainingStep(
        model, (torch.randint(11, (6,)),), lambda model, x: model(x), torch.optim.Adam(model.parameters(), lr=0.01)
    )


@pytest.fixture(scope="module")
def program():
    from simdev.measure.execute.record import record

    return record(net_step, "net", {}, seed=3)


def run(program, devices, order="fifo", **options):
    from simdev.analysis.levels import b_level
    from simdev.measure.execute.host import execute

    units = tuple(f"cpu:{core}" for core in CORES[:2])
    priority = b_level(program.graph, np.ones(program.graph.n_ops, np.int64))
    return execute(
        program, np.asarray(devices, np.int32), units, order=order, priority=priority, repeats=2, warmup=1, **options
    )


def placements(program, count):
    graph, rng = program.graph, np.random.default_rng(5)
    return [rng.integers(0, 2, graph.n_units).astype(np.int32)[graph.unit_of_op] for _ in range(count)]


def test_the_recorded_graph_is_the_captured_one(program):
    from simdev.graphs.capture import capture

    assert program.graph.fingerprint == capture(net_step(), "net").fingerprint
    calls = [len(calls) for calls in program.calls]
    kinds = [program.graph.kinds[kind] for kind in program.graph.op_kind]
    assert all(
        (count == 0) == (kind in ("parameter", "input", "constant")) for count, kind in zip(calls, kinds, strict=True)
    )
    assert max(calls) > 5  # the parts of an update


@two_cores
def test_one_device_computes_what_pytorch_computes(program):
    from simdev.measure.execute.outcome import difference

    execution = run(program, np.zeros(program.graph.n_ops))
    assert difference(program, execution).same
    assert not execution.sent_finish.any()
    (loss,) = program.results.values()
    assert np.isfinite(loss.view(np.float32)).all()
    assert any((home.before != home.after).any() for home in program.homes.values())


@two_cores
@pytest.mark.parametrize("order", ["fifo", "program", "priority"])
def test_two_devices_compute_the_same_bits_as_one(program, order):
    alone = run(program, np.zeros(program.graph.n_ops))
    for devices in placements(program, 3):
        execution = run(program, devices, order)
        for value, bits in alone.results.items():
            assert (execution.results[value] == bits).all()
        for key, bits in alone.homes.items():
            assert (execution.homes[key] == bits).all()


@two_cores
def test_a_wrong_result_is_noticed(program):
    from simdev.measure.execute.outcome import difference

    execution = run(program, np.zeros(program.graph.n_ops))
    key = next(key for key, home in program.homes.items() if home.dtype == torch.float32)
    execution.homes[key].view(np.float32)[0] += 1.0
    assert not difference(program, execution).same


@two_cores
def test_the_measured_step_keeps_the_order_of_the_model(program, tmp_path):
    from simdev.measure.execute.outcome import step_schedule

    graph, topology = program.graph, two_cpus()
    (devices,) = placements(program, 1)
    execution = run(program, devices)
    schedule = step_schedule(program, execution, devices, topology)
    assert schedule.step_ns == schedule.op_finish.max()
    for number in range(2):  # R1: one op at a time
        ops = np.flatnonzero(devices == number)
        order = ops[np.lexsort((schedule.op_finish[ops], schedule.op_start[ops]))]
        assert (schedule.op_start[order][1:] >= schedule.op_finish[order][:-1]).all()
    source, reader = graph.edge_source, graph.consumers
    assert (schedule.op_start[reader] >= schedule.op_finish[source]).all()
    simulated = simulate(Problem.build(graph, topology), Placement(devices))  # R3: the same transfers
    assert schedule.transfer_tensor.tolist() == simulated.transfer_tensor.tolist()
    assert schedule.transfer_target.tolist() == simulated.transfer_target.tolist()
    assert schedule.comm_bytes == simulated.comm_bytes
    persistent = [graph.op_persistent_bytes[devices == number].sum() for number in range(2)]
    assert (schedule.peak_bytes[:2] >= persistent).all() and schedule.peak_bytes[0] < 2 * simulated.peak_bytes[0] + 4096
    parts = [
        trace_events(graph, topology, devices, one, name, number)
        for number, (one, name) in enumerate([(schedule, "measured"), (simulated, "simulated")])
    ]
    write_trace(tmp_path / "trace.json", *parts)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for process in (0, 1):
        shown = [event for event in events if event["ph"] == "X" and event["pid"] == process]
        assert len(shown) == graph.n_ops + len(schedule.transfer_tensor)


@two_cores
def test_what_cannot_run_is_one_clear_error(program):
    from simdev.measure.execute.host import execute

    devices = np.zeros(program.graph.n_ops, np.int32)
    for units, words in [
        (("cpu:99999",), "core 99999"),
        (("tpu:0",), "cpu:NUMBER"),
        (("cuda:64",), "GPUs"),
        ((f"cpu:{CORES[0]}",) * 2, "twice"),
    ]:
        with pytest.raises(InvalidInput, match=words):
            execute(program, devices, units)


@two_cores
def test_an_error_in_a_worker_ends_the_run(program):
    from dataclasses import replace

    from simdev.errors import SimdevError

    def broken(*args, **kwargs):
        raise ValueError("broken kernel")

    calls = [[replace(call, function=broken) for call in calls] for calls in program.calls]
    with pytest.raises(SimdevError, match="broken kernel"):
        run(replace(program, calls=calls), np.zeros(program.graph.n_ops))


@pytest.mark.parametrize("last_word", ["done", "failed", None])
def test_a_worker_may_end_between_two_looks_at_it(last_word, monkeypatch):
    """A worker that says its last word and ends while the parent looks has not ended without a message."""
    from simdev.measure.execute import host
    from simdev.measure.execute.worker import DONE, FAILED, FIRST

    control, message = np.zeros(FIRST + 8, np.int64), np.frombuffer(b"no disk", np.uint8)[None]
    shared = SimpleNamespace(words=lambda _: control, array=lambda _: message)
    job = SimpleNamespace(workers=("cpu:7",), steps=1, shared=shared)

    def look(child, options):
        if last_word:
            control[FIRST + {"done": DONE, "failed": FAILED}[last_word]] = 1
        return child, 0

    monkeypatch.setattr(os, "waitpid", look)
    if last_word == "done":
        host._wait(job, [1], 1, math.inf)
    else:
        with pytest.raises(SimdevError, match="cpu:7: " + ("no disk" if last_word else "the worker ended without")):
            host._wait(job, [1], 1, math.inf)
