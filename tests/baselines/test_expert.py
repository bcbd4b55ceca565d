import numpy as np
import pytest

from simdev.errors import Unsupported
from simdev.placers.budget import Budget
from simdev.placers.registry import find_placer, graph_path, load_workload, workloads
from simdev.problem.graph import GraphBuilder
from simdev.problem.problem import Problem
from simdev.problem.topology import load_topology


def chain(family, layers):
    """One op per layer name, each reading the one before; table layers hold as many MiB as their number + 1."""
    builder, last = GraphBuilder(family or "captured", {"family": family} if family else {}), []
    for number, layer in enumerate(layers):
        size = (int(layer[5:]) + 1) << 20 if layer.startswith("table") else 0
        op = builder.op(
            f"op{number}", "mm", inputs=last, flops=10**6, outputs=[1024], layer=layer, persistent_bytes=size
        )
        last = builder.outputs(op)
    return builder.build()


def expert(graph, topology="p100x4"):
    problem = Problem.build(graph, load_topology(topology))
    spec, _ = find_placer("expert")
    return spec.place(problem, rng=np.random.default_rng(0), budget=Budget(problem)).devices.tolist()


def test_inception_is_cut_into_contiguous_stages():
    layers = ["stem.0", "mixed.0", "mixed.1", "mixed.2", "mixed.7", "aux.0", "mixed.8", "head.0"]
    # Two layers a device; aux counts with mixed.7, which it reads, and comes before mixed.8.
    assert expert(chain("inception", layers)) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_transformer_layers_keep_together_with_embedding_first_and_softmax_last():
    layers = ["embedding"] + [f"layer{i}.{part}" for i in range(4) for part in ("attention", "norm")] + ["softmax"]
    devices = expert(chain("gpt2", layers))
    assert devices == sorted(devices) and devices[0] == 1 and devices[-1] == 4
    for i in range(4):
        assert devices[1 + 2 * i] == devices[2 + 2 * i]


def test_cells_stay_whole_and_the_auxiliary_head_goes_with_its_neighbour():
    layers = ["stem.0", "cell.0.current", "cell.0.block", "cell.1.current", "cell.1.block", "aux.0", "cell.2", "head.0"]
    # Seven layers with a place, in four stages by the middle of each cell; aux reads cell 1.
    assert expert(chain("nasnet", layers)) == [1, 2, 2, 3, 3, 3, 4, 4]


def test_wavenet_is_cut_along_its_stacks():
    layers = ["input"] + [f"stack.{s}.{i}.filter" for s in range(2) for i in range(3)] + ["head.1"]
    assert expert(chain("wavenet", layers)) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_cells_are_whole_and_wavenet_follows_its_stacks():
    cells = ["stem"] + [f"cell.{i}.block.0.0" for i in range(10)] + ["aux.0", "head.0"]
    devices = expert(chain("nasnet", cells))
    assert devices[:11] == sorted(devices[:11]) and set(devices) == {1, 2, 3, 4}
    assert devices[11] == devices[10]  # aux goes with what it reads
    layers = [f"stack.{s}.{i}.filter" for s in range(4) for i in range(9)]
    assert expert(chain("wavenet", layers)) == [1 + s for s in range(4) for _ in range(9)]


@pytest.mark.parametrize("name", workloads())
def test_every_shipped_workload_has_a_rule(name):
    if not graph_path(name).is_file():
        pytest.skip(f"the graph of {name} is not shipped")
    graph = load_workload(name)
    devices = np.array(expert(graph))
    load = np.bincount(devices, graph.op_flops.astype(float), minlength=5)
    assert set(devices) <= {1, 2, 3, 4} and len(set(devices)) > 1
    assert load.max() < 0.9 * load.sum() or name == "dlrm"  # whose tables hold the bytes, not the FLOPs


def test_each_lstm_layer_has_its_device():
    layers = ["embedding", "layer0", "layer1", "softmax"]
    assert expert(chain("rnnlm", layers)) == [1, 1, 2, 2]


def test_encoder_and_decoder_have_devices_of_their_own_where_there_are_enough():
    layers = [
        "encoder.embedding",
        "encoder.layer0",
        "encoder.layer1",
        "decoder.embedding",
        "decoder.attention.query",
        "decoder.layer0",
        "decoder.layer1",
        "softmax",
    ]
    assert expert(chain("nmt", layers)) == [1, 1, 2, 3, 4, 3, 4, 4]
    assert expert(chain("nmt", layers), "p100x2") == [1, 1, 2, 1, 2, 1, 2, 2]


def test_deep_lstm_layers_share_devices_in_order():
    layers = [f"encoder.layer{i}" for i in range(8)] + [f"decoder.layer{i}" for i in range(8)]
    assert expert(chain("nmt", layers)) == 2 * [1, 1, 2, 2, 3, 3, 4, 4]


def test_tables_are_spread_by_size():
    # Sizes 1..5: 5 to the first, 4, 3, 2 to the others, then 1 beside 2; the rest on the first.
    layers = [f"table{i}" for i in range(5)] + ["bottom.0", "interaction", "top.0"]
    assert expert(chain("dlrm", layers)) == [4, 4, 3, 2, 1, 1, 1, 1]


def test_ops_of_unknown_layers_go_with_their_neighbours():
    assert expert(chain("rnnlm", ["layer0", "layer1", "", ""])) == [1, 2, 2, 2]


def test_a_captured_model_is_cut_between_the_members_of_its_lists():
    layers = ["wte", *(f"h.{number}.{part}" for number in range(8) for part in ("attn", "mlp")), "head"]
    graph = chain(None, layers)
    assert expert(graph, "p100x4") == [1, *(1 + number // 2 for number in range(8) for _ in range(2)), 4]
    with pytest.raises(Unsupported, match="member of a list"):
        expert(chain(None, ["a", "b"]))


def test_unknown_family_is_unsupported():
    with pytest.raises(Unsupported, match="family 'perceptron'"):
        expert(chain("perceptron", ["a", "b"]))
