"""Load and compile what every worker needs, once, so that no worker does it again."""

from __future__ import annotations

import numpy as np


def warm() -> None:
    """Load both shelves and compile the fast engine by simulating two ops."""
    from simdev.placers import registry
    from simdev.sim import simulate, simulate_many

    problem = tiny_problem()
    simulate(problem, tiny_placement(problem))
    simulate_many(problem, np.zeros((1, problem.graph.n_ops), np.int32))
    registry.placers()
    from simdev.analysis.bounds import lower_bound

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
