"""Planners that misbehave, each in its own way: the bench's tests name them by this file. The same as odd_placers.py,
with a training job in the place of a placement problem."""

import os
import signal
import time

import misbehave

from simdev.errors import Unsupported
from simdev.graphs.parallel_model import parallel_model
from simdev.parallel.mesh import Mesh
from simdev.planners import Choice, planner

misbehave.register(planner, __name__)


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


@planner("wrong", version=1, family="test")
def wrong(job, *, rng, budget):
    return {"mesh": "dp_replicate=8"}


@planner("too-many", version=1, family="test")
def too_many(job, *, rng, budget):
    return Choice(Mesh({"dp_replicate": 3 * job.ranks}))


@planner("nothing", version=1, family="test")
def nothing(job, *, rng, budget):
    return None


@planner("talker", version=1, family="test")
def talker(job, *, rng, budget):
    raise RuntimeError("word " * 1_000_000)


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
    misbehave.leave_two_processes(log, seconds)
    raise Unsupported("two processes are left")


@planner("twins", version=1, family="test")
def twins(job, *, rng, budget):
    """Comes back twice."""
    os.fork()
    raise Unsupported("one of two")


@planner("lingerer", version=1, family="test")
def lingerer(job, *, rng, budget):
    misbehave.leave_a_thread()
    raise Unsupported("a thread is left")


@planner("outsider", version=1, family="test")
def outsider(job, *, rng, budget):
    misbehave.change_the_process()
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
