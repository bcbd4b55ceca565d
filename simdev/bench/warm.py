"""Imported once by the fork server: loads and compiles what every worker needs, so that no worker does it again."""

from __future__ import annotations

import contextlib
import sys
import traceback

import numpy as np


def warm() -> None:
    """Load both shelves and compile the fast engine by simulating two ops."""
    from simdev.placers import registry
    from simdev.sim import simulate, simulate_many

    problem = tiny_problem()
    simulate(problem, tiny_placement(problem))
    simulate_many(problem, np.zeros((1, problem.graph.n_ops), np.int32))
    registry.placers()
    from simdev.analysis.levels import lower_bound

    lower_bound(problem)


def tiny_problem():
    """A chain of four ops on two devices joined by a link."""
    from simdev.problem.graph import GraphBuilder
    from simdev.problem.problem import Problem
    from simdev.problem.topology import Device, DeviceKind, Link, Topology

    kind = DeviceKind("tiny", 1 << 30, {"f32": 1e12}, 1e11)
    builder, tensors = GraphBuilder("tiny"), []
    for number in range(4):
        tensors = builder.outputs(builder.op(f"op{number}", "relu", inputs=tensors, flops=1000, outputs=[4096]))
    topology = Topology("tiny", (Device("a", kind), Device("b", kind)), (Link(("a", "b"), 10**9, 1000),))
    return Problem.build(builder.build(), topology)


def tiny_placement(problem):
    """Half of the ops on each device."""
    from simdev.problem.placement import Placement

    return Placement(np.arange(problem.graph.n_ops) % 2)


def say_unless_too_late(kind, error, trace) -> None:
    """The exception hook of workers. One that is forked just when its pool ends finds the pool's semaphores gone;
    nobody waits for it, so nobody is told."""
    frame = traceback.extract_tb(trace)[-1] if trace else None
    if not (kind is FileNotFoundError and frame and frame.filename.endswith("multiprocessing/synchronize.py")):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = say_unless_too_late
with contextlib.suppress(Exception):  # a worker that needs the broken part tells what is wrong
    warm()
