"""Whether a problem has a placement at all."""

from __future__ import annotations

import numpy as np

from simdev.errors import Infeasible
from simdev.problem.graph import ComputationGraph
from simdev.problem.problem import Problem


def check_feasible(problem: Problem) -> None:
    """Raise :class:`Infeasible`, which names the ops and the memories, if it is certain that no placement exists.

    Ops that must share a device need a device with kernels for all of them, with memory for their persistent bytes and,
    beside those, for the inputs, the outputs and the workspace of each of them while it runs. And the persistent bytes
    of the ops that can only be on certain devices must fit in the memories of these devices together.
    """
    graph, topology = problem.graph, problem.topology
    supported = problem.unit_op_ns >= 0
    for unit in np.flatnonzero(~supported.any(axis=0)):
        raise Infeasible(_contradiction(problem, int(unit)), source=graph.name)
    need, memory = problem.unit_persistent_bytes, topology.memory_bytes
    most = np.where(supported, memory[:, None], -1).max(axis=0)
    for unit in np.flatnonzero(need > most):
        where = [topology.devices[device].name for device in np.flatnonzero(supported[:, unit])]
        raise Infeasible(
            f"{_ops_of(graph, int(unit))} {_size(need[unit])} of persistent bytes: the largest memory among "
            f"{_listed(where)} holds {_size(most[unit])}",
            source=graph.name,
        )
    running = _running_bytes(problem)
    room = supported & (running <= memory[:, None])
    for unit in np.flatnonzero(~room.any(axis=0)):
        device = int(np.argmax(np.where(supported[:, unit], memory - running[:, unit], np.iinfo(np.int64).min)))
        raise Infeasible(
            f"{_ops_of(graph, int(unit))} {_size(running[device, unit])} on {topology.devices[device].name}, with "
            f"inputs, outputs and workspace of the op that needs most: its memory holds {_size(memory[device])}",
            source=graph.name,
        )
    supported = room
    for devices in np.unique(supported, axis=1).T:
        inside = ~supported[~devices].any(axis=0)
        total, held = int(need[inside].sum()), int(memory[devices].sum())
        if total > held:
            where = [topology.devices[device].name for device in np.flatnonzero(devices)]
            raise Infeasible(
                f"{int(inside[graph.unit_of_op].sum())} ops that only {_listed(where)} can run need "
                f"{_size(total)} of persistent bytes: those memories hold {_size(held)} together",
                source=graph.name,
            )


def _running_bytes(problem: Problem) -> np.ndarray:
    """int64 ``(D, units)``: bytes that each device needs at least if it runs a unit (R7): the persistent bytes, and
    what the op of the unit that needs most holds while it runs.

    An input from another unit is there as a copy or at home; at home, a persistent tensor is part of its producer.
    """
    graph, unit = problem.graph, problem.graph.unit_of_op
    reader = np.repeat(np.arange(graph.n_ops), np.diff(graph.input_ptr))
    pairs = np.unique(np.stack([reader, graph.inputs.astype(np.int64)]), axis=1)
    reader, read = pairs[0], pairs[1]
    maker = graph.tensor_producer[read]
    kept_at_home = graph.tensor_persistent[read]
    first = np.ones(len(read), bool)  # of the tensors of its maker; the others may be the same bytes
    first[1:] = (reader[1:] != reader[:-1]) | (maker[1:] != maker[:-1])
    grains = np.array([device.kind.granularity for device in problem.topology.devices], np.int64)
    needed = np.zeros((len(grains), graph.n_units), np.int64)
    for grain in np.unique(grains).tolist():
        size, workspace, kept = (
            -(-count // grain) * grain
            for count in (graph.tensor_bytes, graph.op_workspace_bytes, graph.op_persistent_bytes)
        )
        held = np.where(kept_at_home, np.where(first, np.minimum(size[read], kept[maker]), 0), size[read])
        held[kept_at_home & (unit[maker] == unit[reader])] = 0
        total = workspace.astype(np.int64)
        np.add.at(total, reader, held)
        np.add.at(total, graph.tensor_producer, np.where(graph.tensor_persistent, 0, size))
        most, persistent = np.zeros((2, graph.n_units), np.int64)
        np.maximum.at(most, unit, total)
        np.add.at(persistent, unit, kept)
        needed[grains == grain] = persistent + most
    return needed


def _contradiction(problem: Problem, unit: int) -> str:
    """A sentence that names two or more ops of a unit which no device supports together."""
    graph, topology = problem.graph, problem.topology
    ops = np.flatnonzero(graph.unit_of_op == unit)
    kernels = problem.costs.device_op_ns[:, ops] >= 0
    left, parts = np.ones(topology.n_devices, bool), []
    for number in np.argsort(kernels.sum(axis=0), kind="stable"):
        if (left & kernels[:, number]).sum() < left.sum():
            left &= kernels[:, number]
            where = [topology.devices[device].name for device in np.flatnonzero(kernels[:, number])]
            parts.append(f"{graph.op_names[ops[number]]!r} runs only on {_listed(where)}")
    return f"colocation contradicts itself: {' and '.join(parts)}, and they must share a device"


def _ops_of(graph: ComputationGraph, unit: int) -> str:
    ops = np.flatnonzero(graph.unit_of_op == unit)
    first = repr(graph.op_names[ops[0]])
    return f"op {first} needs" if len(ops) == 1 else f"{len(ops)} ops that share a device ({first} first) need"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _size(count: int) -> str:
    return f"{count / 2**30:,.4g} GiB" if count >= 2**20 else f"{count} bytes"
