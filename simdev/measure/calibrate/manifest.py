"""Which measured file may be fitted to, and which only judges: frozen before anything was fitted.

``manifest.csv`` lists every public file used: its name under the data folder, SHA-256, role and source. A role is

* ``calibrate``: figures may be fitted to it, and no claim rests on it;
* ``validate``: nothing is fitted to it. A replay takes the trace's own kernel times, and host times of its other steps;
* ``split``: a table of which :func:`held_out` rows validate and the others calibrate.

A file that is not listed, or whose content differs from the listed one, has the role ``validate``.
"""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from simdev.errors import InvalidInput, quoted
from simdev.files import read_text, write_text

ROLES = ("calibrate", "validate", "split")
SHIPPED = Path(__file__).parent / "manifest.csv"
COLUMNS = ("file", "sha256", "role", "source")
HELD_OUT_SHARE = 0.2


@dataclass(frozen=True)
class Entry:
    file: str
    sha256: str
    role: str
    source: str


def held_out(key: str) -> bool:
    """True for the fifth of all rows that judge: by the SHA-256 of ``key`` (a shape, a size), whatever the file."""
    return hashlib.sha256(key.encode()).digest()[0] < 256 * HELD_OUT_SHARE


def load_manifest(path: str | os.PathLike = SHIPPED) -> dict[str, Entry]:
    """The manifest by file name. Raises :class:`InvalidInput` naming the line of a wrong role or a file given twice."""
    lines = read_text(path).splitlines()
    try:
        return _entries(csv.DictReader(lines, strict=True), path)
    except csv.Error as error:
        raise InvalidInput(f"not CSV ({error})", source=path) from None


def _entries(reader: csv.DictReader, path) -> dict[str, Entry]:
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise InvalidInput(f"expected the columns {', '.join(COLUMNS)}", source=path, field="line 1")
    entries: dict[str, Entry] = {}
    for row in reader:
        where = f"line {reader.line_num}"
        if None in row or None in row.values():
            raise InvalidInput("wrong number of columns", source=path, field=where)
        if row["role"] not in ROLES:
            raise InvalidInput(f"role {quoted(row['role'])} is none of {', '.join(ROLES)}", source=path, field=where)
        if row["file"] in entries:
            raise InvalidInput(f"{quoted(row['file'])} is listed twice", source=path, field=where)
        entries[row["file"]] = Entry(**row)
    return entries


def role_of(path: Path, root: Path, manifest: dict[str, Entry]) -> str:
    """The role of the file ``path`` under the data folder ``root``."""
    entry = manifest.get(path.relative_to(root).as_posix())
    return entry.role if entry is not None and entry.sha256 == sha256_of(path) else "validate"


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(root: Path, roles: Iterable[tuple[str, str, str]], path: Path = SHIPPED) -> None:
    """List the files under ``root`` that match ``(pattern, role, source)``, first match first, and write them."""
    seen: dict[str, str] = {}
    for pattern, role, source in roles:
        for file in sorted(root.glob(pattern)):
            name = file.relative_to(root).as_posix()
            if file.is_file() and "LICENSE" not in name.upper():
                seen.setdefault(name, f"{name},{sha256_of(file)},{role},{source}")
    write_text(path, "\n".join([",".join(COLUMNS), *(seen[name] for name in sorted(seen))]) + "\n")
