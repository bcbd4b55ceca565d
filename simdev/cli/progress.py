"""Progress of long commands: a live bar on a terminal, a plain line for each finished run elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from simdev.bench.rows import Row
from simdev.bench.run import Observer
from simdev.report.summary import cell


@contextlib.contextmanager
def observer(total: int) -> Iterator[Observer]:
    """What the bench reports to."""
    if not sys.stderr.isatty():
        yield _Plain()
        return
    with _bar() as bar:
        yield _Live(bar, bar.add_task("starting", total=total, now="", best=""))


@contextlib.contextmanager
def counter(what: str) -> Iterator[Callable]:
    """A callback ``(done, total, title, differences)`` for rows that are checked one by one."""
    if not sys.stderr.isatty():
        yield lambda done, total, title, wrong: print(
            f"[{done}/{total}] {title}: {'differs' if wrong else 'holds'}", file=sys.stderr
        )
        return
    with _bar() as bar:
        task = bar.add_task(what, total=None, now="", best="")
        yield lambda done, total, title, wrong: bar.update(task, completed=done, total=total, now=title)


class _Plain(Observer):
    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def row(self, done: int, total: int, row: Row) -> None:
        print(f"[{done}/{total}] {row.workload} {row.topology} {row.entry}: {cell(row)}", file=sys.stderr, flush=True)


class _Live(Observer):
    def __init__(self, bar, task):
        self.bar, self.task, self.best = bar, task, {}

    def note(self, text: str) -> None:
        self.bar.update(self.task, now=text)

    def tick(self, done: int, total: int, running: list[str]) -> None:
        self.bar.update(self.task, description="bench", completed=done, total=total, now=", ".join(running[:2]))

    def row(self, done: int, total: int, row: Row) -> None:
        instance = row.workload, row.topology
        if row.step_ns is not None and row.step_ns < self.best.get(instance, (1 << 62, ""))[0]:
            self.best[instance] = row.step_ns, row.entry
            self.bar.update(self.task, best=f"best on {row.workload}: {row.step_ns / 1e6:.1f} ms ({row.entry})")
        if row.status not in ("ok", "skipped"):
            self.bar.console.print(
                f"{row.workload} {row.topology} {row.entry}: {row.status}: {row.error}", markup=False
            )


def _bar():
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[now]}", markup=False), TextColumn("{task.fields[best]}", markup=False),
        console=Console(stderr=True),
    )  # fmt: skip
