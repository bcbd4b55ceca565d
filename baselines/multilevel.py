"""Multilevel search: whole modules first, then a smaller problem, then the graph itself."""

from __future__ import annotations

import numpy as np

from simdev.analysis.coarsen import coarse_problem
from simdev.analysis.levels import fastest_durations, t_level
from simdev.baselines._descent import PART, descended
from simdev.baselines._late import LateWalk, best_start, is_compiled
from simdev.baselines._members import constructed
from simdev.baselines._search import groups, rank_of_unit
from simdev.baselines._search import starts as simple_starts
from simdev.baselines._shortened import shortened
from simdev.baselines._units import choices
from simdev.placers.budget import Budget
from simdev.placers.placer import placer
from simdev.placers.score import Score
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem

TIMES = 400  # parts of the longest path: ops of one group that could start in the same part are merged
FEWER = 1.25  # times as many ops as the smaller problem has the graph, or it is not searched
RECURRENT = 5.0  # units of a group, on average, from which on a graph is shortened and not merged
SETS = 1 / 3  # of the moves are made where the network was shortened: its units are a few hundred sets
SECONDS = 8 / 3  # the smaller problem gets one in so many of those that are left


@placer(
    "multilevel",
    version=3,
    family="search",
    searches=True,
    defaults={"moves": 90},
    source="multilevel partitioning: Karypis, Kumar, SIAM Journal on Scientific Computing 20(1), 1998; the refinement "
    "is late acceptance hill climbing: Burke, Bykov, European Journal of Operational Research 258(1), 2017",
)
def multilevel(problem, *, rng, budget, moves):
    """Search from coarse to fine: by whole modules, on a smaller problem, and on the graph.

    1. Modules of any depth, and then groups of units that do the same work for a layer, move to each device, longest
       first, and stay where the step is shorter. This begins with the best of the constructive placements, and takes a
       sixth of the budget at most.
    2. A smaller problem is searched in the same way, and then by ``late-acceptance``, with ``moves`` simulations in all
       for each evaluation that the budget has left; if the budget has seconds, in at most three eighths of those. For a
       recurrent network it is a network of fewer time steps (:mod:`simdev.baselines._shortened`), and a third as many
       simulations. Elsewhere ops are merged that belong to the same layer, do the same work there, and could start at
       about the same time if nothing had to wait for a device. An op of the smaller problem begins on the device of
       most of the work that it stands for.
    3. Modules and groups move again, and ``late-acceptance`` spends what is left of the budget on the graph, from the
       best placement so far.

    Departures from Karypis and Kumar: the coarsest level moves sets of ops, but simulates the graph itself; there is
    one smaller problem, not one for each halving, because clusters that ignore the layers simulate badly. Recurrent
    networks are not merged: each of their time steps waits for the one before it, and every merged op adds to that.

    A simulation of the smaller problem is a model of the step, as the loads of ``dp`` are: it is no evaluation of the
    budget, and takes processor seconds like all that a placer computes. Where ``late-acceptance`` has no compiled code
    (other rules than ``fifo`` and ``priority``, devices of several slots, throughput), there is no smaller problem.
    """
    given = list(constructed(problem, rng, budget.microbatches)) if budget.open else []
    begin = best_start(problem, budget, given)
    if begin is None:
        return Placement.of_units(problem, simple_starts(problem, choices(problem))[0])
    begin = _by_modules(problem, budget, *begin)
    smaller = _smaller(problem) if is_compiled(problem, budget) else None
    if smaller is not None:
        other, numbers, share = smaller
        apart = budget.apart(other, moves * share * budget.left, SECONDS)
        start = best_start(other, apart, (_on_smaller(problem, other, numbers, one) for one in (begin[1], *given)))
        if start is not None:
            found = LateWalk(other, apart, rng, *_by_modules(other, apart, *start)).run()
            priority = None if found.priority is None else found.priority[numbers]
            finer = best_start(problem, budget, [Placement(found.devices[numbers], priority)])
            if finer is not None and finer[0] < begin[0]:
                begin = _by_modules(problem, budget, *finer)
    return LateWalk(problem, budget, rng, *begin).run()


def _by_modules(problem: Problem, budget: Budget, score: Score, begin: Placement) -> tuple[Score, Placement]:
    """The descent from ``begin`` in a part of the budget; the order of ops stays as it is."""
    share, used, elapsed = budget.share(PART), budget.used, budget.elapsed

    def score_of(devices: np.ndarray) -> Score | None:
        if not budget.open or budget.used >= used + share.evaluations or budget.elapsed >= elapsed + share.seconds:
            return None
        return budget.evaluate(devices[problem.graph.unit_of_op], priority=begin.priority)

    first = np.unique(problem.graph.unit_of_op, return_index=True)[1]
    allowed = choices(problem, hosts=True)
    devices, score = descended(problem, allowed, begin.devices[first], score, score_of)
    return score, Placement(devices[problem.graph.unit_of_op], begin.priority)


def _smaller(problem: Problem) -> tuple[Problem, np.ndarray, float] | None:
    """A problem of fewer ops, int ``(n,)``: the op in it that stands for each op, and its share of ``moves``; None if
    it would hardly have fewer."""
    rank = rank_of_unit(problem)
    group = groups(problem, rank)[0]
    recurrent = problem.graph.n_units >= RECURRENT * (int(group.max()) + 1)
    other, numbers = shortened(problem, group, rank) if recurrent else _merged(problem, group)
    return (other, numbers, SETS if recurrent else 1.0) if problem.graph.n_ops >= FEWER * other.graph.n_ops else None


def _merged(problem: Problem, group: np.ndarray) -> tuple[Problem, np.ndarray]:
    """The problem of the merged graph, and int ``(n,)``: the op in it of each op."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    graph = problem.graph
    start, total = _earliest(problem)
    label = group[graph.unit_of_op] * TIMES + np.minimum(TIMES - 1, (start * TIMES / max(1, total)).astype(np.int64))
    label = np.unique(label, return_inverse=True)[1]
    count, source, target = int(label.max()) + 1, label[graph.edge_source], label[graph.consumers]
    edges = coo_matrix((np.ones(len(source), np.int8), (source, target)), (count, count))
    label = connected_components(edges, directed=True, connection="strong")[1][label]  # those of a cycle are one op
    return coarse_problem(problem, label)


def _earliest(problem: Problem) -> tuple[np.ndarray, int]:
    """When each op could start, int64 ``(n,)`` ns, if it only waited for its inputs, and when the last one could end;
    an op without inputs starts with its first reader."""
    graph, time = problem.graph, fastest_durations(problem)
    start = t_level(graph, time)
    first = np.full(graph.n_ops, np.iinfo(np.int64).max)
    np.minimum.at(first, graph.edge_source, start[graph.consumers])
    source = (np.diff(graph.input_ptr) == 0) & (first < np.iinfo(np.int64).max)
    return np.where(source, first, start), int((start + time).max())


def _on_smaller(problem: Problem, smaller: Problem, numbers: np.ndarray, found: Placement) -> Placement:
    """Each unit of a smaller problem on the device of most of the work that it stands for under ``found``."""
    unit = smaller.graph.unit_of_op[numbers]
    work = np.zeros((problem.topology.n_devices, smaller.graph.n_units))
    time = problem.costs.device_op_ns[found.devices, np.arange(len(numbers))]
    np.add.at(work, (found.devices, unit), np.maximum(time, 0) + 1.0)
    work[~choices(smaller, hosts=True)] = -1.0
    return Placement.of_units(smaller, work.argmax(axis=0).astype(np.int32))
