"""Building blocks that several convolutional workloads share. They import PyTorch when they are called."""

from __future__ import annotations


def batch_norm(channels: int, *, eps: float = 1e-3, momentum: float = 0.1):
    """``BatchNorm2d`` without its counter of batches, which nothing reads when the momentum is fixed."""
    from torch import nn

    norm = nn.BatchNorm2d(channels, eps=eps, momentum=momentum)
    norm.num_batches_tracked = None
    return norm


def images(batch: int, size: int, classes: int):
    """A batch of square RGB images, f32 ``(batch, 3, size, size)``, and its labels, int64 ``(batch,)``."""
    import torch

    return torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))


def smoothed_loss(model, pictures, labels):
    """Cross-entropy with label smoothing 0.1 of the scores, plus 0.4 times that of the auxiliary ones if any."""
    from torch.nn.functional import cross_entropy

    scores, aux_scores = model(pictures)
    total = cross_entropy(scores, labels, label_smoothing=0.1)
    if aux_scores is not None:
        total = total + 0.4 * cross_entropy(aux_scores, labels, label_smoothing=0.1)
    return total
