"""The max-load optimum by integer programming, contiguous or not (Tarnawski et al. 2020, section 4)."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from simdev.errors import Unsupported
from simdev.exact.anneal import anneal
from simdev.exact.contract import Classes, classes_of, contract
from simdev.exact.cover import cover_bound
from simdev.exact.dp import best_linear, why_infeasible
from simdev.exact.load import LoadProblem, processor_loads
from simdev.exact.merge import regroup
from simdev.exact.solver import AUTO, LONG, solve

MOVES_PER_S, MOST_MOVES = 60_000, 1_500_000  # of the annealing, per second of the limit


@dataclass(frozen=True)
class Proven:
    """A split ``processor`` int ``(n,)`` with its ``largest`` load, its proven lower ``bound``, and how the solver
    ended."""

    processor: np.ndarray
    largest: float
    bound: float
    status: str
    seconds: float
    interrupted: bool = False

    @property
    def gap(self) -> float:
        return max(0.0, self.largest - self.bound) / max(self.largest, 1e-12)


def best_split(
    problem: LoadProblem,
    *,
    contiguous: bool = False,
    seconds: float = 60.0,
    gap: float = 1e-4,
    solver: str = AUTO,
    start: np.ndarray | None = None,
    seed: int = 0,
) -> Proven:
    """The split of least largest load, ``contiguous`` or free, with the best proof that ``seconds`` allow.

    Contiguous means, for every processor, that no path between two of its nodes leaves it. As in the paper's program
    (and less strictly than in :func:`simdev.exact.dp.best_contiguous`), processors may feed one another. ``start`` is
    the split to start from (default: the best linear split, improved move by move). Raises :class:`Unsupported` if
    nothing fits in memory.
    """
    classes = contract(problem, merge_trivial=False) if contiguous else colour_classes(problem)
    if start is None:
        start = _first_split(problem, contiguous)
    return best_split_of(
        problem, classes, contiguous=contiguous, seconds=seconds, gap=gap, solver=solver, start=start, seed=seed
    )


def best_split_of(
    problem: LoadProblem,
    classes: Classes,
    *,
    contiguous: bool,
    seconds: float,
    gap: float = 1e-4,
    solver: str = AUTO,
    start: np.ndarray | None = None,
    seed: int = 0,
) -> Proven:
    """Like :func:`best_split` over given ``classes``, which ``start`` keeps whole; the bound is for splits that do.

    :func:`simdev.exact.anneal.anneal` improves the start of a free split. With a long limit, the solver then runs for
    three tenths of it. If that proves nothing, :func:`exchange` gets as much time, and
    :func:`simdev.exact.cover.cover_bound` the rest.
    """
    long = seconds >= LONG and not contiguous
    began = time.monotonic()
    if start is not None and not contiguous:
        try:
            start = anneal(problem, classes, start, moves=int(min(MOST_MOVES, MOVES_PER_S * seconds)), seed=seed)
        except KeyboardInterrupt:
            value = processor_loads(problem, start).largest
            bound = min(value, simple_bound(problem))
            return Proven(start, value, bound, "feasible", time.monotonic() - began, True)
        seconds = max(0.1, seconds - (time.monotonic() - began))
    found = _solve(problem, classes, contiguous, 0.3 * seconds if long else seconds, gap, solver, start, seed)
    if not long or found.status == "optimal" or found.interrupted:
        return found
    processor, interrupted = exchange(
        problem, classes, found.processor, seconds=0.3 * seconds, solver=solver, seed=seed
    )
    left, bound = began + seconds - time.monotonic(), found.bound
    if left > 0 and not interrupted:
        bound = cover_bound(problem, classes, processor, low=bound, seconds=left, solver=solver, seed=seed)
    value = processor_loads(problem, processor).largest
    status = "optimal" if value - bound <= max(gap, 1e-9) * value else "feasible"
    return Proven(processor, value, min(bound, value), status, time.monotonic() - began, interrupted)


def exchange(
    problem: LoadProblem,
    classes: Classes,
    processor: np.ndarray,
    *,
    seconds: float,
    free: int = 3,
    solver: str = AUTO,
    seed: int = 0,
) -> tuple[np.ndarray, bool]:
    """Improve a free split by large-neighbourhood search; return it, int ``(n,)``, and whether Ctrl-C ended the search.

    In each round, the integer program redistributes the classes of the most loaded processor and of ``free`` - 1
    others, drawn at random; all other classes stay.
    """
    rng = np.random.default_rng(seed)
    best, value, began = processor, processor_loads(problem, processor).largest, time.monotonic()
    free = min(free, problem.n_processors)
    try:
        while (left := seconds - (time.monotonic() - began)) > 0.1:
            model, x, hint = _few_free(problem, classes, best, free, rng)
            outcome = solve(model, seconds=min(left, max(1.0, seconds / 20)), solver=solver, hint=hint, seed=seed)
            if outcome.values is not None:
                found = _processors(problem, classes, x, outcome.values)
                loads = processor_loads(problem, found)
                if not loads.overfull and loads.largest < value:
                    best, value = found, loads.largest
            if outcome.interrupted:
                return best, True
    except KeyboardInterrupt:  # between two solves
        return best, True
    return best, False


def _few_free(problem: LoadProblem, classes: Classes, processor: np.ndarray, free: int, rng: np.random.Generator):
    """The model in which only the most loaded processor and ``free`` - 1 others exchange classes."""
    home = np.zeros(classes.n_classes, np.int64)
    home[classes.class_of] = processor
    home = _canonical(home, classes, problem.accelerators)
    worst = int(np.argmax(processor_loads(problem, home[classes.class_of]).load))
    others = np.setdiff1d(np.arange(problem.n_processors), worst)
    open_processors = {worst, *rng.choice(others, free - 1, replace=False).tolist()}
    model, x, hint = _model(problem, classes, False, processor)
    for (c, i), variable in x.items():
        if home[c] not in open_processors:
            variable.lower_bound = variable.upper_bound = float(home[c] == i)
        elif i not in open_processors:
            variable.upper_bound = 0
    return model, x, hint


def _solve(problem, classes, contiguous, seconds, gap, solver, start, seed) -> Proven:
    model, x, hint = _model(problem, classes, contiguous, start)
    outcome = solve(model, seconds=seconds, gap=gap, solver=solver, hint=hint, seed=seed)
    candidates = [] if start is None else [start]
    if outcome.values is not None:
        candidates.append(_processors(problem, classes, x, outcome.values))
    if not candidates:
        if outcome.status == "infeasible":
            raise Unsupported(why_infeasible(problem, classes))
        raise Unsupported(f"{problem.name}: {solver} found no split in {outcome.seconds:.1f} s")
    best = min(candidates, key=lambda processor: processor_loads(problem, processor).largest)
    value = processor_loads(problem, best).largest
    bound = min(value, max(outcome.bound, simple_bound(problem)))
    status = "optimal" if value - bound <= max(gap, 1e-9) * value else "feasible"
    return Proven(best, value, bound, status, outcome.seconds, outcome.interrupted)


def colour_classes(problem: LoadProblem) -> Classes:
    """One class per colour, without precedence: the classes of a free split."""
    nothing = np.zeros(0, np.int64)
    return regroup(classes_of(problem, problem.class_of, nothing, nothing), np.arange(int(problem.class_of.max()) + 1))


def _model(problem: LoadProblem, classes: Classes, contiguous: bool, start: np.ndarray | None):
    """``x[class, processor]``, and for each border and accelerator whether the accelerator holds some but not all of
    it."""
    from ortools.math_opt.python import mathopt

    model = mathopt.Model()
    k, processors = problem.accelerators, range(problem.n_processors)
    count = classes.n_classes
    x = {}
    for c in range(count):
        for i in processors:
            time = classes.accelerator_time[c] if i < k else classes.cpu_time[c]
            possible = math.isfinite(time) and (i >= k or classes.size[c] <= problem.memory)
            x[c, i] = model.add_variable(lb=0, ub=1 if possible else 0, is_integer=True)
        model.add_linear_constraint(mathopt.fast_sum(x[c, i] for i in processors) == 1)
    largest = model.add_variable(lb=simple_bound(problem))
    hint = {}
    home = None
    if start is not None:
        home = np.zeros(count, np.int64)
        home[classes.class_of] = start
        home = _canonical(home, classes, k)
        hint = {x[c, i]: float(home[c] == i) for c, i in x}
        loads = processor_loads(problem, home[classes.class_of])
        hint[largest] = loads.largest
        largest.upper_bound = loads.largest
    heavy = np.argsort(-np.where(np.isfinite(classes.accelerator_time), classes.accelerator_time, 0), kind="stable")
    for rank, c in enumerate(heavy[:k].tolist()):  # accelerators are equal: the r-th heaviest class needs the first r
        for i in range(rank + 1, k):
            x[c, i].upper_bound = 0
    ptr = classes.member_ptr
    for i in range(k):
        cut_cost = []
        for b, cost in enumerate(classes.border_cost.tolist()):
            members = classes.members[ptr[b] : ptr[b + 1]].tolist()
            cut = model.add_variable(lb=0, ub=1)
            hub = members[0]
            for c in members[1:]:
                model.add_linear_constraint(cut >= x[hub, i] - x[c, i])
                model.add_linear_constraint(cut >= x[c, i] - x[hub, i])
            cut_cost.append(cost * cut)
            if home is not None:
                hint[cut] = float(0 < sum(home[c] == i for c in members) < len(members))
        time = [
            classes.accelerator_time[c] * x[c, i] for c in range(count) if math.isfinite(classes.accelerator_time[c])
        ]
        model.add_linear_constraint(mathopt.fast_sum(time) + mathopt.fast_sum(cut_cost) <= largest)
        sizes = mathopt.fast_sum(classes.size[c] / problem.memory * x[c, i] for c in range(count))
        if math.isfinite(problem.memory) and problem.memory > 0 and classes.size.sum() > problem.memory:
            model.add_linear_constraint(sizes <= 1)
    for i in range(k, problem.n_processors):
        time = [classes.cpu_time[c] * x[c, i] for c in range(count) if math.isfinite(classes.cpu_time[c])]
        model.add_linear_constraint(mathopt.fast_sum(time) <= largest)
    if contiguous:
        for i in processors:
            # z falls along edges from 1: once a path has left the processor it does not come back.
            z = [model.add_variable(lb=0, ub=1) for _ in range(count)]
            for c, before in enumerate(classes.predecessors):
                model.add_linear_constraint(z[c] >= x[c, i])
                for p in before:
                    model.add_linear_constraint(z[c] <= z[p])
                    model.add_linear_constraint(z[c] <= x[c, i] - x[p, i] + 1)
            if home is not None:
                hint.update(zip(z, _reach(classes, home == i), strict=True))
    model.minimize(largest)
    return model, x, hint


def _reach(classes: Classes, inside: np.ndarray) -> list[float]:
    """The z of a contiguous split: 1 for the classes inside, and for classes before one inside."""
    z = inside.copy()
    for c in range(classes.n_classes - 1, -1, -1):
        if z[c]:
            z[list(classes.predecessors[c])] = True
    return z.astype(float).tolist()


def _canonical(home: np.ndarray, classes: Classes, k: int) -> np.ndarray:
    """Renumber the accelerators in the order in which the heaviest classes use them."""
    times = np.where(np.isfinite(classes.accelerator_time), classes.accelerator_time, 0)
    order = list(dict.fromkeys(int(home[c]) for c in np.argsort(-times, kind="stable") if home[c] < k))
    order += [i for i in range(k) if i not in order]
    number = np.arange(max(k, int(home.max()) + 1))
    number[order] = np.arange(k)
    return number[home]


def _processors(problem: LoadProblem, classes: Classes, x: dict, values: dict) -> np.ndarray:
    share = np.array([[values[x[c, i]] for i in range(problem.n_processors)] for c in range(classes.n_classes)])
    return np.argmax(share, axis=1)[classes.class_of]


def simple_bound(problem: LoadProblem) -> float:
    """The larger of two bounds without transfers: all work on its faster processor, divided evenly; the largest
    class."""
    count = int(problem.class_of.max()) + 1
    fast = (
        np.bincount(problem.class_of, problem.accelerator_time, count)
        if problem.accelerators
        else np.full(count, np.inf)
    )
    if problem.cpus:
        fast = np.minimum(fast, np.bincount(problem.class_of, problem.cpu_time, count))
    return max(float(fast.sum()) / problem.n_processors, float(fast.max()))


def _first_split(problem: LoadProblem, contiguous: bool) -> np.ndarray | None:
    try:
        split = best_linear(problem, merge_trivial=False).processor
    except Unsupported:
        return None
    return split if contiguous else improve(problem, split)


def improve(problem: LoadProblem, processor: np.ndarray, rounds: int = 200) -> np.ndarray:
    """Move one class at a time off the most loaded processor while the largest load falls, within memory."""
    class_of = problem.class_of
    home = np.zeros(int(class_of.max()) + 1, np.int64)
    home[class_of] = processor
    best = processor_loads(problem, home[class_of])
    for _ in range(rounds):
        worst, moved = int(np.argmax(best.load)), None
        for c in np.flatnonzero(home == worst).tolist():
            for i in range(problem.n_processors):
                if i == worst:
                    continue
                trial = home.copy()
                trial[c] = i
                loads = processor_loads(problem, trial[class_of])
                if not loads.overfull and loads.largest < best.largest * (1 - 1e-9):
                    best, moved = loads, trial
        if moved is None:
            break
        home = moved
    return home[class_of]
