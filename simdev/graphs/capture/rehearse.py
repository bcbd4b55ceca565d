"""Answers of a real forward pass, for steps whose course depends on values.

A step that reads a number out of a large tensor, or selects by a mask, cannot run on fake tensors alone.
:func:`rehearse` runs its forward pass once for real, keeps nothing for a backward pass, and writes down what it asks:
numbers, and the shapes of results whose sizes the values decide. :class:`Answers` gives them to the run on fake
tensors, which asks the same questions at the same lines in the same order; it may leave some out (code that warns of
values skips fake tensors).
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from simdev.graphs.capture.trace import moves_tensors, tensors_in, wraps_tensors
from simdev.graphs.workload import InferenceStep

OWN = ("aten", "prim", "prims")  # PyTorch's namespaces: the tags of these ops say whether shapes depend on values
MASKS = (torch.bool, torch.uint8)
INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent))  # code that asks for others


class LostTrack(Exception):
    """The run on fake tensors asks something else than the real one did."""


class _Made(NamedTuple):
    """A tensor that an answer holds."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Answers:
    """What a real forward pass asked, in order, with the answers."""

    def __init__(self):
        self._given: list[tuple] = []
        self._next = 0

    def note(self, func, out) -> None:
        """Write down the answer of the real run."""
        shape = tree_map_only(torch.Tensor, lambda tensor: _Made(tensor.size(), tensor.stride(), tensor.dtype), out)
        self._given.append((func, _line(), shape))

    def give(self, func, args, kwargs):
        """The answer to the next question, on tensors of the fake mode that is active.

        Raises :class:`LostTrack` if it was not asked in the real run.
        """
        line = _line()
        for number in range(self._next, len(self._given)):
            asked, where, answer = self._given[number]
            if asked is func and where == line:
                break
        else:
            raise LostTrack(f"{func} in line {line[1]} of {line[0]}")
        self._next = number + 1
        if func.namespace not in OWN:
            try:
                return func(*args, **kwargs)
            except DynamicOutputShapeException:
                pass
        return _make(answer)


def asks(func, args) -> bool:
    """Whether the result of a call, or its shape, may depend on values."""
    if torch.Tag.dynamic_output_shape in func.tags:
        return func is not torch.ops.aten.index.Tensor or any(t.dtype in MASKS for t in tensors_in(args[1]))
    if torch.Tag.data_dependent_output in func.tags:
        return True
    return func.namespace not in OWN and moves_tensors(func)


def _line() -> tuple[str, int]:
    """File and line of the code that asks."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def rehearse(step) -> Answers:
    """Run the forward pass of a training or inference step on real tensors. Activations are freed as in inference,
    but code that asks whether gradients are wanted hears what it hears in the step."""
    answers = Answers()
    with ExitStack() as stack:
        stack.enter_context(_Lists())
        stack.enter_context(_Notes(answers))
        if isinstance(step, InferenceStep):
            stack.enter_context(torch.no_grad())
            step.forward(step.model, *step.inputs) if step.forward else step.model(*step.inputs)
        else:
            stack.enter_context(saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing))
            step.loss(step.model, *step.inputs)
    return answers


class _Notes(TorchDispatchMode):
    def __init__(self, answers: Answers):
        super().__init__()
        self._answers = answers

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if wraps_tensors(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if asks(func, args):
            self._answers.note(func, out)
        return out


class _Lists(TorchFunctionMode):
    """A fake tensor becomes a list number by number; a real one would do so unnoticed."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.tolist:
            return _numbers(args[0])
        return func(*args, **(kwargs or {}))


def _numbers(tensor):
    return [_numbers(row) for row in tensor] if tensor.dim() else tensor.item()


def _make(answer):
    if isinstance(answer, _Made):
        return torch.empty_strided(answer.size, answer.stride, dtype=answer.dtype)
    if isinstance(answer, (list, tuple)):
        return type(answer)(map(_make, answer))
    return answer
