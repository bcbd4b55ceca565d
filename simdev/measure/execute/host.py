"""Runs a program under a placement: reserves shared memory, forks a worker per device, collects their measurements."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass

import numpy as np
import torch

from simdev.errors import InvalidInput, SimdevError, Unsupported
from simdev.measure.execute.program import Program
from simdev.measure.execute.shared import Shared
from simdev.measure.execute.worker import DONE, FAILED, FIRST, GO, STOP, Stopped, Worker, WorkerTask

MESSAGE_BYTES = 2000


@dataclass(frozen=True, eq=False)
class Execution:
    """Measured steps of a placement: ``r`` repeats after the warm-up, ``n`` ops, ``m`` tensors, ``D`` devices.

    * ``step_ns`` int64 ``(r,)``: from the common start to the last completion (R6).
    * ``op_start``, ``op_finish`` int64 ``(r, n)``: ns from the start of the step.
    * ``sent_start``, ``sent_finish`` int64 ``(r, m, D)``: ns from the start of the step, 0 if a tensor is not sent.
    * ``peak_bytes`` int64 ``(D,)``: the most memory in use during a step.
    * ``results`` and ``homes``: the bytes that the first step left, by value and by persistent storage.
    """

    step_ns: np.ndarray
    op_start: np.ndarray
    op_finish: np.ndarray
    sent_start: np.ndarray
    sent_finish: np.ndarray
    peak_bytes: np.ndarray
    results: dict[int, np.ndarray]
    homes: dict[int, np.ndarray]


def execute(
    program: Program,
    devices: np.ndarray,
    workers: tuple[str, ...],
    *,
    repeats: int = 10,
    warmup: int = 3,
    order: str = "fifo",
    priority: np.ndarray | None = None,
    time_limit_s: float = 600.0,
) -> Execution:
    """Run ``program`` with op ``v`` on worker ``workers[devices[v]]``.

    A worker is ``cpu:K`` (a process pinned to core K) or ``cuda:K``. The step runs ``warmup`` times, then ``repeats``
    times, then once more to measure memory. ``order`` decides which ready op runs next, and ``priority`` int ``(n,)``
    is used by the order of that name. Parameters start from the values of the program and are trained from step to
    step. Raises :class:`InvalidInput` if a worker does not exist on this computer, and :class:`SimdevError` if a worker
    fails.
    """
    check_workers(workers)
    torch.set_num_threads(1)
    shared = _reserve(program, devices, len(workers), warmup + repeats + 1)
    for key, home in program.homes.items():
        shared.array(f"home.{key}")[:] = home.before
    job = WorkerTask(program, devices, workers, order, priority, warmup + repeats + 1, shared)
    children = _fork(job)
    try:
        first = _steer(job, children, time_limit_s)
    finally:
        _end(job, children)
    return _collect(job, first, warmup, repeats)


def check_workers(workers: tuple[str, ...]) -> None:
    """Raise :class:`InvalidInput` unless each worker is a core or GPU of this computer and none is named twice."""
    if not hasattr(os, "sched_setaffinity"):
        raise Unsupported("running placements requires Linux")
    cores = os.sched_getaffinity(0)
    for worker in workers:
        kind, _, number = worker.partition(":")
        if kind not in ("cpu", "cuda") or not number.isdecimal():
            raise InvalidInput(f"expected cpu:NUMBER or cuda:NUMBER, got {worker!r}", source="devices")
        if kind == "cpu" and int(number) not in cores:
            raise InvalidInput(f"core {number} is not among {sorted(cores)}", source="devices", field=worker)
        if kind == "cuda" and int(number) >= torch.cuda.device_count():
            raise InvalidInput(f"this computer has {torch.cuda.device_count()} GPUs", source="devices", field=worker)
    if len(set(workers)) < len(workers):
        raise InvalidInput("a device is named twice", source="devices")


def _reserve(program: Program, devices: np.ndarray, count: int, steps: int) -> Shared:
    graph, shared = program.graph, Shared()
    shared.reserve("control", FIRST + 8 * count)
    shared.reserve("t0", steps)
    shared.reserve("peak", count)
    shared.reserve("message", (count, MESSAGE_BYTES), np.uint8)
    for name in ("op_start", "op_finish"):
        shared.reserve(name, (steps, graph.n_ops))
    for name in ("sent_start", "sent_finish"):
        shared.reserve(name, (steps, graph.n_tensors, count))
    for key, home in program.homes.items():
        shared.reserve(f"home.{key}", max(1, len(home.before)), np.uint8)
    sent = dict.fromkeys([(a, b) for a in range(count) for b in range(count) if a != b], 0)
    for tensor, value in enumerate(program.tensor_value):
        source = int(devices[graph.tensor_producer[tensor]])
        consumers = graph.consumers[graph.consumer_ptr[tensor] : graph.consumer_ptr[tensor + 1]]
        for target in sorted({int(device) for device in devices[consumers]} - {source}):
            sent[source, target] += 1
            if value >= 0:
                shared.reserve(f"slot.{tensor}.{target}", program.value_bytes[value], np.uint8)
        if graph.tensor_result[tensor]:
            shared.reserve(f"result.{tensor}", program.value_bytes[value], np.uint8)
    for (source, target), number in sent.items():
        shared.reserve(f"log.{source}.{target}", 1 + number)
    shared.open()
    return shared


def _fork(job: WorkerTask) -> list[int]:
    sys.stdout.flush()
    sys.stderr.flush()
    children = []
    for number in range(len(job.workers)):
        child = os.fork()
        if not child:
            _be_worker(job, number)
        children.append(child)
    return children


def _be_worker(job: WorkerTask, number: int) -> None:
    """Run a worker in this forked process and exit; this function does not return."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        worker = make_worker(job, number)
        worker.prepare()
        worker.run()
        code = 0
    except Stopped:
        pass
    except BaseException as error:
        lines = traceback.format_exc() if not isinstance(error, SimdevError) else str(error)
        text = lines.encode()[-MESSAGE_BYTES:]
        job.shared.array("message")[number, : len(text)] = np.frombuffer(text, np.uint8)
        job.shared.words("control")[FIRST + 8 * number + FAILED] = 1
    finally:
        os._exit(code)


def make_worker(job: WorkerTask, number: int) -> Worker:
    """The worker with this number; call it in the worker's own process."""
    kind, _, index = job.workers[number].partition(":")
    if kind == "cuda":
        from simdev.measure.execute.cuda import CudaWorker

        return CudaWorker(job, number, int(index))
    from simdev.measure.execute.cpu import settle

    settle(int(index))
    return Worker(job, number)


def _steer(job: WorkerTask, children: list[int], time_limit_s: float):
    """Let the workers run the first step, copy its results, and let them run the remaining steps."""
    control = job.shared.words("control")
    end = time.monotonic() + time_limit_s
    control[GO] = 1
    _wait(job, children, 1, end)
    shared, graph = job.shared, job.program.graph
    homes = {key: shared.array(f"home.{key}")[: len(home.before)].copy() for key, home in job.program.homes.items()}
    results = {
        job.program.tensor_value[tensor]: shared.array(f"result.{tensor}").copy()
        for tensor in np.flatnonzero(graph.tensor_result)
    }
    control[GO] = job.steps
    _wait(job, children, job.steps, end)
    return results, homes


def _wait(job: WorkerTask, children: list[int], steps: int, end: float) -> None:
    control = job.shared.words("control")
    rows = [FIRST + 8 * number for number in range(len(children))]
    while any(control[row + DONE] < steps for row in rows):
        for number, child in enumerate(children):
            if child and os.waitpid(child, os.WNOHANG)[0]:
                children[number] = 0
        # Read after the look at its process: a worker's last words and its end may come at any time.
        for number, row in enumerate(rows):
            if control[row + FAILED]:
                text = bytes(job.shared.array("message")[number]).rstrip(b"\0").decode(errors="replace")
                raise SimdevError(f"{job.workers[number]}: {text}")
            if not children[number] and control[row + DONE] < job.steps:
                raise SimdevError(f"{job.workers[number]}: the worker ended without a message (out of memory?)")
        if time.monotonic() > end:
            raise SimdevError(f"{job.program.graph.name}: the execution took longer than its time limit")
        time.sleep(1e-3)


def _end(job: WorkerTask, children: list[int]) -> None:
    job.shared.words("control")[STOP] = 1
    for child in children:
        if not child:
            continue
        for _ in range(2000):
            try:
                if os.waitpid(child, os.WNOHANG)[0]:
                    break
            except ChildProcessError:
                break
            time.sleep(1e-3)
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _collect(job: WorkerTask, first, warmup: int, repeats: int) -> Execution:
    shared, kept = job.shared, slice(warmup, warmup + repeats)
    names = ("op_start", "op_finish", "sent_start", "sent_finish")
    times = {name: shared.array(name)[kept].copy() for name in names}
    step = np.maximum(times["op_finish"].max(axis=1), times["sent_finish"].max(axis=(1, 2), initial=0))
    return Execution(step, **times, peak_bytes=shared.array("peak").copy(), results=first[0], homes=first[1])
