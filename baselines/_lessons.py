"""Training of the score of ``learned-search``: drawn graphs on drawn machines, moves with their effects, and the fit.

``python -m simdev.baselines._lessons -o FILE.npz --seed 0`` makes the weights again.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np

from simdev.baselines._proposals import FEATURES, Network, Proposed, random_network
from simdev.baselines._search import SearchState, starts
from simdev.baselines._units import choices
from simdev.graphs.random_graphs import DrawnTensor, GradientTape, linear
from simdev.placers.budget import Budget
from simdev.placers.score import Score
from simdev.problem.costs import CostModel
from simdev.problem.graph import ComputationGraph
from simdev.problem.problem import Problem
from simdev.problem.topology import Device, DeviceKind, Link, Topology

WIDTH = 12  # moves tried from each placement
STALE = 6  # placements without a gain after which a random move is taken
LEAST_DEVIATION = 0.05  # of a feature: one that hardly varies is not blown up
RATE, DECAY = 2e-3, 1e-4


def drawn_graph(rng: np.random.Generator, name: str) -> ComputationGraph:
    """A training step of a drawn network: blocks of towers, of parallel branches, of random cells, of a grid that
    recurs, of wide tables, in a drawn sequence. No workload of the shelf is among them."""
    tape = GradientTape(name)
    rows = int(rng.choice([32, 64, 256, 1024, 4096]))
    width = int(rng.choice([128, 256, 512, 1024]))
    x = tape.op("mul", "input", [tape.input("data", rows, width)], (rows, width))
    x = linear(tape, "stem", x, width)
    pieces, kind = int(rng.integers(2, 9)), str(rng.choice([*BLOCKS, "mixed"]))
    for number in range(pieces):
        block = str(rng.choice(list(BLOCKS))) if kind == "mixed" else kind
        if x.handle > 400:  # so many tensors so far
            break
        x = BLOCKS[block](tape, rng, f"{block}{number}", x)
    if rng.random() < 0.5:
        x = linear(tape, "head", x, int(rng.choice([1000, 8000, 32000])))
    return tape.build(tape.op("cross_entropy", "loss", [x], (1,), flops=5 * x.size))


def _tower(tape: GradientTape, rng, layer: str, x: DrawnTensor) -> DrawnTensor:
    """Residual layers, one after another."""
    grow = int(rng.choice([1, 2, 4]))
    for number in range(int(rng.integers(1, 5))):
        y = tape.op("native_batch_norm", f"{layer}.{number}.norm", [x], x.shape, flops=4 * x.size)
        y = tape.op("relu_", f"{layer}.{number}.up", [linear(tape, f"{layer}.{number}.up", y, grow * x.shape[1])],
                    (x.shape[0], grow * x.shape[1]))  # fmt: skip
        y = linear(tape, f"{layer}.{number}.down", y, x.shape[1])
        x = tape.op("add", f"{layer}.{number}", [x, y], x.shape)
    return x


def _branches(tape: GradientTape, rng, layer: str, x: DrawnTensor) -> DrawnTensor:
    """Branches of unequal depth and width, put side by side."""
    ends, (rows, width) = [], x.shape
    for branch in range(int(rng.integers(2, 8))):
        y = x
        for depth in range(int(rng.integers(1, 5))):
            where = f"{layer}.branch{branch}.{depth}"
            y = linear(tape, where, y, max(16, int(width * rng.choice([0.25, 0.5, 1.0]))))
            y = tape.op("relu_", where, [y], y.shape)
        ends.append(y)
    joined = tape.op("cat", layer, ends, (rows, sum(end.shape[1] for end in ends)), flops=0)
    return linear(tape, f"{layer}.join", joined, width)


def _cell(tape: GradientTape, rng, layer: str, x: DrawnTensor) -> DrawnTensor:
    """A random graph of ops of one size: each reads one or two earlier ones, and the loose ends are summed."""
    states, used, (rows, width) = [x], set(), x.shape
    for number in range(int(rng.integers(3, 12))):
        ends = []
        for side in range(2):
            chosen = int(rng.integers(len(states)))
            used.add(chosen)
            y = states[chosen]
            if rng.random() < 0.7:
                y = tape.op("tanh", f"{layer}.{number}.{side}", [linear(tape, f"{layer}.{number}.{side}", y, width)],
                            (rows, width))  # fmt: skip
            ends.append(y)
        states.append(tape.op("add", f"{layer}.{number}", ends, (rows, width)))
    loose = [state for number, state in enumerate(states) if number not in used]
    total = loose[0]
    for end in loose[1:]:
        total = tape.op("add", f"{layer}.sum", [total, end], (rows, width))
    return total


def _grid(tape: GradientTape, rng, layer: str, x: DrawnTensor) -> DrawnTensor:
    """Layers that recur over a sequence, with weights shared along it: cell (layer, place) reads the cell below and
    the cell before."""
    layers, length, (rows, width) = int(rng.integers(1, 5)), int(rng.integers(4, 16)), x.shape
    part = max(1, rows // length)
    below = [tape.view(x, part, width) for _ in range(length)]
    for number in range(layers):
        where, before, above = f"{layer}.layer{number}", None, []
        for value in below:
            joined = [value] if before is None else [value, before]
            y = value if before is None else tape.op("cat", where, joined, (part, 2 * width), flops=0)
            full = tape.weight(where, "weight", 2 * width, width)
            y = tape.op("addmm", where, [y], (part, width), flops=2 * part * y.shape[1] * width, weights=(full,))
            gate = tape.op("sigmoid", where, [y], y.shape)
            before = tape.op("mul", where, [tape.op("tanh", where, [y], y.shape), gate], y.shape)
            above.append(before)
        below = above
    return tape.op("cat", layer, below, (part * length, width), flops=0)


def _tables(tape: GradientTape, rng, layer: str, x: DrawnTensor) -> DrawnTensor:
    """Large tables that are read side by side."""
    rows, width = x.shape
    ends = [x]
    for number in range(int(rng.integers(2, 12))):
        words = tape.input(f"{layer}.{number}.words", rows, 1)
        table = tape.weight(f"{layer}.{number}", "weight", int(rng.choice([1000, 20000, 200000])), width)
        ends.append(tape.op("embedding", f"{layer}.{number}", [words], (rows, width), flops=0, weights=(table,)))
    joined = tape.op("cat", layer, ends, (rows, width * len(ends)), flops=0)
    return linear(tape, f"{layer}.join", joined, width)


BLOCKS = {"tower": _tower, "branches": _branches, "cell": _cell, "grid": _grid, "tables": _tables}


def drawn_machine(rng: np.random.Generator, graph: ComputationGraph) -> Topology:
    """2 to 8 accelerators on switches under a host or joined directly, of one kind or, now and then, two; their memory
    holds the graph between barely and easily."""
    count = int(rng.integers(2, 9))
    need = int(graph.op_persistent_bytes.sum() + 0.7 * graph.tensor_bytes.sum())
    room = need / count * (3 ** rng.uniform(0.2, 2.5))
    kinds = []
    for number in range(2 if rng.random() < 0.15 else 1):
        rate = 10 ** rng.uniform(12.0, 14.0)
        kinds.append(
            DeviceKind(
                f"drawn{number}",
                int(room) + (1 << 20),
                {"f32": rate},
                rate * 10 ** rng.uniform(-2.0, -1.2),
                launch_ns=int(rng.integers(2000, 9000)),
                compute_efficiency={"default": float(rng.uniform(0.3, 0.9))},
                memory_efficiency={"default": 0.8},
            )
        )
    host = DeviceKind("host", 1 << 38, {"f32": 5e11}, 5e10, launch_ns=1000)
    devices = [Device("cpu0", host, host=True)]
    devices += [Device(f"gpu{i}", kinds[int(rng.integers(len(kinds)))]) for i in range(count)]
    bandwidth, latency = 10 ** rng.uniform(9.5, 11.2), int(rng.integers(500, 6000))
    shape = str(rng.choice(["pairs", "one switch", "mesh"]))
    each = 2 if shape == "pairs" else count
    switches = [f"pcie{i}" for i in range(-(-count // each))]
    links = [Link(("cpu0", name), int(min(bandwidth, 2e10)), latency) for name in switches]
    links += [Link((f"gpu{i}", switches[i // each]), int(min(bandwidth, 2e10) * 0.9), latency) for i in range(count)]
    if shape == "mesh":
        links += [
            Link((f"gpu{a}", f"gpu{b}"), int(bandwidth * rng.choice([1, 2])), latency)
            for a in range(count)
            for b in range(a + 1, count)
            if rng.random() < 0.7
        ]
    return Topology("drawn", tuple(devices), tuple(links), tuple(switches))


def drawn_problem(seed: int, number: int) -> Problem:
    """The problem ``number`` of ``seed``."""
    rng = np.random.default_rng([seed, number])
    graph = drawn_graph(rng, f"drawn-{number}")
    return Problem.build(graph, drawn_machine(rng, graph), CostModel(calibrated=False))


def lessons(
    problem: Problem, rng: np.random.Generator, states: int, network: Network | None
) -> tuple[np.ndarray, np.ndarray]:
    """Moves from the placements of a search and their gains.

    From each placement, :data:`WIDTH` moves are simulated, and the best one is taken if it does not make the placement
    worse. After :data:`STALE` placements without a gain, a random one is taken. Without ``network``, the moves are
    drawn; with it, half of them are those that it would choose. Returns features float32 ``(k, WIDTH, F)`` (nan: there
    is no such move) and gains float32 ``(k, WIDTH)``, the share of the step time or of the overflow that a move saves,
    of the placements from which at least one move saves something.
    """
    allowed, budget = choices(problem), Budget(problem, evaluations=math.inf)
    search = Proposed(problem, allowed, budget, rng, network=network, width=WIDTH * (1 if network is None else 4))
    state = search.state(starts(problem, allowed)[int(rng.integers(2))])
    features, gains, stale = [], [], 0
    for _ in range(states):
        count = search.draw(state)
        if count == 0:
            break
        kept = np.arange(count)[:WIDTH]
        if network is not None:
            order = np.argsort(-search.rate(count), kind="stable")
            kept = np.concatenate([order[: WIDTH // 2], rng.permutation(order[WIDTH // 2 :])[: WIDTH - WIDTH // 2]])
        below = state.score.step_ns + 1 if state.score.fits else None
        found = [_score(search, state, row, below) for row in kept.tolist()]
        gain = _gains(state.score, found)
        if gain.any():
            shown = np.full((WIDTH, len(FEATURES)), np.nan, np.float32)
            shown[: len(kept)] = search.features[kept]
            features.append(shown)
            gains.append(gain)
        best, stale = min(range(len(found)), key=found.__getitem__), 0 if gain.any() else stale + 1
        if found[best] <= state.score or stale >= STALE:
            if stale >= STALE:
                best, stale = int(rng.integers(len(found))), 0
            row = int(kept[best])
            state = SearchState(search.moved(state.devices, row), state.bias, _score(search, state, row, None))
    return np.array(features, np.float32), np.array(gains, np.float32)


def _score(search: Proposed, state: SearchState, row: int, below: int | None) -> Score:
    """The score after the drawn move ``row`` from ``state``; from ``below`` ns on, only a bound of it."""
    devices = search.moved(state.devices, row)
    return search.budget.evaluate(devices[search.unit_of_op], below=below)


def _gains(now: Score, found: list[Score]) -> np.ndarray:
    """float32 ``(WIDTH,)``: the share of the step time that each move saves; of the overflow, if there is any."""
    gains = np.zeros(WIDTH, np.float32)
    if now.fits:
        gains[: len(found)] = [1 - score.step_ns / now.step_ns if score.fits else 0.0 for score in found]
    else:
        gains[: len(found)] = [1 - score.known_overflow_bytes / now.known_overflow_bytes for score in found]
    return np.maximum(gains, 0)


def fit(
    features: np.ndarray, gains: np.ndarray, seed: int, epochs: int = 12, batch: int = 256
) -> tuple[Network, dict[str, float]]:
    """The network that fits the lessons, and how well it chooses on a tenth of them that it was not fitted to.

    The loss is the cross-entropy between the softmax of the scores of the moves from one placement and the square roots
    of their gains, normalised (ListNet). Adam with a rate that falls from 0.002 along half a cosine.
    """
    rng = np.random.default_rng(seed)
    valid = ~np.isnan(features[..., 0])
    mean, deviation = (getattr(features[valid], name)(axis=0, dtype=np.float64) for name in ("mean", "std"))
    scale = 1 / np.maximum(deviation, LEAST_DEVIATION)
    x = np.clip((np.nan_to_num(features) - mean) * scale, -5, 5).astype(np.float32)
    wanted = np.sqrt(gains)
    wanted /= wanted.sum(axis=1, keepdims=True)
    start = random_network(rng)[2:]
    held = rng.permutation(len(x))
    test, train = held[: len(x) // 10], held[len(x) // 10 :]
    adam = _Adam([array.astype(np.float32) for array in start], epochs * max(1, len(train) // batch))
    for _ in range(epochs):
        order = rng.permutation(train)
        for low in range(0, max(1, len(order) - batch + 1), batch):
            rows = order[low : low + batch]
            adam.step(_gradient(adam.weights, x[rows], valid[rows], wanted[rows])[1])
    report = _report(_scores(adam.weights, x[test])[0], valid[test], gains[test])
    return Network(mean, scale, *(array.astype(np.float64) for array in adam.weights)), report


class _Adam:
    """Adam (Kingma, Ba 2015) with a decay of the weights."""

    def __init__(self, weights: list[np.ndarray], total: int):
        self.weights, self.total, self.steps = weights, total, 0
        self.first, self.second = ([np.zeros_like(array) for array in weights] for _ in range(2))

    def step(self, gradient: list[np.ndarray]) -> None:
        self.steps += 1
        rate = RATE * 0.5 * (1 + np.cos(np.pi * self.steps / max(self.total, 1)))
        for number, slope in enumerate(gradient):
            slope = slope + DECAY * self.weights[number]
            self.first[number] += 0.1 * (slope - self.first[number])
            self.second[number] += 0.001 * (slope * slope - self.second[number])
            scale = np.sqrt(self.second[number] / (1 - 0.999**self.steps)) + 1e-8
            self.weights[number] = self.weights[number] - rate * (self.first[number] / (1 - 0.9**self.steps)) / scale


def _report(scores: np.ndarray, valid: np.ndarray, gains: np.ndarray) -> dict[str, float]:
    """How the moves of largest score compare with random ones."""
    chosen = np.where(valid, scores, -np.inf).argmax(axis=1)
    gain, most = np.take_along_axis(gains, chosen[:, None], 1)[:, 0], gains.max(axis=1)
    return {
        "placements": len(scores),
        "share of improving moves, random": float((gains > 0).sum() / valid.sum()),
        "share of improving moves, chosen": float((gain > 0).mean()),
        "gain over the best gain, random": float((gains.sum(axis=1) / valid.sum(axis=1) / most).mean()),
        "gain over the best gain, chosen": float((gain / most).mean()),
    }


def _scores(weights, x):
    first, first_bias, second, second_bias, last = weights
    hidden = np.maximum(x @ first + first_bias, 0)
    above = np.maximum(hidden @ second + second_bias, 0)
    return above @ last, hidden, above


def _gradient(weights, x, valid, wanted):
    """The loss of a batch and its gradient."""
    scores, hidden, above = _scores(weights, x)
    scores = np.where(valid, scores, -1e9)
    scores = scores - scores.max(axis=1, keepdims=True)
    chance = np.exp(scores)
    chance /= chance.sum(axis=1, keepdims=True)
    loss = float(-(wanted * np.log(np.maximum(chance, 1e-12))).sum() / len(x))
    slope = (chance - wanted) / len(x)
    to_above = slope[..., None] * weights[4] * (above > 0)
    to_hidden = (to_above @ weights[2].T) * (hidden > 0)
    flat = x.reshape(-1, x.shape[-1])
    return loss, [
        flat.T @ to_hidden.reshape(len(flat), -1),
        to_hidden.sum(axis=(0, 1)),
        hidden.reshape(len(flat), -1).T @ to_above.reshape(len(flat), -1),
        to_above.sum(axis=(0, 1)),
        (above * slope[..., None]).sum(axis=(0, 1)),
    ]


def collect(seed: int, numbers: range, states: int, network: Network | None, note=print):
    """The lessons of the problems ``numbers``."""
    features, gains, began = [], [], time.monotonic()
    for count, number in enumerate(numbers, 1):
        problem = drawn_problem(seed, number)
        rows, gain = lessons(problem, np.random.default_rng([seed, number, 1]), states, network)
        if len(rows):
            features.append(rows)
            gains.append(gain)
        if count % 50 == 0:
            note(
                f"{count} of {len(numbers)} graphs, {sum(map(len, gains))} placements, {time.monotonic() - began:.0f} s"
            )
    return np.concatenate(features), np.concatenate(gains)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--graphs", type=int, default=300, help="in each of the two rounds")
    parser.add_argument("--states", type=int, default=60, help="placements of each graph")
    given = parser.parse_args()

    def note(line):
        print(line, file=sys.stderr, flush=True)

    rounds = []
    network: Network | None = None
    for first in (0, given.graphs):
        rounds.append(collect(given.seed, range(first, first + given.graphs), given.states, network, note))
        features, gains = (np.concatenate(parts) for parts in zip(*rounds, strict=True))
        network, report = fit(features, gains, given.seed)
        note(report)
        np.savez(given.out, **network._asdict())


if __name__ == "__main__":
    main()
