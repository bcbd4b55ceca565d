"""What verification finds, and how rows are checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from simdev.bench.matrix import time_limit
from simdev.bench.workers import Limits
from simdev.errors import shortened

LIMITS = Limits(seconds=300, memory_bytes=6 << 30)  # of one row; the largest shipped graphs need 10 s and 1 GiB
PLAN_LIMITS = Limits(seconds=1800, memory_bytes=16 << 30)  # of one row of a planner, which may capture a model


@dataclass(frozen=True)
class Difference:
    """A cell whose stored and recomputed values differ. ``column`` is empty if the whole row, or a file, is at
    fault."""

    row: str
    column: str
    stored: str
    found: str

    def __str__(self) -> str:
        stored, found = shortened(self.stored, 100), shortened(self.found, 500 if not self.column else 100)
        if not self.column:
            return f"{self.row}: {found}"
        return f"{self.row}: {self.column}: {stored or 'empty'}, recomputed {found or 'empty'}"


@dataclass(frozen=True)
class Check:
    """How rows are checked. ``named`` are the placers, planners and models of the user's own files that may be
    executed; ``foreign`` marks a submission; ``limits`` replaces the usual limits of a row."""

    engine: str
    rerun: bool
    named: frozenset[str]
    foreign: bool
    limits: Limits | None = None

    def of(self, row: Any) -> Limits:
        """The limits of a row. A rerun adds the time limit of the row's budget; only budgets of evaluations are run
        again."""
        limits = self.limits or (LIMITS if hasattr(row, "placer") else PLAN_LIMITS)
        if not self.rerun:
            return limits
        budget = row.budget if isinstance(row.budget, str) else f"evaluations={row.budget}"
        more = time_limit(budget) if budget.startswith("evaluations=") else 0
        return Limits(limits.seconds + more, limits.memory_bytes)


def compare(title: str, stored: dict[str, str], fresh: dict[str, str], columns: tuple[str, ...]) -> list[Difference]:
    """The cells of two rows that differ."""
    return [Difference(title, name, stored[name], fresh[name]) for name in columns if stored[name] != fresh[name]]
