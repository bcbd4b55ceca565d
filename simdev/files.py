"""Files written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
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


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
    """Turn what the system says about a file that cannot be written (a full disk, say) into :class:`InvalidInput`."""
    try:
        yield
    except OSError as error:
        raise InvalidInput(error.strerror or str(error), source=path) from None
