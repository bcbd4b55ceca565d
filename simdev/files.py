"""Read files within limits, and write them whole or not at all.

Reading never executes code and never takes more memory than a limit allows. Whatever a file holds, the answer is data
or one :class:`InvalidInput`. The limits are far above real files: the standard board has 0.4 MB, the largest shipped
graph 0.5 MB.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import re
import stat
import tempfile
import tomllib
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol, TextIO

from simdev.errors import InvalidInput

MIB = 1 << 20
MAX_DOCUMENT = 128 * MIB  # JSON, CSV and other text; Python objects take some twenty times as much memory
MAX_TOML = 8 * MIB  # machines and device files
MAX_JOURNAL = 1024 * MIB  # the journal of a result folder, read line by line
MAX_ARCHIVE = 1024 * MIB  # a zip or npz file on disk
MAX_DIRECTORY = 16 * MIB  # the table of contents of a zip file: about 200,000 members
TEMPORARY = ".simdev-tmp"  # how the names of unfinished files end

# Compression methods that unpack piece by piece. Deflate makes at most about a thousand bytes of one; others can turn
# a single piece into gigabytes.
ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# What spreadsheets take for a formula at the beginning of a cell, behind any number of the quotes that guard it.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?%?")


# Reading --------------------------------------------------------------------------------------------------------------


def read_bytes(path: str | os.PathLike, most: int = MAX_DOCUMENT) -> bytes:
    """The content of a file, a pipe or a device, at most ``most`` bytes. Raises :class:`InvalidInput` for a larger one,
    having read no more than that, and with what the system says for one that cannot be read."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > most:
                raise _too_large(path, most)
            data = file.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(getattr(error, "strerror", None) or str(error), source=path) from None
    if len(data) > most:
        raise _too_large(path, most)
    return data


def read_text(path: str | os.PathLike, most: int = MAX_DOCUMENT) -> str:
    """The content of a UTF-8 file (see :func:`read_bytes`), without a byte order mark."""
    return text_of(read_bytes(path, most), path)


def text_of(data: bytes, source: object) -> str:
    """UTF-8 text. Raises :class:`InvalidInput` naming the byte that is none."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"not text (byte {error.start}: {error.reason})", source=source) from None


def read_json(path: str | os.PathLike, most: int = MAX_DOCUMENT) -> Any:
    """The value of a JSON file (see :func:`read_bytes` and :func:`parse_json`)."""
    return parse_json(read_bytes(path, most), path)


def parse_json(text: str | bytes, source: object, field: str | None = None) -> Any:
    """A JSON value. Raises :class:`InvalidInput` for anything else, also for NaN, infinities, numbers beyond a double,
    halves of surrogate pairs and values nested too deep."""
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else error
        raise InvalidInput(f"not JSON ({reason})", source=source, field=field) from None


def read_toml(path: str | os.PathLike, most: int = MAX_TOML) -> dict:
    """The table of a TOML file (see :func:`read_bytes`). Raises :class:`InvalidInput` for anything else, also for whole
    numbers of more than 64 bits, which TOML does not have."""
    text = read_text(path, most)
    try:
        table = tomllib.loads(text)
        _refuse_large(table)
        return table
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else error
        raise InvalidInput(f"not TOML ({reason})", source=path) from None


def read_lines(path: str | os.PathLike, most: int = MAX_JOURNAL, longest: int = MAX_DOCUMENT) -> Iterator[bytes]:
    """The lines of a file one by one, each with its line feed. Raises :class:`InvalidInput` when more than ``most``
    bytes, or a line longer than ``longest``, have been read."""
    total = 0
    try:
        _need_regular(path)
        with open(path, "rb") as file:
            while line := file.readline(longest + 1):
                total += len(line)
                if len(line) > longest or total > most:
                    raise _too_large(path, most if total > most else longest)
                yield line
    except OSError as error:
        raise InvalidInput(error.strerror or str(error), source=path) from None


@contextlib.contextmanager
def open_text(path: str | os.PathLike, most: int = MAX_DOCUMENT) -> Iterator[TextIO]:
    """A UTF-8 file, plain or gzipped, to read line by line (line ends as they are, without a byte order mark).

    Raises :class:`InvalidInput` once more than ``most`` bytes have been unpacked, and whatever goes wrong inside the
    block while the file is read or unpacked as such. The end of a truncated file is the :class:`EOFError` of gzip if
    the block catches it.
    """
    try:
        with open(path, "rb") as file:
            zipped = file.peek(2)[:2] == b"\x1f\x8b"
            source = gzip.GzipFile(fileobj=file) if zipped else file
            raw = io.BufferedReader(_Counted(source, most, path), 1 << 13)
            yield io.TextIOWrapper(raw, "utf-8-sig", newline="")
    except InvalidInput:
        raise
    except UnicodeDecodeError as error:
        raise InvalidInput(f"not text ({error.reason})", source=path) from None
    except csv.Error as error:
        raise InvalidInput(f"not CSV ({error})", source=path) from None
    except (OSError, EOFError, zlib.error, ValueError) as error:  # ValueError: a null byte in the path
        raise InvalidInput(getattr(error, "strerror", None) or str(error), source=path) from None


def read_zipped(path: str | os.PathLike, most: int = MAX_DOCUMENT) -> str:
    """The text of a UTF-8 file, plain or gzipped (see :func:`open_text`)."""
    with open_text(path, most) as file:
        return file.read()


@contextlib.contextmanager
def table_errors(source: object) -> Iterator[None]:
    """Turn what a missing column, or a cell that is missing or no number, raises inside the block into
    :class:`InvalidInput`."""
    try:
        yield
    except InvalidInput:
        raise
    except KeyError as error:
        raise InvalidInput(f"column {error.args[0]!r} is missing", source=source) from None
    except (csv.Error, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise InvalidInput(f"a cell is missing or malformed ({error})", source=source) from None


class _Counted(io.RawIOBase):
    """A stream as :class:`Bounded`, for :mod:`io` to put a buffer and text on top."""

    def __init__(self, file: gzip.GzipFile | io.BufferedReader, most: int, source: object):
        self.file, self.left, self.most, self.source = file, most, most, source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.file.read1(min(len(buffer), self.left + 1))
        self.left -= len(data)
        if self.left < 0:
            raise _too_large(self.source, self.most)
        buffer[: len(data)] = data
        return len(data)


class Readable(Protocol):
    """What gives at most ``size`` bytes at a time, and none at its end."""

    def read(self, size: int, /) -> bytes: ...


class Bounded:
    """A binary stream that raises :class:`InvalidInput` once more than ``most`` bytes have been read from it."""

    def __init__(self, file: Readable, most: int, source: object):
        self.file, self.left, self.most, self.source = file, most, most, source

    def read(self, size: int = -1) -> bytes:
        data = self.file.read(self.left + 1 if size < 0 else min(size, self.left + 1))
        self.left -= len(data)
        if self.left < 0:
            raise _too_large(self.source, self.most)
        return data


@contextlib.contextmanager
def open_zip(path: str | os.PathLike) -> Iterator[zipfile.ZipFile]:
    """A zip file to read, whose table of contents is of a reasonable size.

    Whatever goes wrong inside the block is raised as :class:`InvalidInput`: zipfile answers malformed archives with a
    dozen types of exceptions.
    """
    try:
        _need_regular(path)
        with open(path, "rb") as file:
            _check_directory(file, path)
            with zipfile.ZipFile(file) as archive:
                yield archive
    except InvalidInput:
        raise
    except OSError as error:
        raise InvalidInput(error.strerror or str(error), source=path) from None
    except Exception as error:
        reason = str(error).split("\n")[0] or type(error).__name__
        raise InvalidInput(f"truncated or corrupted archive ({reason})", source=path) from None


def _check_directory(file: BinaryIO, path: str | os.PathLike) -> None:
    """Refuse an archive that is too large, or whose table of contents would fill the memory."""
    whole = os.fstat(file.fileno()).st_size
    if whole > MAX_ARCHIVE:
        raise _too_large(path, MAX_ARCHIVE)
    tail = min(whole, 22 + (1 << 16) + 20)  # the last record, its comment, the locator of the 64-bit form
    file.seek(-tail, os.SEEK_END)
    data = file.read(tail)
    end = data.rfind(b"PK\5\6")
    size = int.from_bytes(data[end + 12 : end + 16], "little") if end >= 0 else 0
    if size > MAX_DIRECTORY or data[max(0, end - 20) :].startswith(b"PK\6\7"):
        raise InvalidInput(f"the table of contents is larger than {MAX_DIRECTORY} bytes: refused", source=path)
    file.seek(0)


def _need_regular(path: str | os.PathLike) -> None:
    """Refuse a pipe, a socket or a device before it is opened: the opening of a pipe waits for a process that writes to
    it. A folder passes, because the error of the system is more precise."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InvalidInput("not a regular file", source=path)


def files_below(folder: str | os.PathLike) -> list[str]:
    """Everything below a folder that is no folder itself: sorted paths from there, with ``/``. Links are named, not
    followed. Raises :class:`InvalidInput` for a folder whose content cannot be listed."""
    found: list[str] = []
    left = [""]
    while left:
        at = left.pop()
        with writing(os.path.join(folder, at)), os.scandir(os.path.join(folder, at)) as entries:
            for entry in entries:
                inside = entry.is_dir(follow_symlinks=False)
                (left.append if inside else found.append)(f"{at}{entry.name}{'/' if inside else ''}")
    return sorted(found)


def _too_large(path: object, most: int) -> InvalidInput:
    return InvalidInput(f"larger than {most} bytes: refused", source=path)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _refuse_large(value: object) -> None:
    if isinstance(value, (dict, list)):
        for one in value.values() if isinstance(value, dict) else value:
            _refuse_large(one)
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ValueError("a whole number of more than 64 bits")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is beyond a double")
    return value


# Writing --------------------------------------------------------------------------------------------------------------


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
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=TEMPORARY)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise


def private(folder: Path) -> Path:
    """``folder``, whose files may be trusted as the user's own: nobody else can write to it. Raises
    :class:`InvalidInput` for a folder that belongs to another user, or that all users may write to."""
    try:
        about = folder.stat()
    except OSError:  # it is not there yet
        return folder
    if about.st_uid not in (os.getuid(), 0) or about.st_mode & stat.S_IWOTH:
        message = "other users can write to this cache: take that right away (chmod o-w), or set XDG_CACHE_HOME"
        raise InvalidInput(message, source=folder)
    return folder


def sweep(folder: str | os.PathLike) -> int:
    """Remove the unfinished files that killed processes left in ``folder`` and below; the number removed.

    Call it only while no other process writes there.
    """
    found = [path for path in Path(folder).rglob(f".*{TEMPORARY}") if path.is_file() and not path.is_symlink()]
    for path in found:
        with contextlib.suppress(OSError):
            path.unlink()
    return len(found)


def write_picture(figure: Any, path: str | os.PathLike, *, dpi: int, text: str | None = None) -> None:
    """Write a matplotlib figure as its suffix says (PNG without one), whole or not at all, and with the same bytes each
    time: without a date, and with ids in an SVG file that follow from what is drawn. ``text`` describes the picture in
    the file. Raises :class:`InvalidInput` for a suffix that matplotlib does not draw."""
    import matplotlib

    kind = Path(path).suffix.lower().lstrip(".") or "png"
    known = figure.canvas.get_supported_filetypes()
    if kind not in known:
        raise InvalidInput(f"cannot draw {kind!r}; known: png, svg, pdf", source=path)
    about: dict[str, str | None] = {} if text is None else {"Subject" if kind == "pdf" else "Description": text}
    if kind in ("svg", "pdf"):
        about["Date" if kind == "svg" else "CreationDate"] = None
    with matplotlib.rc_context({"svg.hashsalt": "simdev"}), replacing(path) as file:
        figure.savefig(file, format=kind, dpi=dpi, metadata=about or None)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with replacing(path) as file:
        file.write(text.encode())


def write_table(path: str | os.PathLike, columns: list[str], rows: Iterable[list]) -> None:
    """Write a CSV file: fractions to six digits, NaN as nothing, text guarded (see :func:`guarded`)."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(value) for value in row] for row in rows)
    write_text(path, text.getvalue())


def guarded(cell: object) -> object:
    """A cell as a CSV file holds it: text that a spreadsheet would take for a formula gets a quote in front.

    :func:`unguarded` is the inverse. Numbers, also as text, stay as they are.
    """
    if not isinstance(cell, str) or not _FORMULA.match(cell) or _NUMBER.fullmatch(cell):
        return cell
    return f"'{cell}"


def unguarded(cell: str) -> str:
    """The text of a cell of a CSV file that simdev wrote."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def _cell(value: object) -> object:
    if isinstance(value, float):
        return "" if value != value else f"{value:.6g}"
    return guarded(value)


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
