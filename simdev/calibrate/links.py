"""Fit a link to measured transfer times: a latency and a bandwidth for each of a few ranges of sizes.

One straight line does not fit a link, because libraries change protocol and chunking with the size. :func:`fit` divides
the sizes into the ranges that explain the times best, each with its own line ``latency + bytes / rate``. The Bayesian
information criterion chooses the number of ranges. Errors are relative, so that small transfers count as much as large
ones.
"""

from __future__ import annotations

import csv
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from simdev.calibrate.manifest import held_out
from simdev.errors import InvalidInput
from simdev.files import read_zipped, table_errors

MAX_RANGES = 6
MIN_POINTS = 8  # sizes in a range
LEAST_SLOPE = 1e-6  # ns per byte; in tables in whole microseconds, the time is constant over many sizes
VIDUR = ("time_stats.{0}.median", "size", "num_workers", "devices_per_node", "collective")


@dataclass(frozen=True, eq=False)
class LinkTable:
    """Measured times of one operation on one link: ``bytes`` int64 and ``ns`` float64, both ``(n,)``, sorted by size.

    ``operation`` is ``send_recv``, ``all_reduce`` and so on. ``workers`` is the number of devices that take part, and
    ``per_node`` the number of them in one node (0 if the table does not give it). ``skipped`` is the number of lines
    that could not be read.
    """

    name: str
    operation: str
    workers: int
    per_node: int
    bytes: np.ndarray
    ns: np.ndarray
    skipped: int = 0

    @property
    def noise(self) -> float:
        """The relative noise of one time: the mean distance of a time to the mean of its two neighbours, divided by the
        square root of 1.5, the factor by which three independent errors enlarge it."""
        if len(self.ns) < 3:
            return 0.0
        return float(np.mean(np.abs(self.ns[1:-1] * 2 / (self.ns[:-2] + self.ns[2:]) - 1)) / np.sqrt(1.5))


@dataclass(frozen=True)
class LinkFit:
    """The fit of one link. ``ranges`` holds ``(from bytes, latency ns, bytes per second)``, sorted; the first begins at
    0.

    The latency of a range is the value of its line at size 0, and it may be negative. ``error`` is the mean relative
    error on the held-out sizes (NaN if there are none), ``residual`` that on the fitted sizes.
    """

    name: str
    ranges: tuple[tuple[int, float, float], ...]
    error: float = field(default=float("nan"))
    residual: float = field(default=float("nan"))

    def ns(self, size: np.ndarray) -> np.ndarray:
        """float64: the time of transfers of ``size`` bytes."""
        size = np.asarray(size)
        first, latency, rate = (np.array(column) for column in zip(*self.ranges, strict=True))
        at = np.searchsorted(first, size, side="right") - 1
        return latency[at] + size * 1e9 / rate[at]


def read_links(path: str | os.PathLike) -> list[LinkTable]:
    """Read the tables of a file: a CSV of vidur's network profiles, a CSV made from nccl-tests (vTrain), or the output
    of nccl-tests itself. Raises :class:`InvalidInput` for any other file."""
    lines = read_zipped(path).splitlines()
    name = Path(path).name.split(".")[0]
    head = lines[0].split(",") if lines else []
    if "collective" in head and "size" in head:
        with table_errors(path):
            return _vidur(lines, name, path)
    if head[:1] == ["size(B)"]:
        return [_nccl_csv(lines, name, path)]
    if any(re.match(r"#\s+size\s+count\s+type", line) for line in lines):
        return [_nccl_tests(lines, name, path)]
    raise InvalidInput("not a table of transfer times (vidur, vTrain or nccl-tests)", source=path)


def _vidur(lines: list[str], name: str, path) -> list[LinkTable]:
    groups: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
    skipped = 0
    for row in csv.DictReader(lines):
        try:
            operation = row["collective"]
            key = operation, int(row["num_workers"]), int(row["devices_per_node"])
            groups.setdefault(key, []).append((int(row["size"]), float(row[f"time_stats.{operation}.median"]) * 1e6))
        except KeyError as error:
            raise InvalidInput(f"column {error.args[0]!r} is missing", source=path) from None
        except (ValueError, TypeError):
            skipped += 1
    return [
        _table(f"{name} {workers // max(1, per_node)}x{per_node}", operation, workers, per_node, rows, skipped, path)
        for (operation, workers, per_node), rows in sorted(groups.items())
    ]


def _nccl_csv(lines: list[str], name: str, path) -> LinkTable:
    """Read vTrain's CSV: size, count, type, time (out of place), bus bandwidth, time (in place), bus bandwidth; in
    ns."""
    rows, skipped = [], 0
    for line in lines[1:]:
        cells = line.split(",")
        try:
            rows.append((int(cells[0]), float(cells[3])))
        except (ValueError, IndexError):
            skipped += 1
    return _table(name, "all_reduce", _workers(name), 0, rows, skipped, path)


def _nccl_tests(lines: list[str], name: str, path) -> LinkTable:
    """Read the output of nccl-tests: size, count, type, redop, root, time in us, and further columns."""
    rows, skipped, devices = [], 0, 0
    for line in lines:
        cells = line.split()
        devices += bool(re.match(r"#\s+Rank\s+\d+", line))
        if not cells or line.startswith("#"):
            continue
        try:
            time = next(cell for cell in cells[3:] if re.fullmatch(r"\d+\.\d+", cell))
            rows.append((int(cells[0]), float(time) * 1e3))
        except (ValueError, StopIteration):
            skipped += 1
    return _table(name, "all_reduce", devices or _workers(name), 0, rows, skipped, path)


def _workers(name: str) -> int:
    found = re.search(r"(\d+)gpu|GPU(\d+)", name)
    return int(found[1] or found[2]) if found else 0


def _table(
    name: str, operation: str, workers: int, per_node: int, rows: list[tuple[int, float]], skipped: int, path
) -> LinkTable:
    times: dict[int, list[float]] = {}
    for size, time in rows:
        if 0 < size < 1 << 62 and 0 < time < 1e13:
            times.setdefault(size, []).append(time)
        else:
            skipped += 1
    if len(times) < MIN_POINTS:
        raise InvalidInput(f"only {len(times)} sizes with a time; {MIN_POINTS} are needed", source=path, field=name)
    sizes = np.array(sorted(times), np.int64)
    ns = np.array([np.mean(times[size]) for size in sizes.tolist()])
    return LinkTable(name, operation, workers, per_node, sizes, ns, skipped)


def of_one_hop(table: LinkTable) -> LinkTable:
    """The times of one hop: a ring all-reduce of ``n`` devices sends ``2 (n - 1)`` pieces of ``1 / n`` of the bytes one
    after another (Patarasuk and Yuan 2009), an all-gather or a reduce-scatter half as many; other tables stay."""
    steps = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}.get(table.operation)
    if steps is None:
        return table
    if table.workers < 2:
        raise InvalidInput("does not say how many devices took part", source=table.name)
    pieces, hops = np.maximum(1, table.bytes // table.workers), steps * (table.workers - 1)
    kept = np.concatenate([[True], np.diff(pieces) > 0])
    return replace(table, bytes=pieces[kept], ns=table.ns[kept] / hops)


def fit_table(table: LinkTable, most: int = MAX_RANGES) -> LinkFit:
    """Fit a link to the sizes of ``table`` that are not :func:`held_out`, and compute the error on the others."""
    judged = np.array([held_out(f"{size} bytes") for size in table.bytes.tolist()])
    ranges = fit(table.bytes[~judged], table.ns[~judged], most)
    whole = LinkFit(table.name, ranges)
    relative = np.abs(whole.ns(table.bytes) / table.ns - 1)
    error = float(relative[judged].mean()) if judged.any() else float("nan")
    return LinkFit(table.name, ranges, error, float(relative[~judged].mean()))


def fit(size: np.ndarray, ns: np.ndarray, most: int = MAX_RANGES) -> tuple[tuple[int, float, float], ...]:
    """The ranges of :class:`LinkFit` for times ``ns`` ``(n,)`` of sorted sizes ``size`` ``(n,)``.

    Dynamic programming over the ends of the ranges. The weighted least squares of every run of sizes come from prefix
    sums.
    """
    size, ns = np.asarray(size, float), np.asarray(ns, float)
    cost = _line_costs(size, ns)
    n = len(size)
    best, back = cost[0].copy(), []  # best[j]: the least error of the sizes before j, in one range
    scores = [_criterion(best[n], n, 1)]
    for ranges in range(2, most + 1):
        table = best[:, None] + cost  # [i, j]: the last range is i..j
        back.append(np.argmin(table, axis=0))
        best = table[back[-1], np.arange(n + 1)]
        scores.append(_criterion(best[n], n, ranges))
        if not np.isfinite(best[n]):
            break
    count = int(np.argmin(scores)) + 1
    cuts = [n]
    for step in range(count - 2, -1, -1):
        cuts.append(int(back[step][cuts[-1]]))
    cuts = [0, *reversed(cuts)]
    found = []
    for first, last in zip(cuts[:-1], cuts[1:], strict=True):
        latency, per_byte = _line(size[first:last], ns[first:last])
        begin = 0 if first == 0 else int(round((size[first - 1] + size[first]) / 2))
        found.append((begin, latency, 1e9 / per_byte))
    return tuple(found)


def _criterion(error: float, n: int, ranges: int) -> float:
    """The Bayesian information criterion. A range has three parameters: latency, rate and border."""
    return n * np.log(max(error, 1e-12) / n) + 3 * ranges * np.log(n) if np.isfinite(error) else np.inf


def _line_costs(size: np.ndarray, ns: np.ndarray) -> np.ndarray:
    """float64 ``(n + 1, n + 1)``: the squared relative error of the best line through the sizes ``i..j``; inf for fewer
    than :data:`MIN_POINTS` sizes."""
    n, weight = len(size), 1 / ns
    x, w, y = size * weight, weight, np.ones(n)  # divided by the time, so that residuals are relative
    sums = [np.concatenate([[0], np.cumsum(product)]) for product in (x * x, x * w, w * w, x * y, w * y, y * y)]
    xx, xw, ww, xy, wy, yy = (total[None, :] - total[:, None] for total in sums)
    determinant = xx * ww - xw * xw
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = (xy * ww - wy * xw) / determinant
        latency = (wy * xx - xy * xw) / determinant
        cost = yy - slope * xy - latency * wy
    few = np.arange(n + 1)[None, :] - np.arange(n + 1)[:, None] < MIN_POINTS
    return np.where(few | ~np.isfinite(cost) | (slope < 0), np.inf, np.maximum(cost, 0))


def _line(size: np.ndarray, ns: np.ndarray) -> tuple[float, float]:
    """The latency and the ns per byte of the line with the least relative error."""
    rows = np.stack([1 / ns, size / ns], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(rows, np.ones(len(ns)), rcond=None)
    if per_byte < LEAST_SLOPE:
        per_byte = LEAST_SLOPE
        latency = np.sum((ns - size * per_byte) / ns**2) / np.sum(1 / ns**2)
    return float(latency), float(per_byte)


def ranges_toml(link: LinkFit, hops: int = 1) -> str:
    """The ``ranges`` of a link in a topology file. A route over ``hops`` such links has the fitted latency, so each
    link has an equal part of it."""
    rows = [
        f"{{ from_bytes = {begin}, latency_us = {latency / hops / 1e3:.3f}, gb_per_s = {rate / 1e9:.2f} }}"
        for begin, latency, rate in link.ranges
    ]
    return "ranges = [\n    " + ",\n    ".join(rows) + ",\n]"
