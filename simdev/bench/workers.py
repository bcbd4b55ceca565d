"""Worker processes: each run in a process of its own, with one thread, a time limit and a memory limit."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from simdev.errors import InvalidInput

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


@dataclass(frozen=True)
class Limits:
    """What one run may take. ``seconds`` of wall clock and ``memory_bytes`` of data in its process."""

    seconds: float
    memory_bytes: int


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_pool(jobs: int, *, tasks: int = 1):
    """Worker processes, by default a fresh one for each task, forked from a server that is warm."""
    from pebble import ProcessPool

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["simdev.bench.warm"])
    return ProcessPool(max_workers=jobs, max_tasks=tasks, context=context)


@contextlib.contextmanager
def running(pool) -> Iterator[None]:
    """Let the pool finish; on any exception, Ctrl-C too, kill its workers."""
    try:
        yield
        pool.close()
    except BaseException:
        pool.stop()
        raise
    finally:
        pool.join()


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Let worker processes started inside use one thread each, and find the same modules as this process: the fork
    server would look in the current folder first."""
    path = os.pathsep.join(part for part in sys.path if part)
    settings = {**dict.fromkeys(THREAD_VARIABLES, "1"), "PYTHONSAFEPATH": "1", "PYTHONPATH": path}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def limit_process(limits: Limits) -> None:
    """Cap this process's memory, and its processor time so that it cannot outlive a bench that was killed."""
    import resource

    for what, most in (
        (resource.RLIMIT_DATA, limits.memory_bytes),
        (resource.RLIMIT_CPU, int(2 * limits.seconds) + 60),
    ):
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(what, (most, hard))


def death(code: int | None) -> str:
    """Why a worker process ended without an answer."""
    if code == -9:
        return "the process was killed (signal 9): probably no memory was left"
    return f"the process died of signal {-code}" if code and code < 0 else f"the process ended with exit code {code}"


def result(future, what: str):
    from pebble import ProcessExpired

    try:
        return future.result()
    except ProcessExpired as error:
        raise InvalidInput(death(error.exitcode), source=what) from None
