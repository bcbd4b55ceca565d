"""What a compiled layer keeps of selective recomputation, against PyTorch's own partitioner."""

from __future__ import annotations

from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from simdev.graphs.selective import CONTEXTS, READ, SELECTIVE  # noqa: E402

LAYERS, WIDTH, HIDDEN, TOKENS = 2, 16, 24, 6
KINDS = ("added", "normed", "scaled", "halved", "dropped", "in place", "parallel", "unread")


class Block(nn.Module):
    """Queries, keys, values, output; gate, up and down: what follows the last product differs by ``kind``."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.norm, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def attend(self, x):
        q, k, v = (part(x).view(1, TOKENS, 2, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(1, TOKENS, WIDTH))

    def feed(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))

    def forward(self, x):
        if self.kind == "parallel":  # the fourth and the seventh product are added alike
            y = self.norm(x)
            return x + self.attend(y) + self.feed(y)
        if self.kind == "unread":  # the third product is added, and others follow it
            y = self.norm(x)
            return x + self.feed(y) + self.attend(y)
        x = x + self.attend(self.norm(x))
        y = self.feed(self.norm(x))
        if self.kind == "normed":
            y = self.after(y)
        elif self.kind == "scaled":
            y = y * self.scale
        elif self.kind == "halved":
            y = y * 0.5
        elif self.kind == "dropped":
            y = functional.dropout(y, 0.1)
        elif self.kind == "in place":
            return self.after(y.add_(x))
        return x + y


class Blocks(nn.Module):
    def __init__(self, kind, recompute="none"):
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(LAYERS))
        self.contexts = CONTEXTS.get(recompute)

    def forward(self, x):
        for block in self.blocks:
            how = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": self.contexts}
            x = checkpoint(block, x, **how) if self.contexts else block(x)
        return x


def kept_by_torch(model, x):
    """Shapes of products that a compiled forward pass hands to its backward pass."""
    pytest.importorskip("networkx")
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    found = []

    def partition(joint, inputs, **options):
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
        handed = forward.graph.output_node().args[0][options["num_fwd_outputs"] :]
        found.extend(tuple(node.meta["val"].shape) for node in handed if node.target is torch.ops.aten.mm.default)
        return forward, backward

    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), partition_fn=partition)
    torch._dynamo.reset()
    torch.compile(model, backend=backend)(x).sum().backward()
    return Counter(found)


def kept_by_contexts(model, x, monkeypatch):
    from simdev.graphs.capture import compiled_checkpoint

    layers = []
    made = compiled_checkpoint.contexts_of_read

    def watched(chosen):
        contexts = made(chosen)
        layers.append(contexts[1].kept)
        return contexts

    monkeypatch.setattr(compiled_checkpoint, "contexts_of_read", watched)
    output = model(x)
    results = [result for kept in layers for result in kept.values()]
    assert len(layers) == LAYERS and output.requires_grad
    return Counter(tuple(result.shape) for result in results if isinstance(result, torch.Tensor))


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_keeps_what_the_partitioner_of_torch_compile_keeps(kind, monkeypatch):
    x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    found = kept_by_contexts(Blocks(kind, READ), x, monkeypatch)
    assert found == kept_by_torch(Blocks(kind, SELECTIVE), x)
    read = {"added": 3, "halved": 3, "parallel": 3, "unread": 2}.get(kind, 4)  # of the four of seven that are chosen
    assert found.total() == LAYERS * read


@pytest.mark.slow
@pytest.mark.parametrize("kind, read", [("llama", 3), ("olmo2", 4), ("gemma2", 4), ("cohere", 3), ("phi3", 2)])
def test_so_does_a_layer_of_transformers(kind, read, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from simdev.parallel.hugging_face import recompute_layers

    def built(recompute):
        config = transformers.CONFIG_MAPPING[kind](
            hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
            intermediate_size=HIDDEN, vocab_size=32, max_position_embeddings=16, pad_token_id=0,
        )  # fmt: skip
        model = transformers.AutoModel.from_config(config).train()
        model.norm = nn.Identity()  # which would let a compiler hand on the last product in place of the last result
        recompute_layers(model, recompute)

        class Run(nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self, tokens):
                return self.model(tokens, use_cache=False).last_hidden_state

        return Run()

    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    found = kept_by_contexts(built(READ), tokens, monkeypatch)
    assert found == kept_by_torch(built(SELECTIVE), tokens) and found.total() == LAYERS * read


@pytest.mark.parametrize("kind", ["added", "normed", "scaled", "halved", "parallel", "unread"])
def test_gradients_are_those_without_recomputation(kind):
    gradients = []
    for recompute in (READ, "none"):
        torch.manual_seed(0)
        x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
        model = Blocks(kind, recompute)
        model(x).square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(gradients[0]) == len(gradients[1]) > 10
    assert all(map(torch.equal, *gradients))
