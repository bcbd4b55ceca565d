"""Measured kernels: the common result of all readers of tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from simdev.problem.opcost.parts import KernelPart


@dataclass
class Observations:
    """Measured times of parts of one class on one device, in the order of the file.

    ``dims`` int64 ``(n, dimensions)`` has the dimensions that :mod:`simdev.problem.opcost.parts` lists. ``seconds`` is
    float64 ``(n,)``. If ``host_floor`` is true, timers were around single calls, so that the readings contain the issue
    time of the host and the cost of an event.
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
        """The key of each row, which decides whether it is held out: :attr:`simdev.problem.opcost.parts.Part.key`."""
        return [KernelPart(self.name, tuple(row), self.dtype).key for row in self.dims.tolist()]

    def where(self, mask: np.ndarray) -> Observations:
        rows = self.dims[mask], self.seconds[mask]
        return Observations(self.device, self.name, self.dtype, *rows, self.source, self.host_floor, self.file)


@dataclass
class Found:
    """The content of a set of files: tables of observations, and counts of the rows and files that could not be
    used."""

    tables: list[Observations] = field(default_factory=list)
    problems: Counter = field(default_factory=Counter)
    dispatch: dict[str, dict[str, float]] = field(default_factory=dict)  # device: {op kind: ns}
    granularity: dict[str, int] = field(default_factory=dict)  # device: bytes

    def report(self) -> list[str]:
        return [f"{reason}: {count}" for reason, count in sorted(self.problems.items())]
