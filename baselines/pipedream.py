"""PipeDream's planner: pipeline stages, each on one or several devices, with the slowest stage as fast as possible."""

from __future__ import annotations

import numpy as np

from simdev.baselines._units import copyable
from simdev.errors import Unsupported
from simdev.exact.contract import contract
from simdev.exact.merge import merge_cheapest, merge_dominated
from simdev.exact.pipedream import Profile, plan
from simdev.exact.training import alike_accelerators, load_of
from simdev.placers.placer import placer
from simdev.problem.placement import Placement

LAYERS = 400  # limit of layers, because the planner's work grows with the square of its states


@placer(
    "pipedream",
    version=2,
    family="exact",
    memory_aware=False,
    defaults={"replicas": True},
    source="Narayanan et al., SOSP 2019, section 3.1",
)
def pipedream(problem, *, rng, budget, replicas):
    """Place the pipeline of PipeDream's planner. Stages have replicas if the budget's score is the steady time of
    microbatches and ``replicas`` is true; for the time of one step, the pipeline is straight.

    A stage costs the larger of its time and its transfers. All accelerators are assumed to be joined by the slowest of
    their links. The replicas of a stage exchange gradients once for each microbatch in the paper, and once for all
    microbatches of a step here, so each microbatch pays its share. The planner's memory rule (off by default there)
    counts weights that are stashed for each minibatch in flight; here there are none, so memory is ignored. Larger
    graphs are merged to 400 layers first. What the backward phase changes in place has no copies (R10): it is on the
    first device of its stage. The seed has no effect.
    """
    accelerators = alike_accelerators(problem)
    pairs = [(a, b) for a in accelerators for b in accelerators if a != b]
    bandwidth = min((int(problem.topology.pair_bytes_per_s[a, b]) for a, b in pairs), default=1)
    load = load_of(problem, accelerators)
    if load.cpus:
        raise Unsupported("pipedream knows no stage on the host, but some op has a kernel only there")
    classes = merge_cheapest(merge_dominated(contract(load)), LAYERS)
    replicas = replicas and budget.microbatches > 0
    profile = _profile(problem, classes, max(1, budget.microbatches))
    most = len(accelerators) if replicas else min(len(accelerators), classes.n_classes)
    found = min(
        (plan(profile, [workers], [bandwidth], replicate=replicas) for workers in range(1, most + 1)),
        key=lambda plan: plan.seconds,
    )
    device = np.zeros(classes.n_classes, np.int32)
    replica_of, used = np.arange(problem.topology.n_devices), 0
    for stage in found.stages:
        team = accelerators[used : used + stage.replicas]
        device[[layer - 1 for layer in stage.layers if layer]] = team[0]
        replica_of[team] = team[0]
        used += stage.replicas
    devices = device[classes.class_of]
    if used == len(found.stages):
        return Placement(devices)
    return Placement(devices, replica_of=replica_of, replicated=copyable(problem))


def _profile(problem, classes, microbatches: int) -> Profile:
    """The classes as layers after a common source, because the planner starts from one layer. A layer's parameter bytes
    are its share of the gradients that each microbatch pays for."""
    graph = problem.graph
    made, read = classes.class_of[graph.edge_source], classes.class_of[graph.consumers]
    forward = graph.op_phase[graph.consumers] == 0
    sent = np.unique(graph.edge_tensor[(made != read) & forward])
    activation = np.bincount(classes.class_of[graph.tensor_producer[sent]], graph.tensor_bytes[sent], classes.n_classes)
    into = (graph.op_phase[graph.edge_source] < 2) & (graph.op_phase[graph.consumers] == 2)
    gradient = np.unique(graph.edge_tensor[into & ~graph.tensor_persistent[graph.edge_tensor]])
    maker = classes.class_of[graph.tensor_producer[gradient]]
    summed = np.bincount(maker, graph.tensor_bytes[gradient] / microbatches, classes.n_classes)
    first = frozenset({0})
    return Profile(
        name=graph.name,
        layers=tuple(str(number) for number in range(classes.n_classes + 1)),
        seconds=np.concatenate([[0.0], classes.accelerator_time]) / 1e9,
        activation=np.concatenate([[0.0], activation]),
        parameter=np.concatenate([[0.0], summed]),
        predecessors=(frozenset(), *(frozenset(p + 1 for p in before) or first for before in classes.predecessors)),
    )
