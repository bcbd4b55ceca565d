"""From a placement of ops to what PyTorch can apply: a device for each module, and the split points of a pipeline."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from simdev.analysis.coarsen import joined
from simdev.errors import InvalidInput
from simdev.files import write_text
from simdev.problem.graph import PHASES
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.sim import simulate_many

TRIES = 500  # simulations spent on the best placement by modules


@dataclass(frozen=True)
class DeviceMap:
    """A device for each module of the model that a graph was captured from.

    A module of a list or sequence (``encoder.block.3``) stays whole.

    ``modules`` maps module paths to device numbers; a path stands for all below it. ``placement`` is the placement of
    ops that follows from it: ops outside any module run where their largest input is. ``step_ns`` is its step time and
    ``placed_ns`` that of the placement it was made from; ``aligned`` is True where every module was on one device
    already. ``splits`` are the modules before which the forward pass is cut to make a pipeline of as many stages as the
    map has devices, the largest stage as small as can be; ``pipeline_ns`` is the step time of such stages on one batch.
    """

    modules: dict[str, int]
    placement: Placement
    step_ns: int
    placed_ns: int
    aligned: bool
    splits: tuple[str, ...]
    pipeline_ns: int


def device_map(problem: Problem, placement: Placement) -> DeviceMap:
    """The best placement by modules found near ``placement``: each module goes where most of its time is spent, then
    single modules move while that makes the step faster, within :data:`TRIES` simulations. Memory counts before time.

    Raises :class:`InvalidInput` for a graph whose ops name no module.
    """
    graph = problem.graph
    block_of_op, names = _blocks(problem)
    if not names:
        raise InvalidInput("no op belongs to a module: not captured from PyTorch?", source=graph.name)
    weight = _weights(problem, placement, block_of_op, len(names))
    device = np.argmax(weight, axis=1).astype(np.int32)
    aligned = bool(((weight > 0).sum(axis=1) <= 1).all())
    followed = _followed(problem, block_of_op)
    outcome = simulate_many(problem, np.stack([placement.devices, device[followed]]))
    placed_ns, best = int(outcome.step_ns[0]), (int(outcome.overflow_bytes[1]), int(outcome.step_ns[1]))
    left = TRIES
    improved = True
    while improved and left > 0:
        improved = False
        for block in np.argsort(-weight.sum(axis=1), kind="stable"):
            others = [
                d for d in np.unique(placement.devices) if d != device[block] and _runs(problem, followed, block, d)
            ]
            if not others or left <= 0:
                continue
            rows = np.tile(device, (len(others), 1))
            rows[np.arange(len(others)), block] = others
            left -= len(others)
            tried = simulate_many(problem, rows[:, followed])
            scores = list(zip(tried.overflow_bytes.tolist(), tried.step_ns.tolist(), strict=True))
            if min(scores) < best:
                best, improved = min(scores), True
                device = rows[scores.index(best)]
    found = Placement(device[followed])
    found.check(problem)
    modules = {name: int(device[block]) for block, paths in enumerate(names) for name in paths}
    modules |= _unseen(problem, modules, followed, device)
    used = [int(d) for d in dict.fromkeys(device[followed].tolist())]
    splits, staged = _pipeline(problem, block_of_op, weight, used)
    pipeline_ns = int(simulate_many(problem, staged[followed][None]).step_ns[0])
    return DeviceMap(_collapsed(modules), found, best[1], placed_ns, aligned, splits, pipeline_ns)


def map_placement(problem: Problem, modules: Mapping[str, int]) -> Placement:
    """The placement of ops that follows from a device map: the longest path that an op's layer begins with decides.

    ``modules`` maps module paths to device numbers (``""`` is the whole model). Ops of the model that no path covers
    and ops outside of it run where their largest input is. Raises :class:`InvalidInput` if a path names no module.
    """
    graph = problem.graph
    chosen = np.full(graph.n_ops, -1)
    for op, name in enumerate(graph.op_names):
        layer = graph.layers[graph.op_layer[op]]
        state = f"{layer}.{name.rpartition('/')[2]}"  # a map may name a parameter of the model itself
        covering = [path for path in modules if path in ("", state) or f"{layer}.".startswith(f"{path}.")]
        if covering and layer or state.removeprefix(".") in modules:
            chosen[op] = modules[max(covering, key=len)] if layer else modules[state.removeprefix(".")]
    if (chosen < 0).all():
        raise InvalidInput("no path of the map names a module of the graph", source=graph.name, field="device_map")
    of_unit = np.full(graph.n_units, -1)
    np.maximum.at(of_unit, graph.unit_of_op, chosen)
    placement = Placement(_followed(problem, of_unit[graph.unit_of_op]).astype(np.int32))
    placement.check(problem)
    return placement


def write_device_map(path: str | os.PathLike, problem: Problem, found: DeviceMap) -> None:
    """Write JSON: ``device_map`` in the form of Accelerate (module to accelerator number or ``"cpu"``), ``split_spec``
    for ``torch.distributed.pipelining`` (module to ``"BEGINNING"``), and what each costs, in seconds."""
    topology = problem.topology
    number = {device: place for place, device in enumerate(topology.accelerators)}
    document = {
        "graph": problem.graph.name,
        "fingerprint": problem.graph.fingerprint,
        "topology": topology.name,
        "device_map": {name: number.get(device, "cpu") for name, device in found.modules.items()},
        "devices": {name: topology.devices[device].name for name, device in found.modules.items()},
        "split_spec": dict.fromkeys(found.splits, "BEGINNING"),
        "aligned": found.aligned,
        "step_time_s": found.step_ns / 1e9,
        "pipeline_step_time_s": found.pipeline_ns / 1e9,
        "placement_step_time_s": found.placed_ns / 1e9,
    }
    write_text(path, json.dumps(document, indent=1) + "\n")


def _blocks(problem: Problem) -> tuple[np.ndarray, list[list[str]]]:
    """The block of each op, -1 for ops outside the model, and the modules of each block. Modules that share a
    colocation group (tied weights) are one block."""
    graph = problem.graph
    owners = _modules(problem)
    known = {name: number for number, name in enumerate(sorted({name for name in owners if name is not None}))}
    ends = [
        (_place_in(known, _module_of(label)), _place_in(known, _module_of(owner)))
        for label, owner in graph.meta.get("tied", {}).items()  # tied weights go together
    ]
    pairs = [(here, there) for here, there in ends if here is not None and there is not None]
    first: dict[int, int] = {}
    for op, name in enumerate(owners):
        if name is not None:
            pairs.append((known[name], first.setdefault(int(graph.unit_of_op[op]), known[name])))
    root = joined(range(len(known)), pairs)
    place = {number: block for block, number in enumerate(sorted(set(root.values())))}
    names: list[list[str]] = [[] for _ in place]
    for name, number in known.items():
        names[place[root[number]]].append(name)
    block = np.array([-1 if name is None else place[root[known[name]]] for name in owners])
    for unit in np.unique(graph.unit_of_op[block >= 0]):  # all of a colocation group goes with its module
        mine = graph.unit_of_op == unit
        block[mine] = block[mine].max()
    return block, names


def _place_in(known: dict[str, int], module: str) -> int | None:
    """The number of ``module``, or of the block that it is in."""
    return known.get(module, known.get(_block_of(module) or ""))


def _modules(problem: Problem) -> list[str | None]:
    """The module of each op: the block that its layer is in, or else its layer, where that holds parameters or is
    inside one that does; None elsewhere."""
    graph = problem.graph
    layers = [graph.layers[number] for number in graph.op_layer]
    owning = {layer for layer, kind in zip(layers, graph.op_kind, strict=True) if graph.kinds[kind] == "parameter"}
    owning |= {_module_of(label) for label in graph.meta.get("tied", {})}
    blocks = {block for block in map(_block_of, owning) if block}
    if len(blocks) < len(problem.topology.accelerators):
        blocks = set()  # fewer blocks than devices: they are cut inside, or devices would stay empty
    inside = {
        layer for layer in set(layers) if layer in owning or any(layer.startswith(f"{own}.") for own in owning if own)
    }

    def module(layer: str) -> str | None:
        block = _block_of(layer)
        return block if block in blocks else layer if layer and layer in inside else None

    return [module(layer) for layer in layers]


def _block_of(layer: str) -> str | None:
    """``encoder.block.3`` for ``encoder.block.3.layer.0.q``: the outermost member of a list or sequence."""
    parts = layer.split(".")
    place = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return None if place is None else ".".join(parts[: place + 1])


def _module_of(label: str) -> str:
    return label.rpartition(".")[0]


def _unseen(problem: Problem, modules: dict[str, int], followed: np.ndarray, device: np.ndarray) -> dict[str, int]:
    """Devices of state that no module of ``modules`` covers: parameters of the model itself, which a map names one by
    one, tied parameters, and what the step does not read."""
    graph = problem.graph
    found: dict[str, int] = {}

    def covered(label: str) -> bool:
        return any(label == name or label.startswith(f"{name}.") for name in {**modules, **found})

    home = {}
    for op in np.flatnonzero([graph.kinds[kind] == "parameter" for kind in graph.op_kind]):
        layer, label = graph.layers[graph.op_layer[op]], graph.op_names[op].replace("/", ".")
        home[label] = int(device[followed[op]])
        if not layer:
            found[label] = home[label]
    for label, owner in graph.meta.get("tied", {}).items():
        if not covered(label):
            found[_module_of(label) or label] = home.get(owner, 0)
    before = int(device[followed[0]])
    for label in graph.meta.get("unread_state", ()):
        if not covered(label):
            near = [name for name in modules if name.startswith(_module_of(_module_of(label)))]
            found[_module_of(label) or label] = modules[near[0]] if near else before
    return found


def _weights(problem: Problem, placement: Placement, block: np.ndarray, count: int) -> np.ndarray:
    """int64 ``(blocks, D)``: nanoseconds that each block spends on each device."""
    weight = np.zeros((count, problem.topology.n_devices), np.int64)
    mine = np.flatnonzero(block >= 0)
    spent = problem.costs.device_op_ns[placement.devices[mine], mine]
    np.add.at(weight, (block[mine], placement.devices[mine]), spent)
    return weight


def _runs(problem: Problem, followed: np.ndarray, block: int, device: int) -> bool:
    return bool((problem.costs.device_op_ns[device, followed == block] >= 0).all())


def _followed(problem: Problem, block: np.ndarray) -> np.ndarray:
    """The block that each op goes with: its own; outside the model that of its largest input, else of its first
    reader."""
    graph, found = problem.graph, block.copy()
    loose = np.flatnonzero(block < 0).tolist()

    def follow_inputs() -> None:
        for op in loose:
            read = graph.inputs[graph.input_ptr[op] : graph.input_ptr[op + 1]]
            if found[op] < 0 and len(read):
                found[op] = found[graph.tensor_producer[read[np.argmax(graph.tensor_bytes[read])]]]

    follow_inputs()
    for op in reversed(loose):
        first, last = graph.consumer_ptr[graph.output_ptr[op]], graph.consumer_ptr[graph.output_ptr[op + 1]]
        if found[op] < 0 and first < last:
            found[op] = found[graph.consumers[first:last].min()]
    follow_inputs()
    found[found < 0] = 0
    first_op = np.full(graph.n_units, graph.n_ops)
    np.minimum.at(first_op, graph.unit_of_op, np.arange(graph.n_ops))
    return found[first_op[graph.unit_of_op]]


def _collapsed(modules: dict[str, int]) -> dict[str, int]:
    """The same map with a parent for all of its children wherever they agree."""
    found = dict(modules)
    parents = {name.rpartition(".")[0] for name in found}
    while parents:
        deepest = max(parents, key=lambda name: (name.count(".") + bool(name), name))
        parents.remove(deepest)
        below = [name for name in found if not deepest or name == deepest or name.startswith(f"{deepest}.")]
        devices = {found[name] for name in below}
        if len(devices) == 1 and (deepest not in found or len(below) > 1):
            for name in below:
                del found[name]
            found[deepest] = devices.pop()
        if deepest:
            parents.add(deepest.rpartition(".")[0])
    return dict(sorted(found.items()))


def _pipeline(problem: Problem, block_of_op: np.ndarray, weight: np.ndarray, devices: list[int]):
    """The modules, in the order of the forward pass, cut into a stage for each of ``devices`` so that the largest stage
    is least: the modules that begin the later stages, and the device of each block. A model with a list or sequence of
    blocks is cut between them only, unless it has too few of them."""
    graph = problem.graph
    forward = (graph.op_phase == PHASES.index("forward")) & (np.diff(graph.input_ptr) > 0)
    owners = _modules(problem)
    begins: dict[int, str] = {}
    for op in np.flatnonzero(forward & (block_of_op >= 0)):
        name = owners[op]
        if name is not None:
            begins.setdefault(int(block_of_op[op]), name)
    order = list(begins)
    members = [_block_of(begins[block]) for block in order]
    between = [start for start, member in enumerate(members) if member and member not in members[:start]]
    stages = min(len(devices), len(order))
    enough = sum(start > 0 for start in between) >= stages - 1
    allowed = np.zeros(len(order) + 1, np.bool_)
    allowed[between if enough else slice(None)] = True
    allowed[[0, len(order)]] = True
    total = np.concatenate([[0], np.cumsum(weight.sum(axis=1)[order])])
    most = np.iinfo(np.int64).max
    best = np.full((stages + 1, len(order) + 1), most)
    came = np.zeros(best.shape, np.int64)
    best[0, 0] = 0
    for stage in range(1, stages + 1):
        for end in np.flatnonzero(allowed).tolist():
            if end >= stage:
                largest = np.maximum(best[stage - 1, :end], total[end] - total[:end])
                came[stage, end] = np.argmin(largest)
                best[stage, end] = largest.min()
    end, stage_of = len(order), np.zeros(len(weight), np.int64)
    splits: list[str] = []
    for stage in range(stages, 0, -1):
        start = int(came[stage, end])
        stage_of[order[start:end]] = stage - 1
        splits = [(members[start] if enough else None) or begins[order[start]], *splits]
        end = start
    return tuple(splits[1:]), np.array(devices, np.int32)[stage_of]
