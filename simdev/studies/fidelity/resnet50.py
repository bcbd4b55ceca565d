"""ResNet-50 at batch 32 with SGD and momentum, to compare the memory of its graph with that of public traces.

``simdev capture simdev/studies/fidelity/resnet50.py:make_step`` writes ``resnet50-32.npz``, which is in the folder of
this file. The network is that of He et al. 2016, table 1, with the stride in the 3x3 convolution as in torchvision.
"""

from __future__ import annotations

from pathlib import Path

from simdev.problem.graph import ComputationGraph
from simdev.problem.graph_file import load_graph

GRAPH = Path(__file__).parent / "resnet50-32.npz"
FIRST_CONVOLUTION = "[[[32,3,224,224],[64,3,7,7]"  # the input shapes in the notation of traces
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # width, blocks, stride of the first


def load() -> ComputationGraph:
    return load_graph(GRAPH)


def make_step():
    """The training step, for ``simdev capture``."""
    import torch

    from simdev.graphs.workload import TrainingStep

    model = _network()
    images, labels = torch.randn(32, 3, 224, 224), torch.randint(0, 1000, (32,))

    def loss(model, images, labels):
        return torch.nn.functional.cross_entropy(model(images), labels)

    return TrainingStep(model, (images, labels), loss, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def _network():
    from torch import nn

    class Bottleneck(nn.Module):
        def __init__(self, before: int, width: int, stride: int):
            super().__init__()
            after = 4 * width
            self.body = nn.Sequential(
                nn.Conv2d(before, width, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, width, 3, stride, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, after, 1, bias=False),
                nn.BatchNorm2d(after),
            )
            self.shortcut = None
            if stride != 1 or before != after:
                self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            y = self.body(x)
            y += x if self.shortcut is None else self.shortcut(x)
            return self.relu(y)

    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for width, blocks, stride in STAGES:
        for number in range(blocks):
            layers.append(Bottleneck(before, width, stride if number == 0 else 1))
            before = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))
