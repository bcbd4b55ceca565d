"""Turns a placement problem into padded arrays over groups for a learned placer, and its actions into placements."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from simdev.analysis.levels import average_transfers, b_level, fastest_durations, t_level
from simdev.baselines._units import choices, used_devices
from simdev.errors import InvalidInput
from simdev.problem.graph import ComputationGraph
from simdev.problem.problem import Problem

KINDS = 32  # hash buckets for op kinds, so that a kind never seen in training has one too
SHAPES = (5, 5)  # outputs and dimensions that the features hold for each op
NUMBERS = 16
FEATURES = NUMBERS + KINDS + SHAPES[0] * SHAPES[1]
KIND_COLUMNS = slice(NUMBERS, NUMBERS + KINDS)
DEVICE_FEATURES = 4
_SHAPE = re.compile(r"\[([0-9,]*)\]")


class GroupedArrays(NamedTuple):
    """What the networks read: a pytree of arrays of ``G`` groups, ``D`` devices and ``E`` edges, padded to buckets.

    ``nodes`` float32 ``(G, FEATURES)``: see :func:`node_features`; ``real`` bool ``(G,)``: False for padding.
    ``allowed`` bool ``(G, D)``: the devices where a group may go (padding: device 0). ``source`` and ``target`` int32
    ``(E,)``: groups that tensors join, sorted by target, then by source (padding: from and to the last row).
    ``edge`` float32 ``(E, 2)``: log of the bytes over a MB, and transfer time over the scale (padding: 0).
    ``edge_real`` bool ``(E,)``. ``devices`` float32 ``(D, DEVICE_FEATURES)``: 1 (0 for padding), the time of all ops
    on the device over the scale, memory over the largest memory, 1 for a host.
    """

    nodes: np.ndarray
    real: np.ndarray
    allowed: np.ndarray
    source: np.ndarray
    target: np.ndarray
    edge: np.ndarray
    edge_real: np.ndarray
    devices: np.ndarray


Arrays = TypeVar("Arrays")  # what a network reads: GroupedArrays, or what another module makes of them
Other = TypeVar("Other")


@dataclass(frozen=True, eq=False)
class GroupedProblem(Generic[Arrays]):
    """A problem whose units are grouped, as arrays for the networks.

    ``group`` int32 ``(units,)``; ``devices`` int32 ``(d,)``: the device numbers that actions 0..d-1 stand for;
    ``fallback`` int32 ``(units,)``: the device of a unit that may not run on the device of its group; ``scale_ns``: the
    unit of step times, which is the time of all ops, each on its fastest device.
    """

    problem: Problem
    group: np.ndarray
    devices: np.ndarray
    allowed: np.ndarray
    fallback: np.ndarray
    scale_ns: int
    inputs: Arrays

    def with_inputs(self, inputs: Other) -> GroupedProblem[Other]:
        """The same problem and groups with other arrays for the networks."""
        return GroupedProblem(
            self.problem, self.group, self.devices, self.allowed, self.fallback, self.scale_ns, inputs
        )

    @property
    def n_groups(self) -> int:
        return int(self.group.max()) + 1

    def placements(self, actions: np.ndarray) -> np.ndarray:
        """int32 ``(k, n)``: the devices of all ops for actions int ``(k, G)`` (padding ignored)."""
        unit_devices = self.devices[np.asarray(actions)[:, self.group]]
        if not self.allowed.all():
            fits = self.allowed[unit_devices, np.arange(len(self.group))]
            unit_devices = np.where(fits, unit_devices, self.fallback)
        return unit_devices[:, self.problem.graph.unit_of_op]

    def rewards(self, step_ns: np.ndarray, overflow_bytes: np.ndarray) -> np.ndarray:
        """float32 ``(k,)``: minus the square root of the step time over the scale.

        A placement that exceeds memory counts as ten times the scale (the papers' large constant), plus a part that
        grows with the overflow, so that a policy can learn which placements fit.
        """
        capacity = float(self.problem.topology.memory_bytes[self.devices].sum())
        failed = 10.0 * (1.0 + np.asarray(overflow_bytes) / max(1.0, capacity))
        time = np.asarray(step_ns) / self.scale_ns
        return -np.sqrt(np.where(np.asarray(overflow_bytes) > 0, np.maximum(time, failed), time)).astype(np.float32)


def group_problem(
    problem: Problem, group: np.ndarray, *, hosts: bool = False, rows: int = 0, columns: int = 8
) -> GroupedProblem[GroupedArrays]:
    """Build the arrays of ``problem`` for ``group`` int ``(units,)``, whose numbers start at 0 and have no gaps.

    The arrays are padded to at least ``rows`` groups and ``columns`` devices. Actions name accelerators; they also name
    hosts if ``hosts`` is true or an op needs one. Raises :class:`Unsupported` if no set of devices that reach one
    another supports every op.
    """
    allowed = choices(problem, hosts=hosts)
    devices = used_devices(allowed).astype(np.int32)
    group = np.asarray(group, np.int32)
    if group.shape != (problem.graph.n_units,):
        raise InvalidInput("expected one group number per placement unit", source=problem.graph.name, field="group")
    count = int(group.max()) + 1
    refused = np.zeros((count, len(devices)), np.int64)
    np.add.at(refused, group, ~allowed[devices].T)
    rows, columns = bucket(max(count, rows)), bucket(len(devices), columns)
    mask = np.zeros((rows, columns), bool)
    mask[:count, : len(devices)] = refused == refused.min(axis=1, keepdims=True)  # whatever most units may
    mask[count:, 0] = True
    speed = np.where(problem.unit_op_ns >= 0, problem.unit_op_ns, np.iinfo(np.int64).max)
    fallback = np.where(allowed, speed, np.iinfo(np.int64).max).argmin(axis=0).astype(np.int32)
    fastest = fastest_durations(problem)
    scale_ns = max(1, int(fastest.sum()))
    source, target, edge = _edges(problem, group, scale_ns)
    length = bucket(len(source), 64)
    nodes = np.zeros((rows, FEATURES), np.float32)
    nodes[:count] = node_features(problem, group, scale_ns)
    inputs = GroupedArrays(
        nodes,
        np.arange(rows) < count,
        mask,
        _padded(source, length, rows - 1),
        _padded(target, length, rows - 1),
        _padded(edge, length, 0),
        np.arange(length) < len(source),
        _padded(_device_features(problem, devices, scale_ns), columns, 0),
    )
    return GroupedProblem(problem, group, devices, allowed, fallback, scale_ns, inputs)


def bucket(count: int, least: int = 16) -> int:
    """The padded size for ``count``: a power of two, so that few programs are compiled."""
    return max(least, 1 << max(0, count - 1).bit_length())


def device_columns(problems: Sequence[Problem], most: int = 0, *, hosts: bool = False) -> int:
    """The number of devices that a policy for these problems can name: ``most``, or as many as they need if it is 0.

    ``hosts`` is that of :func:`group_problem`. Raises :class:`InvalidInput` if they need more than ``most``.
    """
    needed = max(len(used_devices(choices(problem, hosts=hosts))) for problem in problems)
    if most and needed > most:
        raise InvalidInput(f"names {most} devices, and {needed} are there", source="policy")
    return most or bucket(needed, 8)


def node_features(problem: Problem, group: np.ndarray, scale_ns: int) -> np.ndarray:
    """The features of each group, float32 ``(groups, FEATURES)``, scaled to about 0 to 1.

    Columns: 0 share of the time; 1 its square root; 2 log of the bytes sent to other groups; 3 the time to send them
    over the scale; 4 share of persistent bytes; 5 persistent bytes and 6 output bytes over a device's memory; 7 log of
    workspace; 8 the shortest possible time before the group and 9 after it, over the longest path; 10 position in the
    topological order; 11 log of readers, 12 of inputs; 13, 14 shares of backward and update time; 15 log of ops. Then
    the shares of the op kinds, hashed into ``KINDS`` buckets; then the mean over ops of the output shapes: log of
    ``SHAPES[1]`` dimensions of ``SHAPES[0]`` outputs, from the op's signature, or one dimension of the bytes without
    one.
    """
    graph = problem.graph
    count = int(group.max()) + 1
    op_group = group[graph.unit_of_op]
    fastest = fastest_durations(problem).astype(float)

    def total(values, index=op_group):
        return np.bincount(index, values, count)

    time, ops = total(fastest), total(np.ones(graph.n_ops))
    capacity = float(problem.topology.memory_bytes.max())
    tensor = _outgoing(graph, op_group)
    home = op_group[graph.tensor_producer]
    sent = total(graph.tensor_bytes[tensor].astype(float), home[tensor])
    sending = total(average_transfers(problem)[tensor].astype(float), home[tensor])
    held = total(graph.op_persistent_bytes.astype(float))
    made = total(np.where(graph.tensor_persistent, 0.0, graph.tensor_bytes), home)
    durations = fastest_durations(problem)
    longest = max(1.0, float(b_level(graph, durations).max()))
    before, behind = np.full(count, np.inf), np.full(count, np.inf)
    np.minimum.at(before, op_group, t_level(graph, durations) / longest)
    np.minimum.at(behind, op_group, (b_level(graph, durations) - durations) / longest)
    source, target = op_group[graph.edge_source], op_group[graph.consumers]
    apart = source != target
    workspace = total(graph.op_workspace_bytes.astype(float))
    readers, inputs = total(np.ones(apart.sum()), source[apart]), total(np.ones(apart.sum()), target[apart])
    backward, update = (total(fastest * (graph.op_phase == phase)) / np.maximum(time, 1.0) for phase in (1, 2))
    numbers = [
        time / scale_ns, np.sqrt(time / scale_ns), _log(sent), np.minimum(sending / scale_ns, 10.0),
        held / max(1.0, held.sum()), held / capacity, made / capacity, _log(workspace), before, behind,
        total(np.arange(graph.n_ops) / graph.n_ops) / ops, np.log1p(readers) / 10, np.log1p(inputs) / 10, backward,
        update, np.log1p(ops) / 10,
    ]  # fmt: skip
    hashed = np.array([zlib.crc32(kind.encode()) % KINDS for kind in graph.kinds])[graph.op_kind]
    kinds = np.bincount(op_group * KINDS + hashed, minlength=count * KINDS).reshape(count, KINDS) / ops[:, None]
    shapes = _shapes(graph)
    shapes = np.stack([total(column) for column in shapes.T], axis=1) / ops[:, None]
    return np.concatenate([np.stack(numbers, axis=1), kinds, shapes], axis=1).astype(np.float32)


def _log(count):
    return np.log1p(count) / 25  # a GB is 0.83


def _outgoing(graph: ComputationGraph, op_group: np.ndarray) -> np.ndarray:
    """The tensors that another group reads."""
    apart = op_group[graph.edge_source] != op_group[graph.consumers]
    return np.unique(graph.edge_tensor[apart])


def _shapes(graph: ComputationGraph) -> np.ndarray:
    """float ``(n, 25)``: log of the dimensions of up to five outputs of each op, 0 for absent ones."""
    outputs, dimensions = SHAPES
    by_signature = np.zeros((len(graph.signatures), outputs * dimensions))
    known = np.zeros(len(graph.signatures), bool)
    for number, signature in enumerate(graph.signatures):
        _, arrow, made = signature.partition("->")
        found = _SHAPE.findall(made) if arrow else []
        known[number] = bool(found)
        for output, text in enumerate(found[:outputs]):
            sizes = [int(part) for part in text.split(",") if part][:dimensions]
            by_signature[number, output * dimensions : output * dimensions + len(sizes)] = np.log1p(sizes) / 25
    shapes = by_signature[graph.op_signature]
    first = graph.output_ptr[:-1]
    unknown = ~known[graph.op_signature] & (np.diff(graph.output_ptr) > 0)
    shapes[unknown, 0] = _log(graph.tensor_bytes[first[unknown]])
    return shapes


def _edges(problem: Problem, group: np.ndarray, scale_ns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs of groups that tensors join, sorted by target, and their two features; a tensor counts once for a pair."""
    graph = problem.graph
    op_group = group[graph.unit_of_op].astype(np.int64)
    count = int(group.max()) + 1
    key = np.unique(graph.edge_tensor.astype(np.int64) * count + op_group[graph.consumers])
    tensor, target = key // count, key % count
    source = op_group[graph.tensor_producer[tensor]]
    apart = source != target
    pairs, inverse = np.unique(target[apart] * count + source[apart], return_inverse=True)
    size = np.bincount(inverse, graph.tensor_bytes[tensor[apart]], len(pairs))
    time = np.bincount(inverse, average_transfers(problem)[tensor[apart]], len(pairs))
    edge = np.stack([np.log1p(size / 2**20), np.minimum(time / scale_ns, 10.0)], axis=1).astype(np.float32)
    return (pairs % count).astype(np.int32), (pairs // count).astype(np.int32), edge


def _device_features(problem: Problem, devices: np.ndarray, scale_ns: int) -> np.ndarray:
    durations = np.maximum(problem.costs.device_op_ns[devices], 0).sum(axis=1) / scale_ns
    memory = problem.topology.memory_bytes[devices].astype(float)
    host = devices == problem.topology.host
    return np.stack([np.ones(len(devices)), np.log1p(durations), memory / max(1.0, memory.max()), host], axis=1).astype(
        np.float32
    )


def _padded(values: np.ndarray, length: int, fill) -> np.ndarray:
    padded = np.full((length, *values.shape[1:]), fill, values.dtype)
    padded[: len(values)] = values
    return padded
