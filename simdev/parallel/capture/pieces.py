"""A pipeline stage of a plain module: its blocks, what runs before them (first stage), what runs after them (last one).

The blocks are one list of modules that call each other in turn: each block gets the result of the block before it as
its first argument, by position. :func:`read_ends` runs the model once and determines which parameters are used before
and which after the blocks. :func:`cut_piece` leaves only the blocks of a stage and its other parameters in the model.

The model's own code runs on every stage, on fake tensors. On later stages, all that follows from the step's inputs or
from parameters of the first stage is *gone*: it has a shape and no kernel, it is not recorded, and the first block of
the stage gets the received tensor in its place. If gone values are read later on (a mask made from the inputs, a skip
connection around the blocks), the model has no pipeline, and :class:`NotApart` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from simdev.parallel.capture.blocks import Blocks, sharing
from simdev.parallel.capture.record import unrecorded


class NotApart(Exception):
    """Why a model cannot be cut into pipeline stages."""


class _Sent(Exception):
    """Carries the output of a stage out of the model's code."""

    def __init__(self, output):
        super().__init__()
        self.output = output


@dataclass(frozen=True)
class Ends:
    """Names of the parameters that are used before and after the blocks, all of those that a parameter has; shape and
    data type of what passes between the blocks."""

    before: frozenset[str]
    after: frozenset[str]
    shape: tuple[int, ...]
    dtype: Any


class _Phases(TorchFunctionMode):
    """Remembers the phase of the forward pass in which each parameter is used."""

    def __init__(self, names: dict[int, str]):
        super().__init__()
        self.names, self.phase = names, "before"
        self.seen: dict[str, set[str]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        for leaf in tree_leaves((args, kwargs or {})):
            name = self.names.get(id(leaf)) if isinstance(leaf, torch.nn.Parameter) else None
            if name is not None:
                self.seen.setdefault(name, set()).add(self.phase)
        return func(*args, **(kwargs or {}))


def read_ends(model, run: Callable[[], Any], blocks: Blocks) -> Ends:
    """What runs before and after the blocks of ``model``; ``run`` runs the forward pass, on fake tensors. Raises
    :class:`NotApart`."""
    inside = {id(p) for block in blocks.modules for p in block.parameters()}
    reader = _Phases({id(p): name for name, p in model.named_parameters()})
    passed: list = []

    def enter(block, args, kwargs, number):
        if not args or not isinstance(args[0], torch.Tensor) or not args[0].is_floating_point():
            raise NotApart("its blocks take no activations as their first argument")
        if number != len(passed):
            raise NotApart("its blocks do not run in their order")
        if number and args[0] is not passed[-1]:
            raise NotApart("something is computed between its blocks")
        reader.phase = "inside"

    def leave(block, args, output, number):
        if not isinstance(output, torch.Tensor) or output.shape != args[0].shape:
            raise NotApart("its blocks do not return one tensor with the shape of the one that they take")
        passed.append(output)
        reader.phase = "between" if len(passed) < len(blocks.modules) else "after"

    hooks = []
    for number, block in enumerate(blocks.modules):
        hooks.append(block.register_forward_pre_hook(_bound(enter, number), with_kwargs=True))
        hooks.append(block.register_forward_hook(_bound(leave, number)))
    try:
        with reader:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    if len(passed) != len(blocks.modules):
        raise NotApart("its forward pass does not run its blocks")
    shared = [
        name for name, p in model.named_parameters() if id(p) not in inside and "inside" in reader.seen.get(name, ())
    ]
    if shared or any("between" in phases for phases in reader.seen.values()):
        names = shared or [name for name, phases in reader.seen.items() if "between" in phases]
        raise NotApart(f"its blocks share {names[0]}")
    ends = {phase: {name for name, seen in reader.seen.items() if phase in seen} for phase in ("before", "after")}
    own = {name for name, p in model.named_parameters() if id(p) in inside}
    if own & (ends["before"] | ends["after"]):
        raise NotApart(f"{min(own & (ends['before'] | ends['after']))} is used outside of its block")
    unused = {name for name, _ in model.named_parameters()} - set(reader.seen) - own
    for name, p in model.named_parameters(remove_duplicate=False):  # a tied parameter has several names
        for found in (*ends.values(), unused):
            if reader.names[id(p)] in found:
                found.add(name)
    return Ends(frozenset(ends["before"] | unused), frozenset(ends["after"]), tuple(passed[-1].shape), passed[-1].dtype)


def used_outside(model, run: Callable[[], Any], lists: Sequence[Blocks]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the blocks whose parameters are read while the block does not run, which holds for blocks with parts in
    common, too, and of those that never run; ``run`` runs the forward pass. FSDP gathers the parameters of a block for
    the block's own forward pass alone, and takes each parameter into one group."""
    blocks = {f"{one.name}.{number}": block for one in lists for number, block in enumerate(one.modules)}
    owner = {id(p): name for name, block in blocks.items() for p in block.parameters()}
    running: list[str] = []
    found = {name for name, elsewhere in sharing(lists).items() if elsewhere}
    idle = set(blocks)

    def enter(name):
        running.append(name)
        idle.discard(name)

    class Reader(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            values = () if getattr(func, "__name__", "") in ("__get__", "size", "dim") else (args, kwargs or {})
            for leaf in tree_leaves(values):
                name = owner.get(id(leaf)) if isinstance(leaf, torch.nn.Parameter) else None
                if name is not None and name not in running:
                    found.add(name)
            return func(*args, **(kwargs or {}))

    hooks = []
    for name, block in blocks.items():
        hooks.append(block.register_forward_pre_hook(lambda *_, name=name: enter(name)))
        hooks.append(block.register_forward_hook(lambda *_: running.pop() and None))
    try:
        with Reader():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(name for name in blocks if name in found), tuple(name for name in blocks if name in idle)


def _bound(hook: Callable, number: int) -> Callable:
    return lambda *args: hook(*args, number)


class _Gone(TorchFunctionMode):
    """What follows from gone tensors is gone, until the blocks of the stage begin."""

    def __init__(self):
        super().__init__()
        self.gone: dict[int, torch.Tensor] = {}  # kept alive, so that no other tensor gets its number
        self.inside = False

    def mark(self, values):
        """``values`` with other tensors, which are gone. They hold zeros, which are valid indices: a rank that runs for
        real looks them up in its embedding."""

        def other(value):
            if not isinstance(value, torch.Tensor):
                return value
            with unrecorded():
                return self._add(torch.zeros_like(value, requires_grad=False))

        return tree_map(other, values)

    def _add(self, value):
        if isinstance(value, torch.Tensor):
            self.gone[id(value)] = value
        return value

    def has(self, values) -> bool:
        """Whether one of the tensors is gone."""
        return any(id(leaf) in self.gone for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.has((args, kwargs)):
            return func(*args, **kwargs)
        with unrecorded(), torch.no_grad():
            found = func(*args, **kwargs)
        if self.inside and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(found)):
            raise NotApart("what is computed before its blocks is read within or after them")
        return tree_map(self._add, found)


def cut_piece(model, first: bool, last: bool, ends: Ends) -> None:
    """Take the parameters that other stages hold out of ``model``: they become tensors without data. The model has only
    the blocks of the stage left."""
    left: set[str] = set()
    if not first:
        left |= ends.before - (ends.after if last else frozenset())
    if not last:
        left |= ends.after - (ends.before if first else frozenset())
    gone = {id(parameter) for name, parameter in model.named_parameters() if name in left}
    for module in list(model.modules()):
        for name, parameter in list(module._parameters.items()):
            if id(parameter) in gone:  # under each of its names, where it is tied
                del module._parameters[name]
                object.__setattr__(module, name, parameter.detach())
                module.__dict__.setdefault("_left", []).append(name)


def run_piece(model, blocks_name: str, first: bool, last: bool, step: Callable, make_inputs: Callable) -> Callable:
    """The forward pass of a stage: ``run(x, *inputs)``; a first stage takes no ``x``, and only a first or a last stage
    takes the step's inputs. Call it once FSDP and recomputation are applied, whose hooks run inside. ``step(*inputs)``
    is the step's loss; ``make_inputs()`` makes inputs for a stage that gets none."""
    members = list(model.get_submodule(blocks_name).children())
    state: dict[str, Any] = {}
    forward = model.forward

    def model_forward(*args, **kwargs):
        mode = state["mode"]
        if not first:
            _empty(model, mode)
            args, kwargs = mode.mark(args), mode.mark(kwargs)
        try:
            return forward(*args, **kwargs)
        except _Sent as sent:
            return sent.output

    def enter(block, args, kwargs):
        mode = state["mode"]
        mode.inside = True
        if mode.has((args[1:], kwargs)):
            raise NotApart("its blocks take more than one tensor that is computed from the inputs")
        return (state["x"], *args[1:]), kwargs

    def send(module, args, output):
        raise _Sent(output)

    model.forward = model_forward
    if not first:
        members[0].register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    if not last:
        members[-1].register_forward_hook(send)
        model.register_forward_hook(send)

    def run(*given):
        state["mode"] = mode = _Gone()
        state["x"], inputs = (None, given) if first else (given[0], given[1:])
        with mode:
            if not inputs:
                with unrecorded():
                    made = make_inputs()
                inputs = mode.mark(made)
            try:
                return step(*inputs)
            except _Sent as sent:
                return sent.output

    return run


def _empty(model, mode: _Gone) -> None:
    """Give the parameters that other stages hold a fake tensor for this pass."""
    for module in model.modules():
        for name in module.__dict__.get("_left", ()):
            with unrecorded():
                found = torch.empty(getattr(module, name).shape, dtype=getattr(module, name).dtype)
            object.__setattr__(module, name, mode._add(found))
