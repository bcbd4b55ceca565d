"""The compiled loops of ``late-acceptance``: draw a move, simulate it, keep it or take it back, many times in one call.

This module loads Numba.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simdev.sim.kernels.base_run import record
from simdev.sim.kernels.compiled import kernel, part
from simdev.sim.kernels.fifo import run_fifo
from simdev.sim.kernels.incremental import FULL_RUN, steps_after
from simdev.sim.kernels.memory import measure
from simdev.sim.kernels.move_state import BaseRun, MoveInputs, MoveWork
from simdev.sim.kernels.placement import is_valid
from simdev.sim.kernels.priority import run_priority
from simdev.sim.kernels.state import Inputs, Timeline, Workspace

CLUSTER, CUT, RUN, GROUP, MODULE, ORDER = range(6)  # kinds of moves
UNFIT = 1 << 61  # cost of a placement that does not fit, and its bytes over memory
ALWAYS = 1 << 62
DRAWS = 1000  # in a row without a move that can run, after which a walk ends
CUT_DRAWS = 200  # of an edge, until one is cut
MOST_GROWN, GROW = 128, 0.6  # units of a cluster at most; probability that the size drawn doubles
MOST_CUT, GROW_CUT = 32, 0.5  # the same around a tensor that is cut
LONGER = 0.8  # the same for units of a group
FARTHER = 0.75  # probability that the distance of a shift in the order doubles


class Moves(NamedTuple):
    """What draws read.

    ``unit_of_op`` int64 ``(n,)``; ``unit_ops[unit_ptr[u]:unit_ptr[u + 1]]``: the ops of a unit. ``neighbours``: the
    units that exchange tensors with each unit, CSR with ``neighbour_ptr``. ``group`` int64 ``(units,)``;
    ``group_units``: the units group by group, each in topological order, CSR with ``group_ptr``; ``group_place``: where
    each unit is among them. ``module_units``: the units module by module, CSR with ``module_ptr``. ``allowed`` bool
    ``(D, units)``; ``near``, ``every``: the devices that most moves, and all moves, may go to. ``source``, ``target``
    int64: the ops of each edge. ``shares`` float ``(6,)``: of the kinds of moves; ``far``: the share of moves that go
    to any device.
    """

    unit_of_op: np.ndarray
    unit_ptr: np.ndarray
    unit_ops: np.ndarray
    neighbour_ptr: np.ndarray
    neighbours: np.ndarray
    group: np.ndarray
    group_ptr: np.ndarray
    group_units: np.ndarray
    group_place: np.ndarray
    module_ptr: np.ndarray
    module_units: np.ndarray
    allowed: np.ndarray
    near: np.ndarray
    every: np.ndarray
    source: np.ndarray
    target: np.ndarray
    shares: np.ndarray
    far: float


class Late(NamedTuple):
    """A walk. ``devices`` uint32 ``(n,)``, ``rank`` and its inverse ``order`` int64 ``(n,)`` of the accepted placement;
    ``tried_*``: of the move; ``best_*``: of the best so far. ``history`` int64: earlier costs. ``state`` int64: the
    numbers :data:`STEP` to :data:`HIGH`; ``random`` uint64 ``(1,)``: state of the random numbers. ``members``,
    ``stamps`` int64 ``(units,)``: the units that a move takes, and the number of the move that each was seen in."""

    devices: np.ndarray
    tried_devices: np.ndarray
    rank: np.ndarray
    tried_rank: np.ndarray
    order: np.ndarray
    tried_order: np.ndarray
    best_devices: np.ndarray
    best_rank: np.ndarray
    history: np.ndarray
    state: np.ndarray
    random: np.ndarray
    members: np.ndarray
    stamps: np.ndarray


class RunBuffers(NamedTuple):
    """What a simulation writes to; ``step``, ``overflow`` int64 ``(1,)``, ``peak`` int64 ``(1, D)``."""

    timeline: Timeline
    workspace: Workspace
    step: np.ndarray
    peak: np.ndarray
    overflow: np.ndarray


class Windows(NamedTuple):
    """What the kernel of moves reads and writes: ``inputs``, ``base`` and ``work``; ``ops``, ``targets`` uint32
    ``(n,)``: the ops that a move takes, and their devices; ``ends`` int64 ``(2,)``; ``step`` int64 ``(1,)``."""

    inputs: MoveInputs
    base: BaseRun
    work: MoveWork
    ops: np.ndarray
    targets: np.ndarray
    ends: np.ndarray
    step: np.ndarray


STEP, COST, BEST, STAMP, TAKEN, LOW, HIGH = range(7)  # moves so far, costs, then the units and places of this move


@part
def draw_bits(late: Late):
    """The next 53 random bits (SplitMix64: Steele, Lea, Flood, OOPSLA 2014)."""
    late.random[0] += np.uint64(0x9E3779B97F4A7C15)
    bits = late.random[0]
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.int64((bits ^ (bits >> np.uint64(31))) >> np.uint64(11))


@part
def chance(late: Late):
    """A random number in [0, 1)."""
    return draw_bits(late) * 2.0**-53


@part
def below(late: Late, count):
    """A whole number from 0 to ``count - 1``; ``count`` is small beside 2^53."""
    return draw_bits(late) % np.int64(count)


@part
def draw_size(late: Late, most, double):
    """A size from 1 to ``most``: small ones are more likely."""
    size = np.int64(1)
    while size < most and chance(late) < double:
        size *= 2
    return size - below(late, (size + 1) // 2)


@part
def draw(moves: Moves, late: Late):
    """Draw a move into ``tried_*``; return whether there is one."""
    state = late.state
    state[TAKEN], state[LOW], state[HIGH] = 0, 0, -1
    kind, drawn = CLUSTER, chance(late)
    while kind < ORDER and drawn >= moves.shares[kind]:
        drawn -= moves.shares[kind]
        kind += 1
    if kind == ORDER:
        return shift(late)
    if kind == CUT:
        maker = reader = np.int64(-1)
        for _ in range(CUT_DRAWS if len(moves.source) else 0):
            edge = below(late, len(moves.source))
            maker, reader = moves.source[edge], moves.target[edge]
            if late.devices[maker] != late.devices[reader]:
                break
        if maker < 0:
            return False
        if chance(late) < 0.5:
            maker, reader = reader, maker
        take_around(moves, late, moves.unit_of_op[maker], late.devices[reader], MOST_CUT, GROW_CUT)
        return mark(moves, late, late.devices[reader])
    devices = moves.every if chance(late) < moves.far else moves.near
    away = devices[below(late, len(devices))]
    if kind == GROUP:
        take_all(moves, late, moves.group_ptr, moves.group_units, away)
    elif kind == MODULE:
        take_all(moves, late, moves.module_ptr, moves.module_units, away)
    elif kind == RUN:
        run_along(moves, late, below(late, len(late.stamps)), away)
    else:
        take_around(moves, late, below(late, len(late.stamps)), away, MOST_GROWN, GROW)
    return mark(moves, late, away)


@part
def mark(moves: Moves, late: Late, away):
    """Move the units that were taken to the device ``away``; return whether there are any."""
    for index in range(late.state[TAKEN]):
        for place in range(moves.unit_ptr[late.members[index]], moves.unit_ptr[late.members[index] + 1]):
            late.tried_devices[moves.unit_ops[place]] = away
    return late.state[TAKEN] > 0


@part
def device_of(moves: Moves, late: Late, unit):
    """The device of a unit in the accepted placement."""
    return late.devices[moves.unit_ops[moves.unit_ptr[unit]]]


@part
def take_all(moves: Moves, late: Late, ptr, units, away):
    """Take all units of a random group or module that are not on the device ``away``."""
    number, taken = below(late, len(ptr) - 1), 0
    for place in range(ptr[number], ptr[number + 1]):
        unit = units[place]
        if device_of(moves, late, unit) != away and moves.allowed[away, unit]:
            late.members[taken] = unit
            taken += 1
    late.state[TAKEN] = taken


@part
def run_along(moves: Moves, late: Late, pivot, away):
    """Take a run of units of the group of ``pivot`` that are on its device, in topological order."""
    home = device_of(moves, late, pivot)
    if home == away:
        return
    first, stop = moves.group_ptr[moves.group[pivot]], moves.group_ptr[moves.group[pivot] + 1]
    size = draw_size(late, stop - first, LONGER)
    place, taken = max(first, moves.group_place[pivot] - below(late, size)), 0
    while place < stop and taken < size:
        unit = moves.group_units[place]
        if device_of(moves, late, unit) == home and moves.allowed[away, unit]:
            late.members[taken] = unit
            taken += 1
        place += 1
    late.state[TAKEN] = taken


@part
def take_around(moves: Moves, late: Late, pivot, away, most, double):
    """Take ``pivot`` and units around it on its device, ``most`` units at most."""
    state, members, stamps, home = late.state, late.members, late.stamps, device_of(moves, late, pivot)
    if home == away or not moves.allowed[away, pivot]:
        return
    size = draw_size(late, most, double)
    state[STAMP] += 1
    members[0], stamps[pivot] = pivot, state[STAMP]
    taken, seen = 1, 0
    while seen < taken and taken < size:
        unit = members[seen]
        first, degree = moves.neighbour_ptr[unit], moves.neighbour_ptr[unit + 1] - moves.neighbour_ptr[unit]
        seen += 1
        offset = below(late, degree) if degree > 0 else 0
        for turn in range(degree):
            other = moves.neighbours[first + (offset + turn) % degree]
            here = device_of(moves, late, other) == home
            if taken < size and here and stamps[other] != state[STAMP] and moves.allowed[away, other]:
                stamps[other], members[taken] = state[STAMP], other
                taken += 1
    state[TAKEN] = taken


@part
def shift(late: Late):
    """Take one op to another place in the order."""
    n, order, rank = len(late.order), late.tried_order, late.tried_rank
    old, distance = below(late, n), draw_size(late, n // 2, FARTHER)
    new = min(n - 1, max(0, old + distance if chance(late) < 0.5 else old - distance))
    op, step = order[old], 1 if old < new else -1
    for place in range(old, new, step):
        order[place] = order[place + step]
        rank[order[place]] = place
    order[new], rank[op] = op, new
    late.state[LOW], late.state[HIGH] = min(old, new), max(old, new)
    return old != new


@part
def take(moves: Moves, late: Late, devices, from_devices, order, from_order, rank):
    """Copy what the move changed."""
    for index in range(late.state[TAKEN]):
        for place in range(moves.unit_ptr[late.members[index]], moves.unit_ptr[late.members[index] + 1]):
            op = moves.unit_ops[place]
            devices[op] = from_devices[op]
    for place in range(late.state[LOW], late.state[HIGH] + 1):
        order[place] = from_order[place]
        rank[order[place]] = place


@part
def undo(moves: Moves, late: Late):
    """Take the move back."""
    take(moves, late, late.tried_devices, late.devices, late.tried_order, late.order, late.tried_rank)


@part
def limit(late: Late):
    """The step time from which on a placement is refused."""
    most = max(late.state[COST], late.history[late.state[STEP] % len(late.history)])
    return ALWAYS if most >= UNFIT else most + 1


@part
def settle(moves: Moves, late: Late, step_ns, overflow):
    """Keep the move if it costs no more than the present placement, or than the one ``len(history)`` moves ago; return
    whether it is kept."""
    state, history = late.state, late.history
    place, refused = state[STEP] % len(history), step_ns >= limit(late)
    cost = UNFIT + overflow if overflow > 0 else step_ns
    state[STEP] += 1
    kept = not refused and (cost <= state[COST] or cost <= history[place])
    if kept:
        take(moves, late, late.devices, late.tried_devices, late.order, late.tried_order, late.rank)
        state[COST] = cost
        if cost < state[BEST]:
            state[BEST] = cost
            for op in range(len(late.rank)):
                late.best_devices[op], late.best_rank[op] = late.devices[op], late.rank[op]
    else:
        undo(moves, late)
    history[place] = min(history[place], state[COST])
    return kept


@part
def judge(inputs: Inputs, moves: Moves, late: Late, run: RunBuffers):
    """Keep the move of the run, or take it back; return whether it is kept."""
    answers = run.step, run.peak, run.overflow
    measure(inputs, late.tried_devices, 0, limit(late), run.timeline, run.workspace, *answers)
    return settle(moves, late, run.step[0], run.overflow[0])


@part
def draw_valid(inputs: Inputs, moves: Moves, late: Late):
    """Draw a move that can run; return whether there is one."""
    for _ in range(DRAWS):
        if draw(moves, late):
            if is_valid(inputs, late.tried_devices):
                return True
            undo(moves, late)
    return False


@kernel
def walk_priority(inputs: Inputs, moves: Moves, late: Late, run: RunBuffers, count):
    """Simulate ``count`` moves under the order ``priority``; return how many there were: less if no move is left."""
    for done in range(count):
        if not draw_valid(inputs, moves, late):
            return done
        run_priority(inputs, late.tried_devices, late.tried_rank, run.timeline, run.workspace)
        judge(inputs, moves, late, run)
    return count


@kernel
def walk_fifo(inputs: Inputs, moves: Moves, late: Late, run: RunBuffers, windows: Windows, count):
    """The same under the order ``fifo`` on devices of one slot: only moves that may be kept, and those that change too
    much, take a full run."""
    run_fifo(inputs, late.devices, run.timeline, run.workspace)
    rebase(late, run, windows)
    for done in range(count):
        if not draw_valid(inputs, moves, late):
            return done
        k, refused = list_ops(moves, late, windows), limit(late)
        changed = late.devices, late.tried_devices, windows.ends, windows.ops[:k], windows.targets[:k]
        steps_after(windows.inputs, windows.base, windows.work, *changed, refused, windows.step)
        if windows.step[0] != FULL_RUN and windows.step[0] >= refused:
            settle(moves, late, windows.step[0], 0)
            continue
        for index in range(k):  # steps_after() has taken them back
            late.tried_devices[windows.ops[index]] = windows.targets[index]
        run_fifo(inputs, late.tried_devices, run.timeline, run.workspace)
        if judge(inputs, moves, late, run):
            rebase(late, run, windows)
    return count


@part
def list_ops(moves: Moves, late: Late, windows: Windows):
    """List the ops that the move takes, and their devices; return how many they are."""
    k = 0
    for index in range(late.state[TAKEN]):
        for place in range(moves.unit_ptr[late.members[index]], moves.unit_ptr[late.members[index] + 1]):
            op = moves.unit_ops[place]
            windows.ops[k], windows.targets[k] = op, late.tried_devices[op]
            k += 1
    windows.ends[1] = k
    return k


@part
def rebase(late: Late, run: RunBuffers, windows: Windows):
    """Let moves start from the accepted placement, whose full run is in the buffers."""
    space, kept = run.workspace, (windows.base, windows.work)
    record(windows.inputs, late.devices, run.timeline, space.state, space.base, space.line, *kept)


@kernel
def draw_move(inputs: Inputs, moves: Moves, late: Late):
    """Draw a move that can run, for a simulation elsewhere; return whether there is one."""
    return draw_valid(inputs, moves, late)


@kernel
def settle_move(moves: Moves, late: Late, step_ns, overflow):
    """Keep the move that :func:`draw_move` has drawn, or take it back."""
    settle(moves, late, step_ns, overflow)
