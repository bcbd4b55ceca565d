"""Progress of long commands: a live bar on a terminal, elsewhere a plain line for each finished run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from simdev.bench.bench import Observer
from simdev.bench.rows import Row
from simdev.cli.pace import Pace, left
from simdev.report.summary import cell


@contextlib.contextmanager
def observer(total: int) -> Iterator[Observer]:
    """What the bench reports to."""
    if not sys.stderr.isatty():
        yield _Plain()
        return
    with _bar() as bar:
        yield _Live(bar, bar.add_task("starting", total=total, now="", left=""))


@contextlib.contextmanager
def counter(what: str) -> Iterator[Callable]:
    """A callback ``(done, total, title, differences)`` for rows that are checked one by one."""
    with steps(what) as tell:
        yield lambda done, total, title, wrong: tell(done, total, f"{title}: {'differs' if wrong else 'holds'}")


@contextlib.contextmanager
def steps(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """A callback ``(done, total, title)`` for steps that take about as long as each other, with the time left."""
    pace = Pace()
    if not sys.stderr.isatty():
        yield lambda done, total, title: print(
            f"[{done}/{total}] {title}{pace.left(done, total)}", file=sys.stderr, flush=True
        )
        return
    with _bar() as bar:
        task = bar.add_task(what, total=None, now="", left="")
        yield lambda done, total, title: bar.update(
            task, completed=done, total=total, now=title, left=pace.left(done, total).lstrip(", ")
        )


class _Plain(Observer):
    def __init__(self):
        self.left_s = None

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def tick(self, done: int, total: int, running: list[str], left_s: float | None = None) -> None:
        self.left_s = left_s

    def row(self, done: int, total: int, row: Row) -> None:
        rest = left(self.left_s) if done < total else ""
        line = f"[{done}/{total}] {row.workload} {row.topology} {row.entry}: {cell(row)}{rest and ', ' + rest}"
        print(line, file=sys.stderr, flush=True)


class _Live(Observer):
    """The bar, with a line above it for each finished run."""

    def __init__(self, bar, task):
        self.bar, self.task, self.best = bar, task, {}

    def note(self, text: str) -> None:
        self.bar.console.print(text, markup=False, highlight=False)

    def tick(self, done: int, total: int, running: list[str], left_s: float | None = None) -> None:
        what = ", ".join(running[:2])
        self.bar.update(self.task, description="bench", completed=done, total=total, now=what, left=left(left_s))

    def row(self, done: int, total: int, row: Row) -> None:
        why = f": {row.error}" if row.status not in ("ok", "skipped") else ""
        line = f"{row.workload} {row.topology} {row.entry}: {cell(row)}{why}{self._record(row)}"
        self.bar.console.print(line, markup=False, highlight=False)

    def _record(self, row: Row) -> str:
        """Whether the row is the best so far on its workload and topology."""
        instance = row.workload, row.topology
        if row.step_ns is None or row.step_ns >= self.best.get(instance, 1 << 62):
            return ""
        self.best[instance] = row.step_ns
        return ", best so far"


def _bar():
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}", markup=False),
        TextColumn("{task.fields[now]}", markup=False),
        console=Console(stderr=True),
    )
