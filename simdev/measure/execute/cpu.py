"""Turns a process into a steady device: one thread, one core, and memory that is never returned to the system."""

from __future__ import annotations

import ctypes
import gc
import os

import torch

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt


def settle(core: int) -> None:
    """Pin this process to ``core``, with one thread and without denormal numbers.

    By default glibc maps memory for each large tensor, and Linux clears its pages each time. Here memory is kept
    instead, as the allocators of accelerators do. The garbage collector is switched off during the steps.
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
