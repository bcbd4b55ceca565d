"""Scotch: static mapping of the graph onto all devices, hosts included; a baseline since Mirhoseini et al. 2017."""

from __future__ import annotations

import numpy as np

from simdev.baselines._scotch import byte_costs, map_graph
from simdev.baselines._units import choices, fastest_ns, move_to_allowed, unit_adjacency, used_devices
from simdev.placers.placer import placer
from simdev.problem.placement import Placement


@placer(
    "scotch",
    version=1,
    family="partition",
    memory_aware=False,
    needs=("pyscotch",),
    source="Pellegrini and Roman 1996; as a device placement baseline: Mirhoseini et al. 2017, section 4.2",
)
def scotch(problem, *, rng, budget):
    """Map the graph with Scotch: a vertex per unit, and an edge per pair of units that exchange bytes.

    A vertex weighs the time of its unit on the fastest device, an edge the bytes between its units. Target processors
    are weighted by speed, and their distance is the time that a byte takes between them. Scotch has one weight per
    vertex, so a device's speed is its mean over the graph, and memory is ignored. Units that Scotch puts where they
    have no kernel are moved to the least loaded device that has one.
    """
    allowed = choices(problem, hosts=True)
    devices = used_devices(allowed)
    weights = fastest_ns(problem)
    if len(devices) == 1:
        return Placement.of_units(problem, np.full(len(weights), devices[0]))
    mapped = map_graph(
        unit_adjacency(problem), weights, _speeds(problem, devices, weights), byte_costs(problem, devices), rng
    )
    return Placement.of_units(problem, move_to_allowed(problem, devices[mapped], allowed))


def _speeds(problem, devices, fastest):
    """Work done per time on each device, over the units that it supports; 1 is the fastest device of each unit."""
    durations = problem.unit_op_ns[devices]
    supported = durations >= 0
    return (supported * fastest).sum(axis=1) / np.maximum(1, np.where(supported, durations, 0).sum(axis=1))
