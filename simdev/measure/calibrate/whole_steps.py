"""Whole training steps of transformers: their kernels, what a device file predicts, and one factor per precision.

A published throughput is of a whole step. Its kernels follow from the model's shapes; the device file predicts their
sum. On one node the traffic of fully sharded data parallelism (FSDP) hides behind the kernels, so that the sum is the
step. The factor by which measured steps are slower than predicted ones (dispatch gaps, clocks under a lasting load,
traffic that does not hide) is one number for each kind and precision: :func:`factor` is the median, and
:func:`leave_one_out` judges each row by the factor of the others.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from simdev.errors import InvalidInput
from simdev.problem.opcost.parts import Part
from simdev.problem.topology import DeviceKind, load_kinds

# llm-foundry's figures are of 2023's attention in Triton; FlashAttention 2 is 1.3 to 2.5 times as fast (Dao 2023, arXiv
# 2307.08691, section 4.1): the geometric mean of both.
TRITON_ATTENTION = 1.8
ADAM_BYTES = (16, 12)  # read and written per f32 parameter: gradient, weight and two moments; weight and moments
LLM_FOUNDRY_KINDS = {"a100_40gb": "a100-sxm4-40gb", "a100_80gb": "a100-sxm4-80gb", "h100_80gb": "h100-sxm5-80gb"}


@dataclass(frozen=True)
class Transformer:
    """A decoder: ``gated`` MLPs have three products and SiLU, others two and GELU; ``norm`` of the whole width."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    gated: bool = False

    @property
    def parameters(self) -> int:
        head = self.width // self.heads
        attention = self.width * (self.width + 2 * self.kv_heads * head) + self.width**2
        return (
            self.layers * (attention + (3 if self.gated else 2) * self.width * self.inner)
            + self.vocabulary * self.width
        )


def _mpt(layers: int, width: int, heads: int) -> Transformer:
    return Transformer(layers, width, heads, heads, 4 * width, 50368)


# llm-foundry's configurations (scripts/train/yamls/pretrain), and the Llama 3.1 paper's table 3
MODELS = {
    "125m": _mpt(12, 768, 12), "350m": _mpt(24, 1024, 16), "760m": _mpt(24, 1536, 12), "1b": _mpt(24, 2048, 16),
    "3b": _mpt(32, 2560, 20), "7b": _mpt(32, 4096, 32), "13b": _mpt(40, 5120, 40), "30b": _mpt(48, 7168, 56),
    "70b": _mpt(80, 8192, 64), "llama3.1-8b": Transformer(32, 4096, 32, 8, 14336, 128256, gated=True),
}  # fmt: skip


def step_parts(
    model: Transformer, batch: int, sequence: int, *, recompute: str = "none", shards: int = 1, dtype: str = "bf16"
) -> list[tuple[Part, int]]:
    """Kernels of one forward and backward pass of ``batch`` sequences, and of the optimizer's step on one of
    ``shards``, as ``(part, how often)``. ``recompute``: ``none``, ``full`` (every layer's forward once more), or
    ``selective`` (all but every second product, as torchtitan does)."""
    tokens, head, item = batch * sequence, model.width // model.heads, 2
    qkv = model.width + 2 * model.kv_heads * head
    products = [(qkv, model.width), (model.width, model.width), (model.width, model.inner)]
    products += [(model.inner, model.width)] * (2 if model.gated else 1)
    attention = (batch, model.heads, model.kv_heads, sequence, sequence, head, head, 1)
    wide, narrow = item * tokens * model.inner, item * tokens * model.width
    forward = [Part("gemm", (1, tokens, n, k), dtype) for n, k in products]
    forward += [Part("flash_attention", attention, dtype)]
    forward += [Part("layer_norm", (tokens, model.width), dtype)] * 2
    forward += [Part("vector", (2 * narrow, narrow), dtype)] * 2  # residual sums
    forward += [Part("vector", ((2 if model.gated else 1) * wide, wide), dtype)]
    backward = [Part("gemm", (1, tokens, k, n), dtype) for n, k in products]
    backward += [Part("gemm", (1, n, k, tokens), dtype) for n, k in products]
    backward += [Part("flash_attention_backward", attention, dtype)]
    backward += [Part("layer_norm_backward", (tokens, model.width), dtype)] * 2
    backward += [Part("vector", (2 * narrow, narrow), dtype)] * 2
    backward += [Part("vector", ((3 if model.gated else 2) * wide, (2 if model.gated else 1) * wide), dtype)]
    again = {"none": [], "full": forward, "selective": forward[1 : len(products) : 2] + forward[len(products) + 1 :]}
    parts = [(part, model.layers) for part in (*forward, *backward, *again[recompute])]
    logits = item * tokens * model.vocabulary
    parts += [
        (Part("gemm", dims, dtype), 1)
        for dims in (
            (1, tokens, model.vocabulary, model.width),
            (1, tokens, model.width, model.vocabulary),
            (1, model.vocabulary, model.width, tokens),
        )
    ]
    parts += [(Part("vector", (logits, 2 * logits), "f32"), 2)]  # to f32 and back
    parts += [(Part(name, (tokens, model.vocabulary), "f32"), 1) for name in ("softmax", "softmax_backward")]
    own = model.parameters // shards
    read, written = ADAM_BYTES
    return [*parts, (Part("vector", (read * own, written * own), "f32"), 1)]


def step_seconds(
    parts: Sequence[tuple[Part, int]], kind: DeviceKind, *, scaled: bool = True, attention: float = 1.0
) -> float:
    """The sum of the parts' times on ``kind``; ``scaled`` with the device file's factor of whole steps, and fused
    attention ``attention`` times as slow as the device file says."""
    from simdev.problem.costs import calibration_of, datasheet_of

    calibration = calibration_of(kind)
    calibration = calibration if scaled else replace(calibration, steps={})
    ns, _ = calibration.durations([part for part, _ in parts], datasheet_of(kind), kind.launch_ns)
    if np.isnan(ns).any():
        raise InvalidInput("its device file lacks a kernel of a transformer", source=kind.name)
    weights = [count * (attention if "attention" in part.name else 1) for part, count in parts]
    return float((ns * weights).sum()) / 1e9


@dataclass(frozen=True)
class MeasuredStep:
    """A published step: seconds of one forward, backward and optimizer pass, and what the unscaled file predicts."""

    case: str
    kind: str
    precision: str
    measured_s: float
    predicted_s: float


def read_llm_foundry(path: Path) -> list[MeasuredStep]:
    """MPT training on one node of eight boards (mosaicml/llm-foundry, scripts/train/benchmarking)."""
    kinds, steps = load_kinds(), []
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            model = MODELS.get(row["Model"])
            if (
                model is None
                or row["GPU"] not in LLM_FOUNDRY_KINDS
                or row["# GPUs"] != "8"
                or "bf16" not in row["Precision"]
            ):
                continue
            batch, sequence, rounds = (int(row[key]) for key in ("MicroBatchSize", "SeqLen (T)", "GradAccum"))
            recompute = "full" if row["Activation Checkpointing"] == "True" else "none"
            kind = kinds[LLM_FOUNDRY_KINDS[row["GPU"]]]
            *passes, update = step_parts(model, batch, sequence, recompute=recompute, shards=8)
            once = step_seconds(passes, kind, scaled=False, attention=TRITON_ATTENTION)
            predicted = rounds * once + step_seconds([update], kind, scaled=False)
            measured = rounds * batch * sequence / float(row["Throughput (T/s/GPU)"])
            case = f"{row['Model']} {row['GPU']} {sequence} x {batch}{' recompute' if recompute == 'full' else ''}"
            steps.append(MeasuredStep(case, kind.name, "bf16", measured, predicted))
    return steps


def factor(steps: Sequence[MeasuredStep]) -> float:
    """The median of measured over predicted seconds."""
    return float(np.median([step.measured_s / step.predicted_s for step in steps]))


def leave_one_out(steps: Sequence[MeasuredStep]) -> np.ndarray:
    """float64 ``(n,)``: each step's prediction by the factor of the others; without others, unscaled."""
    answer = []
    for number, step in enumerate(steps):
        others = [other for place, other in enumerate(steps) if place != number]
        answer.append(step.predicted_s * (factor(others) if others else 1.0))
    return np.array(answer)
