"""Families of random training graphs, for placers that learn on some graphs and are tried on others.

Three generators in the spirit of the sets of Placeto (Addanki et al., "Placeto: Learning Generalizable Device Placement
Algorithms for Distributed Machine Learning", NeurIPS 2019, section 4.1: 32 graphs each) and GDP (Zhou et al., "GDP:
Generalized Device Placement for Dataflow Graphs", 2019): ``nmt`` (LSTM translation with attention), ``nasnet`` (stacks
of one random cell) and ``inception`` (modules of parallel branches). The papers' sets were never published; these are
drawn anew. Every graph is a whole training step: forward, backward and one update per parameter. PyTorch is not needed.

A seed gives one graph: ``family_graph("nmt", 3)``. :func:`family_split` gives training and test seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import numpy as np

from simdev.errors import UnknownName
from simdev.problem.graph import ComputationGraph, GraphBuilder

FLOAT_BYTES = 4
# Kinds of the backward op of a forward kind (ATen's names); None: the gradient is a view, no op runs.
BACKWARD = {
    "addmm": "mm", "mm": "mm", "bmm": "bmm", "convolution": "convolution_backward",
    "native_batch_norm": "native_batch_norm_backward", "relu_": "threshold_backward", "sigmoid": "sigmoid_backward",
    "tanh": "tanh_backward", "mul": "mul", "add": None, "cat": None, "_softmax": "_softmax_backward_data",
    "max_pool2d_with_indices": "max_pool2d_with_indices_backward", "avg_pool2d": "avg_pool2d_backward",
    "mean": "div", "embedding": "embedding_dense_backward", "cross_entropy": "cross_entropy_backward",
}  # fmt: skip


@dataclass(frozen=True)
class DrawnTensor:
    """A tensor of the step, or a view of one: its handle in the builder and its shape (a view may be smaller)."""

    handle: int
    shape: tuple[int, ...]
    trained: bool = True  # whether a gradient flows back to it

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)


CellState = tuple[DrawnTensor | None, DrawnTensor | None]  # output and memory of a cell; None before the first step


@dataclass
class _DrawnStep:
    kind: str
    layer: str
    inputs: tuple[DrawnTensor, ...]
    weights: tuple[str, ...]
    output: DrawnTensor
    flops: int


@dataclass
class GradientTape:
    """Records forward ops and then writes their backward ops and the updates, as automatic differentiation would."""

    name: str
    meta: dict = field(default_factory=dict)

    def __post_init__(self):
        self.builder = GraphBuilder(self.name, self.meta)
        self._steps: list[_DrawnStep] = []
        self._weights: dict[str, DrawnTensor] = {}
        self._uses: dict[str, int] = {}

    def input(self, name: str, *shape: int) -> DrawnTensor:
        op = self.builder.op(name, "input", outputs=[prod(shape) * FLOAT_BYTES])
        return DrawnTensor(self.builder.outputs(op)[0], shape, trained=False)

    def weight(self, layer: str, name: str, *shape: int) -> str:
        """A parameter with one slot of optimiser state; the same name is the same parameter. The parameters of a layer,
        their updates and the ops that finish their gradients share a device."""
        key, size = f"{layer}/{name}", prod(shape) * FLOAT_BYTES
        if key not in self._weights:
            op = self.builder.op(
                key,
                "parameter",
                persistent_bytes=2 * size,
                layer=layer,
                group=layer,
                signature=f"parameter()->{_s(shape)}",
            )
            self._weights[key] = DrawnTensor(self.builder.tensor(op, size, persistent=True), shape)
            self._uses[key] = 0
        return key

    def op(
        self,
        kind: str,
        layer: str,
        inputs: list[DrawnTensor],
        shape: tuple[int, ...],
        *,
        flops: int | None = None,
        weights: tuple[str, ...] = (),
    ) -> DrawnTensor:
        """A forward op with one output of ``shape``; ``flops`` default to one an element."""
        flops = prod(shape) if flops is None else flops
        read = [*inputs, *(self._weights[name] for name in weights)]
        handle = self._write(f"{layer}/{kind}", kind, read, [shape], flops, layer, "forward")[0]
        for name in weights:
            self._uses[name] += 1
        output = DrawnTensor(handle, shape, any(value.trained for value in inputs) or bool(weights))
        self._steps.append(_DrawnStep(kind, layer, tuple(inputs), weights, output, flops))
        return output

    def view(self, value: DrawnTensor, *shape: int) -> DrawnTensor:
        """A part or another shape of ``value``; its gradient is gathered by a ``cat`` where there are several parts."""
        part = DrawnTensor(value.handle, shape, value.trained)
        self._steps.append(_DrawnStep("view", "", (value,), (), part, 0))
        return part

    def build(self, loss: DrawnTensor) -> ComputationGraph:
        """Backward from ``loss``, then one update per parameter; the frozen graph."""
        pending: dict[int, list[tuple[DrawnTensor, int]]] = {id(loss): [(loss, loss.handle)]}
        wanted: dict[str, list[int]] = {}
        for step in reversed(self._steps):
            parts = pending.pop(id(step.output), [])
            if not parts or not step.output.trained:
                continue
            if step.kind == "view":
                pending.setdefault(id(step.inputs[0]), []).extend(parts)
                continue
            gradient = self._gathered(step, parts)
            for value, handle in self._backward(step, gradient, wanted):
                pending.setdefault(id(value), []).append((value, handle))
        for name, handles in wanted.items():
            self._update(name, handles)
        return self.builder.build()

    def _gathered(self, step: _DrawnStep, parts: list[tuple[DrawnTensor, int]]) -> int:
        """One gradient from those of all readers: views are put side by side, the rest is summed."""
        shape, layer = step.output.shape, step.layer
        views = [handle for value, handle in parts if value.size < step.output.size]
        whole = [handle for value, handle in parts if value.size >= step.output.size]
        if views:
            read = [DrawnTensor(handle, shape) for handle in dict.fromkeys(views)]
            whole.append(self._write(f"{layer}/cat_gradient", "cat", read, [shape], 0, layer, "backward")[0])
        return self._summed(whole, shape, layer)

    def _summed(self, handles: list[int], shape, layer: str, group: str | None = None) -> int:
        total = handles[0]
        for number, handle in enumerate(handles[1:], 2):
            last = number == len(handles)
            read = [DrawnTensor(total, shape), DrawnTensor(handle, shape)]
            total = self._write(
                f"{layer}/add_gradient", "add", read, [shape], prod(shape), layer, "backward", group if last else None
            )[0]
        return total

    def _backward(self, step: _DrawnStep, gradient: int, wanted: dict[str, list[int]]) -> list[tuple[DrawnTensor, int]]:
        """Write the backward ops of a step; the gradients of its inputs."""
        kind = BACKWARD[step.kind]
        trained = [value for value in step.inputs if value.trained]
        if kind is None:
            return [(value, gradient) for value in trained]
        reads = [DrawnTensor(gradient, step.output.shape), *step.inputs]
        reads += [step.output] if step.kind in ("sigmoid", "tanh", "_softmax", "relu_") else []
        layer, name = step.layer, f"{step.layer}/{kind}"
        matrices = [key for key in step.weights if len(self._weights[key].shape) > 1]
        if kind == "mm":  # one product for the input's gradient, one for the weight's
            weight = [self._weights[key] for key in matrices]
            for key in matrices:
                shapes = [self._weights[key].shape]
                handle = self._write(name, kind, reads, shapes, step.flops, layer, "backward", self._home(key))[0]
                wanted.setdefault(key, []).append(handle)
            for key in [key for key in step.weights if key not in matrices]:
                shapes = [self._weights[key].shape]
                handle = self._write(
                    f"{layer}/sum", "sum", reads[:1], shapes, step.output.size, layer, "backward", self._home(key)
                )[0]
                wanted.setdefault(key, []).append(handle)
            return [
                (value, self._write(name, kind, [reads[0], *weight], [value.shape], step.flops, layer, "backward")[0])
                for value in trained
            ]
        if kind in ("bmm", "mul"):  # one op for each input, reading the other
            others = [[value for value in step.inputs if value is not one] or [one] for one in trained]
            return [
                (one, self._write(name, kind, [reads[0], *other], [one.shape], step.flops, layer, "backward")[0])
                for one, other in zip(trained, others, strict=True)
            ]
        weights = [self._weights[key] for key in step.weights]
        shapes = [value.shape for value in trained] + [value.shape for value in weights]
        factor = 2 if step.kind == "convolution" and trained else 1
        home = self._home(step.weights[0]) if step.weights else None
        handles = self._write(name, kind, reads + weights, shapes, factor * step.flops, layer, "backward", home)
        for key, handle in zip(step.weights, handles[len(trained) :], strict=True):
            wanted.setdefault(key, []).append(handle)
        return list(zip(trained, handles, strict=False))

    def _home(self, name: str) -> str | None:
        """Group of the op that makes the gradient of a parameter: the parameter's, unless others are summed to it."""
        return name.rpartition("/")[0] if self._uses[name] == 1 else None

    def _update(self, name: str, handles: list[int]) -> None:
        weight = self._weights[name]
        layer = name.rpartition("/")[0]
        total = self._summed(handles, weight.shape, layer, group=layer)
        read = [weight, DrawnTensor(total, weight.shape)]
        self._write(f"{name}/sgd", "sgd", read, [], 4 * weight.size, layer, "update", layer)

    def _write(self, name, kind, read: list[DrawnTensor], shapes, flops, layer, phase, group=None) -> list[int]:
        read = list({value.handle: value for value in read}.values())
        signature = f"{kind}({','.join(_s(value.shape) for value in read)})->{','.join(map(_s, shapes))}"
        op = self.builder.op(
            name,
            kind,
            inputs=[value.handle for value in read],
            flops=int(flops),
            layer=layer,
            phase=phase,
            outputs=[prod(shape) * FLOAT_BYTES for shape in shapes],
            signature=signature,
            group=group,
            bytes_read=sum(value.size for value in read) * FLOAT_BYTES,
            bytes_written=sum(map(prod, shapes)) * FLOAT_BYTES,
        )
        return list(self.builder.outputs(op))


def _s(shape: tuple[int, ...]) -> str:
    return f"f32[{','.join(map(str, shape))}]"


def linear(tape: GradientTape, layer: str, x: DrawnTensor, width: int) -> DrawnTensor:
    """A product of ``x``, ``(rows, columns)``, with weights and a bias: ``(rows, width)``."""
    rows, columns = x.shape
    weights = tape.weight(layer, "weight", columns, width), tape.weight(layer, "bias", width)
    return tape.op("addmm", layer, [x], (rows, width), flops=2 * rows * columns * width, weights=weights)


def _convolution(
    tape: GradientTape,
    layer: str,
    x: DrawnTensor,
    channels: int,
    kernel: tuple[int, int] | int,
    stride: int = 1,
    groups: int = 1,
) -> DrawnTensor:
    """Convolution, batch norm, ReLU; padding keeps the side."""
    batch, before, height, width = x.shape
    high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
    shape = (batch, channels, -(-height // stride), -(-width // stride))
    weight = tape.weight(f"{layer}.0", "weight", channels, before // groups, high, wide)
    flops = 2 * prod(shape) * (before // groups) * high * wide
    x = tape.op("convolution", f"{layer}.0", [x], shape, flops=flops, weights=(weight,))
    norm = tape.weight(f"{layer}.1", "weight", channels), tape.weight(f"{layer}.1", "bias", channels)
    x = tape.op("native_batch_norm", f"{layer}.1", [x], shape, flops=4 * x.size, weights=norm)
    return tape.op("relu_", f"{layer}.2", [x], shape)


def _pool(tape: GradientTape, layer: str, kind: str, x: DrawnTensor, stride: int = 1) -> DrawnTensor:
    batch, channels, height, width = x.shape
    shape = (batch, channels, -(-height // stride), -(-width // stride))
    return tape.op(kind, layer, [x], shape, flops=9 * prod(shape))


def _classifier(tape: GradientTape, x: DrawnTensor, classes: int) -> ComputationGraph:
    x = tape.op("mean", "head.pool", [x], x.shape[:2], flops=x.size)
    x = linear(tape, "head.linear", x, classes)
    return tape.build(tape.op("cross_entropy", "head.loss", [x], (1,), flops=5 * x.size))


def nmt(rng: np.random.Generator, name: str) -> ComputationGraph:
    """LSTM translation with attention: 1-4 layers a side, 8-24 unrolled steps, 256-1024 units, batch 32-128, and a
    vocabulary of 8,000-32,000 words; the softmax is in each step, as in the shipped ``nmt``."""
    layers, length = int(rng.integers(1, 5)), int(rng.integers(8, 25))
    units, batch = int(rng.choice([256, 512, 768, 1024])), int(rng.choice([32, 64, 128]))
    words = int(rng.choice([8000, 16000, 32000]))
    params = {"layers": layers, "length": length, "units": units, "batch": batch, "vocabulary": words}
    tape = GradientTape(name, {"family": "nmt", "batch": batch, "params": params})
    sources = _embedded(tape, "encoder", batch, length, units, words)
    for number in range(layers):
        sources = _unrolled(tape, f"encoder.layer{number}", [[x] for x in sources], units)
    memory = tape.op("cat", "decoder.attention", sources, (batch, length, units), flops=0)
    keys = tape.op(
        "mm",
        "decoder.attention.key",
        [tape.view(memory, batch * length, units)],
        (batch, length, units),
        flops=2 * batch * length * units * units,
        weights=(tape.weight("decoder.attention.key", "weight", units, units),),
    )
    targets, steps = _embedded(tape, "decoder", batch, length, units, words), []
    states: list[CellState] = [(None, None)] * layers
    for x in targets:
        query = states[0][0] or x
        context = _attended(tape, "decoder.attention", query, keys, memory)
        inputs = [x, context]
        for number in range(layers):
            output, state = _cell(tape, f"decoder.layer{number}", inputs, states[number], units)
            states[number], inputs = (output, state), [output]
        steps.append(linear(tape, "softmax", inputs[0], words))
    losses = [tape.op("cross_entropy", "softmax", [x], (1,), flops=5 * x.size) for x in steps]
    return tape.build(tape.op("mean", "loss", [tape.op("cat", "loss", losses, (length,), flops=0)], (1,)))


def _embedded(tape: GradientTape, side: str, batch: int, length: int, units: int, words: int) -> list[DrawnTensor]:
    tokens = tape.input(f"{side}.tokens", batch, length)
    table = tape.weight(f"{side}.embedding", "weight", words, units)
    x = tape.op("embedding", f"{side}.embedding", [tokens], (batch, length, units), flops=0, weights=(table,))
    return [tape.view(x, batch, units) for _ in range(length)]


def _unrolled(tape: GradientTape, layer: str, steps: list[list[DrawnTensor]], units: int) -> list[DrawnTensor]:
    state: CellState = (None, None)
    outputs = []
    for inputs in steps:
        output, memory = _cell(tape, layer, inputs, state, units)
        state = output, memory
        outputs.append(output)
    return outputs


def _cell(
    tape: GradientTape, layer: str, inputs: list[DrawnTensor], state: CellState, units: int
) -> tuple[DrawnTensor, DrawnTensor]:
    """An LSTM cell: output and cell state, each ``(batch, units)``. The zero state is left out."""
    output, memory = state
    batch = inputs[0].shape[0]
    joined = [*inputs, *([output] if output else [])]
    width = sum(value.shape[1] for value in joined)
    if len(joined) > 1:
        x = tape.op("cat", layer, joined, (batch, width), flops=0)
    else:
        x = joined[0]
    # The first step multiplies by a part of the matrix; the whole matrix is what the device holds.
    full = sum(value.shape[1] for value in inputs) + units
    weights = tape.weight(layer, "weight", full, 4 * units), tape.weight(layer, "bias", 4 * units)
    gates = tape.op("addmm", layer, [x], (batch, 4 * units), flops=2 * batch * width * 4 * units, weights=weights)
    one = (batch, units)
    take, forget, emit = (tape.op("sigmoid", layer, [tape.view(gates, *one)], one) for _ in range(3))
    fresh = tape.op("mul", layer, [take, tape.op("tanh", layer, [tape.view(gates, *one)], one)], one)
    kept = tape.op("mul", layer, [forget, memory], one) if memory else None
    memory = tape.op("add", layer, [fresh, kept], one) if kept else fresh
    return tape.op("mul", layer, [emit, tape.op("tanh", layer, [memory], one)], one), memory


def _attended(
    tape: GradientTape, layer: str, query: DrawnTensor, keys: DrawnTensor, memory: DrawnTensor
) -> DrawnTensor:
    """Dot-product attention of ``(batch, units)`` over ``(batch, length, units)``."""
    batch, length, units = keys.shape
    flops = 2 * batch * length * units
    scores = tape.op("bmm", f"{layer}.score", [query, keys], (batch, length), flops=flops)
    weights = tape.op("_softmax", layer, [scores], (batch, length), flops=5 * batch * length)
    return tape.op("bmm", layer, [weights, memory], (batch, units), flops=flops)


def nasnet(rng: np.random.Generator, name: str) -> ComputationGraph:
    """A random cell of 3-6 blocks (two inputs, an operation on each, a sum), stacked 4-10 times with two reductions, as
    ENAS and NASNet stack theirs: 16-96 channels at first, images of 32-160 pixels, batch 16-64."""
    blocks = int(rng.integers(3, 7))
    cells, channels = int(rng.integers(4, 11)), int(rng.choice([16, 32, 48, 64, 96]))
    side, batch = int(rng.choice([32, 64, 96, 160])), int(rng.choice([16, 32, 64]))
    kinds = ("separable3", "separable5", "average", "maximum", "identity")
    genotype = [
        tuple((int(rng.integers(2 + block)), str(rng.choice(kinds))) for _ in range(2)) for block in range(blocks)
    ]
    params = {"blocks": blocks, "cells": cells, "channels": channels, "size": side, "batch": batch}
    tape = GradientTape(name, {"family": "nasnet", "batch": batch, "params": params})
    x = _convolution(tape, "stem", tape.input("images", batch, 3, side, side), channels, 3, 2 if side > 32 else 1)
    before = x
    for number in range(cells):
        stride = 2 if number in (cells // 3, 2 * cells // 3) and x.shape[2] > 2 else 1
        channels *= stride
        states = [
            _fitted(tape, f"cell.{number}.{which}", value, channels, x.shape[2], stride)
            for which, value in (("current", x), ("previous", before))
        ]
        used = set()
        for block, sides in enumerate(genotype):
            ends = []
            for which, (state, kind) in enumerate(sides):
                used.add(state)
                ends.append(_cell_operation(tape, f"cell.{number}.block.{block}.{which}", kind, states[state]))
            states.append(tape.op("add", f"cell.{number}.block.{block}", ends, ends[0].shape))
        loose = [value for state, value in enumerate(states) if state >= 2 and state not in used]
        batch, _, height, width = states[0].shape
        joined = tape.op("cat", f"cell.{number}", loose, (batch, channels * len(loose), height, width), flops=0)
        before, x = x, joined
    return _classifier(tape, x, 1000)


def _fitted(tape: GradientTape, layer: str, x: DrawnTensor, channels: int, side: int, stride: int) -> DrawnTensor:
    """1x1 convolution to the cell's channels and side; the previous cell's output may be larger."""
    while x.shape[2] > side:
        x = _pool(tape, f"{layer}.pool", "avg_pool2d", x, 2)
    return _convolution(tape, layer, x, channels, 1, stride)


def _cell_operation(tape: GradientTape, layer: str, kind: str, x: DrawnTensor) -> DrawnTensor:
    if kind == "identity":
        return x
    if kind in ("average", "maximum"):
        return _pool(tape, layer, "avg_pool2d" if kind == "average" else "max_pool2d_with_indices", x)
    channels, kernel = x.shape[1], int(kind[-1])
    x = _convolution(tape, f"{layer}.depthwise", x, channels, kernel, groups=channels)
    return _convolution(tape, f"{layer}.pointwise", x, channels, 1)


def inception(rng: np.random.Generator, name: str) -> ComputationGraph:
    """3-10 modules of 3-5 parallel branches (1x1, 3x3, 5x5, factored 1xk and kx1 convolutions, pooling) joined by
    concatenation, with two reductions between: 32-96 channels a branch at first, 96-299 pixels, batch 16-64."""
    modules, width = int(rng.integers(3, 11)), int(rng.choice([32, 48, 64, 96]))
    side, batch = int(rng.choice([96, 160, 224, 299])), int(rng.choice([16, 32, 64]))
    params = {"modules": modules, "width": width, "size": side, "batch": batch}
    tape = GradientTape(name, {"family": "inception", "batch": batch, "params": params})
    x = _convolution(tape, "stem.0", tape.input("images", batch, 3, side, side), 32, 3, 2)
    x = _convolution(tape, "stem.1", x, 64, 3)
    x = _pool(tape, "stem.2", "max_pool2d_with_indices", x, 2)
    for number in range(modules):
        if number in (modules // 3, 2 * modules // 3) and x.shape[2] > 7:
            x = _pool(tape, f"reduction.{number}", "max_pool2d_with_indices", x, 2)
            width += width // 2
        x = _module(tape, rng, f"mixed.{number}", x, width)
    return _classifier(tape, x, 1000)


def _module(tape: GradientTape, rng: np.random.Generator, layer: str, x: DrawnTensor, width: int) -> DrawnTensor:
    ends = [_convolution(tape, f"{layer}.branches.0", x, width, 1)]
    for branch in range(1, int(rng.integers(3, 6))):
        where, kind = f"{layer}.branches.{branch}", str(rng.choice(["kernel", "factored", "double", "pool"]))
        kernel = int(rng.choice([3, 5, 7]))
        if kind == "pool":
            y = _convolution(tape, f"{where}.1", _pool(tape, f"{where}.0", "avg_pool2d", x), width, 1)
        else:
            y = _convolution(tape, f"{where}.0", x, width * 3 // 4, 1)
            shapes: dict[str, list[tuple[int, int] | int]] = {
                "kernel": [kernel],
                "factored": [(1, kernel), (kernel, 1)],
                "double": [3, 3],
            }
            for number, size in enumerate(shapes[kind], 1):
                y = _convolution(tape, f"{where}.{number}", y, width, size)
        ends.append(y)
    batch, _, height, wide = ends[0].shape
    return tape.op("cat", layer, ends, (batch, sum(end.shape[1] for end in ends), height, wide), flops=0)


FAMILIES: dict[str, Callable[[np.random.Generator, str], ComputationGraph]] = {
    "nmt": nmt,
    "nasnet": nasnet,
    "inception": inception,
}


def family_graph(family: str, seed: int) -> ComputationGraph:
    """The graph of ``family`` that ``seed`` draws. Raises :class:`UnknownName` for a family that does not exist."""
    if family not in FAMILIES:
        raise UnknownName("family", family, FAMILIES)
    stream = np.random.default_rng([list(FAMILIES).index(family), seed])
    return FAMILIES[family](stream, f"{family}-family[seed={seed}]")


def family_split(family: str, count: int = 32, test_share: float = 0.2) -> tuple[list[int], list[int]]:
    """Seeds of the training graphs and of the test graphs: ``count`` in all, a fixed random share of them for the test.

    Placeto trains on 80 % of a family's 32 graphs and tests on the rest (section 4.3).
    """
    if family not in FAMILIES:
        raise UnknownName("family", family, FAMILIES)
    order = np.random.default_rng([len(FAMILIES), list(FAMILIES).index(family)]).permutation(count)
    tests = round(count * test_share)
    return sorted(order[tests:].tolist()), sorted(order[:tests].tolist())
