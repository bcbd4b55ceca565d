"""Elementwise ops become kernels as ``torch.compile`` makes them: small steps with kernels counted by hand."""

import numpy as np
import pytest

from simdev.graphs.capture import capture
from simdev.graphs.workload import InferenceStep, TrainingStep
from simdev.report.describe import graph_text, summarise_graph

torch = pytest.importorskip("torch")
nn, functional = torch.nn, torch.nn.functional


def fused(forward, *inputs, model=None):
    from simdev.graphs.capture.fuse import fuse_elementwise

    eager = capture(InferenceStep(model or nn.Module(), inputs, forward), "step", allow_empty=True)
    return eager, fuse_elementwise(eager)


def computing(graph):
    kinds = [graph.kinds[kind] for kind in graph.op_kind]
    return [kind for kind in kinds if kind not in ("input", "parameter", "constant")]


def test_a_chain_is_one_kernel_that_reads_and_writes_once():
    x = torch.zeros(1000)
    eager, graph = fused(lambda model, x: (x.exp() * 2 + x).relu(), x)
    assert computing(eager) == ["exp", "mul", "add", "relu"] and computing(graph) == ["fused"]
    op = graph.kinds.index("fused")
    row = int(np.flatnonzero(graph.op_kind == op)[0])
    assert graph.op_bytes_read[row] == graph.op_bytes_written[row] == 4000
    assert graph.op_flops[row] == eager.op_flops.sum()
    assert graph.signatures[graph.op_signature[row]] == "fused(f32[1000])->f32[1000]"
    assert graph.meta["compiled"]["ops"] == 4 and graph.meta["compiled"]["kernels"] == 1
    assert "4 ops in 1 fused kernels; elementwise ops" in graph_text(summarise_graph(graph))


def test_two_kernels_that_meet_become_one():
    _, graph = fused(lambda model, x: x.exp() * x.tanh(), torch.zeros(100))
    assert computing(graph) == ["fused"]


def test_products_stay_alone_and_a_path_through_them_parts_kernels():
    def forward(model, x):
        y = x.exp()
        return y @ y + y  # the sum waits for the product, which waits for y

    _, graph = fused(forward, torch.zeros(64, 64))
    assert computing(graph) == ["exp", "mm", "add"]


def test_a_reduction_to_few_numbers_ends_its_kernel():
    def normalised(model, x):
        y = x.exp()
        return y / y.sum()

    _, graph = fused(normalised, torch.zeros(5000))
    assert computing(graph) == ["fused_sum", "div"]
    _, rows = fused(lambda model, x: (x.exp() + 1).softmax(-1) * 2, torch.zeros(2000, 8))
    assert computing(rows) == ["fused_softmax"]


def test_phases_and_colocated_parameters_stay_apart():
    from simdev.graphs.capture.fuse import fuse_elementwise

    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
    data = torch.zeros(16, 8), torch.zeros(16, dtype=torch.int64)
    step = TrainingStep(
        model, data, lambda m, x, y: functional.cross_entropy(m(x), y), torch.optim.Adam(model.parameters())
    )
    eager = capture(step, "step", allow_empty=True)
    graph = fuse_elementwise(eager)
    assert graph.n_ops < eager.n_ops and graph.op_flops.sum() == eager.op_flops.sum()
    assert graph.op_persistent_bytes.sum() == eager.op_persistent_bytes.sum()
    assert graph.tensor_bytes[graph.tensor_result].sum() == eager.tensor_bytes[eager.tensor_result].sum()
    assert (graph.op_bytes_read + graph.op_bytes_written).sum() < (eager.op_bytes_read + eager.op_bytes_written).sum()
    assert len(set(graph.op_group.tolist())) == len(set(eager.op_group.tolist()))
    assert computing(graph).count("adam") == 6


def test_bytes_are_near_those_that_the_inductor_counts():
    """The Inductor's scheduler, on the CPU, over the same forward pass: its own count of bytes."""
    graph_module = pytest.importorskip("torch._inductor.graph")
    from torch._inductor import compile_fx, config
    from torch._inductor.virtualized import V

    model = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, activation="gelu")
    x = torch.zeros(4, 32, 64)
    eager, graph = fused(lambda model, x: model(x), x, model=model.train())
    counted = []

    class Counted(Exception):
        pass

    def count(lowering, *_, **__):
        with V.set_graph_handler(lowering):
            lowering.init_wrapper_code()
            lowering._update_scheduler()
            counted.append(lowering.count_bytes()[0])
        raise Counted

    def instead(module, inputs, **options):
        def call(given):
            return module(*given)

        with pytest.raises(Exception, match="Counted"):
            compile_fx.compile_fx_inner(module, inputs, **options)
        call._boxed_call = True
        return call

    with pytest.MonkeyPatch.context() as patch, config.patch(force_disable_caches=True), torch.no_grad():
        patch.setattr(graph_module.GraphLowering, "compile_to_module", count)
        torch.compile(model, backend=lambda m, inputs: compile_fx.compile_fx(m, inputs, inner_compile=instead))(x)
    torch.compiler.reset()
    before, after = ((g.op_bytes_read + g.op_bytes_written).sum() for g in (eager, graph))
    assert counted and abs(after / sum(counted) - 1) < 0.15 < before / sum(counted) - 1
