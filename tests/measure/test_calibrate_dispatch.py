"""Host time of ops by kind, computed by hand."""

import json

from simdev.calibrate.dispatch import dispatch_ns
from simdev.calibrate.traces import read_trace


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
