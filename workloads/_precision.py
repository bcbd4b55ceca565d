"""Number formats of the transformer workloads."""

from __future__ import annotations

from contextlib import contextmanager

from simdev.errors import UnknownName

_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


@contextmanager
def precision_of(name: str):
    """A context in which new parameters have the format ``name``. (``Module.to`` fails on fake tensors.)"""
    import torch

    if name not in _DTYPES:
        raise UnknownName("precision", name, _DTYPES)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, _DTYPES[name]))
    try:
        yield
    finally:
        torch.set_default_dtype(before)
