"""Attention under context parallelism.

PyTorch has a ring form (keys and values gathered or passed on, results merged) of the kernels of accelerators, and none
of the CPU's kernel, which it would choose for the tensors of a capture.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

NAME = "scaled_dot_product_attention"


@contextmanager
def ring_attention():
    """While active, attention on a sequence that is split between ranks is the flash kernel of an accelerator. Dropout
    inside attention is left out, as in all captures."""
    before = getattr(functional, NAME)

    def ours(*args, **kwargs):
        return _attention(before, *args, **kwargs)

    ours.__name__ = NAME  # context_parallel puts its own function in the place of this name
    setattr(functional, NAME, ours)
    try:
        yield
    finally:
        setattr(functional, NAME, before)


def _attention(whole, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if not isinstance(query, DTensor):
        return whole(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None:
        raise RuntimeError("attention with a mask on a sequence that is split between ranks has no flash kernel")
    if enable_gqa and key.shape[1] != query.shape[1]:
        key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for t in (key, value))
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(query, key, value, 0.0, is_causal, return_debug_mask=False, scale=scale)[0]
