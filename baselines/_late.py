"""A local search by late acceptance in compiled code, from a placement that another search has found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from simdev.baselines._order import ordered, with_orders
from simdev.baselines._search import groups, modules, rank_of_unit, units_by_group
from simdev.baselines._units import choices, unit_adjacency
from simdev.placers.budget import Budget
from simdev.placers.score import Score
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.sim.fast import new_buffers
from simdev.sim.inputs import problem_arrays
from simdev.sim.kernels.state import PRIORITY_LOOP
from simdev.sim.simulator import has_windows, inputs_of_runs, new_moves

MEMORY = 400  # the history holds one cost for so many moves of the budget,
LONGEST = 50_000  # at most so many costs
FIRST = 256  # moves in the first call of the compiled loop; later calls take about CALL_S seconds
CALL_S = 0.5
ALONE, TOGETHER = (0.25, 0.45, 0.15, 0.0, 0.15), (0.1, 0.2, 0.15, 0.2, 0.35)  # clusters, cuts, runs, groups, modules
ORDER = 0.15  # share of shifts in the order, where a placement brings its order
FAR = 0.02  # share of clusters that may go to any device, hosts too


def best_start(problem: Problem, budget: Budget, given: Iterable[Placement]) -> tuple[Score, Placement] | None:
    """The best of the ``given`` placements, each with every order of ops that a search may begin with; None if the
    budget is used up before there is one."""
    found: tuple[Score, Placement] | None = None
    for placement in given if budget.open else ():
        for candidate in with_orders(problem, placement):
            if budget.open:
                score = budget.evaluate(candidate.devices, priority=candidate.priority)
                if found is None or score < found[0]:
                    found = score, candidate
    return found


def is_compiled(problem: Problem, budget: Budget) -> bool:
    """Whether a search makes its moves in compiled code, or each of them is an evaluation of the budget."""
    by_priority = problem_arrays(problem).loop == PRIORITY_LOOP
    return budget.simulate is None and not budget.microbatches and (by_priority or has_windows(problem))


class LateWalk:
    """One search from a placement and its score; see ``late-acceptance`` for ``memory``."""

    def __init__(
        self, problem: Problem, budget: Budget, rng: np.random.Generator, score: Score, begin: Placement,
        memory: float = MEMORY,
    ):  # fmt: skip
        from simdev.baselines import _late_kernels as kernels  # loads Numba

        self.problem, self.budget, self.kernels, self.memory = problem, budget, kernels, memory
        self.ordered, n = ordered(problem), problem.graph.n_ops
        rank = np.arange(n) if begin.priority is None else n - 1 - begin.priority
        cost = score.step_ns if score.fits else kernels.UNFIT + score.known_overflow_bytes
        devices, order = begin.devices.astype(np.uint32), np.argsort(rank)
        units = problem.graph.n_units
        self.late = kernels.Late(
            *(devices, devices.copy(), rank, rank.copy(), order, order.copy(), devices.copy(), rank.copy()),
            history=np.array([cost]),
            state=np.array([0, cost, cost, 0, 0, 0, 0]),
            random=rng.integers(1 << 63, size=1, dtype=np.uint64),
            members=np.zeros(units, np.int64),
            stamps=np.zeros(units, np.int64),
        )
        self.moves = _moves(problem, kernels, ORDER if self.ordered else 0.0)

    def run(self) -> Placement:
        """Spend the budget; the best placement."""
        walk = self._compiled()
        if walk is None:
            self._run()
        else:
            self._run_compiled(walk)
        return self._best()

    def _run_compiled(self, walk: Callable[[Any, int], int]) -> None:
        budget, chunk = self.budget, FIRST
        self._remember(budget.left)
        walk(self.late, 0)  # compiles
        while budget.open:
            begun, count = budget.elapsed, int(min(budget.left, chunk))
            done = walk(self.late, count)
            budget.spend(done)
            if self.late.state[self.kernels.BEST] < self.kernels.UNFIT:
                best = self._best()
                budget.note(Score(int(self.late.state[self.kernels.BEST]), 0), best.devices, best.priority)
            if done < count:
                break
            seconds = max(budget.elapsed - begun, 1e-6)
            in_time = (budget.seconds - budget.elapsed) * count / seconds
            if chunk == FIRST and in_time < budget.left:
                self._remember(in_time)
            chunk = max(1, min(10 * chunk, int(CALL_S * count / seconds)))

    def _compiled(self) -> Callable[[Any, int], int] | None:
        """What makes so many moves from a state in compiled code, and tells how many there were; None where each move
        has to be an evaluation of the budget."""
        problem, kernels, moves, n = self.problem, self.kernels, self.moves, self.problem.graph.n_ops
        if not is_compiled(problem, self.budget):
            return None
        one = np.zeros(1, np.int64), np.zeros((1, problem.topology.n_devices), np.int64), np.zeros(1, np.int64)
        run = kernels.RunBuffers(*new_buffers(problem), *one)
        if problem_arrays(problem).loop == PRIORITY_LOOP:
            return lambda late, count: kernels.walk_priority(problem_arrays(problem), moves, late, run, count)
        inputs = inputs_of_runs(problem)
        ops = np.zeros(n, np.uint32), np.zeros(n, np.uint32), np.zeros(2, np.int64), np.zeros(1, np.int64)
        windows = kernels.Windows(*new_moves(problem), *ops)
        return lambda late, count: kernels.walk_fifo(inputs, moves, late, run, windows, count)

    def _run(self) -> None:
        """With an evaluation of the budget for each move."""
        self._remember(self.budget.left)
        budget, late, kernels = self.budget, self.late, self.kernels
        while budget.open and kernels.draw_move(problem_arrays(self.problem), self.moves, late):
            priority = len(late.tried_rank) - 1 - late.tried_rank if self.ordered else None
            score = budget.evaluate(late.tried_devices.astype(np.int32), priority=priority)
            kernels.settle_move(self.moves, late, score.step_ns, score.known_overflow_bytes)

    def _remember(self, moves: float) -> None:
        """Compare with the costs of earlier moves, if there are ``moves`` in all."""
        length = 1 if moves == math.inf else int(min(LONGEST, max(1, moves / self.memory)))
        self.late = self.late._replace(history=np.full(length, self.late.state[self.kernels.COST]))

    def _best(self) -> Placement:
        rank = self.late.best_rank
        return Placement(self.late.best_devices.astype(np.int32), len(rank) - 1 - rank if self.ordered else None)


def _moves(problem: Problem, kernels, order: float):
    """What the kernels read of a problem to draw moves.

    The shares are those of :data:`TOGETHER` where a group has very many units, as in a recurrent network, whose layers
    do the same work in each time step; they are those of :data:`ALONE` where each group has one unit.
    """
    graph, allowed = problem.graph, choices(problem, hosts=True)
    ops = np.argsort(graph.unit_of_op, kind="stable")
    rank = rank_of_unit(problem)
    group = groups(problem, rank)[0]
    by_group, group_ptr = units_by_group(group, rank)
    by_module, module_ptr = modules(problem, rank)
    together = 1 - (len(group_ptr) - 1) / len(group)
    shares = (1 - together) * np.array(ALONE) + together * np.array(TOGETHER)
    neighbour_ptr, neighbours, _ = unit_adjacency(problem)
    return kernels.Moves(
        unit_of_op=graph.unit_of_op.astype(np.int64),
        unit_ptr=np.searchsorted(graph.unit_of_op[ops], np.arange(graph.n_units + 1)),
        unit_ops=ops,
        neighbour_ptr=neighbour_ptr,
        neighbours=neighbours,
        group=group,
        group_ptr=group_ptr,
        group_units=by_group,
        group_place=np.argsort(by_group),
        module_ptr=module_ptr,
        module_units=by_module,
        allowed=allowed,
        near=np.array(problem.topology.accelerators or np.flatnonzero(allowed.any(axis=1)), np.int64),
        every=np.flatnonzero(allowed.any(axis=1)),
        source=graph.edge_source.astype(np.int64),
        target=graph.consumers.astype(np.int64),
        shares=np.append(shares * (1 - order), order),
        far=FAR,
    )
