"""Lets ``torchvision`` be imported beside a PyTorch that its wheel was not built for.

torchvision's wheel holds C++ operators. Beside another PyTorch (such as a build for CPUs) they do not load, and then
the import of torchvision, and of timm, fails at the first operator that it describes. A capture needs no kernel, so the
names of these operators suffice. A model that calls one is refused by torchvision itself.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_defined: list = []  # PyTorch forgets the operators of a library that is freed


def define_missing_operators() -> bool:
    """Define the names of torchvision's operators if torchvision is installed and its operators do not load. Returns
    whether they are names only."""
    import torch

    if _defined:
        return True
    installed = importlib.util.find_spec("torchvision")
    if installed is None or installed.origin is None or "torchvision" in sys.modules:
        return False
    try:
        for path in Path(installed.origin).parent.glob("_C*"):
            torch.ops.load_library(path)
        missing = not hasattr(torch.ops.torchvision, "nms")
    except OSError:
        missing = True
    if missing:
        library = torch.library.Library("torchvision", "DEF")
        for schema in SCHEMAS:
            library.define(schema)
        _defined.append(library)
    return missing
