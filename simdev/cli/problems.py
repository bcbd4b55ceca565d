"""The problem that a command names, and the placement that a placer finds for it."""

from __future__ import annotations

import math
import sys

from simdev.errors import InvalidInput


def build_problem(graph, topology, order="fifo", contention="fifo", runtime="dataflow", costs=None):
    """The problem that a command's arguments name."""
    from simdev.placers import registry
    from simdev.problem.costs import CostModel, load_measured
    from simdev.problem.problem import Problem, Rules
    from simdev.problem.topology import load_topology

    model = CostModel() if costs is None else CostModel(measured=load_measured(costs))
    rules = Rules(order, contention, runtime)
    return Problem.build(registry.load_workload(graph), load_topology(topology), model, rules)


def run_placer(problem, entry: str | None, evaluations: float, seed: int, seconds: float = math.inf, **more):
    """The placement that the placer ``entry``, with ``more`` parameters, finds within ``evaluations`` simulations and
    ``seconds``. Ctrl-C ends the search and answers with the best placement so far."""
    import numpy as np

    from simdev.analysis.feasible import check_feasible
    from simdev.placers import registry
    from simdev.placers.budget import Budget

    if entry is None:
        raise InvalidInput("missing", source="--placer")
    for option, number in (("--evaluations", evaluations), ("--seed", seed)):
        if number < 0:
            raise InvalidInput(f"{number} is negative", source=option)
    spec, params = registry.find_placer(entry)
    check_feasible(problem)
    budget = Budget(problem, evaluations=evaluations, seconds=seconds)
    try:
        return spec.place(problem, rng=np.random.default_rng(seed), budget=budget, **{**params, **more})
    except KeyboardInterrupt:
        if budget.best_placement is None:
            raise
        print(f"simdev: interrupted after {budget.used} evaluations; the best placement so far", file=sys.stderr)
        return budget.best_placement


def graph_figures(graph, out) -> tuple[dict, str]:
    """What a command that wrote ``graph`` to the file ``out`` says: its sizes, as facts and as a line."""
    facts = {"written": [str(out)], "ops": graph.n_ops, "tensors": graph.n_tensors, "edges": graph.n_edges}
    return facts, f"{out}: {graph.n_ops} ops, {graph.n_tensors} tensors, {graph.n_edges} edges"
