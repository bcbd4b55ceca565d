"""The memory that a rank's training steps reserve: the allocations of its stages, replayed by PyTorch's allocator.

Allocations of a stage are recorded with three, four and five layers. All that further layers change is linear in their
number: a block of allocations and releases is repeated, and what refers to others moves by as many places in each layer
(:func:`extended`). The replay puts the passes in the order of the schedule: parameters, a first step at whose end the
optimizer allocates its state among the freed activations, and a further step.

Beside what PyTorch reserves, a process holds the context of CUDA (``reserved_gib`` of a device kind, which its memory
leaves out already) and the buffers of NCCL (:data:`NCCL_BYTES` for each communicator).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

from simdev.files import parse_json
from simdev.graphs.parallel_model import Part, every_nth
from simdev.parallel.capture import kept
from simdev.parallel.capture.resize import few_shards, of_shares
from simdev.parallel.capture.stage import alike_on_all_ranks, few_parts
from simdev.parallel.costs.allocator import CachingAllocator, Event, Reserved
from simdev.parallel.mesh import Mesh
from simdev.parallel.orders import SPLIT, Action, pipeline_order
from simdev.parallel.passes import STEP
from simdev.parallel.plan import DIVIDED, Plan, order_of_capture
from simdev.parallel.program import NotRepeating

STEPS = 2  # replayed steps; a later one reserves nothing more in the plans that were tried
FORMAT = 2  # of kept allocations
LAYERS = (3, 4, 5)  # of the stages whose allocations are recorded
SEVERAL = 3  # recorded microbatches, of a step with more than one
MAIN_GRADIENT = 4  # bytes of a gradient that Megatron-Core's buffer holds

# Buffers of an NCCL communicator, est. by its source (2.18, init.cc and transport): for each channel a buffer for each
# protocol, 512 KiB (LL), 4,800 KiB (LL128) and 4 MiB (simple); 24 channels, as NCCL opens them over NVSwitch.
NCCL_BYTES = 24 * ((512 + 4800) * 1024 + (4 << 20))

Row = tuple[int, int, int, int]  # (segment and position of the key's first event, bytes, stream); 0 bytes: release


@dataclass(frozen=True)
class Allocations:
    """The allocations of a stage. ``segments`` hold rows: the parameters; then for each recorded microbatch its forward
    and its backward pass; then the end of the step. ``state`` are the sizes of the optimizer's tensors in bytes;
    ``parameters`` is the number of parameters."""

    segments: tuple[tuple[Row, ...], ...]
    state: tuple[int, ...]
    parameters: int


def reserved_bytes(plan: Plan, known: dict | None = None) -> tuple[Reserved, ...] | None:
    """The memory of each pipeline rank of ``plan``; None for schedules that split backward passes, whose allocations
    are not recorded. ``known`` keeps recorded stages for further plans.

    Of more than four pipeline ranks the first two and the last are replayed; those between them have the ratio of
    reserved to allocated memory of the second one.
    """
    if plan.schedule in SPLIT:
        return None
    known = {} if known is None else known
    ranks = plan.mesh["pp"]
    orders = _orders(plan)
    limit = plan.cluster.kind.memory_bytes
    found: dict[int, Reserved] = {}
    for rank in range(ranks):
        buffers = NCCL_BYTES * sum(1 for _ in plan.meshes[rank].inner) + (NCCL_BYTES if ranks > 1 else 0)
        own = {stage: _allocations(plan, stage, known) for stage in sorted({stage for _, stage, _ in orders[rank]})}
        sent = {stage: _gradient_bytes(_allocations(plan, stage - 1, known)) if stage else 0 for stage in own}
        if 1 < rank < ranks - 1 and ranks > 4:
            allocated = _replayed(plan, own, sent, orders[rank], inf, count=True).peak_allocated_bytes
            found[rank] = Reserved(allocated, allocated * found[1].reserved // found[1].allocated, buffers)
            continue
        allocator = _replayed(plan, own, sent, orders[rank], limit - buffers)
        found[rank] = Reserved(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, buffers)
    return tuple(found[rank] for rank in range(ranks))


class _Counter:
    """An allocator that counts what is allocated and reserves nothing."""

    def __init__(self):
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self._held: dict = {}

    def replay(self, events) -> None:
        for key, size, _ in events:
            self.allocated_bytes += size - self._held.pop(key, 0)
            if size:
                self._held[key] = size
            self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)


def _orders(plan: Plan):
    """The actions of each pipeline rank, with as many microbatches as fill the pipeline and repeat one round."""
    ranks = plan.mesh["pp"]
    one = 1 if plan.stages_per_rank == 1 else ranks
    few = min(plan.microbatches, plan.microbatches % one + one * -(-(2 * ranks + 1) // one))
    return pipeline_order(plan.schedule, ranks, few, plan.stages_per_rank)


def _replayed(
    plan: Plan,
    own: dict[int, Allocations],
    sent: dict[int, int],
    order: tuple[Action, ...],
    limit: float,
    count: bool = False,
):
    """The allocator after two steps of the stages ``own``, to each of which the one before it sends ``sent`` bytes."""
    allocator = _Counter() if count else CachingAllocator(limit)
    for stage, found in own.items():
        allocator.replay((("P", stage, row[1]), *row[2:]) for row in found.segments[0])
        if plan.distributed_optimizer:
            allocator.replay([(("main", stage), MAIN_GRADIENT * found.parameters, 0)])
        if plan.receive_buffers:
            sizes = sent[stage], _gradient_bytes(found) if stage + 1 < plan.stages else 0
            kept = enumerate(size for size in sizes if size)
            allocator.replay((("kept", stage, n, m), size, 0) for n, size in kept for m in range(plan.microbatches))
    passes = {stage: _PassEvents(found, stage, plan) for stage, found in own.items()}
    last = {stage: max(action[2] for action in order if action[1] == stage) for stage in own}
    for step in range(STEPS):
        for what, stage, number in order:
            which = 0 if number == 0 else 2 if number == last[stage] else 1
            received = ("received", stage, number), sent[stage] if what == "F" else 0, 0
            alone = not plan.receive_buffers and sent[stage]
            allocator.replay([received] if alone and what == "F" else [])
            allocator.replay(passes[stage].events(what, which, number))
            allocator.replay([received] if alone and what == "B" else [])
        if not step:
            allocator.replay(_state(plan, own))
        for stage in own:
            allocator.replay(passes[stage].finish())
    return allocator


def _state(plan: Plan, own: dict[int, Allocations]) -> Iterator[Event]:
    """What the optimizer allocates at the end of the first step."""
    for stage, found in own.items():
        if plan.distributed_optimizer:
            yield ("state", stage), -(-DIVIDED * found.parameters // plan.shares_of_update), 0
            continue
        yield from ((("state", stage, number), size, 0) for number, size in enumerate(found.state))


class _PassEvents:
    """The events of a stage's passes, whose keys name the microbatch that allocates. Three recorded microbatches stand
    for the first one of a step, all between, and the last one."""

    def __init__(self, found: Allocations, stage: int, plan: Plan):
        self.found, self.stage = found, stage
        # what is added to a buffer of its own, or received in one
        self.skipped = _gradients(found) if plan.distributed_optimizer else frozenset()
        if plan.receive_buffers and stage + 1 < plan.stages:
            self.skipped |= {(segment, 0) for segment in range(2, len(found.segments) - 1, 2)}
        self.alive: dict[tuple[int, int], list[int]] = {}  # microbatches that hold what a recorded pass allocates
        self.handed_on = _handed_on(found)

    def events(self, what: str, which: int, number: int) -> Iterator[Event]:
        """Those of a forward or backward pass of the microbatch ``number``, for which a recorded one stands."""
        single = len(self.found.segments) == 4
        return self._of(1 + 2 * (0 if single else which) + (what == "B"), number)

    def finish(self) -> Iterator[Event]:
        """Those of the end of the step."""
        return self._of(len(self.found.segments) - 1, 0)

    def _of(self, segment: int, number: int) -> Iterator[Event]:
        end = len(self.found.segments) - 1
        for owner, position, size, stream in self.found.segments[segment]:
            if (owner, position) in self.skipped:
                continue
            if owner == 0:
                yield ("P", self.stage, position), size, stream
                continue
            if (owner, position) in self.handed_on:
                yield (owner, self.stage, -1, position), size, stream
                continue
            held = self.alive.setdefault((owner, position), [])
            same = owner != end and segment != end and (owner - 1) // 2 == (segment - 1) // 2  # of one microbatch
            whose = number if same else held[-1] if held else number
            if size == 0 and whose in held:
                held.remove(whose)
            elif size and whose not in held:
                held.append(whose)
            yield (owner, self.stage, whose, position), size, stream


def _handed_on(found: Allocations) -> frozenset[tuple[int, int]]:
    """What one microbatch allocates and another one releases or allocates again, such as gathered parameters: there is
    one of each, whichever microbatches are in progress."""
    end = len(found.segments) - 1
    return frozenset(
        row[:2]
        for segment in range(1, end)
        for row in found.segments[segment]
        if row[0] and (row[0] - 1) // 2 != (segment - 1) // 2
    )


def _gradient_bytes(found: Allocations) -> int:
    """Bytes of the gradient that a stage receives from the next one, and so of what it sends there: a recorded backward
    pass begins by allocating it."""
    return found.segments[2][0][2]


def _gradients(found: Allocations) -> frozenset[tuple[int, int]]:
    """What backward passes allocate and the end of the step releases."""
    last = len(found.segments) - 1
    return frozenset(row[:2] for row in found.segments[last] if not row[2] and 0 < row[0] < last)


def _allocations(plan: Plan, stage: int, known: dict) -> Allocations:
    part, rank = plan.parts[stage], plan.rank_of(stage)
    mesh, parameters = plan.captured_mesh(rank), plan.parameters_of(rank)
    several = plan.microbatches > 1
    options = several, plan.reduce_each, plan.gathered
    key = "allocations", tuple(sorted(parameters.items())), mesh, part, options
    if key not in known:
        how = plan.model, parameters, mesh, options
        lists = part.kinds and getattr(plan.model.function, "blocks", None) == ""  # several, of which each repeats
        few = [part] if lists else recorded_parts(part, parameters)
        recorded = [_recorded(*how, one) for one in few]
        try:
            more = (part.layers - few[0].layers) // (every_nth(parameters) or 1)
            found = extended(recorded, more) if len(recorded) > 1 else recorded[0]
        except NotRepeating:
            found = _recorded(*how, part)
        known[key] = found
    return known[key]


def recorded_parts(part: Part, parameters: Mapping[str, object]) -> list[Part]:
    """The stages of few layers from which the allocations of ``part`` are extended; or the part itself."""
    period = every_nth(parameters) or 1
    counts = [n * period + part.layers % period for n in LAYERS]
    if part.layers <= counts[-1]:
        counts = [part.layers]
    return [replace(part, layers=n, kinds=part.kinds[:n] if period > 1 else ()) for n in counts]


def recordings_of(plan: Plan) -> list[tuple]:
    """The stages whose recording also captures the programs of ``plan``: arguments of :func:`record_stage`.
    Empty for schedules that split backward passes, for stages that are captured in the order of their schedule, for
    models of users, and for packed ones."""
    if plan.schedule in SPLIT or not alike_on_all_ranks(plan.model) or isinstance(plan.model.function, kept.Packed):
        return []
    options = plan.microbatches > 1, plan.reduce_each, plan.gathered
    found = []
    for stage, part in enumerate(plan.parts):
        if order_of_capture(plan, stage) not in (STEP, STEP[:2]):
            return []
        rank = plan.rank_of(stage)
        parameters, mesh = plan.parameters_of(rank), plan.captured_mesh(rank)
        recorded = recorded_parts(part, parameters)
        fixed = tuple(sorted(parameters.items()))
        found += [(plan.model, fixed, mesh, options, few) for few in few_parts(part)[0] if few in recorded]
    return list(dict.fromkeys(found))


def record_stage(model, parameters: tuple, mesh: Mesh, options: tuple[bool, ...], part: Part) -> Allocations:
    """The allocations of a stage, and with them its program, kept or recorded; ``parameters`` are pairs, ``options``
    are: several microbatches, gradients reduced after each, parameters gathered once."""
    return _recorded(model, dict(parameters), mesh, options, part)


def is_recorded(model, parameters: tuple, mesh: Mesh, options: tuple[bool, ...], part: Part) -> bool:
    """Whether :func:`record_stage` need not record."""
    name = named(dict(parameters), part, options)
    return isinstance(model.function, kept.Packed) or kept.has(kept.fingerprint(model, name, mesh, part))


def extended(recorded: list[Allocations], more: int) -> Allocations:
    """The allocations of a stage with ``more`` layers more than the first of three that were recorded, each with a
    layer more than the one before it. Raises :class:`NotRepeating` if a layer adds something else than a block."""
    a, b, c = recorded
    segments = tuple(_extended(*rows, more=more) for rows in zip(a.segments, b.segments, c.segments, strict=True))
    first, second, third = (tuple((0, n, size, 0) for n, size in enumerate(one.state)) for one in recorded)
    state = tuple(row[2] for row in _extended(first, second, third, more))
    counts = [one.parameters for one in recorded]
    return Allocations(segments, state, counts[0] + (counts[1] - counts[0]) * more)


def _extended(a: tuple[Row, ...], b: tuple[Row, ...], c: tuple[Row, ...], more: int) -> tuple[Row, ...]:
    try:
        return _with_block(a, b, c, more, _shape)
    except NotRepeating:  # some size outside of the block grows with the number of layers
        return _with_block(a, b, c, more, _kind)


def _with_block(a: tuple[Row, ...], b: tuple[Row, ...], c: tuple[Row, ...], more: int, like) -> tuple[Row, ...]:
    """The rows, with the block inserted where ``like`` of a row first differs between ``a`` and ``b``, or before: rows
    that look alike do not say where the block begins."""
    block = len(b) - len(a)
    if block < 0 or len(c) - len(b) != block:
        raise NotRepeating("a layer adds no block of allocations")
    same = zip(a, b, strict=False)
    head = next((n for n, (x, y) in enumerate(same) if like(x) != like(y)), len(a)) if block else len(a)
    while True:
        try:
            return _inserted(a, b, c, more, head)
        except NotRepeating:
            head -= 1
            if not block or head < 0 or like(a[head]) != like(b[head + block]):
                raise


def _inserted(a: tuple[Row, ...], b: tuple[Row, ...], c: tuple[Row, ...], more: int, head: int) -> tuple[Row, ...]:
    """The rows, with the block inserted at ``head``."""
    block = len(b) - len(a)
    return (
        *(_moved(x, y, z, more) for x, y, z in zip(a[:head], b[:head], c[:head], strict=True)),
        *(
            _repeated(x, y, z, more, copy)
            for copy in range(more)
            for x, y, z in zip(
                b[head : head + block], c[head : head + block], c[head + block : head + 2 * block], strict=True
            )
        ),
        *(_moved(x, y, z, more) for x, y, z in zip(a[head:], b[head + block :], c[head + 2 * block :], strict=True)),
    )


def _shape(row: Row) -> tuple[int, int, int]:
    return row[0], row[2], row[3]


def _kind(row: Row) -> tuple[int, bool, int]:
    return row[0], row[2] == 0, row[3]


def _moved(x: Row, y: Row, z: Row, more: int) -> Row:
    """A row that all three stages have: its position and size change alike from stage to stage."""
    by, grown = y[1] - x[1], y[2] - x[2]
    if (x[0], x[3]) != (y[0], y[3]) or (y[0], y[3]) != (z[0], z[3]) or (z[1] - y[1], z[2] - y[2]) != (by, grown):
        raise NotRepeating("a further layer changes the allocations of the others")
    return x[0], x[1] + by * more, x[2] + grown * more, x[3]


def _repeated(x: Row, y: Row, z: Row, more: int, copy: int) -> Row:
    """A row of the added block: ``x`` in the stage with one block, ``y`` and ``z`` in that with two."""
    if _shape(x) != _shape(y) or _shape(y) != _shape(z):
        raise NotRepeating("a further layer changes the allocations of the others")
    return x[0], x[1] + (y[1] - x[1]) * (more - 1) + (z[1] - y[1]) * copy, x[2], x[3]


def named(parameters: Mapping[str, object], part: Part, options: tuple[bool, ...]) -> dict[str, object]:
    """The parameters under which the allocations of a stage are kept."""
    return {**parameters, "layers": part.layers, "allocations": [FORMAT, *options]}


def _recorded(model, parameters: dict, mesh: Mesh, options: tuple[bool, ...], part: Part) -> Allocations:
    """The allocations of a stage of a few layers, kept from an earlier recording or recorded; ``options``: several
    microbatches, gradients reduced after each, parameters gathered once."""
    given, (several, *how) = {**parameters, "layers": part.layers}, options
    name = named(parameters, part, options)
    if isinstance(model.function, kept.Packed):
        meshes = [mesh] if model.function.has(kept.place(name, mesh, part)) else few_shards(mesh)
        return of_shards([_read(model.function.text(kept.place(name, few, part))) for few in meshes], mesh)
    where = kept.fingerprint(model, name, mesh, part)
    with contextlib.suppress(ValueError, TypeError, KeyError):
        if (text := kept.content(where)) is not None:
            return _read(text)
    from simdev.parallel.capture.allocations import record

    found = Allocations(*record(model, given, mesh, part, SEVERAL if several else 1, *how))
    kept.write(where, text_of(found))
    return found


def text_of(found: Allocations) -> str:
    """Allocations as JSON."""
    return json.dumps(found.__dict__, separators=(",", ":"))


def _read(text: str) -> Allocations:
    document = parse_json(text, "allocations of a stage")
    segments = tuple(tuple((a, b, c, d) for a, b, c, d in rows) for rows in document["segments"])
    return Allocations(segments, tuple(document["state"]), document["parameters"])


def of_shards(recorded: list[Allocations], mesh: Mesh) -> Allocations:
    """The allocations on ``mesh``, from those with few shards (:func:`~simdev.parallel.capture.resize.few_shards`):
    every size is a constant, or a constant plus a share of what is divided among the shards. Raises
    :class:`NotRepeating` where the recordings differ in more than sizes."""
    if len(recorded) == 1:
        return recorded[0]
    small, large = recorded
    ranks = mesh["dp_shard"]
    if [len(rows) for rows in small.segments] != [len(rows) for rows in large.segments]:
        raise NotRepeating("stages with other shards allocate other things")

    def row(a: Row, b: Row) -> Row:
        if (*a[:2], a[3]) != (*b[:2], b[3]):
            raise NotRepeating("allocations with other shards differ in more than sizes")
        return a[0], a[1], of_shares(a[2], b[2], ranks), a[3]

    segments = tuple(
        tuple(row(a, b) for a, b in zip(x, y, strict=True)) for x, y in zip(small.segments, large.segments, strict=True)
    )
    state = tuple(of_shares(a, b, ranks) for a, b in zip(small.state, large.state, strict=True))
    return Allocations(segments, state, of_shares(small.parameters, large.parameters, ranks))
