"""Optimizers of a captured step: their state, and one step of theirs.

A model has many parameters of one shape, for which an optimizer runs the same ops. On fake tensors it runs them for one
of these; the tape gets a copy for each of the others.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import optim

from simdev.graphs.capture.build import named_tensors
from simdev.graphs.capture.trace import Op, Tape, plain_tensors, storage_bytes

# Optimizers that update one parameter after another and let none depend on another.
SEPARATE = frozenset(
    getattr(optim, name)
    for name in "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD Muon NAdam RAdam RMSprop Rprop SGD".split()
    if hasattr(optim, name)
)


def kind_of(optimizer) -> str:
    """The name of its update ops."""
    return type(optimizer).__name__.lower()


def trained_by(optimizer) -> list:
    """Its parameters, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def one_by_one(optimizer) -> None:
    """Take the implementation with one op after another per parameter: those that join all parameters in one call hide
    what belongs to which."""
    for group in optimizer.param_groups:
        group.update({key: False for key in ("foreach", "fused", "capturable") if key in group})


def make_state(optimizer, quiet) -> dict:
    """Let the optimizer make its state, as after its first step. It looks at no value but the number of steps.

    On fake tensors, whose shadows are ``quiet``, it steps one parameter of those in a group that are alike. Returns the
    parameters that were left out, each with the one that it is like; of an optimizer that may join parameters, none:
    they get copies of the state.
    """
    one_by_one(optimizer)
    first: dict[tuple, torch.Tensor] = {}
    alike = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad:
                model = first.setdefault((number, *_look(parameter, quiet)), parameter)
                if model is parameter:
                    layout = torch.sparse_coo if isinstance(optimizer, optim.SparseAdam) else torch.strided
                    parameter.grad = torch.zeros_like(parameter, layout=layout)
                else:
                    alike[parameter] = model
    most = quiet.most_elements if quiet is not None else 0
    if quiet is not None:
        quiet.most_elements = 1
    with _unrecorded():
        optimizer.step()
        if type(optimizer) not in SEPARATE:
            for parameter, model in alike.items():
                _copy_state(optimizer, parameter, model)
            alike = {}
    if quiet is not None:
        quiet.most_elements = most
    for parameter in first.values():
        parameter.grad = None
    return alike


def _look(tensor, quiet) -> tuple:
    """What parameters share that are alike. A real one, or a part of a storage, is like no other."""
    whole = storage_bytes(tensor) == tensor.numel() * tensor.element_size()
    return tensor.shape, tensor.stride(), tensor.dtype, None if quiet is not None and whole else id(tensor)


def _unrecorded() -> Tape:
    tape = Tape()
    tape.phase, tape.recording = "update", False
    return tape


def _copy_state(optimizer, parameter, model) -> None:
    if model in optimizer.state:
        optimizer.state[parameter] = {
            key: item.clone() if isinstance(item, torch.Tensor) else copy.deepcopy(item)
            for key, item in optimizer.state[model].items()
        }


def register_state(tape: Tape, optimizer, homes: dict, alike: dict) -> int:
    """Tell the tape which tensors are optimizer state; returns their bytes (without step counters)."""
    sizes: dict = {}
    for parameter, state in optimizer.state.items():
        for _, whole in named_tensors(state, "state"):
            for tensor in plain_tensors(whole):
                if parameter in homes:
                    tape.state(tensor, homes[parameter])
                    size = storage_bytes(tensor) if tensor.numel() > 1 else 0
                    sizes[parameter] = sizes.get(parameter, 0) + size
        if isinstance(state, dict) and isinstance(state.get("step"), torch.Tensor):
            tape.count(state["step"])
    for parameter, model in alike.items():
        if parameter not in sizes:  # Adagrad makes all state at once
            sizes[parameter] = sizes.get(model, 0)
            tape.ops[homes[parameter]].persistent += sizes[parameter]
    return sum(sizes.values())


def forget_state(tape: Tape, optimizer, homes: dict, alike: dict, given: set) -> int:
    """Take back the state of parameters that have no gradient: an optimizer makes none for them, unless it did when it
    was built (``given``). Returns its bytes."""
    forgotten = 0
    for parameter in trained_by(optimizer):
        if parameter.grad is None and parameter in homes and parameter not in given:
            state = optimizer.state.get(parameter) or optimizer.state.get(alike.get(parameter), {})
            tensors = [tensor for _, whole in named_tensors(state, "state") for tensor in plain_tensors(whole)]
            size = sum(storage_bytes(tensor) for tensor in tensors if tensor.numel() > 1)
            tape.ops[homes[parameter]].persistent -= size
            forgotten += size
    return forgotten


def has_own_rules(optimizer) -> bool:
    """Whether numbers that follow from values may steer the step of an optimizer. Of PyTorch's own, only that of LBFGS
    is so, which evaluates a closure."""
    return not f"{type(optimizer).__module__}.".startswith("torch.optim.")


def update(tape: Tape, optimizer, homes: dict, alike: dict) -> None:
    """Step the optimizer under the tape. A parameter of ``alike`` gets the ops of the one that it is like, if their
    gradients are alike, too."""
    values = {parameter: tape.value_of(parameter) for parameter in trained_by(optimizer)}
    gradients = {
        parameter: tape.value_of(parameter.grad) for parameter in values if getattr(parameter, "grad", None) is not None
    }
    copied = {}
    for parameter, model in alike.items():
        if gradients.get(parameter) is None:
            continue
        if gradients.get(model) is not None and _same_form(parameter.grad, model.grad):
            copied[parameter], parameter.grad = model, None
            continue
        with _unrecorded():
            _copy_state(optimizer, parameter, model)
        for tensor in optimizer.state.get(parameter, {}).values():
            if isinstance(tensor, torch.Tensor):
                tape.keep(tensor, homes[parameter])
    start = len(tape.ops)
    tape.turn += 1
    tape.own_rules.append(has_own_rules(optimizer))
    optimizer.step()
    tape.own_rules.pop()
    if copied:
        order = [(parameter, copied.get(parameter, parameter)) for parameter in values if parameter in gradients]
        _repeat(tape, start, order, homes, values, gradients)


def _same_form(one, other) -> bool:
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def _repeat(tape: Tape, start: int, order: list, homes: dict, values: dict, gradients: dict) -> None:
    """Put the ops from ``start`` on into ``order``: for each parameter those of its model, which is itself or another.
    ``values`` and ``gradients`` are the values that parameters and gradients had before."""
    recorded = tape.ops[start:]
    del tape.ops[start:]
    parts: dict[int, list[int]] = {}
    waiting: list[int] = []
    for place, op in enumerate(recorded):
        waiting.append(place)
        if op.writes:
            parts.setdefault(op.writes[0], []).extend(waiting)
            waiting = []
    for parameter, model in order:
        own, home = homes[parameter], homes[model]
        value = {values[model]: values[parameter], gradients[model]: gradients[parameter]}
        number = {tape.values[old].producer: tape.values[new].producer for old, new in value.items() if old is not None}
        for place in parts.get(home, ()):
            op = recorded[place]
            number[start + place] = len(tape.ops)
            for made in op.makes:
                if parameter is model:
                    tape.values[made].producer = len(tape.ops)
                else:
                    value[made] = len(tape.values)
                    tape.values.append(replace(tape.values[made], producer=len(tape.ops)))
            tape.repeated += op.products * (parameter is not model)
            tape.ops.append(_renamed(op, {home: own}, value, number))
        if parameter is not model:
            tape.renew(parameter, value.get(tape.value_of(model), values[parameter]))


def _renamed(op: Op, home: dict[int, int], value: dict[int, int], number: dict[int, int]) -> Op:
    return replace(
        op,
        reads=[value.get(one, one) for one in op.reads],
        makes=[value.get(one, one) for one in op.makes],
        replaces=[value.get(one, one) for one in op.replaces],
        writes=[home.get(one, one) for one in op.writes],
        touches=[home.get(one, one) for one in op.touches],
        twin=number.get(op.twin, op.twin),
    )
