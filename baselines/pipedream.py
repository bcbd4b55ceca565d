"""PipeDream's planner without replicas: one stage for each device, with the slowest stage as fast as possible."""

from __future__ import annotations

import numpy as np

from simdev.errors import Unsupported
from simdev.exact.contract import contract
from simdev.exact.merge import merge_cheapest, merge_dominated
from simdev.exact.pipedream import Profile, plan
from simdev.exact.training import alike_accelerators, load_of
from simdev.placers.placer import placer
from simdev.problem.placement import Placement

LAYERS = 400  # limit of layers, because the planner's work grows with the square of its states


@placer("pipedream", version=1, family="exact", memory_aware=False, source="Narayanan et al., SOSP 2019, section 3.1")
def pipedream(problem, *, rng, budget):
    """Place the straight pipeline of PipeDream's planner; a placement has no replicas, so its stages have none.

    A stage costs the larger of its time and its transfers. All accelerators are assumed to be joined by the slowest of
    their links. The planner's memory rule (off by default there) concerns several minibatches in flight; a placement
    has one, so memory is ignored. Larger graphs are merged to 400 layers first. The seed has no effect.
    """
    accelerators = alike_accelerators(problem)
    pairs = [(a, b) for a in accelerators for b in accelerators if a != b]
    bandwidth = min((int(problem.topology.pair_bytes_per_s[a, b]) for a, b in pairs), default=1)
    load = load_of(problem, accelerators)
    if load.cpus:
        raise Unsupported("pipedream knows no stage on the host, but some op has a kernel only there")
    classes = merge_cheapest(merge_dominated(contract(load)), LAYERS)
    found = min(
        (
            plan(_profile(problem, classes), [workers], [bandwidth], replicate=False)
            for workers in range(1, min(len(accelerators), classes.n_classes) + 1)
        ),
        key=lambda plan: plan.seconds,
    )
    device = np.zeros(classes.n_classes, np.int32)
    for number, stage in enumerate(found.stages):
        device[[layer - 1 for layer in stage.layers if layer]] = accelerators[number]
    return Placement(device[classes.class_of])


def _profile(problem, classes) -> Profile:
    """The classes as layers after a common source, because the planner starts from one layer."""
    graph = problem.graph
    made, read = classes.class_of[graph.edge_source], classes.class_of[graph.consumers]
    forward = graph.op_phase[graph.consumers] == 0
    sent = np.unique(graph.edge_tensor[(made != read) & forward])
    activation = np.bincount(classes.class_of[graph.tensor_producer[sent]], graph.tensor_bytes[sent], classes.n_classes)
    first = frozenset({0})
    return Profile(
        name=graph.name,
        layers=tuple(str(number) for number in range(classes.n_classes + 1)),
        seconds=np.concatenate([[0.0], classes.accelerator_time]) / 1e9,
        activation=np.concatenate([[0.0], activation]),
        parameter=np.concatenate([[0.0], classes.size]),
        predecessors=(frozenset(), *(frozenset(p + 1 for p in before) or first for before in classes.predecessors)),
    )
