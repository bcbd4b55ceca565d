"""Names to parallel models: ``llama3-70b``, ``gpt[width=2048,layers=24]``, or ``my_model.py:function``."""

from __future__ import annotations

import json
import re
from pathlib import Path

from simdev.errors import InvalidInput, UnknownName
from simdev.graphs import parallel_model
from simdev.graphs.parallel_model import ParallelModel
from simdev.placers.registry import load_shelf

ID = re.compile(r"(?P<name>[\w.]+?)(-(?P<size>[\w.]+))?(\[(?P<params>[^\[\]]*)\])?")


def parallel_models() -> dict[str, ParallelModel]:
    """Every registered parallel model, by name."""
    load_shelf("workloads")
    return dict(sorted(parallel_model.SHELF.items()))


def find_model(entry: str) -> tuple[ParallelModel, dict[str, object]]:
    """The model and all parameters that an id names. Raises :class:`UnknownName` or :class:`InvalidInput`."""
    path, colon, rest = entry.rpartition(".py:")
    found = ID.fullmatch(rest if colon else entry)
    if not found:
        form = "NAME, NAME-SIZE or NAME-SIZE[parameter=value,...]"
        raise InvalidInput(f"expected {form}, or a file before it (my_model.py:NAME)", source=entry)
    source = f"{path}.py" if colon else None
    known = _from_file(f"{path}.py") if colon else parallel_models()
    name, size = found["name"], found["size"] or ""
    if name not in known and f"{name}-{size}" in known:
        name, size = f"{name}-{size}", ""
    if name not in known:
        sizes = [f"{model.name}-{size}" for model in known.values() for size in model.sizes]
        raise UnknownName("parallel model", rest if colon else entry, [*known, *sizes], source=source)
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

    if not Path(path).is_file():
        raise InvalidInput("no such file", source=path)
    before = parallel_models()  # all loaded, so that an import in the file registers none of them anew
    parallel_model.SHELF.clear()  # a file's own model may have the name of a shipped one
    try:
        import_file(Path(path))
        found = dict(parallel_model.SHELF)
    finally:
        parallel_model.SHELF.clear()
        parallel_model.SHELF.update(before)
    if not found:
        raise InvalidInput("registers no model; put @parallel_model over the function that builds a stage", source=path)
    return found
