"""Worker processes: each task in a process tree of its own, with one thread, a time limit and a memory limit."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from threading import Lock, Thread, current_thread, main_thread
from typing import Any

from simdev.bench.guard import guarded
from simdev.errors import InvalidInput

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
GRACE_S = 10.0  # for a guard to end what it guards
STARTS = 5  # attempts to start a worker
METHODS = ("forkserver", "spawn")
SAME_KIND = 12  # tasks of one kind that a worker takes


@dataclass(frozen=True)
class Limits:
    """What one run may take. ``seconds`` of wall clock and ``memory_bytes`` of data in its process."""

    seconds: float
    memory_bytes: int


class WorkerDied(Exception):
    """A worker process ended without an answer. ``exitcode`` is negative for a signal."""

    def __init__(self, exitcode: int | None):
        super().__init__(death(exitcode))
        self.exitcode = exitcode


@dataclass(eq=False)
class _Worker:
    """A process, the connection to it, how many tasks it may still take and of which kind, and the task that it has
    now."""

    process: multiprocessing.process.BaseProcess
    connection: Connection
    left: int
    kind: str
    future: Future | None = None
    deadline: float = float("inf")

    @property
    def leaving(self) -> bool:
        return self.connection.closed


def start_method() -> str:
    """How worker processes start: by default they are forked from a server that is warm. The environment variable
    ``SIMDEV_START_METHOD=spawn`` starts each with a fresh interpreter, which takes a second or two more, for systems
    whose libraries do not survive a fork. Raises :class:`InvalidInput` for another value."""
    method = os.environ.get("SIMDEV_START_METHOD") or METHODS[0]
    if method not in METHODS:
        raise InvalidInput(f"expected {' or '.join(METHODS)}, got {method!r}", source="SIMDEV_START_METHOD")
    return method


class Pool:
    """Up to ``jobs`` worker processes (:func:`start_method`).

    Each takes ``tasks`` tasks; with 1, every task has a fresh process, except that tasks of one kind share processes. A
    slot is free again when all processes of its task have ended.
    """

    def __init__(self, jobs: int, *, tasks: int = 1):
        self._context = multiprocessing.get_context(start_method())
        if start_method() == "forkserver":
            self._context.set_forkserver_preload(["simdev.bench.preload"])
        self._jobs, self._tasks = jobs, tasks
        self._queue: list[tuple[tuple, int, tuple]] = []  # rank, number, task
        self._numbers = itertools.count()
        self._workers: list[_Worker] = []
        self._closing, self._lock = False, Lock()
        self._woken, self._wake = multiprocessing.Pipe(duplex=False)
        self._thread = Thread(target=self._serve, name="simdev workers", daemon=True)
        self._thread.start()

    def schedule(
        self, function: Callable, args: tuple = (), *, timeout: float | None = None, rank: tuple = (), kind: str = ""
    ):
        """The future of ``function(*args)`` in a worker. Waiting tasks start in the order of ``rank``, then of age.

        A worker takes up to :data:`SAME_KIND` tasks of a ``kind`` that is not empty, as long as
        they succeed, and no others. They share what the process has loaded and compiled.

        The future raises what the function raises, :class:`TimeoutError` if the task takes more than ``timeout``
        seconds, and :class:`WorkerDied` if the process ends without an answer.
        """
        if self._context.get_start_method() == "forkserver":
            with _interrupts_blocked():  # the server inherits it until simdev.bench.preload ignores Ctrl-C
                forkserver.ensure_running()  # here, as the server ends with the thread that starts it
        future: Future = Future()
        with self._lock:
            self._queue.append((rank, next(self._numbers), (future, function, args, timeout, kind)))
        self._wake_up()
        return future

    def close(self) -> None:
        """Take no more tasks; :meth:`join` returns when all are done."""
        self._closing = True
        self._wake_up()

    def stop(self) -> None:
        """Cancel what waits and kill what runs."""
        with self._lock:
            waiting, self._queue = self._queue, []
            self._closing, self._jobs = True, 0
        for _, _, (future, *_) in waiting:
            future.cancel()
        self._wake_up()

    def join(self) -> None:
        self._thread.join()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send_bytes(b"")

    def _serve(self) -> None:
        while True:
            self._assign()
            if self._closing and not self._queue and not self._workers:
                return
            self._listen()

    def _assign(self) -> None:
        """Give waiting tasks to free workers, and send away workers that are not needed any more. A task of a kind that
        a worker has now comes last: a second worker would load and compile the same again."""
        while True:
            busy = {one.kind for one in self._workers if one.kind and one.future is not None}
            idle = [one for one in self._workers if one.future is None and not one.leaving]
            with self._lock:
                first = min(self._queue, key=lambda waiting: (waiting[-1][-1] in busy, *waiting[:2]), default=None)
                worker = next((one for one in idle if first and one.kind == first[-1][-1]), None)
                if free := first is not None and (worker is not None or len(self._workers) < self._jobs):
                    self._queue.remove(first)
            if not free:
                if first is not None and idle:  # of another kind: they make room
                    self._send_away(idle[0], None)
                break
            self._give(worker, *first[-1])
        for worker in self._workers:
            if not worker.leaving and (self._jobs == 0 or (self._closing and worker.future is None)):
                self._send_away(worker, None)

    def _give(self, worker: _Worker | None, future: Future, function, args, timeout, kind: str) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if worker is None:
                worker = self._start(kind)
            worker.future, worker.deadline = future, time.monotonic() + (float("inf") if timeout is None else timeout)
            worker.connection.send((function, args))
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has died: seen when it is listened to
        except Exception as error:  # no process can be started, or the task cannot be pickled
            if worker is not None:
                worker.future = None
                self._send_away(worker, None)
            future.set_exception(error)

    def _start(self, kind: str) -> _Worker:
        for left in reversed(range(STARTS)):
            own, other = multiprocessing.Pipe()
            process = self._context.Process(target=_serve_tasks, args=(other,))
            try:
                process.start()
            except (EOFError, ConnectionError):  # the fork server was killed: the next start makes another one
                if not left:
                    raise
                time.sleep(0.2)
                continue
            other.close()
            self._workers.append(_Worker(process, own, SAME_KIND if kind else self._tasks, kind))
            return self._workers[-1]
        raise AssertionError("unreachable")

    def _listen(self) -> None:
        """Wait until a worker has an answer or has ended, a task has taken too long, or there is something to do."""
        sources: dict[Any, _Worker | None] = {self._woken: None}
        for worker in self._workers:
            sources[worker.process.sentinel if worker.leaving else worker.connection] = worker
        now = time.monotonic()
        patience = max(0.0, min((one.deadline for one in self._workers), default=float("inf")) - now)
        for source in wait(list(sources), None if patience == float("inf") else patience):
            worker = sources[source]
            if worker is None:
                self._woken.recv_bytes()
            elif worker.leaving:
                worker.process.join()
                self._workers.remove(worker)
            else:
                self._receive(worker)
        now = time.monotonic()
        for worker in [one for one in self._workers if one.deadline <= now]:
            if worker.leaving:  # the guard was stopped, say
                worker.process.kill()
                worker.deadline = now + GRACE_S
            else:
                self._send_away(worker, TimeoutError())

    def _receive(self, worker: _Worker) -> None:
        future, worker.future, worker.deadline = worker.future, None, float("inf")
        try:
            good, answer = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join()
            answer, good = WorkerDied(worker.process.exitcode), False
            worker.left = 0
        except Exception as error:  # an answer that cannot be unpickled
            answer, good = error, False
        worker.left -= 1
        if worker.left <= 0 or (worker.kind and not good):
            self._send_away(worker, None)
        if future is not None:
            (future.set_result if good else future.set_exception)(answer)

    def _send_away(self, worker: _Worker, error: BaseException | None) -> None:
        """Close the connection: the worker's guard then ends all its processes."""
        worker.connection.close()
        worker.deadline = time.monotonic() + GRACE_S
        if worker.future is not None:
            worker.future.set_exception(error or WorkerDied(None))
            worker.future = None


def _serve_tasks(connection: Connection) -> None:
    """The life of a worker: the guard of a process that does one task after another until there is none."""
    guarded(lambda: _do_tasks(connection), connection.fileno())


def _do_tasks(connection: Connection) -> None:
    own = os.getpid()
    while True:
        try:
            function, args = connection.recv()
        except (EOFError, ConnectionError):  # a bench that leaves before it has read an answer resets the connection
            return
        except Exception as error:  # a module that cannot be imported here
            answer = False, error
        else:
            answer = _answer(function, args)
        if os.getpid() != own:  # a process that the task has forked and that came back from it, too
            os._exit(0)
        try:
            connection.send(answer)
        except MemoryError:
            raise
        except OSError:  # the bench is gone, or the task has closed the connection
            os._exit(1)
        except Exception as error:
            connection.send((False, RuntimeError(f"the answer cannot be sent ({type(error).__name__})")))


def _answer(function: Callable, args: tuple) -> tuple[bool, Any]:
    try:
        return True, function(*args)
    except BaseException as error:
        return False, error


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_pool(jobs: int, *, tasks: int = 1) -> Pool:
    """See :class:`Pool`."""
    return Pool(jobs, tasks=tasks)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Ctrl-C waits until the block has ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Ctrl-C, and SIGTERM where it has a handler, wait until the block calls the function that it is given, or ends.

    An exception at any other moment can leave the lock of a future closed for ever: threads of the pool would wait for
    it. A second signal is not held. Outside of the main thread, where no signal arrives, nothing is done.
    """
    held: list[tuple] = []
    handlers: dict[int, Any] = {}

    def hold(number, frame):
        held.append((number, frame))
        if len(held) > 1:
            deliver()

    def deliver():
        if held:
            number, frame = held[0]
            held.clear()
            handlers[number](number, frame)

    if current_thread() is main_thread():
        found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        handlers = {number: handler for number, handler in found.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, hold)
        yield deliver
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        deliver()


@contextlib.contextmanager
def running(pool: Pool) -> Iterator[None]:
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
    """Cap this process's memory."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = limits.memory_bytes if hard == resource.RLIM_INFINITY else min(limits.memory_bytes, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


PROBE = """import resource
resource.setrlimit(resource.RLIMIT_DATA, (256 << 20, resource.getrlimit(resource.RLIMIT_DATA)[1]))
try:
    bytearray(512 << 20)
except MemoryError:
    print("kept")
"""


def kept_limits() -> dict[str, str]:
    """What this system keeps of the limits of a run, in words that begin with ``kept`` or ``not kept``.

    A small process tries whether the kernel enforces a limit on memory; macOS accepts the limit and ignores it.
    """
    probe = subprocess.run([sys.executable, "-S", "-c", PROBE], capture_output=True, text=True, check=False)
    memory = "kept" if probe.stdout.strip() == "kept" else "not kept: a run may take more than --memory-limit"
    left = "kept: ended with the run, also in sessions of their own"
    if sys.platform != "linux":
        left = "kept for those in the run's process group; not kept for those that leave it"
    return {"time limit": "kept", "memory limit": memory, "processes that a run leaves": left}


def death(code: int | None) -> str:
    """Why a worker process ended without an answer."""
    if code == -9:
        return "the process was killed (signal 9): probably no memory was left"
    if code is not None and code < 0:
        return f"the process died of signal {-code}"
    return f"the process ended with exit code {code} and without an answer"


def result(future: Future, what: str):
    """The result of a future; :class:`InvalidInput` that names ``what`` where the worker died."""
    try:
        return future.result()
    except WorkerDied as error:
        raise InvalidInput(str(error), source=what) from None
