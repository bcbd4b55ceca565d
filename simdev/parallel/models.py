"""Names to parallel models: ``llama3-70b``, ``gpt[width=2048,layers=24]``, or ``my_model.py:function``."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from functools import cache
from pathlib import Path

from simdev.errors import InvalidInput, UnknownName
from simdev.graphs import parallel_model
from simdev.graphs.parallel_model import ParallelModel

ID = re.compile(r"(?P<name>[\w.]+?)(-(?P<size>[\w.]+))?(\[(?P<params>[^\[\]]*)\])?")


@cache
def _load() -> None:
    package = importlib.import_module("simdev.workloads.parallel")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if not module.name.rpartition(".")[2].startswith("_"):
            importlib.import_module(module.name)


def parallel_models() -> dict[str, ParallelModel]:
    """Every registered parallel model, by name."""
    _load()
    return dict(sorted(parallel_model.SHELF.items()))


def find_model(entry: str) -> tuple[ParallelModel, dict[str, object]]:
    """The model and all parameters that an id names. Raises :class:`UnknownName` or :class:`InvalidInput`."""
    path, colon, rest = entry.rpartition(".py:")
    found = ID.fullmatch(rest if colon else entry)
    if not found:
        raise InvalidInput("expected NAME, NAME-SIZE or NAME-SIZE[parameter=value,...]", source=entry)
    known = _from_file(f"{path}.py") if colon else parallel_models()
    name, size = found["name"], found["size"] or ""
    if name not in known and f"{name}-{size}" in known:
        name, size = f"{name}-{size}", ""
    if name not in known:
        sizes = [f"{model.name}-{size}" for model in known.values() for size in model.sizes]
        raise UnknownName("parallel model", entry, [*known, *sizes])
    model = known[name]
    changes: dict[str, object] = {}
    for part in filter(None, (found["params"] or "").split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise InvalidInput(f"expected parameter=value, got {part!r}", source=entry)
        try:
            changes[key.strip()] = json.loads(value)
        except ValueError:
            changes[key.strip()] = value.strip()
    return model, model.parameters(size, changes)


def _from_file(path: str) -> dict[str, ParallelModel]:
    """The models that the user's own file registers. The file is executed."""
    from simdev.graphs.capture import import_file

    before = dict(parallel_model.SHELF)
    import_file(Path(path))
    return {name: model for name, model in parallel_model.SHELF.items() if before.get(name) is not model}
