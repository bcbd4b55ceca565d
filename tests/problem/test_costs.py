"""Costs of ops: the model of kernels, measured tables, and what a problem makes of them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simdev.errors import InvalidInput, UnknownName
from simdev.problem.costs import (
    SOURCES,
    CostModel,
    calibration_of,
    load_measured,
    op_class,
    peak_flops,
    roofline_ns,
    save_measured,
)
from simdev.problem.graph import GraphBuilder
from simdev.problem.graph_file import load_graph
from simdev.problem.opcost.device import (
    Calibration,
    ClassFit,
    calibration_names,
    device_text,
    load_calibration,
    read_calibration,
)
from simdev.problem.opcost.parts import _MAKERS, KernelPart, parts_of
from simdev.problem.opcost.physics import Datasheet, baseline_s, features, moved_bytes, work_flops
from simdev.problem.opcost.signature import Tensor, parse_signature
from simdev.problem.opcost.stand_in import Board, stand_in
from simdev.problem.opcost.trees import UNIT, Trees, arrays_of, power_of_two, trees_from
from simdev.problem.topology import Device, DeviceKind, Link, Topology, load_kinds

# op costs: signatures, parts and physics by hand, trees, device files and their mistakes


SHEET = Datasheet(flops=1e12, bandwidth=1e11, multiprocessors=10)
CONV = (
    "convolution(f32[8,3,32,30],f32[16,3,5,5],f32[16],stride=[2,2],padding=[2,2],dilation=[1,1],transposed=False,"
    "output_padding=[0,0],groups=1)->f32[8,16,16,15]"
)
CONV_BACKWARD = (
    "convolution_backward(f32[8,16,16,15],f32[8,3,32,30],f32[16,3,5,5],bias_sizes=[16],stride=[2,2],padding=[2,2],"
    "dilation=[1,1],transposed=False,output_padding=[0,0],groups=1,output_mask=[False,True,True])"
    "->(f32[16,3,5,5],f32[16])"
)


def parts(text, op_class="elementwise", read=0, written=0):
    return [(part.name, part.dims) for part in parts_of(parse_signature(text), op_class, read, written)]


def test_signatures_are_taken_apart():
    op = parse_signature(CONV)
    assert op.kind == "convolution" and op.dtype == "f32"
    assert op.inputs == (Tensor("f32", (8, 3, 32, 30)), Tensor("f32", (16, 3, 5, 5)), Tensor("f32", (16,)))
    assert op.outputs == (Tensor("f32", (8, 16, 16, 15)),)
    assert op.numbers("stride") == (2, 2) and op.attributes["transposed"] == "False"
    assert parse_signature("relu").kind == "relu"
    assert parse_signature("cat(i64[2],bf16[],dim=1)->bf16[3]").dtype == "bf16"
    assert parse_signature("add(f32[),(((").kind == "add"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("mm(f32[2,3],f32[3,4])->f32[2,4]", [("gemm", (1, 2, 4, 3))]),
        ("addmm(f32[4],f32[2,3],f32[3,4])->f32[2,4]", [("linear", (1, 2, 4, 3))]),
        ("bmm(f32[7,2,3],f32[7,3,4])->f32[7,2,4]", [("bmm", (7, 2, 4, 3))]),
        ("linear(f32[5,2,3],f32[4,3],f32[4])->f32[5,2,4]", [("linear", (1, 10, 4, 3))]),
        (CONV, [("conv", (8, 3, 16, 32, 30, 16, 15, 5, 5, 2, 1))]),
        (
            CONV_BACKWARD,
            [("conv_wgrad", (8, 3, 16, 32, 30, 16, 15, 5, 5, 2, 1)), ("vector", (8 * 16 * 16 * 15 * 4, 64))],
        ),
        ("_softmax(f32[2,3,5],dim=2,half_to_float=False)->f32[2,3,5]", [("softmax", (6, 5))]),
        ("_softmax(f32[2,3,5],dim=1,half_to_float=False)->f32[2,3,5]", []),
        ("native_layer_norm(f32[2,3,5],f32[5],normalized_shape=[5])->f32[2,3,5]", [("layer_norm", (6, 5))]),
        ("relu(f32[4])->f32[4]", [("vector", (16, 16))]),
        ("mm(f32[2,3],f32[5,4])->f32[2,4]", []),
        (
            "LSTM(f32[50,8,3],f32[1,20,3],f32[1,20,5])->f32[50,1,8,5]",
            [("gemm", (1, 400, 20, 3)), ("rnn", (4, 5, 8, 50))],
        ),
    ],
)
def test_parts_by_hand(text, expected):
    assert parts(text, read=16, written=16) == expected


def test_ops_that_no_class_describes_have_no_parts():
    assert parts("max_pool2d(f32[1,1,2,2])->f32[1,1,1,1]", "pool") == []
    assert parts(CONV.replace("groups=1", "groups=3")) == []


SHAPES = st.lists(st.one_of(st.integers(0, 5), st.sampled_from([64, 2**30, 2**70])), max_size=5)
TENSORS = st.lists(st.tuples(st.sampled_from(["f32", "bf16", "i64"]), SHAPES), max_size=4)
NOISE = st.sampled_from(
    ["", "groups=0", "stride=[0]", "dim=-7", "normalized_shape=[]", "output_mask=[True,]", "x=[", "((,"]
)


@settings(deadline=None, derandomize=True)  # a slow computer is no failure
@given(st.sampled_from(sorted({*_MAKERS, "relu", "sum"})), TENSORS, TENSORS, NOISE)
def test_no_signature_of_a_foreign_graph_breaks_the_costs(kind, ins, outs, noise):
    shown = [",".join(f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in side) for side in (ins, outs)]
    op = parse_signature(f"{kind}({shown[0]},{noise})->{shown[1]}")
    found = parts_of(op, "elementwise", 0, 2**50)
    ns, source = load_calibration("v100").durations(found, SHEET, 2000)
    assert len(ns) == len(source) == len(found) and not np.any(ns < 2000)


def test_work_and_bytes_by_hand():
    gemm, conv = np.array([[2, 3, 4, 5]]), np.array([[8, 3, 16, 32, 30, 16, 15, 5, 5, 2, 1]])
    assert work_flops("bmm", gemm).tolist() == [2 * 2 * 3 * 4 * 5]
    assert moved_bytes("bmm", gemm).tolist() == [4 * 2 * (15 + 20 + 12)]
    assert work_flops("conv", conv).tolist() == [2 * 8 * 16 * 16 * 15 * 3 * 25]
    assert moved_bytes("conv", conv).tolist() == [4 * (8 * 3 * 32 * 30 + 8 * 16 * 16 * 15 + 16 * 3 * 25)]
    assert moved_bytes("softmax_backward", np.array([[6, 5]]), item=2).tolist() == [180]


def test_a_last_wave_costs_as_much_as_a_full_one():
    # 128 x 128 tiles on 10 processors of 100 GFLOP/s: 10 tiles are one wave, 11 are two; depth 500 is never split
    one, two = (baseline_s("gemm", np.array([[1, 128 * tiles, 128, 500]]), SHEET)[0] for tiles in (10, 20))
    wave = 2 * 128 * 128 * 500 / 1e11
    assert one == pytest.approx(wave) and two == pytest.approx(2 * wave)
    assert wave < baseline_s("gemm", np.array([[1, 128 * 11, 128, 500]]), SHEET)[0] < 2 * wave * 1.01


def test_the_steps_of_a_recurrent_layer_wait_for_each_other():
    dims = np.array([[3, 128, 16, 1], [3, 128, 16, 40]])  # gates, hidden, batch, steps
    one, forty = baseline_s("rnn", dims, SHEET)
    assert forty == pytest.approx(40 * one) and one >= 4 * 3 * 128 * 128 / 1e11
    assert work_flops("rnn_wgrad", dims).tolist() == [2 * 3 * 128**2 * 16, 2 * 3 * 128**2 * 16 * 40]
    weights = baseline_s("rnn_wgrad", dims[1:], SHEET)
    assert weights == baseline_s("gemm", np.array([[1, 384, 128, 640]]), SHEET)


def test_small_filters_of_stride_one_may_multiply_less():
    direct = np.array([[8, 64, 64, 32, 32, 32, 32, 3, 3, 2, 1]])
    winograd = np.array([[8, 64, 64, 32, 32, 32, 32, 3, 3, 1, 1]])
    ratio = baseline_s("conv", direct, SHEET) / baseline_s("conv3x3", winograd, SHEET)
    assert ratio == pytest.approx(2.25)


def test_nothing_is_faster_than_its_bytes():
    rng = np.random.default_rng(0)
    dims = rng.integers(1, 300, (50, 4))
    assert (baseline_s("bmm", dims, SHEET) >= moved_bytes("bmm", dims) / SHEET.bandwidth).all()


def test_powers_of_two_are_those_of_the_library():
    exponents = np.arange(-40 * UNIT, 40 * UNIT, 37)
    assert power_of_two(exponents) == pytest.approx(np.exp2(exponents / UNIT), rel=1e-9)


def test_trees_by_hand_and_through_a_file():
    # x0 <= 3: 1.0, else (x1 <= 0: 2.0, else -1.0); a second tree adds 0.5
    trees = Trees(
        feature=np.array([0, 0, 1, 0, 0, 0], np.uint8),
        threshold=np.array([3, 0, 0, 0, 0, 0], np.float32),
        left=np.array([1, -1, 3, -1, -1, -1], np.int32),
        value=np.array([0, UNIT, 0, 2 * UNIT, -UNIT, UNIT // 2], np.int16),
        roots=np.array([0, 5], np.int32),
    )
    rows = np.array([[3, 9], [4, 0], [4, 1]], np.float32)
    expected = [2**1.5, 2**2.5, 2**-0.5]
    assert trees.factor(rows) == pytest.approx(expected)
    again = trees_from(arrays_of(trees, "t"), "t", 2, "test")
    assert again.factor(rows).tolist() == trees.factor(rows).tolist()
    with pytest.raises(InvalidInput, match="does not describe trees"):
        trees_from(arrays_of(trees, "t") | {"t.left": np.zeros(6, np.int32)}, "t", 2, "test")
    with pytest.raises(InvalidInput, match="does not describe trees"):
        trees_from(arrays_of(trees, "t"), "t", 1, "test")
    with pytest.raises(InvalidInput, match="t.roots"):
        trees_from({k: v for k, v in arrays_of(trees, "t").items() if "roots" not in k}, "t", 2, "test")


def toy():
    classes = {"gemm": ClassFit(0.5, source="hand"), "vector": ClassFit(0.8)}
    return Calibration("toy", SHEET, 2000, classes, {"gemm(1,2,4,3) f32": 777.0})


def test_tables_come_first_then_fits_and_dtypes_stay_apart():
    product = KernelPart("gemm", (1, 128, 128, 500))
    ns, source = toy().durations(
        [KernelPart("gemm", (1, 2, 4, 3)), product, KernelPart("gemm", (1, 128, 128, 500), "bf16"),
         KernelPart("softmax", (2, 2)),
         KernelPart("vector", (8000, 8000), "bf16")],
        SHEET, 2000,
    )  # fmt: skip
    assert source == ["table", "fit", "", "", "fit"]
    assert ns[0] == 777 and np.isnan(ns[2]) and np.isnan(ns[3])
    assert ns[1] == pytest.approx(2000 + 1e9 * baseline_s("gemm", np.array([product.dims]), SHEET)[0] / 0.5)
    assert ns[4] == pytest.approx(2000 + 16000 / 0.8e11 * 1e9)
    other = Datasheet(2e12, 2e11, 10)  # twice as fast: half the time, and no table
    assert toy().durations([product], other, 2000)[0][0] == pytest.approx(2000 + (ns[1] - 2000) / 2)
    assert toy().durations([KernelPart("gemm", (1, 2, 4, 3))], other, 2000)[1] == ["fit"]


def test_device_files_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "toy.toml"
    path.write_text(device_text(toy()))
    again = read_calibration(path)
    assert (again.sheet, again.launch_ns, again.table) == (SHEET, 2000, toy().table)
    assert again.classes["gemm"].efficiency == 0.5 and again.classes["gemm"].source == "hand"
    for old, new, message in [
        ("format = 1", "format = 2", "format"),
        ("efficiency = 0.5", "efficiency = nan", "efficiency"),
        ("efficiency = 0.5", "efficiency = -1", "positive"),
        ("[class.gemm]", "[class.gem]", "gem"),
        ("trees = false", "trees = true", "No such file"),
        ("multiprocessors = 10", "multiprocessors = true", "multiprocessors"),
        ("= 777", "= 'x'", "table"),
    ]:
        path.write_text(device_text(toy()).replace(old, new, 1))
        with pytest.raises((InvalidInput, UnknownName), match=message):
            read_calibration(path)
    with pytest.raises(UnknownName):
        load_calibration("v1000")


@pytest.mark.parametrize("name", calibration_names())
def test_shipped_device_files_cost_what_they_say(name):
    device = load_calibration(name)
    for part in ("linear", "bmm", "vector", "softmax", "layer_norm", "conv3x3", "conv", "conv_dgrad", "conv_wgrad"):
        fit = device.classes[part]
        assert fit.source and 0.05 < fit.efficiency < 2, part
    big = KernelPart("gemm", (1, 4096, 4096, 4096))
    seconds = device.durations([big], device.sheet, device.launch_ns)[0][0] / 1e9
    assert 0.2 < 2 * 4096**3 / seconds / device.sheet.flops < 1.05
    copy = KernelPart("vector", (1 << 28, 1 << 28))
    seconds = device.durations([copy], device.sheet, device.launch_ns)[0][0] / 1e9
    assert 0.6 < (1 << 29) / seconds / device.sheet.bandwidth < 1


def test_sources_of_a_small_graph():
    b = GraphBuilder("g")
    x = b.op("x", "input", outputs=[24])
    b.op("mm", "mm", inputs=b.outputs(x), outputs=[32], flops=48, signature="mm(f32[2,3],f32[3,4])->f32[2,4]")
    b.op("half", "mm", inputs=b.outputs(x), outputs=[16], flops=48, signature="mm(bf16[2,3],bf16[3,4])->bf16[2,4]")
    b.op("pool", "max_pool2d", inputs=b.outputs(x), outputs=[8])
    b.op("relu", "relu", inputs=b.outputs(x), outputs=[24], signature="relu(f32[6])->f32[6]")
    b.op("no", "topk", inputs=b.outputs(x), outputs=[24])
    kind = DeviceKind(
        "k", 1 << 30, {"f32": 14e12, "bf16": 1e14}, 9e11, multiprocessors=80, calibrated="v100", unsupported=("topk",)
    )
    graph = b.build()
    ns, source = CostModel({"k": {"relu(f32[6])->f32[6]": 5}}).op_costs(graph, kind)
    assert [SOURCES[number] for number in source] == ["free", "fit", "roofline", "roofline", "table", "unsupported"]
    assert ns[0] == 1 and ns[4] == 5 and ns[5] == -1
    bare = CostModel(calibrated=False)
    assert "fit" not in [SOURCES[number] for number in bare.op_costs(graph, kind)[1]]


def test_kinds_of_the_shelf_name_device_files_that_exist():
    for kind in load_kinds().values():
        assert kind.calibrated in ("", "auto", *calibration_names()), kind.name
        assert not kind.calibrated or (kind.multiprocessors > 1 and calibration_of(kind).classes), kind.name


def test_a_board_without_a_file_takes_the_one_of_the_most_similar_power(tmp_path):
    graph = GraphBuilder("g")
    text = "mm(bf16[4096,4096],bf16[4096,4096])->bf16[4096,4096]"
    graph.op("mm", "mm", flops=2 * 4096**3, outputs=[4096 * 4096 * 2], signature=text)
    kind = DeviceKind("my", 1 << 40, {"f32": 50e12, "bf16": 3e14}, 2e12, multiprocessors=108, calibrated="auto")
    kind = replace(kind, watts=390, capability=8.0)
    ns, source = CostModel().op_costs(graph.build(), kind)
    assert SOURCES[source[0]] == "fit" and 0.5 < 2 * 4096**3 / ns[0] / 1e-9 / 3e14 < 1
    assert calibration_of(kind).name == "a100"
    small = calibration_of(replace(kind, watts=70))
    assert small.classes["product bf16"].efficiency < calibration_of(kind).classes["product bf16"].efficiency
    with pytest.raises(InvalidInput, match="watts"):
        calibration_of(replace(kind, watts=0.0))
    assert stand_in(Board(300, 0, "amd", 1.8e14)).name == "a100 and mi300x"


def test_features_are_those_of_any_row_alone():
    rng = np.random.default_rng(1)
    dims = rng.integers(1, 64, (20, 11))
    together = features("conv", dims, SHEET)
    assert np.array_equal(together, np.concatenate([features("conv", dims[i : i + 1], SHEET) for i in range(20)]))


def test_products_below_f32_run_on_matrix_units_in_larger_tiles():
    sheet = Datasheet(1e12, 1e12, 10, (("bf16", 16e12), ("tf32", 8e12)))
    full = np.array([[1, 256 * 10, 128, 64]])  # one wave of the largest tiles
    assert baseline_s("gemm", full, sheet, "bf16")[0] == pytest.approx(2 * 2560 * 128 * 64 / 16e12)
    assert baseline_s("gemm", full, sheet, "tf32")[0] == pytest.approx(2 * 2560 * 128 * 64 / 8e12)
    assert baseline_s("gemm", full, sheet, "f16")[0] == baseline_s("gemm", full, sheet, "bf16")[0]
    padded = full + np.array([[0, 0, 0, 1]])  # a depth of 65 is padded to 128
    assert baseline_s("gemm", padded, sheet, "bf16")[0] == pytest.approx(2 * 2560 * 128 * 128 / 16e12)


def test_precisions_have_classes_and_a_factor_of_their_own():
    product = KernelPart("linear", (1, 512, 512, 512), "f16")
    classes = {"product bf16": ClassFit(0.5), "gemm": ClassFit(0.25), "attention bf16": ClassFit(0.5)}
    device = Calibration("toy", SHEET, 0, classes)
    ns, source = device.durations([product, KernelPart("gemm", (1, 512, 512, 512), "f8")], SHEET, 0)
    assert source == ["fit", "fit"] and ns[1] <= ns[0]
    slower = Calibration("toy", SHEET, 0, classes, steps={"f16": 1.5}).durations([product], SHEET, 0)[0][0]
    assert slower == pytest.approx(1.5 * ns[0])
    like = Calibration("toy", SHEET, 0, classes, steps={"bf16": 1.5}).durations(
        [product, KernelPart("gemm", (1, 512, 512, 512), "f8")], SHEET, 0
    )[0]
    assert like == pytest.approx(1.5 * ns)  # f16 and FP8 have the factor of bf16 unless they have their own
    attention = KernelPart("attention", (2, 4, 4, 256, 256, 64, 64, 0), "bf16")
    forward, backward = device.durations(
        [attention, KernelPart("attention_backward", attention.dims, "bf16")], SHEET, 0
    )[0]
    assert 2.5 < backward / forward < 3.2  # 2.5 times the products, at a somewhat lower rate


def test_fused_attention_counts_what_a_causal_mask_leaves():
    whole, causal = np.array([[2, 8, 2, 1024, 1024, 64, 64, 0], [2, 8, 2, 1024, 1024, 64, 64, 1]])
    assert work_flops("attention", whole[None])[0] == 4 * 2 * 8 * 1024 * 1024 * 64
    assert work_flops("attention", causal[None])[0] == work_flops("attention", whole[None])[0] / 2
    assert work_flops("attention_backward", whole[None])[0] == 2.5 * work_flops("attention", whole[None])[0]
    assert moved_bytes("attention", whole[None], 2)[0] == 2 * 2 * 1024 * 64 * (2 * 8 + 2 * 2)
    text = (
        "_scaled_dot_product_flash_attention_backward(bf16[2,8,1024,64],bf16[2,8,1024,64],bf16[2,2,1024,64],"
        "bf16[2,2,1024,64],bf16[2,8,1024,64],f32[2,8,1024],is_causal=True)->(bf16[2,8,1024,64])"
    )
    assert parts(text, "attention") == [("flash_attention_backward", tuple(causal))]


def test_a_device_file_takes_from_another_what_it_lacks(tmp_path):
    (tmp_path / "toy.toml").write_text(device_text(toy()))
    sheet = Datasheet(1e12, 1e11, 10, (("bf16", 16e12),))
    text = 'format = 1\nname = "b"\nlaunch_us = 1\nlike = "toy"\n[datasheet]\npeak_tflops = 1\nmemory_gb_per_s = 100\n'
    (tmp_path / "b.toml").write_text(
        text + 'units = 10\n[rates]\nbf16 = 16\n[steps]\nbf16 = 1.1\n[class."product bf16"]\nefficiency = 0.5\n'
    )
    device = read_calibration(tmp_path / "b.toml")
    assert set(device.classes) == {"gemm", "vector", "product bf16"} and device.sheet == sheet
    assert device.sheet.rate("bf16") == 16e12 and device.steps == {"bf16": 1.1}


def test_captured_fp8_products_are_priced_in_fp8():
    """``_scaled_mm`` takes its scales behind the operands, and gives a 16-bit result."""
    text = "_scaled_mm(f8e4m3[64,32],f8e4m3[32,48],f32[64,1],f32[1,48])->bf16[64,48]"
    (part,) = parts_of(parse_signature(text), "gemm", 0, 0)
    assert part == KernelPart("gemm", (1, 64, 48, 32), "f8")


# costs: rooflines and transfers computed by hand, op classes, measured tables and their mistakes


GPU = DeviceKind(
    "gpu",
    2**30,
    {"f32": 1e12, "tf32": 4e12, "bf16": 8e12},
    1e11,
    launch_ns=100,
    compute_efficiency={"default": 0.5, "conv": 0.25},
    memory_efficiency={"norm": 0.5},
)
CPU = DeviceKind("cpu", 2**30, {"f32": 1e11}, 1e10, dispatch_ns=700, unsupported=("rare",))
PAIR = Topology("pair", (Device("cpu0", CPU, host=True), Device("gpu0", GPU)), (Link(("cpu0", "gpu0"), 10**9, 50),))


def graph_of(*ops):
    builder = GraphBuilder("g")
    for number, op in enumerate(ops):
        builder.op(f"op{number}", **op)
    return builder.build()


def test_the_roofline_takes_the_larger_of_compute_and_memory():
    graph = graph_of(
        dict(kind="mm", flops=10**6, bytes_read=10, bytes_written=10),  # 1e6 / (1e12 * 0.5) = 2000 ns
        dict(kind="add", flops=10, bytes_read=2 * 10**5, bytes_written=10**5),  # 3e5 / 1e11 = 3000 ns
        dict(kind="native_layer_norm", bytes_read=10**5),  # 1e5 / (1e11 * 0.5) = 2000 ns
        dict(kind="input", bytes_read=10**9),
        dict(kind="add"),
    )
    assert roofline_ns(graph, GPU).tolist() == [2100, 3100, 2100, 1, 100]
    assert roofline_ns(graph, CPU).tolist() == [10000, 30000, 10000, 1, 1]


def test_the_dtype_picks_the_rate():
    ops = [
        dict(kind="mm", signature="mm(f32[2,2],f32[2,2])->f32[2,2]", flops=10**6),
        dict(kind="mm", signature="mm(bf16[2,2],bf16[2,2])->bf16[2,2]", flops=10**6),
        dict(kind="convolution", signature="convolution(f32[1],f32[1])->f32[1]", flops=10**6),
        dict(kind="embedding", signature="embedding(i64[1],f32[1])->f32[1]", flops=10**6),
    ]
    assert roofline_ns(graph_of(*ops), GPU).tolist() == [2100, 350, 1100, 2100]
    # convolutions run in TF32 unless that is switched off; a device without it is not concerned
    assert roofline_ns(graph_of(*ops), GPU, tf32=()).tolist() == [2100, 350, 4100, 2100]
    assert roofline_ns(graph_of(*ops), CPU).tolist() == [10000] * 4
    assert peak_flops(CPU, "bf16") == 1e11


@pytest.mark.parametrize(
    "name, kinds",
    {
        "conv": "convolution cudnn_convolution conv2d Conv ConvTranspose _conv_depthwise2d Conv2d",
        "conv_backward": "convolution_backward conv_transpose2d_backward",
        "gemm": "mm addmm bmm baddbmm baddbmm_ linear MatMul Gemm LSTM GRU _grouped_mm mkldnn_rnn_layer dot addmm_",
        "attention": "_scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention_backward Attention"
        " _scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_attention_math_backward",
        "norm": "native_batch_norm native_layer_norm _native_batch_norm_legit_functional native_group_norm"
        " BatchNormalization LayerNormalization cudnn_batch_norm _fused_rms_norm BatchNorm2d rms_norm",
        "norm_backward": "native_batch_norm_backward native_layer_norm_backward native_group_norm_backward"
        " _fused_rms_norm_backward cudnn_batch_norm_backward BatchNorm2d_backward",
        "pool": "max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d _adaptive_avg_pool2d MaxPool"
        " GlobalAveragePool avg_pool2d_backward mean_pool",
        "reduction": "_softmax _log_softmax _softmax_backward_data sum mean amax var_mean nll_loss_forward Softmax"
        " ReduceMean topk cumsum max argmax",
        "embedding": "embedding embedding_dense_backward index index_put_ gather Gather scatter_add _embedding_bag"
        " index_select nonzero",
        "copy": "cat copy_ clone constant_pad_nd Concat slice_backward select_backward zeros_like fill_ stack _to_copy",
        "elementwise": "add add_ mul relu gelu tanh maximum threshold_backward native_dropout addcmul_ addcdiv_ where"
        " lerp_ sigmoid convert_element_type rsqrt _foreach_add_ gelu_backward minimum sqrt linspace bernoulli_",
    }.items(),
)
def test_op_classes(name, kinds):
    assert {kind: op_class(kind) for kind in kinds.split()} == {kind: name for kind in kinds.split()}


def test_transfers_round_up_and_last_at_least_one_nanosecond():
    builder = GraphBuilder("g")
    op = builder.op("a", "input", outputs=[0, 1, 999, 2**40])
    builder.op("b", "relu", inputs=builder.outputs(op))
    costs = CostModel().table(builder.build(), PAIR)
    assert costs.transfer_ns.tolist() == [[50, 51, 1049, 50 + 2**40]]
    assert costs.pair_class.tolist() == [[-1, 0], [0, -1]]
    assert costs.dispatch_ns.tolist() == [0, 700]
    free = Topology("free", PAIR.devices, (Link(("cpu0", "gpu0"), 10**9, 0),))
    assert CostModel().table(builder.build(), free).transfer_ns[0, 0] == 1


def test_a_transfer_that_would_take_hours_is_refused():
    builder = GraphBuilder("g")
    builder.op("a", "input", outputs=[2**43])
    slow = Topology("slow", PAIR.devices, (Link(("cpu0", "gpu0"), 10**9, 0),))
    with pytest.raises(InvalidInput, match="slow: a tensor of 8796093022208 bytes would take 8.8e[+]03 s"):
        CostModel().table(builder.build(), slow)
    assert CostModel().table(builder.build(), Topology("one", PAIR.devices[:1])).transfer_ns.shape == (0, 1)


def test_unsupported_ops_have_no_cost_and_must_fit_somewhere():
    graph = graph_of(dict(kind="rare"), dict(kind="mm"))
    assert CostModel().table(graph, PAIR).op_ns.tolist() == [[-1, 1], [100, 100]]
    alone = Topology("alone", (Device("cpu0", CPU),))
    with pytest.raises(InvalidInput, match="op 'op0' of kind 'rare' is supported by no device of alone"):
        CostModel().table(graph, alone)


def test_measured_costs_come_first_and_zero_is_raised_to_one():
    graph = graph_of(dict(kind="mm", signature="s"), dict(kind="mm", signature="t"), dict(kind="mm", signature="u"))
    table = CostModel({"gpu": {"s": 12.6, "t": 0}}).table(graph, PAIR)
    assert table.op_ns.tolist() == [[1, 1, 1], [13, 1, 100]]
    assert table.hash != CostModel().table(graph, PAIR).hash


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "12", None, True])
def test_a_measured_cost_that_is_no_duration_is_refused(value):
    with pytest.raises(InvalidInput, match="measured costs: gpu: s: .* is not a duration"):
        CostModel({"gpu": {"s": value}}).table(graph_of(dict(kind="mm", signature="s")), PAIR)


def test_an_op_that_would_take_hours_is_refused():
    with pytest.raises(InvalidInput, match="op 'op0' would take"):
        roofline_ns(graph_of(dict(kind="mm", flops=2**62)), CPU)


@pytest.mark.parametrize("name", ["costs.json", "costs.csv"])
def test_measured_costs_survive_a_file(tmp_path, name):
    measured = {"gpu": {"mm(f32[2,3],f32[3,4])->f32[2,4]": 1200.5, 'odd "name"': 0.0}, "cpu": {"mm": 3.0}}
    save_measured(measured, tmp_path / name)
    assert load_measured(tmp_path / name) == measured


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("m.csv", "signature,device_kind,ns\na,gpu,1\nb,gpu,-2\n", "m.csv: line 3: -2.0 is not a duration"),
        ("m.csv", "signature,device_kind,ns\na,gpu,nan\n", "m.csv: line 2: nan is not a duration"),
        ("m.csv", "signature,device_kind,ns\na,gpu,fast\n", "m.csv: line 2: ns: 'fast' is not a number"),
        ("m.csv", "signature,device_kind,ns\na,gpu\n", "m.csv: line 2: wrong number of columns"),
        ("m.csv", "signature,device_kind,ns\na,gpu,1,2\n", "m.csv: line 2: wrong number of columns"),
        ("m.csv", "signature,device_kind,ns\na,gpu,1\na,gpu,2\n", "m.csv: line 3: 'a' on 'gpu' is given twice"),
        ("m.csv", "signature,ns\na,1\n", "m.csv: line 1: column 'device_kind' is missing"),
        ("m.csv", "", "m.csv: line 1: column"),
        ("m.csv", b"\xff\xfe", "m.csv: not text"),
        ("m.csv", 'signature,device_kind,ns\n"a', "m.csv: not CSV"),
        ("m.json", '{"gpu": {"a": -1}}', "m.json: gpu: a: -1 is not a duration"),
        ("m.json", '{"gpu": {"a": NaN}}', "m.json: not JSON (NaN is not JSON)"),
        ("m.json", '{"gpu": {"a": "1"}}', "m.json: gpu: a: '1' is not a duration"),
        ("m.json", '{"gpu": [1]}', "m.json: expected {device kind: {signature: ns}}"),
        ("m.json", "[" * 10000, "m.json: not JSON"),
        ("none.json", None, "none.json: No such file or directory"),
    ],
)
def test_mistakes_in_measured_costs_name_the_place(tmp_path, name, text, message):
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(InvalidInput) as caught:
        load_measured(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_costs_are_whole_positive_numbers_on_random_graphs():
    rng = np.random.default_rng(5)
    for _ in range(20):
        ops = [
            dict(
                kind=str(rng.choice(["mm", "add", "convolution", "input"])),
                flops=int(rng.integers(10**9)),
                bytes_read=int(rng.integers(10**6)),
                bytes_written=int(rng.integers(10**6)),
            )
            for _ in range(30)
        ]
        graph = graph_of(*ops)
        table = CostModel().table(graph, PAIR)
        assert table.op_ns.shape == (2, 30) and table.op_ns.min() >= 1
        for number, op in enumerate(ops):
            if op["kind"] == "add":
                seconds = max(op["flops"] / 0.5e12, (op["bytes_read"] + op["bytes_written"]) / 1e11)
                assert abs(table.op_ns[1, number] - 100 - seconds * 1e9) <= 1


@pytest.mark.parametrize(
    # TensorFlow's benchmarks of 2017 (batch 32, synthetic data); its P100 is the SXM2 variant, its cuDNN version 5.1
    "kind, images_per_s, share",
    [("k80", 29.6, 0.05), ("p100-pcie", 128, 0.15)],
)
def test_inception_takes_about_as_long_as_was_measured(kind, images_per_s, share):
    from simdev.placers.registry import graph_path

    graph = load_graph(graph_path("inception-v3"))
    seconds = CostModel().op_durations(graph, load_kinds()[kind]).sum() / 1e9
    assert 32 / seconds == pytest.approx(images_per_s, rel=share)


def test_every_op_of_the_shipped_graphs_has_a_cost_class_of_its_nature():
    from simdev.placers.registry import graph_path, workloads

    flops, seen = {}, set()
    for name in workloads():
        graph = load_graph(graph_path(name))
        for number, kind in enumerate(graph.kinds):
            seen.add(op_class(kind))
            work = graph.op_flops[graph.op_kind == number].sum()
            flops[op_class(kind)] = flops.get(op_class(kind), 0) + int(work)
    heavy = sum(flops.get(name, 0) for name in ("conv", "conv_backward", "gemm", "attention"))
    assert heavy / sum(flops.values()) > 0.98, "the ops that compute are classed as such"
    assert seen >= {"conv", "conv_backward", "gemm", "norm", "norm_backward", "pool", "reduction", "embedding"}


def test_convolutions_with_groups_are_a_class_of_their_own():
    kind = DeviceKind("g", 1 << 30, {"f32": 1e12}, 1e12, compute_efficiency={"depthwise": 0.1, "default": 1.0})
    ops = [dict(kind="convolution", flops=10**6, signature=f"convolution(f32[1],groups={n})->f32[1]") for n in (1, 12)]
    assert roofline_ns(graph_of(*ops), kind).tolist() == [1000, 10_000]
