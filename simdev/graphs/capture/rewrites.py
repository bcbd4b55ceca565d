"""What a capture changes in PyTorch while a model is built and run, and changes back afterwards."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from simdev.errors import Unsupported
from simdev.graphs.capture.attention import attend, attend_flexibly
from simdev.graphs.capture.autocast import gpu_autocast

# Warnings of PyTorch about what a capture does, which the user can do nothing about.
NOT_OF_THE_USER = ("Accessing the data pointer of FakeTensor", r"(?s).*Overriding a previously registered kernel")


@contextmanager
def unlogged_failures():
    """PyTorch does not log that an op on fake tensors failed: the exception says so, and other inputs may run."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def as_on_gpu(*, cpu_kernels: bool = False, ranks: bool = False):
    """Code that asks for an accelerator runs on CPU tensors as it would run there.

    ``cpu_kernels`` lets convolutions use the CPU's fast kernels: for steps that run for real and have no recurrent
    layer, for which the CPU has an op of its own. With ``ranks`` the step is one of many: process groups and
    ``DistributedDataParallel`` stay what they are, and optimizers join the updates of all parameters in multi-tensor
    kernels, unless they are asked not to.
    """
    with ExitStack() as stack, warnings.catch_warnings():
        for about in NOT_OF_THE_USER:
            warnings.filterwarnings("ignore", message=about)
        stack.enter_context(gpu_autocast())
        stack.enter_context(Rewrites())
        if not cpu_kernels:
            stack.enter_context(no_cpu_ops())
        stack.enter_context(grouped_products())
        stack.enter_context(_flexible_attention())
        stack.enter_context(_copies_of_fakes())
        stack.enter_context(_nothing_remembered())
        stack.enter_context(_unchanged_modules())
        stack.enter_context(no_accelerator())
        for context in (joined_updates, norms_of_ranks) if ranks else (one_replica,):
            stack.enter_context(context())
        yield


@contextmanager
def joined_updates():
    """Optimizers and ``clip_grad_norm_`` choose their implementation, unless told, as for tensors of a GPU."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    known = optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types
    devices = optimizer._get_foreach_kernels_supported_devices
    optimizer._get_foreach_kernels_supported_devices = lambda: [*devices(), "cpu"]
    for types in known:  # the lists that PyTorch's libraries extend, too
        types.append(FakeTensor)
    try:
        yield
    finally:
        optimizer._get_foreach_kernels_supported_devices = devices
        for types in known:
            types.remove(FakeTensor)


class Rewrites(TorchFunctionMode):
    """Whatever device a model asks for, it gets tensors of the CPU. Dropout is the one op that it is on accelerators,
    and attention runs the kernel that a GPU chooses (its dropout left out)."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.device:
            return _device(*args, **(kwargs or {}))
        for item in args:  # of the calls of a step, few name a device
            if isinstance(item, (str, torch.device)):
                args = tuple(map(_host, args))
                break
        kwargs = {key: _host(item) for key, item in kwargs.items()} if kwargs else {}
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], torch.device("cpu"), *args[2:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cpu")
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            return func(args[0], _places(args[1]), *args[2:])
        if func in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad):
            with self, _unwatched():  # a checkpoint runs its forward pass inside
                return func(*args, **kwargs)
        if func is functional.dropout:
            return self._dropout(*args, **kwargs)
        if func is torch._C._nn.scaled_dot_product_attention:  # a capture may put another function under its usual name
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


AS_TUPLE = 32  # PyTorch takes a list of fewer tensors for a tuple


def _places(index):
    """``index`` of a tensor, with the numbers of each list of fake tensors that are numbers: PyTorch does not ask these
    for their values, but reads their memory, which they do not have. A short list that is the whole index is a tuple
    for PyTorch."""
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, (list, tuple)):
            break
    else:  # as nearly always
        return index
    if not isinstance(index, tuple):
        return _numbers(index) if len(index) >= AS_TUPLE else index
    return tuple(_numbers(part) if isinstance(part, (list, tuple)) else part for part in index)


def _numbers(part):
    """A list with the number of each fake tensor in it; ``part`` itself without one, or with one that is no number."""
    fakes = [isinstance(item, FakeTensor) for item in part]
    if not any(fakes) or any(fake and item.dim() for fake, item in zip(fakes, part, strict=True)):
        return part
    return [item.item() if fake else item for fake, item in zip(fakes, part, strict=True)]


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


def _device(*args, **kwargs):
    """``torch.device("cuda", 0)`` and its like: the CPU, unless the device holds no data."""
    kind = args[0] if args else kwargs.get("type", kwargs.get("device", "cuda"))
    return torch.device("meta" if str(kind).startswith("meta") else "cpu")


def _host(item):
    """The CPU in place of any other device that holds data."""
    named = isinstance(item, str) and re.fullmatch(r"(cuda|mps|xpu|hpu)(:\d+)?", item)
    return torch.device("cpu") if named or (isinstance(item, torch.device) and item.type != "meta") else item


@contextmanager
def no_cpu_ops():
    """The one op that only CPUs have, an LSTM, is left to its parts."""
    before, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


class _Stream:
    """A stream or an event of a machine without an accelerator: every call is over when it returns."""

    def __init__(self, *_, **__):
        self.device, self.cuda_stream = torch.device("cpu"), 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def __getattr__(self, name: str):
        if name in ("wait_stream", "wait_event", "wait", "synchronize", "record"):
            return lambda *_, **__: None
        if name == "record_event":
            return lambda event=None: event or _Stream()
        if name in ("query", "elapsed_time"):
            return lambda *_: True if name == "query" else 0.0
        raise AttributeError(name)


class _Generators(type(torch._C.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, item):
        return isinstance(item, torch._C.Generator)


class _Generator(torch._C.Generator, metaclass=_Generators):
    """A random generator of the CPU, whatever device it is asked for."""

    def __new__(cls, device="cpu"):
        return torch._C.Generator("cpu")


class _Recorded:
    """In place of ``torch.cuda.CUDAGraph``."""

    def __init__(self, *_, **__):
        raise Unsupported(
            "torch.cuda.CUDAGraph replays kernels that no capture sees; capture the function that the graph records"
        )


def _branch(condition, if_true, if_false, operands=()):
    """``torch.cond``: the branch that is taken."""
    return (if_true if condition else if_false)(*operands)


@contextmanager
def no_accelerator():
    """Calls that order or measure the work of an accelerator do nothing; ``torch.compile`` leaves a model as it is."""
    waits = "synchronize set_device empty_cache ipc_collect reset_peak_memory_stats reset_max_memory_allocated".split()
    streams = "Stream Event ExternalStream device stream StreamContext current_stream default_stream".split()
    marks = "range_push range_pop mark range_start range_end".split()
    cuda = {**{name: _nothing() for name in waits}, **dict.fromkeys(streams, _Stream), "current_device": lambda: 0}
    nvtx = {**{name: _nothing() for name in marks}, "range": _Stream}
    with ExitStack() as stack:
        cuda |= {"CUDAGraph": _Recorded, "make_graphed_callables": lambda callables, *_, **__: callables}
        own = {"compile": _uncompiled, "cond": _branch, "Generator": _Generator}
        places = (torch.cuda, cuda), (torch.cuda.nvtx, nvtx), (torch, own)
        parse = torch._C._nn._parse_to  # of Module.to, whose device may be the number of a GPU

        def parse_to(*args, **kwargs):
            first = (torch.device("cpu") if type(item) is int else item for item in args[:1])
            return parse(*first, *args[1:], **{key: _host(item) for key, item in kwargs.items()})

        inner = (torch.Tensor, {"record_stream": _nothing()}), (torch._C._nn, {"_parse_to": parse_to})
        for owner, names in (*places, *inner):
            for name, value in names.items():
                if hasattr(owner, name):
                    stack.callback(setattr, owner, name, getattr(owner, name))
                    setattr(owner, name, value)
        yield


def _nothing():
    return lambda *_, **__: 0


def _uncompiled(model=None, **options):
    """``torch.compile`` as a function or as a decorator: what it is given."""
    return (lambda given: given) if model is None else model


@contextmanager
def one_replica():
    """A process group has no other process, and ``DistributedDataParallel`` is the model of one replica, without its
    communication. A group that is made while this is active goes with it, or with the outermost of several."""
    if not torch.distributed.is_available():
        yield
        return
    from torch.distributed import distributed_c10d as groups
    from torch.nn.parallel import DistributedDataParallel as Replicas

    given = groups.init_process_group
    if hasattr(given, "of_one_replica"):
        yield
        return
    made = groups.is_initialized()

    def init(backend=None, *args, rank=0, world_size=1, **kwargs):
        if not groups.is_initialized():
            given("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

    init.of_one_replica = True  # type: ignore[attr-defined]

    def wrap(self, module, *_, **__):
        torch.nn.Module.__init__(self)
        self.module, self.require_backward_grad_sync = module, True

    changed = {
        "__init__": wrap,
        "forward": lambda self, *args, **kwargs: self.module(*args, **kwargs),
        "train": torch.nn.Module.train,
        "no_sync": lambda self: nullcontext(),
        "join": lambda self, *_, **__: nullcontext(),
        "register_comm_hook": lambda self, *_, **__: None,
    }
    norms = torch.nn.SyncBatchNorm
    with ExitStack() as stack:
        stack.callback(setattr, norms, "forward", norms.forward)
        norms.forward = torch.nn.BatchNorm1d.forward  # without the check for a GPU that comes before the group's size
        for owner in (groups, torch.distributed):
            stack.callback(setattr, owner, "init_process_group", owner.init_process_group)
            owner.init_process_group = init
        for name, value in changed.items():
            stack.callback(setattr, Replicas, name, getattr(Replicas, name))
            setattr(Replicas, name, value)
        try:
            yield
        finally:
            if groups.is_initialized() and not made:
                groups.destroy_process_group()


@contextmanager
def norms_of_ranks():
    """``SyncBatchNorm`` communicates as on GPUs. Its kernels exist for GPUs only; here the CPU gets them. A rank has
    the statistics of its own batch: the group of a capture moves no data. PyTorch drops ranks with an empty batch
    by the values that it gathered, but not while it captures a CUDA graph: here it behaves as in that case.
    """
    if not torch.distributed.is_available():
        yield
        return
    from torch.nn.modules import _functions
    from torch.nn.parallel import DistributedDataParallel as Replicas

    groups = torch.distributed
    gathers = "all_gather_single", "all_gather_into_tensor"  # by release of PyTorch

    def flat(gather, received, *args, **kwargs):  # the group of a capture divides the first dimension by its ranks
        return gather(received.view(-1), *args, **kwargs)

    def forward(norm, batch):
        group = norm.process_group or (groups.group.WORLD if groups.is_initialized() else None)
        if not norm.training or group is None or groups.get_world_size(group) < 2:
            return torch.nn.BatchNorm1d.forward(norm, batch)
        norm._check_input_dim(batch)
        if norm.track_running_stats:
            norm.num_batches_tracked.add_(1)
        means = (norm.running_mean, norm.running_var) if norm.track_running_stats else (None, None)
        momentum, ranks = norm.momentum or 0.0, groups.get_world_size(group)
        with replaced(
            *((torch.cuda, name, lambda: True) for name in ("is_available", "is_current_stream_capturing")),
            *((groups, name, partial(flat, getattr(groups, name))) for name in gathers if hasattr(groups, name)),
        ):
            return _functions.SyncBatchNorm.apply(
                batch, norm.weight, norm.bias, *means, norm.eps, momentum, group, ranks
            )

    with torch.library._scoped_library("aten", "IMPL") as library:
        for kernel in (_stats, _gather_stats, _normalize, _reduce_gradient, _gradient_of_batch):
            for key in ("CPU", "Meta"):
                library.impl(_NORM_KERNELS[kernel], kernel, key)
        with replaced(
            (torch.nn.SyncBatchNorm, "forward", forward),
            (Replicas, "_passing_sync_batchnorm_handle", lambda self, module: None),
        ):
            yield


@contextmanager
def replaced(*places):
    """Attributes, each an owner, a name and a value, have other values while this is active."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    try:
        for owner, name, value in places:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _by_channel(batch):
    """A batch in the precision of its statistics, its dimensions without the channels, and a channel's place in it."""
    rest = [dim for dim in range(batch.dim()) if dim != 1]
    wide = batch.double() if batch.dtype == torch.float64 else batch.float()
    return wide, rest, [1, -1, *[1] * (batch.dim() - 2)]


def _stats(batch, eps):
    wide, rest, _ = _by_channel(batch)
    return wide.mean(rest), (wide.var(rest, correction=0) + eps).rsqrt()


def _gather_stats(batch, means, inverses, running_mean, running_var, momentum, eps, counts):
    wide, rest, _ = _by_channel(batch)
    mean, variance = wide.mean(rest), wide.var(rest, correction=0)
    for running, new in ((running_mean, mean), (running_var, variance)):
        if running is not None:
            running.lerp_(new.to(running.dtype), momentum)
    return mean, (variance + eps).rsqrt()


def _normalize(batch, weight, bias, mean, inverse, eps):
    wide, _, place = _by_channel(batch)
    normal = (wide - mean.view(place)) * inverse.view(place)
    normal = normal if weight is None else normal * weight.view(place)
    return (normal if bias is None else normal + bias.view(place)).to(batch.dtype)


def _reduce_gradient(gradient, batch, mean, inverse, weight, wants_batch, wants_weight, wants_bias):
    wide, rest, place = _by_channel(gradient)
    total, product = wide.sum(rest), (wide * (batch - mean.view(place))).sum(rest)
    kind = batch.dtype if weight is None else weight.dtype
    return total, product, (product * inverse).to(kind), total.to(kind)


def _gradient_of_batch(gradient, batch, mean, inverse, weight, total, product, counts):
    wide, rest, place = _by_channel(gradient)
    size = gradient.numel() // gradient.shape[1] * len(counts)
    centred = (batch - mean.view(place)) * (inverse.square() * product / size).view(place)
    scale = inverse if weight is None else inverse * weight
    return ((wide - total.view(place) / size - centred) * scale.view(place)).to(gradient.dtype)


_NORM_KERNELS = {
    _stats: "batch_norm_stats",
    _gather_stats: "batch_norm_gather_stats_with_counts",
    _normalize: "batch_norm_elemt",
    _reduce_gradient: "batch_norm_backward_reduce",
    _gradient_of_batch: "batch_norm_backward_elemt",
}


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
def _flexible_attention():
    """FlexAttention has a backward pass, and needs no compiler to be one kernel."""
    from torch.nn.attention import flex_attention as module

    own = {"_validate_device": _nothing(), "_warn_once": _nothing(), "flex_attention_hop": attend_flexibly}
    before = {name: getattr(module, name) for name in own if hasattr(module, name)}
    for name in before:
        setattr(module, name, own[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@contextmanager
def fused_norms():
    """RMSNorm is one kernel each way on a GPU (since PyTorch 2.8). PyTorch takes it apart for a device that has no such
    kernel: here the CPU gets one, which computes what PyTorch's own decomposition does, and autograd and DTensor treat
    the norm as they do on a GPU. A norm whose weight has another type than its input stays several kernels there, too.
    """
    from torch._decomp import decomposition_table

    missing = {"_fused_rms_norm": _rms_norm}  # PyTorch 2.9 knows the decomposition of the backward kernel alone
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in ("_fused_rms_norm", "_fused_rms_norm_backward"):
            op = getattr(torch.ops.aten, name, None)
            parts = None if op is None else decomposition_table.get(op.default, missing.get(name))
            if parts is not None:
                library.impl(name, parts, "CPU")
        yield


def _rms_norm(input, normalized_shape, weight, eps):  # noqa: A002 (PyTorch's own names)
    """The normalised input, and the reciprocal of its root mean square over the last dimensions."""
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    axes = list(range(-len(normalized_shape), 0))
    least = torch.finfo(wide.dtype).eps if eps is None else eps
    scale = torch.rsqrt(wide.pow(2).mean(axes, keepdim=True) + least)
    normal = wide * scale if weight is None else wide * scale * weight
    return normal.to(input.dtype), scale


@contextmanager
def _nothing_remembered():
    """transformers computes the positions and anchors of its detectors once for all models of a process. Those of a
    fake model have no values, so each model computes its own, as in code that is compiled."""
    module: Any = sys.modules.get("transformers.pytorch_utils")
    compiling = getattr(module, "is_torchdynamo_compiling", None)
    if compiling is None:
        yield
        return
    module.is_torchdynamo_compiling = lambda: True
    try:
        yield
    finally:
        module.is_torchdynamo_compiling = compiling


@contextmanager
def _copies_of_fakes():
    """``copy.deepcopy`` of a fake tensor copies its mode, too. PyTorch would then replace the copy by another tensor at
    each of its ops, as a tensor of a foreign mode; here a copy keeps the mode of its original. What a fake tensor
    knows as its constant (of a count of batches) is real, and is not copied."""

    def copied(tensor, memo):
        constant, tensor.constant = tensor.constant, None
        try:
            return torch.Tensor.__deepcopy__(tensor, memo)
        finally:
            tensor.constant = constant

    own = (FakeTensorMode, "__deepcopy__", lambda mode, memo: mode), (FakeTensor, "__deepcopy__", copied)
    before = [owner.__dict__.get(name) for owner, name, _ in own]
    for owner, name, value in own:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(own, before, strict=True):
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextmanager
def _unchanged_modules():
    """``Module.to`` and its like, which a step may call, leave a module of fake tensors alone that they do not change:
    PyTorch would exchange each parameter with itself, which it cannot once a gradient is wanted of it."""
    apply = torch.nn.Module._apply

    def convert(module, function, recurse=True):
        held = [*module.parameters(recurse), *module.buffers(recurse)]
        with torch.no_grad():
            own = any(type(part)._apply is not convert for part in module.modules())  # it may hold more
            if not own and held and all(isinstance(one, FakeTensor) and function(one) is one for one in held):
                return module
        return apply(module, function, recurse)

    with replaced((torch.nn.Module, "_apply", convert)):
        yield


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
            local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
            return tensor if isinstance(local, FakeTensor) else normal(tensor, *args, **kwargs)

        normal = torch.nn.init._no_grad_trunc_normal_
        for owner, name, value in (
            (torch.nn.Module, "_apply", convert),
            (torch.nn.init, "_no_grad_trunc_normal_", truncated),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield
