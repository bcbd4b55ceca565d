"""A placement problem as a max-load problem: forward ops in order, each with its backward and update ops."""

from __future__ import annotations

import numpy as np

from simdev.errors import Unsupported
from simdev.exact.load import LoadProblem
from simdev.problem.costs import FREE_KINDS
from simdev.problem.problem import Problem


def alike_accelerators(problem: Problem) -> list[int]:
    """The accelerators that the model may use: the largest set of one kind that reach one another.

    The model has only one kind of accelerator. Raises :class:`Unsupported` if there is no accelerator.
    """
    return reaching(problem, max(accelerators_by_kind(problem), key=len))


def accelerators_by_kind(problem: Problem) -> list[list[int]]:
    """The accelerators of each kind. Raises :class:`Unsupported` if there is none."""
    kinds: dict[int, list[int]] = {}
    for device in problem.topology.accelerators:
        kinds.setdefault(int(problem.costs.device_row[device]), []).append(device)
    if not kinds:
        raise Unsupported(f"{problem.topology.name} has no accelerator")
    return list(kinds.values())


def reaching(problem: Problem, alike: list[int]) -> list[int]:
    """Those of the accelerators ``alike`` that the first one reaches. Raises :class:`Unsupported` if they do not all
    reach one another."""
    routed = problem.costs.pair_class >= 0
    reached = [
        device for device in alike if device == alike[0] or (routed[alike[0], device] and routed[device, alike[0]])
    ]
    if not all(routed[a, b] for a in reached for b in reached if a != b):
        raise Unsupported(f"the accelerators of {problem.topology.name} do not all reach one another")
    return reached


def load_of(problem: Problem, accelerators: list[int], *, memory_share: float = 1.0) -> LoadProblem:
    """The max-load problem of a training step, times in ns, with one node per op.

    There are CPU cores only if an accelerator kernel is missing. A tensor costs its transfer time averaged over the
    pairs of ``accelerators``. An op's size is its persistent bytes and, for a forward op, its outputs that backward ops
    read (they live from forward to backward); ``memory_share`` of an accelerator's memory is the limit of the sum.
    Backward and update ops join the class of a forward op (:func:`anchors`), like colour classes in the paper.
    """
    graph, costs = problem.graph, problem.costs
    times = costs.device_op_ns
    host = problem.topology.host
    first = times[accelerators[0]]
    classes = [costs.pair_class[a, b] for a in accelerators for b in accelerators if a != b]
    transfer = costs.transfer_ns[classes].mean(axis=0) if classes else np.zeros(graph.n_tensors)
    group = anchors(problem)
    unsupported = np.isin(group, group[first < 0])
    if unsupported.any() and (host < 0 or (times[host, unsupported] < 0).any()):
        raise Unsupported("some ops that belong together have a kernel neither on an accelerator nor on the host")
    kept = np.zeros(graph.n_tensors, bool)
    late = graph.op_phase[graph.consumers] > 0
    kept[graph.edge_tensor[late]] = True
    kept &= (graph.op_phase[graph.tensor_producer] == 0) & ~graph.tensor_persistent
    saved = np.bincount(graph.tensor_producer[kept], graph.tensor_bytes[kept], graph.n_ops)
    return LoadProblem(
        name=graph.name,
        accelerators=len(accelerators),
        cpus=int(unsupported.any()),
        memory=float(problem.topology.memory_bytes[accelerators].min()) * memory_share,
        accelerator_time=np.where(first < 0, np.inf, first).astype(float),
        cpu_time=(np.where(times[host] < 0, np.inf, times[host]) if host >= 0 else np.full(graph.n_ops, np.inf)).astype(
            float
        ),
        size=(graph.op_persistent_bytes + saved).astype(float),
        backward=graph.op_phase > 0,
        group=group,
        tensor_producer=graph.tensor_producer.astype(np.int64),
        tensor_cost=transfer.astype(float),
        consumer_ptr=graph.consumer_ptr.astype(np.int64),
        consumers=graph.consumers.astype(np.int64),
        node_ids=graph.op_names,
    )


def anchors(problem: Problem) -> np.ndarray:
    """int64 ``(n,)``: the class of each op.

    Colocated ops share a class, and so do a backward op and its forward op. The forward op is the last op of the same
    layer whose output the backward op reads; else that of a backward op of the layer that it reads; else that of the
    last op that it reads. Data that exists before the step (parameters, inputs) joins its first reader.
    """
    graph = problem.graph
    parent = list(range(graph.n_ops))

    def find(op):
        while parent[op] != op:
            parent[op] = parent[parent[op]]
            op = parent[op]
        return op

    free = np.array([kind in FREE_KINDS for kind in graph.kinds])[graph.op_kind]
    phase, layer = graph.op_phase.tolist(), graph.op_layer.tolist()
    unit = graph.unit_of_op.tolist()
    first_of_unit: dict[int, int] = {}
    for op in range(graph.n_ops):
        parent[find(op)] = find(first_of_unit.setdefault(unit[op], op))
    # A parameter's gradient is on the device of the parameter, which is the device of its first reader.
    settled = np.zeros(graph.n_units, bool)
    settled[graph.unit_of_op[graph.op_phase == 0]] = True
    sources = graph.tensor_producer[graph.inputs].tolist()
    ptr = graph.input_ptr.tolist()
    anchor = list(range(graph.n_ops))
    last_forward = max((op for op in range(graph.n_ops) if phase[op] == 0 and not free[op]), default=0)
    for op in range(graph.n_ops):
        if phase[op] == 0:
            continue
        read = [source for source in sources[ptr[op] : ptr[op + 1]] if not free[source]]
        near = [source for source in read if layer[source] == layer[op]]
        made = [source for source in near if phase[source] == 0] or near or read
        # A forward op is its own anchor; the anchor of an earlier backward op is already known.
        anchor[op] = max((anchor[source] for source in made), default=last_forward)
        if phase[op] == 1 and not settled[unit[op]]:
            parent[find(op)] = find(anchor[op])
    reader: dict[int, int] = {}
    for source, target in zip(graph.edge_source.tolist(), graph.consumers.tolist(), strict=True):
        if free[source] and not free[target] and phase[target] == 0:
            reader[source] = min(target, reader.get(source, target))
    for source, target in reader.items():
        parent[find(source)] = find(target)
    return np.array([find(op) for op in range(graph.n_ops)])
