"""The maximum-load model of Tarnawski et al. (NeurIPS 2020): ``k`` equal accelerators and ``l`` equal CPU cores.

An accelerator's load is the time of its nodes plus the cost of every tensor that crosses its border; each tensor counts
once in either direction. A CPU core's load is the time of its nodes alone. The largest load is the time between two
samples of a saturated pipeline. Times are floats in the unit of the input, and inf for a node without a kernel.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from simdev.errors import InvalidInput
from simdev.graphs.importers.reading import Fields, json_object, read_input


@dataclass(frozen=True, eq=False)
class LoadProblem:
    """Put ``n`` nodes on ``accelerators`` + ``cpus`` processors so that the largest load is least.

    Processors are numbered accelerators first. ``memory`` limits the sum of ``size`` on an accelerator.
    ``accelerator_time``, ``cpu_time``, ``size`` float ``(n,)``; ``backward`` bool ``(n,)``; ``group`` int ``(n,)``:
    nodes of equal number share a processor. Tensor ``t`` of cost ``tensor_cost[t]`` is made by ``tensor_producer[t]``
    and read by ``consumers[consumer_ptr[t]:consumer_ptr[t + 1]]``. ``node_ids`` names the nodes in messages, and
    ``file_edges`` int ``(e, 2)`` keeps the edges of a file in its order, which published heuristics follow.
    """

    name: str
    accelerators: int
    cpus: int
    memory: float
    accelerator_time: np.ndarray
    cpu_time: np.ndarray
    size: np.ndarray
    backward: np.ndarray
    group: np.ndarray
    tensor_producer: np.ndarray
    tensor_cost: np.ndarray
    consumer_ptr: np.ndarray
    consumers: np.ndarray
    node_ids: tuple = ()
    file_edges: np.ndarray | None = None

    def __post_init__(self):
        if self.accelerators < 0 or self.cpus < 0 or self.accelerators + self.cpus == 0:
            raise InvalidInput(
                "no accelerator and no CPU core to place on", source=self.name, field="maxFPGAs, maxCPUs"
            )
        if not self.node_ids:
            object.__setattr__(self, "node_ids", tuple(range(self.n_nodes)))
        accelerated = np.isfinite(self.accelerator_time) & (self.accelerators > 0)
        nowhere = np.flatnonzero(~accelerated & ~(np.isfinite(self.cpu_time) & (self.cpus > 0)))
        if len(nowhere):
            raise InvalidInput("no processor supports it", source=self.name, field=f"node {self.node_ids[nowhere[0]]}")

    @property
    def n_nodes(self) -> int:
        return len(self.size)

    @property
    def n_processors(self) -> int:
        return self.accelerators + self.cpus

    @cached_property
    def edges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``(source, target, tensor)`` of each edge, int ``(e,)``."""
        tensor = np.repeat(np.arange(len(self.tensor_cost)), np.diff(self.consumer_ptr))
        return self.tensor_producer[tensor], self.consumers, tensor

    @property
    def given_edges(self) -> np.ndarray:
        """int ``(e, 2)``: source and target of each edge, in the order of the file if there is one."""
        return np.stack(self.edges[:2], axis=1) if self.file_edges is None else self.file_edges

    @cached_property
    def class_of(self) -> np.ndarray:
        """int ``(n,)``: the class of each node; nodes of equal ``group`` get the same number 0, 1, ..."""
        return np.unique(self.group, return_inverse=True)[1]


@dataclass(frozen=True)
class Loads:
    """The loads of a split: ``load``, ``size`` float ``(processors,)``; ``overfull`` lists accelerators over memory."""

    load: np.ndarray
    size: np.ndarray
    overfull: tuple[int, ...]

    @property
    def largest(self) -> float:
        return float(self.load.max())


def processor_loads(problem: LoadProblem, processor: np.ndarray) -> Loads:
    """The loads of a split, ``processor`` int ``(n,)`` (accelerators ``0 .. k-1``, then CPU cores).

    A tensor costs its producer's accelerator once, however many processors read it, and each accelerator that reads it
    once. Raises :class:`InvalidInput` for a processor that does not exist or a separated group.
    """
    processor = np.asarray(processor)
    if processor.shape != (problem.n_nodes,) or processor.min() < 0 or processor.max() >= problem.n_processors:
        raise InvalidInput("expected a processor number per node", source=problem.name, field="split")
    home = np.zeros(problem.class_of.max() + 1, np.int64)
    home[problem.class_of] = processor
    apart = np.flatnonzero(home[problem.class_of] != processor)
    if len(apart):
        raise InvalidInput("is apart from its group", source=problem.name, field=f"node {problem.node_ids[apart[0]]}")
    on_accelerator = processor < problem.accelerators
    time = np.where(on_accelerator, problem.accelerator_time, problem.cpu_time)
    load = np.bincount(processor, time, problem.n_processors)
    size = np.bincount(processor, problem.size, problem.n_processors)
    source, target, tensor = problem.edges
    crossing = processor[source] != processor[target]
    reading = np.unique(tensor[crossing] * problem.n_processors + processor[target[crossing]])
    reader, sent = reading % problem.n_processors, np.unique(tensor[crossing])
    traffic = np.bincount(reader, problem.tensor_cost[reading // problem.n_processors], problem.n_processors)
    traffic += np.bincount(processor[problem.tensor_producer[sent]], problem.tensor_cost[sent], problem.n_processors)
    load[: problem.accelerators] += traffic[: problem.accelerators]
    overfull = np.flatnonzero(size[: problem.accelerators] > problem.memory)
    return Loads(load, size, tuple(overfull.tolist()))


def read_load_problem(path: str | os.PathLike, *, fix_units: bool = False) -> LoadProblem:
    """Read a dnn-partitioning JSON file (msr-fiddle/dnn-partitioning) with its numbers and units unchanged.

    If ``fix_units`` is true, edge costs that are 1000 times too small for the latencies are multiplied by 1000: the
    bytes per unit of cost are 2^31 in the throughput layer graphs and 2^31 / 1000 in all other files. Raises
    :class:`InvalidInput` that names the file and the field.
    """
    document = json_object(read_input(path), path)
    limits = [document.number(key) for key in ("maxFPGAs", "maxCPUs", "maxSizePerFPGA")]
    nodes, edges = document.rows("nodes"), document.rows("edges")
    if not nodes:
        raise document.fail("there is none", "nodes")
    index: dict[float, int] = {}  # by id
    for row, node in enumerate(nodes):
        number = node.number("id")
        if number in index:
            raise node.fail("given twice", "id")
        index[number] = row
    column = {
        "cpuLatency": np.array([node.number("cpuLatency") for node in nodes], float),
        "fpgaLatency": np.array([node.number("fpgaLatency") for node in nodes], float),
        "supportedOnFpga": np.array([node.flag("supportedOnFpga", True) for node in nodes]),
        "size": np.array([node.number("size", 0.0) for node in nodes], float),
        "isBackwardNode": np.array([node.flag("isBackwardNode") for node in nodes]),
    }
    scale = 1000.0 if fix_units and _unit_slip(edges) else 1.0
    cost = np.zeros(len(nodes))
    readers: list[set[int]] = [set() for _ in nodes]
    given = []
    for edge in edges:
        source, target = edge.end("sourceId", index), edge.end("destId", index)
        value = edge.number("cost") * scale
        if readers[source] and abs(cost[source] - value) > 1e-6 * scale:
            raise edge.fail("another cost than its node's other edges", "cost")
        cost[source] = cost[source] if readers[source] else value
        readers[source].add(target)
        given.append((source, target))
    makers = np.array([row for row in range(len(nodes)) if readers[row]], np.int64)
    colours = [node.number("colorClass", f"node {row}") for row, node in enumerate(nodes)]
    numbers = {colour: number for number, colour in enumerate(dict.fromkeys(colours))}
    return LoadProblem(
        name=Path(path).name,
        accelerators=int(limits[0]),
        cpus=int(limits[1]),
        memory=limits[2],
        accelerator_time=np.where(column["supportedOnFpga"], column["fpgaLatency"], np.inf),
        cpu_time=column["cpuLatency"],
        size=column["size"],
        backward=column["isBackwardNode"],
        group=np.array([numbers[colour] for colour in colours]),
        tensor_producer=makers,
        tensor_cost=cost[makers],
        consumer_ptr=np.cumsum([0, *(len(readers[row]) for row in makers)]),
        consumers=np.array([target for row in makers for target in sorted(readers[row])], np.int64),
        node_ids=tuple(index),
        file_edges=np.array(given, np.int64).reshape(-1, 2),
    )


def read_split(path: str | os.PathLike, problem: LoadProblem) -> np.ndarray:
    """int ``(n,)``: the processor of each node in a published split of ``problem``.

    Nodes that the file does not list follow their colour class. Raises :class:`InvalidInput` for a node that does not
    exist or is left without a processor.
    """
    document = json_object(read_input(path), path)
    index = {name: row for row, name in enumerate(problem.node_ids)}
    processor = np.full(problem.n_nodes, -1)
    for key, first in (("fpgas", 0), ("cpus", problem.accelerators)):
        for offset, part in enumerate(document.rows(key)):
            for name in part.items("nodes", []):
                if name not in index:
                    raise part.fail(f"{name!r} is not a node of {problem.name}", "nodes")
                processor[index[name]] = first + offset
    known = np.flatnonzero(processor >= 0)
    home = np.full(int(problem.class_of.max()) + 1, -1)
    home[problem.class_of[known]] = processor[known]
    processor = np.where(processor < 0, home[problem.class_of], processor)
    if (processor < 0).any():
        lost = problem.node_ids[int(np.argmin(processor))]
        raise InvalidInput("is on no processor", source=path, field=f"node {lost}")
    return processor


def _unit_slip(edges: list[Fields]) -> bool:
    rates = [edge.number("size", 0) / edge.number("cost") for edge in edges if edge.number("cost")]
    rates = [rate for rate in rates if rate]
    return bool(rates) and float(np.median(rates)) > 2**31 / 2
