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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from simdev.errors import InvalidInput, quoted
from simdev.files import guarded, parse_json, read_text, unguarded, write_text

STATUSES = ("ok", "infeasible", "skipped", "timeout", "memory", "error")
EXACT = (
    "workload", "fingerprint", "topology", "cost_hash", "rules", "objective", "placer", "version", "params", "budget",
    "seed", "status", "error", "feasible", "step_time_s", "simulated_s", "overflow", "lower_bound_s", "bound_method",
    "peak_memory_bytes", "comm_bytes", "evaluations", "placement", "proof",
)  # fmt: skip
CIRCUMSTANTIAL = ("place_seconds", "cpu_seconds", "machine", "versions", "commit", "utc")
NAME = re.compile(r"[0-9a-f]{0,64}")  # of a graph or placement file; nothing else becomes a path
LONGEST_NUMBER = 40  # characters
DEEPEST = 8  # levels of brackets in parameters
KEY = ("workload", "topology", "rules", "placer", "params", "budget", "seed", "objective")
PACE = "microbatch_time_s"  # in the file, the score of a row that is judged by its throughput
# Columns that older folders lack; these values are left out of the digest.
ABSENT = {"objective": "step", "proof": "", PACE: "", "cpu_seconds": ""}
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
    cpu_seconds: float | None = None
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
    def case(self) -> tuple[str, str, str, str]:
        """What placers are compared on."""
        return self.workload, self.topology, self.rules, self.objective

    @property
    def digest(self) -> str:
        """SHA-256 (hex, 16 characters) of the exact columns as written."""
        return RESULTS.digest(self.cells())

    @property
    def entry(self) -> str:
        """The placer's id with its parameters."""
        return entry_id(self.placer, self.params)

    def cells(self) -> dict[str, str]:
        """The row as text, by column, without the digest."""
        return RESULTS.cells(self)

    def with_bound(self, ns: int | None, method: str) -> Row:
        """The row with the lower bound that is known now."""
        return replace(self, lower_bound_ns=ns, bound_method=method)


def entry_id(name: str, params: str) -> str:
    """``name[param=value,...]`` from the parameters as JSON, sorted; the inverse of :func:`simdev.shelf.parse_id`."""
    inside = ",".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in sorted(json.loads(params).items())
    )
    return f"{name}[{inside}]" if inside else name


def registered_name(cell: str, params: str) -> str:
    """The name under which a placer or planner is registered, from a cell of a table that holds it with its parameters.
    Older tables hold the name only."""
    end = entry_id("", params) if params != "{}" else ""
    return cell[: -len(end)] if end and cell.endswith(end) else cell


def time_column(objective: str) -> str:
    """The column of a table that holds the times of an objective: of a step or one query, or of a microbatch or a query
    in the steady state."""
    return "step_time_s" if objective in ("step", "latency", "plan") else PACE


def seconds_text(ns: int | None) -> str:
    """Whole nanoseconds as seconds with nine digits; empty for None."""
    return "" if ns is None else f"{ns // 10**9}.{ns % 10**9:09d}"


@dataclass(frozen=True)
class Schema:
    """The columns of a table of runs, and how its cells are written, read and checked.

    ``kind`` is the dataclass of a row, which has the properties ``key`` and ``entry``, and ``file`` the name of the
    table in a result folder. The column ``solver`` of the file holds ``entry``, the placer or planner with its
    parameters, so that whoever groups by it never merges two variants. Columns of ``exact`` are covered by the
    digest and compared on verification, the others are ``circumstantial``. ``field`` maps a column of seconds to
    the field of whole nanoseconds. ``absent`` holds the values of columns that older tables lack; such a value is
    left out of the digest. ``check`` raises :class:`ValueError` for a text that the type of its column allows, but
    that no bench writes.
    """

    kind: type
    file: str
    exact: tuple[str, ...]
    circumstantial: tuple[str, ...]
    field: Mapping[str, str]
    absent: Mapping[str, str]
    check: Callable[[str, str], None]
    solver: str = "placer"

    @property
    def columns(self) -> tuple[str, ...]:
        """The header of the table."""
        pace = (PACE,) if PACE in self.absent else ()
        return (*self.exact, *pace, "digest", *self.circumstantial)

    def cells(self, row: Any) -> dict[str, str]:
        """A row as text, by column, without the digest."""
        names = (*self.exact, *self.circumstantial)
        return {name: _write_cell(getattr(row, self.field.get(name, name)), name in self.field) for name in names}

    def digest(self, cells: Mapping[str, str]) -> str:
        """SHA-256 (hex, 16 characters) of the exact columns as written."""
        values = [cells[name] for name in self.exact if cells[name] != self.absent.get(name)]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]

    def write(self, path: Path, rows: Iterable[Any]) -> None:
        """Write the table, sorted by key, atomically."""
        table = [self._written(row) for row in sorted(rows, key=lambda row: row.key)]
        unused = not any(cells.get(PACE) for cells in table)  # a table of steps has no column of microbatches
        write_csv(path, [name for name in self.columns if not (unused and name == PACE)], table)

    def _written(self, row: Any) -> dict[str, str]:
        """The cells of the file: the digest is that of :meth:`cells`, so older files and newer ones agree."""
        cells = self.cells(row)
        cells |= {"digest": self.digest(cells), self.solver: row.entry}
        if PACE in self.absent:
            time = cells.pop("step_time_s")
            cells |= {"step_time_s": "", PACE: "", time_column(cells["objective"]): time}
        return cells

    def _plain(self, cells: Mapping[str, str]) -> dict[str, str]:
        """The inverse of :meth:`_written`, also for the cells of older files. Raises :class:`ValueError`."""
        if cells["params"] != "{}":
            check_params(cells["params"])
        found = {**cells, self.solver: registered_name(cells[self.solver], cells["params"])}
        if cells.get(PACE):
            if cells["step_time_s"] or time_column(cells["objective"]) != PACE:
                raise ValueError(f"a time of a microbatch in a row of the objective {quoted(cells['objective'])}")
            found["step_time_s"] = cells[PACE]
        return found

    def read(self, path: Path, *, check_digest: bool = True) -> list[Any]:
        """Read the table. Raises :class:`InvalidInput` that names line and column of a malformed cell, the second row
        of a run and, with ``check_digest``, the line of a row that does not match its digest."""
        rows, seen = [], set()
        for line, cells, row in self.lines(path):
            if check_digest and cells["digest"] != self.digest(self.cells(row)):
                text = "does not match the row: a cell was altered"
                raise InvalidInput(text, source=path, field=f"line {line}: digest")
            if row.key in seen:
                raise InvalidInput("the same run twice", source=path, field=f"line {line}")
            seen.add(row.key)
            rows.append(row)
        return rows

    def lines(self, path: Path) -> Iterator[tuple[int, dict[str, str], Any]]:
        """Line number, cells and row of each line. Raises :class:`InvalidInput` for a malformed cell."""
        for line, cells in read_csv(path, self.columns, self.absent):
            yield line, cells, self.parse(cells, path, line)

    def parse(self, cells: Mapping[str, str], path: Path, line: int) -> Any:
        """A row from its cells."""
        values, kind = {}, {field.name: str(field.type) for field in fields(self.kind)}
        try:
            cells = self._plain(cells)
        except ValueError as error:
            raise InvalidInput(str(error), source=path, field=f"line {line}: params or {PACE}") from None
        for column in (*self.exact, *self.circumstantial):
            field = self.field.get(column, column)
            try:
                values[field] = read_value(kind[field], cells[column], is_time=column in self.field)
                self.check(column, cells[column])
            except (ValueError, ArithmeticError) as error:
                text = why_unreadable(error, cells[column])
                raise InvalidInput(text, source=path, field=f"line {line}: {column}") from None
        return self.kind(**values)

    def to_json(self, row: Any) -> dict:
        """A row as a JSON object for the journal."""
        return asdict(row)

    def from_json(self, entry: object, path: Path) -> Any:
        """The inverse of :meth:`to_json`. Raises :class:`InvalidInput` naming a column of the wrong type.

        Journals of version 0.1.0 have nanoseconds under the names of the columns; they are read too.
        """
        if not isinstance(entry, dict):
            raise InvalidInput(f"{quoted(entry)} is not a row", source=path)
        try:
            row = self.kind(**{self.field.get(name, name): value for name, value in entry.items()})
        except TypeError as error:
            raise InvalidInput(f"not a row ({error})", source=path) from None
        for column in fields(self.kind):
            value, kind = getattr(row, column.name), str(column.type)
            if type(value).__name__ not in kind.replace("None", "NoneType"):
                raise InvalidInput(f"{quoted(value)} is not {kind}", source=path, field=column.name)
            if not isinstance(value, str) and value is not None and not 0 <= value < 1 << 63:
                raise InvalidInput(f"{quoted(value)} is not a number from 0 to 2^63", source=path, field=column.name)
            if isinstance(value, str) and not value.isprintable():
                message = f"{quoted(value)} holds characters that cannot be printed"
                raise InvalidInput(message, source=path, field=column.name)
            if isinstance(value, str):
                try:
                    self.check(column.name, value)
                except ValueError as error:
                    raise InvalidInput(str(error), source=path, field=column.name) from None
        return row


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write ``results.csv``, sorted by key, atomically."""
    RESULTS.write(path, rows)


def read_rows(path: Path, *, check_digest: bool = True) -> list[Row]:
    """Read ``results.csv`` (:meth:`Schema.read`)."""
    return RESULTS.read(path, check_digest=check_digest)


def write_csv(path: Path, columns: Iterable[str], table: Iterable[dict]) -> None:
    """Write a CSV file atomically: a full disk leaves the old file as it was. No cell becomes a formula in a
    spreadsheet (see :func:`simdev.files.guarded`)."""
    text, columns = io.StringIO(), list(columns)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([guarded(cells[name]) for name in columns] for cells in table)
    write_text(path, text.getvalue())


def read_csv(
    path: Path, columns: Iterable[str], optional: Mapping[str, str] = ABSENT
) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and cells of each row of a CSV file that has exactly ``columns``; those of ``optional`` may be
    missing and then have its values."""
    columns = list(columns)
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        header = next(reader, [])
        absent = {name: optional[name] for name in columns if name in optional and name not in header}
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


def _write_cell(value, is_time: bool) -> str:
    if value is None:
        return ""
    if is_time:
        return seconds_text(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_params(text: str) -> None:
    """Raise :class:`ValueError` unless the text is a JSON object that is nested no deeper than :data:`DEEPEST`: whoever
    uses it later may stand deeper in the stack than the reader."""
    level = [parse_json(text, "params")]
    if not isinstance(level[0], dict):
        raise ValueError(f"{quoted(text)} is not a JSON object")
    for _ in range(DEEPEST):
        level = [inner for value in level if isinstance(value, dict | list)
                 for inner in (value.values() if isinstance(value, dict) else value)]  # fmt: skip
    if level:
        raise ValueError(f"{quoted(text)} is nested too deep")


def _check_cell(name: str, text: str) -> None:
    if name == "status" and text not in STATUSES:
        raise ValueError(f"unknown status {quoted(text)}")
    if name == "params":
        check_params(text)
    if name in ("fingerprint", "placement") and not NAME.fullmatch(text):
        raise ValueError(f"{quoted(text)} is not a fingerprint")


RESULTS = Schema(Row, "results.csv", EXACT, CIRCUMSTANTIAL, FIELD, ABSENT, _check_cell)
COLUMNS = RESULTS.columns


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
