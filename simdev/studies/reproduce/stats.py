"""Means with intervals, and how many evaluations a search needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

RESAMPLES = 10_000


def interval(values: Iterable[float], share: float = 0.95) -> tuple[float, float, float]:
    """Mean of ``values`` and the ends of its bootstrap interval (percentiles of the means of resamples; Efron 1979).

    nan three times where there are none. The resamples are always the same.
    """
    values = np.asarray(list(values), float)
    if not len(values):
        return (float("nan"),) * 3
    draws = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(axis=1), [(1 - share) / 2, (1 + share) / 2])
    return float(values.mean()), float(low), float(high)


def geometric(values: Iterable[float]) -> tuple[float, float, float]:
    """:func:`interval` of the logarithms, taken back: the geometric mean and its interval."""
    return tuple(float(np.exp(value)) for value in interval(np.log(np.asarray(list(values), float))))


def evaluations_to(points: Sequence[tuple[int, float, int]], target_ns: float) -> int | None:
    """Evaluations after which a search had a step time of at most ``target_ns``; None where it never had.

    ``points`` are ``(evaluations, seconds, step_ns)``, as in an anytime curve.
    """
    return next((used for used, _, step_ns in points if step_ns <= target_ns), None)


def best_at(points: Sequence[tuple[int, float, int]], evaluations: int) -> int | None:
    """Best step time in ns within the first ``evaluations``; None where nothing fitted."""
    return min((step_ns for used, _, step_ns in points if used <= evaluations), default=None)


def told(found: tuple[float, float, float], digits: int = 1) -> str:
    """``12.3 [11.9, 12.8]``."""
    mean, low, high = (f"{value:,.{digits}f}" for value in found)
    return "-" if mean == "nan" else f"{mean} [{low}, {high}]"
