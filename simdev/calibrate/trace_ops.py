"""Which op of a captured graph each launch of a profiler trace belongs to, with its shapes.

The operators around a call are nested: ``aten::conv2d`` contains ``aten::convolution``, and this ``aten::_convolution``
and ``aten::cudnn_convolution``. A captured graph has one op for the chain, of the outermost kind that PyTorch does not
decompose. Launches inside ``Optimizer.step#SGD.step`` belong to the update ``sgd``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from simdev.calibrate.traces import STEP, Trace
from simdev.problem.opcost.signature import op_key

OPTIMIZER = re.compile(r"Optimizer\.step#(\w+)\.step")
# Operators that PyTorch decomposes before autograd (CompositeImplicitAutograd), so that no graph has them.
COMPOSITE = frozenset(
    "conv1d conv2d conv3d linear matmul einsum batch_norm _batch_norm_impl_index layer_norm group_norm instance_norm "
    "max_pool1d max_pool2d adaptive_avg_pool1d adaptive_avg_pool2d log_softmax softmax cross_entropy_loss nll_loss "
    "nll_loss_nd dropout scaled_dot_product_attention to contiguous reshape flatten narrow type_as pad chunk "
    "embedding_bag lstm gru rnn_tanh rnn_relu multi_head_attention_forward item is_nonzero".split()
)
SAME = {
    "cudnn_batch_norm": "native_batch_norm",
    "miopen_batch_norm": "native_batch_norm",
    "cudnn_batch_norm_backward": "native_batch_norm_backward",
    "miopen_batch_norm_backward": "native_batch_norm_backward",
    "cudnn_convolution": "convolution",
    "cudnn_convolution_backward": "convolution_backward",
    "adaptive_avg_pool2d_backward": "_adaptive_avg_pool2d_backward",
}
DTYPES = {
    "float": "f32", "double": "f64", "c10::Half": "f16", "c10::BFloat16": "bf16",
    "c10::Float8_e4m3fn": "f8e4m3", "c10::Float8_e5m2": "f8e5m2",
}  # fmt: skip


@dataclass(frozen=True)
class TracedOp:
    """One op of a trace. ``shapes`` are those of its tensors; ``tensors`` counts the tensors of its first argument,
    which may be a list; ``row`` is its row of ``trace.ops``."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    tensors: int
    row: int

    @property
    def key(self) -> str:
        return op_key(self.kind, self.shapes, self.dtype)


def kind_of(name: str) -> str:
    """``aten::add_`` as a graph names it; empty for an operator that no graph has."""
    if not name.startswith("aten::"):
        return ""
    kind = name.removeprefix("aten::")
    return "" if kind in COMPOSITE else SAME.get(kind, kind)


def open_operators(trace: Trace) -> Iterator[tuple[int, list[int]]]:
    """Each call of ``trace.calls``, thread by thread, with the operators around it: rows of ``trace.ops``, the
    outermost first."""
    for thread in np.unique(trace.calls.thread).tolist():
        ops, calls = (np.flatnonzero(events.thread == thread).tolist() for events in (trace.ops, trace.calls))
        waiting, inside = iter(ops), list[int]()
        following = next(waiting, None)
        for call in calls:
            now = trace.calls.begin[call]
            while following is not None and trace.ops.begin[following] <= now:
                inside.append(following)
                following = next(waiting, None)
            inside = [op for op in inside if trace.ops.end[op] >= now]
            yield call, inside


def ops_of_calls(trace: Trace) -> list[tuple[TracedOp | None, str]]:
    """For each call of ``trace.calls``: its op (None outside of operators), and the optimizer whose update it is part
    of (``sgd``), or an empty string."""
    kinds = [kind_of(name) for name in trace.names]
    updates = [found[1].lower() if (found := OPTIMIZER.search(name)) else "" for name in trace.names]
    steps = [bool(STEP.match(name)) for name in trace.names]
    answer: list[tuple[TracedOp | None, str]] = [(None, "")] * len(trace.calls)
    made: dict[int, TracedOp] = {}
    for call, chain in open_operators(trace):
        names = [int(trace.ops.name[op]) for op in chain]
        update = next((updates[name] for name in names if updates[name]), "")
        row = next((op for op, name in zip(chain, names, strict=True) if kinds[name] and not steps[name]), -1)
        if row >= 0 and row not in made:
            made[row] = _traced(trace, row, kinds[trace.ops.name[row]])
        answer[call] = made.get(row), update
    return answer


def _traced(trace: Trace, row: int, kind: str) -> TracedOp:
    shapes, dtype, tensors = _tensors(trace.details[int(trace.ops.detail[row])])
    return TracedOp(kind, shapes, dtype, tensors, row)


@cache
def _tensors(detail: str) -> tuple[tuple[tuple[int, ...], ...], str, int]:
    """``(shapes, dtype, tensors of the first argument)`` of the profiler's ``Input Dims`` and ``Input type``."""
    if not detail:
        return (), "f32", 1
    dims, types = json.loads(detail)
    lists = [entry if entry and isinstance(entry[0], list) else [entry] for entry in dims if isinstance(entry, list)]
    shapes = [shape for entry in lists for shape in entry if all(isinstance(size, int) for size in shape)]
    names = [name for entry in types or [] for name in (entry if isinstance(entry, list) else [entry])]
    dtype = next((DTYPES[name] for name in names if name in DTYPES), "f32")
    return tuple(tuple(shape) for shape in shapes if shape), dtype, len(lists[0]) if lists else 1
