"""Make a device file from profiler traces of one's own board (``simdev calibrate TRACE ... --kind KIND``).

The device file of the kind is copied and gets what the traces show, of all ops with recorded shapes:

* ``[ops]``: the time of an op's kernels, by kind and shapes: the median over its runs.
* ``[factors]``: for every other shape, the ratio of measured to costed time, by class of op (``conv``, ``norm``);
  updates have a factor by the optimizer's name (``sgd``). A class has none if its ops are costed better without the
  factor of its other ops.
* ``launch_us``: the gap between two kernels of a stream where the host was ahead.
* ``[dispatch]``: host times by kind of op (:mod:`simdev.calibrate.dispatch`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from math import prod

import numpy as np

from simdev.calibrate.dispatch import EVERY, dispatch_ns
from simdev.calibrate.replay import host_line
from simdev.calibrate.trace_ops import TracedOp, ops_of_calls
from simdev.calibrate.traces import DEVICE_KINDS, Trace
from simdev.errors import InvalidInput
from simdev.problem.costs import CostModel, calibration_of, op_class
from simdev.problem.graph import GraphBuilder
from simdev.problem.opcost.device import Calibration
from simdev.problem.topology import DeviceKind

LEAST, MOST = 0.05, 20.0  # a factor outside says that the kind is another board than the traced one
ITEM_BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2}
ENOUGH = 40  # pieces of work in a trace, for the gap between two of them
DATA_CHANNELS = 4  # of images: grey, colour, or colour with transparency
UPDATE_PASSES = {"sgd": 5, "adam": 7, "adamw": 7, "adagrad": 5, "rmsprop": 5}  # reads and writes of a parameter's size


@dataclass
class OpRuns:
    """What traces show of one op: ns of the kernels of each run, and one run's operands."""

    op: TracedOp
    ns: list[int] = field(default_factory=list)


@dataclass
class Update:
    """The updates of one optimizer: ns and number of its kernels, and number and elements of the parameters."""

    ns: int = 0
    launches: int = 0
    tensors: int = 0
    elements: int = 0


@dataclass
class OwnTraces:
    """The ops of some traces by :attr:`TracedOp.key`, and the updates by optimizer. ``left_out_ns`` of ``busy_ns`` is
    the time of kernels without an op that has shapes. Copies and collectives, the time of links, are in neither.
    """

    ops: dict[str, OpRuns] = field(default_factory=dict)
    updates: dict[str, Update] = field(default_factory=dict)
    launch_ns: int = 0
    dispatch: dict[str, float] = field(default_factory=dict)
    left_out_ns: int = 0
    busy_ns: int = 0


def read_own_traces(traces: Sequence[Trace]) -> OwnTraces:
    """Collect the ops of ``traces``. Raises :class:`InvalidInput` for a trace without shapes."""
    found, gaps = OwnTraces(), []
    for trace in traces:
        if not any(trace.details):
            raise InvalidInput("no shapes: profile with record_shapes=True", source=trace.name)
        line = host_line(trace)
        gaps += [ns for ns in line.between_ns if ns > 0 and len(trace.work) >= ENOUGH]
        _collect(trace, found)
        for kind, (_, median, _) in dispatch_ns(trace).items():
            if kind != EVERY:
                found.dispatch.setdefault(kind, float(median))
    found.launch_ns = int(np.median(gaps)) if gaps else 0
    return found


def _collect(trace: Trace, found: OwnTraces) -> None:
    of_call = ops_of_calls(trace)
    call = {correlation: row for row, correlation in enumerate(trace.calls.correlation.tolist())}
    runs: dict[int, tuple[TracedOp, int]] = {}
    updates: dict[str, tuple[Update, Counter, Counter]] = {}
    copy = DEVICE_KINDS.index("copy")
    for item, correlation in enumerate(trace.work.correlation.tolist()):
        if trace.work_kind[item] == copy or "nccl" in trace.names[trace.work.name[item]].lower():
            continue  # the time of a link
        ns = int(trace.work.end[item] - trace.work.begin[item])
        found.busy_ns += ns
        op, update = of_call[call[correlation]] if correlation in call else (None, "")
        if update:
            whole, elements, tensors = updates.setdefault(update, (Update(), Counter(), Counter()))
            whole.ns += ns
            whole.launches += 1
            if op is not None:
                elements[op.kind] += _first_elements(op)
                tensors[op.kind] += op.tensors
        elif op is None or not op.shapes:
            found.left_out_ns += ns
        else:
            runs[op.row] = op, runs.get(op.row, (op, 0))[1] + ns
    for op, ns in runs.values():
        found.ops.setdefault(op.key, OpRuns(op)).ns.append(ns)
    for name, (mine, elements, tensors) in updates.items():
        whole = found.updates.setdefault(name, Update())
        passes = [count for count in elements.values() if count >= max(elements.values()) / 8]
        whole.ns += mine.ns
        whole.launches += mine.launches
        whole.elements += min(passes, default=0)
        whole.tensors += max(tensors.values(), default=0)


def _first_elements(op: TracedOp) -> int:
    """Elements of the tensors of a parameter's size: ``add_(parameter, gradient)`` has two, a list has all."""
    sizes = [prod(shape) for shape in op.shapes]
    return sum(sizes) if op.tensors > 1 else max(sizes, default=0)


@dataclass(frozen=True)
class ClassOfOps:
    """A line of the answer: a class of ops, or an optimizer. ``before`` is the mean relative error of what the device
    file said of its ops, ``after`` that of the factor of the class's other ops (NaN with one op), weighted by ns."""

    name: str
    ops: int
    ns: float
    factor: float
    before: float
    after: float

    @property
    def errors(self) -> tuple[float, float]:
        return self.before, self.after


def own_calibration(found: OwnTraces, kind: DeviceKind) -> tuple[Calibration, list[ClassOfOps]]:
    """The device file of ``kind`` with what the traces show, and how well its factors serve ops that they do not hold.

    Raises :class:`InvalidInput` if the traces hold no op that can be costed, or if their times are not those of such a
    board.
    """
    if not kind.calibrated:
        raise InvalidInput("has no device file to start from", source=kind.name, field="calibrated")
    base = calibration_of(kind)
    launch = found.launch_ns or base.launch_ns
    rows: dict[str, list[tuple[float, float]]] = {}
    for kernels, cost in zip(found.ops.values(), _costs(found.ops.values(), kind), strict=True):
        name = op_class(kernels.op.kind.rstrip("_"))
        rows.setdefault(name, []).append((sum(kernels.ns) + launch * len(kernels.ns), cost * len(kernels.ns)))
    for name, update in found.updates.items():
        if update.elements:
            moved = 4e9 * UPDATE_PASSES.get(name, 7) * update.elements / kind.memory_bandwidth
            rows[name] = [(update.ns + launch * update.launches, launch * update.tensors + moved)]
    lines = [_line(name, np.array(pairs)) for name, pairs in rows.items()]
    if not lines:
        raise InvalidInput("no op with kernels and shapes", source="traces")
    for line in lines:
        if not LEAST <= line.factor <= MOST:
            text = f"{line.name} took {line.factor:.3g} times its cost on {kind.name}: was it another board?"
            raise InvalidInput(text, source="traces")
    ops = {key: max(1.0, float(np.median(kernels.ns))) for key, kernels in found.ops.items()}
    runs = sum(len(kernels.ns) for kernels in found.ops.values())
    calibration = replace(
        base,
        launch_ns=launch,
        ops=ops,
        factors={line.name: line.factor for line in lines},
        dispatch_ns=found.dispatch or base.dispatch_ns,
        notes={**base.notes, "own traces": f"{len(ops)} ops, {runs} runs"},
    )
    return calibration, sorted(lines, key=lambda line: -line.ns)


def _line(name: str, pairs: np.ndarray) -> ClassOfOps:
    """The figures of ``pairs`` float64 ``(ops, 2)``: measured and costed ns of each op, over all its runs."""
    measured, costed = pairs.T
    factor = measured.sum() / costed.sum()
    before = np.average(np.abs(costed / measured - 1), weights=measured)
    after = float("nan")
    if len(pairs) > 1:
        others = (measured.sum() - measured) / (costed.sum() - costed)
        after = np.average(np.abs(costed * others / measured - 1), weights=measured)
        factor = factor if after < before else 1.0
    return ClassOfOps(name, len(pairs), measured.sum(), factor, float(before), float(after))


def _costs(every: Iterable[OpRuns], kind: DeviceKind) -> list[float]:
    """What simdev says now of the ops, in ns."""
    every = list(every)
    results = {  # (image, filters): the shape of the result, as the backward op has it for its gradient
        (image, weight): result
        for kernels in every
        if kernels.op.kind == "convolution_backward"
        for image, weight, result in _roles([shape for shape in kernels.op.shapes if len(shape) > 2])
    }
    builder = GraphBuilder("traced ops")
    for number, kernels in enumerate(every):
        text, read, written = _signature(kernels.op, results)
        builder.op(f"{number}", kernels.op.kind, signature=text, bytes_read=read, bytes_written=written)
    return CostModel().op_costs(builder.build(), kind)[0].astype(float).tolist()


def _roles(shapes: Sequence[tuple[int, ...]]):
    """The ways in which three shapes can be the image, the filters and the result of a convolution."""
    for image, weight, result in permutations(shapes) if len(shapes) == 3 else ():
        if len(image) == len(weight) == len(result) and result[:2] == (image[0], weight[0]):
            if image[1] % weight[1] == 0 and all(r <= i for r, i in zip(result[2:], image[2:], strict=True)):
                yield image, weight, result


def _signature(op: TracedOp, results: dict) -> tuple[str, int, int]:
    """``(signature, bytes read, bytes written)``: results have the size of the largest operand, those of products and
    convolutions their own."""
    size = ITEM_BYTES.get(op.dtype, 4)
    shapes, attributes = [shape for shape in op.shapes if len(shape) > 1] or list(op.shapes), ""
    result = max(shapes, key=prod)
    if op.kind in ("convolution", "convolution_backward"):
        roles = next(_roles(shapes), None)
        if op.kind == "convolution" and len(shapes) == 2:
            pairs = ((a, b) for a, b in (shapes, shapes[::-1]) if (a, b) in results)
            roles = next(((a, b, results[a, b]) for a, b in pairs), None)
        if roles:
            image, weight, result = roles
            stride = [max(1, round(i / r)) for i, r in zip(image[2:], result[2:], strict=True)]
            learned = image[1] > DATA_CHANNELS  # else the image is the batch, whose gradient nobody computes
            groups = image[1] // weight[1]
            attributes = f",stride={stride},groups={groups},output_mask=[{learned},True,False]".replace(" ", "")
            shapes = [image, weight] if op.kind == "convolution" else [result, image, weight]
            result = result if op.kind == "convolution" else image
    elif op.kind in ("mm", "addmm", "bmm", "baddbmm") and len(shapes) >= 2:
        left, right = shapes[:2]
        shapes, result = [left, right], (*left[:-1], right[-1])
    elif op_class(op.kind) in ("pool", "reduction", "embedding"):
        result = min(shapes, key=prod)
    text = ",".join(f"{op.dtype}[{','.join(map(str, shape))}]" for shape in shapes)
    outcome = f"{op.dtype}[{','.join(map(str, result))}]"
    return f"{op.kind}({text}{attributes})->{outcome}", size * sum(map(prod, shapes)), size * prod(result)
