"""Profiles: what ops cost on a device of this machine, what a transfer between two of them costs, as a device file."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from simdev.costs import FREE_KINDS
from simdev.execute.cpu import settle
from simdev.execute.host import Execution, execute
from simdev.execute.program import Program
from simdev.execute.shared import Shared
from simdev.execute.worker import clock
from simdev.graph import ComputationGraph

LINK_SIZES = tuple(4**k for k in range(3, 13))  # bytes: 64 to 16 MiB


@dataclass(frozen=True)
class OpProfile:
    """What the ops of a program cost on one device, from ``r`` whole steps there.

    ``op_ns`` int64 ``(n,)`` is the median of each op with its share of the time between ops, scaled so that they add up
    to ``step_ns``, the median step (1 for data that is there already). ``gap_ns`` is the median time from the end of an
    op to the start of the next. ``spread`` is the mean over ops of (p90 - p10) / median, weighted by time.
    """

    op_ns: np.ndarray
    gap_ns: float
    step_ns: int
    spread: float


def profile_ops(program: Program, unit: str, *, repeats: int = 10, warmup: int = 3, neighbour: str = "") -> OpProfile:
    """Run the whole step on ``unit``: caches are as in real steps, which they are not in a loop over one op. If a
    ``neighbour`` is named, it runs the same step at the same time."""
    devices = np.zeros(program.graph.n_ops, np.int32)
    with _busy(program, neighbour):
        return op_profile(program, execute(program, devices, (unit,), repeats=repeats, warmup=warmup))


def op_profile(program: Program, execution: Execution) -> OpProfile:
    """The profile that a run of all ops on one device gives."""
    work = np.array([bool(calls) for calls in program.calls])
    start, finish = execution.op_start[:, work], execution.op_finish[:, work]
    order = np.argsort(start, axis=1)
    begin, end = (np.take_along_axis(times, order, axis=1) for times in (start, finish))
    gap = float(np.median(begin[:, 1:] - end[:, :-1]))
    typical = np.median(finish - start, axis=0)
    step = int(np.median(execution.step_ns))
    op_ns = np.ones(program.graph.n_ops, np.int64)
    op_ns[work] = np.maximum(1, np.rint((typical + gap) * step / (typical + gap).sum()))
    low, high = np.percentile(finish - start, [10, 90], axis=0)
    return OpProfile(op_ns, gap, step, float((high - low).sum() / typical.sum()))


def by_signature(graph: ComputationGraph, op_ns: np.ndarray) -> dict[str, float]:
    """``{signature: ns}``, the mean over the ops of a signature: a measured cost table. Data that is there already is
    left out."""
    kinds = np.array([kind in FREE_KINDS for kind in graph.kinds])[graph.op_kind]
    total = np.bincount(graph.op_signature, op_ns, minlength=len(graph.signatures))
    count = np.bincount(graph.op_signature, minlength=len(graph.signatures))
    return {graph.signatures[number]: float(total[number] / count[number])
            for number in np.unique(graph.op_signature[~kinds])}  # fmt: skip


@contextmanager
def _busy(program: Program, unit: str):
    """While inside, ``unit`` runs the step again and again."""
    if not unit:
        yield
        return
    child = os.fork()
    if not child:
        try:
            os.setsid()
            execute(program, np.zeros(program.graph.n_ops, np.int32), (unit,), repeats=2000, warmup=0)
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)


@dataclass(frozen=True)
class LinkProfile:
    """A channel between two workers: ``alpha_ns`` and ``bytes_per_s`` fitted to the medians ``ns`` of ``sizes`` bytes
    by least relative error."""

    sizes: tuple[int, ...]
    ns: tuple[float, ...]
    alpha_ns: float
    bytes_per_s: float


def profile_cpu_link(first: int, second: int, *, repeats: int = 60) -> LinkProfile:
    """Time from the start of a send on core ``first`` until core ``second`` sees it, averaged over both ways, by the
    way that the executor sends: a copy into shared memory and a word that says so."""
    shared = Shared()
    shared.reserve("flag", 16)
    shared.reserve("there", max(LINK_SIZES), np.uint8)
    shared.reserve("back", max(LINK_SIZES), np.uint8)
    shared.reserve("times", (len(LINK_SIZES), repeats))
    shared.open()
    children = []
    for number, core in enumerate((first, second)):
        child = os.fork()
        if not child:
            try:
                settle(core)
                _ping_pong(shared, number, repeats)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    times = np.median(shared.array("times"), axis=1) / 2
    alpha, rate = fit_line(LINK_SIZES, times)
    return LinkProfile(LINK_SIZES, tuple(times.tolist()), alpha, rate)


def _ping_pong(shared: Shared, number: int, repeats: int) -> None:
    import ctypes

    flag, times = shared.words("flag"), shared.words("times")
    slot = shared.array("back" if number else "there").ctypes.data
    end = time.monotonic() + 60
    turn = 0
    for row, size in enumerate(LINK_SIZES):
        source = torch.ones(size, dtype=torch.uint8)
        for repeat in range(repeats):
            turn += 1
            begin = clock()
            if number == 0:
                ctypes.memmove(slot, source.data_ptr(), size)
                flag[0] = turn
            while flag[8 if number == 0 else 0] < turn:
                os.sched_yield()
                if time.monotonic() > end:
                    return
            if number == 1:
                source.add_(1)  # what is sent was just computed
                ctypes.memmove(slot, source.data_ptr(), size)
                flag[8] = turn
            else:
                times[row * repeats + repeat] = clock() - begin
                source.add_(1)


def fit_line(sizes, ns) -> tuple[float, float]:
    """``alpha`` ns and ``bytes_per_s`` of ``ns = alpha + bytes * 1e9 / bytes_per_s``, by least relative error."""
    sizes, ns = np.asarray(sizes, float), np.asarray(ns, float)
    rows = np.stack([1 / ns, sizes / ns], axis=1)
    (alpha, slope), *_ = np.linalg.lstsq(rows, np.ones(len(ns)), rcond=None)
    return max(float(alpha), 1.0), 1e9 / max(float(slope), 1e-9)


def core_rates(units: tuple[str, ...]) -> tuple[float, float]:
    """FLOP/s of a large f32 matrix product and bytes/s of a large copy (read and written) on the first of ``units``."""
    shared = Shared()
    shared.reserve("times", 2)
    shared.open()
    child = os.fork()
    if not child:
        try:
            settle(int(units[0].partition(":")[2]))
            a, big = torch.ones(1024, 1024), torch.ones(32 << 20)
            target = torch.empty_like(big)
            for row, work in enumerate((lambda: a @ a, lambda: target.copy_(big))):
                shared.words("times")[row] = min(_timed(work) for _ in range(8))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    product, copy = shared.array("times")
    return 2 * 1024**3 / product * 1e9, 2 * 4 * (32 << 20) / copy * 1e9


def _timed(work) -> int:
    begin = clock()
    work()
    return clock() - begin


def device_file(name: str, units: list[str], kind: str, memory_bytes: int, rates, gap_ns: float, link) -> str:
    """A topology in TOML for the CPU workers ``units``, from what was measured."""
    flops, bandwidth = rates
    lines = [
        f'name = "{name}"',
        f'description = "{len(units)} workers on single cores of one machine, measured by simdev profile"',
        f"[kind.{kind}]",
        f"memory_gib = {memory_bytes / 2**30:.3f}",
        f"memory_gb_per_s = {bandwidth / 1e9:.3f}",
        f"peak_tflops = {{ f32 = {flops / 1e12:.5f} }}",
        f"launch_us = {gap_ns / 1e3:.3f}",
        f"dispatch_us = {gap_ns / 1e3:.3f}",
        "granularity = 64",
        "[[device]]",
        f"names = {[unit.replace(':', '') for unit in units]}".replace("'", '"'),
        f'kind = "{kind}"',
    ]
    if link is not None:
        pairs = [[a.replace(":", ""), b.replace(":", "")] for at, a in enumerate(units) for b in units[at + 1 :]]
        lines += ["[[link]]", f"ends = {pairs}".replace("'", '"'), f"gb_per_s = {link.bytes_per_s / 1e9:.3f}",
                  f"latency_us = {link.alpha_ns / 1e3:.3f}"]  # fmt: skip
    return "\n".join(lines) + "\n"


def cpu_links(units: tuple[str, ...]) -> LinkProfile | None:
    """The channel between the first two of the CPU workers ``units`` (one for all pairs), None for a single one."""
    cores = [int(unit.partition(":")[2]) for unit in units]
    return profile_cpu_link(*cores[:2]) if len(cores) > 1 else None
