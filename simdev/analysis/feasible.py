"""Whether a problem has a placement at all."""

from __future__ import annotations

import numpy as np

from simdev.errors import Infeasible
from simdev.problem.graph import ComputationGraph
from simdev.problem.problem import Problem


def check_feasible(problem: Problem) -> None:
    """Raise :class:`Infeasible`, which names the ops and the memories, if it is certain that no placement exists.

    Ops that must share a device need a device with kernels for all of them and memory for their persistent bytes. And
    the ops that only certain devices support must fit in the memories of these devices together.
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
