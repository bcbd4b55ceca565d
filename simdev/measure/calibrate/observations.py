"""Measured kernels: what each reader of tables gives, whatever the file's kind."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from simdev.problem.opcost.parts import Part


@dataclass
class Observations:
    """Times of parts of one class on one device, in a reader's order.

    ``dims`` int64 ``(n, dimensions)`` as :mod:`simdev.problem.opcost.parts` lists them; ``seconds`` float64 ``(n,)``.
    ``host_floor``: the readings contain the host's issue time and an event's cost (timers around single calls).
    """

    device: str
    name: str
    dtype: str
    dims: np.ndarray
    seconds: np.ndarray
    source: str
    host_floor: bool = False
    file: str = ""

    def keys(self) -> list[str]:
        """The part keys by which rows are split: see :attr:`simdev.problem.opcost.parts.Part.key`."""
        return [Part(self.name, tuple(row), self.dtype).key for row in self.dims.tolist()]

    def where(self, mask: np.ndarray) -> Observations:
        rows = self.dims[mask], self.seconds[mask]
        return Observations(self.device, self.name, self.dtype, *rows, self.source, self.host_floor, self.file)


@dataclass
class Found:
    """What was read from a set of files: tables of observations, and a count of what could not be used."""

    tables: list[Observations] = field(default_factory=list)
    problems: Counter = field(default_factory=Counter)
    dispatch: dict[str, dict[str, float]] = field(default_factory=dict)  # device: {op kind: ns}
    granularity: dict[str, int] = field(default_factory=dict)  # device: bytes

    def report(self) -> list[str]:
        return [f"{reason}: {count}" for reason, count in sorted(self.problems.items())]
