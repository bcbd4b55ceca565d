"""The forward pass of ``gdp``'s network, written once for two libraries of arrays.

Training runs it on JAX (``_gdp.py``), which compiles it and computes its gradients. A trained policy is applied in
NumPy, without JAX. The functions take the library as their first argument, :class:`NumPy` or its counterpart
``_layers.Jax``, and weights as objects with the attributes of ``_gdp.GdpPolicy``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from simdev.baselines.rl._grouped import DEVICE_FEATURES
from simdev.baselines.rl._sight import NODE_FEATURES, SUMMARY_FEATURES, Sight

SEGMENT = 128  # groups; the placer attends to its own segment and to the segment before
HEADS = 4
AT_ONCE = 16  # segments; in larger graphs, a layer computes so many segments at a time
ABSENT = -1e9  # the logit of a device that is not allowed


class NumPy:
    """What the network needs of a library of arrays, in NumPy. Numbers stay float32."""

    np = np

    @staticmethod
    def sigmoid(x):
        return 1 / (1 + np.exp(-np.clip(x, -80, 80)))

    @staticmethod
    def relu(x):
        return np.maximum(x, 0)

    @staticmethod
    def softmax(x):
        """Over the last axis."""
        weight = np.exp(x - x.max(axis=-1, keepdims=True))
        return weight / weight.sum(axis=-1, keepdims=True)

    @staticmethod
    def rsqrt(x):
        return 1 / np.sqrt(x)

    @staticmethod
    def constant(x):
        """``x`` without gradient."""
        return x

    @staticmethod
    def fold(step, first, count: int):
        """``first`` after ``step(state, 0)``, ``step(state, 1)`` ... ``step(state, count - 1)``."""
        for number in range(count):
            first = step(first, number)
        return first

    @staticmethod
    def each(function, *arrays):
        """``function`` of the first rows of ``arrays``, of the second rows ..., stacked."""
        return np.stack([function(*rows) for rows in zip(*arrays, strict=True)])

    @staticmethod
    def in_parts(layer, arrays, rows: int):
        """``layer(*arrays)``, row by row the same; ``rows`` rows at a time if the arrays have more."""
        parts = (slice(start, start + rows) for start in range(0, len(arrays[0]), rows))
        return np.concatenate([layer(*(array[part] for array in arrays)) for part in parts])


def dense(weights, x):
    """``x @ weight + bias`` over the last axis."""
    return x @ weights.weight + weights.bias


def normalised(on, x):
    """``x`` scaled and shifted to mean 0 and variance 1 over the last axis."""
    x = x - x.mean(axis=-1, keepdims=True)
    return x * on.rsqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)


def logits(on, policy, sight: Sight, *, attention: bool = True, superposition: bool = True):
    """Logits of every device for every group at once, float32 ``(G, D)``. :func:`block` explains the two switches."""
    summary = on.np.broadcast_to(sight.summary, (len(sight.real), SUMMARY_FEATURES))
    h = on.relu(dense(policy.enter, on.np.concatenate([sight.nodes, summary], axis=1)))
    for layer in policy.sages:
        h = sage(on, layer, h, sight)
    pooled = on.np.sum(h * sight.real[:, None], axis=0) / on.np.sum(sight.real).astype(h.dtype)
    for layer in policy.blocks:
        graph = on.np.concatenate([pooled, sight.summary])
        h = block(on, layer, h, sight.real, graph, attention=attention, superposition=superposition)
    h = normalised(on, h)
    score = dense(policy.name, h) + dense(policy.query, h) @ dense(policy.device, sight.devices).T
    return on.np.where(sight.allowed, score + 4.0 * dense(policy.share, h) * sight.shares, ABSENT)


def sage(on, layer, h, sight: Sight):
    """A layer of GraphSAGE (GDP, equations 2 and 3).

    The element-wise maximum over the neighbours of sigmoid(W h + b) is joined to the node's own embedding.
    """
    number = on.np.concatenate([sight.parents, sight.children], axis=1)
    real = on.np.concatenate([sight.parent_real, sight.child_real], axis=1)
    cost = on.np.concatenate([sight.parent_cost, sight.child_cost], axis=1)
    side = on.np.concatenate([on.np.zeros_like(sight.parent_cost), on.np.ones_like(sight.child_cost)], axis=1)
    messages = h @ layer.pool.weight[: h.shape[1]] + layer.pool.bias, layer.pool.weight[h.shape[1] :]
    rows = partial(_sage_rows, on, layer, messages)
    return on.in_parts(rows, (h, number, real, cost, side), AT_ONCE * SEGMENT)


def _sage_rows(on, layer, messages, h, number, real, cost, side):
    """New embeddings of the nodes ``h``. ``messages`` are the part of W h + b that comes from the embeddings of all
    nodes, and the weights of the two numbers of an edge."""
    own, of_edge = messages

    # The sigmoid of the maximum is the maximum of the sigmoids. The neighbour with the maximum is found slot by
    # slot without gradient, so that no array has a row for each neighbour: op by op, that would take gigabytes.
    def largest(best, slot):
        value = own[number[:, slot]] + on.np.stack([cost[:, slot], side[:, slot]], axis=1) @ of_edge
        better = (value > best[0]) & real[:, slot, None]
        return on.np.where(better, value, best[0]), on.np.where(better, slot, best[1])

    first = on.np.full(h.shape, -on.np.inf, h.dtype), on.np.zeros(h.shape, on.np.int32)
    chosen = on.constant(on.fold(largest, first, number.shape[1])[1])
    pick = partial(on.np.take_along_axis, indices=chosen, axis=1)
    near = on.np.take_along_axis(own, pick(number), axis=0) + pick(cost) * of_edge[0] + pick(side) * of_edge[1]
    near = on.sigmoid(near) * real.any(axis=1, keepdims=True)
    return normalised(on, h + on.relu(dense(layer.join, on.np.concatenate([h, near], axis=1))))


def block(on, layer, h, real, graph, *, attention: bool = True, superposition: bool = True):
    """A layer of the placer: attention, then a feed-forward layer.

    A segment attends to itself and, without gradient, to the segment before (Transformer-XL). The inputs of both layers
    are multiplied by a gate that is computed from the graph (superposition). Without ``superposition``, they are not.
    Without ``attention``, only the feed-forward layer is left, and no group hears of another.
    """
    gate = 2.0 * on.sigmoid(dense(layer.gate, graph)) if superposition else 1.0
    if not attention:
        return _forward(on, layer, gate, h)
    count, hidden = h.shape
    segment = min(SEGMENT, count)
    x = (normalised(on, h) * gate).reshape(-1, segment, hidden)
    memory, known = dense(layer.key_value, x), real.reshape(-1, segment)
    arrays = [h.reshape(x.shape), x, memory, known]
    if len(x) > 1:
        before = on.constant(on.np.concatenate([on.np.zeros_like(memory[:1]), memory[:-1]]))
        arrays += [before, on.np.concatenate([on.np.zeros_like(known[:1]), known[:-1]])]
    return on.in_parts(partial(_segments, on, layer, gate), arrays, AT_ONCE).reshape(count, hidden)


def _segments(on, layer, gate, h, x, memory, known, *earlier):
    """The layer's results for segments ``h`` float32 ``(k, segment, hidden)``; ``earlier`` are memory and known groups
    of the segments before them, if there are any."""
    if earlier:
        memory = on.np.concatenate([earlier[0], memory], axis=1)
        known = on.np.concatenate([earlier[1], known], axis=1)
    heard = on.each(partial(_attend, on), dense(layer.query, x), memory, known)
    flat = h.reshape(-1, h.shape[2])
    return _forward(on, layer, gate, flat + dense(layer.out, heard.reshape(flat.shape))).reshape(h.shape)


def _forward(on, layer, gate, h):
    """Embeddings ``h`` float32 ``(G, hidden)`` after the feed-forward layer."""
    return h + dense(layer.down, on.relu(dense(layer.up, normalised(on, h) * gate)))


def _attend(on, query, memory, known):
    """Attention of one segment, float32 ``(segment, hidden)``: its queries, the keys joined to the values of the groups
    that it hears, and which of these exist."""
    hidden = query.shape[-1]
    size = hidden // HEADS
    heads = []
    for head in range(HEADS):  # head by head: faster and smaller on a processor than all at once
        columns = slice(head * size, (head + 1) * size)
        keys, values = memory[:, :hidden][:, columns], memory[:, hidden:][:, columns]
        score = query[:, columns] @ keys.T / math.sqrt(size)
        heads.append(on.softmax(on.np.where(known, score, ABSENT)) @ values)
    return on.np.concatenate(heads, axis=-1)


def shapes(hidden: int, devices: int, sages: int, blocks: int) -> dict[str, tuple[int, ...]]:
    """The shape of each array of a policy, by its path in the policy: the names of a policy file."""
    layers = {
        ".enter": (NODE_FEATURES + SUMMARY_FEATURES, hidden), ".name": (hidden, devices), ".query": (hidden, 16),
        ".device": (DEVICE_FEATURES, 16), ".share": (hidden, 1),
    }  # fmt: skip
    for number in range(sages):
        layers |= {f".sages[{number}].pool": (hidden + 2, hidden), f".sages[{number}].join": (2 * hidden, hidden)}
    one = {
        "gate": (hidden + SUMMARY_FEATURES, hidden), "query": (hidden, hidden), "key_value": (hidden, 2 * hidden),
        "out": (hidden, hidden), "up": (hidden, 2 * hidden), "down": (2 * hidden, hidden),
    }  # fmt: skip
    layers |= {f".blocks[{number}].{name}": shape for number in range(blocks) for name, shape in one.items()}
    weights = {f"{name}.weight": shape for name, shape in layers.items()}
    return weights | {f"{name}.bias": shape[1:] for name, shape in layers.items()}


def policy_of(arrays: Mapping[str, np.ndarray]) -> Any:
    """The arrays of a policy file as nested objects, as :func:`logits` reads them."""
    root: dict[str, Any] = {}
    for name, array in arrays.items():
        *path, last = re.findall(r"\w+", name)
        at = root
        for part in path:
            at = at.setdefault(part, {})
        at[last] = array
    return _nested(root)


def _nested(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    inside = {name: _nested(value) for name, value in tree.items()}
    if all(name.isdigit() for name in inside):
        return [inside[name] for name in sorted(inside, key=int)]
    return SimpleNamespace(**inside)
