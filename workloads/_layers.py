"""Building blocks that several convolutional workloads share. PyTorch is imported when one is made, not before."""

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
