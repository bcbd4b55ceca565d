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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from simdev.files import parse_json
from simdev.graphs.parallel_model import Part, every_nth
from simdev.parallel.capture import kept
from simdev.parallel.capture.resize import few_shards, of_shares
from simdev.parallel.capture.stage import alike_on_all_ranks, few_parts
from simdev.parallel.mesh import Mesh
from simdev.parallel.orders import SPLIT, Action, pipeline_order
from simdev.parallel.passes import STEP
from simdev.parallel.plan import DIVIDED, Plan, order_of_capture
from simdev.parallel.program import NotRepeating

if TYPE_CHECKING:  # Numba is loaded where something is replayed
    from simdev.parallel.costs.allocator import Counter, Reserved

STEPS = 2  # replayed steps; a later one reserves nothing more in the plans that were tried
FORMAT = 2  # of kept allocations
ENDS = 4  # of a block of rows that are tried
LAYERS = (3, 4, 5)  # of the stages whose allocations are recorded
RECORDED = STEP, STEP[:2]  # orders of passes in which allocations are recorded
SEVERAL = 3  # recorded microbatches, of a step with more than one

# Buffers of an NCCL communicator, est. by its source (2.18, init.cc and transport): for each channel a buffer for each
# protocol, 512 KiB (LL), 4,800 KiB (LL128) and 4 MiB (simple); 24 channels, as NCCL opens them over NVSwitch.
NCCL_BYTES = 24 * ((512 + 4800) * 1024 + (4 << 20))

Rows = np.ndarray  # int64 (n, 4): segment and position of the key's first event, bytes (0: release), stream
OWNER, POSITION, BYTES, STREAM = range(4)


@dataclass(frozen=True, eq=False)
class Allocations:
    """The allocations of a stage. ``segments`` hold rows: the parameters; then for each recorded microbatch its forward
    and its backward pass; then the end of the step. ``state`` are the sizes of the optimizer's tensors in bytes;
    ``parameters`` is the number of parameters."""

    segments: tuple[Rows, ...]
    state: tuple[int, ...]
    parameters: int

    @classmethod
    def of(cls, segments: Iterable[Sequence], state: Iterable[int], parameters: int) -> Allocations:
        """From rows of four numbers. Raises :class:`ValueError` or :class:`TypeError` for anything else."""
        return cls(tuple(_rows(rows) for rows in segments), tuple(state), parameters)


def _rows(rows: Sequence) -> Rows:
    return np.array(rows, np.int64).reshape(len(rows), 4)


def reserved_bytes(plan: Plan, known: dict | None = None) -> tuple[Reserved, ...] | None:
    """The memory of each pipeline rank of ``plan``; None for schedules that split backward passes, whose allocations
    are not recorded. ``known`` keeps recorded stages and their replays for further plans.

    Of more than four pipeline ranks the first two and the last are replayed; those between them have the ratio of
    reserved to allocated memory of the second one.
    """
    from simdev.parallel.costs.allocator import CachingAllocator, Counter, Reserved

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
            allocated = _replayed(plan, own, sent, orders[rank], Counter()).peak_allocated_bytes
            found[rank] = Reserved(allocated, allocated * found[1].reserved // found[1].allocated, buffers)
            continue
        # Plans that differ in what a replay does not see, such as a network or further microbatches, share it.
        divided = plan.distributed_optimizer and (plan.shares_of_update, plan.main_gradient_bytes)
        software = divided, plan.receive_buffers and plan.microbatches
        stages = tuple(map(id, own.values())), tuple(sent.items()), plan.stages  # ``known`` keeps the recorded stages
        key = "replayed", *stages, orders[rank], *software, limit, buffers
        if key not in known:
            allocator = CachingAllocator(limit - buffers)
            _replayed(plan, own, sent, orders[rank], allocator)
            known[key] = Reserved(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, buffers)
        found[rank] = known[key]
    return tuple(found[rank] for rank in range(ranks))


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
    allocator: Counter,
) -> Counter:
    """``allocator`` after two steps of the stages ``own``, to each of which the one before it sends ``sent`` bytes."""
    wide = 2 + max(number for _, _, number in order)
    passes, keys = {}, 0
    for stage, found in own.items():
        passes[stage] = _PassEvents(found, stage, plan, wide, keys)
        keys += passes[stage].slots * wide
    received, keys = dict(zip(own, count(keys, wide), strict=False)), keys + len(own) * wide
    events = []
    for stage, found in own.items():
        events.append(passes[stage].parameters())
        sizes = [plan.main_gradient_bytes * found.parameters] if plan.distributed_optimizer else []
        if plan.receive_buffers:
            both = sent[stage], _gradient_bytes(found) if stage + 1 < plan.stages else 0
            sizes += [size for size in both if size for _ in range(plan.microbatches)]
        events.append(_held(keys, sizes))
        keys += len(sizes)
    last = {stage: max(action[2] for action in order if action[1] == stage) for stage in own}
    for step in range(STEPS):
        for what, stage, number in order:
            which = 0 if number == 0 else 2 if number == last[stage] else 1
            arrives = _held(received[stage] + number, [sent[stage] if what == "F" else 0])
            alone = not plan.receive_buffers and sent[stage]
            events += [arrives] if alone and what == "F" else []
            events.append(passes[stage].events(what, which, number))
            events += [arrives] if alone and what == "B" else []
        if not step:
            for found in own.values():
                state = _state(plan, found)
                events.append(_held(keys, state))
                keys += len(state)
        events += [passes[stage].finish() for stage in own]
    allocator.replay(np.concatenate(events))
    return allocator


def _held(first: int, sizes: Sequence[int]) -> np.ndarray:
    """Events of keys from ``first`` on, one of each size."""
    return np.array([(first + n, size, 0) for n, size in enumerate(sizes)], np.int64).reshape(-1, 3)


def _state(plan: Plan, found: Allocations) -> Sequence[int]:
    """Sizes of what the optimizer of a stage allocates at the end of the first step."""
    return [-(-DIVIDED * found.parameters // plan.shares_of_update)] if plan.distributed_optimizer else found.state


class _PassEvents:
    """The events of a stage's passes. Three recorded microbatches stand for the first one of a step, all between, and
    the last one.

    A *slot* is a segment and a position where something is first allocated; a key is ``first``, plus the slot times
    ``wide``, plus the microbatch that allocates it plus one (0: there is one of it for all microbatches, such as
    parameters, and what one microbatch allocates and another one releases, as gathered parameters are).
    """

    def __init__(self, found: Allocations, stage: int, plan: Plan, wide: int, first: int):
        self.wide, self.first, self.end = wide, first, len(found.segments) - 1
        begin = np.cumsum([0, *(len(rows) for rows in found.segments)])
        self.slots = int(begin[-1])
        slots = [begin[table[:, OWNER]] + table[:, POSITION] for table in found.segments]
        left = np.ones(self.slots, bool)  # of what is added to no buffer of its own, and received in none
        if plan.distributed_optimizer:
            left[slots[self.end][_gradients(found)]] = False
        if plan.receive_buffers and stage + 1 < plan.stages:
            left[begin[2 : self.end : 2]] = False
        single = np.zeros(self.slots, bool)  # one for all microbatches
        single[: begin[1]] = True
        single[begin[self.end] :] = True
        for segment in range(1, self.end):
            owner = found.segments[segment][:, OWNER]
            single[slots[segment][(owner > 0) & ((owner - 1) // 2 != (segment - 1) // 2)]] = True
        ended = np.unique(slots[self.end])  # by the end of the step: by which microbatch is looked up
        ended = ended[~single[ended]]
        row = np.full(self.slots, -1)
        row[ended] = np.arange(len(ended))
        self.passes = []
        for segment, (table, slot) in enumerate(zip(found.segments, slots, strict=True)):
            how = np.where(single[slot], -2, -3 - row[slot] if segment == self.end else row[slot])
            columns = slot, table[:, BYTES], table[:, STREAM], how
            one = [np.ascontiguousarray(column[left[slot]]) for column in columns]
            self.passes.append(one)
        self.alive, self.depth = np.zeros((len(ended), wide), np.int64), np.zeros(len(ended), np.int64)

    def parameters(self) -> np.ndarray:
        return self._of(0, 0)

    def events(self, what: str, which: int, number: int) -> np.ndarray:
        """Those of a forward or backward pass of the microbatch ``number``, for which a recorded one stands."""
        return self._of(1 + 2 * (0 if self.end == 3 else which) + (what == "B"), number)

    def finish(self) -> np.ndarray:
        """Those of the end of the step."""
        return self._of(self.end, 0)

    def _of(self, segment: int, number: int) -> np.ndarray:
        from simdev.parallel.costs._kernel import keys_of_pass

        slot, size, stream, how = self.passes[segment]
        events = np.empty((len(slot), 3), np.int64)
        events[:, 1], events[:, 2] = size, stream
        keys_of_pass(slot, size, how, number, self.alive, self.depth, self.wide, events[:, 0])
        events[:, 0] += self.first
        return events


def _gradient_bytes(found: Allocations) -> int:
    """Bytes of the gradient that a stage receives from the next one, and so of what it sends there: a recorded backward
    pass begins by allocating it."""
    return int(found.segments[2][0, BYTES])


def _gradients(found: Allocations) -> np.ndarray:
    """Which rows of the end of the step release what backward passes allocate, bool ``(n,)``."""
    last = found.segments[-1]
    return (last[:, BYTES] == 0) & (last[:, OWNER] > 0) & (last[:, OWNER] < len(found.segments) - 1)


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
    Empty for schedules that split backward passes, for models of users, and for packed ones; without stages that are
    captured in the order of their schedule."""
    if plan.schedule in SPLIT or not alike_on_all_ranks(plan.model) or isinstance(plan.model.function, kept.Packed):
        return []
    options = plan.microbatches > 1, plan.reduce_each, plan.gathered
    found = []
    for stage, part in enumerate(plan.parts):
        if order_of_capture(plan, stage) not in RECORDED:
            continue
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
    first, second, third = (_rows([(0, n, size, 0) for n, size in enumerate(one.state)]) for one in recorded)
    state = _extended(first, second, third, more)[:, BYTES]
    counts = [one.parameters for one in recorded]
    return Allocations(segments, tuple(state.tolist()), counts[0] + (counts[1] - counts[0]) * more)


def _extended(a: Rows, b: Rows, c: Rows, more: int) -> Rows:
    try:
        return _with_blocks(a, b, c, more, _shape)
    except NotRepeating:  # some size outside of the blocks grows with the number of layers
        return _with_blocks(a, b, c, more, _kind)


def _with_blocks(a: Rows, b: Rows, c: Rows, more: int, like: Callable[[Rows], Rows]) -> Rows:
    """The rows, with one block inserted, or with several: what a layer leaves until the end of a pass is released
    there, one row for each layer."""
    try:
        return _with_block(a, b, c, more, like)
    except NotRepeating:
        x, y = like(a), like(b)
        head = _alike(x, y)
        # The first block ends where the rows that follow it are alike for longest; of some ends, one is the true one.
        sizes = [(_alike(x[head:], y[head + size :]), size) for size in range(1, len(b) - len(a))]
        for _, size in sorted(sizes)[: -ENDS - 1 : -1]:
            two, three = head + size, head + 2 * size
            with contextlib.suppress(NotRepeating):
                front = _with_block(a[:head], b[:two], c[:three], more, like)
                return np.concatenate([front, _with_blocks(a[head:], b[two:], c[three:], more, like)])
        raise


def _with_block(a: Rows, b: Rows, c: Rows, more: int, like: Callable[[Rows], Rows]) -> Rows:
    """The rows, with the block inserted where ``like`` of a row first differs between ``a`` and ``b``, or before: rows
    that look alike do not say where the block begins."""
    block = len(b) - len(a)
    if block < 0 or len(c) - len(b) != block:
        raise NotRepeating("a layer adds no block of allocations")
    x, y = like(a), like(b)
    head = _alike(x, y) if block else len(a)
    while True:
        try:
            return _inserted(a, b, c, more, head)
        except NotRepeating:
            head -= 1
            if not block or head < 0 or (x[head] != y[head + block]).any():
                raise


def _alike(x: Rows, y: Rows) -> int:
    """How many rows are the same in both, from the first one on."""
    shorter = min(len(x), len(y))
    differ = np.flatnonzero((x[:shorter] != y[:shorter]).any(axis=1))
    return int(differ[0]) if len(differ) else shorter


def _inserted(a: Rows, b: Rows, c: Rows, more: int, head: int) -> Rows:
    """The rows, with the block inserted at ``head``."""
    block = len(b) - len(a)
    return np.concatenate(
        [
            _moved(a[:head], b[:head], c[:head], more),
            _repeated(b[head : head + block], c[head : head + block], c[head + block : head + 2 * block], more),
            _moved(a[head:], b[head + block :], c[head + 2 * block :], more),
        ]
    )


def _shape(rows: Rows) -> Rows:
    return rows[:, [OWNER, BYTES, STREAM]]


def _kind(rows: Rows) -> Rows:
    return np.stack([rows[:, OWNER], rows[:, BYTES] == 0, rows[:, STREAM]], axis=1)


def _moved(x: Rows, y: Rows, z: Rows, more: int) -> Rows:
    """Rows that all three stages have: their positions and sizes change alike from stage to stage."""
    by = y - x
    if by[:, [OWNER, STREAM]].any() or (z - y != by).any():
        raise NotRepeating("a further layer changes the allocations of the others")
    return x + by * more


def _repeated(x: Rows, y: Rows, z: Rows, more: int) -> Rows:
    """Those of ``more`` added blocks: ``x`` in the stage with one block, ``y`` and ``z`` in that with two."""
    if (_shape(x) != _shape(y)).any() or (_shape(y) != _shape(z)).any():
        raise NotRepeating("a further layer changes the allocations of the others")
    copy = np.arange(more)[:, None, None]
    return (x + (y - x) * (more - 1) + (z - y) * copy).reshape(-1, 4)


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

    found = Allocations.of(*record(model, given, mesh, part, SEVERAL if several else 1, *how))
    kept.write(where, text_of(found))
    return found


def text_of(found: Allocations) -> str:
    """Allocations as JSON."""
    rows = {**found.__dict__, "segments": [rows.tolist() for rows in found.segments]}
    return json.dumps(rows, separators=(",", ":"))


def _read(text: str) -> Allocations:
    document = parse_json(text, "allocations of a stage")
    return Allocations.of(document["segments"], document["state"], document["parameters"])


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

    def rows(a: Rows, b: Rows) -> Rows:
        if (a[:, [OWNER, POSITION, STREAM]] != b[:, [OWNER, POSITION, STREAM]]).any():
            raise NotRepeating("allocations with other shards differ in more than sizes")
        found, sizes = a.copy(), zip(a[:, BYTES].tolist(), b[:, BYTES].tolist(), strict=True)
        found[:, BYTES] = [of_shares(*pair, ranks) for pair in sizes]
        return found

    segments = tuple(map(rows, small.segments, large.segments))
    state = tuple(of_shares(a, b, ranks) for a, b in zip(small.state, large.state, strict=True))
    return Allocations(segments, state, of_shares(small.parameters, large.parameters, ranks))
