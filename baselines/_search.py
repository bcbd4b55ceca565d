"""Parts that searching placers share: starts, groups of units that move together, and the best placement so far."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simdev.baselines._list import follow_forward, tables
from simdev.baselines._units import HUGE, choices, fastest_ns, used_devices
from simdev.placers.budget import Budget
from simdev.placers.score import Score
from simdev.problem.problem import Problem

HEAVY, BRIEF = 0.05, 0.05  # see with_spacious_hosts()
PARTS = 8  # parts of a group, in topological order
LEAST = 0.002  # share of all work below which a group is not divided
WEIGHT = 1 << 20  # bytes from which on a tensor as large as a parameter of its layer is taken for a gradient of it


class SearchState(NamedTuple):
    """A placement in the search: unit devices int32 ``(units,)``, the biases of the keys int64 ``(n,)`` ns (see
    :mod:`simdev.baselines._order`), and the score."""

    devices: np.ndarray
    bias: np.ndarray
    score: Score


class Candidate(NamedTuple):
    """A :class:`SearchState` that was drawn and not evaluated."""

    devices: np.ndarray
    bias: np.ndarray


class Incumbent:
    """The best unit placement that a search has evaluated so far; of equal scores the first one counts.

    ``devices`` int32 ``(units,)`` is ``fallback`` until a placement is evaluated, and ``score`` is None until then.
    """

    def __init__(self, problem: Problem, budget: Budget, fallback: np.ndarray):
        self.budget, self.unit_of_op = budget, problem.graph.unit_of_op
        self.devices = np.array(fallback, np.int32)
        self.score: Score | None = None

    def evaluate(self, unit_devices: np.ndarray, *, below: int | None = None) -> list[Score]:
        """The score of each row of ``unit_devices`` int ``(k, units)``, or of the first rows if the budget ends.

        ``below`` and the errors are those of :meth:`Budget.evaluate`.
        """
        scores = self.budget.evaluate_many(unit_devices[:, self.unit_of_op], below=below)
        for score, devices in zip(scores, unit_devices, strict=False):
            if self.score is None or score < self.score:
                self.score, self.devices = score, np.array(devices, np.int32)
        return scores


def starts(problem: Problem, allowed: np.ndarray, room: bool = False) -> list[np.ndarray]:
    """Two unit placements to start from, int32 ``(units,)`` each.

    The first puts everything on the best device. The second cuts the forward ops in topological order into runs of
    equal time, one for each device; backward and update ops follow their forward op. With ``room``, the persistent
    bytes of layers count as well as time if they alone overfill a device: a quarter, half, three quarters or all.
    """
    single = _on_one(problem, allowed)
    ops = np.flatnonzero(tables(problem, forward_only=True).scope)
    time = problem.costs.op_ns.max(axis=0)[ops]
    split = _in_runs(problem, allowed, single, ops, time)
    memory, size = problem.topology.memory_bytes, problem.unit_persistent_bytes
    if room and len(ops):
        layer = layer_of_unit(problem)
        own, first = np.unique(layer[problem.graph.unit_of_op[ops]], return_index=True)
        held = np.zeros(len(ops), np.int64)
        held[first] = np.bincount(layer, size)[own]
        for quarters in range(1, 5):
            if (np.bincount(split, size, len(memory)) <= memory).all():
                break
            weight = (4 - quarters) * time / max(1, time.sum()) + quarters * held / max(1, held.sum())
            split = _in_runs(problem, allowed, single, ops, np.rint(weight * (1 << 40)).astype(np.int64))
    return [single, split]


def _in_runs(problem: Problem, allowed: np.ndarray, single: np.ndarray, ops: np.ndarray, weight: np.ndarray):
    """int32 ``(units,)``: forward ``ops`` in runs of equal ``weight`` int64, one for each device, and what follows
    them; what a device may not take as in ``single``."""
    devices, done = used_devices(allowed), np.cumsum(weight)
    run = np.minimum(len(devices) - 1, (done - 1) * len(devices) // max(1, int(done[-1]) if len(done) else 1))
    unit_device = np.full(problem.graph.n_units, -1, np.int64)
    units = problem.graph.unit_of_op[ops]
    unit_device[units[::-1]] = devices[run[::-1]]  # the first op of a unit decides
    wrong = (unit_device >= 0) & ~allowed[unit_device, np.arange(len(unit_device))]
    unit_device[wrong] = single[wrong]
    return follow_forward(problem, unit_device, allowed).astype(np.int32)


def _on_one(problem: Problem, allowed: np.ndarray) -> np.ndarray:
    """All units on the device that may take most of them and runs them fastest; the others on their fastest device."""
    durations = np.where(allowed, problem.unit_op_ns, 0)
    best = min(used_devices(allowed), key=lambda device: (-allowed[device].sum(), durations[device].sum(), device))
    elsewhere = np.argmin(np.where(allowed, problem.unit_op_ns, HUGE), axis=0)
    return np.where(allowed[best], best, elsewhere).astype(np.int32)


def layer_of_unit(problem: Problem) -> np.ndarray:
    """int64 ``(units,)``: number of the group of units that share a layer.

    A unit's layer is that of its longest op. Units without a layer are groups of their own.
    """
    graph = problem.graph
    heaviest = longest_op(problem)
    layer = graph.op_layer[heaviest].astype(np.int64)
    nameless = np.array([not name for name in graph.layers])[layer]
    layer[nameless] = len(graph.layers) + np.flatnonzero(nameless)
    return np.unique(layer, return_inverse=True)[1]


def with_spacious_hosts(problem: Problem, allowed: np.ndarray) -> np.ndarray:
    """``allowed`` bool ``(D, units)``, and hosts for the layers that need much memory and little time, such as
    embedding tables: at least :data:`HEAVY` of an accelerator's memory, and on the host at most :data:`BRIEF` of the
    time that the step takes if its work is divided evenly.
    """
    layer, accelerators = layer_of_unit(problem), list(problem.topology.accelerators)
    held = np.bincount(layer, problem.unit_persistent_bytes)
    heavy = held >= HEAVY * problem.topology.memory_bytes[accelerators].max(initial=1)
    even_ns = fastest_ns(problem).sum() / max(1, len(accelerators))
    more = choices(problem, hosts=True) & ~allowed
    for device in used_devices(more):
        busy_ns = np.bincount(layer, np.maximum(problem.unit_op_ns[device], 0))
        more[device] &= (heavy & (busy_ns <= BRIEF * even_ns))[layer]
    return allowed | more


def module_groups(problem: Problem) -> list[np.ndarray]:
    """For each depth of the module tree, int64 ``(units,)``: the group of each unit, its layer path cut at that
    depth."""
    graph = problem.graph
    paths = [name.split(".") for name in graph.layers]
    layer = graph.op_layer[longest_op(problem)]
    groups = []
    for depth in range(1, max(len(path) for path in paths) + 1):
        names = [".".join(path[:depth]) for path in paths]
        number = {name: i for i, name in enumerate(dict.fromkeys(names))}
        groups.append(np.array([number[name] for name in names])[layer])
    return groups


def modules(problem: Problem, rank: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The units of each module of any depth, down to single layers, as CSR ``(units, ptr)``, int64; each set of units
    once, and never all units. ``rank`` int ``(units,)``: the order within a module."""
    found = dict[bytes, np.ndarray]()
    for label in module_groups(problem):
        units, ptr = units_by_group(np.unique(label, return_inverse=True)[1], rank)
        for first, stop in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True):
            if stop - first < problem.graph.n_units:
                found.setdefault(units[first:stop].tobytes(), units[first:stop])
    sets = list(found.values()) or [np.arange(problem.graph.n_units)]
    return np.concatenate(sets), np.cumsum([0, *map(len, sets)])


def longest_op(problem: Problem) -> np.ndarray:
    """int64 ``(units,)``: the longest op of each unit, the first of equals."""
    graph = problem.graph
    time = problem.costs.op_ns.max(axis=0)
    order = np.lexsort((np.arange(graph.n_ops), -time, graph.unit_of_op))
    return order[np.searchsorted(graph.unit_of_op[order], np.arange(graph.n_units))]


def first_of_unit(problem: Problem) -> np.ndarray:
    """int64 ``(units,)``: the first op of each unit that has inputs, or else its first op."""
    graph = problem.graph
    sources = np.diff(graph.input_ptr) == 0
    order = np.lexsort((np.arange(graph.n_ops), sources, graph.unit_of_op))
    return order[np.searchsorted(graph.unit_of_op[order], np.arange(graph.n_units))]


def rank_of_unit(problem: Problem) -> np.ndarray:
    """int64 ``(units,)``: the place of each unit among all in the topological order of their first ops."""
    return np.argsort(np.argsort(first_of_unit(problem), kind="stable"))


def atoms(problem: Problem) -> np.ndarray:
    """int64 ``(units,)``: a label for each set of units that always move together.

    A parameter's unit moves with the unit of its first reader: apart from it, the parameter costs a transfer and gains
    nothing.
    """
    graph = problem.graph
    free = (problem.costs.op_ns <= 1).all(axis=0)  # a task that takes time is no parameter
    holders = np.flatnonzero((graph.op_persistent_bytes > 0) & (np.diff(graph.input_ptr) == 0) & free)
    label = list(range(graph.n_units))

    def root(unit):
        while label[unit] != unit:
            label[unit] = label[label[unit]]
            unit = label[unit]
        return unit

    unit, ptr = graph.unit_of_op, graph.consumer_ptr[graph.output_ptr]
    for op in holders[ptr[holders] < ptr[holders + 1]].tolist():
        reader = int(graph.consumers[ptr[op] : ptr[op + 1]].min())
        label[root(int(unit[reader]))] = root(int(unit[op]))
    return np.array([root(number) for number in range(graph.n_units)])


def draw_device(rng: np.random.Generator, allowed: np.ndarray, units: np.ndarray, current: int) -> int:
    """A device other than ``current`` that may take all of ``units``, drawn uniformly; -1 if there is none."""
    common = np.all(allowed[:, units], axis=1)
    common[current] = False
    options = np.flatnonzero(common)
    return int(rng.choice(options)) if len(options) else -1


def weight_of_unit(problem: Problem) -> np.ndarray:
    """float ``(units,)``: probability of drawing each unit: half uniform, half by its time on its fastest device."""
    time = fastest_ns(problem).astype(float)
    return 0.5 / len(time) + 0.5 * time / max(1.0, time.sum())


def groups(problem: Problem, rank: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The group and the part of each unit, int64 ``(units,)`` each; the parts of a group have consecutive numbers.
    ``rank`` int ``(units,)``: the place of each unit in the topological order."""
    graph, op = problem.graph, longest_op(problem)
    layer, phase = graph.op_layer[op].astype(np.int64), graph.op_phase[op].astype(np.int64)
    made = weight_gradient_bytes(problem)
    group = np.unique(np.stack([layer, phase, made]), axis=1, return_inverse=True)[1].reshape(-1)
    time = fastest_ns(problem).astype(float) + 1
    part = np.zeros(graph.n_units, np.int64)
    order = np.lexsort((rank, group))
    bounds = np.flatnonzero(np.diff(group[order], prepend=-1, append=-1))
    count = 0
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        units = order[first:last]
        done = np.cumsum(time[units])
        parts = PARTS if done[-1] >= LEAST * time.sum() else 1
        part[units] = count + np.minimum(parts - 1, (done - time[units]) * parts // done[-1]).astype(np.int64)
        count += parts
    return group, part


def weight_gradient_bytes(problem: Problem) -> np.ndarray:
    """int64 ``(units,)``: the size of the largest tensor that each backward unit makes of those as large as a parameter
    of their layer; 0 for units that make none."""
    graph, unit = problem.graph, problem.graph.unit_of_op
    weights = {
        (int(graph.op_layer[maker]), int(size))
        for maker, size in zip(graph.tensor_producer, graph.tensor_bytes, strict=True)
        if size >= WEIGHT and graph.op_persistent_bytes[maker] >= size
    }
    made = np.zeros(graph.n_units, np.int64)
    for maker, size in zip(graph.tensor_producer.tolist(), graph.tensor_bytes.tolist(), strict=True):
        if graph.op_phase[maker] == 1 and (int(graph.op_layer[maker]), size) in weights:
            made[unit[maker]] = max(made[unit[maker]], size)
    made[graph.op_phase[longest_op(problem)] != 1] = 0
    return made


def units_by_group(group: np.ndarray, rank: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The units of each group, in the order of ``rank``, as CSR ``(units, ptr)``, int64; ``group`` int ``(units,)``."""
    units = np.lexsort((rank, group))
    return units, np.searchsorted(group[units], np.arange(int(group.max(initial=-1)) + 2))
