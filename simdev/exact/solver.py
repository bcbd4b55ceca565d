"""Solves a MathOpt model within a time limit; it can be interrupted and always returns a proven bound.

``auto`` is Gurobi if it is installed with a licence, else HiGHS. ``scip`` and ``cp-sat`` also come with OR-Tools.
OR-Tools is imported on first use.
"""

from __future__ import annotations

import datetime
import math
import threading
import time
from dataclasses import dataclass
from functools import cache

from simdev.errors import InvalidInput, UnknownName

SOLVERS = {"highs": "HIGHS", "scip": "GSCIP", "cp-sat": "CP_SAT", "gurobi": "GUROBI"}
AUTO = "auto"
LONG = 25.0  # seconds; with a longer limit HiGHS works in several runs
GRACE = 1.03  # a solver that has not stopped after this multiple of its time limit is stopped


@dataclass(frozen=True)
class Solution:
    """The end of a solve.

    ``values`` maps variables to the best solution found (None: none); ``objective`` and the proven ``bound`` are those
    of a minimisation (``-inf`` if the solver proved nothing); ``status`` is ``optimal``, ``feasible``, ``infeasible``
    or ``unknown``; ``interrupted`` is true after Ctrl-C.
    """

    values: dict | None
    objective: float
    bound: float
    status: str
    seconds: float
    interrupted: bool = False

    @property
    def gap(self) -> float:
        """``(objective - bound) / objective``; inf without a solution."""
        if self.values is None or not math.isfinite(self.objective):
            return math.inf
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), 1e-12)


@cache
def available(solver: str) -> bool:
    """Whether ``solver`` can solve a model of one variable here: Gurobi needs its library and a licence."""
    from ortools.math_opt.python import mathopt

    model = mathopt.Model()
    model.minimize(model.add_variable(lb=1.0, ub=2.0))
    try:
        mathopt.solve(model, getattr(mathopt.SolverType, SOLVERS[solver]))
    except Exception:  # MathOpt raises many types, depending on what is missing
        return False
    return True


def chosen(solver: str) -> str:
    """``solver`` itself, or the solver that ``auto`` selects here. Raises :class:`UnknownName`."""
    if solver not in (*SOLVERS, AUTO):
        raise UnknownName("solver", solver, (*SOLVERS, AUTO))
    return solver if solver != AUTO else "gurobi" if available("gurobi") else "highs"


def solve(model, *, seconds: float, gap: float = 1e-4, solver: str = AUTO, hint: dict | None = None, seed: int = 0):
    """Minimise ``model`` (MathOpt) to a relative ``gap`` within ``seconds``; ``hint`` is a warm start.

    Stops within 5 % of its limit. On Ctrl-C it returns the best solution so far, with ``interrupted`` set. OR-Tools can
    interrupt neither HiGHS nor SCIP. HiGHS therefore divides a long limit into three runs, an eighth, a quarter and the
    rest, each from the solution of the previous run; of an interrupted SCIP nothing is kept. Raises
    :class:`InvalidInput` if the solver refuses the model or is not installed.
    """
    solver = chosen(solver)
    turns = [seconds / 8, seconds / 4, seconds * 5 / 8] if solver == "highs" and seconds >= LONG else [seconds]
    outcome = None
    for turn in turns:
        latest = _attempt(model, turn, gap, solver, hint, seed)
        outcome = latest if outcome is None else _better(outcome, latest)
        if latest.status in ("optimal", "infeasible") or latest.interrupted:
            break
        hint = outcome.values or hint
    return outcome


def _better(before: Solution, after: Solution) -> Solution:
    """Combine two attempts at one model."""
    best = after if after.objective <= before.objective else before
    bound = max(before.bound, after.bound)
    status = after.status if after.status in ("optimal", "infeasible") else best.status
    return Solution(best.values, best.objective, bound, status, before.seconds + after.seconds, after.interrupted)


def _attempt(model, seconds: float, gap: float, solver: str, hint: dict | None, seed: int) -> Solution:
    from ortools.math_opt.python import mathopt
    from ortools.util.python.solve_interrupter import SolveInterrupter

    parameters = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=seconds), relative_gap_tolerance=gap, random_seed=seed
    )
    if solver != "highs":  # HiGHS in MathOpt refuses the parameter; it uses all cores
        parameters.threads = 1
    hints = [mathopt.SolutionHint(variable_values=hint)] if hint else []
    box, stop = {}, SolveInterrupter()

    def work():
        try:
            box["result"] = mathopt.solve(
                model,
                getattr(mathopt.SolverType, SOLVERS[solver]),
                params=parameters,
                model_params=mathopt.ModelSolveParameters(solution_hints=hints),
                interrupter=None if solver in ("scip", "highs") else stop,
            )
        except Exception as error:  # MathOpt hides a refused parameter behind other errors
            box["error"] = error

    started = time.monotonic()
    thread = threading.Thread(target=work, daemon=True)
    interrupted = False
    thread.start()
    while thread.is_alive():
        try:
            thread.join(0.05)
            if time.monotonic() - started > seconds * GRACE + 0.05:
                stop.interrupt()
                thread.join(max(0.5, 0.015 * seconds))
                break
        except KeyboardInterrupt:
            interrupted = True
            stop.interrupt()
            thread.join(2.0)
            break
    elapsed = time.monotonic() - started
    if "error" in box:
        raise InvalidInput(f"{type(box['error']).__name__}: {box['error']}", source=f"solver {solver}")
    if "result" not in box:  # the solver is in a step that it does not leave; its thread ends by itself
        return Solution(None, math.inf, -math.inf, "unknown", elapsed, interrupted)
    return _outcome(mathopt, box["result"], elapsed, interrupted)


def _outcome(mathopt, result, elapsed: float, interrupted: bool) -> Solution:
    reason = mathopt.TerminationReason
    status = {reason.OPTIMAL: "optimal", reason.FEASIBLE: "feasible", reason.INFEASIBLE: "infeasible"}.get(
        result.termination.reason, "unknown"
    )
    found = result.has_primal_feasible_solution()
    bound = result.termination.objective_bounds.dual_bound
    return Solution(
        values=dict(result.variable_values()) if found else None,
        objective=result.objective_value() if found else math.inf,
        bound=bound if math.isfinite(bound) else -math.inf,
        status=status if found or status == "infeasible" else "unknown",
        seconds=elapsed,
        interrupted=interrupted,
    )
