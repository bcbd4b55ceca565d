"""Files written whole or not at all."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from simdev.errors import InvalidInput


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A file to write that takes the place of ``path`` at the end: whatever goes wrong before, the old one remains.

    What is no regular file (``/dev/stdout``, a pipe) is written to as it is. Raises :class:`InvalidInput` with what the
    system says.
    """
    target = Path(os.path.realpath(path))
    with writing(path):
        if target.exists() and not target.is_file() and not target.is_dir():
            with open(target, "wb") as file:
                yield file
            return
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with replacing(path) as file:
        file.write(text.encode())


def write_table(path: str | os.PathLike, columns: list[str], rows: Iterable[list]) -> None:
    """Write a CSV file: fractions to six digits, NaN as nothing."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(value) for value in row] for row in rows)
    write_text(path, text.getvalue())


def _cell(value: object) -> object:
    if isinstance(value, float):
        return "" if value != value else f"{value:.6g}"
    return value


def markdown_table(header: list[str], rows: Iterable[list[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
    """Turn what the system says about a file that cannot be written (a full disk, say) into :class:`InvalidInput`."""
    try:
        yield
    except OSError as error:
        raise InvalidInput(error.strerror or str(error), source=path) from None
