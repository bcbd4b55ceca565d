"""Decide which measured files fits may use and which files only judge. The manifest was frozen before the first fit.

``manifest.csv`` lists every public file with its name under the data folder, SHA-256, role and source. The roles are

* ``calibrate``: fits may use the file, and no claim about accuracy does;
* ``validate``: no fit uses the file. A replay uses the kernel times of the trace and the host times of its other steps;
* ``split``: the :func:`held_out` rows of the table validate, and fits use the other rows.

A file that is not listed, or whose content differs from the listed one, has the role ``validate``.
"""

from __future__ import annotations

import csv
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from simdev.errors import InvalidInput, quoted
from simdev.files import read_text

ROLES = ("calibrate", "validate", "split")
SHIPPED = Path(__file__).parent / "manifest.csv"
COLUMNS = ("file", "sha256", "role", "source")
HELD_OUT_SHARE = 0.2


@dataclass(frozen=True)
class MeasuredFile:
    file: str
    sha256: str
    role: str
    source: str


def held_out(key: str) -> bool:
    """True for the fifth of all rows that no fit uses. The SHA-256 of ``key`` (a shape or a size) decides, in every
    file."""
    return hashlib.sha256(key.encode()).digest()[0] < 256 * HELD_OUT_SHARE


def load_manifest(path: str | os.PathLike = SHIPPED) -> dict[str, MeasuredFile]:
    """The manifest by file name. Raises :class:`InvalidInput`, which names the line, for an unknown role or a repeated
    file."""
    lines = read_text(path).splitlines()
    try:
        return _entries(csv.DictReader(lines, strict=True), path)
    except csv.Error as error:
        raise InvalidInput(f"not CSV ({error})", source=path) from None


def _entries(reader: csv.DictReader, path) -> dict[str, MeasuredFile]:
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise InvalidInput(f"expected the columns {', '.join(COLUMNS)}", source=path, field="line 1")
    entries: dict[str, MeasuredFile] = {}
    for row in reader:
        where = f"line {reader.line_num}"
        if None in row or None in row.values():
            raise InvalidInput("wrong number of columns", source=path, field=where)
        if row["role"] not in ROLES:
            raise InvalidInput(f"role {quoted(row['role'])} is none of {', '.join(ROLES)}", source=path, field=where)
        if row["file"] in entries:
            raise InvalidInput(f"{quoted(row['file'])} is listed twice", source=path, field=where)
        entries[row["file"]] = MeasuredFile(**row)
    return entries


def role_of(path: Path, root: Path, manifest: dict[str, MeasuredFile]) -> str:
    """The role of the file ``path`` under the data folder ``root``."""
    entry = manifest.get(path.relative_to(root).as_posix())
    return entry.role if entry is not None and entry.sha256 == sha256_of(path) else "validate"


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
