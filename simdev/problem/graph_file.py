"""Graph files: one compressed ``.npz`` of columns with a JSON header. Loaded with pickles off, sizes checked first."""

from __future__ import annotations

import json
import os
import tokenize
import zipfile
from math import prod
from typing import IO, Any

import numpy as np

from simdev.errors import InvalidInput
from simdev.files import ZIP_METHODS, open_zip, parse_json, replacing
from simdev.problem.graph import ComputationGraph

FORMAT = 1
MAX_UNPACKED = 1 << 30  # a zip bomb is refused before it is unpacked
MAX_MEMBERS = 256
_COLUMNS = {**ComputationGraph.OP_COLUMNS, **ComputationGraph.TENSOR_COLUMNS, **ComputationGraph.EDGE_COLUMNS}


def save_graph(graph: ComputationGraph, path: str | os.PathLike) -> None:
    """Write ``graph`` to ``path`` (``.npz``), atomically: a full disk leaves the old file as it was."""
    header = {
        "format": FORMAT,
        "name": graph.name,
        "fingerprint": graph.fingerprint,
        "meta": graph.meta,
        **{name: list(getattr(graph, name)) for name in ComputationGraph.STRINGS},
    }
    arrays = {name: _narrow(getattr(graph, name)) for name in _COLUMNS}
    arrays["header"] = np.frombuffer(json.dumps(header, sort_keys=True).encode(), np.uint8)
    write_npz(path, arrays)


def load_graph(path: str | os.PathLike) -> ComputationGraph:
    """Read a graph file. Raises :class:`InvalidInput` naming the file and the field for anything malformed."""
    arrays = read_npz(path)
    if "header" not in arrays:
        raise InvalidInput("missing", source=path, field="header")
    header = parse_json(arrays["header"].astype(np.uint8).tobytes(), path, "header")
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = header.get("format") if isinstance(header, dict) else type(header).__name__
        raise InvalidInput(f"format {found!r}, expected {FORMAT}", source=path, field="header: format")
    columns: dict[str, Any] = {}
    for name in _COLUMNS:
        if name not in arrays:
            raise InvalidInput("missing", source=path, field=name)
        columns[name] = arrays[name]
    unknown = sorted(arrays.keys() - columns.keys() - {"header"})
    if unknown:
        raise InvalidInput("not a column of a graph", source=path, field=unknown[0])
    for name in ComputationGraph.STRINGS:
        strings = header.get(name)
        if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
            raise InvalidInput("expected a list of strings", source=path, field=f"header: {name}")
        columns[name] = strings
    if not isinstance(header.get("name"), str) or not isinstance(header.get("meta"), dict):
        raise InvalidInput("expected a string and an object", source=path, field="header: name, meta")
    try:
        graph = ComputationGraph(name=header["name"], meta=header["meta"], **columns)
    except InvalidInput as error:
        raise InvalidInput(error.message, source=path, field=error.field) from None
    if header.get("fingerprint") != graph.fingerprint:
        raise InvalidInput(
            "does not match the contents: the file was altered", source=path, field="header: fingerprint"
        )
    return graph


def write_npz(path: str | os.PathLike, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays as a compressed archive with fixed time stamps (same arrays, same bytes), atomically."""
    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            member = zipfile.ZipInfo(f"{name}.npy")
            member.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(member, "w", force_zip64=True) as out:
                np.lib.format.write_array(out, np.ascontiguousarray(array), allow_pickle=False)


def read_npz(path: str | os.PathLike, kinds: str = "iub", dims: int = 1) -> dict[str, np.ndarray]:
    """Read every array of an ``.npz`` archive of whole numbers and truth values, or of the given ``kinds`` of dtypes
    (:attr:`numpy.dtype.kind`) and up to ``dims`` dimensions.

    Refuses pickles, bombs, members given twice and headers that lie about their size.
    """
    with open_zip(path) as archive:
        return _read_members(archive, path, kinds, dims)


def _read_members(archive: zipfile.ZipFile, path: str | os.PathLike, kinds: str, dims: int) -> dict[str, np.ndarray]:
    members = archive.infolist()
    total = sum(member.file_size for member in members)
    if len(members) > MAX_MEMBERS or total > MAX_UNPACKED:
        raise InvalidInput(f"unpacks to {total} bytes in {len(members)} members: refused", source=path)
    arrays = {}
    for member in members:
        name = member.filename.removesuffix(".npy")
        if name in arrays:
            raise InvalidInput("given twice", source=path, field=name)
        if member.compress_type not in ZIP_METHODS:
            raise InvalidInput(f"compression method {member.compress_type} is not used", source=path, field=name)
        with archive.open(member) as file:
            arrays[name] = _read_array(file, member.file_size, path, name, kinds, dims)
    return arrays


def _read_array(file: IO[bytes], size: int, path: str | os.PathLike, name: str, kinds: str, dims: int) -> np.ndarray:
    try:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"npy version {version}")
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read_header(file)
        if dtype.hasobject:
            raise ValueError("holds a pickle, which is never loaded")
        if dtype.kind not in kinds or not dtype.itemsize:
            expected = "whole numbers" if kinds == "iub" else "other values"
            raise ValueError(f"expected {expected}, got dtype {dtype}")
        count = prod(shape)
        one = (len(shape) == 1) if dims == 1 else len(shape) <= dims
        if fortran or not one or min(shape, default=0) < 0 or not 0 <= count <= size // dtype.itemsize:
            raise ValueError(f"shape {shape} does not match the data")
        data = file.read(count * dtype.itemsize + 1)  # to the end, where zipfile compares the checksum
        if len(data) != count * dtype.itemsize:
            raise ValueError(f"shape {shape} does not match the data")
        return np.frombuffer(data, dtype).reshape(shape)
    except (
        ValueError,
        TypeError,
        SyntaxError,
        OverflowError,
        MemoryError,
        RecursionError,
        tokenize.TokenError,
    ) as error:
        raise InvalidInput(str(error).split("\n")[0], source=path, field=name) from None


def _narrow(array: np.ndarray) -> np.ndarray:
    """The same numbers in the smallest integer type that holds them."""
    if array.dtype.kind != "i" or not array.size:
        return array
    return array.astype(np.promote_types(np.min_scalar_type(array.min()), np.min_scalar_type(array.max())))
