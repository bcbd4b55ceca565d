"""How long a bench will still take, estimated from the runs that are finished."""

from __future__ import annotations

from simdev.bench.plan import Run
from simdev.bench.rows import Row
from simdev.bench.workers import Limits
from simdev.placers import registry

OVERHEAD_S = 0.5  # to start a process, load the problem and simulate the result


class Estimate:
    """Expects of a run what the finished runs of its placer took per op; of a placer without any, the mean of its kind
    (learned, searching, other). As long as a kind has no finished run, there is no estimate."""

    def __init__(self, limits: Limits):
        self._limit = limits.seconds
        self._expected: dict[str, tuple[str, int]] = {}  # by title: the placer's entry and the ops
        self._seen: dict[str, list[float]] = {}  # by entry: seconds per op of each finished run
        self._kinds: dict[str, tuple[bool, bool]] = {}

    def expect(self, run: Run, n_ops: int) -> None:
        """A run that is still to be done."""
        spec, _ = registry.find_placer(run.entry)
        self._kinds[run.entry] = spec.learner is not None, spec.searches
        self._expected[str(run)] = run.entry, n_ops

    def forget(self, run: Run) -> None:
        """A run that will not be done."""
        self._expected.pop(str(run), None)

    def learn(self, run: Run, row: Row) -> None:
        """A run that is done."""
        entry, n_ops = self._expected.pop(str(run))
        seconds = self._limit if row.status == "timeout" else row.place_seconds or 0.0
        self._seen.setdefault(entry, []).append(seconds / n_ops)

    def seconds_left(self, jobs: int, running: set[str]) -> float | None:
        """Estimated seconds until all runs are done, ``jobs`` at a time; a running one counts half. None: unknown."""
        total = 0.0
        for title, (entry, n_ops) in self._expected.items():
            rate = self._rate(entry)
            if rate is None:
                return None
            total += (OVERHEAD_S + min(rate * n_ops, self._limit)) * (0.5 if title in running else 1.0)
        return total / jobs

    def _rate(self, entry: str) -> float | None:
        rates = self._seen.get(entry) or [
            rate for other, seen in self._seen.items() if self._kinds[other] == self._kinds[entry] for rate in seen
        ]
        return sum(rates) / len(rates) if rates else None
