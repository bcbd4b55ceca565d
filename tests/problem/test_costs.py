"""Costs: rooflines and transfers worked out by hand, op classes, measured tables and their mistakes."""

import numpy as np
import pytest

from simdev.errors import InvalidInput
from simdev.problem.costs import CostModel, load_measured, op_class, peak_flops, roofline_ns, save_measured
from simdev.problem.graph import GraphBuilder
from simdev.problem.graph_file import load_graph
from simdev.problem.topology import Device, DeviceKind, Link, Topology, load_kinds

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
