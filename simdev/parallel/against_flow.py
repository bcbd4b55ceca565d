"""Ops that spoil a pipeline: on a later stage, but read by an earlier one.

A stage of 1F1B may start a microbatch only when it has finished an earlier one (R10). If an op of the forward pass
stands on a later stage than one of its readers, the earlier stage waits for the later stage's limit, which is narrower,
and the pipeline runs with fewer microbatches under way. Such ops are often those that belong to no layer of the model
(masks, positions).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simdev.problem.costs import FREE_KINDS
from simdev.problem.graph import PHASES
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.sim.unroll import stage_devices


@dataclass(frozen=True)
class AgainstFlow:
    """``op`` on pipeline stage ``stage`` is read by ``reader`` on stage ``reader_stage``, against the flow of
    ``phase``."""

    op: str
    layer: str
    phase: str
    stage: int
    reader: str
    reader_stage: int


def ops_against_flow(problem: Problem, placement: Placement, stages: tuple[int, ...]) -> list[AgainstFlow]:
    """One entry for each op that sends data to an earlier stage in the forward pass, or to a later one in the backward
    pass; ``stages`` are device numbers in pipeline order."""
    graph = problem.graph
    place = np.full(problem.topology.n_devices, -1)
    place[list(stages)] = np.arange(len(stages))
    stage = place[stage_devices(placement)]
    free = np.array([kind in FREE_KINDS for kind in graph.kinds])[graph.op_kind]
    source, target = graph.edge_source, graph.consumers
    both = (
        (stage[source] >= 0) & (stage[target] >= 0) & ~free[source] & (graph.op_phase[source] == graph.op_phase[target])
    )
    forward = both & (graph.op_phase[source] == 0) & (stage[source] > stage[target])
    backward = both & (graph.op_phase[source] == 1) & (stage[source] < stage[target])
    edges = np.flatnonzero(forward | backward)
    _, first = np.unique(source[edges], return_index=True)
    return [
        AgainstFlow(
            graph.op_names[source[edge]],
            graph.layers[graph.op_layer[source[edge]]],
            PHASES[graph.op_phase[source[edge]]],
            int(stage[source[edge]]),
            graph.op_names[target[edge]],
            int(stage[target[edge]]),
        )
        for edge in edges[np.sort(first)]
    ]
