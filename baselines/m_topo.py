"""m-TOPO (Jeon et al. 2020, "Baechi"): fill one device after the other in topological order."""

from __future__ import annotations

import numpy as np

from simdev.baselines._list import follow_forward, tables
from simdev.baselines._units import used_devices
from simdev.placement import Placement
from simdev.placer import placer


@placer(
    "m-topo", version=1, family="list",
    source="Jeon et al., Baechi: Fast Device Placement of Machine Learning Graphs, SoCC 2020, section 3.2.1",
)  # fmt: skip
def m_topo(problem, *, rng, budget):
    """Forward ops in topological order fill each device up to the cap: total memory over the number of devices, plus
    the largest op's. Gradients follow their ops.

    An op's memory is its outputs; a parameter's bytes and gradient count with its first reader, as in Baechi. The cap
    balances memory, it is not the device's capacity.
    """
    graph, table = problem.graph, tables(problem, forward_only=True)
    ops = np.flatnonzero(table.scope)
    devices = used_devices(table.allowed)
    memory, ties = _op_memory(graph, table, ops)
    room = cap(memory[ops], len(devices))
    unit_device = np.full(graph.n_units, -1, np.int64)
    filled, current = np.zeros(len(table.allowed), np.int64), 0
    for op in ops.tolist():
        unit = graph.unit_of_op[op]
        if unit_device[unit] < 0:
            if filled[devices[current]] + memory[op] > room and current + 1 < len(devices):
                current += 1
            here = devices[current]
            unit_device[unit] = here if table.allowed[here, unit] else np.argmax(table.allowed[:, unit])
        device = unit_device[unit]
        filled[device] += memory[op]
        for tied in ties.get(op, ()):
            if unit_device[tied] < 0 and table.allowed[device, tied]:
                unit_device[tied] = device
    return Placement.of_units(problem, follow_forward(problem, unit_device, table.allowed))


def cap(op_memory: np.ndarray, k: int) -> int:
    """Bytes to which m-TOPO fills each of ``k`` devices."""
    return int(op_memory.sum()) // k + int(op_memory.max(initial=0))


def _op_memory(graph, table, ops):
    """Bytes of each op, int64 ``(n,)``, and the units of sources that come with it as their first reader."""
    memory = np.zeros(graph.n_ops, np.int64)
    np.add.at(memory, graph.tensor_producer, table.home_size)
    counted, ties = np.zeros(graph.n_units, bool), {}
    for op in ops.tolist():
        tensors = graph.inputs[graph.input_ptr[op] : graph.input_ptr[op + 1]]
        sources = graph.tensor_producer[tensors]
        sources = sources[table.lazy[sources]]
        ties[op] = [unit for unit in graph.unit_of_op[sources].tolist() if not counted[unit]]
        for unit in {graph.unit_of_op[op], *ties[op]}:
            if not counted[unit]:
                counted[unit] = True
                memory[op] += table.unit_bytes[unit]
        memory[op] += sum(int(memory[source]) for source in sources.tolist() if memory[source] > 0)
        memory[sources] = 0  # a source's own outputs count once, with its first reader
    return memory, ties
