"""AmoebaNet-D (Real et al., "Regularized Evolution for Image Classifier Architecture Search", AAAI 2019), in the
sizes (L, D) of GPipe (Huang et al. 2019, table 1): L normal cells, D / 4 channels at first.

Layers: ``stem`` is the first convolution, ``cell.0`` ... the cells in order (0 and 1 are the stem's two reduction
cells), inside them ``cell.N.block.B.S.*`` for side S of block B, and ``cell.N.current`` / ``cell.N.previous`` for the
convolutions that fit the two inputs; ``head.*`` is the classifier.
"""

from __future__ import annotations

from simdev.graphs.workload import TrainingStep, workload
from simdev.workloads._cells import CellSpec, Genotype, stack_class
from simdev.workloads._layers import batch_norm, images

# The genotype of the authors' TensorFlow release. Its normal cell concatenates states 0, 3, 4 and 6 where figure 11 of
# the paper shows 4, 5 and 6; only the release's reproduces GPipe's parameter counts.
NORMAL = Genotype(
    blocks=(
        (("conv1", 1), ("maximum3", 1)),
        (("identity", 1), ("conv7", 0)),
        (("conv1", 0), ("conv7", 0)),
        (("maximum3", 2), ("identity", 2)),
        (("average3", 1), ("conv1", 5)),
    ),
    concat=(0, 3, 4, 6),
)
REDUCTION = Genotype(
    blocks=(
        (("maximum2", 0), ("maximum3", 0)),
        (("identity", 2), ("conv3", 1)),
        (("conv7", 2), ("maximum3", 2)),
        (("identity", 3), ("maximum2", 1)),
        (("average3", 2), ("conv1", 3)),
    ),
    concat=(4, 5, 6),
    stride=2,
)


@workload(
    "amoebanet-d",
    family="amoebanet",
    defaults={"batch": 64, "size": 224, "classes": 1000, "cells": 18, "filters": 256},
    published={"parameters_18_208": 81.5e6, "parameters_18_416": 319.0e6, "parameters_18_544": 542.7e6},
    source="Real et al. 2019; Huang et al. 2019 (GPipe), table 1: 82 M, 318 M, 542 M parameters for (18, 208), "
    "(18, 416), (18, 544); to a digit more in torchgpipe's memory benchmark; (18, 256) is its speed benchmark",
)
@workload(
    "amoebanet-d-small",
    family="amoebanet",
    defaults={"batch": 32, "size": 224, "classes": 1000, "cells": 12, "filters": 48},
    source="Real et al. 2019: their smallest models for mobile devices have 3 * 4 normal cells and 44 or 50 filters; "
    "none of them is AmoebaNet-D",
)
def amoebanet_d(batch, size, classes, cells, filters):
    """Cross-entropy and RMSProp (decay 0.9, eps 0.1: Real et al., section 4). The batches of 64 and 32 are ours."""
    import torch
    from torch.nn.functional import cross_entropy

    model = build(classes, cells, filters)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, alpha=0.9, eps=0.1)
    return TrainingStep(model, images(batch, size, classes), lambda m, x, y: cross_entropy(m(x), y), optimizer)


def specs(cells: int, filters: int) -> list[CellSpec]:
    """The cells in order: two reductions of the stem, then thirds of normal cells with a reduction between."""
    channels = filters // 4
    plan = [CellSpec(REDUCTION, 2 * channels, previous=None), CellSpec(REDUCTION, 4 * channels)]
    for third in range(3):
        if third:
            plan.append(CellSpec(REDUCTION, plan[-1].channels * 2))
        plan += [CellSpec(NORMAL, plan[-1].channels)] * (cells // 3)
    return plan


def build(classes: int, cells: int, filters: int):
    """The model; ``forward`` returns the scores."""
    from torch import nn

    def conv(inputs, outputs, kernel, **options):
        return [nn.ReLU(), nn.Conv2d(inputs, outputs, kernel, bias=False, **options), batch_norm(outputs)]

    def operation(name, inputs, outputs, stride):
        few = outputs // 4
        if name == "conv1":
            return nn.Sequential(*conv(inputs, outputs, 1, stride=stride))
        if name == "conv3":
            return nn.Sequential(
                *conv(inputs, few, 1), *conv(few, few, 3, stride=stride, padding=1), *conv(few, outputs, 1)
            )
        if name == "conv7":
            return nn.Sequential(
                *conv(inputs, few, 1),
                *conv(few, few, (1, 7), stride=(1, stride), padding=(0, 3)),
                *conv(few, few, (7, 1), stride=(stride, 1), padding=(3, 0)),
                *conv(few, outputs, 1),
            )
        if name == "maximum2":
            return nn.MaxPool2d(2, stride)
        if name == "maximum3":
            return nn.MaxPool2d(3, stride, 1)
        return nn.AvgPool2d(3, stride, 1, count_include_pad=False) if name == "average3" else None

    class AmoebaNet(nn.Module):
        def __init__(self):
            super().__init__()
            Cells = stack_class(operation, adjust_first=True, norm=batch_norm)
            self.stem = nn.Sequential(
                nn.Conv2d(3, filters // 4, 3, stride=2, padding=1, bias=False), batch_norm(filters // 4)
            )
            self.cell = Cells(filters // 4, specs(cells, filters))
            self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(self.cell.channels[-1], classes))

        def forward(self, x):
            return self.head(self.cell(self.stem(x))[0])

    return AmoebaNet()
