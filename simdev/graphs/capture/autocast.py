"""Mixed precision as a GPU runs it, on the CPU tensors of a capture.

PyTorch keeps a list of casts per device type. The CPU's list differs from the GPU's: it leaves softmax and the norms in
the low precision and casts others that a GPU leaves alone. While :func:`gpu_autocast` is active, ``torch.autocast`` of
any device type casts by the list of CUDA devices (PyTorch's ``ATen/autocast_mode.h``).
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

import torch
from torch.amp import GradScaler
from torch.amp.autocast_mode import autocast

KEY = torch._C.DispatchKey.AutocastCPU
# Ops that CUDA runs in the low precision; the CPU's list has most of them, with a cache of cast weights.
LOWER = (
    "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input "
    "conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm "
    "bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell "
    "rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention"
).split()
# Ops that CUDA runs in f32.
SINGLE = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss "
    "soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm "
    "logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d "
    "upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa "
    "upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa norm.Scalar norm.ScalarOpt_dim"
).split()
# Ops whose result is f32 unless the caller names a dtype.
SINGLE_RESULT = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList"
).split()
# Ops whose arguments take the widest of their dtypes.
WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()


@contextmanager
def gpu_autocast():
    """While active, ``torch.autocast`` of any device type casts as on a GPU, and ``GradScaler`` scales as on a GPU
    (whose steps are never skipped)."""
    with ExitStack() as stack:
        policy: list = []

        def init(self, device_type, dtype=None, enabled=True, cache_enabled=None):
            dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
            original["init"](self, "cpu", dtype, enabled, cache_enabled)

        def enter(self):
            if self._enabled and not policy:
                policy.append(stack.enter_context(_cuda_policy()))
            return original["enter"](self)

        def scaler_init(self, device="cuda", *args, **kwargs):
            original["scaler_init"](self, "cpu", *args, **kwargs)

        def scaler_step(self, optimizer, *args, **kwargs):
            # A fused optimizer divides by the scale itself; its kernel is captured as one op per parameter either way.
            optimizer._step_supports_amp_scaling = False
            return original["scaler_step"](self, optimizer, *args, **kwargs)

        def always_step(self, optimizer, state, *args, **kwargs):
            return optimizer.step(*args, **kwargs)

        original = {
            "init": _patch(stack, autocast, "__init__", init),
            "enter": _patch(stack, autocast, "__enter__", enter),
            "scaler_init": _patch(stack, GradScaler, "__init__", scaler_init),
            "scaler_step": _patch(stack, GradScaler, "step", scaler_step),
            "maybe_step": _patch(stack, GradScaler, "_maybe_opt_step", always_step),
        }
        yield


def _patch(stack: ExitStack, owner, name: str, value):
    original = getattr(owner, name)
    setattr(owner, name, value)
    stack.callback(setattr, owner, name, original)
    return original


@contextmanager
def _cuda_policy():
    """Replace the CPU's list of casts by CUDA's."""
    library = torch.library.Library("aten", "IMPL")  # noqa: TOR901
    try:
        for name in cpu_only():
            _impl(library, name, torch.library.fallthrough_kernel)
        for names, kernel in ((SINGLE, _single), (SINGLE_RESULT, _single_result), (WIDEST, _widest), (LOWER, _lower)):
            for name in names:
                op = _op(name)
                if op is None or (kernel is _lower and _casts(name, "AutocastCPU")):
                    continue
                _impl(library, name, kernel(op))
        yield
    finally:
        library._destroy()


def cpu_only() -> list[str]:
    """Ops that the CPU's list casts and CUDA's does not name."""
    names = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return [name for name in names if _casts(name, "AutocastCPU") and not _casts(name, "AutocastCUDA")]


def _casts(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


def _op(name: str):
    packet, _, overload = name.partition(".")
    found = getattr(torch.ops.aten, packet, None)
    return getattr(found, overload or "default", None)


def _impl(library, name: str, kernel) -> None:
    library.impl(name, kernel, "AutocastCPU", allow_override=True)


def _without_casts():
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(KEY))


def _cast(item, dtype):
    if isinstance(item, torch.Tensor):
        return item.to(dtype) if _eligible(item) and item.dtype != dtype else item
    if isinstance(item, (list, tuple)):
        return [_cast(part, dtype) for part in item]
    return item


def _eligible(item) -> bool:
    return isinstance(item, torch.Tensor) and item.is_floating_point() and item.dtype != torch.float64


def _cast_to(op, dtype_of):
    def kernel(*args, **kwargs):
        with _without_casts():
            dtype = dtype_of([*args, *kwargs.values()])
            return op(*(_cast(item, dtype) for item in args), **{key: _cast(v, dtype) for key, v in kwargs.items()})

    return kernel


def _single(op):
    return _cast_to(op, lambda args: torch.float32)


def _lower(op):
    return _cast_to(op, lambda args: torch.get_autocast_dtype("cpu"))


def _widest(op):
    def dtype_of(args):
        single = any(_eligible(item) and item.dtype == torch.float32 for item in args)
        return torch.float32 if single else torch.get_autocast_dtype("cpu")

    return _cast_to(op, dtype_of)


def _single_result(op):
    position = next(number for number, argument in enumerate(op._schema.arguments) if argument.name == "dtype")

    def kernel(*args, **kwargs):
        with _without_casts():
            named = len(args) > position and args[position] is not None or kwargs.get("dtype") is not None
            if _eligible(args[0]) and not named:
                args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
            return op(*args, **kwargs)

    return kernel
