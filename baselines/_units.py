"""Facts about placement units that placers need: allowed devices, times, memory, and traffic between units."""

from __future__ import annotations

import numpy as np

from simdev.errors import Unsupported
from simdev.problem.problem import Problem

HUGE = np.iinfo(np.int64).max // 4
FEW_UNITS = 20  # of a problem whose placements can be listed,
FEW_OPS = 256  # with so many ops at most,
FEW = 1 << 14  # so many at most,
FEW_BEGUN = 1 << 17  # and so many while some units have no device


def choices(problem: Problem, *, hosts: bool = False) -> np.ndarray:
    """bool ``(D, units)``: the devices where each unit may go.

    These are the accelerators that support the unit. Hosts are included if ``hosts`` is true or no accelerator supports
    the unit. All devices that remain can reach one another, so any choice is a valid placement. Raises
    :class:`Unsupported` if no device remains for a unit.
    """
    supported = problem.unit_op_ns >= 0
    for group in _mutually_reachable(problem):
        allowed = supported & group[:, None]
        if not hosts:
            accelerator = np.zeros(len(group), bool)
            accelerator[list(problem.topology.accelerators)] = True
            served = (allowed & accelerator[:, None]).any(axis=0)
            allowed &= accelerator[:, None] | ~served
        if allowed.any(axis=0).all():
            return allowed
    raise Unsupported("no set of devices that reach one another supports every op")


def _mutually_reachable(problem: Problem):
    """Sets of devices in which every pair has a route, bool ``(D,)`` each, largest first.

    A set is grown greedily from each device.
    """
    routed = problem.costs.pair_class >= 0
    linked = routed & routed.T | np.eye(len(routed), dtype=bool)
    groups = {}
    for seed in range(len(linked)):
        group = np.zeros(len(linked), bool)
        group[seed] = True
        for device in range(len(linked)):
            group[device] |= linked[device, group].all()
        groups[group.tobytes()] = group
    return sorted(groups.values(), key=lambda group: -group.sum())


def used_devices(allowed: np.ndarray) -> np.ndarray:
    """int ``(k,)``: the devices that may take at least one unit."""
    return np.flatnonzero(allowed.any(axis=1))


def fastest_ns(problem: Problem) -> np.ndarray:
    """int64 ``(units,)``: the duration of each unit on its fastest device, summed over its ops, ns."""
    durations = problem.unit_op_ns
    return np.where(durations >= 0, durations, HUGE).min(axis=0)


def capacities(problem: Problem) -> np.ndarray:
    """int64 ``(D,)``: memory of each device, bytes."""
    return np.array([device.kind.memory_bytes for device in problem.topology.devices], np.int64)


def fitting_placements(problem: Problem, allowed: np.ndarray) -> np.ndarray | None:
    """int32 ``(k, units)``: all unit devices within ``allowed`` whose persistent bytes fit in memory. None if the
    problem has more than :data:`FEW_UNITS` units or :data:`FEW_OPS` ops, or more such placements than :data:`FEW`."""
    if problem.graph.n_units > FEW_UNITS or problem.graph.n_ops > FEW_OPS:
        return None
    held = problem.unit_persistent_bytes
    every, room = np.zeros((1, len(held)), np.int32), capacities(problem)[None]
    for unit in np.argsort(-held, kind="stable").tolist():  # large ones first, because few placements of them fit
        devices = np.flatnonzero(allowed[:, unit])
        every, room = np.repeat(every, len(devices), axis=0), np.repeat(room, len(devices), axis=0)
        every[:, unit] = np.tile(devices, len(every) // len(devices))
        room[np.arange(len(room)), every[:, unit]] -= held[unit]
        fits = (room >= 0).all(axis=1)
        every, room = every[fits], room[fits]
        if len(every) > FEW_BEGUN:
            return None
    return every if len(every) <= FEW else None


def granularities(problem: Problem) -> np.ndarray:
    """int64 ``(D,)``: allocation granularity of each device, bytes."""
    return np.array([device.kind.granularity for device in problem.topology.devices], np.int64)


def unit_tensor_edges(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(tensor, source, target)``, each int ``(e,)``: tensors that unit ``source`` makes and another unit reads.

    There is one entry per tensor and reading unit, because a tensor is sent to each device only once.
    """
    graph = problem.graph
    tensor = graph.edge_tensor.astype(np.int64)
    target = graph.unit_of_op[graph.consumers].astype(np.int64)
    key = np.unique(tensor * graph.n_units + target)
    tensor, target = key // graph.n_units, key % graph.n_units
    source = graph.unit_of_op[graph.tensor_producer[tensor]].astype(np.int64)
    apart = source != target
    return tensor[apart], source[apart], target[apart]


def unit_adjacency(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The undirected traffic graph between units as CSR: ``(ptr, neighbour, bytes)``, int64; bytes are at least 1."""
    n = problem.graph.n_units
    tensor, source, target = unit_tensor_edges(problem)
    ptr, neighbour, total = adjacency(n, source, target, problem.graph.tensor_bytes[tensor])
    return ptr, neighbour, np.maximum(total, 1)


def adjacency(
    count: int, source: np.ndarray, target: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The undirected graph of ``count`` nodes as CSR: ``(ptr, neighbour, weight)``, int64. Weights of edges between the
    same two nodes are added."""
    key = np.concatenate([source * count + target, target * count + source])
    pairs, inverse = np.unique(key, return_inverse=True)
    total = np.zeros(len(pairs), np.int64)
    np.add.at(total, inverse, np.concatenate([weight, weight]))
    return np.searchsorted(pairs // max(1, count), np.arange(count + 1)), pairs % max(1, count), total


def move_to_allowed(problem: Problem, unit_devices: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Move each unit whose device is not allowed to the allowed device with the least work so far."""
    devices = np.array(unit_devices, np.int32)
    units = np.arange(len(devices))
    misplaced = np.flatnonzero(~allowed[devices, units])
    if not len(misplaced):
        return devices
    load = np.zeros(len(allowed), np.int64)
    settled = allowed[devices, units]
    np.add.at(load, devices[settled], problem.unit_op_ns[devices[settled], units[settled]])
    for unit in misplaced:
        finish = np.where(allowed[:, unit], load + problem.unit_op_ns[:, unit], HUGE)
        devices[unit] = int(np.argmin(finish))
        load[devices[unit]] = finish[devices[unit]]
    return devices


def shrunk(weights: np.ndarray, largest_total: int = 1 << 30) -> np.ndarray:
    """Positive whole numbers in proportion to ``weights``, with a sum of about ``largest_total`` at most.

    METIS and KaHIP add weights in 32 bits; Scotch 7.0 puts everything in one part if the sum of weights exceeds them.
    """
    scale = min(1.0, largest_total / max(1, int(weights.sum())))
    return np.maximum(1, (weights * scale).astype(np.int64))


def copyable(problem: Problem) -> np.ndarray | None:
    """Which ops may have copies (R10), as :class:`simdev.Placement` takes it: None if all may."""
    fixed = problem.graph.updated_in_backward
    return ~fixed if fixed.any() else None
