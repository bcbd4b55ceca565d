"""Load and compile what every worker needs, once, so that no worker does it again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from simdev.errors import SimdevError

if TYPE_CHECKING:
    from simdev.placers.placer import PlacerSpec
    from simdev.problem.problem import Rules


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
    """Compile every kernel. Yields what comes next; iterate to the end."""
    for name, step in steps().items():
        yield name
        step()


def steps() -> dict[str, Callable[[], object]]:
    """What there is to compile, by name: the kernels of each variant of the rules, of incremental simulation, and of
    each placer that can run here. The steps may run in any order."""
    from simdev.placers import registry
    from simdev.problem.problem import Rules

    found: dict[str, Callable[[], object]] = {"the default rules, and bounds": warm}
    fair = Rules(contention="fair"), Rules("priority", "fair")  # each has a loop of its own
    for rules in (Rules("priority"), Rules("program"), Rules(runtime="eager"), *fair):
        found[f"rules {rules}"] = partial(_simulate, rules)
    found["incremental simulation"] = _move
    for name, spec in registry.placers().items():
        if not spec.missing and "jax" not in spec.needs:  # JAX compiles for the shapes of each graph
            found[f"placer {name}"] = partial(_place, spec)
    return found


def _simulate(rules: Rules) -> None:
    from simdev.sim import simulate, simulate_many

    problem = tiny_problem(rules)
    simulate(problem, tiny_placement(problem))
    simulate_many(problem, np.zeros((1, problem.graph.n_ops), np.int32))


def _move() -> None:
    from simdev.sim import Simulator

    problem = tiny_problem()
    Simulator(problem, tiny_placement(problem)).try_moves(np.array([0]), np.array([1]))


def _place(spec: PlacerSpec) -> None:
    from simdev.placers.budget import Budget

    problem = tiny_problem()
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
