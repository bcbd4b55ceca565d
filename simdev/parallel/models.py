"""Names to parallel models: ``llama3-70b``, ``gpt[width=2048,layers=24]``, ``my_model.py:function``, a model of Hugging
Face (:mod:`simdev.parallel.hugging_face`), or a plain training step (:mod:`simdev.parallel.plain`).

Where PyTorch is absent, so is all that builds a model. The models whose programs ship with simdev
(:class:`~simdev.parallel.capture.kept.Packed`) are planned from these.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from simdev.errors import InvalidInput, UnknownName, Unsupported
from simdev.graphs.capture import is_package_model
from simdev.graphs.parallel_model import SHELF, ParallelModel
from simdev.parallel.capture.kept import Packed, lacks, packed_names
from simdev.parallel.hugging_face import (
    TransformersModel,
    find_hugging_face,
    hugging_face_model,
    parallel_model_of,
)
from simdev.parallel.mesh import Mesh
from simdev.parallel.plain import find_plain
from simdev.shelf import parse_id, refuse_version
from simdev.user_file import is_file_entry

STEPS = Path(__file__).parents[1] / "studies" / "published_steps.py"


def parallel_models() -> dict[str, ParallelModel]:
    """Every registered parallel model, by name."""
    return SHELF.load()


def model_names(models: Mapping[str, ParallelModel] | None = None) -> list[str]:
    """What a command may call ``models``: each name, with each size; or the registered models and what is packed."""
    packed = packed_names() if models is None else ()
    models = parallel_models() if models is None else models
    sizes = [f"{model.name}-{size}" for model in models.values() for size in model.sizes]
    return [*dict.fromkeys([*models, *sizes, *packed])]


def find_model(entry: str, packed: bool = False) -> tuple[ParallelModel, dict[str, Any]]:
    """The model that an id names, and all its parameters: ``NAME`` or ``NAME-SIZE``, a model of Hugging Face, or a
    function that returns a plain training step. ``packed``: where PyTorch is absent, a model that has the programs that
    ship with simdev alone, if there are any for these parameters.
    Raises :class:`UnknownName`, :class:`InvalidInput` or :class:`Unsupported`."""
    name, version, changes = parse_id(entry)
    if name.endswith(".npz"):
        message = "a captured step has the mesh that it was captured with; name a model that is built on any mesh"
        raise Unsupported(f"{name}: {message} (my_model.py:name)")
    if name in packed_names():
        header = Packed(name).header
        builder = "transformers" if "config" in header else "diffusers" if "step" in header else "torch"
        if any(importlib.util.find_spec(package) is None for package in ("torch", builder)):
            if builder != "torch":
                return find_packed(name, changes)
            if packed:
                with suppress(InvalidInput):  # the model's own refusals are more precise
                    return find_packed(name, changes)
        elif "config" in header:
            return hugging_face_model(json.loads(header["config"]), changes, name, header["class"])
        elif "step" in header:
            return published_step(header["step"], changes, name)
    library = find_hugging_face(name, changes)
    if library is not None:
        return library
    if is_package_model(name) or (is_file_entry(name) and not SHELF.registers(name)):
        return find_plain(name, changes)
    name, models, path = SHELF.around(name)
    base, size = split_size(name, models)
    if not base:
        raise UnknownName(SHELF.what, name, model_names(models if path else None), source=path)
    refuse_version(SHELF.what, base, version, None)
    return models[base], models[base].parameters(size, changes)


def published_step(function: str, changes: Mapping[str, object], name: str) -> tuple[ParallelModel, dict[str, Any]]:
    """The model ``name`` of a function of ``published_steps.py``, and its parameters. Raises :class:`Unsupported`
    without PyTorch."""
    model, given = find_plain(f"{STEPS}:{function}", changes)
    return replace(model, name=name), given


def split_size(name: str, models: Collection[str]) -> tuple[str, str]:
    """The longest of the ``models`` that ``name`` begins with, and the size after it: ``qwen3-moe`` and ``30b-a3b`` of
    ``qwen3-moe-30b-a3b``. Without a size it is empty; without a model both are."""
    found = max((model for model in models if f"{name}-".startswith(f"{model}-")), key=len, default="")
    return found, name[len(found) + 1 :] if found else ""


def find_packed(name: str, changes: Mapping[str, object]) -> tuple[ParallelModel, dict[str, Any]]:
    """A model whose programs ship with simdev, and its parameters, without PyTorch. Raises :class:`InvalidInput` for
    other parameters than the programs have."""
    packed = Packed(name)
    header = packed.header
    if "config" in header:
        facts = tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in header["facts"])
        built = TransformersModel(name, header["class"], header["config"], facts)
        base = replace(parallel_model_of(built, header["transformers"]), flops=packed.flops)
    elif "step" in header:
        base = _packed_step(packed)
    else:
        base = parallel_models()[header["model"]]
    model = replace(
        base,
        function=packed,
        axes=tuple(header["axes"]),
        pipeline=header["pipeline"],
        notes=(*base.notes, *header["notes"]),
    )
    given = model.parameters(header["size"], changes)
    if any(given[key] != value for key, value in header["parameters"].items()):
        raise InvalidInput(lacks(name))
    return model, given


def _packed_step(packed: Packed) -> ParallelModel:
    """A published training step, as :func:`~simdev.parallel.plain.find_plain` reads it from the module."""
    header = packed.header
    kinds = tuple(header["kinds"])
    return ParallelModel(
        packed.name,
        packed,
        {},
        {**header["parameters"], "microbatch": 1, "recompute": "none"},
        (),
        packed.flops,
        source=packed.name,
        kinds=partial(_same, kinds) if len(set(kinds)) > 1 else None,
        splits_tokens=False,
        precision=partial(_precision, header["precision"]),
    )


def _same(kinds: tuple[int, ...], parameters: Mapping[str, Any]) -> tuple[int, ...]:
    return kinds


def _precision(found: Mapping[str, str], mesh: Mesh) -> str:
    return found["replicas" if mesh.replicas > 1 else "alone"]
