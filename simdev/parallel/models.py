"""Names to parallel models: ``llama3-70b``, ``gpt[width=2048,layers=24]``, ``my_model.py:function``, a model of Hugging
Face (:mod:`simdev.parallel.hugging_face`), or a plain training step (:mod:`simdev.parallel.plain`)."""

from __future__ import annotations

from typing import Any

from simdev.errors import UnknownName, Unsupported
from simdev.graphs.capture import is_package_model
from simdev.graphs.parallel_model import SHELF, ParallelModel
from simdev.parallel.hugging_face import find_hugging_face
from simdev.parallel.plain import find_plain
from simdev.shelf import parse_id, refuse_version
from simdev.user_file import is_file_entry


def parallel_models() -> dict[str, ParallelModel]:
    """Every registered parallel model, by name."""
    return SHELF.load()


def find_model(entry: str) -> tuple[ParallelModel, dict[str, Any]]:
    """The model that an id names, and all its parameters: ``NAME`` or ``NAME-SIZE``, a model of Hugging Face, or a
    function that returns a plain training step.
    Raises :class:`UnknownName`, :class:`InvalidInput` or :class:`Unsupported`."""
    name, version, changes = parse_id(entry)
    if name.endswith(".npz"):
        message = "a captured step has the mesh that it was captured with; name a model that is built on any mesh"
        raise Unsupported(f"{name}: {message} (my_model.py:name)")
    library = find_hugging_face(name, changes)
    if library is not None:
        return library
    if is_package_model(name) or (is_file_entry(name) and not SHELF.registers(name)):
        return find_plain(name, changes)
    name, models, path = SHELF.around(name)
    base, _, size = (name, "", "") if name in models else name.rpartition("-")
    if base not in models:
        sizes = [f"{model.name}-{size}" for model in models.values() for size in model.sizes]
        raise UnknownName(SHELF.what, name, [*models, *sizes], source=path)
    refuse_version(SHELF.what, base, version, None)
    return models[base], models[base].parameters(size, changes)
