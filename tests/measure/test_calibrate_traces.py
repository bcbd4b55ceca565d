"""Traces of profilers: read, and replayed on other devices."""

import gzip
import io
import json
import tarfile
from dataclasses import replace

import numpy as np
import pytest

from simdev.calibrate import replay as module
from simdev.calibrate.replay import (
    LAUNCH,
    MARK,
    RETURN,
    host_costs,
    host_line,
    match_collectives,
    noise,
    replay,
    replay_problem,
    replay_ranks,
)
from simdev.calibrate.traces import PIECE, read_trace, read_traces, report_problems
from simdev.errors import InvalidInput
from simdev.sim import simulate

# profiler traces: small hand-written ones, damaged ones, and the public ones where they are


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


@pytest.mark.slow
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


# replays of traces: small ones computed by hand, then the public ones where they are


class Profile:
    """Writes a trace event by event; times in us."""

    def __init__(self):
        self.events, self.correlation = [], 0

    def call(self, ts, dur, name="cudaLaunchKernel", tid=1):
        self.correlation += 1
        self._add("cuda_runtime", name, ts, dur, pid=1, tid=tid, correlation=self.correlation)

    def work(self, ts, dur, name="k", stream=7, cat="kernel"):
        """What the last call launched."""
        self._add(cat, name, ts, dur, 0, stream, device=0, stream=stream, correlation=self.correlation)

    def step(self, number, ts, dur):
        self._add("user_annotation", f"ProfilerStep#{number}", ts, dur, pid=1, tid=1)

    def _add(self, cat, name, ts, dur, pid, tid, **args):
        self.events.append(dict(ph="X", cat=cat, name=name, ts=ts, dur=dur, pid=pid, tid=tid, args=args))

    def trace(self, folder, rank=0):
        path = folder / f"rank{rank}.json"
        path.write_text(json.dumps({"distributedInfo": {"rank": rank}, "traceEvents": self.events}))
        return read_trace(path)


def predicted_us(trace, leave_one_out=False):
    line = host_line(trace)
    problem, placement, ops = replay_problem(line, *host_costs(line, leave_one_out))
    fast, slow = (simulate(problem, placement, engine=engine) for engine in ("fast", "reference"))
    assert np.array_equal(fast.op_finish, slow.op_finish)
    return fast.op_finish[ops][line.kind == MARK].reshape(-1, 2) / 1e3


def test_a_host_bound_step_takes_what_the_host_takes(tmp_path):
    p = Profile()
    p.step(0, 0, 100)
    for begin in (10, 40, 70):  # gaps of 10, 25 and 25, calls of 5, then 25 until the end of the step
        p.call(begin, 5)
        p.work(begin + 7, 3)
    assert predicted_us(p.trace(tmp_path))[0] == pytest.approx([0, 100], abs=0.01)


def test_a_synchronising_call_waits_for_the_stream(tmp_path):
    p = Profile()
    p.step(0, 0, 100)
    p.call(10, 5)
    p.work(17, 60)
    p.call(20, 62, "cudaStreamSynchronize")  # 77 is the end of the work: 5 of its own
    trace = p.trace(tmp_path)
    line = host_line(trace)
    assert line.own_ns.tolist()[1:3] == [5000, 5000]
    # 15 issue, 2 launch, 60 work with 1 after it, 5 + 18 on the host
    assert predicted_us(trace)[0, 1] == pytest.approx(15 + 2 + 60 + 1 + 5 + 18, abs=0.01)


def polling(kernel, query="cudaEventQuery", every=30, tid=1, begin=0):
    """A thread launches a kernel of that many us and asks every 30 us whether it has ended, then launches another."""
    p = Profile()
    p.step(0, 0, kernel + 110)
    p.call(begin + 10, 5, tid=tid)
    p.work(begin + 17, kernel, "long")
    now = begin + 20
    while now < begin + 17 + kernel:
        p.call(now, 2, query, tid=tid)
        now += every
    p.call(now, 2, query, tid=tid)
    p.call(now + 8, 5, tid=tid)
    p.work(now + 15, 3, "short")
    return p


def test_a_loop_of_queries_waits_for_the_work_that_ended(tmp_path):
    trace = polling(300).trace(tmp_path)
    line = host_line(trace)
    assert line.kind.tolist() == [MARK, LAUNCH, RETURN, LAUNCH, MARK] and line.waits[2] == (0,)
    assert predicted_us(trace)[0, 1] == pytest.approx(410, abs=2)  # a kernel of 300, 1 after it
    sooner = replace(trace, work=replace(trace.work, end=trace.work.end - np.array([100_000, 0])))
    long, short = (replay_problem(one, line.gap_ns, line.own_ns) for one in (line, replace(line, trace=sooner)))
    ends = [int(simulate(problem, placement).op_finish.max()) for problem, placement, _ in (long, short)]
    assert ends[0] - ends[1] == pytest.approx(100_000, abs=2000)  # a shorter kernel makes a shorter step


@pytest.mark.parametrize("case", ["another call", "few", "quick", "nothing ended"])
def test_other_queries_are_time_of_the_host(tmp_path, case):
    p = Profile()
    p.step(0, 0, 500)
    p.call(10, 5)
    p.work(17, 30 if case == "nothing ended" else 283)  # until 47 or 300
    for begin in {"few": (20, 302), "quick": (292, 295, 298, 301)}.get(case, range(122, 320, 30)):
        p.call(begin, 2, "cudaEventQuery")
        if case == "another call":
            p.call(begin + 5, 2, "cudaMalloc")
    p.call(340, 5)
    p.work(350, 3)
    line = host_line(p.trace(tmp_path))
    assert RETURN not in line.kind.tolist()


def test_a_thread_that_polls_does_not_hold_up_one_that_launches(tmp_path):
    p = polling(1000, tid=2)
    for begin in range(21, 1000, 30):  # between the queries, so that no two calls overlap
        p.call(begin + 5, 5)
        p.work(begin + 12, 9, "other", stream=8)
    trace = p.trace(tmp_path)
    line = host_line(trace)
    assert line.lanes == 2 and predicted_us(trace)[0, 1] == pytest.approx(1110, rel=0.02)


def test_a_pageable_copy_holds_the_host_up_and_an_asynchronous_one_does_not(tmp_path):
    ends = []
    for name in ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pinned -> Device)"):
        p = Profile()
        p.step(0, 0, 200)
        p.call(10, 110 if "Pageable" in name else 10, "cudaMemcpyAsync")
        p.work(20, 90, name, cat="gpu_memcpy")
        line = host_line(p.trace(tmp_path))
        ends.append(line.waits[2] if len(line.waits) == 4 else None)
    assert ends == [(0,), None]


def test_a_full_queue_holds_the_launch_up(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "QUEUE_DEPTH", 2)
    p = Profile()
    p.step(0, 0, 400)
    now = 0
    for number in range(4):
        p.call(now, 5)
        p.work(10 + 50 * number, 49)
        now += 5
    line = host_line(p.trace(tmp_path))
    line.own_ns[line.own_ns < 0] = 5000  # such short queues cannot be distinguished from calls that only look held up
    problem, placement, ops = replay_problem(line, line.gap_ns, line.own_ns)
    finish = simulate(problem, placement).op_finish[ops] / 1e3
    # launches at 5 and 10; the third waits for the first work (from 5 + launch, 49 + 1 later)
    launch = line.launch_ns / 1e3
    assert finish[1:4] == pytest.approx([5, 10, 5 + launch + 50 + 5], abs=0.01)


def test_a_step_amid_others_begins_with_a_full_queue(tmp_path, monkeypatch):
    """The host is held up from the begin on; work of 50 us counts, though the step before is not in the window."""
    monkeypatch.setattr(module, "QUEUE_DEPTH", 8)
    p = Profile()
    ends, now = [], 0
    for number in range(30):
        now = max(now, ends[number - 8]) if number >= 8 else now
        begin, now = now, now + 5
        p.call(begin, 5)
        start = max(begin + 10, ends[-1] if ends else 0)
        p.work(start, 50)
        ends.append(start + 50)
    p.step(0, 600, 400)
    r = replay(p.trace(tmp_path), leave_one_out=False)
    assert r.predicted_ns[0] == pytest.approx(r.measured_ns[0], rel=0.05)
    assert r.measured_ns[0] == 400_000


def test_a_launched_graph_keeps_the_order_between_its_streams_and_takes_one_place_in_the_queue(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "QUEUE_DEPTH", 7)
    p = Profile()
    p.step(0, 0, 300)
    p.call(0, 5, "cudaGraphLaunch")
    for begin, duration, stream in ((10, 50, 7), (60, 50, 20), (60, 30, 7), (110, 40, 7)):
        p.work(begin, duration, f"{begin}", stream=stream)
    p.call(10, 5)
    p.work(150, 10)
    p.call(20, 140, "cudaDeviceSynchronize")
    trace = p.trace(tmp_path)
    line = host_line(trace)
    assert line.wait_for == {2: (0,), 3: (2,)}  # by begin, then end
    assert (line.own_ns >= 0).all()  # no call looks held up
    assert predicted_us(trace)[0, 1] == pytest.approx(300, abs=10)


def two_threads(hundreds):
    """In every 100 us thread 1 launches eight kernels and waits for them. Meanwhile thread 2 launches a longer one and
    waits for it."""
    p = Profile()
    p.step(0, 0, 100 * hundreds)
    for begin in range(0, 100 * hundreds, 100):
        for more in range(2, 82, 10):
            p.call(begin + more, 5)
            p.work(begin + more + 6, 9)
        p.call(begin + 80, 10, "cudaStreamSynchronize")
        p.call(begin + 8, 4, tid=2)
        p.work(begin + 14, 60, stream=8)
        p.call(begin + 15, 64, "cudaStreamSynchronize", tid=2)
    return p


def test_threads_that_launch_at_the_same_time_are_replayed_as_one_host_each(tmp_path):
    trace = two_threads(20).trace(tmp_path)
    line = host_line(trace)
    assert line.lanes == 2 and (line.after >= 0).sum() <= 2  # threads follow themselves; marks may follow the other one
    assert predicted_us(trace)[0, 1] == pytest.approx(2000, rel=0.02)


def test_threads_that_take_turns_are_one_host(tmp_path):
    p = Profile()
    p.step(0, 0, 2000)
    for turn in range(20):  # as the forward pass and autograd do
        for begin in range(100 * turn, 100 * turn + 100, 10):
            p.call(begin, 5, tid=1 + turn % 2)
            p.work(begin + 7, 3)
    line = host_line(p.trace(tmp_path))
    assert line.lanes == 1 and (line.after < 0).all()


def test_a_thread_that_was_idle_follows_the_thread_that_was_not(tmp_path):
    p = two_threads(20)
    p.step(1, 2000, 1000)
    for begin in range(2000, 2500, 10):
        p.call(begin, 5)
        p.work(begin + 7, 3)
    p.call(2510, 5, tid=2)  # thread 2 has made no call for 515 us, thread 1 has
    p.work(2517, 3, stream=8)
    line = host_line(p.trace(tmp_path))
    (last,) = [
        row for row in range(len(line.lane)) if line.step[row] == 1 and line.lane[row] and line.kind[row] != MARK
    ]
    assert line.lane[line.after[last]] == 1 - line.lane[last] and line.gap_ns[last] == 15_000


def test_a_trace_whose_calls_join_no_work_is_refused(tmp_path):
    p = Profile()
    p.step(0, 0, 300)
    p.call(0, 5)
    with pytest.raises(InvalidInput, match="no call of the host is joined"):
        replay(p.trace(tmp_path))


def test_a_stream_waits_for_another_after_the_event(tmp_path):
    p = Profile()
    p.step(0, 0, 300)
    p.call(0, 5)
    p.work(7, 100)
    p.call(6, 1, "cudaStreamWaitEvent")
    p.call(10, 5)
    p.work(110, 40, stream=20)
    p.call(20, 1, "cudaDeviceSynchronize")
    line = host_line(p.trace(tmp_path))
    assert line.wait_for == {1: (0,)}


def test_a_step_is_predicted_from_the_others(tmp_path):
    p = Profile()
    for number, slow in enumerate((0, 0, 50)):
        start = 200 * number
        p.step(number, start, 100 + slow)
        p.call(start + 10 + slow, 5)
        p.work(start + 20 + slow, 3)
    r = replay(p.trace(tmp_path))
    assert r.measured_ns.tolist() == [100_000, 100_000, 150_000]
    # the third step from the first two: 100; the others from the mean of 100 and 150
    assert r.predicted_ns / 1e3 == pytest.approx([125, 125, 100], abs=0.01)
    assert r.sum_ns.tolist() == [3000, 3000, 3000]


def test_ranks_wait_for_each_other_in_a_collective(tmp_path):
    traces = []
    for rank, late in enumerate((0, 60)):
        p = Profile()
        p.step(0, late, 200 - late)
        p.call(late + 10, 5)
        p.work(late + 17, 100 - late, "ncclKernel_AllReduce", stream=30)
        p.call(late + 20, 100 - late, "cudaStreamSynchronize")
        traces.append(p.trace(tmp_path, rank))
    lines = [host_line(trace) for trace in traces]
    assert match_collectives(lines) == {(0, 0): (0, 40_000), (1, 0): (0, 40_000)}
    early, late = replay_ranks(traces, leave_one_out=False)
    # both end 40 (and 1 of the stream) after the late one's arrival at 77; then the host's own 3 and 80
    assert early.predicted_ns[0] / 1e3 == pytest.approx(77 + 41 + 3 + 80, abs=0.1)
    assert late.predicted_ns[0] / 1e3 == pytest.approx(77 + 41 + 3 + 80 - 60, abs=0.1)


def test_ranks_of_several_steps_replay_together(tmp_path):
    traces = []
    for rank in range(2):
        p = Profile()
        for number in range(2):
            start = 300 * number
            p.step(number, start, 300)
            p.call(start + 10, 5)
            p.work(start + 17 + 20 * rank, 100 - 20 * rank, "ncclKernel_AllReduce", stream=30)
            p.call(start + 20, 100, "cudaStreamSynchronize")
        traces.append(p.trace(tmp_path, rank))
    for r in replay_ranks(traces, leave_one_out=False):
        assert r.predicted_ns / 1e3 == pytest.approx([300, 300], abs=25) and len(r.sum_ns) == 2


def test_ranks_with_different_collectives_are_refused(tmp_path):
    traces = []
    for rank, name in enumerate(("ncclKernel_AllReduce", "ncclKernel_Broadcast")):
        p = Profile()
        p.step(0, 0, 100)
        p.call(10, 5)
        p.work(20, 10, name)
        traces.append(p.trace(tmp_path, rank))
    with pytest.raises(InvalidInput, match="same collectives"):
        replay_ranks(traces)


def test_noise_does_not_mind_one_odd_step():
    assert noise(np.array([35.0, 72, 95.7, 95.5, 95.7])) < 0.005
    assert noise(np.array([182.0, 124, 127, 126, 163, 116])) > 0.05


@pytest.mark.slow
def test_the_public_traces_replay_within_their_noise(data_dir):
    for pattern in ("kineto/*1623143089861*", "hta/rank-0*"):
        r = replay(read_trace(next(data_dir.glob(pattern))))
        assert abs(np.median(r.predicted_ns) / np.median(r.measured_ns) - 1) < 0.02
        assert abs(np.median(r.sum_ns) / np.median(r.measured_ns) - 1) < 0.5
    ranks = replay_ranks(read_traces(data_dir / "param" / "dlrm_kineto.tar.gz"), leave_one_out=False)
    errors = [abs(r.predicted_ns[0] / r.measured_ns[0] - 1) for r in ranks]
    assert len(ranks) == 8 and max(errors) < 0.01
