"""Minimises the step time by constraint programming: the whole graph in large blocks, then parts in smaller blocks."""

from __future__ import annotations

import numpy as np

from simdev.baselines._climb import Neighbourhood, climb
from simdev.baselines._guided import search_from
from simdev.baselines._order import ordered
from simdev.baselines._search import Incumbent
from simdev.baselines._units import choices
from simdev.errors import Unsupported
from simdev.exact.blocks import blocks as make_blocks
from simdev.exact.makespan import solve_makespan
from simdev.placers.budget import Budget
from simdev.placers.placer import SHELF, placer
from simdev.placers.score import Score
from simdev.problem.placement import Placement
from simdev.sim import simulate

STARTS = ("single-gpu", "dp", "expert", "m-etf", "m-sct", "heft", "peft", "critical-path", "min-cut")
NEAR = 1.02


@placer(
    "cp-sat",
    version=4,
    family="exact",
    repeatable=False,
    searches=True,
    defaults={"blocks": 80, "fine": 150, "free": 12, "effort": 1.0, "rounds": 8},
    needs=("ortools",),
    source="CP-SAT of OR-Tools; neighbourhoods after Shaw, CP 1998",
)
def cp_sat(problem, *, rng, budget, blocks, fine, free, effort, rounds):
    """Minimise the step time under the simulator's rules, for a graph merged to ``blocks`` blocks.

    The start is the best result of the constructive placers. A large-neighbourhood search follows: in each of
    ``rounds`` rounds, ``free`` of ``fine`` smaller blocks may move and the others stay. The free blocks are alternately
    a stretch of the graph and the blocks of two devices. Every solution of the solver is simulated on the full graph,
    and the simulated score decides. The remaining evaluations are spent on the moves of ``local-search``, which move
    single ops of a block; if the placement brings its order of ops, on those of ``long-search``. ``effort`` is CP-SAT's
    deterministic time for all models; the first model gets a third of it. A solve also ends after 20 s (the first) or
    5 s of wall-clock time. If that happens, on a busy host, the row need not repeat.
    """
    search = _Search(problem, budget)
    for name, key in zip(STARTS, rng.integers(1 << 62, size=len(STARTS)).tolist(), strict=True):
        if name in SHELF and budget.open:
            try:
                found = SHELF[name].place(problem, rng=np.random.default_rng(key), budget=Budget(problem))
            except Unsupported:
                continue
            search.evaluate(found.devices)
    if search.best is None:
        raise Unsupported("no constructive placer finds a start, or the budget has no evaluations")
    coarse = make_blocks(problem, blocks)
    search.improve(coarse, np.ones(coarse.count, bool), effort / 3, 20.0, int(rng.integers(1 << 30)))
    small = make_blocks(problem, fine)
    order = np.argsort([np.flatnonzero(small.block_of == b)[0] for b in range(small.count)], kind="stable")
    for turn in range(rounds):
        if not budget.open or budget.elapsed > 0.8 * budget.seconds:
            break
        released = _neighbourhood(problem, small, search.best, order, free, turn, rng)
        search.improve(small, released, effort / 1.5 / rounds, 5.0, int(rng.integers(1 << 30)))
    search.refine(rng)
    return Placement(search.best, search.priority)


class _Search:
    """Keeps the best placement so far by the simulator's score."""

    def __init__(self, problem, budget):
        self.problem, self.budget = problem, budget
        self.best: np.ndarray | None = None
        self.score: Score | None = None
        self.priority: np.ndarray | None = None  # None: the default priorities

    def evaluate(self, devices) -> None:
        if self.budget.open:
            score = self.budget.evaluate(devices)
            if self.score is None or score < self.score:
                self.score, self.best = score, np.array(devices, np.int32)

    def improve(self, blocks, released, effort, clock, seed) -> None:
        """Solve with the ``released`` blocks free and each other block on the device of most of its time in the
        best."""
        start = blocks.project(self.problem, self.best)
        supported = blocks.problem.unit_op_ns >= 0
        allowed = np.zeros_like(supported)
        devices = np.unique(np.append(self.problem.topology.accelerators, start))
        allowed[devices] = supported[devices]
        fixed = ~released[blocks.tie]
        allowed[:, fixed] = False
        allowed[start, np.arange(len(start))] = True
        # The model may order ops better than the queues do, so its solutions must not be much worse than the start.
        upper = int(NEAR * simulate(blocks.problem, Placement.of_units(blocks.problem, start)).step_ns)
        left = self.budget.seconds - self.budget.elapsed
        try:
            result = solve_makespan(
                blocks.problem,
                allowed=allowed,
                tie=blocks.tie,
                size=blocks.size,
                hint=start,
                upper_ns=upper,
                seconds=effort,
                wall_seconds=max(0.1, min(clock, 0.5 * left)),
                seed=seed,
            )
        except Unsupported:
            return
        tried = set()
        for devices in result.found[::-1][:8]:
            if devices.tobytes() not in tried and not np.array_equal(devices, start):
                tried.add(devices.tobytes())
                self.evaluate(blocks.expand(devices))

    def refine(self, rng) -> None:
        """Spend the remaining evaluations on moves in the full graph, which no block model contains."""
        if not self.budget.open or self.best is None or self.score is None:
            return
        if ordered(self.problem):
            found = search_from(self.problem, self.budget, rng, [Placement(self.best)], 1)
            self.best, self.priority = found.devices, found.priority
            return
        unit_first = np.unique(self.problem.graph.unit_of_op, return_index=True)[1]
        best = Incumbent(self.problem, self.budget, self.best[unit_first])
        moves = Neighbourhood(self.problem, choices(self.problem))
        climb(best, moves, rng, best.devices, self.score, self.budget.share(1))
        if best.score is not None and best.score < self.score:
            self.score, self.best = best.score, best.devices[self.problem.graph.unit_of_op]


def _neighbourhood(problem, blocks, devices, order, free, turn, rng) -> np.ndarray:
    """bool ``(blocks,)``: ``free`` blocks that may move, alternately a stretch of the graph and blocks of two
    devices."""
    released = np.zeros(blocks.count, bool)
    if turn % 2 == 0:
        first = int(rng.integers(max(1, blocks.count - free + 1)))
        released[order[first : first + free]] = True
        return released
    home = np.zeros(blocks.count, np.int64)
    home[blocks.tie] = blocks.project(problem, devices)
    pair = rng.choice(problem.topology.accelerators, min(2, len(problem.topology.accelerators)), replace=False)
    inside = np.flatnonzero(np.isin(home, pair))
    released[rng.permutation(inside)[:free]] = True
    return released
