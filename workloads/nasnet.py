"""NASNet-A (Zoph et al., "Learning Transferable Architectures for Scalable Image Recognition", CVPR 2018).

Layers: ``stem`` is the first convolution, ``cell.0`` ... the cells in order (0 and 1 are the stem's two reduction
cells), inside them ``cell.N.block.B.S.*`` for side S of block B, and ``cell.N.current`` / ``cell.N.previous`` for the
convolutions that fit the two inputs; ``aux.*`` is the auxiliary classifier, ``head.*`` the classifier. Cells follow the
authors' TF-Slim networks ``nasnet_large`` and ``nasnet_mobile``; strided operations pad evenly where TensorFlow pads
one side more.
"""

from __future__ import annotations

from simdev.graphs.workload import TrainingStep, workload
from simdev.workloads._cells import CellSpec, Genotype, stack_class
from simdev.workloads._layers import batch_norm, images, smoothed_loss

# Appendix A, figure 7 of the paper. State 0 is the current cell's input h_i, state 1 the one before, h_(i-1).
NORMAL = Genotype(
    blocks=(
        (("separable5", 0), ("separable3", 1)),
        (("separable5", 1), ("separable3", 1)),
        (("average", 0), ("identity", 1)),
        (("average", 1), ("average", 1)),
        (("separable3", 0), ("identity", 0)),
    ),
    concat=(1, 2, 3, 4, 5, 6),
)
REDUCTION = Genotype(
    blocks=(
        (("separable5", 0), ("separable7", 1)),
        (("maximum", 0), ("separable7", 1)),
        (("average", 0), ("separable5", 1)),
        (("identity", 3), ("average", 2)),
        (("separable3", 2), ("maximum", 0)),
    ),
    concat=(3, 4, 5, 6),
    stride=2,
)
_SOURCE = (
    "Zoph et al. 2018, table 2 (multiply-adds 23.8 B and 564 M, parameters 88.9 M and 5.3 M); exact counts: Keras "
)


@workload(
    "nasnet-a-large",
    family="nasnet",
    defaults={
        "batch": 32,
        "size": 331,
        "classes": 1000,
        "cells": 18,
        "channels": 168,
        "stem": 96,
        "skip": True,
        "drop_path": 0.3,
        "aux": True,
    },
    published={"parameters_without_aux": 88_753_150, "forward_macs": 23.8e9},
    source=_SOURCE + "NASNetLarge, trainable parameters",
)
@workload(
    "nasnet-a-mobile",
    family="nasnet",
    defaults={
        "batch": 32,
        "size": 224,
        "classes": 1000,
        "cells": 12,
        "channels": 44,
        "stem": 32,
        "skip": False,
        "drop_path": 0.0,
        "aux": True,
    },
    published={"parameters_without_aux": 5_289_978, "forward_macs": 564e6},
    source=_SOURCE + "NASNetMobile, trainable parameters",
)
def nasnet_a(batch, size, classes, cells, channels, stem, skip, drop_path, aux):
    """NASNet-A (cells / 3 @ 24 * channels): RMSProp (decay 0.9, eps 1), label smoothing 0.1, auxiliary loss 0.4.

    Batch 32 a device as in the paper's appendix A.4. Drop path keeps its final probability; it is not scheduled.
    """
    import torch

    model = build(size, classes, cells, channels, stem, skip, drop_path, aux)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.04, alpha=0.9, eps=1.0)
    return TrainingStep(model, images(batch, size, classes), smoothed_loss, optimizer)


def specs(cells: int, channels: int, skip: bool) -> list[CellSpec]:
    """The cells in order: two reductions of the stem, then thirds of normal cells with a reduction between.

    With ``skip`` the normal cell after a reduction takes as its previous input that of the reduction (the large
    network), not its current one.
    """
    plan = [CellSpec(REDUCTION, channels // 4, previous=None), CellSpec(REDUCTION, channels // 2)]
    width = channels
    for number in range(cells):
        after_reduction = number in (cells // 3, 2 * cells // 3)
        if after_reduction:
            width *= 2
            plan.append(CellSpec(REDUCTION, width))
        plan.append(CellSpec(NORMAL, width, previous=-3 if skip and after_reduction else -2))
    return plan


def build(size, classes, cells, channels, stem, skip, drop_path, aux):
    """The model; ``forward`` returns the scores and the auxiliary scores (or None)."""
    from torch import nn

    def separable(inputs, outputs, kernel, stride):
        layers = []
        for wide, step in ((inputs, stride), (outputs, 1)):
            layers += [
                nn.ReLU(),
                nn.Conv2d(wide, wide, kernel, step, kernel // 2, groups=wide, bias=False),
                nn.Conv2d(wide, outputs, 1, bias=False),
                batch_norm(outputs),
            ]
        return nn.Sequential(*layers)

    def operation(name, inputs, outputs, stride):
        if name.startswith("separable"):
            return separable(inputs, outputs, int(name[-1]), stride)
        if name == "average":
            return nn.AvgPool2d(3, stride, 1, count_include_pad=False)
        return nn.MaxPool2d(3, stride, 1) if name == "maximum" else None

    class NasNet(nn.Module):
        def __init__(self):
            super().__init__()
            Cells = stack_class(operation, adjust_first=False, drop_path=drop_path, norm=batch_norm)
            plan = specs(cells, channels, skip)
            self.stem = nn.Sequential(nn.Conv2d(3, stem, 3, stride=2, bias=False), batch_norm(stem))
            self.cell = Cells(stem, plan)
            self.head = nn.Sequential(
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Dropout(0.5),
                nn.Flatten(),
                nn.Linear(self.cell.channels[-1], classes),
            )
            reductions = [number for number, spec in enumerate(plan) if spec.genotype is REDUCTION]
            self.branch = reductions[-1]
            self.aux = auxiliary(self.cell.channels[self.branch]) if aux else None

        def forward(self, x):
            x, branched = self.cell(self.stem(x), self.branch)
            return self.head(x), None if self.aux is None else self.aux(branched)

    def auxiliary(inputs):
        side = (size - 3) // 2 + 1  # after the stem
        for _ in range(3):  # the stem's reductions and the first
            side = -(-side // 2)
        left = (side - 5) // 3 + 1
        return nn.Sequential(
            nn.ReLU(),
            nn.AvgPool2d(5, 3),
            nn.Conv2d(inputs, 128, 1, bias=False),
            batch_norm(128),
            nn.ReLU(),
            nn.Conv2d(128, 768, left, bias=False),
            batch_norm(768),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(768, classes),
        )

    return NasNet()
