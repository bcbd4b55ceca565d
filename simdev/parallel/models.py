"""Names to parallel models: ``llama3-70b``, ``gpt[width=2048,layers=24]``, or ``my_model.py:function``."""

from __future__ import annotations

from typing import Any

from simdev.errors import UnknownName
from simdev.graphs.parallel_model import SHELF, ParallelModel
from simdev.shelf import parse_id, refuse_version


def parallel_models() -> dict[str, ParallelModel]:
    """Every registered parallel model, by name."""
    return SHELF.load()


def find_model(entry: str) -> tuple[ParallelModel, dict[str, Any]]:
    """The model that an id names, as ``NAME`` or ``NAME-SIZE``, and all its parameters. Raises :class:`UnknownName` or
    :class:`InvalidInput`."""
    name, version, changes = parse_id(entry)
    name, models, path = SHELF.around(name)
    base, _, size = (name, "", "") if name in models else name.rpartition("-")
    if base not in models:
        sizes = [f"{model.name}-{size}" for model in models.values() for size in model.sizes]
        raise UnknownName(SHELF.what, name, [*models, *sizes], source=path)
    refuse_version(SHELF.what, base, version, None)
    return models[base], models[base].parameters(size, changes)
