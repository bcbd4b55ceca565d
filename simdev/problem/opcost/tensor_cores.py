"""The physics of kernels on matrix units (tensor cores, matrix cores): 16-bit, TF32 and FP8 products, fused attention.

Products: as in :mod:`simdev.problem.opcost.physics` the output is cut into tiles, and tiles run in waves over the
multiprocessors. Matrix units want larger tiles than f32 units do, and depths in steps of :data:`DEPTH_STEP`.

Fused attention (FlashAttention, Dao et al. 2022, arXiv 2205.14135): a thread block computes :data:`QUERY_ROWS` rows of
the result of one head against all keys, so that a score matrix never reaches memory. Causal attention visits the tiles
on and below the diagonal alone. The backward pass does five products where the forward pass does two.
"""

from __future__ import annotations

import numpy as np

# (rows, columns, share of the peak inside a full wave): the tile shapes of vendor libraries on matrix units
TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.95),
    (128, 64, 0.85),
    (64, 128, 0.85),
    (64, 64, 0.65),
    (64, 32, 0.4),
)
DEPTH_STEP = 64  # depths are padded to a multiple of this
SPLIT_DEPTH = 512  # a product deeper than this may be split along its depth if there are few tiles
QUERY_ROWS = 128  # rows of the result that one thread block of fused attention computes
BACKWARD_PRODUCTS = 2.5  # products of the backward pass over those of the forward pass: five over two
TENSOR_DTYPES = {"bf16": 2, "f16": 2, "tf32": 4, "f8": 1}  # precisions of matrix units: bytes per element
ATTENTION = ("attention", "attention_backward", "flash_attention", "flash_attention_backward")


def product_seconds(product: np.ndarray, flops: float, multiprocessors: int) -> np.ndarray:
    """float64 ``(tiles, n)``: seconds of products by each tile shape; ``product`` is ``batch, m, n, k`` float64
    ``(4, n)``, ``flops`` the peak in FLOP/s."""
    batch, m, n, k = product
    rate = flops / multiprocessors
    rows = []
    for height, width, share in TILES:
        count = batch * np.ceil(m / height) * np.ceil(n / width)
        pieces = np.maximum(1, np.minimum(np.floor(multiprocessors / count), np.floor(k / SPLIT_DEPTH)))
        waves = np.ceil(count * pieces / multiprocessors)
        depth = DEPTH_STEP * np.ceil(k / pieces / DEPTH_STEP)
        rows.append(waves * (2 * height * width) * depth / (rate * share))
    return np.stack(rows)


def product_features(product: np.ndarray, passes_s: np.ndarray, flops: float, multiprocessors: int) -> np.ndarray:
    """float32 ``(n, features)``: what decides how far a product on matrix units is from its physics. ``passes_s`` are
    the seconds that its bytes take at the memory's bandwidth."""
    batch, m, n, k = product
    tiles = product_seconds(product, flops, multiprocessors)
    best = tiles.min(axis=0)
    ideal = 2 * batch * m * n * k / flops
    columns = [batch, m, n, k, ideal * 1e9, passes_s * 1e9, ideal / passes_s, best / ideal, tiles.argmin(axis=0),
               m / n, np.mod(m, 64), np.mod(n, 64), np.mod(m, 8), batch * m * n / multiprocessors]  # fmt: skip
    for height, width, _ in TILES[:-1]:
        count = batch * np.ceil(m / height) * np.ceil(n / width)
        waves = np.ceil(count / multiprocessors)
        columns += [count / multiprocessors, count / (waves * multiprocessors)]
    return np.stack(columns, axis=1).astype(np.float32)


def attention_flops(dims: np.ndarray) -> np.ndarray:
    """float64 ``(n,)``: multiplications and additions of the two products of fused attention.

    ``dims`` int64 ``(n, 8)``: ``batch, heads, kv_heads, queries, keys, width, value_width, causal``.
    """
    batch, heads, _, queries, keys, width, value_width, causal = dims.astype(np.float64).T
    visible = np.where(causal > 0, keys - np.minimum(queries, keys) / 2, keys)
    return 2 * batch * heads * queries * visible * (width + value_width)


def attention_bytes(dims: np.ndarray, item: int) -> np.ndarray:
    """float64 ``(n,)``: queries, keys, values and results, once each."""
    batch, heads, kv_heads, queries, keys, width, value_width, _ = dims.astype(np.float64).T
    return item * batch * (width + value_width) * (heads * queries + kv_heads * keys)


def attention_seconds(name: str, dims: np.ndarray, flops: float, bandwidth: float, multiprocessors: int) -> np.ndarray:
    """float64 ``(n,)``: the larger of the products at the peak rate, in waves of thread blocks, and the bytes."""
    batch, heads, _, queries, keys, width, value_width, causal = dims.astype(np.float64).T
    blocks = batch * heads * np.ceil(queries / QUERY_ROWS)
    rounded = np.minimum(keys, np.where(causal > 0, keys - np.minimum(queries, keys) / 2 + QUERY_ROWS / 2, keys))
    work = 2 * QUERY_ROWS * rounded * (width + value_width)  # of one thread block, on average
    waves = np.maximum(blocks / multiprocessors, 1)
    seconds = waves * work * multiprocessors / flops
    passes = attention_bytes(dims, 2) / bandwidth
    if name.endswith("backward"):
        return np.maximum(BACKWARD_PRODUCTS * seconds, 2 * passes)
    return np.maximum(seconds, passes)


def attention_features(dims: np.ndarray, flops: float, bandwidth: float, multiprocessors: int) -> np.ndarray:
    """float32 ``(n, features)`` of fused attention."""
    batch, heads, kv_heads, queries, keys, width, value_width, causal = dims.astype(np.float64).T
    blocks = batch * heads * np.ceil(queries / QUERY_ROWS)
    ideal = attention_flops(dims) / flops
    passes = attention_bytes(dims, 2) / bandwidth
    columns = [batch * heads, queries, keys, width, value_width, causal, heads / kv_heads, ideal * 1e9, passes * 1e9,
               ideal / passes, blocks / multiprocessors, blocks / (np.ceil(blocks / multiprocessors) * multiprocessors),
               queries / (QUERY_ROWS * np.ceil(queries / QUERY_ROWS))]  # fmt: skip
    return np.stack(columns, axis=1).astype(np.float32)
