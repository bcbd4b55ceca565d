"""Multilevel search: whole modules first, then a merged graph, then the graph itself."""

from __future__ import annotations

import numpy as np

from simdev.analysis.coarsen import coarse_problem
from simdev.analysis.levels import fastest_durations, t_level
from simdev.baselines._descent import PART, descended
from simdev.baselines._late import LateWalk, best_start, is_compiled
from simdev.baselines._members import constructed
from simdev.baselines._search import groups, rank_of_unit
from simdev.baselines._search import starts as simple_starts
from simdev.baselines._units import choices
from simdev.placers.budget import Budget
from simdev.placers.placer import placer
from simdev.placers.score import Score
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem

TIMES = 400  # parts of the longest path: ops of one group that could start in the same part are merged
FEWER = 1.25  # times as many ops as the merged graph has the graph, or it is not searched
RECURRENT = 5.0  # units of a group, on average, from which on a graph is not merged
SHARE = 8 / 3  # the merged graph gets one part in so many of the seconds that are left


@placer(
    "multilevel",
    version=2,
    family="search",
    searches=True,
    defaults={"moves": 40},
    source="multilevel partitioning: Karypis, Kumar, SIAM Journal on Scientific Computing 20(1), 1998; the refinement "
    "is late acceptance hill climbing: Burke, Bykov, European Journal of Operational Research 258(1), 2017",
)
def multilevel(problem, *, rng, budget, moves):
    """Search from coarse to fine: by whole modules, on a merged graph, and on the graph.

    1. Modules of any depth, and then groups of units that do the same work for a layer, move to each device, longest
       first, and stay where the step is shorter. This begins with the best of the constructive placements, and takes a
       sixth of the budget at most.
    2. Ops are merged that belong to the same layer, do the same work there, and could start at about the same time if
       nothing had to wait for a device. A merged op begins on the device of most of its work. ``late-acceptance`` makes
       ``moves`` times as many moves in a simulation of the merged graph as the budget has evaluations left; if the
       budget has seconds, at most three eighths of those.
    3. ``late-acceptance`` spends what is left of the budget on the graph, from the best placement so far.

    Departures from Karypis and Kumar: the coarsest level moves sets of ops, but simulates the graph itself; there is
    one merged graph, not one for each halving, because clusters that ignore the layers simulate badly. Recurrent
    networks are not merged: each of their time steps waits for the one before it, and every merged op adds to that.

    A simulation of a merged graph is a model of the step, as the loads of ``dp`` are: it is no evaluation of the
    budget, and takes processor seconds like all that a placer computes. Where ``late-acceptance`` has no compiled code
    (other rules than ``fifo`` and ``priority``, devices of several slots, throughput), there is no merged graph.
    """
    given = list(constructed(problem, rng, budget.microbatches)) if budget.open else []
    begin = best_start(problem, budget, given)
    if begin is None:
        return Placement.of_units(problem, simple_starts(problem, choices(problem))[0])
    begin = _by_modules(problem, budget, *begin)
    coarser = _merged(problem) if is_compiled(problem, budget) else None
    if coarser is not None:
        merged, numbers = coarser
        apart = budget.apart(merged, moves * budget.left, SHARE)
        start = best_start(merged, apart, (_on_merged(problem, merged, numbers, one) for one in (begin[1], *given)))
        if start is not None:
            coarse = LateWalk(merged, apart, rng, *start).run()
            priority = None if coarse.priority is None else coarse.priority[numbers]
            finer = best_start(problem, budget, [Placement(coarse.devices[numbers], priority)])
            begin = begin if finer is None else min(begin, finer, key=lambda found: found[0])
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


def _merged(problem: Problem) -> tuple[Problem, np.ndarray] | None:
    """The problem of the merged graph, and int ``(n,)``: the op in it of each op; None if the graph is recurrent or
    hardly becomes smaller."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    graph = problem.graph
    group = groups(problem, rank_of_unit(problem))[0]
    if graph.n_units >= RECURRENT * (int(group.max()) + 1):
        return None
    start, total = _earliest(problem)
    label = group[graph.unit_of_op] * TIMES + np.minimum(TIMES - 1, (start * TIMES / max(1, total)).astype(np.int64))
    label = np.unique(label, return_inverse=True)[1]
    count, source, target = int(label.max()) + 1, label[graph.edge_source], label[graph.consumers]
    edges = coo_matrix((np.ones(len(source), np.int8), (source, target)), (count, count))
    label = connected_components(edges, directed=True, connection="strong")[1][label]  # those of a cycle are one op
    if graph.n_ops < FEWER * (int(label.max()) + 1):
        return None
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


def _on_merged(problem: Problem, merged: Problem, numbers: np.ndarray, found: Placement) -> Placement:
    """Each unit of a merged problem on the device of most of its work under ``found``, in the order of ``found``."""
    unit = merged.graph.unit_of_op[numbers]
    work = np.zeros((problem.topology.n_devices, merged.graph.n_units))
    time = problem.costs.device_op_ns[found.devices, np.arange(len(numbers))]
    np.add.at(work, (found.devices, unit), np.maximum(time, 0) + 1.0)
    work[~choices(merged, hosts=True)] = -1.0
    return Placement.of_units(merged, work.argmax(axis=0).astype(np.int32))
