"""A process tree that ends with the process that started it, however either of them ends.

A guard forks the process that does the work and computes nothing itself. It ends all descendants as soon as the work
ends, or as soon as the other end of its lifeline (a pipe or a socket) is closed: the kernel closes that end when the
bench ends, even by ``kill -9``. On Linux this includes descendants that have left the process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
LOOK_S = 0.05  # between two looks at the work where the system cannot report its end (no pidfd)


def guarded(work: Callable[[], None], lifeline: int) -> NoReturn:
    """Do ``work`` in a forked process and leave this process the way that process ended: same exit code or signal.

    ``lifeline`` is a file descriptor: when its other end is closed, the work is killed. No descendant of this process
    outlives the call.
    """
    with contextlib.suppress(OSError):  # a session leader already: started by a tool that does the same
        os.setsid()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of the guard, so that it can find them
    guard, child = os.getpid(), os.fork()
    if child == 0:
        _begin(work, guard)
    status = _wait(child, lifeline)
    _end_descendants(child)
    _leave(status)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. Linux only; elsewhere nothing happens."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _begin(work: Callable[[], None], guard: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        die_with_parent()
        if os.getppid() != guard:  # the guard was killed before the kernel knew what to do then
            os._exit(1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN if number == signal.SIGPIPE else signal.SIG_DFL)
        work()
        code = 0
    except BaseException as error:
        with contextlib.suppress(BaseException):
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(code)


def _wait(child: int, lifeline: int) -> int:
    """The wait status of ``child``, which is killed when the lifeline is closed."""
    poll = select.poll()
    poll.register(lifeline, 0)  # hang-up and errors alone: what is written to it is for the child
    ended = os.pidfd_open(child) if hasattr(os, "pidfd_open") else None
    if ended is not None:
        poll.register(ended, select.POLLIN)
    while True:
        found = dict(poll.poll(None if ended is not None else 1000 * LOOK_S))
        if lifeline in found:
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status


def _end_descendants(child: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:  # a killed child leaves its own children to the guard: until there are none
            for pid in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.001)


def _children() -> list[int]:
    """Children of this process, as far as the system tells (Linux)."""
    with contextlib.suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []


def _leave(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with contextlib.suppress(Exception):
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core was dumped once
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        time.sleep(1)
    os._exit(code if code >= 0 else 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
