"""Lower bounds on the largest load of a free split: the least cut around a class, and prices that no split can pay."""

from __future__ import annotations

import time

import numpy as np

from simdev.exact.contract import Classes
from simdev.exact.load import LoadProblem, processor_loads
from simdev.exact.solver import AUTO, solve

NEAR = 1e-4  # relative difference at which the bound proves the split
LONGEST = 20.0  # limit in seconds of the search for one set
SMOOTHING = 0.7  # weight of the best prices so far in the next prices (Wentges, Int. Trans. Oper. Res. 1997)


def cover_bound(
    problem: LoadProblem,
    classes: Classes,
    processor: np.ndarray,
    *,
    low: float = 0.0,
    seconds: float = 60.0,
    solver: str = AUTO,
    seed: int = 0,
) -> float:
    """A lower bound on the largest load of every split of ``classes``, computed within ``seconds``.

    ``low`` is a known lower bound, ``processor`` int ``(n,)`` a good split. If Ctrl-C interrupts the computation, the
    bound proven by then is returned.

    First, each class gives a bound on the load of its processor, wherever it is: on a CPU core its time; on an
    accelerator the least sum of times and crossed borders of all sets around the class (a minimum cut).

    Second, suppose that a split has no load above ``T``. Each accelerator holds a set of classes of load at most ``T``,
    and each core a set of time at most ``T``. Give the classes prices. If no set for an accelerator is worth more than
    ``b`` and no set for a core more than ``c``, all classes together are worth ``accelerators * b + cores * c`` at
    most. Prices with a larger sum refute ``T``. The prices are the dual values of the cheapest fractional cover by the
    sets found so far; an integer program finds the next, most valuable set (Gilmore and Gomory, Operations Research
    1961, with the bound of Farley, 1990). Bisection finds ``T``.
    """
    deadline = time.monotonic() + seconds
    value = high = processor_loads(problem, processor).largest
    try:
        sets = _Sets(problem, classes, solver, seed)
        low = sets.around(low, deadline)
        home = np.zeros(classes.n_classes, np.int64)
        home[classes.class_of] = processor
        known, prices = [home == i for i in range(problem.accelerators)], None
        while high - low > NEAR * value and (left := deadline - time.monotonic()) > 0.5 and not sets.interrupted:
            limit = (low + high) / 2
            refuted, prices = _refute(sets, limit, known, prices, time.monotonic() + 0.6 * left)
            low, high = (limit, high) if refuted else (low, limit)
    except KeyboardInterrupt:
        pass
    return min(low, value)


def _refute(sets: _Sets, limit: float, known: list, best: np.ndarray | None, deadline: float):
    """Search until ``deadline`` for prices that no split with loads up to ``limit`` can pay.

    Returns whether it found them, and the best prices, scaled so that a set for an accelerator is worth 1 at most. The
    sets that it finds are added to ``known``.
    """
    accelerators, cores = sets.problem.accelerators, sets.problem.cpus
    inside = [kept for kept in known if sets.load(kept) <= limit]
    on_core: list[np.ndarray] = []
    most, best_here = 0.0, None
    while time.monotonic() < deadline and not sets.interrupted:
        price, least = _cover(inside, on_core, cores, sets.classes.n_classes)
        if least <= accelerators:
            break
        new = False
        for share in (SMOOTHING, 0.0) if best is not None else (0.0,):
            tried = price if best is None else share * best + (1 - share) * price
            core, core_worth = _core_set(tried, sets.core_time, limit)
            found, worth = sets.most_valuable(tried, limit, deadline)
            paid = (tried.sum() - cores * core_worth) / max(worth, 1e-9)
            if paid > most and worth > 0:
                most, best_here = paid, tried / worth
                best = best_here
            if most > accelerators * (1 + 1e-6):
                return True, best
            if found is not None and not any(np.array_equal(found, other) for other in inside):
                inside.append(found)
                known.append(found)
                new = True
            if cores and not any(np.array_equal(core, other) for other in on_core):
                on_core.append(core)
                new = True
            if new:
                break
        if not new:
            break
    return False, best


def _cover(inside: list, on_core: list, cores: int, count: int) -> tuple[np.ndarray, float]:
    """Prices float ``(count,)`` and the size of the least fractional cover by sets.

    ``inside`` are sets for accelerators, ``on_core`` sets for a core, of which there are ``cores``. A class without a
    set costs 10.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csc_array

    columns = np.array([*inside, *on_core], float).reshape(-1, count).T
    cost = np.concatenate([np.ones(len(inside)), np.zeros(len(on_core)), np.full(count, 10.0)])
    used = np.concatenate([np.zeros(len(inside)), np.ones(len(on_core)), np.zeros(count)])
    rows = np.vstack([-np.hstack([columns, np.eye(count)]), used])
    result = linprog(cost, A_ub=csc_array(rows), b_ub=np.append(-np.ones(count), cores), method="highs")
    return np.maximum(0.0, -result.ineqlin.marginals[:count]), float(result.fun)


def _core_set(price: np.ndarray, core_time: np.ndarray, limit: float) -> tuple[np.ndarray, float]:
    """A set of high price that a core can run within ``limit``, and an upper bound on the price of any such set."""
    chosen = core_time <= 0
    worth, left, full = float(price[chosen].sum()), limit, False
    able = np.flatnonzero((core_time > 0) & np.isfinite(core_time) & (price > 0))
    for c in able[np.argsort(-price[able] / core_time[able], kind="stable")].tolist():
        if core_time[c] <= left:
            chosen[c] = True
            left -= core_time[c]
            worth += 0.0 if full else float(price[c])
        elif not full:
            worth, full = worth + float(price[c]) * left / core_time[c], True
    return chosen, worth


class _Sets:
    """The sets of classes that an accelerator can hold, as an integer program."""

    def __init__(self, problem: LoadProblem, classes: Classes, solver: str, seed: int):
        from ortools.math_opt.python import mathopt

        self.problem, self.classes, self.solver, self.seed, self.interrupted = problem, classes, solver, seed, False
        self.core_time = classes.cpu_time if problem.cpus else np.full(classes.n_classes, np.inf)
        able = np.isfinite(classes.accelerator_time) & (classes.size <= problem.memory)
        self.time = np.where(able, classes.accelerator_time, 0.0)
        self.model, self.sum = mathopt.Model(), mathopt.fast_sum
        self.inside = [self.model.add_binary_variable() for _ in range(classes.n_classes)]
        crossed = [self.model.add_variable(lb=0, ub=1) for _ in classes.border_cost]
        for c in np.flatnonzero(~able):
            self.inside[c].upper_bound = 0
        ends = zip(classes.member_ptr[:-1].tolist(), classes.member_ptr[1:].tolist(), crossed, strict=True)
        for start, end, cut in ends:
            hub, *others = (self.inside[c] for c in classes.members[start:end].tolist())
            for other in others:
                self.model.add_linear_constraint(cut >= hub - other)
                self.model.add_linear_constraint(cut >= other - hub)
        weights = [*self.time.tolist(), *classes.border_cost.tolist()]
        self.weight = self.sum(w * v for w, v in zip(weights, [*self.inside, *crossed], strict=True))
        if classes.size.sum() > problem.memory:
            share = self.sum(s * v for s, v in zip((classes.size / problem.memory).tolist(), self.inside, strict=True))
            self.model.add_linear_constraint(share <= 1)

    def load(self, chosen: np.ndarray) -> float:
        """Load of an accelerator with the classes ``chosen``, bool ``(c,)``."""
        held = np.add.reduceat(chosen[self.classes.members].astype(int), self.classes.member_ptr[:-1])
        crossed = (held > 0) & (held < np.diff(self.classes.member_ptr))
        return float(self.time[chosen].sum() + self.classes.border_cost[crossed].sum())

    def around(self, low: float, deadline: float) -> float:
        """A load that some processor reaches in every split: the largest, over the classes, of the least load around
        it."""
        self.model.minimize(self.weight)
        for c in np.argsort(-self.time, kind="stable").tolist():
            left = deadline - time.monotonic()
            if left <= 0 or self.interrupted:
                break
            if self.core_time[c] <= low or self.inside[c].upper_bound == 0:
                continue
            self.inside[c].lower_bound = 1
            low = max(low, min(float(self.core_time[c]), self._solve(left, 0.0).bound))
            self.inside[c].lower_bound = 0
        return low

    def most_valuable(self, price: np.ndarray, limit: float, deadline: float) -> tuple[np.ndarray | None, float]:
        """A set of load up to ``limit`` with a high total ``price``, and an upper bound on the price of any such
        set."""
        if not hasattr(self, "limit"):
            self.limit = self.model.add_linear_constraint(self.weight <= limit)
        self.limit.upper_bound = limit
        self.model.minimize(self.sum(-p * v for p, v in zip(price.tolist(), self.inside, strict=True)))
        found = self._solve(deadline - time.monotonic(), 0.01)
        if found.values is None:
            return None, -found.bound
        return np.array([found.values[v] > 0.5 for v in self.inside]), -found.bound

    def _solve(self, seconds: float, gap: float):
        seconds = min(LONGEST, max(0.1, seconds))
        outcome = solve(self.model, seconds=seconds, gap=gap, solver=self.solver, seed=self.seed)
        self.interrupted |= outcome.interrupted
        return outcome
