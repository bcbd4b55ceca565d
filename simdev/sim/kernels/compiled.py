"""How the kernels are compiled."""

from __future__ import annotations

from numba import njit
from numba.core.options import DefaultOptions

# Kernels create no arrays, so Numba need not count references. Counting took a third of the time of a move and a second
# of each compilation. (Numba's manual does not name this option. Without it the results are the same.)
UNCOUNTED = {"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {}
# A function without an entry point for Python compiles in half of the time. Calling it from Python would crash.
INTERNAL = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "nogil": True, **UNCOUNTED}

kernel = njit(cache=True, nogil=True, no_cfunc_wrapper=True, **UNCOUNTED)  # called from Python, kept on disk
part = njit(**INTERNAL)  # called by kernels only
inlined = njit(forceinline=True, **INTERNAL)  # the same, copied to where it is called
merged = njit(inline="always", **INTERNAL)  # the same, before types are inferred: quicker to compile if called once
