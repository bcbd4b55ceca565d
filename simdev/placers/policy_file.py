"""Policies and checkpoints on disk: arrays as safetensors, everything else as JSON; nothing is ever unpickled."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from simdev.errors import InvalidInput
from simdev.files import parse_json, read_bytes, replacing, write_text

FORMAT = 1
MOST_BYTES = 1 << 30
ARRAYS, HEADER = "policy.safetensors", "policy.json"


def save_policy(folder: str | os.PathLike, header: Mapping, policy: Any) -> None:
    """Write ``policy`` (a pytree of arrays) and ``header`` (JSON: the placer, its version and settings, what it was
    trained on) to a folder, which is created if it is missing."""
    folder = Path(folder)
    _make(folder)
    blob = pack(policy)
    with replacing(folder / ARRAYS) as file:
        file.write(blob)
    document = {"format": FORMAT, **header, "sha256": hashlib.sha256(blob).hexdigest()}
    write_text(folder / HEADER, json.dumps(document, indent=1) + "\n")


def read_header(folder: str | os.PathLike) -> dict:
    """The JSON of a policy folder. Raises :class:`InvalidInput` naming the file and the field at fault."""
    path = Path(folder) / HEADER
    document = read_json(path)
    if document.get("format") != FORMAT:
        raise InvalidInput(f"format {document.get('format')!r}, expected {FORMAT}", source=path, field="format")
    for field, kind in (("placer", str), ("version", int), ("settings", dict), ("sha256", str)):
        if type(document.get(field)) is not kind:
            raise InvalidInput("missing or of the wrong type", source=path, field=field)
    return document


def load_policy(folder: str | os.PathLike, like: Any, *, placer: str, version: int) -> Any:
    """The policy of a folder, a pytree shaped as ``like``. Raises as :func:`policy_arrays`."""
    import jax

    wanted = {name: (leaf.shape, leaf.dtype) for name, leaf in _named(like)}
    arrays = policy_arrays(folder, wanted, placer=placer, version=version)
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), list(arrays.values()))


def policy_arrays(
    folder: str | os.PathLike, wanted: Mapping[str, tuple[tuple[int, ...], Any]], *, placer: str, version: int
) -> dict[str, np.ndarray]:
    """The arrays of a policy by name, without JAX. ``wanted`` maps each name to its shape and dtype.

    Raises :class:`InvalidInput` unless the folder holds a policy of this placer and version, whole, with these names,
    shapes and dtypes, and finite.
    """
    header, path = read_header(folder), Path(folder) / ARRAYS
    if (header["placer"], header["version"]) != (placer, version):
        found = f"a policy of {header['placer']} version {header['version']}"
        raise InvalidInput(f"{found}, not of {placer} version {version}", source=folder)
    blob = read_blob(path)
    if hashlib.sha256(blob).hexdigest() != header["sha256"]:
        raise InvalidInput("truncated, or not the file that its policy.json was written with", source=path)
    return _arrays(blob, wanted, path)


def pack(tree: Any, notes: dict | None = None) -> bytes:
    """The arrays of a pytree as one safetensors file, named by their paths; ``notes`` go into its header as one
    entry, because the writer does not keep the order of several."""
    from safetensors.numpy import save

    named = {name: np.asarray(leaf, order="C") for name, leaf in _named(tree)}
    return save(named, metadata={"notes": json.dumps(notes, sort_keys=True)} if notes else {})


def unpack(blob: bytes, like: Any, source: object) -> Any:
    """The pytree shaped as ``like`` from :func:`pack`'s bytes. Raises :class:`InvalidInput` for anything else."""
    import jax

    wanted = {name: (leaf.shape, leaf.dtype) for name, leaf in _named(like)}
    return jax.tree_util.tree_unflatten(
        jax.tree_util.tree_structure(like), list(_arrays(blob, wanted, source).values())
    )


def _arrays(blob: bytes, wanted: Mapping[str, tuple[tuple[int, ...], Any]], source: object) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file, in the order of ``wanted``. Raises :class:`InvalidInput` for anything else."""
    from safetensors.numpy import load

    try:
        arrays = load(blob)
    except Exception as error:  # the reader raises several types for what is malformed
        raise InvalidInput(f"not a safetensors file ({error})", source=source) from None
    found = {}
    for name, (shape, dtype) in wanted.items():
        if name not in arrays:
            raise InvalidInput("missing", source=source, field=name)
        array = found[name] = arrays.pop(name)
        if array.shape != shape or array.dtype != dtype:
            raise InvalidInput(f"{array.dtype} {array.shape}, expected {dtype} {shape}", source=source, field=name)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise InvalidInput("not finite", source=source, field=name)
    if arrays:
        raise InvalidInput("not an array of this policy", source=source, field=min(arrays))
    return found


def notes_of(blob: bytes, source: object) -> dict:
    """The notes that :func:`pack` put into the header. Raises :class:`InvalidInput` if there are none."""
    size = int.from_bytes(blob[:8], "little")
    try:
        if not 0 < size <= len(blob) - 8:
            raise ValueError("no header")
        notes = json.loads(blob[8 : 8 + size].decode())["__metadata__"]
        notes = json.loads(notes["notes"])
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise InvalidInput(f"not a safetensors file ({error})", source=source) from None
    if not isinstance(notes, dict):
        raise InvalidInput("missing", source=source, field="notes")
    return notes


def read_blob(path: Path) -> bytes:
    """The bytes of a file of at most :data:`MOST_BYTES`."""
    return read_bytes(path, MOST_BYTES)


def read_json(path: Path) -> dict:
    """The object of a JSON file."""
    document = parse_json(read_blob(path), path)
    if not isinstance(document, dict):
        raise InvalidInput("expected an object", source=path)
    return document


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(error.strerror or str(error), source=folder) from None


def _named(tree: Any) -> list[tuple[str, np.ndarray]]:
    import jax

    return [(jax.tree_util.keystr(path), np.asarray(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
