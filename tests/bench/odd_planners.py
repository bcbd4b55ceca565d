"""Planners that misbehave, each in its own way: the bench's tests name them by this file. The same as odd_placers.py,
with a training job in the place of a placement problem."""

import os
import signal
import time
from pathlib import Path

import numpy as np

from simdev.errors import Unsupported
from simdev.graphs.parallel_model import parallel_model
from simdev.parallel.mesh import Mesh
from simdev.planners import Choice, planner


def plain(job):
    """Every rank is a replica."""
    return Choice(Mesh({"dp_replicate": job.ranks}))


@planner("first", version=1, family="test", defaults={"log": ""})
def first(job, *, rng, budget, log):
    """Evaluates nothing; writes a line when it is called."""
    if log:
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{rng.integers(1 << 30)}\n")
    return plain(job)


@planner("spendthrift", version=1, family="test", searches=True)
def spendthrift(job, *, rng, budget):
    """Searches until the budget throws it out."""
    for choice in job.choices():
        budget.evaluate(choice)
    while True:
        budget.evaluate(Choice(Mesh({"dp_replicate": job.ranks}), microbatch=len(budget.tried) + 1))


@planner("shy", version=1, family="test")
def shy(job, *, rng, budget):
    raise Unsupported("not today")


@planner("broken", version=1, family="test")
def broken(job, *, rng, budget):
    raise ZeroDivisionError("one line\nand another")


@planner("wrong", version=1, family="test")
def wrong(job, *, rng, budget):
    return {"mesh": "dp_replicate=8"}


@planner("too-many", version=1, family="test")
def too_many(job, *, rng, budget):
    return Choice(Mesh({"dp_replicate": 3 * job.ranks}))


@planner("nothing", version=1, family="test")
def nothing(job, *, rng, budget):
    return None


@planner("leaver", version=1, family="test")
def leaver(job, *, rng, budget):
    raise SystemExit("good bye")


@planner("interrupter", version=1, family="test")
def interrupter(job, *, rng, budget):
    raise KeyboardInterrupt


@planner("generator", version=1, family="test")
def generator(job, *, rng, budget):
    raise GeneratorExit("not a generator")


@planner("surrogate", version=1, family="test")
def surrogate(job, *, rng, budget):
    raise RuntimeError("\udcff\x00\x1b[31m")


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no words")


@planner("speechless", version=1, family="test")
def speechless(job, *, rng, budget):
    raise Unspeakable


class Locked(Exception):
    def __reduce__(self):
        raise TypeError("stays here")


@planner("locked", version=1, family="test")
def locked(job, *, rng, budget):
    raise Locked("cannot be pickled")


@planner("talker", version=1, family="test")
def talker(job, *, rng, budget):
    raise RuntimeError("word " * 1_000_000)


@planner("quitter", version=1, family="test")
def quitter(job, *, rng, budget):
    os._exit(0)


@planner("suicidal", version=1, family="test")
def suicidal(job, *, rng, budget):
    os.kill(os.getpid(), signal.SIGKILL)


@planner("crasher", version=1, family="test")
def crasher(job, *, rng, budget):
    os.kill(os.getpid(), signal.SIGSEGV)


@planner("closer", version=1, family="test")
def closer(job, *, rng, budget):
    """Closes every file, also the connection to the bench."""
    os.closerange(3, 4096)
    raise Unsupported("all files are closed")


@planner("parricide", version=1, family="test")
def parricide(job, *, rng, budget):
    """Kills the process that watches it."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


@planner("glutton", version=1, family="test")
def glutton(job, *, rng, budget):
    return [np.ones(1 << 26) for _ in range(100)]


@planner("vandal", version=1, family="test")
def vandal(job, *, rng, budget):
    job.parameters["layers"] = 1
    return plain(job)


@planner("endless", version=1, family="test")
def endless(job, *, rng, budget):
    while True:
        pass


@planner("deaf", version=1, family="test")
def deaf(job, *, rng, budget):
    """Ignores every signal that can be ignored, and sleeps."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(600)


@planner("sleeper", version=1, family="test")
def sleeper(job, *, rng, budget):
    """Stops itself: only a signal from outside ends or continues it."""
    os.kill(os.getpid(), signal.SIGSTOP)


@planner("forker", version=1, family="test", defaults={"log": "", "seconds": 0})
def forker(job, *, rng, budget, log, seconds):
    """Leaves two processes behind, one of them in a session of its own. Each writes its process id."""
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
    raise Unsupported("two processes are left")


@planner("twins", version=1, family="test")
def twins(job, *, rng, budget):
    """Comes back twice."""
    os.fork()
    raise Unsupported("one of two")


@planner("lingerer", version=1, family="test")
def lingerer(job, *, rng, budget):
    """Leaves a thread that never ends, so that its process would not end either."""
    import threading

    threading.Thread(target=time.sleep, args=(600,)).start()
    raise Unsupported("a thread is left")


@planner("outsider", version=1, family="test")
def outsider(job, *, rng, budget):
    """Changes the folder, the streams, the signals and the recursion limit of its process."""
    import sys

    os.chdir("/")
    sys.stdout = sys.stderr = None
    sys.setrecursionlimit(50)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    raise Unsupported("outside")


@parallel_model(
    "hollow",
    sizes={"": {}},
    defaults={"layers": 4, "length": 128, "microbatch": 1},
    axes=("pp", "dp_replicate"),
    flops=lambda parameters: 1.0,
    source="none: made for tests",
)
def hollow(*_, **__):
    raise Unsupported("hollow cannot be captured")
