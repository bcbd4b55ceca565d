"""Capture: two models small enough to compute by hand, then properties, then users' files."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

from simdev.errors import InvalidInput, Unsupported
from simdev.graphs.capture import capture, capture_file
from simdev.graphs.workload import TrainingStep

torch = pytest.importorskip("torch")
nn = torch.nn


def mlp_step(optimizer=torch.optim.SGD, **options):
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    made = optimizer(model.parameters(), lr=0.1, **options) if optimizer else None
    return TrainingStep(model, (torch.zeros(2, 4),), lambda model, x: model(x).sum(), made)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 2, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(2)
        self.act = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(2, 2, 3, padding=1, bias=False)

    def forward(self, x):
        x = self.act(self.norm(self.first(x)))
        return x + self.second(x)


def residual_step():
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return TrainingStep(model, (torch.zeros(1, 1, 4, 4),), lambda model, x: model(x).sum(), optimizer)


def number(graph, name):
    return graph.op_names.index(name)


def signature(graph, name):
    return graph.signatures[graph.op_signature[number(graph, name)]]


def edges(graph):
    """{(producer, consumer): bytes} by op name."""
    return {
        (graph.op_names[source], graph.op_names[target]): int(graph.tensor_bytes[tensor])
        for source, target, tensor in zip(graph.edge_source, graph.consumers, graph.edge_tensor, strict=True)
    }


def groups(graph):
    """Colocation groups as a set of frozensets of op names."""
    return {
        frozenset(graph.op_names[i] for i in np.flatnonzero(graph.op_group == group))
        for group in set(graph.op_group.tolist()) - {-1}
    }


MLP = {  # name: (phase, FLOPs, bytes read, bytes written, persistent bytes)
    "0/weight": ("forward", 0, 0, 0, 48),
    "0/bias": ("forward", 0, 0, 0, 12),
    "2/weight": ("forward", 0, 0, 0, 24),
    "2/bias": ("forward", 0, 0, 0, 8),
    "input.0": ("forward", 0, 0, 0, 0),
    "0/addmm": ("forward", 2 * 2 * 4 * 3, 12 + 32 + 48, 24, 0),
    "1/relu": ("forward", 6, 24, 24, 0),
    "2/addmm": ("forward", 2 * 2 * 3 * 2, 8 + 24 + 24, 16, 0),
    "loss/sum": ("forward", 4, 16, 4, 0),
    "loss/ones_like": ("backward", 0, 4, 4, 0),
    "2/mm": ("backward", 2 * 2 * 2 * 3, 4 + 24, 24, 0),  # gradient of the activation; the ones are 4 bytes expanded
    "2/mm.1": ("backward", 2 * 2 * 2 * 3, 4 + 24, 24, 0),  # gradient of the weight
    "2/sum": ("backward", 4, 4, 8, 0),
    "1/threshold_backward": ("backward", 6, 48, 24, 0),
    "0/mm": ("backward", 2 * 3 * 2 * 4, 24 + 32, 48, 0),
    "0/sum": ("backward", 6, 24, 12, 0),
    "0/weight/sgd": ("update", 12, 96, 48, 0),
    "0/bias/sgd": ("update", 3, 24, 12, 0),
    "2/weight/sgd": ("update", 6, 48, 24, 0),
    "2/bias/sgd": ("update", 2, 16, 8, 0),
}


def test_mlp_ops_by_hand():
    graph = capture(mlp_step(), "mlp")
    found = {
        name: (
            ("forward", "backward", "update")[graph.op_phase[i]],
            int(graph.op_flops[i]),
            int(graph.op_bytes_read[i]),
            int(graph.op_bytes_written[i]),
            int(graph.op_persistent_bytes[i]),
        )
        for i, name in enumerate(graph.op_names)
    }
    assert found == MLP


def test_mlp_edges_by_hand():
    assert edges(capture(mlp_step(), "mlp")) == {
        ("0/weight", "0/addmm"): 48, ("0/bias", "0/addmm"): 12, ("input.0", "0/addmm"): 32,
        ("0/addmm", "1/relu"): 24, ("1/relu", "2/addmm"): 24, ("2/weight", "2/addmm"): 24, ("2/bias", "2/addmm"): 8,
        ("2/addmm", "loss/sum"): 16, ("loss/sum", "loss/ones_like"): 4,
        ("loss/ones_like", "2/mm"): 4, ("2/weight", "2/mm"): 24, ("loss/ones_like", "2/mm.1"): 4,
        ("1/relu", "2/mm.1"): 24, ("loss/ones_like", "2/sum"): 4,
        ("2/mm", "1/threshold_backward"): 24, ("1/relu", "1/threshold_backward"): 24,
        ("1/threshold_backward", "0/mm"): 24, ("input.0", "0/mm"): 32, ("1/threshold_backward", "0/sum"): 24,
        ("0/mm", "0/weight/sgd"): 48, ("0/weight", "0/weight/sgd"): 48,
        ("0/sum", "0/bias/sgd"): 12, ("0/bias", "0/bias/sgd"): 12,
        ("2/mm.1", "2/weight/sgd"): 24, ("2/weight", "2/weight/sgd"): 24,
        ("2/sum", "2/bias/sgd"): 8, ("2/bias", "2/bias/sgd"): 8,
        ("2/mm", "2/weight/sgd"): 0,  # reads the weight, and no path leads from it to the update
    }  # fmt: skip


def test_mlp_groups_results_signatures_by_hand():
    graph = capture(mlp_step(), "mlp")
    assert groups(graph) == {
        frozenset({"0/weight", "0/mm", "0/weight/sgd"}),
        frozenset({"0/bias", "0/sum", "0/bias/sgd"}),
        frozenset({"2/weight", "2/mm.1", "2/weight/sgd"}),
        frozenset({"2/bias", "2/sum", "2/bias/sgd"}),
    }
    results = graph.tensor_producer[graph.tensor_result]
    assert [graph.op_names[i] for i in results] == ["loss/sum"]
    assert {graph.op_names[i] for i in graph.tensor_producer[graph.tensor_persistent]} == {
        "0/weight",
        "0/bias",
        "2/weight",
        "2/bias",
    }
    assert signature(graph, "0/addmm") == "addmm(f32[3],f32[2,4],f32[4,3])->f32[2,3]"
    assert signature(graph, "2/mm.1") == "mm(f32[2,2],f32[2,3])->f32[2,3]"
    assert signature(graph, "0/weight/sgd") == "sgd(f32[3,4],state=0)"
    assert graph.meta["parameters"] == 23 and graph.meta["parameter_bytes"] == graph.meta["gradient_bytes"] == 92
    assert graph.meta["optimizer"] == "sgd" and graph.meta["precision"] == "f32"
    assert graph.meta["flops"] == sum(row[1] for row in MLP.values())


def test_residual_by_hand():
    graph = capture(residual_step(), "residual")
    assert sorted(graph.op_names) == sorted(
        ["first/weight", "norm/weight", "norm/bias", "second/weight", "norm/running_mean", "norm/running_var",
         "input.0", "first/convolution", "norm/native_batch_norm", "act/relu_", "second/convolution", "add",
         "loss/sum", "loss/ones_like", "second/convolution_backward", "second/add", "act/threshold_backward",
         "norm/native_batch_norm_backward", "first/convolution_backward", "first/weight/sgd", "norm/weight/sgd",
         "norm/bias/sgd", "second/weight/sgd"]
    )  # fmt: skip
    flops = {name: int(graph.op_flops[number(graph, name)]) for name in graph.op_names}
    assert flops["first/convolution"] == 2 * 16 * 2 * 1 * 9
    assert flops["first/convolution_backward"] == 2 * 16 * 2 * 1 * 9  # the image needs no gradient
    assert flops["second/convolution"] == 2 * 16 * 2 * 2 * 9
    assert flops["second/convolution_backward"] == 2 * (2 * 16 * 2 * 2 * 9)
    # Persistent bytes hold the parameter and its momentum; buffers have none.
    persistent = {name: int(graph.op_persistent_bytes[number(graph, name)]) for name in graph.op_names}
    assert {name: size for name, size in persistent.items() if size} == {
        "first/weight": 2 * 72,
        "norm/weight": 16,
        "norm/bias": 16,
        "second/weight": 2 * 144,
        "norm/running_mean": 8,
        "norm/running_var": 8,
    }
    assert graph.meta["optimizer_state_bytes"] == 72 + 8 + 8 + 144
    assert groups(graph) == {
        frozenset({"first/weight", "first/convolution_backward", "first/weight/sgd"}),
        frozenset({"second/weight", "second/convolution_backward", "second/weight/sgd"}),
        frozenset({"norm/weight", "norm/bias", "norm/native_batch_norm_backward", "norm/weight/sgd", "norm/bias/sgd"}),
        # The statistics are overwritten by the norm, whose output the activation overwrites.
        frozenset({"norm/running_mean", "norm/running_var", "norm/native_batch_norm", "act/relu_"}),
    }
    found = edges(graph)
    assert found["norm/native_batch_norm", "act/relu_"] == 128
    assert found["act/relu_", "second/convolution"] == found["act/relu_", "add"] == 128
    assert ("norm/native_batch_norm", "add") not in found, "a reader of the old version, after it was overwritten"
    assert found["norm/native_batch_norm", "norm/native_batch_norm_backward"] == 8  # saved mean, inverse deviation
    assert found["second/add", "act/threshold_backward"] == 128  # the two gradients of the sum's inputs
    assert 0 not in found.values(), "every reader of a weight leads to its update here"


def test_flops_are_those_of_pytorch():
    from torch.utils.flop_counter import FlopCounterMode

    step = residual_step()
    graph = capture(step, "residual")
    with FlopCounterMode(display=False) as counter:
        step.loss(step.model, *step.inputs).backward()
    counted = [kind.startswith("convolution") or kind in ("mm", "addmm", "bmm") for kind in graph.kinds]
    assert graph.op_flops[np.array(counted)[graph.op_kind]].sum() == counter.get_total_flops() > 0


@pytest.mark.parametrize(
    "optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.SGD]
)
def test_one_update_a_parameter(optimizer):
    graph = capture(mlp_step(optimizer), "mlp")
    kind = optimizer.__name__.lower()
    updates = [i for i in range(graph.n_ops) if graph.op_phase[i] == 2]
    assert [graph.kinds[graph.op_kind[i]] for i in updates] == [kind] * 4
    for i in updates:
        read = {
            graph.op_names[graph.tensor_producer[t]] for t in graph.inputs[graph.input_ptr[i] : graph.input_ptr[i + 1]]
        }
        home = graph.op_names[i].removesuffix(f"/{kind}")
        assert home in read and len(read - {"2/mm"}) == 2, "the parameter and its gradient"
        assert graph.op_flops[i] > 0
    states = {"adam": 2, "adamw": 2, "rmsprop": 1, "adagrad": 1, "sgd": 0}[kind]
    assert graph.op_persistent_bytes.sum() == 92 * (1 + states)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("AdamW", {"amsgrad": True}), ("SGD", {"momentum": 0.9, "maximize": True}), ("Adagrad", {}), ("Adafactor", {})],
)
def test_parameters_that_are_alike_are_updated_as_if_each_were_stepped(optimizer, options, monkeypatch):
    """The first and the last layer are alike, but no gradient reaches the last; that of the second lies transposed."""
    from simdev.graphs.capture import optimizers
    from simdev.graphs.capture.run import run

    def make():
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.Linear(4, 2))

        def loss(model, x):
            return (model[2](model[0](x)) @ model[1].weight * model[1].bias + model[1].weight.sum()).sum()

        made = getattr(torch.optim, optimizer)
        groups = [{"params": list(model[:2].parameters())}, {"params": list(model[2:].parameters()), "lr": 0.2}]
        return TrainingStep(model, (torch.zeros(3, 4),), loss, made(groups, lr=0.1, **options))

    stepped, repeat = [], optimizers._repeat
    monkeypatch.setattr(optimizers, "_repeat", lambda *given: stepped.append(given) or repeat(*given))
    graph = run(make, "alike", {})
    assert stepped
    monkeypatch.setattr(optimizers, "SEPARATE", frozenset())
    single = run(make, "alike", {})
    assert len(stepped) == 1 and graph.fingerprint == single.fingerprint
    assert graph.meta == single.meta and graph.op_names == single.op_names


class Clipped(torch.optim.SGD):
    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0, foreach=False)
        return super().step(closure)


def test_clipping_ties_updates_through_the_norm_only():
    graph = capture(mlp_step(Clipped), "mlp")
    updates = [i for i, name in enumerate(graph.op_names) if name.endswith("/clipped")]
    assert len(updates) == 4
    shared = [i for i in range(graph.n_ops) if graph.op_phase[i] == 2 and i not in updates]
    assert "stack" in {graph.kinds[graph.op_kind[i]] for i in shared}
    last = max(shared)
    for i in updates:
        sources = graph.tensor_producer[graph.inputs[graph.input_ptr[i] : graph.input_ptr[i + 1]]]
        assert last in sources, "every update reads the clip factor"


def test_tied_weights_are_one_parameter():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.out = nn.Linear(3, 5, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x):
            return self.out(self.embed(x))

    model = Tied()
    step = TrainingStep(
        model, (torch.zeros(2, dtype=torch.long),), lambda m, x: m(x).sum(), torch.optim.Adam(model.parameters())
    )
    graph = capture(step, "tied")
    assert graph.meta["parameters"] == 15
    assert [name for name in graph.op_names if name.endswith("weight")] == ["embed/weight"]
    (group,) = groups(graph)
    total = {graph.kinds[graph.op_kind[number(graph, name)]] for name in group}
    assert total == {"parameter", "add", "adam"}, "the final gradient is the sum of two"
    embedding = number(graph, "embed/embedding")
    assert graph.op_bytes_read[embedding] == 2 * 3 * 4 + 2 * 8, "rows that are looked up, not the table"


def test_slices_read_their_bytes_and_dead_code_goes():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 8, bias=False)

        def forward(self, x):
            left, right = self.linear(x).chunk(2, dim=1)
            right.cos()  # nobody reads it
            return left.tanh()

    model = Halves()
    graph = capture(TrainingStep(model, (torch.zeros(2, 4),), lambda m, x: m(x).sum()), "halves")
    tanh = number(graph, "tanh")
    assert graph.op_bytes_read[tanh] == 2 * 4 * 4
    assert edges(graph)["linear/mm", "tanh"] == 2 * 8 * 4
    assert "cos" not in graph.kinds
    gradient = [graph.op_names[i] for i in graph.tensor_producer[graph.tensor_result]]
    assert len(gradient) == 2 and "loss/sum" in gradient, "without an optimiser the gradients leave the step"


def test_real_and_fake_models_give_one_graph_and_stay_untouched():
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = residual_step()
    before = {name: tensor.clone() for name, tensor in real.model.state_dict().items()}
    graph = capture(real, "residual")
    after = real.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in real.model.parameters()) and not real.optimizer.state
    with FakeTensorMode():
        fake = residual_step()
    assert capture(fake, "residual").fingerprint == graph.fingerprint


def kinds(model, *inputs, loss=lambda model, *inputs: model(*inputs).sum(), **options):
    graph = capture(TrainingStep(model, inputs, loss), "model", **options)
    return [graph.kinds[kind] for kind in graph.op_kind]


def test_dropout_is_one_op_and_lstms_are_unrolled_where_asked():
    found = kinds(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.zeros(2, 4))
    assert found.count("native_dropout") == found.count("native_dropout_backward") == 1 and "bernoulli_" not in found
    found = kinds(nn.LSTM(4, 4), torch.zeros(7, 2, 4), loss=lambda model, x: model(x)[0].sum(), unroll=True)
    assert found.count("sigmoid_") == 3 * 7 and found.count("tanh") == 7


@pytest.mark.parametrize(("layer", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_a_recurrent_layer_is_one_op_each_way(layer, gates):
    """Of 3 inputs and 5 states, seven steps and two rows; the bytes are those that cuDNN reads and writes."""
    from simdev.report.describe import peak_bytes

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.cells, self.out = nn.Linear(6, 3), layer(3, 5), nn.Linear(5, 2)

        def forward(self, x):
            return self.out(self.cells(self.words(x))[0])

    model = Tagger()
    step = TrainingStep(
        model, (torch.zeros(7, 2, 6),), lambda model, x: model(x).sum(), torch.optim.SGD(model.parameters(), 0.1)
    )
    joined, unrolled = capture(step, "joined"), capture(step, "unrolled", unroll=True)
    row = {joined.kinds[kind]: op for op, kind in enumerate(joined.op_kind.tolist())}
    forward, backward = row["_cudnn_rnn"], row["_cudnn_rnn_backward"]
    kinds = [joined.kinds[kind] for kind in joined.op_kind]
    assert kinds.count("_cudnn_rnn") == kinds.count("_cudnn_rnn_backward") == 1
    assert sum(joined.layers[where] == "cells" for where in joined.op_layer) == 2 + 4 + 4, "weights and their updates"
    products = 2 * 2 * 7 * gates * 5 * (3 + 5)
    elementwise = joined.op_flops[forward] - products
    assert 0 < elementwise < products, "the gates"
    assert joined.op_flops.sum() == unrolled.op_flops.sum()
    weights = gates * 5 * (3 + 5 + 2)
    assert joined.op_bytes_read[forward] == 4 * (7 * 2 * 3 + weights)
    outputs = joined.tensor_bytes[joined.output_ptr[backward] : joined.output_ptr[backward + 1]]
    outputs = outputs[outputs > 0]  # without control edges
    assert sorted(outputs.tolist()) == sorted(4 * size for size in (gates * 15, gates * 25, gates * 5, gates * 5, 42))
    homes = {int(joined.op_group[op]) for op, label in enumerate(joined.op_names) if label.startswith("cells/weight")}
    assert homes == {int(joined.op_group[backward])}, "the backward pass makes the gradients of all weights"
    assert joined.op_group[backward] >= 0 and peak_bytes(joined) == pytest.approx(peak_bytes(unrolled), rel=0.15)


def test_each_call_of_a_recurrent_layer_is_an_op():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells, self.between = nn.GRU(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.cells(self.between(self.cells(x)[0]))[0].sum()

    found = kinds(Twice(), torch.zeros(5, 2, 4), loss=lambda model, x: model(x))
    assert found.count("_cudnn_rnn") == 2 <= found.count("_cudnn_rnn_backward") <= 3


def test_attention_is_one_op_with_pytorchs_flops():
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Parameter(torch.zeros(2, 3, 8, 4))

        def forward(self, key):
            return nn.functional.scaled_dot_product_attention(self.query, key, key, dropout_p=0.1)

    key = torch.zeros(2, 3, 5, 4)
    graph = capture(TrainingStep(Attention(), (key,), lambda model, key: model(key).sum()), "attention")
    flops = dict(zip((graph.kinds[kind] for kind in graph.op_kind), graph.op_flops.tolist(), strict=True))
    q, k = (2, 3, 8, 4), (2, 3, 5, 4)
    assert flops["_scaled_dot_product_efficient_attention"] == sdpa_flop_count(q, k, k) == 2 * (2 * 6 * 8 * 4 * 5)
    assert flops["_scaled_dot_product_efficient_attention_backward"] == sdpa_backward_flop_count(q, q, k, k)


def test_recomputation_belongs_to_the_backward_pass():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False)

    graph = capture(TrainingStep(Checkpointed(), (torch.zeros(2, 4),), lambda model, x: model(x).sum()), "model")
    phases = [int(graph.op_phase[i]) for i, name in enumerate(graph.op_names) if name.startswith("body.0/addmm")]
    assert phases == [0, 1]


def test_converted_models_and_tied_weights_stay_tied():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from simdev.graphs.capture.rewrites import fake_construction

    with FakeTensorMode(), fake_construction():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        model.to(torch.bfloat16).to("cpu")
    assert model[0].weight is model[1].weight and model[0].weight.dtype == torch.bfloat16
    assert model[0].bias.requires_grad


USER = """
import torch
from simdev.graphs.workload import TrainingStep

def make_step():
    model = torch.nn.Linear(4, 2)
    return TrainingStep(model, (torch.zeros(3, 4),), lambda m, x: m(x).sum(), torch.optim.Adam(model.parameters()))

def half():
    model = torch.nn.Linear(4, 2).half()
    return TrainingStep(model, (torch.zeros(3, 4).half(),), lambda m, x: m(x).float().sum())

def on_cuda():
    model = torch.nn.Linear(4, 2).cuda().to("cuda:0")
    x = torch.zeros(3, 4, device=torch.device("cuda"))
    return TrainingStep(model, (x,), lambda m, x: (m(x.cuda()) + torch.ones(2, device="cuda")).sum())

def wrong(): return 7
def breaks(): raise KeyError("no such layer")
def data():
    model = torch.nn.Linear(4, 2)
    def loss(m, x):
        y = m(x).sum()
        return y * 2 if float(y) > 0 else y
    return TrainingStep(model, (torch.zeros(3, 4),), loss)
def vector():
    model = torch.nn.Linear(4, 2)
    return TrainingStep(model, (torch.zeros(3, 4),), lambda m, x: m(x))
def shapes():
    model = torch.nn.Linear(4, 2)
    return TrainingStep(model, (torch.zeros(3, 5),), lambda m, x: m(x).sum())
def large():
    model = torch.nn.Linear(1 << 15, 1 << 15)
    return TrainingStep(model, (torch.zeros(3, 1 << 15),), data().loss)
def not_a_model():
    return TrainingStep(None, (), lambda m: 0)
"""


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "my_model.py"
    path.write_text(USER)
    return path


def test_a_users_file(user_file):
    graph = capture_file(f"{user_file}:make_step")
    assert graph.name == "my_model-make_step" and graph.meta["parameters"] == 10
    target = f"{user_file}:make_step"
    script = f"from simdev.graphs.capture import capture_file; print(capture_file({target!r}).fingerprint)"
    again = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert again.stdout.strip() == graph.fingerprint, "another process captures the same graph"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("wrong", "returned int, expected a TrainingStep, an InferenceStep or a CustomStep"),
        ("breaks", "no such layer"),
        ("absent", "no such function"),
        ("large", "line 24, in loss: .*depends on the values .*torch.where"),
        ("vector", "must return one number"),
        ("breaks", "line 19, in breaks: building the model failed: KeyError"),
        ("shapes", "line 31, in <lambda>: the model was built, but running its step failed: RuntimeError"),
        ("not_a_model", "expected a torch.nn.Module"),
        ("not a name", "expected FILE.py:FUNCTION"),
    ],
)
def test_a_users_mistakes_are_named(user_file, function, message):
    with pytest.raises(InvalidInput, match=message) as caught:
        capture_file(f"{user_file}:{function}")
    assert "my_model.py" in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_may_import_its_neighbours_late_and_change_the_path(tmp_path):
    (tmp_path / "beside_late.py").write_text("WIDTH = 5\n")
    path = tmp_path / "late.py"
    path.write_text(
        textwrap.dedent("""
        import sys
        import torch
        from simdev import InferenceStep

        sys.path.insert(0, "/its/own")

        def make_step():
            from beside_late import WIDTH
            return InferenceStep(torch.nn.Linear(WIDTH, 1), (torch.zeros(1, WIDTH),))
        """)
    )
    before = list(sys.path)
    try:
        assert capture_file(f"{path}:make_step").meta["parameters"] == 6
        assert sys.path == ["/its/own", *before], "the folder is gone, the file's own entry stays"
    finally:
        sys.path[:] = before


def test_a_file_that_cannot_be_imported(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text(textwrap.dedent("import no_such_package\n"))
    with pytest.raises(InvalidInput, match="broken.py: line 1, in <module>: cannot be imported: ModuleNotFoundError"):
        capture_file(f"{path}:make")
    with pytest.raises(InvalidInput, match="no such file"):
        capture_file(f"{tmp_path}/absent.py:make")


def test_without_pytorch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"pip install 'simdev\[capture\]'"):
        capture_file("x.py:make")


@pytest.mark.parametrize(
    "entry",
    [
        "vit-l[batch=8,layers=3]",
        "gpt2-medium[batch=2,layers=3]",
        pytest.param("inception-v3[batch=4]", marks=pytest.mark.slow),
    ],
)
def test_memory_in_program_order_is_what_pytorch_allocates(entry):
    tracker = pytest.importorskip("torch.distributed._tools.mem_tracker")
    from torch._subclasses.fake_tensor import FakeTensorMode

    from simdev.graphs.capture import capture_workload
    from simdev.graphs.capture.trace import Tape
    from simdev.placers.registry import find_workload
    from simdev.problem.placement import Placement
    from simdev.problem.problem import Problem, Rules
    from simdev.problem.topology import load_topology
    from simdev.sim import simulate

    spec, params = find_workload(entry)
    quiet = Tape()  # answers the optimiser's questions about step counters
    quiet.phase, quiet.recording = "update", False
    with FakeTensorMode():
        step = spec.function(**{**spec.defaults, **params})
        for parameter in step.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        step.optimizer.defaults["foreach"] = False
        for group in step.optimizer.param_groups:
            group["foreach"] = False
        with quiet:
            step.optimizer.step()
        step.optimizer.zero_grad()
        memory = tracker.MemTracker()
        memory.track_external(step.model, step.optimizer, *step.inputs)
        with memory:
            step.loss(step.model, *step.inputs).backward()
            with quiet:
                step.optimizer.step()
    (peak,) = (sizes["Total"] for sizes in memory.get_tracker_snapshot("peak").values())

    graph, topology = capture_workload(spec, params), load_topology("p100x4")
    problem = Problem.build(graph, topology, rules=Rules(order="program"))
    alone = Placement(np.full(graph.n_ops, topology.accelerators[0]))
    assert max(simulate(problem, alone, engine="reference").peak_bytes) == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("kind", ["Conv2d", "ConvTranspose2d"])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_each_gradient_of_a_convolution_counts_as_its_forward(kind, groups):
    from simdev.graphs.capture.trace import flop_counter_mode

    layer = getattr(torch.nn, kind)(6, 12, 3, stride=2, groups=groups)
    image = torch.randn(2, 6, 8, 8, requires_grad=True)
    with flop_counter_mode() as forward:
        out = layer(image)
    with flop_counter_mode() as backward:
        out.sum().backward()
    elements = image.numel() if "Transpose" in kind else out.numel()
    assert forward.get_total_flops() == 2 * elements * layer.weight[0].numel()
    assert backward.get_total_flops() == 2 * forward.get_total_flops()
