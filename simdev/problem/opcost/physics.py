"""What a kernel should take by physics alone, and the features by which measurements correct it.

Matrix products: the output is cut into tiles, one thread block each; blocks run in waves, one per processor at a time,
so that a last wave costs as much as a full one (wave quantisation, as in Habitat, Yu et al. 2021, and NeuSight, Lee et
al. 2025). Of the tile shapes that vendor libraries carry the fastest counts. Convolutions are products of the filters
with the unfolded image; 3 x 3 and 5 x 5 filters of stride 1 may use Winograd's 2.25 times fewer multiplications (Lavin
and Gray 2016). All else is passes over memory. No product is faster than its bytes at the memory's bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from simdev.problem.opcost import tensor_cores
from simdev.problem.opcost.signature import ITEM_BYTES
from simdev.problem.opcost.tensor_cores import ATTENTION, TENSOR_DTYPES

# (rows, columns, share of the peak inside a full wave): libraries' tile shapes; small tiles reuse registers less
TILES = (
    (128, 128, 1.0), (128, 64, 0.97), (64, 128, 0.97), (64, 64, 0.9), (128, 32, 0.85), (32, 128, 0.85), (32, 32, 0.6),
)  # fmt: skip
WINOGRAD = 2.25
PRODUCTS = ("linear", "gemm", "bmm")
RECURRENT = ("rnn", "rnn_dgrad", "rnn_wgrad")
GEMM_LIKE = (*PRODUCTS, *RECURRENT, "conv", "conv3x3", "conv_dgrad", "conv_wgrad")
SPLIT_DEPTH = 512  # a product deeper than this may be split along its depth, where tiles are few


@dataclass(frozen=True)
class Datasheet:
    """Rates of a device: f32 FLOP/s, bytes/s, and the number of multiprocessors; ``rates`` are ``(dtype, FLOP/s)`` of
    other precisions, ``watts`` is the power limit (0: not known); neither counts when two datasheets are compared."""

    flops: float
    bandwidth: float
    multiprocessors: int
    rates: tuple[tuple[str, float], ...] = field(default=(), compare=False)
    watts: float = field(default=0.0, compare=False)

    def rate(self, dtype: str) -> float:
        """Peak FLOP/s for ``dtype``; f16 and bf16 stand for each other, and an unlisted dtype runs as f32."""
        known = dict(self.rates)
        other = {"f16": "bf16", "bf16": "f16"}.get(dtype, dtype)
        return known.get(dtype, known.get(other, self.flops))


def item_bytes(dtype: str) -> int:
    """Bytes of an element of ``dtype``."""
    return TENSOR_DTYPES.get(dtype) or ITEM_BYTES.get(dtype, 4)


def on_matrix_units(name: str, dtype: str) -> bool:
    """Whether a part runs on matrix units: products, convolutions and fused attention below f32."""
    return dtype in TENSOR_DTYPES and (name in GEMM_LIKE or name in ATTENTION)


def moved_bytes(name: str, dims: np.ndarray, item: int = 4) -> np.ndarray:
    """float64 ``(n,)``: bytes that a part must read and write at least; ``dims`` int64 ``(n, dimensions)``."""
    if name in ATTENTION:
        return tensor_cores.attention_bytes(dims, item)
    d = dims.astype(np.float64).T
    if name == "vector":
        return d[0] + d[1]
    if name in PRODUCTS:
        return item * d[0] * (d[1] * d[3] + d[3] * d[2] + d[1] * d[2])
    if name in RECURRENT:  # the weights once a step, as the steps wait for each other
        gates, hidden, batch, steps = d
        weights = gates * hidden * hidden
        return item * (weights * (1 if name == "rnn_wgrad" else steps) + (1 + gates) * hidden * batch * steps)
    if name.startswith("conv"):
        n, c, k, h, w, p, q, r, s, _, groups = d
        return item * (n * c * h * w + n * k * p * q + k * c * r * s / groups)
    passes = {"softmax": 2, "softmax_backward": 3, "layer_norm": 2, "layer_norm_backward": 5}[name]
    return item * passes * d[0] * d[1]


def work_flops(name: str, dims: np.ndarray) -> np.ndarray:
    """float64 ``(n,)``: multiplications and additions of a matrix product or a direct convolution; 0 of the others."""
    if name in ATTENTION:
        products = tensor_cores.BACKWARD_PRODUCTS if name.endswith("backward") else 1
        return products * tensor_cores.attention_flops(dims)
    d = dims.astype(np.float64).T
    if name in PRODUCTS:
        return 2 * d[0] * d[1] * d[2] * d[3]
    if name in RECURRENT:
        return 2 * d[0] * d[1] * d[1] * d[2] * d[3]
    if name.startswith("conv"):
        n, c, k, _, _, p, q, r, s, _, groups = d
        return 2 * n * k * p * q * c * r * s / groups
    return np.zeros(len(dims))


def as_product(name: str, dims: np.ndarray) -> np.ndarray:
    """float64 ``(4, n)``: ``batch, m, n, k`` of the matrix product that a part amounts to; of a recurrent layer: a
    step's."""
    d = dims.astype(np.float64).T
    if name in PRODUCTS:
        return d
    if name in RECURRENT:
        gates, hidden, batch, steps = d
        shapes = {
            "rnn": (gates * hidden, batch, hidden),
            "rnn_dgrad": (hidden, batch, gates * hidden),
            "rnn_wgrad": (gates * hidden, hidden, batch * steps),
        }
        return np.stack([np.ones(len(dims)), *shapes[name]])
    n, c, k, h, w, p, q, r, s, _, groups = d
    if name in ("conv", "conv3x3"):
        return np.stack([groups, k / groups, n * p * q, c / groups * r * s])
    if name == "conv_dgrad":
        return np.stack([groups, c / groups, n * h * w, k / groups * r * s])
    return np.stack([groups, k / groups, c / groups * r * s, n * p * q])


def baseline_s(name: str, dims: np.ndarray, sheet: Datasheet, dtype: str = "f32") -> np.ndarray:
    """float64 ``(n,)``: seconds on a device that reaches its datasheet's rates inside full waves."""
    if name in ATTENTION:
        rate = sheet.rate(dtype)
        return tensor_cores.attention_seconds(name, dims, rate, sheet.bandwidth, sheet.multiprocessors)
    passes = moved_bytes(name, dims, item_bytes(dtype)) / sheet.bandwidth
    if on_matrix_units(name, dtype):
        product = as_product(name, dims)
        tiles = tensor_cores.product_seconds(product, sheet.rate(dtype), sheet.multiprocessors)
        steps = dims[:, 3] if name in ("rnn", "rnn_dgrad") else 1
        return np.maximum(tiles.min(axis=0) * steps, passes)
    if name not in GEMM_LIKE:
        return passes
    seconds = _tile_seconds(name, dims, sheet).min(axis=0)
    if name in ("rnn", "rnn_dgrad"):
        seconds = seconds * dims[:, 3]
    elif name.startswith("conv"):
        seconds = np.where(_winograd(dims), seconds / WINOGRAD, seconds)
    return np.maximum(seconds, passes)


def features(name: str, dims: np.ndarray, sheet: Datasheet, dtype: str = "f32") -> np.ndarray:
    """float32 ``(n, features)``: what decides how far a kernel is from :func:`baseline_s`.

    Waves and shares rather than sizes where that is possible, so that they mean the same on another device.
    """
    if name in ATTENTION:
        return tensor_cores.attention_features(dims, sheet.rate(dtype), sheet.bandwidth, sheet.multiprocessors)
    item = item_bytes(dtype)
    if on_matrix_units(name, dtype):
        passes = moved_bytes(name, dims, item) / sheet.bandwidth
        product = as_product(name, dims)
        return tensor_cores.product_features(product, passes, sheet.rate(dtype), sheet.multiprocessors)
    d = dims.astype(np.float64).T
    if name not in GEMM_LIKE:
        bytes_moved = moved_bytes(name, dims, item)
        columns = [bytes_moved / sheet.bandwidth * 1e9]
        if name == "vector":
            columns += [d[1] / np.maximum(bytes_moved, 1)]
        else:
            columns += [*d, _remainder(d[1], 4), _remainder(d[1], 2), d[0] / sheet.multiprocessors]
        return np.stack(columns, axis=1).astype(np.float32)
    batch, m, n, k = as_product(name, dims)
    tiles = _tile_seconds(name, dims, sheet)
    best = tiles.min(axis=0)
    flops = work_flops(name, dims)
    passes = moved_bytes(name, dims, item) / sheet.bandwidth
    ideal = flops / sheet.flops
    columns = [batch, m, n, k, ideal * 1e9, passes * 1e9, ideal / passes, best / ideal, tiles.argmin(axis=0), m / n,
               batch * m * n, _excess(m, 128), _excess(n, 128), _remainder(m, 4), _remainder(n, 4), _remainder(k, 4),
               _remainder(n, 32), _remainder(k, 32)]  # fmt: skip
    for rows, width, _ in TILES:
        count = batch * np.ceil(m / rows) * np.ceil(n / width)
        waves = np.ceil(count / sheet.multiprocessors)
        columns += [count / sheet.multiprocessors, count / (waves * sheet.multiprocessors)]
    if name in RECURRENT:
        columns += [d[0], d[3]]
    elif name.startswith("conv"):
        images, c, filters, h, w, p, q, r, s, stride, groups = d
        columns += [images, c, filters, h * w, p * q, h, q, r * s, r, stride, c / groups, _remainder(c, 32),
                    _remainder(filters, 32), np.ceil(p / 4) * np.ceil(q / 4) * 16 / (p * q),
                    np.ceil(p / 2) * np.ceil(q / 2) * 4 / (p * q),
                    images * np.ceil(p / 4) * np.ceil(q / 4)]  # fmt: skip
    return np.stack(columns, axis=1).astype(np.float32)


def _tile_seconds(name: str, dims: np.ndarray, sheet: Datasheet) -> np.ndarray:
    """float64 ``(tiles, n)``: the product's time by each tile shape."""
    batch, m, n, k = as_product(name, dims)
    rate = sheet.flops / sheet.multiprocessors
    rows = []
    for height, width, share in TILES:
        count = batch * np.ceil(m / height) * np.ceil(n / width)
        pieces = np.maximum(1, np.minimum(np.floor(sheet.multiprocessors / count), np.floor(k / SPLIT_DEPTH)))
        waves = np.ceil(count * pieces / sheet.multiprocessors)
        rows.append(waves * (2 * height * width) * np.ceil(k / pieces) / (rate * share))
    return np.stack(rows)


def _winograd(dims: np.ndarray) -> np.ndarray:
    r, s, stride, groups = dims[:, 7], dims[:, 8], dims[:, 9], dims[:, 10]
    return (r == s) & ((r == 3) | (r == 5)) & (stride == 1) & (groups == 1)


def _excess(size: np.ndarray, tile: int) -> np.ndarray:
    return np.ceil(size / tile) * tile / size


def _remainder(size: np.ndarray, step: int) -> np.ndarray:
    return size - np.floor(size / step) * step
