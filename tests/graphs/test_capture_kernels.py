"""Attention is captured as the kernel that a GPU chooses; elementwise ops become kernels as ``torch.compile`` makes
them. Small steps, with kernels counted by hand."""

import numpy as np
import pytest

from simdev.errors import Unsupported
from simdev.graphs.capture import capture
from simdev.graphs.workload import InferenceStep, TrainingStep
from simdev.report.describe import graph_text, summarise_graph

torch = pytest.importorskip("torch")
nn, functional = torch.nn, torch.nn.functional
half = torch.bfloat16


class Attention(nn.Module):
    """Projections of ``x`` to queries, keys and values, and attention with the ``options``."""

    def __init__(self, dtype=torch.float32, width=16, shared=2, value_width=None, **options):
        super().__init__()
        self.width, self.options, self.shared = width, options, shared
        self.value_width = value_width or width
        self.q, self.k = nn.Linear(8, 2 * width, dtype=dtype), nn.Linear(8, shared * width, dtype=dtype)
        self.v = nn.Linear(8, shared * self.value_width, dtype=dtype)

    def forward(self, x, mask=None):
        rows, length, _ = x.shape
        heads = [(self.q, 2, self.width), (self.k, self.shared, self.width), (self.v, self.shared, self.value_width)]
        q, k, v = (layer(x).view(rows, length, count, width).transpose(1, 2) for layer, count, width in heads)
        return functional.scaled_dot_product_attention(q, k, v, mask, **self.options)


def kernels(model, *inputs, train=True):
    """The kinds of attention in the captured step."""
    if train:
        step = TrainingStep(model, inputs, lambda model, *inputs: model(*inputs).float().sum())
    else:
        step = InferenceStep(model, inputs)
    kinds = capture(step, "attention").kinds
    return [kind.removeprefix("_scaled_dot_product_") for kind in kinds if "attention" in kind]


def both(name):
    return [f"{name}_attention", f"{name}_attention_backward"]


@pytest.mark.parametrize(
    ("model", "mask", "wanted"),
    [
        (dict(dtype=half, is_causal=True), None, both("flash")),
        (dict(dtype=half), torch.ones(5, 5, dtype=half), both("efficient")),
        (dict(dtype=half), torch.ones(5, 5, dtype=torch.bool), both("efficient")),
        (dict(), None, both("efficient")),
        (dict(dropout_p=0.5), None, both("efficient")),
        (dict(width=6), None, []),
        (dict(dtype=half, width=12), None, both("flash")),
        (dict(dtype=half, width=264), None, both("efficient")),
        (dict(dtype=half, shared=1, enable_gqa=True), None, both("flash")),
        (dict(dtype=half, width=16, value_width=8), None, both("efficient")),
        (dict(dtype=torch.float64), None, []),
    ],
)
def test_the_kernel_follows_from_dtype_sizes_and_mask(model, mask, wanted):
    model = Attention(**model)
    x = torch.zeros(3, 5, 8, dtype=model.q.weight.dtype)
    assert kernels(model, x, *([] if mask is None else [mask])) == wanted


def test_a_mask_that_is_trained_has_a_gradient():
    class Biased(Attention):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(2, 8, 8))

        def forward(self, x):
            return super().forward(x, self.bias.expand(3, 2, 8, 8))

    step = TrainingStep(Biased(), (torch.zeros(3, 8, 8),), lambda model, x: model(x).sum())
    graph = capture(step, "bias")
    backward = next(text for text in graph.signatures if text.startswith("_scaled_dot_product_efficient_attention_b"))
    assert backward.endswith("f32[3,2,8,8])"), "the gradient of the mask is a result"


def test_narrow_heads_are_padded_for_flash_attention():
    step = InferenceStep(Attention(dtype=half, width=12), (torch.zeros(3, 5, 8, dtype=half),))
    graph = capture(step, "padded")
    assert any("flash_attention(bf16[3,2,5,16]" in text for text in graph.signatures)
    assert sum(graph.kinds[kind] == "constant_pad_nd" for kind in graph.op_kind) == 3


@pytest.mark.parametrize(("allowed", "wanted"), [("MATH", []), ("EFFICIENT_ATTENTION", both("efficient"))])
def test_the_choice_of_sdpa_kernel_holds(allowed, wanted):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    class Chosen(Attention):
        def forward(self, x):
            with sdpa_kernel(getattr(SDPBackend, allowed)):
                return super().forward(x)

    assert kernels(Chosen(dtype=half), torch.zeros(3, 5, 8, dtype=half)) == wanted


def test_autocast_decides_before_the_choice():
    model = Attention()

    def loss(model, x):
        with torch.autocast("cuda", half):
            return model(x).sum()

    graph = capture(TrainingStep(model, (torch.zeros(3, 5, 8),), loss), "mixed")
    assert [kind for kind in graph.kinds if "attention" in kind] == [f"_scaled_dot_product_{n}" for n in both("flash")]


@pytest.mark.parametrize("queries, values", [(torch.float32, half), (half, torch.float32), (torch.float32,) * 2])
def test_tensors_of_two_precisions_are_alike_under_autocast(queries, values):
    """Rotary positions turn queries and keys by f32 tables; autocast casts all three before the kernel is chosen."""
    inputs = tuple(torch.zeros(3, 2, 8, 16, dtype=dtype) for dtype in (queries, queries, values))

    def forward(model, q, k, v):
        with torch.autocast("cuda", half):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    graph = capture(InferenceStep(nn.Module(), inputs, forward), "mixed")
    assert [kind for kind in graph.kinds if "attention" in kind] == ["_scaled_dot_product_flash_attention"]
    mask = torch.zeros(8, 8)
    graph = capture(InferenceStep(nn.Module(), (*inputs, mask), forward_masked), "masked")
    assert [kind for kind in graph.kinds if "attention" in kind] == ["_scaled_dot_product_efficient_attention"]


def forward_masked(model, q, k, v, mask):
    with torch.autocast("cuda", half):
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_attention_inside_of_pytorchs_layers():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dtype=half, batch_first=True)
    assert kernels(layer, torch.zeros(3, 5, 16, dtype=half)) == both("flash")
    layer = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.zeros(3, 5, 16)
    step = InferenceStep(layer, (x,), lambda model, x: model(x, x, x, need_weights=False)[0])
    assert "_scaled_dot_product_efficient_attention" in capture(step, "layer").kinds
    assert functional.multi_head_attention_forward.__globals__["dropout"] is functional.dropout


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


def test_ops_on_complex_numbers_stay_alone():
    def turned(model, x):
        pairs = torch.view_as_complex(x.exp().view(-1, 2))
        return torch.view_as_real(pairs * pairs).flatten().sin() + 1

    _, graph = fused(turned, torch.zeros(100))
    assert computing(graph) == ["exp", "mul", "fused"]


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


def test_attention_over_packed_texts_has_the_products_of_their_own_lengths():
    """PyTorch's formula takes each text to be as long as the longest if the ends are fake: 2.3 times these FLOPs."""
    from torch.nn.attention.varlen import varlen_attn

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.projections = nn.Linear(8, 3 * 64, dtype=half)

        def forward(self, x, lengths):
            ends = functional.pad(lengths.cumsum(0), (1, 0)).int()
            q, k, v = self.projections(x).view(-1, 3, 2, 32).unbind(1)
            return varlen_attn(q, k, v, ends, ends, 13, 13).flatten(1)

    lengths = (7, 13, 4, 8)
    inputs = torch.randn(sum(lengths), 8, dtype=half), torch.tensor(lengths)
    model = Packed()
    step = TrainingStep(model, inputs, lambda model, *inputs: model(*inputs).sum(), torch.optim.SGD(model.parameters()))
    graph = capture(step, "packed")
    flops = {graph.kinds[kind]: int(flops) for kind, flops in zip(graph.op_kind, graph.op_flops, strict=True)}
    one = 4 * 64 * sum(length**2 for length in lengths)  # two products in the forward pass, five in the backward pass
    assert flops["_varlen_attn"] == one and flops["_varlen_attn_backward"] == 5 * one // 2
    assert graph.meta["flops"] == graph.op_flops.sum()


def test_ends_of_packed_texts_that_nobody_knows_are_refused():
    from torch.nn.attention.varlen import varlen_attn

    class Guessed(nn.Module):
        def __init__(self):
            super().__init__()
            self.projections, self.length = nn.Linear(8, 3 * 64, dtype=half), nn.Linear(8, 1, dtype=half)

        def forward(self, x):
            ends = functional.pad(self.length(x[:4]).exp().flatten().int().cumsum(0), (1, 0)).int()
            q, k, v = self.projections(x).view(-1, 3, 2, 32).unbind(1)
            return varlen_attn(q, k, v, ends, ends, 13, 13).flatten(1)

    with pytest.raises(Unsupported, match="ends from values that are not known"):
        capture(InferenceStep(Guessed(), (torch.randn(32, 8, dtype=half),)), "guessed")
