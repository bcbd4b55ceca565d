"""Fuses elementwise ops into kernels, as ``torch.compile`` does: an estimate of the Inductor's partition.

The Inductor's own partition needs the GPU that it compiles for. The estimate follows these rules of its scheduler
(``torch/_inductor/scheduler.py``: ``can_fuse``, ``score_fusion``):

* An op joins the kernel of a producer if both run over equally many elements, belong to the same phase (forward and
  backward are compiled apart) and no other path leads from the kernel to the op. Of several producers the one that
  shares most bytes wins.
* What joins is what the Inductor writes as a loop: ops that PyTorch tags as pointwise, what it decomposes into such
  ops, and reductions with their normalisations. Products, convolutions, attention, pooling, gathers, sorts and the
  optimizer's updates are kernels of their own, and so are ops on complex numbers, for which the Inductor writes no
  code. A reduction to fewer than 1,024 numbers ends its kernel.
* A tensor that only its own kernel reads is never written. A kernel has at most :data:`MOST_OPS` ops, and ops of at
  most one colocation group.

The whole step is taken to be one compiled region without graph breaks. Horizontal fusion, tiling and recomputation in
the backward pass (the min-cut partitioner) are left out: the kernels read and write somewhat more than the Inductor's.

:func:`join_recurrent` makes one op of what a call of ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` runs, as cuDNN does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from simdev.analysis.coarsen import joined
from simdev.graphs.capture.precision import precision_of_classes
from simdev.graphs.capture.trace import RECOMPUTED
from simdev.problem.costs import op_class
from simdev.problem.graph import PHASES, ComputationGraph, GraphBuilder
from simdev.problem.opcost.signature import parse_signature

MOST_OPS = 64  # of a kernel: torch._inductor.config.max_fusion_size
SPLIT_BYTES = 4 * 1024  # a reduction to fewer than 1,024 numbers runs in two kernels
ASSUMPTION = (
    "elementwise ops and reductions over equally many elements are one kernel where the Inductor's rules let them be; "
    "one region without graph breaks, no horizontal fusion, no recomputation"
)
DECOMPOSED = frozenset(
    """native_dropout _to_copy copy fill_ zero_ full full_like zeros zeros_like ones ones_like new_zeros new_ones arange
    hardtanh hardtanh_ hardtanh_backward hardswish hardswish_ hardswish_backward hardsigmoid hardsigmoid_backward
    leaky_relu leaky_relu_ leaky_relu_backward elu_backward glu glu_backward softplus_backward mse_loss_backward
    masked_fill_ slice_backward select_backward constant_pad_nd flip roll tril triu stack repeat nll_loss_backward
    binary_cross_entropy_with_logits""".split()
)
REDUCTIONS = frozenset(
    """sum mean amax amin any all prod var var_mean std linalg_vector_norm logsumexp native_layer_norm
    native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm
    native_batch_norm_backward _batch_norm_with_update batch_norm_backward _fused_rms_norm _fused_rms_norm_backward
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data nll_loss_forward mse_loss""".split()
)
TO_FEW = frozenset("sum mean amax amin any all prod var var_mean std linalg_vector_norm logsumexp".split())


@dataclass(eq=False)
class Kernel:
    """Ops that run as one, in program order; the number of elements that they run over (0: not fusible)."""

    ops: list[int]
    elements: int
    groups: set[int] = field(default_factory=set)


def fuse_elementwise(graph: ComputationGraph) -> ComputationGraph:
    """The graph with a ``fused`` op for each kernel of several ops; ``meta["compiled"]`` tells how many there are.

    A fused op reads every tensor from outside of it once, at most as many bytes as its parts read, and writes the
    tensors that others read. Its layer is that of its first part, its signature holds flat shapes.
    """
    kernels = _kernels(graph)
    several = [kernel for kernel in kernels if len(kernel.ops) > 1]
    meta = {
        "compiled": {
            "assumption": ASSUMPTION,
            "ops": sum(len(kernel.ops) for kernel in several),
            "kernels": len(several),
        }
    }
    return _rebuilt(graph, kernels, {**graph.meta, **meta})


def _kernels(graph: ComputationGraph) -> list[Kernel]:
    """The kernel of each op, in the order of their first ops."""
    elements = _elements(graph)
    few = np.array([kind in TO_FEW for kind in graph.kinds])[graph.op_kind]
    kernel_of: list[Kernel] = []
    for op in range(graph.n_ops):
        own = Kernel([op], int(elements[op]), {int(graph.op_group[op])} - {-1})
        kernel_of.append(own)
        if not elements[op]:
            continue
        for kernel in _candidates(graph, op, kernel_of, few):
            if kernel is not own and _fit(graph, kernel, own) and _may_join(graph, kernel, own, kernel_of, few):
                early, late = sorted((kernel, own), key=lambda one: one.ops[0])
                early.ops = sorted(early.ops + late.ops)
                early.groups |= late.groups
                for part in late.ops:
                    kernel_of[part] = early
                own = early
    return list({id(kernel): kernel for kernel in kernel_of}.values())


def _fit(graph: ComputationGraph, first: Kernel, second: Kernel) -> bool:
    return (
        first.elements == second.elements
        and len(first.ops) + len(second.ops) <= MOST_OPS
        and graph.op_phase[first.ops[0]] == graph.op_phase[second.ops[0]]
        and len(first.groups | second.groups) <= 1
    )


def _elements(graph: ComputationGraph) -> np.ndarray:
    """int64 ``(n,)``: over how many elements each fusible op runs; 0 for the others."""
    by_signature = []
    for text in graph.signatures:
        parsed = parse_signature(text)
        tensors = *parsed.inputs, *parsed.outputs
        is_complex = any(tensor.dtype in ("c64", "c128") for tensor in tensors)
        by_signature.append(0 if is_complex else max((tensor.elements for tensor in tensors), default=0))
    fusible = np.array([_fusible(kind) for kind in graph.kinds])[graph.op_kind]
    fusible &= graph.op_phase != PHASES.index("update")
    fusible &= graph.op_persistent_bytes == 0
    return np.where(fusible, np.array(by_signature, np.int64)[graph.op_signature], 0)


def _fusible(kind: str) -> bool:
    if kind in DECOMPOSED or kind in REDUCTIONS:
        return True
    packet = getattr(torch.ops.aten, kind, None) or getattr(torch.ops.prims, kind, None)
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )


def _candidates(graph: ComputationGraph, op: int, kernel_of: list[Kernel], few: np.ndarray) -> list[Kernel]:
    """The kernels whose results ``op`` reads, most bytes first. A reduction to few numbers hands on nothing."""
    shared: dict[int, int] = {}
    known: dict[int, Kernel] = {}
    for tensor in graph.inputs[graph.input_ptr[op] : graph.input_ptr[op + 1]]:
        producer, size = int(graph.tensor_producer[tensor]), int(graph.tensor_bytes[tensor])
        if size and not (few[producer] and size < SPLIT_BYTES):
            kernel = kernel_of[producer]
            known[id(kernel)] = kernel
            shared[id(kernel)] = shared.get(id(kernel), 0) + size
    return [known[key] for key in sorted(known, key=lambda key: (-shared[key], known[key].ops[0]))]


def _may_join(graph: ComputationGraph, first: Kernel, second: Kernel, kernel_of: list[Kernel], few) -> bool:
    """Whether neither kernel waits for the other through a third, or for a reduction to few numbers inside it."""
    return not any(
        _leads_around(graph, one, other, kernel_of) or _reads_few(graph, one, other, kernel_of, few)
        for one, other in ((first, second), (second, first))
    )


def _leads_around(graph: ComputationGraph, start: Kernel, end: Kernel, kernel_of: list[Kernel]) -> bool:
    """Whether a path leads from ``start`` to ``end`` through other kernels."""
    stack = [part for op in end.ops for part in _producers(graph, op) if kernel_of[part] not in (start, end)]
    seen: set[int] = set()
    while stack:
        other = kernel_of[stack.pop()]
        if id(other) in seen or other.ops[-1] < start.ops[0]:  # program order is topological
            continue
        seen.add(id(other))
        for part in other.ops:
            for producer in _producers(graph, part):
                if kernel_of[producer] is start:
                    return True
                if kernel_of[producer] is not other:
                    stack.append(producer)
    return False


def _reads_few(graph: ComputationGraph, start: Kernel, end: Kernel, kernel_of: list[Kernel], few) -> bool:
    return any(
        few[part] and kernel_of[part] is start and _made_bytes(graph, part) < SPLIT_BYTES
        for op in end.ops
        for part in _producers(graph, op)
    )


def _producers(graph: ComputationGraph, op: int) -> list[int]:
    read = graph.inputs[graph.input_ptr[op] : graph.input_ptr[op + 1]]
    return graph.tensor_producer[read].tolist()


def _made_bytes(graph: ComputationGraph, op: int) -> int:
    return int(graph.tensor_bytes[graph.output_ptr[op] : graph.output_ptr[op + 1]].sum())


# Recurrent layers ----------------------------------------------------------------------------------------------


def join_recurrent(graph: ComputationGraph) -> ComputationGraph:
    """The graph with one op for each call of a recurrent layer, and one for its backward pass, as cuDNN runs them.

    The layers are those of ``meta["recurrent"]``, by module path. An op has the FLOPs of its parts, reads what they
    read from outside once, and writes what others read. What the forward op keeps for the backward op (cuDNN's reserve
    space) is what the unrolled layer keeps.
    """
    layers = graph.meta.get("recurrent")
    if not layers:
        return graph
    kernels = _calls(graph, layers)
    facts = {
        "recurrent_ops": sum(len(kernel.ops) > 1 for kernel in kernels),
        "unrolled_ops": sum(len(kernel.ops) for kernel in kernels if len(kernel.ops) > 1),
    }

    def describe(parts: list[int]) -> dict:
        layer, backward = graph.layers[graph.op_layer[parts[0]]], graph.op_phase[parts[0]] == PHASES.index("backward")
        kind = "_cudnn_rnn_backward" if backward else "_cudnn_rnn"
        dtype = _dtype_of_products(graph, parts)
        item = {"f64": 8, "f16": 2, "bf16": 2}.get(dtype, 4)
        made = int(graph.tensor_bytes[sorted(_leaving(graph, parts))].sum())
        read, written = (f"{dtype}[{size // item}]" for size in (_fused(graph, parts)["bytes_read"], made))
        return {
            "name": f"{layer}/{kind}.{parts[0]}",
            "kind": kind,
            "signature": f"{kind}({read},mode={layers[layer]})->{written}",
            "bytes_written": made,
        }

    joined = _rebuilt(graph, kernels, {**graph.meta, **facts}, describe)
    joined.meta["precision_of_classes"] = precision_of_classes(joined)
    return joined


def _dtype_of_products(graph: ComputationGraph, parts: list[int]) -> str:
    """In which format the products of a layer are computed; that of its first op if it has none."""
    products = [part for part in parts if op_class(graph.kinds[graph.op_kind[part]]) == "gemm"]
    return parse_signature(graph.signatures[graph.op_signature[(products or parts)[0]]]).dtype


def _calls(graph: ComputationGraph, layers: dict[str, str]) -> list[Kernel]:
    """A kernel for each call of a recurrent layer: its ops are neighbours in program order, so that no path leads out
    of the kernel and back."""
    recurrent = np.array([layer in layers for layer in graph.layers])[graph.op_layer]
    source = np.array([kind in ("parameter", "constant", "input") for kind in graph.kinds])[graph.op_kind]
    update = PHASES.index("update")
    kernels: list[Kernel] = []
    call, last = Kernel([], 0), None
    for op in range(graph.n_ops):
        if source[op]:
            kernels.append(Kernel([op], 0))
            continue
        again = RECOMPUTED in graph.op_names[op]
        own = (
            (graph.op_layer[op], graph.op_phase[op], again) if recurrent[op] and graph.op_phase[op] != update else None
        )
        if own is not None and own == last:
            call.ops.append(op)
            continue
        call, last = Kernel([op], 0), own
        kernels.append(call)
    return kernels


# The fused graph -----------------------------------------------------------------------------------------------


def _rebuilt(graph: ComputationGraph, kernels: list[Kernel], meta: dict, describe=None) -> ComputationGraph:
    """The graph with one op for each kernel. ``describe`` gives the fields of a kernel of several ops that differ from
    those of a fused one."""
    builder = GraphBuilder(graph.name, meta)
    handle: dict[int, int] = {}  # op -> op of the new graph
    tensor: dict[int, int] = {}
    group = _groups(graph, kernels)
    kernel_of = {part: kernel for kernel in kernels for part in kernel.ops}
    for kernel in kernels:
        parts = kernel.ops
        several = {**_fused(graph, parts), **(describe(parts) if describe else {})} if len(parts) > 1 else {}
        made = builder.op(
            **(several or _one(graph, parts[0])),
            phase=PHASES[graph.op_phase[parts[0]]],
            layer=graph.layers[graph.op_layer[parts[0]]],
            persistent_bytes=int(graph.op_persistent_bytes[parts].sum()),
            workspace_bytes=int(graph.op_workspace_bytes[parts].max()),
            group=next((group[part] for part in parts if part in group), None),
        )
        handle |= dict.fromkeys(parts, made)
        for item, size in _leaving_sizes(graph, kernel, kernel_of if describe else {}).items():
            tensor[item] = builder.tensor(
                made,
                size,
                persistent=bool(graph.tensor_persistent[item]),
                result=bool(graph.tensor_result[item]),
            )
    for item, new in tensor.items():
        home = handle[int(graph.tensor_producer[item])]
        for reader in _readers(graph, item):
            if handle[reader] != home:
                builder.connect(new, handle[reader])
    return builder.build()


def _groups(graph: ComputationGraph, kernels: list[Kernel]) -> dict[int, int]:
    """The colocation group of each op that has one. The groups of a kernel's ops become one group."""
    of_kernel = [[group for group in graph.op_group[kernel.ops].tolist() if group >= 0] for kernel in kernels]
    home = joined(graph.op_group.tolist(), (pair for groups in of_kernel for pair in pairwise(groups)))
    return {op: home[group] for op, group in enumerate(graph.op_group.tolist()) if group >= 0}


def _outputs(graph: ComputationGraph, parts: list[int]) -> list[int]:
    return [item for part in parts for item in range(graph.output_ptr[part], graph.output_ptr[part + 1])]


def _leaving(graph: ComputationGraph, parts: list[int]) -> set[int]:
    """The tensors of a kernel that it writes: results, and what other kernels read."""
    inside = set(parts)
    return {
        item
        for item in _outputs(graph, parts)
        if graph.tensor_result[item] or not inside.issuperset(_readers(graph, item))
    }


def _readers(graph: ComputationGraph, item: int) -> list[int]:
    return graph.consumers[graph.consumer_ptr[item] : graph.consumer_ptr[item + 1]].tolist()


def _leaving_sizes(graph: ComputationGraph, kernel: Kernel, kernel_of: dict[int, Kernel]) -> dict[int, int]:
    """The bytes of each tensor that a kernel writes. Given ``kernel_of``, what it writes for the same other kernels is
    one tensor."""
    if len(kernel.ops) == 1:
        return {item: int(graph.tensor_bytes[item]) for item in _outputs(graph, kernel.ops)}
    sizes: dict[int, int] = {}
    first: dict[frozenset[int], int] = {}
    leaving = _leaving(graph, kernel.ops)
    for item in _outputs(graph, kernel.ops):
        if item in leaving:
            size = int(graph.tensor_bytes[item])
            kept = kernel_of and size and not graph.tensor_persistent[item] and not graph.tensor_result[item]
            to = frozenset(id(kernel_of[reader]) for reader in _readers(graph, item)) if kept else frozenset()
            home = first.setdefault(to, item) if kept else item
            sizes[home] = sizes.get(home, 0) + size
    return sizes


def _one(graph: ComputationGraph, op: int) -> dict:
    return {
        "name": graph.op_names[op],
        "kind": graph.kinds[graph.op_kind[op]],
        "signature": graph.signatures[graph.op_signature[op]],
        "flops": int(graph.op_flops[op]),
        "bytes_read": int(graph.op_bytes_read[op]),
        "bytes_written": int(graph.op_bytes_written[op]),
    }


def _fused(graph: ComputationGraph, parts: list[int]) -> dict:
    inside, leaving = set(parts), _leaving(graph, parts)
    read = {
        item
        for part in parts
        for item in graph.inputs[graph.input_ptr[part] : graph.input_ptr[part + 1]].tolist()
        if int(graph.tensor_producer[item]) not in inside
    }
    own = [item for item in _outputs(graph, parts) if item not in leaving]
    bytes_read = min(int(graph.tensor_bytes[list(read)].sum()), int(graph.op_bytes_read[parts].sum()))
    written = int(graph.op_bytes_written[parts].sum()) - int(graph.tensor_bytes[own].sum())
    kinds = [graph.kinds[graph.op_kind[part]] for part in parts]
    names = "_".join(dict.fromkeys(kind.strip("_") for kind in kinds))
    heavy = [kind for kind in kinds if op_class(kind) in ("norm", "norm_backward", "reduction")]
    dtype = parse_signature(graph.signatures[graph.op_signature[parts[0]]]).dtype
    item_bytes = {"f64": 8, "f16": 2, "bf16": 2}.get(dtype, 4)
    flat = [
        f"{dtype}[{int(graph.tensor_bytes[item]) // item_bytes}]" for item in sorted(read) if graph.tensor_bytes[item]
    ]
    made = [
        f"{dtype}[{int(graph.tensor_bytes[item]) // item_bytes}]"
        for item in sorted(leaving)
        if graph.tensor_bytes[item]
    ]
    kind = f"fused_{heavy[-1].strip('_')}" if heavy else "fused"
    return {
        "name": f"{graph.op_names[parts[0]]}.fused_{names[:60]}",
        "kind": kind,
        "signature": f"{kind}({','.join(flat)})->{made[0] if len(made) == 1 else '(' + ','.join(made) + ')'}",
        "flops": int(graph.op_flops[parts].sum()),
        "bytes_read": bytes_read,
        "bytes_written": max(0, written),
    }
