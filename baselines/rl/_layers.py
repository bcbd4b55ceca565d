"""Layers that the graph networks share."""

from __future__ import annotations

import numpy as np

from simdev.baselines.rl import _gdp_net
from simdev.baselines.rl._jax import eqx, jax, jnp


class Dense(eqx.Module):
    """``x @ weight + bias`` over the last axis; weights start as normal noise of variance ``scale**2 / inputs``."""

    weight: jax.Array
    bias: jax.Array

    def __init__(self, inputs: int, outputs: int, *, key, scale: float = 1.0):
        self.weight = jax.random.normal(key, (inputs, outputs)) * (scale / np.sqrt(inputs))
        self.bias = jnp.zeros(outputs)

    def __call__(self, x):
        return _gdp_net.dense(self, x)


class Jax:
    """What the network needs of a library of arrays, in JAX: the counterpart of ``_gdp_net.NumPy``."""

    np = jnp
    sigmoid, relu, softmax, rsqrt = jax.nn.sigmoid, jax.nn.relu, jax.nn.softmax, jax.lax.rsqrt
    constant = jax.lax.stop_gradient

    @staticmethod
    def fold(step, first, count: int):
        if not count:
            return first
        return jax.lax.scan(lambda state, number: (step(state, number), None), first, jnp.arange(count))[0]

    @staticmethod
    def each(function, *arrays):
        return jax.vmap(function)(*arrays)

    @staticmethod
    def in_parts(layer, arrays, rows: int):
        """The gradient computes each part again. A loop saves memory where :func:`jax.checkpoint` alone saves none: XLA
        merges what is computed again with what was computed first, but not across loops."""
        if len(arrays[0]) <= rows:
            return layer(*arrays)
        parts = [array.reshape(-1, rows, *array.shape[1:]) for array in arrays]
        found = jax.lax.map(jax.checkpoint(lambda part: layer(*part)), tuple(parts))
        return found.reshape(-1, *found.shape[2:])


def normalised(x):
    """``x`` scaled and shifted to mean 0 and variance 1 over the last axis."""
    return _gdp_net.normalised(Jax, x)
