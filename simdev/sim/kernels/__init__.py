"""The compiled loops of the fast engine, over flat arrays.

:mod:`simdev.sim.kernels.general` follows every rule of MODEL.md, event by event. The other loops each serve one set of
rules that is used often, need no queue of events, and are 1.7 to 2.6 times faster. The modules import Numba, so
:mod:`simdev.sim.fast` imports them only when a simulation runs.
"""

import contextlib

from simdev.errors import need_memory

need_memory(400)  # of address space: Numba, LLVM and SciPy take 320 MiB
with contextlib.suppress(ImportError):  # Numba would load it with the first kernel, when less memory may be left
    import scipy.linalg.cython_blas  # noqa: F401
