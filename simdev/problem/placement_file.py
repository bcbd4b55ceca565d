"""Placements of a result folder, each under its hash: in a file of its own while a bench runs, later in one file.

A running bench writes ``placements/HASH.npz`` and its row afterwards, so that a crash loses nothing. When it has
finished, :func:`pack_placements` moves them into ``placements.jsonl``: a line for each placement, sorted by hash, so
that a version control system stores only the lines that are added. A line is a JSON object::

    {"hash": "00a1b2...", "devices": ["<u1", 1503, "eNpj..."], "priority": ["<i4", 1503, "eNrt..."]}

Each array is its dtype, its length, and its bytes, deflated (zlib) and in base64. Readers accept both forms.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from simdev.errors import InvalidInput, quoted
from simdev.files import MAX_DOCUMENT, parse_json, read_lines, replacing
from simdev.problem.graph_file import read_npz, write_npz
from simdev.problem.placement import Placement

FILE = "placements.jsonl"
NAME = re.compile(r"[0-9a-f]{1,64}")  # nothing else becomes a path
HEAD = re.compile(rb'\{"hash": "([0-9a-f]{16})", ')
ARRAYS = ("devices", "priority", "replica_of", "replicated")
DTYPES = re.compile(r"[<|][iu][1248]")
MAX_OPS = 1 << 24
LONGEST_LINE = 8 << 20


def placement_file(folder: str | os.PathLike, key: str) -> Path:
    """The file that holds a placement: ``placements.jsonl``, or else the file of its own in which a running bench keeps
    it. Raises :class:`InvalidInput` for a key that is no hash."""
    alone = _alone(folder, key)
    return Path(folder) / FILE if not alone.is_file() and key in _packed(folder) else alone


def _alone(folder: str | os.PathLike, key: str) -> Path:
    if not NAME.fullmatch(key):
        raise InvalidInput(f"{quoted(key)} is not the hash of a placement", source=folder)
    return Path(folder) / "placements" / f"{key}.npz"


def store_placement(folder: str | os.PathLike, placement: Placement) -> None:
    """Keep a placement once, under its hash: devices (priorities, replicas) in the smallest integers that hold them."""
    path = placement_file(folder, placement.hash)
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        write_npz(path, _arrays(placement))


def holds_placement(folder: str | os.PathLike, key: str) -> bool:
    """Whether the folder has a placement with this hash, in a file of its own or in ``placements.jsonl``."""
    return placement_file(folder, key).is_file()


def stored_placement(folder: str | os.PathLike, key: str) -> Placement:
    """Read a placement by hash. Raises :class:`InvalidInput` if it is missing, malformed or was altered."""
    path = placement_file(folder, key)
    arrays = _read_line(_packed(folder)[key], path) if path.name == FILE else read_npz(path)
    if "devices" not in arrays or set(arrays) - set(ARRAYS):
        raise InvalidInput(f"expected 'devices' and perhaps {', '.join(ARRAYS[1:])}", source=path)
    try:
        placement = Placement(**arrays)
    except InvalidInput as error:
        raise InvalidInput(error.message, source=path, field=error.field) from None
    if placement.hash != key:
        raise InvalidInput(f"holds placement {placement.hash}: the file was altered", source=path)
    return placement


def packed_keys(folder: str | os.PathLike) -> list[str]:
    """The hashes of all placements in ``placements.jsonl``, sorted; none if there is no such file."""
    return list(_packed(folder))


def pack_placements(folder: str | os.PathLike, keys: Iterable[str]) -> None:
    """Move the placements named by ``keys`` into ``placements.jsonl``, and remove the files that held them one by one.

    Placements with other hashes, which no row names any more, are dropped. The new file replaces the old one in one
    step, and files are removed only afterwards: after a crash each placement is still there at least once. Raises
    :class:`InvalidInput` if a placement is missing or was altered.
    """
    folder, wanted = Path(folder), sorted(set(keys))
    alone = list((folder / "placements").glob("*.npz"))
    if not alone and wanted == packed_keys(folder):
        return
    content = packed_text(folder, wanted)
    if wanted:
        with replacing(folder / FILE) as file:
            file.write(content)
    for path in alone:
        path.unlink()
    with contextlib.suppress(OSError):  # something else lies there
        (folder / "placements").rmdir()


def packed_text(folder: str | os.PathLike, keys: Iterable[str]) -> bytes:
    """The content of a ``placements.jsonl`` with the placements named by ``keys``: lines that are there stay as they
    are, the others are written anew. Raises :class:`InvalidInput` as :func:`stored_placement`."""
    packed = _packed(folder)
    return b"".join(packed.get(key) or _line(stored_placement(folder, key)) for key in sorted(set(keys)))


def narrowed(numbers: np.ndarray) -> np.ndarray:
    """Whole numbers in the smallest type that holds all of them."""
    low, high = int(numbers.min(initial=0)), int(numbers.max(initial=0))
    return numbers.astype(np.result_type(np.min_scalar_type(low), np.min_scalar_type(high)))


def _arrays(placement: Placement) -> dict[str, np.ndarray]:
    given = {name: getattr(placement, name) for name in ARRAYS}
    return {name: narrowed(values) for name, values in given.items() if values is not None}


def _line(placement: Placement) -> bytes:
    document: dict[str, object] = {"hash": placement.hash}
    for name, values in _arrays(placement).items():
        little = values.astype(values.dtype.newbyteorder("<"))
        data = base64.b64encode(zlib.compress(little.tobytes(), 9)).decode()
        document[name] = [little.dtype.str, len(little), data]
    return json.dumps(document).encode() + b"\n"


def _read_line(line: bytes, path: Path) -> dict[str, np.ndarray]:
    document = parse_json(line, path)
    if not isinstance(document, dict):
        raise InvalidInput("a line is not an object", source=path)
    if json.dumps(document).encode() + b"\n" != line:  # a member twice, of which readers see one
        raise InvalidInput("a line is not written as simdev writes it", source=path)
    return {name: _array(value, name, path) for name, value in document.items() if name != "hash"}


def _array(value: Any, name: str, path: Path) -> np.ndarray:
    try:
        dtype, count, text = value  # anything else raises one of the errors below
        if not (DTYPES.fullmatch(dtype) and type(count) is int and 0 <= count <= MAX_OPS):
            raise ValueError("no such array")
        size = count * np.dtype(dtype).itemsize
        inside = zlib.decompressobj()
        data = inside.decompress(base64.b64decode(text, validate=True), size + 1)
        if len(data) != size or not inside.eof or inside.unused_data:
            raise ValueError("the length is another")
    except (TypeError, ValueError, binascii.Error, zlib.error) as error:
        raise InvalidInput(f"not a packed array ({error})", source=path, field=name) from None
    return np.frombuffer(data, dtype).astype(np.dtype(dtype).newbyteorder("="))


def _packed(folder: str | os.PathLike) -> dict[str, bytes]:
    """The lines of ``placements.jsonl`` by hash, sorted; read again only if the file has changed."""
    path = Path(folder) / FILE
    try:
        about = path.stat()
    except OSError:
        return {}
    return _lines(path, about.st_mtime_ns, about.st_size, about.st_ino)


@lru_cache(maxsize=8)
def _lines(path: Path, *_: int) -> dict[str, bytes]:
    return dict(sorted(_read_lines(path)))


def _read_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    seen = set()
    for number, line in enumerate(read_lines(path, MAX_DOCUMENT, LONGEST_LINE), 1):
        found = HEAD.match(line)
        if not found or not line.endswith(b"}\n"):
            raise InvalidInput("not a placement", source=path, field=f"line {number}")
        key = found[1].decode()
        if key in seen:
            raise InvalidInput(f"placement {key} is given twice", source=path, field=f"line {number}")
        seen.add(key)
        yield key, line
