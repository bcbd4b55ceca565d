"""Chooses the kernel of ``scaled_dot_product_attention`` as a CUDA GPU does, and runs it on CPU tensors.

The rules are PyTorch's (``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``: ``can_use_flash_attention``,
``can_use_mem_efficient_attention``, ``can_use_cudnn_attention``) for a GPU of compute capability 8.0, in PyTorch's
order of preference and within what ``torch.nn.attention.sdpa_kernel`` allows. A GPU of capability 9.0 or 10.0 with
cuDNN 9.15.1 or newer prefers cuDNN's kernel to FlashAttention; here cuDNN's kernel runs only if ``sdpa_kernel`` asks
for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

FLASH, EFFICIENT, CUDNN, MATH = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)
KINDS = {
    FLASH: "_scaled_dot_product_flash_attention",
    EFFICIENT: "_scaled_dot_product_efficient_attention",
    CUDNN: "_scaled_dot_product_cudnn_attention",
}
HALF = (torch.float16, torch.bfloat16)
aten = torch.ops.aten

_running: ContextVar[SDPBackend] = ContextVar("the kernel of the attention that runs now", default=FLASH)
_flash_only: ContextVar[bool] = ContextVar("whether every attention is FlashAttention", default=False)


def running_kind() -> str:
    """The kind of the fused attention that runs now."""
    return KINDS[_running.get()]


@contextmanager
def flash_everywhere() -> Iterator[None]:
    """While active, every attention is FlashAttention, as in the graphs of the shipped workloads."""
    token = _flash_only.set(True)
    try:
        yield
    finally:
        _flash_only.reset(token)


def attend(attention, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """PyTorch's function ``attention`` by the kernel that a GPU chooses. Its dropout is left out."""
    if torch.is_autocast_enabled("cpu"):  # of all devices, in a capture: the kernel is chosen after the casts
        query, key, value, attn_mask = map(_cast, (query, key, value, attn_mask))
    masks, options = (attn_mask, 0.0, is_causal), {"scale": scale, "enable_gqa": enable_gqa}
    if hasattr(query, "placements"):  # a DTensor, whose import would cost every capture a second
        return _of_shards(attention, query, key, value, *masks, scale, enable_gqa)
    if query.is_nested and query.layout == torch.jagged:
        return _of_sequences(attention, query, key, value, *masks, scale, enable_gqa)
    if _flash_only.get():
        return attention(query, key, value, *masks, **options)
    chosen = backend(query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa)
    if chosen == MATH:
        with sdpa_kernel(MATH):
            return attention(query, key, value, *masks, **options)
    width = query.shape[-1]
    if chosen == FLASH and width % 8:  # the kernel takes multiples of eight: PyTorch pads, and cuts the result
        scale = width**-0.5 if scale is None else scale
        query, key, value = (torch.nn.functional.pad(tensor, (0, -width % 8)) for tensor in (query, key, value))
        return attend(attention, query, key, value, *masks, scale, enable_gqa)[..., :width]
    fake = isinstance(query, FakeTensor)
    if fake and (value.shape[-1] != width or (attn_mask is not None and attn_mask.requires_grad)):
        return _of_gpu(chosen, query, key, value, attn_mask, is_causal, scale)
    token = _running.set(chosen)
    try:
        if fake and query.shape[1] != key.shape[1]:  # the GPU's kernels share keys and values between heads
            return aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
            )[0]
        with sdpa_kernel([FLASH, MATH]):  # what the CPU has
            return attention(query, key, value, *masks, **options)
    finally:
        _running.reset(token)


def _cast(tensor):
    """A tensor as autocast casts arguments of attention."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def attend_flexibly(query, key, value, score_mod, block_mask, scale, kernel_options, *_):
    """FlexAttention as the fused attention of its tensors, which has the FLOPs that PyTorch counts for it; the CPU has
    no backward pass for it. A score function is left out, as code inside of the kernel. The statistics of the rows
    have no values and no gradients."""
    causal = query.shape[-2] == key.shape[-2] and is_causal(block_mask[-1])
    shared = query.shape[1] != key.shape[1]
    result = torch._C._nn.scaled_dot_product_attention(  # which the capture's mode answers by attend
        query, key, value, None, 0.0, causal, scale=scale, enable_gqa=shared
    )
    statistics = query.new_empty(query.shape[:-1], dtype=torch.float32)
    return result, statistics, statistics


def is_causal(mask) -> bool:
    """Whether a mask function of FlexAttention leaves out all keys behind the query. A conjunction does if one of its
    parts does; a function that looks at tensors without values is taken to leave out nothing."""
    if mask.__name__ == "and_mask":
        parts = next(cell.cell_contents for cell in mask.__closure__ if isinstance(cell.cell_contents, tuple))
        return any(map(is_causal, parts))
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # numbers with values, whatever is captured
        try:
            numbers = torch.arange(4)
            seen = [[bool(mask(numbers[0], numbers[0], q, k)) for k in numbers] for q in numbers]
        except (RuntimeError, TypeError, IndexError):
            return False
    return not any(any(row[q + 1 :]) for q, row in enumerate(seen))


def _of_shards(attention, query, key, value, mask, dropout_p, is_causal: bool, scale, enable_gqa: bool):
    """Attention of DTensors that are divided by batch or heads: each rank's own shard, as DTensor divides the GPU's
    ops. DTensor does not divide the ops of a CPU."""
    from torch.distributed.tensor import DTensor

    placements = query.placements
    alike = all(isinstance(t, DTensor) and t.placements == placements for t in (key, value))
    shards = all(p.is_replicate() or (p.is_shard() and p.dim in (0, 1)) for p in placements)
    if not (alike and shards) or (mask is not None and mask.dim() > 2 and max(mask.shape[:-2]) > 1):
        message = "scaled_dot_product_attention takes DTensors that are divided by batch or heads, all in one way"
        raise NotImplementedError(message)
    local = mask.to_local() if isinstance(mask, DTensor) else mask
    q, k, v = (tensor.to_local() for tensor in (query, key, value))
    out = attend(attention, q, k, v, local, dropout_p, is_causal, scale, enable_gqa)
    return DTensor.from_local(out, query.device_mesh, placements, run_check=False)


def _of_sequences(attention, query, key, value, mask, dropout_p, is_causal: bool, scale, enable_gqa: bool):
    """Attention of jagged tensors (batch, heads, ragged, width): one of each sequence, which has the FLOPs of the
    GPU's kernel for ragged batches. The CPU has none."""
    if mask is not None:
        raise NotImplementedError("scaled_dot_product_attention takes no attn_mask with jagged tensors, also on GPUs")
    results = [
        attend(attention, q[None], k[None], v[None], None, dropout_p, is_causal, scale, enable_gqa)[0]
        for q, k, v in zip(query.unbind(), key.unbind(), value.unbind(), strict=True)
    ]
    rows = torch.cat([result.transpose(0, 1) for result in results])
    return torch.nested.nested_tensor_from_jagged(rows, offsets=query.offsets()).transpose(1, 2)


def _of_gpu(chosen: SDPBackend, query, key, value, mask, is_causal: bool, scale):
    """The GPU's own op, for what the CPU's kernel cannot do. Fake tensors run any op."""
    if mask is not None:
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    if chosen == FLASH:
        return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]
    op = (
        aten._scaled_dot_product_efficient_attention
        if chosen == EFFICIENT
        else aten._scaled_dot_product_cudnn_attention
    )
    return op(query, key, value, mask, torch.is_grad_enabled(), 0.0, is_causal, scale=scale)[0]


def backend(query, key, value, mask, *, is_causal: bool, enable_gqa: bool) -> SDPBackend:
    """The first kernel in PyTorch's order that is enabled and takes these tensors."""
    cuda = torch.backends.cuda
    enabled = {
        FLASH: cuda.flash_sdp_enabled(),
        EFFICIENT: cuda.mem_efficient_sdp_enabled(),
        CUDNN: cuda.cudnn_sdp_enabled(),
        MATH: cuda.math_sdp_enabled(),
    }
    for number in torch._C._get_sdp_priority_order():
        kernel = SDPBackend(number)
        if enabled.get(kernel) and (kernel == MATH or _takes(kernel, query, key, value, mask, is_causal, enable_gqa)):
            return kernel
    return MATH


def _takes(kernel: SDPBackend, query, key, value, mask, is_causal: bool, enable_gqa: bool) -> bool:
    tensors = query, key, value
    if any(tensor.dim() != 4 or tensor.dtype != query.dtype or not tensor.numel() for tensor in tensors):
        return False
    if any(tensor.stride(-1) != 1 and tensor.shape[-1] > 1 for tensor in tensors):
        return False
    heads, shared, others = (tensor.shape[1] for tensor in tensors)
    same = heads == shared == others
    if not same and not (enable_gqa and shared == others and heads % shared == 0):
        return False
    width, key_width, value_width = (tensor.shape[-1] for tensor in tensors)
    half = query.dtype in HALF
    if kernel == FLASH:
        square = not is_causal or query.shape[-2] == key.shape[-2]
        return half and mask is None and square and width == key_width == value_width <= 256
    if kernel == CUDNN:
        return half and max(width, value_width) <= 128 and width % 8 == 0 and value_width % 8 == 0 and key.shape[2] > 1
    if not half and query.dtype != torch.float32 or mask is not None and mask.stride(-1) != 1:
        return False
    step = 8 if half else 4  # elements of 16 bytes
    aligned = all(size % step == 0 for size in (width, value_width))
    return aligned and width == key_width and all(tensor.storage_offset() % step == 0 for tensor in tensors)
