"""Profiles and comparisons with this machine: what is written, that it resumes, that figures mean what they say. No
time is asserted."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from simdev import Placement, Problem, load_topology, simulate
from simdev.errors import InvalidInput, UnknownName
from simdev.problem.graph import GraphBuilder
from simdev.problem.topology import Device, DeviceKind, Link, Topology

torch = pytest.importorskip("torch")
CORES = sorted(os.sched_getaffinity(0))
MEASURED = Path(__file__).parents[2] / "leaderboard" / "measured"
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
STEP = """
import torch
from simdev import TrainingStep

def make_step():
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    batch = torch.randn(16, 32), torch.randint(0, 4, (16,))
    loss = lambda model, x, y: torch.nn.functional.cross_entropy(model(x), y)
    return TrainingStep(model, batch, loss, torch.optim.SGD(model.parameters(), lr=0.1))
"""


def row(name, measured, simulated, peak=100, simulated_peak=100):
    return {
        "name": name,
        "measured_ns": measured,
        "simulated_ns": simulated,
        "samples_ns": [measured] * 3,
        "peak_bytes": [peak, 0],
        "simulated_peak_bytes": [simulated_peak, 0],
    }


def test_figures_of_rows_worked_out_by_hand():
    from simdev.measure.execute.figures import figures

    rows = [row("a", 100, 110, 100, 99), row("b", 103, 90, 200, 180), row("c", 200, 200, 300, 320)]
    got = figures(rows)
    assert got["error"] == pytest.approx((0.1 + 13 / 103 + 0) / 3)
    assert got["tau"] == pytest.approx(1 / 3)  # of three pairs one is the wrong way round
    assert got["pairs"] == 1.0  # which are less than 5 % apart
    assert got["regret"] == pytest.approx(0.03)
    assert got["noise"] == 0.0
    assert got["peak_error"] == pytest.approx((0.01 + 0.1 + 20 / 300) / 3)
    # 105 % of 99, 180, 320 is 103.95, 189, 336: at capacity 100 nothing is said to fit; at 200 the first two do; at 300
    # the third, which fits, does not
    assert got["missed"] == 0.0
    assert got["false_alarms"] == pytest.approx(2 / 9)


def test_rounds_of_a_placement_become_one_row():
    from simdev.measure.execute.figures import figures, over_rounds

    def case(name, number, measured):
        return {**row(name, measured, 100), "placement": name, "round": number, "samples_ns": [measured, measured + 1]}

    rows = [case("a", 1, 120), case("b", 0, 105), case("a", 0, 100), case("b", 1, 125), case("a", 2, 90)]
    a, b = over_rounds(rows)
    assert a["measured_ns"] == 100 and a["rounds_ns"] == [100, 120, 90]
    assert a["samples_ns"] == [100, 101, 120, 121, 90, 91]
    assert b["measured_ns"] == 105  # of two rounds the faster
    loud = {**case("a", 3, 400), "disturbed": 0.2}
    assert over_rounds([loud, *rows])[0] == a and over_rounds([loud])[0]["measured_ns"] == 400
    assert figures([a, b])["tau_noise"] == 1.0  # medians 95 and 105 of the even rounds, 120 and 125 of the odd


def test_the_parts_of_an_error_add_up_to_the_bias():
    from simdev.measure.execute.figures import error_parts, figures

    rng = np.random.default_rng(1)
    names = ("simulated_ns", "ops_ns", "channel_ns", "copies_ns", "gaps_ns")
    rows = [
        row("x", int(rng.integers(50, 99)), 0) | {name: int(rng.integers(50, 99)) for name in names} for _ in "abcd"
    ]
    assert sum(error_parts(rows).values()) == pytest.approx(figures(rows)["bias"])


def two(gb_per_s=1.0):
    kind = DeviceKind("core", 1 << 30, {"f32": 1e9}, 1e9, granularity=64)
    link = Link(("cpu0", "cpu1"), int(gb_per_s * 1e9), 1000)
    return Topology("two", (Device("cpu0", kind), Device("cpu1", kind)), (link,))


def test_copies_that_hold_up_the_sender():
    from simdev.measure.execute.cases import simulate_workers, with_costs

    builder = GraphBuilder("chain", {})
    a = builder.op("a", "relu", outputs=[4000])
    builder.op("b", "relu", inputs=builder.outputs(a))
    builder.op("c", "relu")  # ready from the start, after a on the same device
    problem = Problem.build(builder.build(), two())
    problem = with_costs(problem, np.array([[100, 100, 50]] * 2))
    placement = Placement(np.array([0, 1, 0]))
    assert simulate(problem, placement).step_ns == 100 + 5000 + 100
    machine = simulate_workers(problem, placement, problem.costs.device_op_ns)
    assert machine.op_start[2] == 100 + 4000 and machine.op_start[1] == 100 + 4000 + 1000
    assert machine.step_ns == 5200
    assert simulate_workers(problem, placement, 2 * problem.costs.device_op_ns).step_ns == 200 + 4000 + 1000 + 200
    alone = Placement(np.array([0, 0, 0]))
    assert simulate_workers(problem, alone, 2 * problem.costs.device_op_ns).step_ns == 250  # nobody else works


@pytest.mark.parametrize("count", [1, 6, 30])
def test_sampled_placements_are_valid_and_differ(count):
    from simdev.measure.execute.sampling import perturb, sample
    from simdev.placers.registry import load_workload

    problem = Problem.build(load_workload("transformer-xl-2"), load_topology("p100x2"))
    rng = np.random.default_rng(0)
    found = sample(problem, count, rng)
    assert len(found) == count == len({devices.tobytes() for _, devices in found})
    for _, devices in found:
        Placement(devices).check(problem)
        moved = perturb(problem, devices, 0.2, rng)
        Placement(moved).check(problem)
    again = sample(problem, count, np.random.default_rng(0))
    assert all((a == b).all() for (_, a), (_, b) in zip(found, again, strict=True))


def test_a_line_through_times():
    from simdev.measure.execute.link import fit_line

    sizes = np.array([64, 4096, 1 << 20])
    alpha, rate = fit_line(sizes, 2000 + sizes * 1e9 / 5e9)
    assert alpha == pytest.approx(2000) and rate == pytest.approx(5e9)


def test_device_names_are_workers():
    from simdev.measure.programs import workers_of

    assert workers_of(two()) == ("cpu:0", "cpu:1")
    with pytest.raises(InvalidInput, match="gpu0"):
        workers_of(load_topology("p100x2"))


ALONE = {
    "mm(f32[8,16],f32[16,4])->f32[8,4]": "",
    "addmm(f32[4],f32[8,16],f32[16,4])->f32[8,4]": "",
    "cat(f32[2,3],f32[2,5],dim=1)->f32[2,8]": "",
    "convolution(f32[1,4,9,9],f32[4,2,3,3],stride=[2,2],padding=[1,1],dilation=[1,1],transposed=False,"
    "output_padding=[0,0],groups=2)->f32[1,4,5,5]": "",
    "native_batch_norm(f32[2,3,4],f32[3],f32[3],f32[3],f32[3],training=True)->(f32[2,3,4],f32[3],f32[3])": "",
    "_softmax_backward_data(f32[8,16],f32[8,16],dim=0)->f32[8,16]": "",
    "nll_loss_forward(f32[4,7],i64[4],reduction=1,ignore_index=-100)->(f32[],f32[])": "",
    "embedding(f32[5,3],i64[2,4])->f32[2,4,3]": "",
    "_to_copy(f32[4])->bf16[4]": "",
    "new_zeros(f32[2])->f32[3,4]": "",
    "adam(f32[16],state=128)": "no ATen op",
    "mm(f32[8,16],f32[16,4])->f32[8,5]": "no call",  # the product has another shape
    "add(f32[3],f32[4])->f32[4]": "no call",
    "masked_fill_(f32[2],bool[2])->f32[2]": "no call",  # fills with what?
    "native_batch_norm(f32[2,3],f32[3],training=True)->(f32[2,3],f32[3],f32[3])": "no call",  # weight or bias?
    "index_select(f32[9,2],i64[3],dim=0)->f32[3,2]": "integers",
    "relu(q4[3])->q4[3]": "no call",
}


def test_ops_of_a_file_are_measured_alone_and_the_others_named(tmp_path):
    from simdev.measure.profiles import profile_file
    from simdev.problem.costs import load_measured, save_measured

    mm, *_ = ALONE
    (tmp_path / "ops.txt").write_text("\n".join([*ALONE, mm, ""]))
    save_measured({"core": {mm: -0.0, "neg(f32[2])->f32[2]": 7.0}, "gpu": {mm: 9.0}}, tmp_path / "costs.csv")
    lines, left_out = profile_file(tmp_path / "ops.txt", (f"cpu:{CORES[0]}",), tmp_path, repeats=2, seed=0)
    found = load_measured(tmp_path / "costs.csv")
    measured = {text for text, reason in ALONE.items() if not reason}
    assert set(found["core"]) == measured | {"neg(f32[2])->f32[2]"} and found["gpu"] == {mm: 9.0}
    assert all(found["core"][text] > 0 for text in measured) and found["core"]["neg(f32[2])->f32[2]"] == 7.0
    assert lines[0].startswith(f"core: {len(measured)} of {len(ALONE)}")
    assert left_out[0] == f"core: {len(ALONE) - len(measured)} of {len(ALONE)} signatures left out"
    for line, (text, reason) in zip(left_out[1:], [item for item in ALONE.items() if item[1]], strict=True):
        assert line.startswith(f"  {text}: ") and reason in line


def test_signatures_are_read_from_cost_tables():
    from simdev.measure.execute.alone import read_signatures
    from simdev.problem.costs import load_measured

    table = MEASURED / "machine" / "costs.csv"
    assert set(read_signatures(table)) == set(load_measured(table)["core"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "holds no op signature"),
        (b"\n  \n", "holds no op signature"),
        (b"\xff\xfe", "not text"),
        (b"neg(f32[2])->f32[2]\nsome words\n", "line 2: 'some words' is not an op signature"),
        (b'signature,ns\n"neg(f32[2])->f32[2]",1\n,2\n', "line 3: '' is not an op signature"),
        (b'signature,ns\n"neg,1\n', "not CSV"),
        (None, "No such file"),
    ],
)
def test_files_without_signatures_are_refused(tmp_path, text, message):
    from simdev.measure.execute.alone import read_signatures

    if text is not None:
        (tmp_path / "ops.txt").write_bytes(text)
    with pytest.raises(InvalidInput, match=message):
        read_signatures(tmp_path / "ops.txt")


def test_profile_takes_steps_or_ops_and_refuses_in_one_line(tmp_path):
    for options, outcome in (
        (["--ops", "gone.csv"], "gone.csv: No such file or directory"),
        (["nmt", "--ops", "gone.csv"], "give either steps or --ops"),
    ):
        code, out, err = simdev("profile", *options, "-o", "mine", cwd=tmp_path)
        assert (code, out, err) == (2, "", f"simdev: error: {outcome}\n")
        assert not (tmp_path / "mine").exists()


class FakeTensor:
    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address


@pytest.mark.parametrize(("step", "granularity"), [(48, 16), (256, 256), (1 << 20, 4096)])
def test_granularity_of_an_allocator(monkeypatch, step, granularity):
    from itertools import count

    from simdev.measure.execute import link

    assert link.granularity(f"cpu:{CORES[0]}") in (16, 32, 64, 128)  # PyTorch's own
    used = count(0, step)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: FakeTensor(next(used)))
    assert link.granularity(f"cpu:{CORES[0]}") == granularity
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(used) // step * 100)
    assert link.granularity("cuda:0") == 200  # one tensor between two looks


def test_a_machine_file_has_the_granularity_measured(tmp_path):
    from simdev.measure.execute.link import device_file

    facts = {
        "units": ["cpu:3"],
        "flop_per_s": 1e9,
        "bytes_per_s": 1e9,
        "memory_bytes": 1 << 30,
        "granularity": 96,
        "gap_ns": 1000.0,
    }
    (tmp_path / "one.toml").write_text(device_file("one", {"core": facts}, {}))
    assert load_topology(tmp_path / "one.toml").granularity.tolist() == [96]


def test_time_that_others_take_is_seen():
    from simdev.measure.execute.cases import others

    core = CORES[0]
    busy = f"import os; os.sched_setaffinity(0, [{core}]); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        with others([core]) as taken:
            time.sleep(1)
        child.kill()
    assert taken[0] > 0.5
    with others([]) as taken:
        pass
    assert taken == [0.0]  # a GPU alone


def test_of_two_runs_the_calmer_is_kept():
    from simdev.measure.compare import _keep_calmer

    known = {}
    for share in (0.2, 0.01, 0.1):
        _keep_calmer(known, {"placement": "a", "round": 0, "disturbed": share})
    assert [row["disturbed"] for row in known.values()] == [0.01]


def test_devices_by_their_short_names():
    from simdev.measure.programs import workers_named

    assert workers_named(["cpu", "cuda", "cpu:7"]) == (f"cpu:{CORES[0]}", "cuda:0", "cpu:7")


def simdev(*args, cwd):
    run = subprocess.run(
        [sys.executable, "-m", "simdev", *map(str, args)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        timeout=1800,
    )
    return run.returncode, run.stdout, run.stderr


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("cases.jsonl", "junk\n", "line 1: not JSON"),
        ("cases.jsonl", "[1]\n", "line 1: missing: channel_ns, copies_ns"),
        ("cases.jsonl", '{"placement": "x"}\n', "line 1: missing: channel_ns, copies_ns"),
        ("about.json", "{", "expected JSON with graphs and loaded"),
        ("about.json", '{"graph": 1}', "expected JSON with graphs and loaded"),
        ("about.json", "{}", "line 1: graph: about.json has no such graph"),
        ("cases.jsonl", "", "no cases.jsonl"),
    ],
)
def test_broken_journals_are_refused_in_one_line(tmp_path, file, text, message):
    from simdev.measure.report import report

    for name in ("cases.jsonl", "about.json"):
        (tmp_path / name).write_text((MEASURED / "repeated" / name).read_text())
    (tmp_path / file).write_text(text)
    with pytest.raises(InvalidInput, match=message):
        report([tmp_path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_costs_of_several_graphs_share_a_file(tmp_path):
    from simdev.measure.execute.cases import Costs
    from simdev.measure.profiles import load_costs, save_costs

    path = tmp_path / "costs.npz"
    graphs = [SimpleNamespace(fingerprint=letter * 16, n_ops=ops) for letter, ops in (("a", 3), ("b", 5))]
    assert load_costs(path, graphs[0]) is None
    for number, graph in enumerate(graphs):
        save_costs(Costs(*np.full((2, 2, graph.n_ops), number)), graph, path)
    for number, graph in enumerate(graphs):
        costs = load_costs(path, graph)
        assert costs.alone.tolist() == costs.loaded.tolist() == [[number] * graph.n_ops] * 2
    with pytest.raises(InvalidInput, match="a.alone: expected a row of 4 times"):
        load_costs(path, SimpleNamespace(fingerprint="a" * 16, n_ops=4))
    assert load_costs(path, SimpleNamespace(fingerprint="c" * 16, n_ops=3)) is None


def test_a_folder_of_one_graph_is_read_as_earlier_versions_wrote_it(tmp_path):
    from simdev.measure.report import read_comparisons

    about, cases = read_comparisons(MEASURED / "repeated")
    (graph, rows), *_ = cases.items()
    (tmp_path / "about.json").write_text(json.dumps({"graph": graph, **about[graph]}))
    old = [{key: value for key, value in row.items() if key != "graph"} for row in rows]
    (tmp_path / "cases.jsonl").write_text("".join(json.dumps(row) + "\n" for row in old))
    found, again = read_comparisons(tmp_path)
    assert again == {graph: old} and found[graph]["loaded"] == about[graph]["loaded"]


@pytest.mark.parametrize("command", ["execute", "profile", "study compare-real"])
def test_without_pytorch_one_line_says_so(tmp_path, command):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch', name='torch')")
    (tmp_path / "machine.toml").write_text(
        'name = "one"\n[kind.core]\nmemory_gib = 1.0\nmemory_gb_per_s = 1.0\npeak_tflops = {f32 = 0.1}\n'
        '[[device]]\nname = "cpu0"\nkind = "core"\n'
    )
    options = {
        "execute": ["machine.toml", "--placer", "heft"],
        "profile": ["-o", "mine"],
        "study compare-real": ["machine.toml", "-o", "mine"],
    }[command]
    code, out, err = simdev(*command.split(), "nmt", "--small", *options, cwd=tmp_path)
    assert code == 2 and not out and not (tmp_path / "mine").exists()
    assert err == "simdev: error: running a step requires PyTorch: pip install 'simdev[capture]'\n"


def test_a_report_needs_no_pytorch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch', name='torch')")
    folder = MEASURED / "repeated"  # rounds of different number
    code, _, err = simdev("study", "measured", folder, "-o", "out", cwd=tmp_path)
    assert code == 0, err
    for name in ("report.md", "figures.csv"):
        assert (tmp_path / "out" / name).read_text() == (folder / name).read_text()


@two_cores
@pytest.mark.long
def test_profile_compare_and_execute_from_the_command_line(tmp_path):
    (tmp_path / "model.py").write_text(STEP)
    devices = [part for core in CORES[:2] for part in ("--device", f"cpu:{core}")]
    code, out, err = simdev("profile", "model.py:make_step", *devices, "--repeats", 2, "-o", "mine", cwd=tmp_path)
    assert code == 0, err
    topology = load_topology(tmp_path / "mine" / "machine.toml")
    assert [device.name for device in topology.devices] == [f"cpu{core}" for core in CORES[:2]]
    profile = json.loads((tmp_path / "mine" / "profile.json").read_text())
    assert profile["kinds"]["core"]["granularity"] == topology.devices[0].kind.granularity
    assert profile["kinds"]["core"]["flop_per_s"] > 0 and len(profile["links"]) == 1

    from simdev.graphs.capture import capture_file
    from simdev.problem.costs import CostModel, load_measured

    costs = load_measured(tmp_path / "mine" / "costs.csv")
    graph = capture_file(f"{tmp_path / 'model.py'}:make_step")
    measured = Problem.build(graph, topology, CostModel(measured=costs))
    free = np.array([kind in ("parameter", "input", "constant") for kind in graph.kinds])[graph.op_kind]
    signatures = {graph.signatures[number] for number in graph.op_signature[~free]}
    assert set(costs["core"]) == signatures  # every op that runs was measured
    assert (measured.costs.op_ns[0][free] == 1).all()

    options = ["--placements", 4, "--repeats", 2, "--rounds", 2, "-o", "cases"]
    code, out, err = simdev("study", "compare-real", "model.py:make_step", "mine/machine.toml", *options, cwd=tmp_path)
    assert code == 0, err
    journal = (tmp_path / "cases" / "cases.jsonl").read_text()
    rows = [json.loads(line) for line in journal.splitlines()]
    assert len(rows) == 8 and len({row["unit_devices"] for row in rows}) == 4
    first, second = ([row["name"] for row in rows if row["round"] == number] for number in (0, 1))
    assert sorted(first) == sorted(second) and len(first) == 4
    assert {"0", "1"} <= {"".join(sorted(set(row["unit_devices"]))) for row in rows}  # all on one, all on the other
    for name in ("report.md", "scatter.png", "parts.png", "figures.csv", "costs.npz", "about.json"):
        assert (tmp_path / "cases" / name).stat().st_size > 0
    calm = [{**row, "disturbed": 0.0} for row in rows[1:]]
    stale = [{**row, "simulated_ns": 1} for row in calm]
    (tmp_path / "cases" / "cases.jsonl").write_text("".join(json.dumps(row) + "\n" for row in stale))
    code, _, err = simdev("study", "compare-real", "model.py:make_step", "mine/machine.toml", *options, cwd=tmp_path)
    assert code == 0, err
    again = [json.loads(line) for line in (tmp_path / "cases" / "cases.jsonl").read_text().splitlines()]
    assert again[:-1] == calm and again[-1]["name"] == rows[0]["name"]  # only what was missing was run

    (tmp_path / "other.py").write_text(STEP.replace("64", "48"))
    code, out, err = simdev("study", "compare-real", "other.py:make_step", "mine/machine.toml", *options, cwd=tmp_path)
    assert code == 0, err
    both = [json.loads(line) for line in (tmp_path / "cases" / "cases.jsonl").read_text().splitlines()]
    assert both[:8] == again and len({row["graph"] for row in both[8:]}) == 1 and len(both) == 16
    about = json.loads((tmp_path / "cases" / "about.json").read_text())
    assert list(about) == [again[0]["graph"], both[8]["graph"]]

    options = ["--placer", "heft", "--repeats", 2, "--trace", "trace.json", "--json"]
    code, out, err = simdev("execute", "model.py:make_step", "mine/machine.toml", *options, cwd=tmp_path)
    assert code == 0, err
    report = json.loads(out)
    assert report["same_as_one_device"] and report["same_as_pytorch"]
    assert report["step_time_s"]["min"] <= report["step_time_s"]["median"] <= report["step_time_s"]["p95"]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"measured", "simulated"}


SHARES = ["noise", "error", "worst", "bias", "pairs", "regret", "peak error", "missed OOM", "false alarms"]


@pytest.mark.parametrize("folder", sorted(str(p.parent.relative_to(MEASURED)) for p in MEASURED.rglob("figures.csv")))
def test_committed_figures_are_what_the_committed_measurements_give(folder):
    import pandas

    from simdev.measure.execute.figures import figures, over_rounds
    from simdev.measure.report import COLUMNS, PREDICTORS, read_comparisons

    table = pandas.read_csv(MEASURED / folder / "figures.csv")
    assert list(table.columns) == list(COLUMNS) and not table.isna().any().any()
    assert list(table["predictor"]) == list(PREDICTORS.values()) * (len(table) // 2)
    assert all(table[column].dtype == float for column in [*SHARES, "tau", "tau p10", "tau noise"])
    cases = {graph.partition("[")[0]: rows for graph, rows in read_comparisons(MEASURED / folder)[1].items()}
    assert sorted(cases) == sorted(set(table["graph"]))
    for graph, lines in table.groupby("graph"):
        rows = over_rounds(cases[graph])
        for key, (_, line) in zip(PREDICTORS, lines.iterrows(), strict=True):
            got = figures(rows, key)
            for column, (name, _) in COLUMNS.items():
                if name in got:
                    assert line[column] == pytest.approx(got[name], abs=1e-5), (graph, column)


@two_cores
@pytest.mark.slow
def test_the_recorder_on_two_cores(tmp_path):
    """What it does on a machine with a GPU, on cores instead; the second call finds all there."""
    name = "rnnlm[batch=2,length=2,units=16,vocabulary=40]"
    command = [
        sys.executable,
        "-m",
        "simdev.measure.recorder",
        "rec",
        "--devices",
        ",".join(f"cpu:{c}" for c in CORES[:2]),
        "--workloads",
        name,
        "--seconds",
    ]

    def record(*more):
        run = subprocess.run(
            [*command, *more],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
            timeout=1800,
            stdout=subprocess.PIPE,
        )
        assert run.returncode == 0
        return [json.loads(line) for line in (rec / "log.jsonl").read_text().splitlines()]

    rec = tmp_path / "rec"
    log = record("250", "--parts", "machine", "ops", "steps")
    assert not [line for line in log if line["error"]]
    assert len(json.loads((rec / "machine.json").read_text())["links"]) == 1
    steps = json.loads((rec / "steps.json").read_text())
    assert set(steps) == {f"{name} cpu:{core}" for core in CORES[:2]}
    assert all(len(found["eager"]) == 30 and min(found["eager"]) > 0 for found in steps.values())
    more = record("250", "--placements", "3")[len(log) :]
    assert [line["what"].split()[0] for line in more] == ["machine", "placements", "report", "report"]  # no more ops
    assert not [line for line in more if line["error"]]
    assert json.loads((rec / "steps.json").read_text()) == steps
    lines = [line for line in (rec / "report" / "steps.md").read_text().splitlines() if "cpu:" in line]
    assert len(lines) == 2 and all(line.count("%") == 4 for line in lines)
    assert (rec / "report" / "figures.csv").exists()


def test_errors_are_one_line(tmp_path):
    from simdev.measure.programs import load_program

    with pytest.raises(InvalidInput, match="no kernels"):
        load_program("graph.npz")
    with pytest.raises(UnknownName):
        load_program("no-such-workload")
    with pytest.raises(InvalidInput, match="small"):
        load_program("llama-moe", small=True)
