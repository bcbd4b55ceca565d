"""Layers that the graph networks share."""

from __future__ import annotations

import numpy as np

from simdev.baselines.rl._jax import eqx, jax, jnp


class Dense(eqx.Module):
    """``x @ weight + bias`` over the last axis; weights start as normal noise of variance ``scale**2 / inputs``."""

    weight: jax.Array
    bias: jax.Array

    def __init__(self, inputs: int, outputs: int, *, key, scale: float = 1.0):
        self.weight = jax.random.normal(key, (inputs, outputs)) * (scale / np.sqrt(inputs))
        self.bias = jnp.zeros(outputs)

    def __call__(self, x):
        return x @ self.weight + self.bias


def normalised(x):
    """``x`` scaled and shifted to mean 0 and variance 1 over the last axis."""
    x = x - x.mean(axis=-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)
