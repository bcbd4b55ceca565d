"""Attention is captured as the kernel that a GPU chooses."""

import pytest

from simdev.graphs.capture import capture
from simdev.graphs.workload import InferenceStep, TrainingStep

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


def test_attention_inside_of_pytorchs_layers():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dtype=half, batch_first=True)
    assert kernels(layer, torch.zeros(3, 5, 16, dtype=half)) == both("flash")
    layer = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.zeros(3, 5, 16)
    step = InferenceStep(layer, (x,), lambda model, x: model(x, x, x, need_weights=False)[0])
    assert "_scaled_dot_product_efficient_attention" in capture(step, "layer").kinds
    assert functional.multi_head_attention_forward.__globals__["dropout"] is functional.dropout
