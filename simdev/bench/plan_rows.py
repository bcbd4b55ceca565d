"""Rows of the board of planners: one for each model, cluster, batch, planner and seed, in ``plans.csv``.

Exact columns are the same on every machine with the same version of PyTorch (whose parallel libraries the programs are
captured from) and are compared on verification; the others say where and when a row was made. Times are whole
nanoseconds in the row and seconds with nine digits in the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from simdev.bench.rows import read_csv, read_value, seconds_text, why_unreadable
from simdev.errors import InvalidInput, quoted
from simdev.files import markdown_table, parse_json, write_table, write_text
from simdev.planners.job import Choice, choice_from

FILE = "plans.csv"
KEY = ("model", "cluster", "batch", "framework", "choices", "planner", "params", "budget", "seed")
TIMES = {"step_time_s": "step_ns", "bound_s": "bound_ns"}
STATUSES = ("ok", "skipped", "error")


@dataclass(frozen=True)
class PlanRow:
    """One run of a planner. ``choices`` (JSON) holds the microbatch sizes and kinds of recomputation that planners
    could choose, ``plan`` (JSON) is what the planner chose, ``program`` the digest of its captured stages.
    ``bound_ns`` is a step time that no plan with one mesh for all stages beats; or that no plan at all beats, if the
    row's own plan has several. ``None`` is an empty cell."""

    model: str
    cluster: str
    batch: int
    framework: str
    choices: str
    planner: str
    version: int
    params: str
    budget: int
    seed: int
    status: str
    error: str = ""
    plan: str = ""
    step_ns: int | None = None
    bound_ns: int | None = None
    peak_bytes: int | None = None
    evaluations: int | None = None
    program: str = ""
    plan_seconds: float | None = None
    torch: str = ""
    commit: str = ""
    utc: str = ""

    @property
    def key(self) -> tuple:
        return tuple(getattr(self, name) for name in KEY)

    @property
    def choice(self) -> Choice:
        """What the planner chose. Raises :class:`InvalidInput`."""
        found = parse_json(self.plan, FILE, "plan")
        if not isinstance(found, dict):
            raise InvalidInput("expected an object", source=FILE, field="plan")
        return choice_from(found)

    @property
    def bounded(self) -> str:
        """Which plans the row's bound holds for: plans with ..."""
        return "" if not self.bound_ns else "any meshes" if self.choice.stage_meshes else "one mesh"

    @property
    def title(self) -> str:
        return f"{self.model} on {self.cluster}: {self.planner}"


CIRCUMSTANTIAL = ("plan_seconds", "torch", "commit", "utc")
EXACT = tuple(field.name for field in fields(PlanRow) if field.name not in CIRCUMSTANTIAL)
_COLUMN = {field: column for column, field in TIMES.items()}
COLUMNS = (*(_COLUMN.get(name, name) for name in EXACT), "digest", *CIRCUMSTANTIAL)


def cells(row: PlanRow) -> dict[str, str]:
    """The row as text, by column."""
    found = {}
    for name in (*EXACT, *CIRCUMSTANTIAL):
        value = getattr(row, name)
        found[_COLUMN.get(name, name)] = seconds_text(value) if name in _COLUMN else "" if value is None else str(value)
    return found


def digest(text: dict[str, str]) -> str:
    """SHA-256 (hex, 16 characters) of the exact columns."""
    exact = [text[_COLUMN.get(name, name)] for name in EXACT]
    return hashlib.sha256(json.dumps(exact).encode()).hexdigest()[:16]


def write_plan_rows(folder: Path, rows: Iterable[PlanRow]) -> None:
    """Write ``plans.csv`` and ``plans.md``, each in one step."""
    rows = sorted(rows, key=lambda row: row.key)
    table = [{**(text := cells(row)), "digest": digest(text)} for row in rows]
    folder.mkdir(parents=True, exist_ok=True)
    write_table(folder / FILE, list(COLUMNS), [[line[column] for column in COLUMNS] for line in table])
    write_text(folder / "plans.md", "\n".join([*markdown(rows), ""]))


def read_plan_rows(folder: Path, check_digest: bool = True) -> list[PlanRow]:
    """Read ``plans.csv``. Raises :class:`InvalidInput` that names line and column of a malformed cell."""
    path = folder / FILE
    rows = []
    for number, line in read_csv(path, COLUMNS):
        row = PlanRow(**{field.name: _parse(line, field, path, number) for field in fields(PlanRow)})
        if row.status not in STATUSES:
            raise InvalidInput(f"unknown status {quoted(row.status)}", source=path, field=f"line {number}")
        if check_digest and digest(cells(row)) != line["digest"]:
            raise InvalidInput("the digest does not fit the row", source=path, field=f"line {number}")
        rows.append(row)
    return rows


def _parse(line: dict, field, path: Path, number: int):
    text = line[_COLUMN.get(field.name, field.name)]
    try:
        return read_value(str(field.type), text, is_time=field.name in _COLUMN)
    except (ValueError, ArithmeticError) as error:
        reason = why_unreadable(error, text)
        raise InvalidInput(reason, source=path, field=f"line {number}, {field.name}") from None


def markdown(rows: list[PlanRow]) -> list[str]:
    """A table for each model, cluster and batch, the best plan first."""
    lines = ["# Parallel plans", ""]
    instances: dict[tuple[str, str, int], list[PlanRow]] = {}
    for row in rows:
        instances.setdefault((row.model, row.cluster, row.batch), []).append(row)
    for (model, cluster, batch), mine in instances.items():
        mine.sort(key=lambda row: (row.step_ns is None, row.step_ns or 0, row.planner))
        lines += [f"## {model} on {cluster}, {batch} sequences", ""]
        table = []
        for row in mine:
            if row.step_ns is None:
                table.append([row.planner, row.error or row.status, "", "", "", "", ""])
                continue
            gap = f"{row.step_ns / row.bound_ns - 1:.1%}" if row.bound_ns else ""
            peak = "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.1f}"
            figures = f"{row.step_ns / 1e9:.3f}", gap, row.bounded, peak, str(row.evaluations)
            table.append([row.planner, str(row.choice), *figures])
        header = ["planner", "plan", "step s", "above the bound", "of plans with", "peak GiB", "plans tried"]
        lines += [*markdown_table(header, table), ""]
    return lines
