"""``simdev bound``."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from simdev.cli.app import command
from simdev.cli.options import (
    Contention,
    ContentionOption,
    CostsOption,
    GraphArgument,
    JsonOption,
    Order,
    OrderOption,
    Runtime,
    RuntimeOption,
    TopologyArgument,
)
from simdev.cli.problems import build_problem
from simdev.cli.tables import print_json
from simdev.errors import InvalidInput


@command("bound")
def bound(
    graph: GraphArgument,
    topology: TopologyArgument,
    order: OrderOption = Order.fifo,
    contention: ContentionOption = Contention.fifo,
    runtime: RuntimeOption = Runtime.dataflow,
    costs: CostsOption = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds in which a constraint solver also proves one (small graphs).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compute a step time that no placement can beat."""
    from simdev.analysis.bounds import lower_bounds

    problem = build_problem(graph, topology, order, contention, runtime, costs)
    proven = [] if seconds is None else [solver_bound(problem, seconds)]
    found = lower_bounds(problem) + proven
    best = max(found, key=lambda bound: bound.ns)
    if as_json:
        each = [{"lower_bound_s": bound.ns / 1e9, "method": bound.method} for bound in found]
        print_json({"lower_bound_s": best.ns / 1e9, "method": best.method, "bounds": each})
        return
    print(f"lower bound {best.ns / 1e6:.3f} ms ({best.method})")
    for bound in found:
        print(f"  {bound.ns / 1e6:.3f} ms  {bound.method}")


def solver_bound(problem, seconds: float):
    """The bound that CP-SAT proves for the whole graph by the clock: bench rows, which must be the same anywhere, have
    none of these."""
    from simdev.analysis.bounds import Bound
    from simdev.analysis.feasible import check_feasible
    from simdev.exact.makespan import solve_makespan

    most = 3000
    if problem.graph.n_ops > most:
        raise InvalidInput(
            f"{problem.graph.n_ops:,} ops: a solver takes up to {most:,}", source=problem.graph.name, field="seconds"
        )
    check_feasible(problem)
    result = solve_makespan(problem, seconds=math.inf, wall_seconds=seconds)
    return Bound(result.bound_ns, f"cp-sat, {result.status}")
