"""Multilevel search: late acceptance on merged graphs, from coarse to fine, before the graph itself."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simdev.analysis.coarsen import coarse_problem, contract
from simdev.baselines._late import LateWalk, best_start, is_compiled
from simdev.baselines._members import constructed
from simdev.baselines._search import starts as simple_starts
from simdev.baselines._units import HUGE, choices
from simdev.placers.placer import placer
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem

LEVELS = (150, 500, 1500)  # clusters of each level, where the graph can be merged to so few
FEWER = 1.25  # times as many ops as the level before it has each level, and so has the graph
SHARE = 8 / 3  # all levels get one part in so many of the seconds that are left


@placer(
    "multilevel",
    version=1,
    family="search",
    searches=True,
    defaults={"moves": 15},
    source="multilevel partitioning: Karypis, Kumar, SIAM Journal on Scientific Computing 20(1), 1998; the refinement "
    "is late acceptance hill climbing: Burke, Bykov, European Journal of Operational Research 258(1), 2017",
)
def multilevel(problem, *, rng, budget, moves):
    """Search on merged graphs by the moves of ``late-acceptance``, from coarse to fine, and then on the graph.

    The start is the best of the constructive placements. On each level, ops that depend on one another are merged to
    clusters, 150, 500 and 1500 if the graph allows it; a level that would hardly be finer than the one before it is
    left out. A cluster begins on the device of most of its work; on the first level, the best of the constructive
    placements begins. The search on a level is that of ``late-acceptance`` in a simulation of the merged graph. All
    levels together get ``moves`` times as many moves as the budget has evaluations left and, if it has seconds, at most
    three eighths of those. The best placement of a level is where the next one begins; that of the last level is
    simulated on the graph, where ``late-acceptance`` spends what is left of the budget.

    Departures from Karypis and Kumar: each level is merged from the whole graph, so that its clusters need not lie
    inside those of a coarser level; the first placement is that of another placer, and is not found on the coarsest
    graph. NMT and GNMT gain nothing by it: merging mixes the layers and the time steps of a recurrent network.

    A simulation of a merged graph is a model of the step, as the loads of ``dp`` are: it is no evaluation of the
    budget, and takes processor seconds like all that a placer computes. Where ``late-acceptance`` has no compiled code
    (other rules than ``fifo`` and ``priority``, devices of several slots, throughput), there are no levels.
    """
    given = list(constructed(problem, rng, budget.microbatches)) if budget.open else []
    begin = best_start(problem, budget, given)
    if begin is None:
        return Placement.of_units(problem, simple_starts(problem, choices(problem))[0])
    found = given
    levels = list(_levels(problem)) if is_compiled(problem, budget) else []
    for merged, numbers in levels:
        apart = budget.apart(merged, moves * budget.left / len(levels), len(levels) * SHARE)
        start = best_start(merged, apart, (_merged(problem, merged, numbers, one) for one in found))
        if start is None:
            break
        coarse = LateWalk(merged, apart, rng, *start).run()
        priority = None if coarse.priority is None else coarse.priority[numbers]
        found = [Placement(coarse.devices[numbers], priority)]
    finer = best_start(problem, budget, found) if found is not given else None
    if finer is not None and finer[0] < begin[0]:
        begin = finer
    return LateWalk(problem, budget, rng, *begin).run()


def _levels(problem: Problem) -> Iterator[tuple[Problem, np.ndarray]]:
    """The problem of each level, and int ``(n,)``: the op in it of each op."""
    durations = problem.costs.device_op_ns
    weight = np.where(durations >= 0, durations, HUGE).min(axis=0).astype(float)
    before = 0.0
    for count in LEVELS:
        clusters = contract(problem.graph, weight, count)
        ops = int(clusters.max()) + 1
        if before * FEWER <= ops <= problem.graph.n_ops / FEWER:
            before = ops
            yield coarse_problem(problem, clusters)


def _merged(problem: Problem, merged: Problem, numbers: np.ndarray, found: Placement) -> Placement:
    """Each unit of a merged problem on the device of most of its work under ``found``, in the order of ``found``."""
    unit = merged.graph.unit_of_op[numbers]
    work = np.zeros((problem.topology.n_devices, merged.graph.n_units))
    time = problem.costs.device_op_ns[found.devices, np.arange(len(numbers))]
    np.add.at(work, (found.devices, unit), np.maximum(time, 0) + 1.0)
    work[~choices(merged, hosts=True)] = -1.0
    return Placement.of_units(merged, work.argmax(axis=0).astype(np.int32))
