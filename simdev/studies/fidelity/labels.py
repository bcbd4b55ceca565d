"""Read NeuSight's labels of whole models (sitar-lab/NeuSight, ``label/<GPU>/<model>-{train,inf}-<seq>-<batch>``).

A CSV file lists every node of a traced model with its shapes and times; it holds only one of the repeated layers. The
JSON file of the same name holds the number of layers, and the forward and backward time of the whole model in
milliseconds, which was measured separately. No optimizer runs. Predictions use only the shapes of the nodes.
"""

from __future__ import annotations

import ast
import csv
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from simdev.errors import InvalidInput
from simdev.files import open_text, read_json
from simdev.problem.opcost.parts import KernelPart, product_part

FLOAT = 4
REPEATED = re.compile(r"\.0[.']")  # the module path of a node in the first of the repeated layers
MODULE = re.compile(r"<class '([\w.]+)'>\)\]\)")
CALLED = re.compile(r"(?:<built-in (?:function|method) |<function )?(\w+)")
NAME = re.compile(r"(?P<model>.+)-(?P<mode>train|inf)-(?P<sequence>\d+)-(?P<batch>\d+)\.csv(\.gz)?$")
# Nodes that launch a kernel. All others (shapes, views, Python) cost no device time.
ELEMENTWISE = {"add", "sub", "mul", "truediv", "div", "pow", "tanh", "gelu", "relu", "max", "where", "masked_fill",
               "masked_fill_", "ReLU", "Tanh", "GELU", "NewGELUActivation", "GELUActivation", "neg", "exp", "sqrt",
               "rsqrt", "sigmoid", "silu", "Sigmoid", "SiLU", "cat", "mean", "sum"}  # fmt: skip
PRODUCTS = {"matmul", "bmm", "addmm", "baddbmm"}


MOST_LAYERS = 1 << 20
LONGEST_SHAPES = 1 << 16  # characters of a cell with shapes
LEAST_SHARE = 0.01  # share of the nodes' times; a smaller share in ops without a class is not reported


@dataclass
class Label:
    """One measured model. ``forward`` and ``backward`` list ``(part, repetitions)``. The measured seconds of the
    backward pass are 0 for inference. ``nodes_s`` is the sum of the times of the nodes, and ``skipped`` the number of
    nodes whose shapes could not be read."""

    device: str
    case: str
    forward: list[tuple[KernelPart, int]] = field(default_factory=list)
    backward: list[tuple[KernelPart, int]] = field(default_factory=list)
    forward_s: float = 0.0
    backward_s: float = 0.0
    nodes_s: float = 0.0
    skipped: Counter = field(default_factory=Counter)


def find_labels(root: Path) -> Iterator[Path]:
    """The CSV files under ``root`` that have a JSON file of the same name, sorted."""
    for path in sorted([*root.rglob("*.csv"), *root.rglob("*.csv.gz")]):
        if NAME.match(path.name) and _json_of(path).is_file():
            yield path


def without_nodes(root: Path) -> Iterator[Path]:
    """The JSON files under ``root`` with the name of a label but without a CSV file, sorted."""
    for path in sorted(root.rglob("*.json")):
        name = path.name.removesuffix(".json")
        beside = (path.with_name(name + end) for end in (".csv", ".csv.gz"))
        if NAME.match(name + ".csv") and not any(file.is_file() for file in beside):
            yield path


def read_label(path: Path) -> Label:
    """Read one label. Raises :class:`InvalidInput` if a file cannot be read or lacks a column or a figure."""
    measured = read_json(_json_of(path))
    try:
        layers = int(measured["num_layer"])
        forward_s, backward_s = (float(measured[name]) / 1e3 for name in ("fw_latency", "bwall_latency"))
        if not 0 <= layers <= MOST_LAYERS:
            raise ValueError("num_layer is out of range")
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise InvalidInput(f"no figures of a whole model ({error})", source=_json_of(path)) from None
    label = Label(path.parent.name, path.name.split(".csv")[0], forward_s=forward_s, backward_s=backward_s)
    named = NAME.match(path.name)
    if named is None:
        raise InvalidInput("not named MODEL-MODE-SEQUENCE-BATCH.csv", source=path)
    training = named["mode"] == "train"
    nodes = list(_nodes(path, label))
    vocabulary = max((node.output[-1] for node in nodes if node.what == "Linear"), default=0)
    for node in nodes:
        count = layers if node.repeated and layers else 1
        label.forward += [(part, count) for part in forward_parts(node, training)]
        if training:
            label.backward += [(part, count) for part in backward_parts(node, vocabulary)]
    times = _times_of_nodes(nodes, layers)
    label.nodes_s = sum(times)
    _report_unknown(nodes, times, training, label)
    return label


def _times_of_nodes(nodes: list[LabelNode], layers: int) -> list[float]:
    """The seconds of each node, over all its repetitions, by the timer of the node. The floor of the timers is the
    tenth percentile of all readings. A node with a reading below twice the floor runs only on the host; twice the floor
    is subtracted from every other reading."""
    readings = sorted(reading for node in nodes for reading in (node.forward_s, node.backward_s) if reading > 0)
    floor = 2 * readings[len(readings) // 10] if readings else 0.0
    return [
        (layers if node.repeated and layers else 1)
        * sum(max(0.0, reading - floor) for reading in (node.forward_s, node.backward_s))
        for node in nodes
    ]


def _report_unknown(nodes: list[LabelNode], times: list[float], training: bool, label: Label) -> None:
    """Report ops that take time by their own timers but have no parts of any class."""
    unknown: defaultdict[str, float] = defaultdict(float)
    for node, seconds in zip(nodes, times, strict=True):
        if not forward_parts(node, training):
            unknown[node.what] += seconds
    for what, seconds in unknown.items():
        if seconds > LEAST_SHARE * label.nodes_s:
            share = 100 * seconds / label.nodes_s
            label.skipped[f"a node {what!r}, which no class takes ({share:.1f} % of the nodes' own times)"] += 1


@dataclass(frozen=True)
class LabelNode:
    """A call of ``what`` on tensors of the shapes ``inputs`` (without scalars) with the result ``output``."""

    what: str
    name: str
    inputs: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]
    repeated: bool
    contiguous: bool
    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def output_bytes(self) -> int:
        return FLOAT * prod(self.output)


def _json_of(path: Path) -> Path:
    return path.with_name(path.name.split(".csv")[0] + ".json")


def _nodes(path: Path, label: Label) -> Iterator[LabelNode]:
    columns = (
        "op",
        "target",
        "meta",
        "input_shapes",
        "input_contiguous",
        "output_shape",
        "Name",
        "fw_latency",
        "bw_latency",
    )
    before = csv.field_size_limit(1 << 24)
    try:
        with open_text(path) as file:
            reader = csv.DictReader(file)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            if missing:
                raise InvalidInput(f"column {missing[0]!r} is missing", source=path, field="line 1")
            for row in reader:
                if row["op"] not in ("call_function", "call_method", "call_module"):
                    continue
                node = _node(row)
                if node is None:
                    label.skipped["a node with unreadable shapes"] += 1
                else:
                    yield node
    finally:
        csv.field_size_limit(before)


def _node(row: dict[str, str]) -> LabelNode | None:
    try:
        if any(len(row[name]) > LONGEST_SHAPES for name in ("input_shapes", "output_shape", "input_contiguous")):
            return None
        shapes = [_shape(shape) for shape in ast.literal_eval(row["input_shapes"])]
        output = _shape(ast.literal_eval(row["output_shape"]))
        contiguous = ast.literal_eval(row["input_contiguous"])
        times = [float(row[name]) / 1e3 for name in ("fw_latency", "bw_latency")]
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, OverflowError):
        return None
    inputs = tuple(shape for shape in shapes if shape != (1,))
    module = MODULE.findall(row["meta"] or "")
    called = CALLED.match(row["target"] or "")
    what = module[-1].split(".")[-1] if row["op"] == "call_module" and module else called[1] if called else ""
    stays = not isinstance(contiguous, list) or not contiguous or bool(contiguous[0])
    node = LabelNode(what, row["Name"] or "", inputs, output, bool(REPEATED.search(row["meta"] or "")), stays, *times)
    return node if _fits(node) else None


def _fits(node: LabelNode) -> bool:
    """Whether the shapes have the dimensions that the op needs."""
    if node.what in PRODUCTS and len(node.inputs) >= 2:
        return all(len(shape) >= 2 for shape in node.inputs[-2:])
    if node.what in ("Linear", "LayerNorm", "softmax"):
        return len(node.output) >= 1 and (not node.inputs or len(node.inputs[0]) >= 1)
    return True


def _shape(value) -> tuple[int, ...]:
    shape = tuple(int(size) for size in value)
    if any(not 0 < size < 1 << 40 for size in shape):
        raise ValueError(value)
    return shape


def forward_parts(node: LabelNode, training: bool) -> list[KernelPart]:
    """The kernels of the forward pass of a node; none if the node only makes views or runs on the host."""
    if node.output == (1,) or not node.inputs:
        return []
    size = node.output_bytes
    if node.what == "Linear":
        return [product_part(1, *_linear(node), biased="lm_head" not in node.name)]  # heads have no bias
    if node.what in PRODUCTS and len(node.inputs) >= 2:
        return [product_part(*_product(node), biased=node.what == "addmm")]
    if node.what == "LayerNorm":
        return [KernelPart("layer_norm", _rows(node))]
    if node.what == "softmax":
        return [KernelPart("softmax", _rows(node))]
    if node.what in ("Embedding", "embedding"):
        return [KernelPart("vector", (size, size))]
    if node.what in ("Dropout", "dropout"):
        return [KernelPart("vector", (size, size + size // FLOAT))] if training else []
    if node.what == "contiguous":
        return [] if node.contiguous else [KernelPart("vector", (size, size))]
    if node.what in ELEMENTWISE:
        return [KernelPart("vector", (FLOAT * sum(map(prod, node.inputs)), size))]
    return []


def backward_parts(node: LabelNode, vocabulary: int) -> list[KernelPart]:
    """The kernels of the backward pass of a node: a gradient for each input and parameter."""
    if node.output == (1,) or not node.inputs:
        return []
    size = node.output_bytes
    if node.what in ("Linear", "addmm"):
        m, n, k = _linear(node) if node.what == "Linear" else _product(node)[1:]
        return [product_part(1, m, k, n), product_part(1, n, k, m), KernelPart("vector", (size, FLOAT * n))]
    if node.what in PRODUCTS and len(node.inputs) >= 2:
        batch, m, n, k = _product(node)
        return [product_part(batch, m, k, n), product_part(batch, k, n, m)]
    if node.what == "LayerNorm":
        return [KernelPart("layer_norm_backward", _rows(node))]
    if node.what == "softmax":
        return [KernelPart("softmax_backward", _rows(node))]
    if node.what in ("Embedding", "embedding"):
        words = vocabulary if re.search(r"word|wte|embed_tokens", node.name) else 0
        return [KernelPart("vector", (size, size + FLOAT * words * node.output[-1]))]
    if node.what in ("Dropout", "dropout"):
        return [KernelPart("vector", (size + size // FLOAT, size))]
    if node.what in ("add", "sub", "contiguous"):
        return []  # the gradient is passed on unchanged
    if node.what == "mul" and len(node.inputs) == 2:
        return [KernelPart("vector", (2 * size, size))] * 2
    if node.what in ("mul", "truediv", "div"):
        return [KernelPart("vector", (size, size))]
    if node.what in ELEMENTWISE:
        return [KernelPart("vector", (2 * size, size))]
    return []


def _linear(node: LabelNode) -> tuple[int, int, int]:
    return prod(node.output[:-1]), node.output[-1], node.inputs[0][-1]


def _product(node: LabelNode) -> tuple[int, int, int, int]:
    left, right = node.inputs[-2:]
    return prod(left[:-2]), left[-2], right[-1], left[-1]


def _rows(node: LabelNode) -> tuple[int, int]:
    return prod(node.output[:-1]), node.output[-1]
