"""Tensor parallelism of a plain module: the plan that its code passes, or one that a rule derives.

The rule: a product (``nn.Linear``) whose result is read by ops without parameters alone until a second product is
divided by columns, the second one by rows. Between the two are elementwise ops, views and attention. The second
product ends with an all-reduce, and so does the backward pass of the first one.

A plan maps names of modules, in which ``*`` is the number of a block, to styles: ``colwise``, ``rowwise``, or
``input 1 of 2``: the first of the two tensors that the module takes by position is replicated once for all column-wise
products that read it, so that their backward passes share an all-reduce. PyTorch's own
``torch.distributed.tensor.parallel`` applies it. A derived plan has the groups that DTensor runs with these all-reduces
and no other communication.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from simdev.parallel.capture.blocks import Blocks
from simdev.parallel.capture.record import RankRecorder

INPUT = re.compile(r"input (\d+) of (\d+)")
STYLES = ("colwise", "rowwise", "input N of M")


@dataclass(frozen=True)
class Divided:
    """Products that are divided together. ``heads`` are the sizes that the ranks of ``tp`` have to divide."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    plan: tuple[tuple[str, str], ...]
    heads: tuple[int, ...]


class _Follow(TorchFunctionMode):
    """Follows the results of linear layers to the layers that read them."""

    def __init__(self, model):
        super().__init__()
        self.linear = {id(m.weight): name for name, m in model.named_modules() if type(m) is nn.Linear}
        self.modules = dict(model.named_modules())
        self.sources: dict[int, tuple[torch.Tensor, frozenset[str]]] = {}  # of each followed tensor
        self.dead: set[str] = set()  # products whose result is read by other ops with parameters
        self.several: set[str] = set()  # products that run several times in a pass
        self.read_by: dict[str, frozenset[str]] = {}  # second product -> first ones
        self.inputs: dict[str, torch.Tensor] = {}  # what a product reads
        self.taken: dict[str, tuple] = {}  # what a module takes by position
        self.heads: dict[str, set[int]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        found = frozenset().union(*(self.sources[id(leaf)][1] for leaf in leaves if id(leaf) in self.sources))
        out = func(*args, **kwargs)
        weight = args[1] if func is functional.linear and len(args) > 1 else None
        name = self.linear.get(id(weight))
        if name is not None:
            if found:
                self.read_by[name] = found | self.read_by.get(name, frozenset())
            if name in self.inputs and self.inputs[name] is not args[0]:
                self.several.add(name)
            self.inputs[name] = args[0]
            self._follow(out, frozenset({name}))
        elif found:
            if any(isinstance(leaf, nn.Parameter) for leaf in leaves):
                self.dead |= found
            else:
                self._count_heads(func, args, out, found)
                tree_map(lambda value: self._follow(value, found), out)
        return out

    def _follow(self, value, sources: frozenset[str]) -> None:
        if isinstance(value, torch.Tensor):
            self.sources[id(value)] = value, sources

    def _count_heads(self, func, args, out, sources) -> None:
        """A view that splits the last dimension: the number of heads has to divide among the ranks."""
        before, after = (
            tuple(t.shape) if isinstance(t, torch.Tensor) else () for t in (args[0] if args else None, out)
        )
        if func in (torch.Tensor.view, torch.Tensor.reshape, torch.reshape, torch.Tensor.unflatten):
            if len(after) == len(before) + 1 and before[:-1] == after[:-2]:
                for source in sources:
                    self.heads.setdefault(source, set()).add(after[-2])


def find_groups(model, run: Callable[[], Any], lists: Sequence[Blocks]) -> tuple[list[Divided], list[str]]:
    """The groups of products that the rule finds, and products that it leaves out because they run several times in a
    pass; ``run`` runs the forward pass on fake tensors. The blocks of each list have to be alike, so that a group of
    one block is a group of each."""
    follow = _Follow(model)

    def take(name):
        def hook(module, args):
            follow.taken.setdefault(name, args)

        return hook

    hooks = [module.register_forward_pre_hook(take(name)) for name, module in model.named_modules() if name]
    try:
        with follow:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    groups: dict[frozenset[str], set[str]] = {}
    for row, columns in follow.read_by.items():
        groups.setdefault(columns, set()).add(row)
    all_rows = set(follow.read_by)
    found: dict[tuple, Divided] = {}
    again: set[str] = set()
    for columns, rows in groups.items():
        others = any(columns & other for other in groups if other != columns)
        if others or columns & (follow.dead | all_rows):
            continue
        if (columns | rows) & follow.several:
            again |= (columns | rows) & follow.several
            continue
        names = {name: pattern(name, lists) for name in (*columns, *rows)}
        plan = dict(sorted({**{names[n]: "colwise" for n in columns}, **{names[n]: "rowwise" for n in rows}}.items()))
        shared = _shared_input(follow, sorted(columns))
        if shared is not None:
            plan = {pattern(shared[0], lists): shared[1], **plan}
        heads = {n for name in columns for n in follow.heads.get(name, {follow.modules[name].out_features})}
        group = Divided(tuple(sorted(columns)), tuple(sorted(rows)), tuple(plan.items()), tuple(sorted(heads)))
        found.setdefault(group.plan, group)
    return list(found.values()), sorted(again)


def _shared_input(follow: _Follow, columns: list[str]) -> tuple[str, str] | None:
    """The module that takes what all of several column-wise products read, and the style that replicates it once."""
    read = {id(follow.inputs[name]): follow.inputs[name] for name in columns}
    if len(columns) < 2 or len(read) != 1:
        return None
    (tensor,) = read.values()
    for name in sorted(follow.taken, key=len, reverse=True):
        if all(column.startswith(f"{name}.") for column in columns):
            for position, value in enumerate(follow.taken[name]):
                if value is tensor:
                    return name, f"input {position + 1} of {len(follow.taken[name])}"
    return None


def pattern(name: str, lists: Sequence[Blocks]) -> str:
    """The name with ``*`` for the number of a block."""
    for blocks in lists:
        if name.startswith(f"{blocks.name}."):
            _, dot, rest = name.removeprefix(f"{blocks.name}.").partition(".")
            return f"{blocks.name}.*{dot}{rest}"
    return name


def styles(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The plan with PyTorch's styles in place of their names. Raises ``ValueError`` for an unknown name."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

    def style(name):
        if not isinstance(name, str):
            return name
        if name == "colwise":
            return ColwiseParallel(use_local_output=False)
        if name == "rowwise":
            return RowwiseParallel()
        found = INPUT.fullmatch(name)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f"{name!r} is no style; known: {', '.join(STYLES)}, or a style of PyTorch")
        layouts = tuple(Replicate() if n + 1 == int(found[1]) else None for n in range(int(found[2])))
        return PrepareModuleInput(input_layouts=layouts, desired_input_layouts=layouts)

    return {name: style(value) for name, value in plan.items()}


def apply_plan(model, mesh, plan: Mapping[str, Any]) -> None:
    """Parallelise ``model`` over the one-dimensional ``mesh``; modules whose parameters are on other pipeline stages
    are left out."""
    from torch.distributed.tensor.parallel import parallelize_module

    here = {}
    for name, style in styles(plan).items():
        matching = [m for own, m in model.named_modules() if _matches(name, own)]
        if any(next(m.parameters(), None) is not None for m in matching):
            here[name] = style
    parallelize_module(model, mesh, here)


def _matches(pattern: str, name: str) -> bool:
    from fnmatch import fnmatch

    one, two = pattern.split("."), name.split(".")
    return len(one) == len(two) and all(fnmatch(b, a) for a, b in zip(one, two, strict=True))


def count_rows(model, plan: Mapping[str, Any]) -> int:
    """How many modules of ``model`` the plan divides by rows."""
    names = [name for name, _ in model.named_modules()]
    return sum(_matches(key, name) for key, style in plan.items() if style == "rowwise" for name in names)


def collectives(run: Callable[[], Any]) -> Counter:
    """Collectives of a forward and a backward pass on fake tensors, by pass and kind; ``run`` returns the loss."""
    recorder = RankRecorder()
    with recorder:
        run().backward()
    return Counter(("backward" if e.in_backward else "forward", e.kind) for e in recorder.entries if e.ranks)
