"""Runs a training step once on fake tensors under the tape."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from simdev.errors import InvalidInput, Unsupported
from simdev.graphs.capture.assemble import Assembly, assemble
from simdev.graphs.capture.trace import Tape, storage_bytes
from simdev.problem.graph import ComputationGraph


def run(make, name: str, meta: dict) -> ComputationGraph:
    """Capture a step, or a function that builds one (then nothing is ever allocated)."""
    try:
        return _run(make, name, meta)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise Unsupported(f"{name}: the step depends on the values of its tensors ({error})") from error


def _run(make, name: str, meta: dict) -> ComputationGraph:
    with FakeTensorMode(allow_non_fake_inputs=True), _fake_conversions(), _Rewrites():
        step = make() if isinstance(make, Callable) else make
        _check(step, name)
    fake = _mode_of(step) or FakeTensorMode(allow_non_fake_inputs=True)
    fake.allow_non_fake_inputs = True
    if any(not isinstance(tensor, FakeTensor) for tensor in _tensors(step)):
        with FakeCopyMode(fake):
            model, inputs, loss, optimizer = copy.deepcopy((step.model, step.inputs, step.loss, step.optimizer))
    else:
        model, inputs, loss, optimizer = step.model, step.inputs, step.loss, step.optimizer
    with fake, _without_onednn():
        return _capture(Tape(), model, inputs, loss, optimizer, name, meta).graph


def run_real(make, name: str, meta: dict, tape: Tape) -> Assembly:
    """Run the step that ``make`` builds once under ``tape``, on real tensors: the same graph, with values."""
    with _Rewrites():
        step = make()
        _check(step, name)
    with _without_onednn():
        return _capture(tape, step.model, step.inputs, step.loss, step.optimizer, name, meta)


def _capture(tape: Tape, model, inputs, loss, optimizer, name: str, meta: dict) -> Assembly:
    named = _parameters(model, optimizer)
    if optimizer is not None:
        _make_state(optimizer)
    homes = {parameter: tape.persistent(parameter, label) for label, parameter in named.items()}
    buffers = {label: buffer for label, buffer in model.named_buffers() if buffer.numel() > 1}
    for label, buffer in buffers.items():
        tape.persistent(buffer, label)
    state_bytes = _register_state(tape, optimizer, homes)
    for label, tensor in _named_inputs(inputs):
        tape.input(tensor, label)

    with tape, _layers(tape, model), _Rewrites():
        outcome = loss(model, *inputs)
        if not isinstance(outcome, torch.Tensor) or outcome.numel() != 1 or not outcome.requires_grad:
            raise InvalidInput("must return one number that depends on the parameters", source=name, field="loss")
        tape.phase = "backward"
        trained = [parameter for parameter in named.values() if parameter.requires_grad]
        gradients = torch.autograd.grad(outcome, trained, allow_unused=True)
        tape.phase = "update"
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient
        final = {
            homes[parameter]: tape.value_of(gradient)
            for parameter, gradient in zip(trained, gradients, strict=True)
            if gradient is not None
        }
        if optimizer is not None:
            optimizer.step()
    results = {tape.value_of(outcome)}
    if optimizer is None:
        results |= set(final.values())
    kind = type(optimizer).__name__.lower() if optimizer is not None else "none"
    facts = {
        "torch": torch.__version__.split("+")[0],
        "precision": _precision(named.values()),
        "optimizer": kind,
        "parameters": sum(parameter.numel() for parameter in named.values()),
        "parameter_bytes": sum(storage_bytes(parameter) for parameter in named.values()),
        "gradient_bytes": sum(g.numel() * g.element_size() for g in gradients if g is not None),
        "optimizer_state_bytes": state_bytes,
        "buffer_bytes": sum(storage_bytes(buffer) for buffer in buffers.values()),
    }
    assembly = assemble(
        tape, name, results=results - {None}, gradients=final, optimizer=kind, meta={**facts, **meta}
    )  # fmt: skip
    assembly.graph.meta["flops"] = int(assembly.graph.op_flops.sum())
    return assembly


def _check(step, name: str) -> None:
    if not isinstance(getattr(step, "model", None), torch.nn.Module):
        raise InvalidInput(f"expected a torch.nn.Module, got {type(step.model).__name__}", source=name, field="model")
    if not callable(step.loss):
        raise InvalidInput("expected a function", source=name, field="loss")
    if not isinstance(step.inputs, (tuple, list)):
        raise InvalidInput("expected a tuple of tensors", source=name, field="inputs")
    if step.optimizer is not None and not isinstance(step.optimizer, torch.optim.Optimizer):
        raise InvalidInput("expected a torch.optim.Optimizer or None", source=name, field="optimizer")


def _tensors(step):
    yield from step.model.parameters()
    yield from step.model.buffers()
    for _, tensor in _named_inputs(step.inputs):
        yield tensor


def _mode_of(step):
    return next((tensor.fake_mode for tensor in _tensors(step) if isinstance(tensor, FakeTensor)), None)


def _named_inputs(inputs):
    for number, item in enumerate(inputs):
        yield from _flatten(item, f"input.{number}")


def _flatten(item, label):
    if isinstance(item, torch.Tensor):
        yield label, item
    elif isinstance(item, dict):
        for key, value in item.items():
            yield from _flatten(value, f"{label}.{key}")
    elif isinstance(item, (tuple, list)):
        for number, value in enumerate(item):
            yield from _flatten(value, f"{label}.{number}")


def _parameters(model, optimizer) -> dict[str, torch.Tensor]:
    """Parameters by module path; those that only the optimiser knows come last."""
    named = dict(model.named_parameters())
    known = {id(parameter) for parameter in named.values()}
    for group in optimizer.param_groups if optimizer is not None else ():
        for parameter in group["params"]:
            if id(parameter) not in known:
                known.add(id(parameter))
                named[f"optimizer.parameter{len(named)}"] = parameter
    return named


def _make_state(optimizer) -> None:
    """Let the optimiser make its state, as after its first step, and take the implementation with one op after
    another per parameter: those that join all parameters in one call hide what belongs to which."""
    for group in optimizer.param_groups:
        group.update({key: False for key in ("foreach", "fused", "capturable") if key in group})
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    warm = Tape()
    warm.phase, warm.recording = "update", False
    with warm:
        optimizer.step()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _register_state(tape: Tape, optimizer, homes: dict) -> int:
    """Tell the tape which tensors are optimiser state; returns their bytes (without step counters)."""
    total = 0
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        for tensor in state.values():
            if isinstance(tensor, torch.Tensor) and parameter in homes:
                tape.state(tensor, homes[parameter])
                total += storage_bytes(tensor) if tensor.numel() > 1 else 0
    return total


def _precision(parameters) -> str:
    """The dtype that most parameter bytes have."""
    from simdev.graphs.capture.trace import DTYPES

    total: dict[str, int] = {}
    for parameter in parameters:
        dtype = DTYPES.get(parameter.dtype, str(parameter.dtype))
        total[dtype] = total.get(dtype, 0) + storage_bytes(parameter)
    return max(sorted(total), key=total.get) if total else "f32"


class _Rewrites(TorchFunctionMode):
    """Whatever device a model asks for, it gets fake tensors of the CPU. Dropout is the one op that it is on
    accelerators, and attention is always one op (its dropout left out)."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = tuple(_host(item) for item in args), {key: _host(item) for key, item in (kwargs or {}).items()}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is functional.dropout:
            return self._dropout(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)

    @staticmethod
    def _dropout(input, p=0.5, training=True, inplace=False):
        if not training or p == 0 or inplace:
            return functional.dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]


def _host(item):
    """The CPU in place of any other device that holds data."""
    named = isinstance(item, str) and re.fullmatch(r"(cuda|mps|xpu|hpu)(:\d+)?", item)
    return torch.device("cpu") if named or (isinstance(item, torch.device) and item.type != "meta") else item


@contextmanager
def _without_onednn():
    """With it an LSTM would be one op that only CPUs have."""
    before, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


@contextmanager
def _fake_conversions():
    """Let ``Module.to`` and its like replace parameters: PyTorch cannot exchange the contents of fake tensors."""
    original, replaced = torch.nn.Module._apply, {}

    def convert(module, function, recurse=True):
        if not any(isinstance(tensor, FakeTensor) for tensor in module.parameters()):
            return original(module, function, recurse)
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

    torch.nn.Module._apply = convert
    try:
        yield
    finally:
        torch.nn.Module._apply = original


@contextmanager
def _layers(tape: Tape, model):
    """Tell the tape which module of ``model`` runs."""
    path = {id(module): label for label, module in model.named_modules()}

    def before(module, _):
        if id(module) in path:
            tape.enter(path[id(module)])

    def after(module, _, __):
        if id(module) in path:
            tape.leave()

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
