"""Memory of a captured step against the same step run for real on the host."""

from __future__ import annotations

import json
from itertools import accumulate

import numpy as np
import pytest

from simdev.placers.registry import find_workload
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import load_topology
from simdev.sim import simulate

torch = pytest.importorskip("torch")


def real_peak(spec, params, trace) -> int:
    """Most bytes that one step allocates beyond parameters and optimiser state."""
    from torch.profiler import ProfilerActivity, profile

    made = spec.function(**{**spec.defaults, **params})

    def run():
        made.loss(made.model, *made.inputs).backward()
        made.optimizer.step()
        made.optimizer.zero_grad()

    run()  # makes the optimiser's state
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    profiler.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    return max(accumulate(event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])))


def simulated_peak(spec, params) -> int:
    """The same of the captured graph, run in program order: gradients wait for the updates at the end."""
    from simdev.graphs.capture import capture_workload

    graph = capture_workload(spec, params)
    problem = Problem.build(graph, load_topology("p100x2"), rules=Rules(order="program"))
    gpu = problem.topology.accelerators[0]
    peak = simulate(problem, Placement(np.full(graph.n_ops, gpu))).peak_bytes[gpu]
    return int(peak) - int(graph.op_persistent_bytes.sum())


@pytest.mark.parametrize(
    ("entry", "within"),
    [
        ("gpt2-medium[batch=2,length=128,layers=4,units=256,heads=4,vocabulary=2000,precision=f32]", 0.02),
        (
            "llama-moe[batch=2,length=64,layers=2,units=128,heads=4,key_heads=2,inner=256,vocabulary=500,precision=f32]",
            0.02,
        ),
        # Eager autograd adds gradients up in place where the captured step makes a new tensor.
        ("nmt[batch=16,length=10,units=128,vocabulary=1000]", 0.125),
        ("transformer-xl-2[batch=4,length=64,memory=64,units=128,heads=4,inner=256]", 0.05),
        ("dlrm[batch=512,max_rows=1000,units=16]", 0.05),
    ],
)
def test_peak_of_a_real_step(entry, within, tmp_path):
    spec, params = find_workload(entry)
    assert simulated_peak(spec, params) == pytest.approx(real_peak(spec, params, tmp_path / "trace.json"), rel=within)


def test_weights_have_no_values_and_take_no_memory():
    """Values are kept of what a constructor may look at, not of random numbers: else a capture held the weights, their
    gradients and their optimizer state, 4 times the model."""
    from simdev.graphs.capture.build import build_fake
    from simdev.graphs.workload import TrainingStep

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(512, 512)
            self.register_buffer("table", torch.arange(8192).reshape(2, -1))
            assert self.table.max().item() == 8191

        def forward(self, x):
            return self.linear(x).sum()

    def make():
        model = Net()
        return TrainingStep(model, (torch.randn(4, 512),), lambda m, x: m(x), torch.optim.AdamW(model.parameters()))

    built = build_fake(make, "net")
    assert built.shadows.of(built.step.model.linear.weight) is None
    assert built.shadows.of(built.step.model.table).tolist() == torch.arange(8192).reshape(2, -1).tolist()
    assert built.shadows.of(built.step.inputs[0]).shape == (4, 512)


def test_alike_parameters_get_state_of_their_own():
    """The optimizer steps one of two alike weights on fake tensors; both have their moments, and their update ops."""
    from simdev.graphs.capture import capture
    from simdev.graphs.workload import TrainingStep

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    graph = capture(TrainingStep(model, (torch.randn(4, 8),), lambda m, x: m(x).sum(), optimizer), "alike")
    assert graph.meta["optimizer_state_bytes"] == 3 * 4 * sum(parameter.numel() for parameter in model.parameters())
    assert sum(graph.kinds[kind] == "adam" for kind in graph.op_kind) == 6


@pytest.mark.parametrize(("optimizer", "count"), [("Adam", 8), ("Adagrad", 6)])
def test_a_parameter_without_a_gradient_has_no_state(optimizer, count):
    """An optimizer makes the state of a parameter in the first step in which it has a gradient. Adagrad is built with
    the state of all."""
    from simdev.graphs.capture import capture
    from simdev.graphs.workload import TrainingStep

    model = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])  # the second is read by nothing
    stepped = getattr(torch.optim, optimizer)(model.parameters())
    made = TrainingStep(model, (torch.randn(4, 8),), lambda m, x: m[2](m[0](x)).sum(), stepped)
    graph = capture(made, "unread")
    made.loss(made.model, *made.inputs).backward()
    stepped.step()
    tensors = [item for state in stepped.state.values() for item in state.values() if item.numel() > 1]
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert len(tensors) == count
    assert graph.meta["optimizer_state_bytes"] == held
    assert graph.op_persistent_bytes.sum() == held + graph.meta["parameter_bytes"]


def test_parameters_that_share_a_vector_count_once():
    """A search without gradients (evolution strategies) writes one vector, of which all parameters are views."""
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    from simdev.graphs.capture import capture
    from simdev.graphs.workload import CustomStep

    @torch.no_grad()
    def run(model, x):
        vector = parameters_to_vector(model.parameters())
        steps = torch.randn(3, len(vector))
        scores = []
        for step in steps:
            vector_to_parameters(vector + 0.1 * step, model.parameters())
            scores.append(model(x).square().mean())
        vector_to_parameters(vector - 0.01 * torch.stack(scores) @ steps, model.parameters())

    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    graph = capture(CustomStep(model, (torch.randn(4, 8),), run), "evolution")
    count = 8 * 4 + 4 + 4 * 2 + 2
    assert graph.meta["parameters"] == count and graph.meta["parameter_bytes"] == 4 * count
    assert graph.op_persistent_bytes.sum() == 4 * count


def test_sizes_that_known_values_decide():
    """``repeat_interleave`` and ``unique`` of small known tensors have a size, so the step needs no real run."""
    from simdev.graphs.capture import capture
    from simdev.graphs.workload import TrainingStep

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x, lengths):
            rows = torch.repeat_interleave(lengths, lengths)
            return self.linear(x[: len(rows) + len(torch.unique(lengths))]).sum()

    def make():
        model = Net()
        inputs = torch.randn(20, 4), torch.tensor([3, 1, 3])
        return TrainingStep(model, inputs, lambda m, *given: m(*given), torch.optim.SGD(model.parameters(), lr=0.1))

    from simdev.graphs.capture.run import run

    graph = run(make, "sized", {})
    assert "values" not in graph.meta
    assert any("f32[9,4]" in text for text in graph.signatures)
    with pytest.raises(Exception, match="depends on the values"):
        capture(
            TrainingStep(Net(), (torch.randn(20, 4), torch.randint(1, 4, (1 << 21,))), lambda m, *g: m(*g), None), "big"
        )


def test_a_tensor_that_autograd_saved_lives_until_its_node_has_run():
    """The backward of ``gather`` asks only how large the tensor was that it gathered from, and PyTorch keeps it."""
    from simdev.graphs.capture import capture
    from simdev.graphs.workload import TrainingStep

    def loss(model, x, places):
        return model(x).square().gather(1, places).square().sum()

    model, places = torch.nn.Linear(4, 4096), torch.zeros(64, 2, dtype=torch.int64)
    graph = capture(TrainingStep(model, (torch.randn(64, 4), places), loss), "gathered")
    squares = graph.op_names.index("loss/pow")
    readers = {
        graph.kinds[graph.op_kind[consumer]]
        for consumer, tensor in zip(graph.consumers, graph.edge_tensor, strict=True)
        if graph.tensor_producer[tensor] == squares
    }
    assert "gather" in readers and any(kind.startswith("scatter_add") for kind in readers)


def test_a_builder_at_fault_is_not_tried_with_memory():
    """A model of 8 billion parameters whose configuration lacks a key took all the memory before it was refused."""
    from simdev.graphs.capture.build import BuildFailed, build_fake

    made = []

    def fails():
        made.append(torch.empty(4).device.type)
        raise KeyError("full_attention")

    with pytest.raises(BuildFailed, match="KeyError: 'full_attention'"):
        build_fake(fails, "fails")
    assert made == ["cpu", "meta"], "on fake tensors of the CPU, and on meta tensors"

    def asks():
        from simdev.graphs.workload import InferenceStep

        made.append(torch.randn(1 << 21).sort().values[0].item() < 0)
        return InferenceStep(torch.nn.Linear(2, 2), (torch.randn(1, 2),))

    assert build_fake(asks, "asks").step.model.weight.shape == (2, 2)
    assert made[-1] is True, "a value leads to real tensors"


def test_a_known_number_in_a_text_is_that_number():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from simdev.graphs.capture.shadows import Shadows

    with FakeTensorMode(allow_non_fake_inputs=True), Shadows():
        assert f"expert_{torch.arange(4)[2]}" == "expert_2"


def test_the_best_of_experts_is_each_of_them_in_turn():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from simdev.graphs.capture.shadows import Shadows

    with FakeTensorMode(allow_non_fake_inputs=True), Shadows() as shadows:
        shadows.experts = frozenset([4])
        scores = torch.randn(2048, 4)
        best = shadows.of(torch.argmax(scores, dim=-1))
        assert shadows.of(torch.argmax(torch.randn(2048, 5), dim=-1)) is None
    assert torch.equal(best, torch.arange(2048) % 4)
