"""Inception-V3 (Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", CVPR 2016, section 6).

Layers: the stem is ``stem.*``; the eleven mixed blocks are ``mixed.0`` ... ``mixed.10`` (35x35: 0-2, reduction 3,
17x17: 4-7, reduction 8, 8x8: 9-10), their branches ``mixed.N.branches.B.*``; ``aux.*`` is the auxiliary classifier
(it reads ``mixed.7``), ``head.*`` the classifier.
"""

from __future__ import annotations

from simdev.graphs.workload import InferenceStep, TrainingStep, workload
from simdev.workloads._layers import batch_norm, images, smoothed_loss


@workload(
    "inception-v3",
    family="inception",
    defaults={"batch": 32, "size": 299, "classes": 1000, "aux": True},
    published={"parameters": 27_161_264, "parameters_without_aux": 23_834_568, "forward_macs": 5.71e9},
    source="Szegedy et al. 2016; parameter and multiply-add counts as published with the torchvision weights "
    "(27.2 M with the auxiliary head, 5.71 G multiply-adds at 299x299); batch 32 as in Mirhoseini et al. 2017",
)
def inception_v3(batch, size, classes, aux):
    """Cross-entropy with label smoothing 0.1, auxiliary loss weighted 0.4, RMSProp (decay 0.9, eps 1).

    The paper's gradient clipping is left out: it would tie every update to every gradient.
    """
    import torch

    model = build(classes, aux)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.045, alpha=0.9, eps=1.0)
    return TrainingStep(model, images(batch, size, classes), smoothed_loss, optimizer)


@workload(
    "inception-v3-inference",
    family="inception",
    defaults={"batch": 1, "size": 299, "classes": 1000},
    published={"parameters": 23_834_568, "forward_macs": 5.71e9},
    source="Szegedy et al. 2016; counts as published with the torchvision weights, without the auxiliary head",
)
def inception_v3_inference(batch, size, classes):
    """The scores of ``batch`` images, with the stored statistics of the batch norms."""
    return InferenceStep(build(classes, False).eval(), images(batch, size, classes)[:1], lambda m, x: m(x)[0])


def build(classes: int, aux: bool):
    """The model; ``forward`` returns the scores and the auxiliary scores (or None)."""
    import torch
    from torch import nn

    def conv(inputs, outputs, kernel, **options):
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, kernel, bias=False, **options), batch_norm(outputs), nn.ReLU(inplace=True)
        )

    def chain(*layers):
        return nn.Sequential(*layers)

    class Branches(nn.Module):
        """Branches over one input, joined along the channels."""

        def __init__(self, *branches):
            super().__init__()
            self.branches = nn.ModuleList(branches)

        def forward(self, x):
            return torch.cat([branch(x) for branch in self.branches], 1)

    def wide(inputs, pool):
        return Branches(
            conv(inputs, 64, 1),
            chain(conv(inputs, 48, 1), conv(48, 64, 5, padding=2)),
            chain(conv(inputs, 64, 1), conv(64, 96, 3, padding=1), conv(96, 96, 3, padding=1)),
            chain(nn.AvgPool2d(3, 1, 1), conv(inputs, pool, 1)),
        )

    def reduce_35(inputs):
        return Branches(
            conv(inputs, 384, 3, stride=2),
            chain(conv(inputs, 64, 1), conv(64, 96, 3, padding=1), conv(96, 96, 3, stride=2)),
            nn.MaxPool2d(3, 2),
        )

    def factorised(inputs, mid):
        row, column = dict(kernel=(1, 7), padding=(0, 3)), dict(kernel=(7, 1), padding=(3, 0))
        return Branches(
            conv(inputs, 192, 1),
            chain(conv(inputs, mid, 1), conv(mid, mid, **row), conv(mid, 192, **column)),
            chain(
                conv(inputs, mid, 1),
                conv(mid, mid, **column),
                conv(mid, mid, **row),
                conv(mid, mid, **column),
                conv(mid, 192, **row),
            ),
            chain(nn.AvgPool2d(3, 1, 1), conv(inputs, 192, 1)),
        )

    def reduce_17(inputs):
        return Branches(
            chain(conv(inputs, 192, 1), conv(192, 320, 3, stride=2)),
            chain(
                conv(inputs, 192, 1),
                conv(192, 192, (1, 7), padding=(0, 3)),
                conv(192, 192, (7, 1), padding=(3, 0)),
                conv(192, 192, 3, stride=2),
            ),
            nn.MaxPool2d(3, 2),
        )

    def fork(inputs):
        return Branches(conv(inputs, 384, (1, 3), padding=(0, 1)), conv(inputs, 384, (3, 1), padding=(1, 0)))

    def expanded(inputs):
        return Branches(
            conv(inputs, 320, 1),
            chain(conv(inputs, 384, 1), fork(384)),
            chain(conv(inputs, 448, 1), conv(448, 384, 3, padding=1), fork(384)),
            chain(nn.AvgPool2d(3, 1, 1), conv(inputs, 192, 1)),
        )

    class InceptionV3(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = chain(
                conv(3, 32, 3, stride=2),
                conv(32, 32, 3),
                conv(32, 64, 3, padding=1),
                nn.MaxPool2d(3, 2),
                conv(64, 80, 1),
                conv(80, 192, 3),
                nn.MaxPool2d(3, 2),
            )
            self.mixed = nn.ModuleList(
                [
                    wide(192, 32), wide(256, 64), wide(288, 64), reduce_35(288),
                    factorised(768, 128), factorised(768, 160), factorised(768, 160), factorised(768, 192),
                    reduce_17(768), expanded(1280), expanded(2048),
                ]
            )  # fmt: skip
            self.aux = None
            if aux:
                self.aux = chain(
                    nn.AvgPool2d(5, 3),
                    conv(768, 128, 1),
                    conv(128, 768, 5),
                    nn.AdaptiveAvgPool2d(1),
                    nn.Flatten(),
                    nn.Linear(768, classes),
                )
            self.head = chain(nn.AdaptiveAvgPool2d(1), nn.Dropout(0.2), nn.Flatten(), nn.Linear(2048, classes))

        def forward(self, x):
            x, aux_scores = self.stem(x), None
            for number, block in enumerate(self.mixed):
                x = block(x)
                if number == 7 and self.aux is not None:
                    aux_scores = self.aux(x)
            return self.head(x), aux_scores

    return InceptionV3()
