"""Measures the devices of this computer: transfers between two devices, peak rates, memory granularity."""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from simdev.errors import SimdevError
from simdev.measure.execute.cpu import settle
from simdev.measure.execute.shared import Shared
from simdev.measure.execute.worker import clock

SIZES = tuple(4**k for k in range(3, 13))  # bytes: 64 to 16 MiB
AREA = 96 << 20  # bytes; transfers cycle through them so that, as in a step, the target is not in a cache
PAGE = 4096  # bytes


@dataclass(frozen=True)
class LinkProfile:
    """A measured channel between two devices.

    ``ns`` are the median times of transfers of ``sizes`` bytes; ``alpha_ns`` and ``bytes_per_s`` are fitted to them by
    least relative error.
    """

    sizes: tuple[int, ...]
    ns: tuple[float, ...]
    alpha_ns: float
    bytes_per_s: float


def profile_link(first: str, second: str, *, repeats: int = 60) -> LinkProfile:
    """Measure the time from the start of a send until the other device has the data, averaged over both directions.

    CPU workers copy into shared memory and set a flag, as in an execution. Between CPU and GPU, pinned memory is
    copied. Between two GPUs, both copies through the host count.
    """
    gpus = [int(worker.partition(":")[2]) for worker in (first, second) if worker.startswith("cuda")]
    if not gpus:
        cores = [int(worker.partition(":")[2]) for worker in (first, second)]
        times = _measure([partial(_ping_pong, number=n, core=cores[n], repeats=repeats) for n in (0, 1)], repeats)
    else:
        each = [_measure([partial(_copy_both_ways, gpu=gpu, repeats=repeats)], repeats) for gpu in gpus]
        times = np.sum(each, axis=0)
    alpha, rate = fit_line(SIZES, times)
    return LinkProfile(SIZES, tuple(times.tolist()), alpha, rate)


def _measure(bodies: list[Callable[[Shared], None]], repeats: int) -> np.ndarray:
    """Run each body in a process of its own; half the median round-trip time in ns for each size."""
    shared = Shared()
    shared.reserve("flag", 16)
    shared.reserve("there", AREA, np.uint8)
    shared.reserve("back", AREA, np.uint8)
    shared.reserve("times", (len(SIZES), repeats))
    shared.open()
    in_processes([partial(body, shared) for body in bodies])
    return np.median(shared.array("times"), axis=1) / 2


def in_processes(bodies: list[Callable[[], None]]) -> None:
    """Run functions at the same time, each in a fork of this process. Raises :class:`SimdevError` if one fails."""
    children = []
    for body in bodies:
        child = os.fork()
        if not child:
            code = 1
            try:
                body()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    if any([os.waitpid(child, 0)[1] for child in children]):
        raise SimdevError("a measurement ended with an error")


def _ping_pong(shared: Shared, number: int, core: int, repeats: int) -> None:
    settle(core)
    flag, times = shared.words("flag"), shared.words("times")
    area = shared.array("back" if number else "there")
    area[:] = 0
    start = area.ctypes.data
    end = time.monotonic() + 300
    turn, at = 0, 0
    for row, size in enumerate(SIZES):
        source = torch.ones(size, dtype=torch.uint8)
        step = max(size, 64 << 10)  # small transfers are far apart, too
        for repeat in range(repeats):
            turn += 1
            at = at + step if at + 2 * step <= AREA else 0
            slot = start + at
            begin = clock()
            if number == 0:
                ctypes.memmove(slot, source.data_ptr(), size)
                flag[0] = turn
            while flag[8 if number == 0 else 0] < turn:
                os.sched_yield()
                if time.monotonic() > end:
                    raise SimdevError("no answer from the other core")
            if number == 1:
                source.add_(1)  # the data to send has just been computed
                ctypes.memmove(slot, source.data_ptr(), size)
                flag[8] = turn
            else:
                times[row * repeats + repeat] = clock() - begin
                source.add_(1)


def _copy_both_ways(shared: Shared, gpu: int, repeats: int) -> None:
    device, times = torch.device("cuda", gpu), shared.words("times")
    for row, size in enumerate(SIZES):
        host = torch.ones(size, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(size, dtype=torch.uint8, device=device)
        for repeat in range(repeats):
            torch.cuda.synchronize(device)
            begin = clock()
            there.copy_(host, non_blocking=True)
            host.copy_(there, non_blocking=True)
            torch.cuda.synchronize(device)
            times[row * repeats + repeat] = clock() - begin


def fit_line(sizes, ns) -> tuple[float, float]:
    """Fit ``ns = alpha + bytes * 1e9 / bytes_per_s`` by least relative error; returns ``(alpha, bytes_per_s)``."""
    sizes, ns = np.asarray(sizes, float), np.asarray(ns, float)
    rows = np.stack([1 / ns, sizes / ns], axis=1)
    (alpha, slope), *_ = np.linalg.lstsq(rows, np.ones(len(ns)), rcond=None)
    return max(float(alpha), 1.0), 1e9 / max(float(slope), 1e-9)


def rates(worker: str) -> tuple[float, float, int]:
    """Peak rates and memory of a worker: FLOP/s, bytes/s, bytes.

    The FLOP rate is that of a large f32 matrix product; the byte rate counts the reads and writes of a large copy.
    """
    shared = Shared()
    shared.reserve("found", 3)
    shared.open()
    in_processes([lambda: _rate(shared, worker)])
    product, copy, memory = (int(number) for number in shared.array("found"))
    size = 1024 if worker.startswith("cpu") else 8192
    return 2 * size**3 / product * 1e9, 2 * 4 * (32 << 20) / copy * 1e9, memory


def _rate(shared: Shared, worker: str) -> None:
    kind, _, number = worker.partition(":")
    found = shared.words("found")
    if kind == "cpu":
        settle(int(number))
        device, size = torch.device("cpu"), 1024
        found[2] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        device, size = torch.device("cuda", int(number)), 8192
        found[2] = torch.cuda.get_device_properties(device).total_memory
    a = torch.ones(size, size, dtype=torch.float32, device=device)
    big = torch.ones(32 << 20, dtype=torch.float32, device=device)
    target = torch.empty_like(big)
    for row, work in enumerate((lambda: a @ a, lambda: target.copy_(big))):
        found[row] = min(_timed(work, device) for _ in range(8))


def granularity(worker: str) -> int:
    """The number of bytes to a multiple of which allocations on ``worker`` are rounded up.

    On a GPU it is what a tensor of one byte adds to ``torch.cuda.memory_allocated()``. On the CPU it is the greatest
    common divisor of the addresses of 4096 tensors of 1 to 4096 bytes that exist at the same time, at most 4096 (a
    page). So many addresses have no larger common divisor by chance.
    """
    shared = Shared()
    shared.reserve("found", 1)
    shared.open()
    in_processes([lambda: _granularity(shared, worker)])
    return int(shared.array("found")[0])


def _granularity(shared: Shared, worker: str) -> None:
    kind, _, number = worker.partition(":")
    if kind == "cpu":
        settle(int(number))
        alive = [torch.empty(size, dtype=torch.uint8) for size in range(1, PAGE + 1)]
        found = math.gcd(PAGE, *(tensor.data_ptr() for tensor in alive))
    else:
        device = torch.device("cuda", int(number))
        before = torch.cuda.memory_allocated(device)
        alive = [torch.empty(1, dtype=torch.uint8, device=device)]
        found = torch.cuda.memory_allocated(device) - before
    shared.words("found")[0] = found


def _timed(work: Callable[[], object], device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - begin


def device_file(name: str, kinds: dict[str, dict], links: dict[tuple[str, str], LinkProfile]) -> str:
    """The text of a topology file (TOML).

    ``kinds`` holds for each kind its ``units`` (workers), and the ``flop_per_s``, ``bytes_per_s``, ``memory_bytes``,
    ``granularity`` (bytes) and ``gap_ns`` (time between ops) of one of them.
    """
    lines = [f'name = "{name}"', 'description = "devices of one machine, measured by simdev profile"']
    for kind, facts in kinds.items():
        lines += [
            f"[kind.{kind}]",
            f"memory_gib = {facts['memory_bytes'] / 2**30:.3f}",
            f"memory_gb_per_s = {facts['bytes_per_s'] / 1e9:.3f}",
            f"peak_tflops = {{ f32 = {facts['flop_per_s'] / 1e12:.5f} }}",
            f"launch_us = {facts['gap_ns'] / 1e3:.3f}",
            f"dispatch_us = {facts['gap_ns'] / 1e3:.3f}",
            f"granularity = {facts['granularity']}",
        ]
    for kind, facts in kinds.items():
        for worker in facts["units"]:
            host = "\nhost = true" if worker.startswith("cpu") and len(kinds) > 1 else ""
            lines.append(f'[[device]]\nname = "{worker.replace(":", "")}"\nkind = "{kind}"{host}')
    for (first, second), link in links.items():
        ends = f'["{first.replace(":", "")}", "{second.replace(":", "")}"]'
        lines.append(f"[[link]]\nends = {ends}\ngb_per_s = {link.bytes_per_s / 1e9:.3f}")
        lines.append(f"latency_us = {link.alpha_ns / 1e3:.3f}")
    return "\n".join(lines) + "\n"
