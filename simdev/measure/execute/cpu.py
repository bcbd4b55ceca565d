"""Makes a process a steady device: one thread, one core, and memory that is kept rather than given back."""

from __future__ import annotations

import ctypes
import gc
import os

import torch

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt


def settle(core: int) -> None:
    """Pin this process to ``core``, with one thread and without denormal numbers.

    glibc would map large tensors anew each time, and the kernel clear their pages each time: memory once taken is kept
    instead, as accelerators' allocators do. The garbage collector stays out of the steps.
    """
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
    gc.disable()
    gc.freeze()
