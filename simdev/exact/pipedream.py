"""PipeDream's planner (Narayanan et al., SOSP 2019, section 3.1): pipeline stages with replicas, level by level.

The inputs are a profile of layers and the levels of machines. A *state* is an ideal of the layer graph; a stage is the
difference of two nested states. On ``m`` replicas a stage takes ``(T + 4 (m - 1) W / (B m)) / m``: its time ``T`` and
the exchange of its ``W`` parameter bytes at ``B`` bytes per second. The plan minimises the slowest stage.

Three properties of the published program (msr-fiddle/pipedream) are kept, so that its figures can be reproduced. A
stage is no faster than the activations that enter or leave it, whether its replicas are on one machine or not. On upper
levels, the exchange of a stage that is the last of several is not divided among the machines below. Layers are reached
from the first source; other sources are added when a reader needs them.

One defect is corrected: the program builds its states by walking between antichains, which does not end on wide graphs
(ResNet-101, DenseNet-121). Here they are enumerated as ideals; beyond a limit, the states are the prefixes of one order
of the layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simdev.errors import InvalidInput, Unsupported
from simdev.exact.contract import topological


@dataclass(frozen=True, eq=False)
class Profile:
    """``n`` layers in file order.

    ``seconds`` of forward and backward, ``activation`` and ``parameter`` bytes, float ``(n,)``, and the layers that
    each layer reads.
    """

    name: str
    layers: tuple[str, ...]
    seconds: np.ndarray
    activation: np.ndarray
    parameter: np.ndarray
    predecessors: tuple[frozenset[int], ...]


@dataclass(frozen=True)
class ReplicatedStage:
    """Layers (numbers) on ``replicas`` workers."""

    layers: tuple[int, ...]
    replicas: int


@dataclass(frozen=True)
class StageSplit:
    """A plan and the figures to compare it with.

    ``seconds`` of the slowest stage; ``single_seconds`` on one worker; ``data_parallel_seconds`` with every layer on
    all workers; ``states`` examined. The plan is optimal over these states. ``linear`` says that they are the prefixes
    of one order.
    """

    seconds: float
    single_seconds: float
    data_parallel_seconds: float
    stages: tuple[ReplicatedStage, ...]
    states: int
    linear: bool


def plan(
    profile: Profile,
    workers: Sequence[int],
    bandwidths: Sequence[float],
    *,
    memory: float = math.inf,
    transfers: bool = True,
    replicate: bool = True,
    limit: int = 2000,
) -> StageSplit:
    """Plan for ``workers[i]`` machines on level ``i`` (innermost first) joined at ``bandwidths[i]`` bytes per second.

    ``memory`` is the limit in bytes of what a worker stores: activations and parameters of its stage, once for each
    minibatch in flight. If ``transfers`` is false, activations and gradients pass between stages in no time. If
    ``replicate`` is false, every stage has one worker. With more than ``limit`` states, the prefixes of one order are
    used. Raises :class:`InvalidInput` for invalid levels, :class:`Unsupported` if memory admits no plan.
    """
    if len(workers) != len(bandwidths) or not workers or min(workers) < 1 or min(bandwidths) <= 0:
        raise InvalidInput("expected workers and a positive bandwidth for each level", source=profile.name)
    states, linear = _states(profile, limit)
    totals = states @ np.stack([profile.seconds, profile.activation, profile.parameter], axis=1)
    outgoing = _outgoing(profile, states)
    nested = states.astype(np.float32) @ (~states).T.astype(np.float32) == 0  # [i, j]: state i is within state j
    # Spans start after state i - 1 (0: at the beginning) and end with state j.
    start = np.vstack([np.zeros((1, 3)), totals])
    spans = totals[None] - start[:, None]
    valid = np.vstack([np.ones((1, len(states)), bool), nested & ~nested.T])
    seconds = np.where(valid, spans[:, :, 0], np.inf)
    tables = []
    below = 1
    for level, (count, bandwidth) in enumerate(zip(workers, bandwidths, strict=True)):
        first_only = level == len(workers) - 1
        table = _level(
            seconds, spans, valid, outgoing, count, below, bandwidth, memory, transfers, replicate, first_only
        )
        tables.append(table)
        seconds, below = table.best[count], count
    best = float(tables[-1].best[workers[-1]][0, -1])
    if not math.isfinite(best):
        raise Unsupported(f"{profile.name}: no plan keeps each worker within {memory:.6g} bytes")
    cuts = _stages(tables, workers, 0, len(states) - 1)
    held = np.zeros(len(profile.layers), bool)
    stages = []
    for state, replicas in cuts:
        stages.append(ReplicatedStage(tuple(np.flatnonzero(states[state] & ~held).tolist()), replicas))
        held |= states[state]
    single, data_parallel, below = float(totals[-1, 0]), float(totals[-1, 0]), 1
    for count, bandwidth in zip(workers, bandwidths, strict=True):
        exchange = 4 * (count - 1) * float(totals[-1, 2]) / (bandwidth * count) / below
        data_parallel, below = (data_parallel + exchange) / count, count
    return StageSplit(best, single, data_parallel, tuple(stages), len(states), linear)


@dataclass
class _Table:
    """The best plans of one level.

    ``best[m]`` float ``(states + 1, states)``: slowest stage of a span on exactly ``m`` machines; ``cut[m]`` the state
    before its last stage (-1: one stage) and ``last[m]`` that stage's replicas.
    """

    best: list[np.ndarray]
    cut: list[np.ndarray]
    last: list[np.ndarray]


def _level(
    seconds, spans, valid, outgoing, count, below, bandwidth, memory, transfers, replicate, first_only
) -> _Table:
    rows = 1 if first_only else len(seconds)
    stash = spans[:, :, 1] + spans[:, :, 2]
    table = _Table([np.full_like(seconds, np.inf)], [np.full(seconds.shape, -1)], [np.zeros(seconds.shape, int)])
    for m in range(1, count + 1):
        exchange = 4 * (m - 1) * spans[:, :, 2] / (bandwidth * m)
        fits = math.ceil((count - m) / m) * stash <= memory
        whole = np.where(valid & (fits if replicate or m == 1 else False), (seconds + exchange / below) / m, np.inf)
        best, cut, last = whole.copy(), np.full(seconds.shape, -1), np.full(seconds.shape, m)
        for own in range(1, m if replicate else min(m, 2)):
            exchange = 4 * (own - 1) * spans[:, :, 2] / (bandwidth * own)
            stage = (seconds + exchange) / own  # [k + 1, j]
            stage = np.where(math.ceil((count - m) / own) * stash <= memory, stage, np.inf)
            if transfers:
                arriving = np.concatenate([[0.0], 2 * outgoing / (bandwidth * own)])
                leaving = 2 * np.append(outgoing[:-1], 0.0) / (bandwidth * own)
                stage = np.maximum(stage, np.maximum(arriving[:, None], leaving[None]))
            before = table.best[m - own]
            for row in range(rows):
                # An end state j after each state k that the span still contains.
                value = np.maximum(before[row, :, None], stage[1:])
                k = np.argmin(value, axis=0)
                least = value[k, np.arange(len(k))]
                better = least < best[row]
                best[row, better], cut[row, better], last[row, better] = least[better], k[better], own
        table.best.append(best)
        table.cut.append(cut)
        table.last.append(last)
    return table


def _stages(tables: list[_Table], workers: Sequence[int], row: int, state: int) -> list[tuple[int, int]]:
    """The last state and the replicas of each stage, in order; on the lowest level a replica is a worker."""
    found, level = [], len(tables) - 1

    def descend(level, row, state, m, copies):
        cut, own = int(tables[level].cut[m][row, state]), int(tables[level].last[m][row, state])
        if cut >= 0:
            descend(level, row, cut, m - own, copies)
            row = cut + 1
        if level == 0:
            found.append((state, own * copies))
        else:
            descend(level - 1, row, state, workers[level - 1], own * copies)

    descend(level, row, state, workers[level], 1)
    return found


def _states(profile: Profile, limit: int) -> tuple[np.ndarray, bool]:
    """bool ``(states, n)``, by growing size: the ideals that are reached from the first source.

    A step adds a reader of a layer inside, with all layers that the reader needs. If there are more than ``limit``
    states, they are the prefixes of one order.
    """
    n = len(profile.predecessors)
    arcs = np.array([(p, c) for c, before in enumerate(profile.predecessors) for p in before], np.int64).reshape(-1, 2)
    order = topological(n, arcs[:, 0], arcs[:, 1])
    closure = [1 << c for c in range(n)]
    readers = [0] * n
    for c in order:
        for p in profile.predecessors[c]:
            closure[c] |= closure[p]
            readers[p] |= 1 << c
    start = next(c for c in range(n) if not profile.predecessors[c])
    found, waiting = {closure[start]}, [closure[start]]
    while waiting and len(found) <= limit:
        state = waiting.pop()
        for c in _members(state):
            for reader in _members(readers[c] & ~state):
                bigger = state | closure[reader]
                if bigger not in found:
                    found.add(bigger)
                    waiting.append(bigger)
    linear = len(found) > limit
    if linear:
        held, found = 0, set()
        for c in order:
            held |= closure[c]
            found.add(held)
    states = np.zeros((len(found), n), bool)
    for row, state in enumerate(sorted(found, key=lambda state: (state.bit_count(), state))):
        states[row, list(_members(state))] = True
    return states, linear


def _members(bits: int):
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def _outgoing(profile: Profile, states: np.ndarray) -> np.ndarray:
    """float ``(states,)``: activation bytes that leave a state, as the published program counts them.

    It counts the state's last layers, and each layer before one of them that has a reader not before that one. A layer
    whose readers are all inside therefore counts too if they lie on different branches.
    """
    n = len(profile.predecessors)
    readers = np.zeros((n, n), bool)
    for c, before in enumerate(profile.predecessors):
        readers[list(before), c] = True
    ancestors = readers.T.copy()  # [c, p]: p is before c
    arcs = np.argwhere(readers)
    for c in topological(n, arcs[:, 0], arcs[:, 1]):
        if profile.predecessors[c]:
            ancestors[c] |= ancestors[list(profile.predecessors[c])].any(axis=0)
    beside = np.zeros((n, n), bool)  # [c, p]: p is before c and has a reader that is neither c nor before c
    for c in range(n):
        beside[c] = ancestors[c] & (readers & ~(ancestors[c] | (np.arange(n) == c))).any(axis=1)
    last = states & ~(states.astype(np.float32) @ readers.T.astype(np.float32) > 0)
    counted = last | (last.astype(np.float32) @ beside.astype(np.float32) > 0)
    return counted @ profile.activation
