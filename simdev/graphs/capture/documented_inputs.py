"""Inputs whose shapes the documentation of a model's forward gives by fields of its configuration.

diffusers and transformers write ``(batch_size, 1 + len(injection_layer_ids), text_len, cap_feat_dim)``: the fields are
in the configuration, and a length has a usual size.
"""

from __future__ import annotations

import ast
import inspect
import operator
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

TOKENS = 77  # of a text, or another sequence
ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
_DOCUMENTED = re.compile(r"^ *(\w+) \( ?`([\w.]+)`.*?`[(\[]([^`]+)[)\]]`", re.MULTILINE)


def documented(
    model, fields: dict, lengths: Mapping[str, int], inputs: Mapping[str, Any], named: Collection[str] = ()
) -> dict:
    """Arguments of the model's forward that its documentation gives a shape: floating-point ones that have other sizes
    in ``inputs``, those without a default that are not there, and those that are ``named``, whole numbers as zeros and
    masks as ones. ``lengths`` are sizes by a word of the axis."""
    import torch

    takes, found = inspect.signature(model.forward).parameters, {}
    for name, kind, axes in _shapes(model):
        made, asked = inputs.get(name), name in named
        sizes = [_evaluated(axis, fields) for axis in axes]
        wanted = asked or made is not None or (name in takes and takes[name].default is inspect.Parameter.empty)
        if not wanted or "Tensor" not in kind or not (asked or (any(sizes) and "Long" not in kind)):
            continue
        if made is None or made.dim() != len(axes):
            usual = [_usual(axis, lengths) for axis in axes]
        elif made.is_floating_point():
            usual = list(made.shape)
        else:
            continue
        sizes = [size or other for size, other in zip(sizes, usual, strict=True)]
        if all(sizes) and (made is None or sizes != list(made.shape)):
            if name.endswith("mask"):
                found[name] = torch.ones(sizes, dtype=torch.int64)
            else:
                whole = "Long" in kind or ("Float" not in kind and name.endswith("_ids"))
                found[name] = torch.zeros(sizes, dtype=torch.int64) if whole else torch.randn(sizes)
    return found


def documented_shape(model, name: str, sizes: dict) -> tuple[int, ...] | None:
    """The shape that the documentation of the model's forward gives to an argument (the first of alternatives), if
    ``sizes``, by name, give every axis; else None."""
    return next(iter(documented_shapes(model, name, sizes)), None)


def documented_shapes(model, name: str, sizes: dict) -> list[tuple[int, ...]]:
    """The shapes that the documentation of the model's forward gives to an argument, one or several alternatives, up to
    the first with an axis that ``sizes``, by name, do not give."""
    found: list[tuple[int, ...]] = []
    for _, _, shapes in (item for item in _documentation(model) if item[0] == name):
        for axes in shapes:
            if (shape := sized(axes, sizes)) is None:
                return found
            found.append(shape)
        break
    return found


def sized(axes: list[str], sizes: dict) -> tuple[int, ...] | None:
    """The shape with these axes, if ``sizes``, by name, give every one of them; else None."""
    shape = [_evaluated(axis, sizes) for axis in axes]
    return tuple(size for size in shape if size) if all(shape) else None


def number_of(optional: Collection[str], what: str) -> int | None:
    """The ``N`` of ``what[N]`` among the ``optional`` arguments."""
    found = (re.fullmatch(rf"{what}\[(\d+)\]", item) for item in optional)
    return next((int(match[1]) for match in found if match), None)


def documented_axes(model, name: str) -> list[str]:
    """What the documentation of the model's forward calls the axes of an argument; nothing if it does not."""
    return next((axes for documented_name, _, axes in _shapes(model) if documented_name == name), [])


def documented_kind(model, name: str) -> str:
    """The type that the documentation of the model's forward gives to an argument beside a shape; nothing if it does
    not."""
    return next((kind for documented_name, kind, _ in _shapes(model) if documented_name == name), "")


def with_shape(model, name: str) -> str:
    """The name of an argument, with the shape that the documentation of the model's forward gives to it: ``mask (of
    shape batch_size, tokens)``."""
    axes = documented_axes(model, name)
    return f"{name} (of shape {', '.join(axes)})" if axes else name


def _shapes(model) -> Iterator[tuple[str, str, list[str]]]:
    """Name, type and axes of each argument whose shape the documentation of the model's forward gives; the first shape
    of alternatives."""
    for name, kind, shapes in _documentation(model):
        yield name, kind, shapes[0]


def _documentation(model) -> Iterator[tuple[str, str, list[list[str]]]]:
    """Name, type and the axes of each alternative shape of each argument whose shape the documentation of the model's
    forward gives."""
    for name, kind, text in _DOCUMENTED.findall(model.forward.__doc__ or ""):
        shapes = " ".join(text.split()).replace("config.", "").split(") or (")
        yield name, kind, [shape.rstrip(",").split(", ") for shape in shapes]


def _evaluated(axis: str, fields: dict) -> int | None:
    """The size of an axis that is a number, or is computed from fields of the configuration and lengths of them."""
    try:
        size = _value(ast.parse(axis, mode="eval").body, fields)
    except Exception:  # words, and fields that are no numbers
        return None
    return size if isinstance(size, int) else None


def _value(node: ast.expr, fields: dict) -> Any:
    """The value of a number, of a field, of a field's length, or of a sum or product of such. Raises
    :class:`ValueError` for any other expression, and :class:`KeyError` for a field that is not there."""
    match node:
        case ast.Constant(value=int()):
            return node.value
        case ast.Name():
            return fields[node.id]
        case ast.Call(func=ast.Name(id="len"), args=[items], keywords=[]):
            return len(_value(items, fields))
        case ast.BinOp():
            left, right = _value(node.left, fields), _value(node.right, fields)
            if isinstance(left, int) and isinstance(right, int) and type(node.op) in ARITHMETIC:
                return ARITHMETIC[type(node.op)](left, right)
    raise ValueError(ast.unparse(node))


def _usual(axis: str, lengths: Mapping[str, int]) -> int | None:
    """The size of an axis with such a name, or a sum of names, where the configuration does not give it."""
    if " + " in axis:
        parts = [_usual(part, lengths) for part in axis.split(" + ")]
        return sum(part or 0 for part in parts) if all(parts) else None
    if "(" in axis:  # computed from what is not known
        return None
    known = {**lengths, **dict.fromkeys({"seq", "len", "tok", "frames"} - lengths.keys(), TOKENS)}
    return next((size for word, size in known.items() if word in axis), None)
