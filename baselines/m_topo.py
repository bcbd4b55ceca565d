"""m-TOPO (Jeon et al. 2020, "Baechi"): fill the devices in order, with ops in topological order."""

from __future__ import annotations

import numpy as np

from simdev.baselines._list import follow_forward, tables
from simdev.baselines._units import choices, used_devices
from simdev.placers.placer import placer
from simdev.problem.placement import Placement


@placer(
    "m-topo",
    version=1,
    family="list",
    source="Jeon et al., Baechi: Fast Device Placement of Machine Learning Graphs, SoCC 2020, section 3.2.1",
)
def m_topo(problem, *, rng, budget):
    """Fill each device with forward ops, in topological order, up to a cap.

    The cap is the total memory over the number of devices, plus the memory of the largest op. Co-placed ops are placed
    together, and gradients follow their ops (as in ``m-etf``). An op's memory is its outputs; a parameter's memory
    includes its persistent bytes and gradient; a parameter of several readers joins the first. The cap balances memory;
    it is not the device's capacity.
    """
    graph, table = problem.graph, tables(problem, forward_only=True)
    devices = used_devices(table.allowed)
    unit_bytes, op_bytes = _memory(graph, table)
    limit = cap(unit_bytes, op_bytes, len(devices))
    device_of, filled = np.full(len(unit_bytes), -1), np.zeros(len(table.allowed), np.int64)
    current = 0
    for op in np.flatnonzero(table.scope).tolist():
        unit = table.unit[op]
        if device_of[unit] < 0:
            if filled[devices[current]] + unit_bytes[unit] > limit and current + 1 < len(devices):
                current += 1
            here = devices[current]
            device_of[unit] = here if table.allowed[here, unit] else np.argmax(table.allowed[:, unit])
            filled[device_of[unit]] += unit_bytes[unit]
        sources = table.producer[graph.inputs[graph.input_ptr[op] : graph.input_ptr[op + 1]]]
        for tied in table.unit[sources[table.lazy[sources]]].tolist():
            if device_of[tied] < 0 and table.allowed[device_of[unit], tied]:
                device_of[tied] = device_of[unit]
                filled[device_of[unit]] += unit_bytes[tied]
    return Placement.of_units(problem, follow_forward(problem, device_of[table.label], choices(problem)))


def cap(unit_bytes: np.ndarray, op_bytes: np.ndarray, k: int) -> int:
    """Bytes to which m-TOPO fills each of ``k`` devices."""
    return int(unit_bytes.sum()) // k + int(op_bytes.max(initial=0))


def _memory(graph, table):
    """Bytes of each unit of the table, and of each op that is in scope or a source, int64."""
    op_bytes = graph.op_persistent_bytes.copy()
    np.add.at(op_bytes, graph.tensor_producer, table.home_size)
    op_bytes[~(table.scope | table.lazy)] = 0
    unit_bytes = table.unit_bytes.copy()
    outputs = (table.scope | table.lazy)[graph.tensor_producer]
    np.add.at(unit_bytes, table.unit[graph.tensor_producer[outputs]], table.home_size[outputs])
    return unit_bytes, op_bytes
