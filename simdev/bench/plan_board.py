"""The jobs of the shipped board of planners, and what planners may choose for each model."""

from __future__ import annotations

import json

# Models and clusters of the board, with the sequences of a step and the microbatch sizes that planners may choose.
A100, A100S, H100S, MANY, L40S = (
    "dgx-a100", "dgx-a100[nodes=8]", "dgx-h100[nodes=8]", "dgx-h100[nodes=64]", "l40sx8-pcie"
)  # fmt: skip
BOARD = (
    ("llama3-70b", (H100S, A100S, MANY), 1024, (1,)),
    ("mpt-7b", (A100, A100S, H100S, L40S), 1024, (1, 4)),
    ("mpt-70b", (A100S, H100S, MANY), 1024, (1, 2)),
    ("gpt-1.3b", (A100, A100S, H100S, L40S), 512, (1, 4)),
    ("llama3-8b", (A100, A100S, H100S, L40S), 512, (1, 2)),
    ("bert-large", (A100, A100S, H100S, L40S), 4096, (8, 32)),
    ("vit-22b", (A100S, H100S, MANY), 4096, (4, 16)),
    ("mixtral-8x7b", (A100S, H100S, MANY), 1024, (1,)),
    ("deepseek-v2lite", (A100, A100S, H100S), 1024, (1,)),
    ("llama3-405b", (MANY,), 1024, (1,)),
)
RECOMPUTES = ("none", "selective", "full")


def choices_of(model: str) -> str:
    """The JSON of what planners may choose for a model: the board's own sizes, or microbatches of 1 and 2."""
    sizes = next((sizes for name, _, _, sizes in BOARD if name == model), (1, 2))
    return json.dumps({"microbatches": sizes, "recomputes": RECOMPUTES})
