"""Builds the step that is captured: from fake tensors, which need no memory, or for real where that fails."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from simdev.errors import InvalidInput, SimdevError, Unsupported
from simdev.graphs.capture.rewrites import as_on_gpu, fake_construction
from simdev.graphs.capture.shadows import Shadows
from simdev.graphs.workload import CustomStep, Step, TrainingStep


class BuildFailed(SimdevError):
    """The function that builds the step failed, on fake tensors and real or meta ones; ``__cause__`` is its error."""


@dataclass(frozen=True)
class Built:
    """A step, the fake mode that its tensors belong to, and the values of its small tensors."""

    step: Step
    mode: FakeTensorMode
    shadows: Shadows


def build_fake(make: Callable[[], Step] | Step, name: str) -> Built:
    """The step on fake tensors. A step given as it is, or one that can only be built for real, is copied; a custom
    step stays real then, as its function holds the optimizers.

    Raises :class:`BuildFailed`, and :class:`InvalidInput` for a step of the wrong make.
    """
    mode, shadows = FakeTensorMode(allow_non_fake_inputs=True), Shadows()
    if not isinstance(make, Callable):
        return Built(_faked(checked(make, name), mode, shadows), _mode_of(make) or mode, shadows)
    try:
        with mode, shadows, fake_construction(), as_on_gpu():
            step = checked(make(), name)
        return Built(_faked(step, mode, shadows), mode, shadows)
    except SimdevError:
        raise
    except Exception as error:
        if _fails_alike(make, error):
            raise BuildFailed(f"{type(error).__name__}: {error}") from error
        step = build_real(make, name)
    mode, shadows = FakeTensorMode(allow_non_fake_inputs=True), Shadows()
    return Built(_faked(step, mode, shadows), mode, shadows)


def _fails_alike(make: Callable[[], Step], error: Exception) -> bool:
    """Whether the builder fails with the same ``error`` on meta tensors, which have no values either, but say so in
    other words if they are asked for one. Then the builder is at fault, and real tensors, which may not fit into the
    memory, would not help it."""
    try:
        with torch.device("meta"), as_on_gpu():
            make()
    except Exception as other:
        return type(other) is type(error) and str(other) == str(error)
    return False


def build_real(make: Callable[[], Step] | Step, name: str) -> Step:
    """The step on real tensors of the CPU. Raises as :func:`build_fake` does."""
    if not isinstance(make, Callable):
        return checked(make, name)
    try:
        with as_on_gpu():
            return checked(make(), name)
    except SimdevError:
        raise
    except Exception as error:
        raise BuildFailed(f"{type(error).__name__}: {error}") from error


def checked(step, name: str) -> Step:
    """``step`` as it is captured: without ``torch.compile``'s wrapper around its model, and written out where its
    optimizers do not show all that is updated.

    Raises :class:`InvalidInput` naming the field that is wrong, :class:`Unsupported` for quantized parameters.
    """
    if not isinstance(getattr(step, "model", None), torch.nn.Module):
        found = type(getattr(step, "model", step)).__name__
        raise InvalidInput(f"expected a torch.nn.Module, got {found}", source=name, field="model")
    if not isinstance(step.inputs, (tuple, list)):
        raise InvalidInput("expected a tuple of tensors", source=name, field="inputs")
    if isinstance(step, TrainingStep) and not callable(step.loss):
        raise InvalidInput("expected a function; for a forward pass return an InferenceStep", source=name, field="loss")
    if isinstance(step, CustomStep) and not callable(step.run):
        raise InvalidInput("expected a function", source=name, field="run")
    for optimizer in optimizers_of(step):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidInput(
                "expected a torch.optim.Optimizer, a list of them, or None", source=name, field="optimizer"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise Unsupported(
                f"{name}: LBFGS evaluates the loss as often as its values ask for; return a CustomStep whose function "
                "calls optimizer.step(closure)"
            )
    for label, parameter in step.model.named_parameters():
        if is_traceable_wrapper_subclass(parameter):
            raise Unsupported(
                f"{name}: parameter {label} is a {type(parameter).__name__}, whose kernels simdev cannot see; capture "
                "the model before it is quantized or distributed"
            )
    compiled = getattr(step.model, "_orig_mod", None)
    return _written_out(replace(step, model=compiled) if isinstance(compiled, torch.nn.Module) else step)


def _written_out(step: Step) -> Step:
    """``step`` as a loop that is written out, if its optimizers do not show all that is updated: a hook of a parameter
    may step an optimizer inside the backward pass, and an optimizer may hold another one (Lookahead), whose state is
    not its own."""
    if not isinstance(step, TrainingStep):
        return step
    hooked = any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in step.model.parameters())
    optimizers = optimizers_of(step)
    inner = (item for optimizer in optimizers for item in vars(optimizer).values())
    if not hooked and not any(isinstance(item, torch.optim.Optimizer) for item in inner):
        return step

    def run(model, *inputs):
        step.loss(model, *inputs).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    return CustomStep(step.model, step.inputs, run)


def optimizers_of(step) -> list:
    """The optimizers of a training step, in their order."""
    given = getattr(step, "optimizer", None)
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def tensors_of(step) -> Iterator[torch.Tensor]:
    """Parameters, buffers and inputs."""
    yield from step.model.parameters()
    yield from step.model.buffers()
    for _, tensor in named_tensors(step.inputs, "input"):
        yield tensor


def named_tensors(item, label: str, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in an input or a result, with a name: inside tuples, dictionaries, and objects such as caches."""
    if isinstance(item, torch.Tensor):
        yield label, item
    elif isinstance(item, dict):
        for key, value in item.items():
            yield from named_tensors(value, f"{label}.{key}", depth + 1)
    elif isinstance(item, (tuple, list)):
        for number, value in enumerate(item):
            yield from named_tensors(value, f"{label}.{number}", depth + 1)
    elif depth < 6 and hasattr(item, "__dict__") and not isinstance(item, (type, torch.nn.Module, Callable)):
        for key, value in vars(item).items():
            yield from named_tensors(value, f"{label}.{key}", depth + 1)


def _mode_of(step) -> FakeTensorMode | None:
    return next((tensor.fake_mode for tensor in tensors_of(step) if isinstance(tensor, FakeTensor)), None)


def _faked(step: Step, mode: FakeTensorMode, shadows: Shadows) -> Step:
    """A copy of ``step`` on fake tensors; the model itself where it is on them already, as functions may hold it."""
    mode = _mode_of(step) or mode
    mode.allow_non_fake_inputs = True
    given = [tensor for _, tensor in named_tensors(step.inputs, "input")]
    with FakeCopyMode(mode):
        if all(isinstance(tensor, FakeTensor) for tensor in (*step.model.parameters(), *step.model.buffers())):
            copied = replace(step, inputs=copy.deepcopy(step.inputs))
        elif isinstance(step, CustomStep):
            return step
        else:
            copied = replace(step, **copy.deepcopy(vars(step)))
    for real, (_, fake) in zip(given, named_tensors(copied.inputs, "input"), strict=True):
        shadows.adopt(fake, real)
    return copied
