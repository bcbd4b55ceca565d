"""Load and compile what every worker needs, once, so that no worker does it again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from simdev.errors import SimdevError


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


def warm_all() -> Iterator[str]:
    """Compile every kernel: those of each variant of the rules, of incremental simulation, and of each placer that can
    run here. Yields what comes next; iterate to the end."""
    from simdev.placers import registry
    from simdev.placers.budget import Budget
    from simdev.problem.problem import Rules
    from simdev.sim import Simulator, simulate, simulate_many

    yield "the default rules, and bounds"
    warm()
    for rules in (Rules("priority"), Rules("program"), Rules(runtime="eager"), Rules(contention="fair")):
        yield f"rules {rules}"
        problem = tiny_problem(rules)
        simulate(problem, tiny_placement(problem))
        simulate_many(problem, np.zeros((1, problem.graph.n_ops), np.int32))
    problem = tiny_problem()
    yield "incremental simulation"
    Simulator(problem, tiny_placement(problem)).try_moves(np.array([0]), np.array([1]))
    for name, spec in registry.placers().items():
        if spec.missing or "jax" in spec.needs:  # JAX compiles for the shapes of each graph
            continue
        yield f"placer {name}"
        with contextlib.suppress(SimdevError):  # some refuse a graph of four ops
            spec.place(problem, rng=np.random.default_rng(0), budget=Budget(problem, evaluations=4))


def tiny_problem(rules=None):
    """A chain of four ops on two devices joined by a link; one of them is the host if the rules need one."""
    from simdev.problem.graph import GraphBuilder
    from simdev.problem.problem import Problem
    from simdev.problem.topology import Device, DeviceKind, Link, Topology

    kind = DeviceKind("tiny", 1 << 30, {"f32": 1e12}, 1e11)
    builder, tensors = GraphBuilder("tiny"), []
    for number in range(4):
        tensors = builder.outputs(builder.op(f"op{number}", "relu", inputs=tensors, flops=1000, outputs=[4096]))
    first = Device("a", kind, host=bool(rules) and rules.runtime == "eager")
    topology = Topology("tiny", (first, Device("b", kind)), (Link(("a", "b"), 10**9, 1000),))
    return Problem.build(builder.build(), topology, rules=rules)


def tiny_placement(problem):
    """Half of the ops on each device."""
    from simdev.problem.placement import Placement

    return Placement(np.arange(problem.graph.n_ops) % 2)
