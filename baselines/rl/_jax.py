"""JAX for the learned placers: on the CPU, in one thread, with a cache of compiled programs that outlives a run.

Import this module before JAX, since importing it sets JAX up. Import it only inside functions and only in the process
that learns: JAX starts threads, and a process with threads must not be forked.
"""

from __future__ import annotations

import os
import sys

from simdev import _cache
from simdev.files import private

# XLA divides the sums of a program among as many tasks as there are cores, however few threads it has, so that
# floating-point results depend on the number of cores. XLA reads that number from this variable; shipped rows use 2.
CORES = {"NPROC": "2"}
FLAGS = ("--xla_cpu_multi_thread_eigen=false", "--xla_cpu_max_isa=AVX2")


def _set_up() -> None:
    """Fix everything that decides the order and the rounding of sums.

    That is the number of threads, the number of tasks that a program is divided into, and the instruction set.
    """
    if "jax" in sys.modules:  # the user's process has its own settings
        return
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = " ".join([given, *(flag for flag in FLAGS if flag.split("=")[0] not in given)]).strip()
    os.environ.update(CORES)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import jax

    jax.config.update("jax_platforms", "cpu")
    folder = _cache.user_folder() / f"jax-{CORES['NPROC']}"  # a compiled program knows its number of tasks
    private(folder)  # a compiled program of another user would be executed
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # without a home, each process compiles its programs again
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


_set_up()

import equinox as eqx  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

__all__ = ["eqx", "jax", "jnp", "optax", "initializer"]


def initializer(new, optimizer):
    """Compile a function that maps a seed to the start of a training.

    It returns a new policy, ``new(key)``, the optimizer's state for it, and the key for further draws.
    """

    @jax.jit
    def start(seed):
        policy_key, key = jax.random.split(jax.random.PRNGKey(seed))
        policy = new(policy_key)
        return policy, optimizer.init(policy), key

    return start
