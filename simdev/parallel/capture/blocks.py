"""The repeated blocks of a module: there a model is cut into pipeline stages, sharded block by block, recomputed.

Blocks are the members of lists of modules (``ModuleList``, ``Sequential``) of one class, or of the classes that a
Hugging Face model names as not to be split. Two blocks are of one kind if nothing but their number tells them apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PLAIN = (bool, int, float, str, type(None))
NUMBERS = ("layer_idx", "layer_id", "layer_number", "idx")  # attributes that only say which block it is


@dataclass(frozen=True)
class Blocks:
    """A list of blocks: ``name`` is its dotted name in the model, ``modules`` its members in order."""

    name: str
    modules: tuple[Any, ...]

    @property
    def parameters(self) -> int:
        """Elements of all parameters in the blocks."""
        return sum(p.numel() for module in self.modules for p in module.parameters())


def lists_of_blocks(model) -> list[Blocks]:
    """The lists of blocks of a model, those with the most parameters first; a list inside a block is none."""
    from torch import nn

    named = set(getattr(model, "_no_split_modules", None) or ())
    found: list[Blocks] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        members = tuple(module)
        classes = Counter(type(member).__name__ for member in members)
        repeated = classes.most_common(1)[0][1] > 1 and len(classes) <= len(members) // 2 + 1
        if not (set(classes) <= named or (repeated and all(_is_block(member) for member in members))):
            continue
        found.append(Blocks(name, members))
        inside |= {id(part) for member in members for part in member.modules()}
    return sorted(found, key=lambda blocks: -blocks.parameters)


def _is_block(module) -> bool:
    """Whether a module has parts with parameters: a single linear layer or an activation is no block."""
    return sum(1 for part in module.modules() if next(part.parameters(recurse=False), None) is not None) > 1


def sharing(lists: Sequence[Blocks]) -> dict[str, bool]:
    """The blocks that share parameters with others, by name: True if one of the others is another module; False if all
    are the block itself, which its list names several times."""
    holders: dict[int, dict[str, int]] = {}
    for blocks in lists:
        for number, module in enumerate(blocks.modules):
            for parameter in module.parameters():
                holders.setdefault(id(parameter), {})[f"{blocks.name}.{number}"] = id(module)
    found: dict[str, bool] = {}
    for held in holders.values():
        if len(held) > 1:
            found |= {name: found.get(name, False) or len(set(held.values())) > 1 for name in held}
    return found


def kinds_of(*lists) -> tuple[int, ...]:
    """The kind of each block of one list, or of several one after another, as a small whole number, in the order in
    which the kinds first appear. Blocks of different lists are of different kinds."""
    numbers: dict[tuple, int] = {}
    blocks = ((number, kind_of(module)) for number, modules in enumerate(lists) for module in modules)
    return tuple(numbers.setdefault(kind, len(numbers)) for kind in blocks)


def kind_of(module) -> tuple:
    """Classes, sizes of parameters and plain attributes of a block and of all its parts."""
    return tuple(
        (
            name,
            type(part).__name__,
            tuple((key, tuple(p.shape), p.dtype, p.requires_grad) for key, p in part.named_parameters(recurse=False)),
            tuple(
                (key, value)
                for key, value in sorted(vars(part).items())
                if isinstance(value, PLAIN) and key not in NUMBERS
            ),
        )
        for name, part in module.named_modules()
    )


def chosen(kinds: tuple[int, ...], wanted: tuple[int, ...], count: int) -> list[int]:
    """The numbers of ``count`` blocks of the kinds ``wanted`` (empty: the first ones), each block once."""
    if not wanted:
        return list(range(count))
    left: dict[int, list[int]] = {}
    for number, kind in reversed(list(enumerate(kinds))):
        left.setdefault(kind, []).append(number)
    return [left[kind].pop() for kind in wanted]
