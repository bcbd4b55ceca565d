"""A folder of results: the journal is the truth, and the CSV files are written from it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from simdev.bench import rows, score
from simdev.bench.rows import Row
from simdev.errors import InvalidInput
from simdev.files import parse_json, read_lines, writing
from simdev.problem.placement import Placement
from simdev.problem.placement_file import holds_placement, pack_placements, store_placement

CURVES = (*rows.KEY, "evaluations", "seconds", "step_time_s")


SUM = re.compile(rb'(.*), "sum": "([0-9a-f]{16})"\}', re.DOTALL)  # the end of a line with a checksum
ENTRIES = {"row": {"kind", "row", "curve"}, "bound": {"kind", "of", "ns", "method"}}


class Journal:
    """Append-only JSON lines, each with a checksum: one per finished run, on the disk before the next one is counted.

    A last line that a crash cut short is dropped when the file is read; its run is simply executed again. A line that
    was damaged later is refused. Lines without a checksum, as older versions wrote them, are read too.
    """

    def __init__(self, path: Path):
        self.path = path
        self.entries = list(self._read())
        self._cut_torn_end()
        self._file = open(path, "a", encoding="utf-8")

    def append(self, entry: dict) -> None:
        """Add an entry and flush it to the disk."""
        with writing(self.path):
            self._file.write(journal_line(entry))
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        try:
            self._file.close()
        except OSError:  # a full disk was reported by append already
            pass

    def _read(self) -> Iterator[dict]:
        if not self.path.is_file():
            return
        for number, line in enumerate(read_lines(self.path), 1):
            if not line.endswith(b"\n"):  # cut short
                return
            try:
                yield read_journal_line(line[:-1])
            except (ValueError, RecursionError) as error:
                raise InvalidInput(
                    f"not a journal entry ({error}); delete the line to execute its run again",
                    source=self.path,
                    field=f"line {number}",
                ) from None

    def _cut_torn_end(self) -> None:
        if self.path.is_file():
            data = self.path.read_bytes()
            if data and not data.endswith(b"\n"):
                with open(self.path, "r+b") as file:
                    file.truncate(data.rfind(b"\n") + 1)


def journal_line(entry: dict) -> str:
    """An entry as a line: a JSON object whose last member, ``sum``, is a checksum of all that stands before it."""
    text = json.dumps(entry)[:-1]
    return f'{text}, "sum": "{_sum(text.encode())}"}}\n'


def read_journal_line(line: bytes) -> dict:
    """The entry of a line. Raises ValueError if it is damaged."""
    found = SUM.fullmatch(line)
    if found and _sum(found[1]) != found[2].decode():
        raise ValueError("the checksum does not match")
    entry = parse_json(line, "line")
    if not isinstance(entry, dict) or "kind" not in entry:
        raise ValueError("expected an object with 'kind'")
    if found:
        del entry["sum"]
    if entry.keys() != ENTRIES.get(entry["kind"] if isinstance(entry["kind"], str) else None):
        raise ValueError(f"an entry is damaged: its members are {', '.join(sorted(map(repr, entry)))[:100]}")
    return entry


def _sum(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


class Results:
    """The journal of a folder and what it says."""

    def __init__(self, out: Path):
        self.out, path = out, out / "journal.jsonl"
        fresh = not path.exists()
        with writing(path):
            self.journal = Journal(path)
        self._rows: dict[tuple, Row] = {}
        self._curves: dict[tuple, list] = {}
        self.bounds: dict[tuple, tuple[int | None, str]] = {}
        for entry in self.journal.entries:
            self._take(entry, path)
        if fresh and (out / "results.csv").is_file():
            self._adopt(out)

    @property
    def rows(self) -> list[Row]:
        return [self._rows[key] for key in sorted(self._rows)]

    def row(self, key: tuple) -> Row | None:
        """The row of a run, by key, if its placement is there too."""
        row = self._rows.get(key)
        return None if row and row.placement and not holds_placement(self.out, row.placement) else row

    def curve(self, key: tuple) -> list[tuple[int, float, int]]:
        """The anytime curve of a run, by key: ``(evaluations, seconds, step_ns)`` at each improvement."""
        return [tuple(point) for point in self._curves.get(key, [])]

    def add(self, row: Row, placement: Placement | None, curve: Iterable[tuple[int, float, int]]) -> None:
        """The placement first, then the row: a row never names a placement that is not there."""
        if placement is not None:
            store_placement(self.out, placement)
        self._log({"kind": "row", "row": rows.row_to_json(row), "curve": [*map(list, curve)]})

    def rebound(self, key: tuple, ns: int | None, method: str) -> None:
        """Give a row that is here the lower bound that is known now."""
        row = self._rows[key]
        if (row.lower_bound_ns, row.bound_method) != (ns, method):
            row = replace(row, lower_bound_ns=ns, bound_method=method)
            self._log({"kind": "row", "row": rows.row_to_json(row), "curve": self._curves[key]})

    def add_bound(self, of: tuple, ns: int | None, method: str) -> None:
        """Keep the lower bound of a problem, named by fingerprint, cost hash and rules."""
        self._log({"kind": "bound", "of": list(of), "ns": ns, "method": method})

    def write(self) -> None:
        """Write the CSV files from what is known."""
        found = self.rows
        rows.write_rows(self.out / "results.csv", found)
        score.write(self.out, found)
        table = [
            dict(zip(CURVES, (*key, used, f"{seconds:.3f}", rows.seconds_text(ns)), strict=True))
            for key in sorted(self._curves)
            for used, seconds, ns in self._curves[key]
        ]
        rows.write_csv(self.out / "curves.csv", CURVES, table)

    def pack(self) -> None:
        """Keep the placements of all rows in one file (:mod:`simdev.problem.placement_file`)."""
        pack_placements(self.out, (row.placement for row in self._rows.values() if row.placement))

    def close(self) -> None:
        self.journal.close()

    def _log(self, entry: dict) -> None:
        self.journal.append(entry)
        self._take(entry, self.journal.path)

    def _take(self, entry: dict, path: Path) -> None:
        try:
            if entry["kind"] == "bound":
                ns = entry["ns"]
                of = tuple(map(str, entry["of"]))
                self.bounds[of] = None if ns is None else int(rows.within(ns)), str(entry["method"])
            else:
                row = rows.row_from_json(entry["row"], path)
                points = [[rows.within(number) for number in point] for point in entry["curve"]]
                curve = [[int(used), float(seconds), int(ns)] for used, seconds, ns in points]
                self._rows[row.key], self._curves[row.key] = row, curve
        except InvalidInput:
            raise
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise InvalidInput(f"an entry is damaged ({type(error).__name__}: {error})", source=path) from None

    def _adopt(self, out: Path) -> None:
        """A folder of results whose journal is gone (a shipped board): take its rows and curves over."""
        curves = read_curves(out / "curves.csv") if (out / "curves.csv").is_file() else {}
        for row in rows.read_rows(out / "results.csv"):
            self._log({"kind": "row", "row": rows.row_to_json(row), "curve": curves.get(row.key, [])})


def read_curves(path: Path) -> dict[tuple, list[tuple[int, float, int]]]:
    """The curves of ``curves.csv`` by the key of their row: ``(evaluations, seconds, step_ns)`` at each improvement.

    Raises :class:`InvalidInput` naming the line of whatever is malformed.
    """
    curves: dict[tuple, list] = {}
    for line, cells in rows.read_csv(path, CURVES):
        try:
            key = tuple(rows.read_whole(cells[name]) if name == "seed" else cells[name] for name in rows.KEY)
            seconds, step_ns = rows.read_fraction(cells["seconds"]), rows.read_time(cells["step_time_s"])
            curves.setdefault(key, []).append((rows.read_whole(cells["evaluations"]), seconds, step_ns))
        except (ValueError, ArithmeticError):
            raise InvalidInput("not a number", source=path, field=f"line {line}") from None
    return curves
