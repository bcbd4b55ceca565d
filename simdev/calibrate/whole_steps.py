"""Predict whole training steps of transformers from a device file, and compute one factor for each precision.

A published throughput describes a whole step. The kernels of the step follow from the shapes of the model, and the
device file predicts the sum of their times. On one node, the traffic of fully sharded data parallelism (FSDP) overlaps
with the kernels, so this sum is the prediction of the step. Measured steps are slower because of dispatch gaps, lower
clocks under a lasting load and traffic that does not overlap. One factor for each board and precision corrects that:
:func:`factor` is the median, and :func:`leave_one_out` predicts each row with the factor of the others.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from simdev.errors import InvalidInput
from simdev.files import open_text, table_errors
from simdev.problem.opcost.parts import KernelPart
from simdev.problem.topology import DeviceKind, load_kinds

# llm-foundry's steps ran the attention of 2023 in Triton. FlashAttention 2 is 1.3 to 2.5 times as fast (Dao 2023, arXiv
# 2307.08691, section 4.1). This is the geometric mean of both ratios.
TRITON_ATTENTION = 1.8
ADAM_BYTES = (16, 12)  # read (gradient, weight, two moments) and written (weight, moments) per f32 parameter
LLM_FOUNDRY_KINDS = {"a100_40gb": "a100-sxm4-40gb", "a100_80gb": "a100-sxm4-80gb", "h100_80gb": "h100-sxm5-80gb"}


@dataclass(frozen=True)
class Transformer:
    """The shape of a decoder. A ``gated`` MLP has three products and SiLU, any other has two products and GELU."""

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
) -> list[tuple[KernelPart, int]]:
    """The kernels of one forward and backward pass over ``batch`` sequences and of the optimizer on one of ``shards``,
    as ``(part, repetitions)``. ``recompute`` is ``none``, ``full`` (the forward pass of every layer runs again) or
    ``selective`` (all except every second product runs again, as in torchtitan)."""
    tokens, head, item = batch * sequence, model.width // model.heads, 2
    qkv = model.width + 2 * model.kv_heads * head
    products = [(qkv, model.width), (model.width, model.width), (model.width, model.inner)]
    products += [(model.inner, model.width)] * (2 if model.gated else 1)
    attention = (batch, model.heads, model.kv_heads, sequence, sequence, head, head, 1)
    wide, narrow = item * tokens * model.inner, item * tokens * model.width
    forward = [KernelPart("gemm", (1, tokens, n, k), dtype) for n, k in products]
    forward += [KernelPart("flash_attention", attention, dtype)]
    forward += [KernelPart("layer_norm", (tokens, model.width), dtype)] * 2
    forward += [KernelPart("vector", (2 * narrow, narrow), dtype)] * 2  # sums of the residual path
    forward += [KernelPart("vector", ((2 if model.gated else 1) * wide, wide), dtype)]
    backward = [KernelPart("gemm", (1, tokens, k, n), dtype) for n, k in products]
    backward += [KernelPart("gemm", (1, n, k, tokens), dtype) for n, k in products]
    backward += [KernelPart("flash_attention_backward", attention, dtype)]
    backward += [KernelPart("layer_norm_backward", (tokens, model.width), dtype)] * 2
    backward += [KernelPart("vector", (2 * narrow, narrow), dtype)] * 2
    backward += [KernelPart("vector", ((3 if model.gated else 2) * wide, (2 if model.gated else 1) * wide), dtype)]
    again = {"none": [], "full": forward, "selective": forward[1 : len(products) : 2] + forward[len(products) + 1 :]}
    parts = [(part, model.layers) for part in (*forward, *backward, *again[recompute])]
    logits = item * tokens * model.vocabulary
    parts += [
        (KernelPart("gemm", dims, dtype), 1)
        for dims in (
            (1, tokens, model.vocabulary, model.width),
            (1, tokens, model.width, model.vocabulary),
            (1, model.vocabulary, model.width, tokens),
        )
    ]
    parts += [(KernelPart("vector", (logits, 2 * logits), "f32"), 2)]  # conversion to f32 and back
    parts += [(KernelPart(name, (tokens, model.vocabulary), "f32"), 1) for name in ("softmax", "softmax_backward")]
    own = model.parameters // shards
    read, written = ADAM_BYTES
    return [*parts, (KernelPart("vector", (read * own, written * own), "f32"), 1)]


def step_seconds(
    parts: Sequence[tuple[KernelPart, int]], kind: DeviceKind, *, scaled: bool = True, attention: float = 1.0
) -> float:
    """The sum of the times of ``parts`` on ``kind``. ``scaled`` applies the device file's factor of whole steps. The
    time of fused attention is multiplied by ``attention``."""
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
    """A published step: the measured seconds of the forward, backward and optimizer pass, and the unscaled
    prediction."""

    case: str
    kind: str
    precision: str
    measured_s: float
    predicted_s: float


def read_llm_foundry(path: Path) -> list[MeasuredStep]:
    """Read published MPT steps on one node of eight boards (mosaicml/llm-foundry, scripts/train/benchmarking)."""
    kinds, steps = load_kinds(), []
    with table_errors(path), open_text(path) as file:
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
    """The median ratio of measured to predicted seconds."""
    return float(np.median([step.measured_s / step.predicted_s for step in steps]))


def leave_one_out(steps: Sequence[MeasuredStep]) -> np.ndarray:
    """float64 ``(n,)``: the prediction of each step with the factor of the other steps, or unscaled if there are
    none."""
    answer = []
    for number, step in enumerate(steps):
        others = [other for place, other in enumerate(steps) if place != number]
        answer.append(step.predicted_s * (factor(others) if others else 1.0))
    return np.array(answer)
