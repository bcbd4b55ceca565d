"""Placers that misbehave, each in its own way: the bench's tests name them by this file."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import misbehave
import numpy as np

from simdev.placers.placer import placer
from simdev.problem.placement import Placement

misbehave.register(placer, __name__)


@placer("walk", version=1, family="test", searches=True, defaults={"worst": False})
def walk(problem, *, rng, budget, worst):
    """Random search."""
    tried = []
    while budget.open:
        devices = rng.integers(0, problem.topology.n_devices, problem.graph.n_units)[problem.graph.unit_of_op]
        tried.append((budget.evaluate(devices), len(tried), devices))
    tried.sort(key=lambda trial: trial[:2])
    return Placement(tried[-1 if worst else 0][2])


@placer("napper", version=1, family="test", searches=True)
def napper(problem, *, rng, budget):
    """Waits for longer than half a second."""
    time.sleep(0.6)
    budget.proof = "open" if budget.open else "used up"
    return Placement(np.zeros(problem.graph.n_ops, np.int32))


@placer("talker", version=1, family="test")
def talker(problem, *, rng, budget):
    raise RuntimeError("word " * 10_000_000)


@placer("spendthrift", version=1, family="test", searches=True)
def spendthrift(problem, *, rng, budget):
    """Searches until the budget throws it out."""
    while True:
        budget.evaluate(np.full(problem.graph.n_ops, rng.integers(problem.topology.n_devices)))


FREE = 3  # calls of a placer with a gate that do not wait for it


@placer("slow", version=1, family="test", defaults={"log": "", "seconds": 0.2, "gate": ""})
def slow(problem, *, rng, budget, log, seconds, gate):
    """Writes a line when called, then takes its time: from the fourth call on, until the file ``gate`` is there."""
    if log and problem.graph.name != "tiny":  # the warm-up does not count
        call = append(log, f"{rng.integers(1 << 30):010}\n".encode())
        while gate and call > FREE and not Path(gate).exists():
            time.sleep(0.01)
    time.sleep(seconds if problem.graph.name != "tiny" else 0)
    return Placement(np.ones(problem.graph.n_ops, np.int32))


def append(path, line):
    """Add a line to a file whose lines are of one length; the number of that line, whoever else adds some meanwhile."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line)
        return os.lseek(file, 0, os.SEEK_CUR) // len(line)
    finally:
        os.close(file)


@placer("delegating", version=1, family="test")
def delegating(problem, *, rng, budget):
    """Rests, and lets a child work for 0.3 processor seconds."""
    time.sleep(0.5)
    work = "import time\nwhile time.process_time() < 0.3: pass"
    if problem.graph.name != "tiny":  # the warm-up does not count
        subprocess.run([sys.executable, "-S", "-c", work], check=True)
    return Placement(np.ones(problem.graph.n_ops, np.int32))


@placer("wrong", version=1, family="test")
def wrong(problem, *, rng, budget):
    return Placement(np.full(problem.graph.n_ops, 99))


@placer("needy", version=1, family="test", needs=("no_such_package",))
def needy(problem, *, rng, budget):
    raise AssertionError("is not called")


@placer("vandal", version=1, family="test")
def vandal(problem, *, rng, budget):
    problem.costs.op_ns.setflags(write=True)
    problem.costs.op_ns[:] = 0
    return Placement(np.zeros(problem.graph.n_ops, np.int32))


@placer("forker", version=1, family="test", defaults={"log": "", "seconds": 0})
def forker(problem, *, rng, budget, log, seconds):
    if problem.graph.name == "tiny":
        return Placement(np.ones(problem.graph.n_ops, np.int32))
    misbehave.leave_two_processes(log, seconds)
    return Placement(np.ones(problem.graph.n_ops, np.int32))


@placer("twins", version=1, family="test")
def twins(problem, *, rng, budget):
    """Comes back twice."""
    os.fork()
    return Placement(np.ones(problem.graph.n_ops, np.int32))


@placer("patient", version=1, family="test", searches=True, defaults={"folder": ""})
def patient(problem, *, rng, budget, folder):
    """While it is warmed up, it waits for a file ``row``; it writes a file ``seen`` when that is there."""
    while problem.graph.name == "tiny" and not (Path(folder) / "row").exists():
        time.sleep(0.05)
    if problem.graph.name == "tiny":
        (Path(folder) / "seen").touch()
    return Placement(np.ones(problem.graph.n_ops, np.int32))


@placer("closer", version=1, family="test")
def closer(problem, *, rng, budget):
    """Closes every file, also the connection to the bench."""
    os.closerange(3, 4096)
    return Placement(np.ones(problem.graph.n_ops, np.int32))


@placer("parricide", version=1, family="test")
def parricide(problem, *, rng, budget):
    """Kills the process that watches it."""
    if problem.graph.name == "tiny":
        return Placement(np.ones(problem.graph.n_ops, np.int32))
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


@placer("sleeper", version=1, family="test")
def sleeper(problem, *, rng, budget):
    """Stops itself: only a signal from outside ends or continues it."""
    if problem.graph.name != "tiny":
        os.kill(os.getpid(), signal.SIGSTOP)
    return Placement(np.ones(problem.graph.n_ops, np.int32))


@placer("lingerer", version=1, family="test")
def lingerer(problem, *, rng, budget):
    misbehave.leave_a_thread()
    return Placement(np.ones(problem.graph.n_ops, np.int32))


@placer("outsider", version=1, family="test")
def outsider(problem, *, rng, budget):
    misbehave.change_the_process()
    return Placement(np.ones(problem.graph.n_ops, np.int32))
