"""How long a bench will still take, estimated from the runs that are finished and from those that are running."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

from simdev.bench.rows import Row
from simdev.bench.workers import Limits

OVERHEAD_S = 0.5  # to start a process, load the problem and simulate the result


class TimeLeft:
    """Expects of a run what the runs of its solver (placer or planner) took: half of that whatever the graph, half of
    it per op, since a compiler or a time limit costs small graphs as much as large ones.

    A solver that has no finished run counts like the slowest one of its kind (learned, searching, other), because
    quick placers finish first. A running run that has taken longer than expected counts as if it were halfway. As long
    as nothing is known about a kind, there is no estimate.
    """

    def __init__(self, limits: Limits):
        self._limit = limits.seconds
        self._expected: dict[Any, tuple[str, str, int]] = {}  # by run: its title, the solver's entry, and the ops
        self._seen: dict[str, list[tuple[float, float]]] = {}  # by entry: seconds of each finished run, and per op
        self._kinds: dict[str, tuple[bool, bool]] = {}

    def expect(self, run: Any, n_ops: int, kind: tuple[bool, bool]) -> None:
        """A run that is still to be done. ``kind`` says whether its solver learns, and whether it searches."""
        self._kinds[run.entry] = kind
        self._expected[run] = str(run), run.entry, n_ops

    def forget(self, run: Any) -> None:
        """A run that will not be done."""
        self._expected.pop(run, None)

    def learn(self, run: Any, row: Row) -> None:
        """A run that is done."""
        _, entry, n_ops = self._expected.pop(run)
        seconds = self._limit if row.status == "timeout" else row.place_seconds or 0.0
        self._seen.setdefault(entry, []).append((seconds, seconds / n_ops))

    def seconds_left(self, jobs: int, running: Mapping[str, float]) -> float | None:
        """Estimated seconds until all runs are done, ``jobs`` at a time; None if unknown. ``running`` has the seconds
        since the start of each running run."""
        known = {entry: _mean(seen) for entry, seen in self._seen.items()}
        titles = {title: (entry, n_ops) for title, entry, n_ops in self._expected.values()}
        for title, elapsed in running.items():
            entry, n_ops = titles.get(title, ("", 1))
            if entry and elapsed > _seconds(known.get(entry, (0.0, 0.0)), n_ops):
                known[entry] = 2 * elapsed, 2 * elapsed / n_ops
        slowest: dict[tuple[bool, bool], tuple[float, float]] = {}
        for entry, found in known.items():
            slowest[self._kinds[entry]] = max(found, slowest.get(self._kinds[entry], found))
        total = longest = 0.0
        for title, entry, n_ops in self._expected.values():
            found = known.get(entry) or slowest.get(self._kinds[entry])
            if found is None:
                return None
            seconds = OVERHEAD_S + min(_seconds(found, n_ops), self._limit)
            seconds = max(0.0, seconds - running.get(title, 0.0))
            total, longest = total + seconds, max(longest, seconds)
        return max(total / jobs, longest)


def _mean(seen: list[tuple[float, float]]) -> tuple[float, float]:
    return mean(seconds for seconds, _ in seen), mean(rate for _, rate in seen)


def _seconds(known: tuple[float, float], n_ops: int) -> float:
    seconds, rate = known
    return (seconds + rate * n_ops) / 2
