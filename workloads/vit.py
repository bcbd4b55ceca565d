"""Vision transformer (Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021).

Layers: ``patch`` cuts and embeds, ``position`` adds the class token and the positions, ``layer.0`` ... are the encoder
blocks (inside: ``attention_norm``, ``attention``, ``norm``, ``feed_forward``), then ``head`` (norm and
classifier).
"""

from __future__ import annotations

from simdev.graphs.workload import InferenceStep, TrainingStep, workload
from simdev.workloads._layers import images
from simdev.workloads._transformer import layer

_SIZES = {"size": 224, "classes": 1000, "patch": 16, "layers": 24, "units": 1024, "heads": 16, "inner": 4096}


@workload(
    "vit-l",
    family="vit",
    defaults={"batch": 32, **_SIZES},
    published={"parameters": 304_326_632, "forward_macs": 61.55e9},
    source="Dosovitskiy et al. 2021, table 1 (ViT-Large: 307 M parameters with the pre-training head); the exact count "
    "and the multiply-adds are those of torchvision's vit_l_16 with 1000 classes",
)
def vit_l(batch, size, classes, patch, layers, units, heads, inner):
    """Cross-entropy and Adam (beta 0.9, 0.999) in float32; the paper's batch of 4096 is spread over many devices, 32
    is ours. There is no dropout."""
    import torch
    from torch.nn.functional import cross_entropy

    model = build(size, classes, patch, layers, units, heads, inner)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return TrainingStep(model, images(batch, size, classes), lambda m, x, y: cross_entropy(m(x), y), optimizer)


@workload(
    "vit-l-inference",
    family="vit",
    defaults={"batch": 1, **_SIZES},
    published={"parameters": 304_326_632, "forward_macs": 61.55e9},
    source="Dosovitskiy et al. 2021, table 1; counts of torchvision's vit_l_16",
)
def vit_l_inference(batch, size, classes, patch, layers, units, heads, inner):
    """The scores of ``batch`` images."""
    model = build(size, classes, patch, layers, units, heads, inner).eval()
    return InferenceStep(model, images(batch, size, classes)[:1])


def build(size, classes, patch, layers, units, heads, inner):
    """The model; ``forward`` returns the scores."""
    import torch
    from torch import nn

    class Position(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, 1, units))
            self.table = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, units))

        def forward(self, x):
            return torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.table

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.scores = nn.LayerNorm(units, eps=1e-6), nn.Linear(units, classes)

        def forward(self, x):
            return self.scores(self.norm(x)[:, 0])

    class VisionTransformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch = nn.Conv2d(3, units, patch, stride=patch)
            self.position = Position()
            self.layer = nn.ModuleList(
                layer(units, heads, inner, causal=False, eps=1e-6, gelu="none") for _ in range(layers)
            )
            self.head = Head()

        def forward(self, x):
            x = self.position(self.patch(x).flatten(2).transpose(1, 2))
            for block in self.layer:
                x = block(x)
            return self.head(x)

    return VisionTransformer()
