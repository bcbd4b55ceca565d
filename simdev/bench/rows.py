"""A row: the result of one run of the bench, as a record of ``results.csv``.

Columns in :data:`EXACT` are the same on every machine and are compared on verification; the rest are circumstantial.
A field ``*_ns`` of a :class:`Row` holds whole nanoseconds. Its column ``*_s`` (:data:`FIELD`) holds the same time in
seconds with all nine digits, so that it round-trips exactly.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from decimal import Decimal
from pathlib import Path

from simdev.errors import InvalidInput, quoted
from simdev.files import guarded, parse_json, read_text, unguarded, write_text

STATUSES = ("ok", "infeasible", "skipped", "timeout", "memory", "error")
EXACT = (
    "workload", "fingerprint", "topology", "cost_hash", "rules", "objective", "placer", "version", "params", "budget",
    "seed", "status", "error", "feasible", "step_time_s", "simulated_s", "overflow", "lower_bound_s", "bound_method",
    "peak_memory_bytes", "comm_bytes", "evaluations", "placement", "proof",
)  # fmt: skip
CIRCUMSTANTIAL = ("place_seconds", "machine", "versions", "commit", "utc")
COLUMNS = (*EXACT, "digest", *CIRCUMSTANTIAL)
NAME = re.compile(r"[0-9a-f]{0,64}")  # of a graph or placement file; nothing else becomes a path
LONGEST_NUMBER = 40  # characters
KEY = ("workload", "topology", "rules", "placer", "params", "budget", "seed", "objective")
ABSENT = {"objective": "step", "proof": ""}  # columns that older folders lack; these values are left out of the digest
FIELD = {"step_time_s": "step_ns", "simulated_s": "simulated_ns", "lower_bound_s": "lower_bound_ns"}  # by column


@dataclass(frozen=True)
class Row:
    """One run. ``None`` is an empty cell. The column dictionary is ``leaderboard/README.md``."""

    workload: str
    topology: str
    rules: str
    placer: str
    version: int
    params: str
    budget: str
    seed: int
    fingerprint: str
    cost_hash: str
    status: str
    error: str = ""
    feasible: bool | None = None
    step_ns: int | None = None
    simulated_ns: int | None = None  # an infeasible run has this one only: it has no score
    overflow: str = ""
    lower_bound_ns: int | None = None
    bound_method: str = ""
    peak_memory_bytes: int | None = None
    comm_bytes: int | None = None
    evaluations: int | None = None
    placement: str = ""
    place_seconds: float | None = None
    machine: str = ""
    versions: str = ""
    commit: str = ""
    utc: str = ""
    objective: str = "step"
    proof: str = ""

    @property
    def key(self) -> tuple:
        """What identifies the run: :data:`KEY`. Rows sort by it."""
        return tuple(getattr(self, name) for name in KEY)

    @property
    def digest(self) -> str:
        """SHA-256 (hex, 16 characters) of the exact columns as written."""
        return _digest(self.cells())

    @property
    def entry(self) -> str:
        """The placer's id with its parameters."""
        return entry_id(self.placer, json.loads(self.params))

    def cells(self) -> dict[str, str]:
        """The row as text, by column, without the digest."""
        return {
            name: _write_cell(getattr(self, FIELD.get(name, name)), name in FIELD) for name in (*EXACT, *CIRCUMSTANTIAL)
        }


def entry_id(name: str, params: dict) -> str:
    """``name[param=value,...]``, parameters sorted; the inverse of :func:`simdev.placers.registry.parse_id`."""
    inside = ",".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in sorted(params.items())
    )
    return f"{name}[{inside}]" if inside else name


def seconds_text(ns: int | None) -> str:
    """Whole nanoseconds as seconds with nine digits; empty for None."""
    return "" if ns is None else f"{ns // 10**9}.{ns % 10**9:09d}"


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write ``results.csv``, sorted by key, atomically."""
    table = []
    for row in sorted(rows, key=lambda row: row.key):
        cells = row.cells()
        table.append({**cells, "digest": _digest(cells)})
    write_csv(path, COLUMNS, table)


def read_rows(path: Path, *, check_digest: bool = True) -> list[Row]:
    """Read ``results.csv``. Raises :class:`InvalidInput` that names line and column of a malformed cell and, with
    ``check_digest``, the line of a row that does not match its digest."""
    rows, seen = [], set()
    for line, cells in read_csv(path, COLUMNS):
        row = parse_row(cells, path, line)
        if check_digest and cells["digest"] != _digest(cells):
            raise InvalidInput("does not match the row: a cell was altered", source=path, field=f"line {line}: digest")
        if row.key in seen:
            raise InvalidInput("the same run twice", source=path, field=f"line {line}")
        seen.add(row.key)
        rows.append(row)
    return rows


def parse_row(cells: dict[str, str], path: Path, line: int) -> Row:
    """A row from its cells."""
    values, kind = {}, {field.name: field.type for field in fields(Row)}
    for column in (*EXACT, *CIRCUMSTANTIAL):
        field = FIELD.get(column, column)
        try:
            values[field] = _read_cell(column, kind[field], cells[column])
        except (ValueError, ArithmeticError) as error:
            text = why_unreadable(error, cells[column])
            raise InvalidInput(text, source=path, field=f"line {line}: {column}") from None
    return Row(**values)


def write_csv(path: Path, columns: Iterable[str], table: Iterable[dict]) -> None:
    """Write a CSV file atomically: a full disk leaves the old file as it was. No cell becomes a formula in a
    spreadsheet (see :func:`simdev.files.guarded`)."""
    text, columns = io.StringIO(), list(columns)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([guarded(cells[name]) for name in columns] for cells in table)
    write_text(path, text.getvalue())


def read_csv(path: Path, columns: Iterable[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and cells of each row of a CSV file that has exactly ``columns``; those of :data:`ABSENT` may be
    missing."""
    columns = list(columns)
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        header = next(reader, [])
        absent = {name: ABSENT[name] for name in columns if name in ABSENT and name not in header}
        missing = [name for name in columns if name not in header and name not in absent]
        if missing or len(header) + len(absent) != len(columns):
            raise InvalidInput(
                f"column {missing[0]!r} is missing" if missing else "a column too many", source=path, field="header"
            )
        for cells in reader:
            if len(cells) != len(header):
                raise InvalidInput(
                    f"{len(cells)} cells, expected {len(header)}", source=path, field=f"line {reader.line_num}"
                )
            yield reader.line_num, {**absent, **dict(zip(header, map(unguarded, cells), strict=True))}
    except csv.Error as error:
        raise InvalidInput(f"not a CSV file ({error})", source=path) from None


def row_to_json(row: Row) -> dict:
    """A row as a JSON object for the journal."""
    return asdict(row)


def row_from_json(entry: dict, path: Path) -> Row:
    """The inverse of :func:`row_to_json`. Raises :class:`InvalidInput` naming a column of the wrong type.

    Journals of version 0.1.0 have nanoseconds under the names of the columns (:data:`FIELD`); they are read too.
    """
    if not isinstance(entry, dict):
        raise InvalidInput(f"{quoted(entry)} is not a row", source=path)
    try:
        row = Row(**{FIELD.get(name, name): value for name, value in entry.items()})
    except TypeError as error:
        raise InvalidInput(f"not a row ({error})", source=path) from None
    for column in fields(Row):
        value = getattr(row, column.name)
        if type(value).__name__ not in column.type.replace("None", "NoneType"):
            raise InvalidInput(f"{quoted(value)} is not {column.type}", source=path, field=column.name)
        if not isinstance(value, str) and value is not None and not 0 <= value < 1 << 63:
            raise InvalidInput(f"{quoted(value)} is not a number from 0 to 2^63", source=path, field=column.name)
        if isinstance(value, str) and not value.isprintable():
            raise InvalidInput(
                f"{quoted(value)} holds characters that cannot be printed", source=path, field=column.name
            )
        if column.name == "params" and not isinstance(parse_json(value, path, "params"), dict):
            raise InvalidInput(f"{quoted(value)} is not a JSON object", source=path, field="params")
    return row


def _digest(cells: dict[str, str]) -> str:
    values = [cells[name] for name in EXACT if cells[name] != ABSENT.get(name)]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _write_cell(value, is_time: bool) -> str:
    if value is None:
        return ""
    if is_time:
        return seconds_text(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read_cell(name: str, kind: str, text: str):
    value = read_value(kind, text, is_time=name in FIELD)
    if name == "status" and text not in STATUSES:
        raise ValueError(f"unknown status {quoted(text)}")
    if name == "params" and not isinstance(parse_json(text, name), dict):
        raise ValueError(f"{quoted(text)} is not a JSON object")
    if name in ("fingerprint", "placement") and not NAME.fullmatch(text):
        raise ValueError(f"{quoted(text)} is not a fingerprint")
    return value


def read_value(kind: str, text: str, *, is_time: bool = False):
    """The value of a cell whose field has the type ``kind``: text, number, time, ``true`` or ``false``; None for an
    empty cell if the type allows it. Raises :class:`ValueError` or :class:`ArithmeticError` for anything else."""
    if kind == "str":
        if not text.isprintable():
            raise ValueError(f"{quoted(text)} holds characters that cannot be printed")
        return text
    if text == "" and "None" in kind:
        return None
    if kind.startswith("bool"):
        if text not in ("true", "false"):
            raise ValueError(f"{quoted(text)} is neither true nor false")
        return text == "true"
    if kind.startswith("float"):
        return read_fraction(text)
    return read_time(text) if is_time else read_whole(text)


def why_unreadable(error: Exception, text: str) -> str:
    """What is wrong with a cell, from the error of :func:`read_value`."""
    return str(error) if isinstance(error, ValueError) else f"{quoted(text)} is not a number"


def read_whole(text: str) -> int:
    """A whole number from 0 to 2^63 of a cell. Raises :class:`ValueError` for anything else."""
    return within(int(_short(text)))


def read_fraction(text: str) -> float:
    """A number from 0 to 2^63 of a cell. Raises :class:`ValueError` for anything else."""
    return within(float(_short(text)))


def read_time(text: str) -> int:
    """Whole nanoseconds from a cell in seconds. Raises :class:`ValueError` or :class:`ArithmeticError`."""
    value = within(Decimal(_short(text)) * 10**9)
    if value != int(value):
        raise ValueError(f"{quoted(text)} is not a whole number of nanoseconds")
    return int(value)


def within(value):
    """``value``, a number from 0 to 2^63. Raises :class:`ValueError` for anything else."""
    if isinstance(value, (bool, str)) or not 0 <= value < 1 << 63:
        raise ValueError(f"{quoted(value)} is not a number from 0 to 2^63")
    return value


def _short(text: str) -> str:
    if len(text) > LONGEST_NUMBER:
        raise ValueError(f"{quoted(text)} is too long for a number")
    return text
