"""Readers of measured tables and the fits to them: tables made by a known law, damaged files, whole models by hand."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from simdev.calibrate.build import (
    build,
    datasheets,
    measured_table,
    read_tables,
    samples_by_model,
    save_calibration,
    with_host,
)
from simdev.calibrate.deepbench import read_workbook, sheet_rows
from simdev.calibrate.fit import SIZES, Timer, event_seconds, fit_class, relative_error, split
from simdev.calibrate.neusight import is_op_table, read_op_table
from simdev.calibrate.observations import Found
from simdev.errors import InvalidInput
from simdev.problem.costs import SOURCES, CostModel
from simdev.problem.graph import GraphBuilder
from simdev.problem.opcost.device import load_calibration, read_calibration
from simdev.problem.opcost.parts import KernelPart
from simdev.problem.opcost.physics import baseline_s
from simdev.problem.topology import Device, DeviceKind, Link, Topology, load_topology
from simdev.studies.fidelity.labels import find_labels, read_label
from simdev.studies.fidelity.tables import op_cases, teacher_of

DEVICE = "Tesla_V100-PCIE-32GB"


def write_table(root: Path, op: str, columns: str, rows, device=DEVICE) -> Path:
    path = root / op / f"{device}.csv.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"OPName,Latency,Device,{columns}"]
    lines += [
        f"{op},{float(1e3 * seconds)!r},{device.replace('_', ' ')},{','.join(map(str, shape))}"
        for shape, seconds in rows
    ]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def law(name, dims, efficiency, event=15e-6, host=40e-6):
    """What a timer reads of a device at ``efficiency`` of its physics."""
    sheet = datasheets()[DEVICE]
    kernel = sheet.launch_s + baseline_s(name, np.array([dims]), sheet.sheet)[0] / efficiency
    return max(host, event + kernel)


def elementwise_rows(rng, efficiency=0.8, count=400):
    shapes = np.exp(rng.uniform(1, [10, 9], (count, 2))).astype(int) + 1
    return [((b, h), law("vector", (8 * b * h, 4 * b * h), efficiency)) for b, h in shapes.tolist()]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "linear", (20, 8, 5))
    rng = np.random.default_rng(0)
    write_table(tmp_path, "add", "B,H", elementwise_rows(rng))
    shapes = np.exp(rng.uniform(2, 8, (300, 3))).astype(int)
    rows = [((1, m, n, k), law("linear", (1, m, n, k), 0.7)) for m, n, k in shapes.tolist()]
    write_table(tmp_path, "linear", "B,M,N,K", rows)
    return tmp_path


def test_a_known_law_is_found_again(folder):
    found = read_tables([folder])
    assert not found.problems and {table.name for table in found.tables} == {"vector", "linear"}
    assert event_seconds(found.tables, datasheets()[DEVICE].launch_s) == pytest.approx(15e-6, abs=0.5e-6)
    (samples,) = samples_by_model(found).values()
    assert samples["vector"][0].timer.host_s == pytest.approx(40e-6)
    for name, efficiency in (("vector", 0.8), ("linear", 0.7)):
        fit = fit_class(samples[name], seed=0, trees=False)
        assert fit.efficiency == pytest.approx(efficiency, rel=0.02)
        assert fit.error_mean < 0.01
        judged = split(samples[name][0].rows)
        assert 0.1 < judged.mean() < 0.3 and fit.rows == (~judged).sum()


def test_held_out_rows_do_not_move_a_fit(folder):
    (samples,) = samples_by_model(read_tables([folder])).values()
    sample = samples["linear"][0]
    before = fit_class([sample], seed=0)
    sample.rows.seconds[split(sample.rows)] *= 7
    after = fit_class([sample], seed=0)
    assert after.efficiency == before.efficiency and after.error_mean > 0.5
    dims = sample.rows.dims
    assert np.array_equal(relative_error(before, sample), relative_error(after, sample)) and len(dims) == 300


def test_device_files_of_fits_predict_as_the_fit_does(folder, tmp_path):
    calibration = build(read_tables([folder]))["v100"]
    save_calibration(calibration, tmp_path / "mine.toml")
    again = read_calibration(tmp_path / "mine.toml")
    parts = [
        KernelPart("linear", (1, 100, 200, 300)),
        KernelPart("vector", (4000, 4000)),
        KernelPart("gemm", (1, 64, 64, 64)),
    ]
    first, second = (c.durations(parts, c.sheet, c.launch_ns) for c in (calibration, again))
    assert first[0] == pytest.approx(second[0], rel=1e-5) and first[1] == second[1] == ["fit"] * 3
    twice = build(read_tables([folder]))["v100"].durations(parts, calibration.sheet, calibration.launch_ns)
    assert np.array_equal(first[0], twice[0]), "the same data and seed give the same figures"


def test_damaged_tables_are_counted_or_refused(folder, tmp_path):
    path = folder / "add" / f"{DEVICE}.csv.gz"
    text = gzip.decompress(path.read_bytes()).decode().splitlines()
    spoilt = [*text[:10], text[10][:20], "add,nan,x,1,1", "add,-1,x,1,1", "add,1,x,0,1", *text[11:20]]
    path.write_bytes(gzip.compress("\n".join(spoilt).encode()))
    found = Found()
    read_op_table(path, found)
    assert sum(found.problems.values()) == 4 and sum(len(table.seconds) for table in found.tables) == 18
    path.write_bytes(gzip.compress("\n".join(text).encode())[:-200])
    found = Found()
    read_op_table(path, found)
    assert any("ends early" in problem for problem in found.problems) and len(found.tables[0].seconds) > 10
    other = tmp_path / "notes.csv"
    other.write_text("a,b\n1,2\n")
    assert not is_op_table(other) and is_op_table(folder / "linear" / f"{DEVICE}.csv.gz")
    with pytest.raises(InvalidInput, match="no op table"):
        read_tables([other])
    with pytest.raises(InvalidInput, match="no such"):
        read_tables([tmp_path / "absent"])


def test_tables_of_unknown_devices_are_left_out_aloud(tmp_path):
    write_table(tmp_path, "add", "B,H", [((1, 1), 1e-5)], device="Voodoo_2")
    write_table(tmp_path, "relu", "B,H", [((1, 1), 1e-5)])
    found = read_tables([tmp_path])
    assert [table.device for table in found.tables] == [DEVICE]
    assert "Voodoo_2" in found.report()[0]


def write_workbook(path: Path, rows: list[list], sheet="V100 Results FP32") -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.active.title = sheet
    for row in rows:
        book.active.append(row)
    book.save(path)


CONVOLUTIONS = ["Convolution", None, "W", "H", "C", "N", "K ", "R", "S", "pad_h", "pad_w", "Vertical stride",
                "Horizontal stride", "Forward (msec)", "wrt Inputs (msec)", "wrt Parameters (msec)", None, "P",
                "Q"]  # fmt: skip


def test_workbooks_are_read_by_their_headers(tmp_path):
    path = tmp_path / "DeepBench_NV_V100.xlsx"
    write_workbook(
        path,
        [
            ["Dense Matrix Multiplication", None, "M", "N", "K", "A Transpose", "B Transpose", None, "Time (msec)"],
            [None, None, 10, 20, 30, "N", "T", None, 0.5],
            CONVOLUTIONS,
            [None, None, 30, 16, 3, 4, 8, 5, 5, 0, 0, 2, 2, 0.1, "N/A*", 0.3, None, 13, 6],  # output given width first
            [None, None, 16, 16, 3, 4, 8, 3, 3, 1, 1, 1, 1, 0.2, 0.3, 0.4, None, 16, 16],
            [
                "Recurrent Layers - GRU",
                None,
                "Hidden units",
                "N",
                "Timesteps",
                None,
                "Time Forward (msec) ",
                "Time Backward wrt Inputs (msec)",
                "Time Backward wrt Weights (msec)",
            ],
            [None, None, 512, 16, 100, None, 3, 4, 1],
            [None, None, 512, 16, 100, None, "#DIV/0!", None, None],
        ],
    )
    assert next(iter(sheet_rows(path)))[0] == "V100 Results FP32"
    found = Found()
    read_workbook(path, found)
    tables = {table.name: (table.dims.tolist(), table.seconds.tolist()) for table in found.tables}
    strided, square = [4, 3, 8, 16, 30, 6, 13, 5, 5, 2, 1], [4, 3, 8, 16, 16, 16, 16, 3, 3, 1, 1]
    assert tables == {
        "gemm": ([[1, 10, 20, 30]], [0.5e-3]),
        "conv": ([strided], [pytest.approx(0.1e-3)]),
        "conv3x3": ([square], [0.2e-3]),
        "conv_dgrad": ([square], [pytest.approx(0.3e-3)]),
        "conv_wgrad": ([strided, square], [pytest.approx(0.3e-3), 0.4e-3]),
        "rnn": ([[3, 512, 16, 100]], [3e-3]),
        "rnn_dgrad": ([[3, 512, 16, 100]], [4e-3]),
        "rnn_wgrad": ([[3, 512, 16, 100]], [1e-3]),
    }
    assert list(found.problems.values()) == [1]
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(InvalidInput, match="not a readable workbook"):
        read_workbook(path, found)


def node(
    op, target, shapes, output, modules="('m', <class 'torch.nn.modules.linear.Linear'>)", forward=1.0, contiguous=True
):
    meta = f"{{'nn_module_stack': OrderedDict([{modules}])}}"
    return f'{op},{target},"{meta}","{shapes}",[{contiguous}],"{output}",name,{forward},0.0'


def write_label(root: Path, nodes, name="toy-inf-4-2", device=DEVICE, **figures) -> Path:
    folder = root / device
    folder.mkdir(parents=True, exist_ok=True)
    header = "op,target,meta,input_shapes,input_contiguous,output_shape,Name,fw_latency,bw_latency"
    (folder / f"{name}.csv").write_text("\n".join([header, *nodes]) + "\n")
    figures = {"num_layer": 3, "e2e_latency": 2.0, "fw_latency": 2.0, "bwall_latency": 0} | figures
    (folder / f"{name}.json").write_text(json.dumps(figures))
    return folder / f"{name}.csv"


def test_whole_models_by_hand(tmp_path):
    linear = "('h.0.fc', <class 'torch.nn.modules.linear.Linear'>)"
    nodes = [
        node("placeholder", "x", "[]", "(2, 4)"),
        node("call_module", "h.0.fc", "[[2, 4, 8]]", "(2, 4, 16)", linear),
        node("call_function", "<built-in function add>", "[[2, 4, 16], [2, 4, 16]]", "(2, 4, 16)"),
        node("call_function", "<built-in function add>", "[[1], [1]]", "(1,)"),
        node("call_method", "contiguous", "[[2, 4]]", "(2, 4)", contiguous=False),
        node("call_method", "view", "[[2, 4]]", "(8,)"),
        node("call_function", "<function softmax at 0x1>", "[[2, 4]]", "(2, 4)"),
        node("call_function", "<built-in method mul>", "[[2, oops]]", "(2, 4)"),
    ]
    path = write_label(tmp_path, nodes)
    assert list(find_labels(tmp_path)) == [path]
    label = read_label(path)
    vector = KernelPart("vector", (2 * 2 * 4 * 16 * 4, 2 * 4 * 16 * 4))
    copy, softmax = KernelPart("vector", (32, 32)), KernelPart("softmax", (2, 4))
    assert label.forward == [(KernelPart("linear", (1, 8, 16, 8)), 3), (vector, 1), (copy, 1), (softmax, 1)]
    assert label.backward == [] and label.forward_s == pytest.approx(2e-3) and sum(label.skipped.values()) == 1
    training = read_label(write_label(tmp_path, nodes[:2], name="toy-train-4-2", bwall_latency=4.0))
    gradients = [
        KernelPart("gemm", (1, 8, 8, 16)),
        KernelPart("gemm", (1, 16, 8, 8)),
        KernelPart("vector", (8 * 16 * 4, 64)),
    ]
    assert training.backward == [(part, 3) for part in gradients] and training.backward_s == pytest.approx(4e-3)
    with pytest.raises(InvalidInput, match="no figures"):
        read_label(write_label(tmp_path, nodes, name="bad-inf-1-1", fw_latency="x"))


def test_cases_of_a_folder(tmp_path):
    write_label(tmp_path / "labels", [node("call_module", "fc", "[[512, 1024]]", "(512, 1024)")], fw_latency=0.2)
    write_table(tmp_path / "collect", "add", "B,H", elementwise_rows(np.random.default_rng(1), count=60))
    rows = op_cases(tmp_path)
    assert [row["group"] for row in rows] == [
        "F5 other, v100, files not listed",
        "op tables, v100",
        "other by a stand-in, v100 from a100",
        "F3, v100",
        "F4, v100 from a100",
    ]
    assert rows[0]["case"] == "60 shapes of 1 tables" and rows[0]["role"] == "validate", (
        "every row of a new file judges"
    )
    known = datasheets()[DEVICE]
    part, launch_ns = KernelPart("linear", (1, 512, 1024, 1024)), round(1e9 * known.launch_s)
    ns, source = load_calibration("v100").durations([part], known.sheet, launch_ns)
    assert rows[3]["predicted_s"] == pytest.approx(ns[0] / 1e9, rel=1e-3)  # a simulated step, in whole ns
    assert rows[3]["measured_s"] == pytest.approx(0.2e-3)
    assert source == ["fit"] and rows[3]["fit_share"] == 1
    assert rows[0]["mean_error"] == rows[1]["mean_error"] > 0
    notes = []
    assert op_cases(tmp_path / "labels" / DEVICE / "nothing", notes) == [] and "no such" in notes[0]
    pytest.importorskip("openpyxl")
    (tmp_path / "DeepBench_NV_V100.xlsx").write_bytes(b"PK")
    write_label(tmp_path / "other", [], device="Voodoo_2")
    write_label(tmp_path / "bad", [], fw_latency="x")
    notes.clear()
    (tmp_path / "other" / "alone-inf-1-1.json").write_text("{}")
    assert len(op_cases(tmp_path, notes)) == 5
    expected = ("workbook", "Voodoo_2", "no figures", "alone-inf-1-1.json: a whole model's time, but no list")
    assert [any(text in note for note in notes) for text in expected] == [True] * 4


def test_a_table_of_a_device_without_a_device_file_is_split(tmp_path):
    rows = elementwise_rows(np.random.default_rng(1), count=60)
    write_table(tmp_path / "collect", "add", "B,H", rows, device="NVIDIA_L4")
    first = op_cases(tmp_path)[0]
    assert first["group"] == "F5 other, l4" and first["rows"] < 30
    write_label(
        tmp_path, [node("call_function", "<built-in function add>", "[[512, 1024]]", "(512, 1024)")], device="NVIDIA_L4"
    )
    (known,) = (row for row in op_cases(tmp_path) if row["group"] == "F3, l4")
    assert known["fit_share"] == 1


def test_who_stands_in_for_an_unmeasured_device():
    names = {device: teacher_of(sheet).name for device, sheet in datasheets().items()}
    first = {device: name.split(" and ")[0] for device, name in names.items()}  # matrix units may be another board's
    assert first["NVIDIA_H100_80GB_HBM3"] == first[DEVICE] == "a100"
    assert first["NVIDIA_A100-PCIE-40GB"] == "v100"
    assert names["M40"] == names["TitanXp"] == "a100"
    assert names["Tesla_P4"] == "t4" and names["NVIDIA_L4"].startswith("a100 and t4")
    assert names["T4"] == "v100", "no other small board has a device file"
    small, sister, large = map(load_calibration, ("t4", "v100", "a100"))
    slower = small.classes["linear"].efficiency / sister.classes["linear"].efficiency
    found = teacher_of(datasheets()["NVIDIA_L4"])
    assert slower < 0.9
    assert found.classes["linear"].efficiency == pytest.approx(slower * large.classes["linear"].efficiency)
    assert found.classes["vector"] is small.classes["vector"] and found.table == {}


def test_nodes_that_work_and_have_no_class_are_told(tmp_path):
    nodes = [node("call_method", "size", "[[512, 1024]]", "(1,)", forward=0.01)] * 3
    nodes += [node("call_module", "fc", "[[512, 1024]]", "(512, 1024)")] * 9
    odd = node("call_function", "<built-in function einsum>", "[[512, 1024]]", "(512, 1024)", forward=2.0)
    label = read_label(write_label(tmp_path, [*nodes, odd]))
    assert [text.split(",")[0] for text in label.skipped] == ["a node 'einsum'"]


def test_what_a_timer_hides_is_not_predicted_below_the_host():
    assert Timer(10e-6, 30e-6).reading(np.array([1e-6, 50e-6])) == pytest.approx([30e-6, 60e-6])


def test_whole_models_on_known_devices_are_within_the_goal(data_dir):
    if not (data_dir / "neusight").is_dir():
        pytest.skip(f"no folder neusight in {data_dir}")
    errors = {}
    for device in ("Tesla_P100-PCIE-16GB", "Tesla_V100-PCIE-32GB"):
        for case in op_cases(data_dir / "neusight" / "labels" / device):
            if case["group"].startswith("F3"):
                errors.setdefault(device, []).append(abs(case["predicted_s"] / case["measured_s"] - 1))
    assert len(errors) == 2 and all(np.mean(values) <= 0.05 for values in errors.values())


def test_readings_without_a_timer_make_a_table(tmp_path):
    path = tmp_path / "DeepBench_NV_V100.xlsx"
    head = ["Dense Matrix Multiplication", None, "M", "N", "K", None, None, None, "Time (msec)"]
    write_workbook(path, [head, *([None, None, 8 * size, 20, 30, None, None, None, size] for size in range(1, 21))])
    samples = samples_by_model(read_tables([path]))["v100"]["gemm"]
    table = measured_table(samples, datasheets()["V100"].sheet)
    judged = split(samples[0].rows)
    assert 0 < judged.sum() < 20 and len(table) == (~judged).sum()
    assert all(ns == pytest.approx(1e6 * int(key.split(",")[1]) / 8) for key, ns in table.items())
    assert measured_table(samples, datasheets()[DEVICE].sheet) == {}, "another device's datasheet"


def write_trace(path: Path) -> None:
    def x(cat, name, ts, dur, pid=1, **args):
        return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": 1, "ts": ts, "dur": dur, "args": args}

    events = [x("user_annotation", "ProfilerStep#0", 0, 1000)]
    for turn in range(6):  # an op's time ends with its launch: 30 us after the relu's before, the relu's 9 us later
        at = 39 * turn
        for number, (name, launched) in enumerate([("aten::addmm", 30), ("aten::relu", 39)], 2 * turn):
            events.append(x("cpu_op", name, at + launched - 5, 5))
            events.append(x("cuda_runtime", "cudaLaunchKernel", at + launched - 2, 2, correlation=number))
            events.append(x("kernel", "k", at + launched + 1, 1, pid=0, device=0, stream=7, correlation=number))
    memory = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1}
    events += [
        memory | {"ts": step, "args": {"Device Type": 1, "Device Id": 0, "Addr": step, "Bytes": size}}
        for step, size in enumerate((1024, 1536, -1024))
    ]
    head = {"deviceProperties": [{"id": 0, "name": "Tesla V100-SXM2-16GB"}]}
    path.write_text(json.dumps(head | {"traceEvents": events}))


def test_traces_give_host_times_and_rounding(folder, tmp_path):
    write_trace(tmp_path / "trace.json")
    assert read_tables([folder]).dispatch == {}, "not from a folder"
    found = read_tables([folder, tmp_path / "trace.json"])
    assert found.dispatch == {"Tesla_V100-SXM2-16GB": {"addmm": 30_000, "relu": 9_000}}
    calibration = with_host(build(found)["v100"], found)
    assert calibration.notes["granularity of Tesla_V100-SXM2-16GB"] == 512
    save_calibration(calibration, tmp_path / "mine.toml")
    assert read_calibration(tmp_path / "mine.toml").dispatch_ns == found.dispatch["Tesla_V100-SXM2-16GB"]
    kind = DeviceKind("gpu", 1 << 30, {"f32": 1e12}, 1e11, calibrated=str(tmp_path / "mine.toml"))
    host = DeviceKind("cpu", 1 << 30, {"f32": 1e11}, 1e10, dispatch_ns=7)
    machine = Topology("t", (Device("c", host, True), Device("g", kind)), (Link(("c", "g"), 10**9, 0),))
    builder = GraphBuilder("g")
    x = builder.op("x", "input", outputs=[4])
    for name in ("addmm", "relu", "other"):
        builder.op(name, name, inputs=builder.outputs(x))
    assert CostModel().table(builder.build(), machine).dispatch_ns.tolist() == [0, 30_000, 9_000, 7]
    assert CostModel(calibrated=False).table(builder.build(), machine).dispatch_ns.tolist() == [0, 7, 7, 7]


def test_commands_show_and_make_costs(simdev, folder, tmp_path):
    code, out, _ = simdev("costs", "inception-v3", "p100-pcie", "--json", "--top", 3)
    (answer,) = json.loads(out)
    assert code == 0 and answer["device_file"] == "p100" and len(answer["ops"]) == 3
    assert sum(answer["share"].values()) == pytest.approx(1) and answer["share"]["fit"] > 0.8
    assert answer["ops"][0]["source"] == "fit" and answer["ops"][0]["ns"] >= answer["ops"][1]["ns"]
    code, out, _ = simdev("costs", "inception-v3", "k80x2", "--top", 1)
    assert code == 0 and "k80" in out and "roofline 100.0 %" in out
    code, _, err = simdev("costs", "inception-v3", "k81")
    assert code == 2 and "k81" in err
    code, out, _ = simdev("calibrate", folder, "-o", tmp_path / "mine.toml")
    assert code == 0 and "linear" in out and read_calibration(tmp_path / "mine.toml").name == "v100"
    write_table(folder, "relu", "B,H", elementwise_rows(np.random.default_rng(2), count=30), device="Tesla_T4")
    code, _, err = simdev("calibrate", folder, "-o", tmp_path / "mine.toml")
    assert code == 2 and "--model" in err
    code, out, _ = simdev("calibrate", folder, "-o", tmp_path)
    assert code == 0 and {"t4.toml", "v100.toml"} <= {path.name for path in tmp_path.iterdir()}


def test_a_topology_names_a_device_file_beside_it(folder, tmp_path):
    save_calibration(build(read_tables([folder]))["v100"], tmp_path / "mine.toml")
    text = """
    name = "mine"
    kind.gpu = {memory_gib = 8, peak_tflops = { f32 = 14 }, memory_gb_per_s = 900, units = 80, calibrated = "mine.toml"}
    device = [{ name = "gpu0", kind = "gpu" }]
    """
    (tmp_path / "machine.toml").write_text(text)
    builder = GraphBuilder("g")
    builder.op("mm", "addmm", signature="addmm(f32[64],f32[512,512],f32[512,64])->f32[512,64]", outputs=[512 * 64 * 4])
    kind = load_topology(tmp_path / "machine.toml").kinds[0]
    ns, source = CostModel().op_costs(builder.build(), kind)
    assert SOURCES[source[0]] == "fit" and ns[0] > 1
    (tmp_path / "mine.npz").unlink()
    with pytest.raises(InvalidInput, match="mine.npz"):
        CostModel().op_costs(builder.build(), kind)


def test_small_boards_do_not_hold_their_clock(data_dir):
    """Why tables and whole models of T4 disagree: how much of the peak products reach falls with how long they run."""
    held = {}
    for device in ("Tesla_T4", "Tesla_V100-PCIE-32GB", "NVIDIA_A100-PCIE-40GB"):
        folder = data_dir / "neusight" / "collect"
        found = read_tables([folder / op / f"{device}.csv.gz" for op in ("linear", "add")])
        (sample,) = samples_by_model(found)[datasheets()[device].model]["linear"]
        kernel = sample.kernel_s()
        share = baseline_s("linear", sample.rows.dims, sample.sheet) / kernel
        held[device] = np.median(share[kernel > 0.01]) / np.median(share[(kernel > 3e-4) & (kernel < 1e-3)])
    assert held.pop("Tesla_T4") < 0.75 and all(0.95 < value < 1.1 for value in held.values())


def test_a_table_whose_kernels_the_host_hides_makes_no_class(folder, simdev, tmp_path):
    rows = [((2, 4 + 4 * size), 50e-6) for size in range(40)]
    write_table(folder, "softmax", "B,H", rows)
    code, out, _ = simdev("calibrate", folder, "-o", tmp_path / "mine.toml")
    assert code == 0 and "class softmax left out" in out
    assert "softmax" not in read_calibration(tmp_path / "mine.toml").classes


def test_a_table_is_judged_by_a_fit_to_the_others_of_its_class(tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "vector", (15, 8, 5))
    for number, (op, efficiency) in enumerate((("add", 0.8), ("mul", 0.8), ("div", 0.4))):
        write_table(tmp_path, op, "B,H", elementwise_rows(np.random.default_rng(number), efficiency, 300))
    errors = {
        row["case"].split()[1]: row["mean_error"]
        for row in op_cases(tmp_path)
        if row["group"] == "other with one table left out, v100"
    }
    samples = {s.rows.source.split()[1]: s for s in samples_by_model(read_tables([tmp_path]))["v100"]["vector"]}
    assert set(errors) == set(samples) == {"add", "mul", "div"}
    fit = fit_class([samples["add"], samples["mul"]], seed=0)
    assert errors["div"] == pytest.approx(np.abs(relative_error(fit, samples["div"])).mean())
    whole = fit_class(list(samples.values()), seed=0)
    assert errors["div"] > np.abs(relative_error(whole, samples["div"])).mean(), "what was fitted to does better"
