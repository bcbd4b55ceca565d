"""What placers and planners must not do, for odd_placers.py and odd_planners.py."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from simdev.errors import Unsupported


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no words")


class Locked(Exception):
    def __reduce__(self):
        raise TypeError("stays here")


def take_memory():
    return [np.ones(1 << 26) for _ in range(100)]


RAISED = {  # name of an entry -> the exception that it raises
    "shy": lambda: Unsupported("not today"),
    "broken": lambda: ZeroDivisionError("one line\nand another"),
    "leaver": lambda: SystemExit("good bye"),
    "interrupter": KeyboardInterrupt,
    "generator": lambda: GeneratorExit("not a generator"),
    "surrogate": lambda: RuntimeError("\udcff\x00\x1b[31m"),
    "speechless": Unspeakable,
    "locked": lambda: Locked("cannot be pickled"),
}
DONE = {  # name of an entry -> what it does
    "glutton": take_memory,
    "quitter": lambda: os._exit(0),
    "suicidal": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crasher": lambda: os.kill(os.getpid(), signal.SIGSEGV),  # as broken native code does
}


def register(decorator, module):
    """Register each entry of both tables with ``decorator``, which is ``placer`` or ``planner``, as one of ``module``:
    this file may have been imported from another folder than that of a copy of the file that calls."""
    for name, error in RAISED.items():

        def raises(_, *, rng, budget, error=error):
            raise error()

        raises.__module__ = module
        decorator(name, version=1, family="test")(raises)

    for name, action in DONE.items():

        def acts(_, *, rng, budget, action=action):
            return action()

        acts.__module__ = module
        decorator(name, version=1, family="test")(acts)


def leave_two_processes(log, seconds):
    """One of them is in a session of its own. Each writes its process id."""
    for apart in (False, True):
        if os.fork() == 0:
            if apart:
                os.setsid()
            with open(log, "a", encoding="utf-8") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(600)
    while not Path(log).is_file() or len(Path(log).read_text().split()) < 2:
        time.sleep(0.01)
    time.sleep(seconds)


def leave_a_thread():
    """It never ends, so that its process would not end either."""
    threading.Thread(target=time.sleep, args=(600,)).start()


def change_the_process():
    """Its folder, its streams, its signals and its recursion limit."""
    os.chdir("/")
    sys.stdout = sys.stderr = None
    sys.setrecursionlimit(50)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
