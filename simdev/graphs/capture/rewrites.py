"""What a capture changes in PyTorch while a model is built and run, and changes back afterwards."""

from __future__ import annotations

import re
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from simdev.graphs.capture.attention import attend
from simdev.graphs.capture.autocast import gpu_autocast


@contextmanager
def as_on_gpu(*, cpu_kernels: bool = False):
    """Code that asks for an accelerator runs on CPU tensors as it would run there.

    ``cpu_kernels`` lets convolutions use the CPU's fast kernels: for steps that run for real and have no recurrent
    layer, for which the CPU has an op of its own.
    """
    with ExitStack() as stack:
        stack.enter_context(gpu_autocast())
        stack.enter_context(Rewrites())
        if not cpu_kernels:
            stack.enter_context(_no_cpu_ops())
        stack.enter_context(grouped_products())
        stack.enter_context(_copies_of_fakes())
        yield


class Rewrites(TorchFunctionMode):
    """Whatever device a model asks for, it gets tensors of the CPU. Dropout is the one op that it is on accelerators,
    and attention runs the kernel that a GPU chooses (its dropout left out)."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = tuple(_host(item) for item in args), {key: _host(item) for key, item in (kwargs or {}).items()}
        if func is torch.Tensor.cuda:
            return args[0]
        if func in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad):
            with self, _unwatched():  # a checkpoint runs its forward pass inside
                return func(*args, **kwargs)
        if func is functional.dropout:
            return self._dropout(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return attend(func, *args, **kwargs)
        if func is functional.multi_head_attention_forward:
            with _attention_inside(func):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _dropout(input, p=0.5, training=True, inplace=False):
        if not training or p == 0 or inplace:
            return functional.dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]


@contextmanager
def _unwatched():
    """The functions that start a backward pass call no mode, which would call them again."""
    places = (torch.autograd, "has_torch_function"), (torch._tensor, "has_torch_function_unary")
    before = [getattr(owner, name) for owner, name in places]
    for owner, name in places:
        setattr(owner, name, lambda _: False)
    try:
        yield
    finally:
        for (owner, name), value in zip(places, before, strict=True):
            setattr(owner, name, value)


@contextmanager
def _attention_inside(caller):
    """A function of PyTorch that calls attention and dropout itself: its calls pass no mode, so the functions that it
    calls are replaced."""
    names, known = caller.__globals__, ("scaled_dot_product_attention", "dropout")
    before = {name: names[name] for name in known}
    names["scaled_dot_product_attention"] = partial(attend, before["scaled_dot_product_attention"])
    names["dropout"] = Rewrites._dropout
    try:
        yield
    finally:
        names.update(before)


def _host(item):
    """The CPU in place of any other device that holds data."""
    named = isinstance(item, str) and re.fullmatch(r"(cuda|mps|xpu|hpu)(:\d+)?", item)
    return torch.device("cpu") if named or (isinstance(item, torch.device) and item.type != "meta") else item


@contextmanager
def _no_cpu_ops():
    """The one op that only CPUs have, an LSTM, is left to its parts."""
    before, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


@contextmanager
def grouped_products():
    """PyTorch knows the shape of a grouped product (the experts of a mixture) in bf16 only; GPUs run it in f32, too."""
    library = torch.library.Library("aten", "IMPL")  # noqa: TOR901

    def shape_of(first, second, offsets=None, bias=None, out_dtype=None):
        size = [first.shape[-2], second.shape[-1]]
        if first.dim() == second.dim():  # of two matrices, or of two batches: a result for each group
            size = [len(offsets) if first.dim() == 2 else len(first), *size]
        return first.new_empty(size, dtype=out_dtype or first.dtype)

    try:
        if hasattr(torch, "_grouped_mm"):
            library.impl("_grouped_mm", shape_of, "Meta", allow_override=True)
        yield
    finally:
        library._destroy()


@contextmanager
def _copies_of_fakes():
    """``copy.deepcopy`` of a fake tensor copies its mode, too. PyTorch would then replace the copy by another tensor at
    each of its ops, as a tensor of a foreign mode; here a copy keeps the mode of its original."""
    before = FakeTensorMode.__dict__.get("__deepcopy__")
    FakeTensorMode.__deepcopy__ = lambda mode, memo: mode
    try:
        yield
    finally:
        if before is None:
            del FakeTensorMode.__deepcopy__
        else:
            FakeTensorMode.__deepcopy__ = before


@contextmanager
def fake_construction():
    """Let models be built from fake tensors.

    PyTorch cannot exchange the contents of fake tensors: ``Module.to`` and its like replace parameters instead. The
    truncated normal distribution looks at its draws: the parameter is left as it is.
    """
    with ExitStack() as stack:
        apply, replaced = torch.nn.Module._apply, {}

        def convert(module, function, recurse=True):
            if not any(isinstance(tensor, FakeTensor) for tensor in module.parameters()):
                return apply(module, function, recurse)
            for child in module.children() if recurse else ():
                convert(child, function)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = replacement(parameter, function)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = function(buffer)
            return module

        def replacement(parameter, function):
            if id(parameter) not in replaced:  # a tied weight stays tied
                with torch.no_grad():
                    changed = function(parameter)
                if changed is parameter:
                    return parameter
                replaced[id(parameter)] = parameter, torch.nn.Parameter(changed, parameter.requires_grad)
            return replaced[id(parameter)][1]

        def truncated(tensor, *args, **kwargs):
            return tensor if isinstance(tensor, FakeTensor) else normal(tensor, *args, **kwargs)

        normal = torch.nn.init._no_grad_trunc_normal_
        for owner, name, value in (
            (torch.nn.Module, "_apply", convert),
            (torch.nn.init, "_no_grad_trunc_normal_", truncated),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield
