"""What a learned placer computes does not depend on how many cores the machine has."""

import os
import subprocess
import sys

import pytest

SUMS = """
import hashlib, os, sys
if sys.argv[1] == "pinned":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy as np
from simdev.baselines.rl._jax import jax, jnp

draw = np.random.default_rng(0)
x, w = (draw.standard_normal(shape).astype(np.float32) for shape in ((400, 300), (300, 200)))

def loss(w):
    hidden = jnp.tanh(x @ w)
    return (jax.nn.softmax(hidden @ hidden.T).sum(axis=0) ** 2).sum() + hidden.sum() * jnp.exp(hidden).mean()

value, gradient = jax.jit(jax.value_and_grad(loss))(w)
print(hashlib.sha256(np.asarray(value).tobytes() + np.asarray(gradient).tobytes()).hexdigest())
"""


def sums(tmp_path, cores, pinned):
    environment = {**os.environ, "NPROC": str(cores), "XDG_CACHE_HOME": str(tmp_path / f"cache{cores}{pinned}")}
    command = [sys.executable, "-c", SUMS, "pinned" if pinned else ""]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300).stdout


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_sums_are_the_same_on_one_core_and_on_many(tmp_path):
    assert len({sums(tmp_path, 1, pinned=True), sums(tmp_path, 2, pinned=False), sums(tmp_path, 16, pinned=False)}) == 1
