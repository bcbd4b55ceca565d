"""From the recorded ops of a step to a computation graph: what is dead goes, the ops that update one parameter become
one op, colocation groups and write-after-read edges are added."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from simdev.analysis.coarsen import joined
from simdev.graphs.capture.trace import RECOMPUTED, Op, Tape
from simdev.problem.graph import ComputationGraph, GraphBuilder


@dataclass(frozen=True)
class Assembly:
    """A graph, and where its ops and tensors come from: ``parts`` are the numbers on the tape of the recorded ops that
    make up each op, in program order; ``values`` the recorded value of each tensor, -1 for a control edge; ``products``
    the FLOPs of the products in the graph, ``updates`` how many ops update each parameter (by its number on the tape).
    """

    graph: ComputationGraph
    parts: tuple[tuple[int, ...], ...]
    values: tuple[int, ...]
    products: int
    updates: dict[int, int]


def assemble(
    tape: Tape, name: str, *, results: set[int], gradients: dict[int, int], updates: dict[int, str], meta: dict
) -> Assembly:
    """Build the graph.

    ``results`` are the values that leave the step; ``gradients`` maps the op of a parameter to the value of its final
    gradient, and ``updates`` to the kind of its update op (``adam``).
    """
    alive = _alive(tape, results)
    alive, merged, apart = _merge_updates(tape, alive, updates)
    readers = defaultdict(list)
    for number in alive:
        for value in tape.ops[number].reads:
            readers[value].append(number)
    group = _groups(tape, alive, gradients, {number: home for home, parts in apart for number in parts})
    waits = _write_after_read(tape, alive, readers)

    builder = GraphBuilder(name, meta)
    tensor: dict[int, int] = {}
    handle: dict[int, int] = {}
    names: dict[str, int] = {}
    origin: dict[str, tuple[tuple[int, ...], list[int]]] = {}  # op name -> its parts and the values of its tensors
    for number in alive:
        op = tape.ops[number]
        label = _unique(op, names)
        origin[label] = merged.get(number, (number,)), []
        handle[number] = builder.op(
            label,
            op.kind,
            signature=op.signature,
            layer=op.layer,
            phase=op.phase,
            flops=op.flops,
            bytes_read=op.read,
            bytes_written=op.written,
            persistent_bytes=op.persistent,
            group=group.get(number),
            inputs=[tensor[value] for value in op.reads if value in tensor],
        )
        for value in op.makes:
            made = tape.values[value]
            home = op.kind in ("parameter", "constant")
            if made.bytes and (home or not made.persistent or readers[value]):
                tensor[value] = builder.tensor(
                    handle[number], made.bytes, persistent=made.persistent, result=value in results
                )
                origin[label][1].append(value)
    for before, after in waits:
        builder.control(handle[before], handle[after])
    graph = builder.build()
    values = []
    for op, label in enumerate(graph.op_names):
        made = origin[label][1]
        values += made + [-1] * (int(graph.output_ptr[op + 1] - graph.output_ptr[op]) - len(made))
    products = sum(tape.ops[number].products for number in alive)
    loose = {number for _, parts in apart for number in parts}
    written = [tape.ops[n].writes for n in alive if tape.ops[n].phase == "update" and n not in loose]
    rounds = Counter(home for homes in (*written, *([home] for home, _ in apart)) for home in homes)
    return Assembly(graph, tuple(origin[label][0] for label in graph.op_names), tuple(values), products, dict(rounds))


def _alive(tape: Tape, results: set[int]) -> list[int]:
    """Ops whose work reaches a result or a persistent write, every parameter and buffer, and what takes time although
    nothing reads it: products, and what a checkpoint computes again. In program order."""
    stack = [tape.values[value].producer for value in results]
    for number, op in enumerate(tape.ops):
        if op.writes or op.kind == "parameter" or op.products or op.label.endswith(RECOMPUTED):
            stack.append(number)
    alive = set()
    while stack:
        number = stack.pop()
        if number not in alive:
            alive.add(number)
            stack.extend(tape.values[value].producer for value in tape.ops[number].reads)
            stack.extend(tape.ops[number].touches)
    return sorted(alive)


def _merge_updates(
    tape: Tape, alive: list[int], updates: dict[int, str]
) -> tuple[list[int], dict[int, tuple[int, ...]], list[tuple[int, list[int]]]]:
    """Replace the ops of one update of a parameter by one op at the place of the last; returns the ops left, the
    parts of the replaced, and the updates that stay as they are: those that are mostly products, which no fused kernel
    computes (Muon's), each as a parameter and its ops.

    An op of the update phase belongs to a parameter if it overwrites that parameter or its state, or if all that it
    makes is read by ops that belong to it. What several parameters share (a clipped norm) stays as it is. A parameter
    that is updated several times in the step (minibatches, critics) has an op for each.
    """
    ops, values = tape.ops, tape.values
    users = defaultdict(set)
    for number in alive:
        for value in ops[number].reads:
            users[values[value].producer].add(number)
    owner: dict[int, int] = {}
    for number in reversed(alive):
        op = ops[number]
        if op.phase == "update":
            owners = set(op.writes) if op.writes else {owner.get(user, -1) for user in users[number]}
            if len(owners) == 1 and -1 not in owners:
                owner[number] = owners.pop()
    members = defaultdict(list)
    for number in alive:
        if number in owner:
            members[owner[number]].append(number)
    last, apart = {}, []
    for home, all_parts in members.items():
        for parts in _turns(tape, all_parts, users):
            if 2 * sum(ops[number].products for number in parts) > sum(ops[number].flops for number in parts):
                apart.append((home, parts))
                for number in parts:
                    ops[number].label, ops[number].layer = f"{ops[home].label}/{ops[number].kind}", ops[home].layer
                continue
            ops[parts[-1]] = _merge(tape, home, parts, updates.get(home, "update"), users)
            for value in ops[parts[-1]].makes:
                values[value].producer = parts[-1]
            last[parts[-1]] = tuple(parts)
    left = {*last, *(number for _, parts in apart for number in parts)}
    return [number for number in alive if number not in owner or number in left], last, apart


def _turns(tape: Tape, parts: list[int], users: dict[int, set[int]]) -> list[list[int]]:
    """The ops that update one parameter, in program order, cut into updates: a new one begins with each step of an
    optimizer, and where an op that belongs to none has read what the update wrote so far."""
    inside, turns, waiting = set(parts), [], []
    turn, read_at = -1, -1  # of the update so far: its optimizer step, and the first op that has read it
    for number in parts:
        waiting.append(number)
        if tape.ops[number].writes:
            if not turns or tape.ops[number].turn != turn or number > read_at:
                turns.append([])
                turn, read_at = tape.ops[number].turn, len(tape.ops)
            turns[-1] += waiting
            waiting = []
            read_at = min([read_at, *(user for user in users[number] - inside if user > number)])
    return turns


def _merge(tape: Tape, home: int, parts: list[int], optimizer: str, users: dict[int, set[int]]) -> Op:
    """One op that does the work of ``parts``: it reads gradient, parameter and state once and writes the last two.

    These are the bytes of a fused update kernel (TensorFlow's ApplyAdam, PyTorch's fused optimisers); the FLOPs are
    those of the parts. An update of some rows has the bytes of its parts.
    """
    ops, values = tape.ops, tape.values
    inside = set(parts)
    merged = Op(optimizer, "", ops[home].layer, "update", 0, 0, 0, label=f"{ops[home].label}/{optimizer}")
    for number in parts:
        merged.flops += ops[number].flops
        merged.products += ops[number].products
        for value in ops[number].reads:
            if values[value].producer not in inside and value not in merged.reads:
                merged.reads.append(value)
        merged.makes += ops[number].makes
        merged.replaces += [value for value in ops[number].replaces if values[value].producer not in inside]
    transient = sum(values[value].bytes for value in merged.reads if not values[value].persistent)
    merged.read, merged.written = transient + ops[home].persistent, ops[home].persistent
    if any(ops[number].sparse for number in parts):  # some rows of the table, which each part reads and writes
        merged.read, merged.written = sum(ops[n].read for n in parts), sum(ops[n].written for n in parts)
    merged.writes = [home]
    shared = {number for number in parts if users[number] - inside}
    merged.makes = [value for value in merged.makes if values[value].persistent or values[value].producer in shared]
    shape = ops[home].signature.partition("->")[2]
    state = ops[home].persistent - values[ops[home].makes[0]].bytes
    merged.signature = f"{optimizer}({shape},state={state})"
    return merged


def _groups(tape: Tape, alive: list[int], gradients: dict[int, int], apart: dict[int, int]) -> dict[int, int]:
    """Colocation: op -> group, for ops that share one.

    A parameter, the op that makes its final gradient and its update, of one op or of several (``apart``: each op and
    its parameter), are together; so are an op that overwrites a parameter or buffer and its home, and an op with its
    in-place twin.
    """
    pairs = [*apart.items(), *((number, home) for number in alive for home in tape.ops[number].writes)]
    pairs += [(number, tape.ops[number].twin) for number in alive if tape.ops[number].twin >= 0]
    pairs += [(home, tape.values[value].producer) for home, value in gradients.items()]
    home_of = joined(alive, pairs)
    size = Counter(home_of.values())
    return {number: home_of[number] for number in alive if size[home_of[number]] > 1}


def _write_after_read(tape: Tape, alive: list[int], readers: dict[int, list[int]]) -> list[tuple[int, int]]:
    """Pairs (reader, writer) that need a control edge: the writer overwrites what the reader reads, and no path leads
    from the one to the other yet. Pairs that follow from others are left out.

    Sets of ops are Python integers, one bit per reader; an op's set is dropped once its last successor has it.
    """
    writers = {number: tape.ops[number].replaces for number in alive if tape.ops[number].replaces}
    watched = sorted({reader for values in writers.values() for value in values for reader in readers[value]})
    bit = {number: 1 << position for position, number in enumerate(watched)}
    last_use: dict[int, int] = {}
    for number in alive:
        for value in tape.ops[number].reads:
            last_use[tape.values[value].producer] = number
    drop = defaultdict(list)
    for producer, number in last_use.items():
        if producer not in bit:
            drop[number].append(producer)
    before: dict[int, int] = {}  # op -> readers that come before it
    waits = []
    for number in alive:
        reached = 0
        for value in tape.ops[number].reads:
            producer = tape.values[value].producer
            reached |= before[producer] | bit.get(producer, 0)
        if number in writers:
            need = 0
            for value in writers[number]:
                for reader in readers[value]:
                    if reader < number:
                        need |= bit[reader]
            missing = [watched[position] for position in _bits(need & ~reached)]
            covered = 0
            for reader in missing:
                covered |= before[reader]
            for reader in missing:
                if not covered & bit[reader]:
                    waits.append((reader, number))
            reached |= need
        before[number] = reached
        for producer in drop[number]:
            del before[producer]
    return waits


def _bits(mask: int) -> list[int]:
    """Positions of the ones."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def _unique(op: Op, names: dict[str, int]) -> str:
    base = f"{op.layer}/{op.label or op.kind}" if op.layer else (op.label or op.kind)
    count = names[base] = names.get(base, -1) + 1
    return f"{base}.{count}" if count else base
