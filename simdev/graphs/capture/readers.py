"""Which layer of a model reads an argument of its forward first: its weight says how wide the argument is.

A forward that calls ``self.text_proj(text)``, or ``self.embed(text)`` of a module whose own forward calls a linear
layer on it, shows the width of ``text`` where no field of the configuration has a name like it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from typing import Any

# methods that keep the axes of a tensor
KEEPING = ("to", "float", "type", "type_as", "contiguous", "clone", "masked_fill")
MOST_DEEP = 6
JOINED = ["", ""]  # axes without names, of which the code makes one


def first_reader(model, name: str, depth: int = 0):
    """The first layer with a weight that ``model`` calls on its argument ``name``, as its code shows; None if it
    changes the argument before, or hands it on in another way."""
    import torch

    called = part_that_reads(model, name)
    if called is None or depth == MOST_DEEP:
        return None
    module, place = called
    while isinstance(module, torch.nn.Sequential):
        parts = [part for part in module if list(part.parameters())]
        module, place = (parts[0], 0) if parts else (torch.nn.Identity(), 0)
    if _width(module) is not None:
        return module
    takes = list(inspect.signature(module.forward).parameters)
    inside = place if isinstance(place, str) else takes[place] if place < len(takes) else None
    return first_reader(module, inside, depth + 1) if inside in takes else None


def part_that_reads(model, name: str) -> tuple[Any, int | str] | None:
    """The first module that ``model`` calls on its argument ``name``, as its code shows, and as which argument."""
    known = {name}
    for kind, target, source, place in _calls(inspect.unwrap(type(model).forward)):
        if kind == "call" and source in known and (module := _part(model, target)) is not None:
            return module, place
        if kind == "name" and source in known:
            known.add(target)
        elif kind == "name":
            known.discard(target)  # it now has another value
    return None


def parts_called_with(model, name: str) -> list:
    """The modules of ``model`` that its code calls on a variable of this name, changed or not."""
    events = _calls(inspect.unwrap(type(model).forward))
    found = [_part(model, target) for kind, target, source, _ in events if kind == "call" and source == name]
    return [module for module in found if module is not None]


def gets_tokens(model, name: str, depth: int = 0) -> bool:
    """Whether the code gives what the first layer makes of the argument ``name`` an axis for tokens, which the argument
    does not have then."""
    called = part_that_reads(model, name)
    if called is None or depth == MOST_DEEP:
        return False
    module, place = called
    forward = inspect.unwrap(type(model).forward)
    if _width(module) is not None:
        code = inspect.getsource(forward)
        made = re.search(rf"^\s*(\w+) = self\.[\w.]+\({name}\)", code, re.MULTILINE)
        return bool(made and re.search(rf"\b{made[1]}(\[:, None\b|\.unsqueeze\(1\))", code))
    takes = list(inspect.signature(module.forward).parameters)
    inside = place if isinstance(place, str) else takes[place] if place < len(takes) else None
    return inside in takes and gets_tokens(module, inside, depth + 1)


def axes_read(model, name: str, forward=None, depth: int = 0) -> list[str]:
    """What the code calls the axes of the argument ``name`` where it first takes its shape apart, or the first few of
    them: in the model's forward (or in the method ``forward``), or in what this hands the argument on to. Two axes
    that the code makes one are :data:`JOINED`."""
    known = {name}
    for kind, target, source, place in _calls(inspect.unwrap(forward or type(model).forward)):
        if kind == "axes" and source in known:
            return target.split(",")
        if kind == "call" and source in known and depth < MOST_DEEP:
            module = _part(model, target)
            method = getattr(type(model), target, None) if module is None else type(module).forward
            takes = list(inspect.signature(method).parameters)[1:] if inspect.isfunction(method) else []
            inside = place if isinstance(place, str) else takes[place] if place < len(takes) else None
            if inside in takes and (found := axes_read(module or model, inside, method, depth + 1)):
                return found
        elif kind == "name" and source in known:
            known.add(target)
        elif kind == "name":
            known.discard(target)
    return []


def width_read(model, name: str) -> int | None:
    """How wide the argument ``name`` is, along its last axis (along its channels, for a convolution)."""
    layer = first_reader(model, name)
    return None if layer is None else _width(layer)


def joined_widths(model, name: str) -> dict[str, int]:
    """How wide the arguments are that the forward of ``model`` joins along their last axis before a layer reads them,
    the sample ``name`` among them: it is as wide as what the last layer gives back, the others share the rest.
    Nothing where the code does not show this."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(type(model).forward))))
    except (OSError, TypeError, SyntaxError):
        return {}
    takes = inspect.signature(model.forward).parameters
    layers = [layer for layer in model.modules() if not list(layer.children())]
    ends = [vars(layer).get("out_channels") or vars(layer).get("out_features") for layer in layers]
    given_back = next((width for width in reversed(ends) if isinstance(width, int)), 0)
    joined: list[str] = []
    target = ""
    for line in tree.body[0].body if isinstance(tree.body[0], ast.FunctionDef) else ():
        if not isinstance(line, ast.Assign) or not isinstance(line.targets[0], ast.Name):
            continue
        if not joined and name in (names := _concatenated(line.value)) and set(names) <= takes.keys():
            joined, target = names, line.targets[0].id
            continue
        for call in ast.walk(line.value):
            if not isinstance(call, ast.Call) or not joined or target not in _names(call.args):
                continue
            module = _part(model, path) if (path := _of_self(call.func)) else None
            if module is None:
                continue
            rest = (_width(module) or 0) - given_back
            if rest <= 0 or not given_back or rest % (len(joined) - 1):
                return {}
            return {word: given_back if word == name else rest // (len(joined) - 1) for word in joined}
    return {}


def _names(items: list[ast.expr]) -> set[str]:
    """All variables in some expressions."""
    return {word.id for item in items for word in ast.walk(item) if isinstance(word, ast.Name)}


def _concatenated(node: ast.expr) -> list[str]:
    """The names of the variables in ``torch.cat([a, b], dim=-1)``; none for another expression, or a single one."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("torch.cat", "torch.concat") or not node.args:
        return []
    axes = [key.value for key in node.keywords if key.arg == "dim"] + node.args[1:]
    items = node.args[0].elts if isinstance(node.args[0], (ast.List, ast.Tuple)) else []
    names = [item.id for item in items if isinstance(item, ast.Name)]
    last = [ast.unparse(axis) for axis in axes] == ["-1"]
    return names if last and len(names) == len(items) > 1 else []


def _width(layer) -> int | None:
    """How many numbers of a place a layer reads; None for a module that is no such layer."""
    import torch

    if isinstance(layer, torch.nn.Embedding):
        return None
    weight = vars(layer)["_parameters"].get("weight")
    for name in ("in_features", "in_channels"):
        if isinstance(vars(layer).get(name), int) and isinstance(weight, torch.Tensor):
            return vars(layer)[name]
    normalizes = "Norm" in type(layer).__name__ and not list(layer.children())
    return weight.shape[0] if normalizes and weight is not None and weight.dim() == 1 else None


def _part(model, path: str):
    """The module of ``model`` that its code calls by this path."""
    import torch

    for name in path.split("."):
        model = getattr(model, name, None)
    return model if isinstance(model, torch.nn.Module) else None


@functools.lru_cache(maxsize=256)
def _calls(forward) -> list[tuple[str, str, str, int | str]]:
    """What the code of a forward does to variables, in the order of its lines: ``("name", new, old, 0)`` for another
    name of the same tensor (``new`` is another tensor if ``old`` is empty), ``("call", module, variable, place)`` for a
    call of a module on a variable, where ``place`` is the number or the name of the argument, and ``("axes", names,
    variable, 0)`` where it names the axes of a variable's shape (``","`` where it joins the first two of them, whatever
    their number is)."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return []
    found: list[tuple[int, int, tuple[str, str, str, int | str]]] = []
    asks = [node for node in ast.walk(tree) if isinstance(node, (ast.If, ast.IfExp))]
    depends = {id(inside) for node in asks if "dim" in ast.unparse(node.test) for inside in ast.walk(node)}
    cached = [node for node in asks if re.fullmatch(r"\w*cache is not None", ast.unparse(node.test))]
    bodies = [line for node in cached if isinstance(node, ast.If) for line in node.body]
    unread = {id(inside) for line in bodies for inside in ast.walk(line)}  # a training step has no cache
    for node in (node for node in ast.walk(tree) if id(node) not in unread):
        if isinstance(node, ast.Call) and id(node) not in depends and (variable := _joined(node)):
            found.append((node.lineno, 0, ("axes", ",", variable, 0)))
        if isinstance(node, ast.Call) and (path := _of_self(node.func)):
            places: list[tuple[int | str, ast.expr]] = [*enumerate(node.args)]
            places += [(key.arg, key.value) for key in node.keywords if key.arg]
            for place, item in places:
                if variable := _variable(item):
                    found.append((node.lineno, 0, ("call", path, variable, place)))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            axes, variable = [ast.unparse(axis) for axis in node.targets[0].elts], _shape_of(node.value)
            if variable:
                found.append((node.lineno, 0, ("axes", ",".join(axes), variable, 0)))
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            new, old = node.targets[0].id, _variable(node.value) or ""
            if new != old:
                found.append((node.end_lineno or node.lineno, 1, ("name", new, old, 0)))
    return [what for *_, what in sorted(found, key=lambda item: item[:2])]


def _of_self(node: ast.expr) -> str | None:
    """``a.b`` for the expression ``self.a.b``."""
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.insert(0, node.attr)
        node = node.value
    return ".".join(path) if path and isinstance(node, ast.Name) and node.id == "self" else None


def _shape_of(node: ast.expr) -> str | None:
    """The name of the variable in ``variable.shape``, ``variable.shape[:2]`` or ``variable.size()``."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and node.slice.lower is None:
        node = node.value
    if isinstance(node, ast.Call) and not node.args:
        node = node.func
    if not isinstance(node, ast.Attribute) or node.attr not in ("shape", "size"):
        return None
    return node.value.id if isinstance(node.value, ast.Name) else None


def _joined(node: ast.Call) -> str | None:
    """The name of the variable in ``variable.flatten(0, 1)``."""
    of = node.func
    if not isinstance(of, ast.Attribute) or of.attr != "flatten" or not isinstance(of.value, ast.Name):
        return None
    return of.value.id if [ast.unparse(item) for item in node.args] == ["0", "1"] else None


def _variable(node: ast.expr) -> str | None:
    """The name of a variable, which may be changed number by number, or made longer (``F.pad(features, (4, 0))``)."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method = node.func
        match method.attr, node.args:
            case "pad", [longer, ast.Tuple(elts=[_, _])]:
                node = longer
            case name, _ if name in KEEPING:
                node = method.value
            case _:
                break
    return node.id if isinstance(node, ast.Name) else None
