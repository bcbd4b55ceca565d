"""A folder of results: the journal is the truth, and the CSV files are written from it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from simdev.bench import plan_rows, rows, score
from simdev.bench.plan_rows import PLANS, PlanRow
from simdev.bench.rows import RESULTS, Row, Schema
from simdev.errors import InvalidInput
from simdev.files import parse_json, read_lines, writing
from simdev.problem.placement import Placement
from simdev.problem.placement_file import holds_placement, pack_placements, store_placement

POINT = ("evaluations", "seconds", "step_time_s")
CURVES, PLAN_CURVES = (*rows.KEY, *POINT), (*plan_rows.KEY, *POINT)
KEYS = {"curves.csv": rows.KEY, "plan_curves.csv": plan_rows.KEY}  # by file
SOLVERS = {"curves.csv": RESULTS.solver, "plan_curves.csv": PLANS.solver}
NUMBERS = ("seed", "batch", "budget")  # whole numbers among the columns of a plan's key; a placer's budget is text
VISIBLE = 0.002  # part of a step time below which an improvement is left out of the table of curves

SUM = re.compile(rb'(.*), "sum": "([0-9a-f]{16})"\}', re.DOTALL)  # the end of a line with a checksum
# A line holds a run of a placer ("row") or of a planner ("plan"), or a bound that its rows share. In the file of an
# interrupted verification, it says what is verified ("verification") or which row holds ("held").
ENTRIES = {
    "row": {"kind", "row", "curve"},
    "plan": {"kind", "row", "curve"},
    "bound": {"kind", "of", "ns", "method"},
    "verification": {"kind", "of"},
    "held": {"kind", "row", "skipped"},
}
SCHEMAS: dict[str, Schema] = {"row": RESULTS, "plan": PLANS}


class Journal:
    """Append-only JSON lines, each with a checksum: one per finished run, on the disk before the next one is counted.

    A last line that a crash cut short is dropped when the file is read; its run is simply executed again. A line that
    was damaged later is refused. Lines without a checksum, as older versions wrote them, are read too.
    """

    def __init__(self, path: Path):
        self.path = path
        self.entries, _ = read_journal(path) if path.is_file() else ([], False)
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

    def _cut_torn_end(self) -> None:
        if self.path.is_file():
            data = self.path.read_bytes()
            if data and not data.endswith(b"\n"):
                with open(self.path, "r+b") as file:
                    file.truncate(data.rfind(b"\n") + 1)


def read_journal(path: Path) -> tuple[list[dict], bool]:
    """The entries of a journal, and whether a crash cut its last line short. Raises :class:`InvalidInput` that names a
    damaged line."""
    entries: list[dict] = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.endswith(b"\n"):
            return entries, True
        try:
            entries.append(read_journal_line(line[:-1]))
        except (ValueError, RecursionError) as error:
            raise InvalidInput(
                f"not a journal entry ({error}); delete the line to execute its run again",
                source=path,
                field=f"line {number}",
            ) from None
    return entries, False


def read_row(entry: dict, path: Path) -> tuple[Row | PlanRow, list]:
    """The row of an entry and its curve: ``[evaluations, seconds, step_ns]`` at each improvement."""
    with _damaged(path):
        row = SCHEMAS[entry["kind"]].from_json(entry["row"], path)
        points = [[rows.within(number) for number in point] for point in entry["curve"]]
        return row, [[int(used), float(seconds), int(ns)] for used, seconds, ns in points]


def read_bound(entry: dict, path: Path) -> tuple[tuple[str, ...], int | None, str]:
    """What an entry is the bound of, the bound in ns, and its method."""
    with _damaged(path):
        ns = entry["ns"]
        return tuple(map(str, entry["of"])), None if ns is None else int(rows.within(ns)), str(entry["method"])


@contextlib.contextmanager
def _damaged(path: Path) -> Iterator[None]:
    try:
        yield
    except InvalidInput:
        raise
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise InvalidInput(f"an entry is damaged ({type(error).__name__}: {error})", source=path) from None


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
    """The journal of a folder and what it says. A folder may hold runs of placers, of planners, or both."""

    def __init__(self, out: Path):
        self.out, path = out, out / "journal.jsonl"
        with writing(path):
            self.journal = Journal(path)
        self._rows: dict[tuple, Row | PlanRow] = {}
        self._curves: dict[tuple, list] = {}
        self.bounds: dict[tuple, tuple[int | None, str]] = {}
        for entry in self.journal.entries:
            self._take(entry, path)
        self._adopt(out)

    @property
    def rows(self) -> list[Row]:
        """The runs of placers, sorted."""
        return self._sorted(Row)

    @property
    def plans(self) -> list[PlanRow]:
        """The runs of planners, sorted."""
        return self._sorted(PlanRow)

    def _sorted(self, kind: type) -> list:
        return sorted((row for row in self._rows.values() if isinstance(row, kind)), key=lambda row: row.key)

    def row(self, key: tuple) -> Row | PlanRow | None:
        """The row of a run, by key, if its placement is there too."""
        row = self._rows.get(key)
        missing = isinstance(row, Row) and row.placement and not holds_placement(self.out, row.placement)
        return None if missing else row

    def curve(self, key: tuple) -> list[tuple[int, float, int]]:
        """The anytime curve of a run, by key: ``(evaluations, seconds, step_ns)`` at each improvement."""
        return [tuple(point) for point in self._curves.get(key, [])]

    def add(self, row: Row | PlanRow, placement: Placement | None, curve: Iterable[tuple[int, float, int]]) -> None:
        """The placement first, then the row: a row never names a placement that is not there."""
        if placement is not None:
            store_placement(self.out, placement)
        self._log_row(row, [*map(list, curve)])

    def rebound(self, key: tuple, ns: int | None, method: str) -> None:
        """Give a row that is here the lower bound that is known now."""
        row = self._rows[key].with_bound(ns, method)
        if row != self._rows[key]:
            self._log_row(row, self._curves[key])

    def add_bound(self, of: tuple, ns: int | None, method: str) -> None:
        """Keep the lower bound of a problem, named by fingerprint, cost hash and rules, or of a job."""
        self._log({"kind": "bound", "of": list(of), "ns": ns, "method": method})

    def write(self) -> None:
        """Write the tables from what is known: those of placers, and those of planners, if there are any runs."""
        found, plans = self.rows, self.plans
        if found:
            rows.write_rows(self.out / RESULTS.file, found)
            score.write(self.out, found)
            self._write_curves("curves.csv", found)
        if plans:
            plan_rows.write_plan_rows(self.out, plans)
            self._write_curves("plan_curves.csv", plans)

    def pack(self) -> None:
        """Keep the placements of all rows in one file (:mod:`simdev.problem.placement_file`)."""
        pack_placements(self.out, (row.placement for row in self.rows if row.placement))

    def close(self) -> None:
        self.journal.close()

    def _write_curves(self, name: str, found: list) -> None:
        columns, solver = (*KEYS[name], *POINT), SOLVERS[name]
        table = [
            dict(zip(columns, (*row.key, used, f"{seconds:.3f}", rows.seconds_text(ns)), strict=True))
            | {solver: row.entry}
            for row in found
            for used, seconds, ns in visible(self._curves[row.key])
        ]
        rows.write_csv(self.out / name, columns, table)

    def _log_row(self, row: Row | PlanRow, curve: list) -> None:
        kind = "row" if isinstance(row, Row) else "plan"
        self._log({"kind": kind, "row": SCHEMAS[kind].to_json(row), "curve": curve})

    def _log(self, entry: dict) -> None:
        self._take(entry, self.journal.path)  # before the line is flushed: an interruption meanwhile loses no row
        self.journal.append(entry)

    def _take(self, entry: dict, path: Path) -> None:
        if entry["kind"] == "bound":
            of, ns, method = read_bound(entry, path)
            self.bounds[of] = ns, method
        else:
            row, curve = read_row(entry, path)
            self._curves[row.key], self._rows[row.key] = curve, row  # in this order: each row has its curve

    def _adopt(self, out: Path) -> None:
        """Take over the rows and curves of tables that the journal does not know: those of a shipped board."""
        known = {entry["kind"] for entry in self.journal.entries}
        for kind, name in (("row", "curves.csv"), ("plan", "plan_curves.csv")):
            table = out / SCHEMAS[kind].file
            if kind in known or not table.is_file():
                continue
            curves = read_curves(out / name) if (out / name).is_file() else {}
            for row in SCHEMAS[kind].read(table):
                self._log_row(row, [list(point) for point in curves.get(row.key, [])])


def visible(points: Sequence) -> list:
    """The points of a curve that a table keeps, of ``(evaluations, seconds, step_ns)`` at each improvement: the
    first, the last, and each that is at least :data:`VISIBLE` below the one kept before it. A picture shows no others:
    0.2 % is about a pixel. The visible points of visible points are the same points."""
    kept: list = []
    for point in points:
        if not kept or point[2] <= kept[-1][2] * (1 - VISIBLE):
            kept.append(point)
    return kept if not kept or kept[-1] == points[-1] else [*kept, points[-1]]


def read_curves(path: Path) -> dict[tuple, list[tuple[int, float, int]]]:
    """The curves of ``curves.csv`` or ``plan_curves.csv`` by the key of their row: ``(evaluations, seconds, step_ns)``
    at each improvement.

    Raises :class:`InvalidInput` naming the line of whatever is malformed.
    """
    names, solver = KEYS.get(path.name, rows.KEY), SOLVERS.get(path.name, RESULTS.solver)
    whole = {name for name in names if name in NUMBERS and (names is plan_rows.KEY or name == "seed")}
    curves: dict[tuple, list] = {}
    for line, cells in rows.read_csv(path, (*names, *POINT)):
        try:
            if cells["params"] != "{}":
                rows.check_params(cells["params"])
            cells[solver] = rows.registered_name(cells[solver], cells["params"])
            key = tuple(rows.read_whole(cells[name]) if name in whole else cells[name] for name in names)
            seconds, step_ns = rows.read_fraction(cells["seconds"]), rows.read_time(cells["step_time_s"])
            curves.setdefault(key, []).append((rows.read_whole(cells["evaluations"]), seconds, step_ns))
        except (ValueError, ArithmeticError):
            raise InvalidInput("not a number, or not parameters", source=path, field=f"line {line}") from None
    return curves
