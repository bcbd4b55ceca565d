"""Sums of regression trees as plain whole-number arrays, evaluated exactly alike on every machine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simdev.errors import InvalidInput

UNIT = 1 << 12  # leaf values are counted in 1 / 4096 of a factor of two
CELLS = 1 << 18  # (row, tree) pairs walked at once
# 2 ** x on [0, 1) by its Taylor series: (ln 2)**n / n!
_TAYLOR = (
    1.0,
    0.6931471805599453,
    0.24022650695910072,
    0.05550410866482158,
    0.009618129107628477,
    0.0013333558146428443,
    0.00015403530393381608,
    1.5252733804059841e-05,
    1.321548679014431e-06,
    1.0178086009239699e-07,
    7.054911620801123e-09,
)


@dataclass(frozen=True, eq=False)
class Trees:
    """Nodes of all trees in one row: ``feature`` uint8, ``threshold`` float32 (left if value <= threshold), ``left``
    int32 (number of the left child, the right one follows it; -1 at a leaf), ``value`` int16 (leaves, see
    :data:`UNIT`), ``roots`` int32, one per tree."""

    feature: np.ndarray
    threshold: np.ndarray
    left: np.ndarray
    value: np.ndarray
    roots: np.ndarray

    def factor(self, rows: np.ndarray) -> np.ndarray:
        """float64 ``(n,)``: two to the sum of the leaves that each row of ``rows`` ``(n, features)`` falls into."""
        total = np.zeros(len(rows), np.int64)
        step = max(1, CELLS // max(len(self.roots), 1))
        for start in range(0, len(rows) if len(self.roots) else 0, step):
            total[start : start + step] = self._sums(rows[start : start + step])
        return power_of_two(total)

    def _sums(self, rows: np.ndarray) -> np.ndarray:
        """All rows walk all trees at once."""
        number = np.arange(len(rows))[:, None]
        node = np.repeat(self.roots[None, :], len(rows), axis=0)
        while True:
            child = self.left[node]
            inner = child >= 0
            if not inner.any():
                return self.value[node].sum(axis=1, dtype=np.int64)
            right = rows[number, self.feature[node]] > self.threshold[node]
            node = np.where(inner, child + right, node)


def power_of_two(units: np.ndarray) -> np.ndarray:
    """``2 ** (x / UNIT)`` for whole numbers ``x``, by multiplications and additions alone."""
    whole, rest = np.divmod(np.asarray(units, np.int64), UNIT)
    x = rest / UNIT
    series = np.zeros(x.shape)
    for coefficient in reversed(_TAYLOR):
        series = series * x + coefficient
    return np.ldexp(series, whole.astype(np.int32))


def arrays_of(trees: Trees, name: str) -> dict[str, np.ndarray]:
    """The arrays to store under ``name`` (whole numbers: thresholds by their bits)."""
    return {
        f"{name}.feature": trees.feature,
        f"{name}.threshold": trees.threshold.view(np.int32),
        f"{name}.left": trees.left,
        f"{name}.value": trees.value,
        f"{name}.roots": trees.roots,
    }


def trees_from(arrays: dict[str, np.ndarray], name: str, n_features: int, source: object) -> Trees:
    """Read what :func:`arrays_of` made. Raises :class:`InvalidInput` where it does not describe trees."""
    try:
        columns = [arrays[f"{name}.{field}"] for field in ("feature", "threshold", "left", "value", "roots")]
    except KeyError as error:
        raise InvalidInput("missing", source=source, field=str(error.args[0])) from None
    feature, threshold, left, value, roots = columns
    trees = Trees(
        feature.astype(np.uint8),
        threshold.astype(np.int32).view(np.float32),
        left.astype(np.int32),
        value.astype(np.int16),
        roots.astype(np.int32),
    )
    nodes = len(feature)
    inner = left >= 0
    forward = np.all(left[inner] > np.flatnonzero(inner)) and np.all(left[inner] + 1 < nodes)
    if not (
        len(threshold) == len(left) == len(value) == nodes
        and forward
        and np.all(feature[inner] < n_features)
        and np.all((roots >= 0) & (roots < max(nodes, 1)))
    ):
        raise InvalidInput("does not describe trees", source=source, field=name)
    return trees
