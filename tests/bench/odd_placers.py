"""Placers that misbehave, each in its own way: the bench's tests name them by this file."""

import os
import signal
import time

import numpy as np

from simdev.errors import Unsupported
from simdev.placers.placer import placer
from simdev.problem.placement import Placement


@placer("walk", version=1, family="test", searches=True, defaults={"worst": False})
def walk(problem, *, rng, budget, worst):
    """Random search."""
    tried = []
    while budget.open:
        devices = rng.integers(0, problem.topology.n_devices, problem.graph.n_units)[problem.graph.unit_of_op]
        tried.append((budget.evaluate(devices), len(tried), devices))
    tried.sort(key=lambda trial: trial[:2])
    return Placement(tried[-1 if worst else 0][2])


@placer("spendthrift", version=1, family="test", searches=True)
def spendthrift(problem, *, rng, budget):
    """Searches until the budget throws it out."""
    while True:
        budget.evaluate(np.full(problem.graph.n_ops, rng.integers(problem.topology.n_devices)))


@placer("slow", version=1, family="test", defaults={"log": "", "seconds": 0.2})
def slow(problem, *, rng, budget, log, seconds):
    """Writes a line when called, then takes its time."""
    if log and problem.graph.name != "tiny":  # the warm-up does not count
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{rng.integers(1 << 30)}\n")
    time.sleep(seconds if problem.graph.name != "tiny" else 0)
    return Placement(np.ones(problem.graph.n_ops, np.int32))


@placer("glutton", version=1, family="test")
def glutton(problem, *, rng, budget):
    return [np.ones(1 << 26) for _ in range(100)]


@placer("shy", version=1, family="test")
def shy(problem, *, rng, budget):
    raise Unsupported("not today")


@placer("broken", version=1, family="test")
def broken(problem, *, rng, budget):
    raise ZeroDivisionError("one line\nand another")


@placer("wrong", version=1, family="test")
def wrong(problem, *, rng, budget):
    return Placement(np.full(problem.graph.n_ops, 99))


@placer("suicidal", version=1, family="test")
def suicidal(problem, *, rng, budget):
    os.kill(os.getpid(), signal.SIGKILL)


@placer("needy", version=1, family="test", needs=("no_such_package",))
def needy(problem, *, rng, budget):
    raise AssertionError("is not called")


@placer("leaver", version=1, family="test")
def leaver(problem, *, rng, budget):
    raise SystemExit("good bye")
