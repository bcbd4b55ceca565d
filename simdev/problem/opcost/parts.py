"""The parts of an op: each a kernel of a known class with whole-number dimensions, as measured tables list them.

* ``linear`` (with a bias), ``gemm`` (without; ``batch`` is 1 in both) and ``bmm`` ``(batch, m, n, k)``: ``batch``
  products of ``(m, k)`` and ``(k, n)``.
* ``conv3x3`` (stride 1, no groups), ``conv`` (others), ``conv_dgrad``, ``conv_wgrad``
  ``(n, c, k, h, w, p, q, r, s, stride, groups)``: ``n`` images of ``(c, h, w)``, ``k`` filters of
  ``(c / groups, r, s)``, ``(p, q)`` outputs; the gradients have the dimensions of their forward.
* ``rnn``, ``rnn_dgrad``, ``rnn_wgrad`` ``(gates, hidden, batch, steps)``: the recurrent products of a layer, one after
  another (1 gate: plain, 3: GRU, 4: LSTM); those of its inputs are ``gemm``.
* ``softmax``, ``softmax_backward``, ``layer_norm``, ``layer_norm_backward`` ``(rows, width)``.
* ``attention``, ``attention_backward`` (the vendor's fused kernels) and ``flash_attention``,
  ``flash_attention_backward`` (FlashAttention 2, which PyTorch uses by default)
  ``(batch, heads, kv_heads, queries, keys, width, value_width, causal)``.
* ``vector`` ``(bytes read, bytes written)``: elementwise ops, copies, fills, sums.

A convolution's backward is two parts; an op with a part that no class describes has none at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from simdev.problem.opcost.signature import Signature
from simdev.problem.opcost.tensor_cores import ATTENTION

DIMENSIONS = {
    **dict.fromkeys(("linear", "gemm", "bmm", "rnn", "rnn_dgrad", "rnn_wgrad"), 4),
    **dict.fromkeys(("conv", "conv3x3", "conv_dgrad", "conv_wgrad"), 11),
    **dict.fromkeys(ATTENTION, 8),
    **dict.fromkeys(("softmax", "softmax_backward", "layer_norm", "layer_norm_backward", "vector"), 2),
}


MAX_SIZE = 1 << 50  # of a dimension: more fits no device


@dataclass(frozen=True)
class KernelPart:
    name: str
    dims: tuple[int, ...]
    dtype: str = "f32"

    @property
    def key(self) -> str:
        """``gemm(1,64,64,64) f32``: how measured tables name the part."""
        return f"{self.name}({','.join(map(str, self.dims))}) {self.dtype}"


def parts_of(op: Signature, op_class: str, bytes_read: int, bytes_written: int) -> tuple[KernelPart, ...]:
    """The parts of an op, empty where its kind or shapes are of no class.

    ``op_class`` is the op's class as :func:`simdev.problem.costs.op_class` names it; bytes are what the op moves in the
    graph.
    """
    make = _MAKERS.get(op.kind)
    if make is not None:
        if not all(size > 0 for tensor in (*op.inputs, *op.outputs) for size in tensor.shape):
            return ()
        found = make(op, bytes_read, bytes_written)
        return found if all(max(part.dims) <= MAX_SIZE for part in found) else ()
    if op_class in ("elementwise", "copy") or op.kind in SUMS:
        return (KernelPart("vector", (bytes_read, bytes_written), op.dtype),)
    return ()


SUMS = frozenset({"sum", "mean"})  # one pass over the input


def product_part(batch: int, m: int, n: int, k: int, dtype: str = "f32", biased: bool = False) -> KernelPart:
    return KernelPart("bmm" if batch > 1 else "linear" if biased else "gemm", (batch, m, n, k), dtype)


def _product(op: Signature, *_) -> tuple[KernelPart, ...]:
    matrices = [tensor for tensor in op.inputs if len(tensor.shape) >= 2]
    matrices = matrices[:2] if op.kind == "_scaled_mm" else matrices[-2:]  # scales follow the operands, a bias precedes
    if len(matrices) < 2 or matrices[0].shape[-1] != matrices[1].shape[-2]:
        return ()
    left, right = (tensor.shape for tensor in matrices)
    dtype = "f8" if all(tensor.dtype.startswith("f8") for tensor in matrices) else op.dtype
    biased = op.kind == "addmm"
    return (product_part(prod(left[:-2]), left[-2], right[-1], left[-1], dtype, biased),)


def _linear(op: Signature, *_) -> tuple[KernelPart, ...]:
    """``linear(x[..., k], w[n, k])``."""
    if len(op.inputs) < 2 or len(op.inputs[1].shape) != 2 or not op.inputs[0].shape:
        return ()
    x, w = op.inputs[0].shape, op.inputs[1].shape
    return (KernelPart("linear", (1, prod(x[:-1]), w[0], w[1]), op.dtype),) if x[-1] == w[1] else ()


def conv_name(dims: tuple[int, ...]) -> str:
    """The class of a forward convolution: 3 x 3 filters of stride 1 have algorithms of their own."""
    return "conv3x3" if dims[7:] == (3, 3, 1, 1) else "conv"


def _convolution(op: Signature, *_) -> tuple[KernelPart, ...]:
    if len(op.inputs) < 2 or not op.outputs:
        return ()
    dims = _conv_dims(op, op.inputs[0].shape, op.inputs[1].shape, op.outputs[0].shape)
    dilated = any(step != 1 for step in op.numbers("dilation"))
    return (KernelPart("conv" if dilated else conv_name(dims), dims, op.dtype),) if dims else ()


def _convolution_backward(op: Signature, *_) -> tuple[KernelPart, ...]:
    if len(op.inputs) < 3:
        return ()
    gradient, image, weight = (tensor.shape for tensor in op.inputs[:3])
    dims = _conv_dims(op, image, weight, gradient)
    if not dims:
        return ()
    wanted = op.attributes.get("output_mask", "[True,True,False]").strip("[]").split(",")
    names = [name for name, flag in zip(("conv_dgrad", "conv_wgrad"), wanted, strict=False) if flag == "True"]
    parts = [KernelPart(name, dims, op.dtype) for name in names]
    if wanted[2:] == ["True"]:  # the bias gradient: a sum over everything but the channels
        parts.append(KernelPart("vector", (op.inputs[0].bytes, 4 * gradient[1]), op.dtype))
    return tuple(parts)


def _conv_dims(op: Signature, image, weight, result) -> tuple[int, ...]:
    rank = len(image) - 2
    if rank not in (1, 2) or len(weight) != len(image) or len(result) != len(image):
        return ()
    groups = op.numbers("groups", (1,))[0]
    if op.attributes.get("transposed") == "True" or groups != 1:
        return ()  # grouped and depthwise convolutions run kernels that were not measured
    lead = (1,) if rank == 1 else ()
    stride = max(op.numbers("stride", (1,)))
    return (image[0], image[1], weight[0], *lead, *image[2:], *lead, *result[2:], *lead, *weight[2:], stride, groups)


def _recurrent(op: Signature, *_) -> tuple[KernelPart, ...]:
    """``LSTM(x[steps, batch, inputs], w[directions, gates * hidden, inputs], r[directions, gates * hidden, hidden])``
    as ONNX has it."""
    shapes = [tensor.shape for tensor in op.inputs[:3]]
    if [len(shape) for shape in shapes] != [3, 3, 3] or shapes[2][1] % shapes[2][2]:
        return ()
    x, w, r = shapes
    (steps, batch, inputs), (directions, wide), hidden = x, w[:2], r[2]
    parts = (
        product_part(1, steps * batch, wide, inputs, op.dtype),
        KernelPart("rnn", _rnn(wide, hidden, batch, steps), op.dtype),
    )
    return parts * directions


def _rnn(wide: int, hidden: int, batch: int, steps: int) -> tuple[int, ...]:
    return wide // hidden, hidden, batch, steps


def _rows(name: str):
    def make(op: Signature, *_) -> tuple[KernelPart, ...]:
        shape = op.inputs[0].shape if op.inputs else ()
        axis = op.numbers("dim", (len(shape) - 1,))[0] % max(len(shape), 1)
        width = prod(op.numbers("normalized_shape")) if name.startswith("layer") else prod(shape[axis:])
        if not shape or axis != len(shape) - 1 or not width:
            return ()  # a softmax over another axis runs another kernel
        return (KernelPart(name, (prod(shape) // width, width), op.dtype),)

    return make


def _attention(name: str):
    def make(op: Signature, *_) -> tuple[KernelPart, ...]:
        """``q[batch, heads, queries, width], k[batch, kv_heads, keys, width], v[batch, kv_heads, keys, value_width]``,
        behind the result's gradient in a backward op."""
        first = 1 if name.endswith("backward") else 0
        shapes = [tensor.shape for tensor in op.inputs[first : first + 3]]
        if [len(shape) for shape in shapes] != [4, 4, 4]:
            return ()
        q, k, v = shapes
        (batch, heads, queries, width), (kv_heads, keys), value_width = q, k[1:3], v[3]
        causal = int(op.attributes.get("is_causal") == "True")
        return (KernelPart(name, (batch, heads, kv_heads, queries, keys, width, value_width, causal), op.dtype),)

    return make


_FLASH = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "scaled_dot_product_attention",
    "flash_attention",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)

_MAKERS = {
    **{name: _attention("flash_attention") for name in _FLASH},
    **{f"{name}_backward": _attention("flash_attention_backward") for name in _FLASH},
    "_scaled_dot_product_cudnn_attention": _attention("attention"),
    "_scaled_dot_product_cudnn_attention_backward": _attention("attention_backward"),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "matmul", "_scaled_mm"), _product),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
    "linear": _linear,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_softmax": _rows("softmax"),
    "_log_softmax": _rows("softmax"),
    "_softmax_backward_data": _rows("softmax_backward"),
    "_log_softmax_backward_data": _rows("softmax_backward"),
    "native_layer_norm": _rows("layer_norm"),
    "native_layer_norm_backward": _rows("layer_norm_backward"),
    "rms_norm": _rows("layer_norm"),
    "_fused_rms_norm": _rows("layer_norm"),
    "_fused_rms_norm_backward": _rows("layer_norm_backward"),
    "rms_norm_backward": _rows("layer_norm_backward"),
}
