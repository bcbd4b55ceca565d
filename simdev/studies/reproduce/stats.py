"""Means with confidence intervals, and the number of evaluations that a search needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

RESAMPLES = 10_000


def interval(values: Iterable[float], share: float = 0.95) -> tuple[float, float, float]:
    """The mean of ``values``, and the lower and upper end of its bootstrap interval.

    The ends are percentiles of the means of resamples (Efron 1979), which are the same in every call. All three are nan
    if there are no values.
    """
    values = np.asarray(list(values), float)
    if not len(values):
        return (float("nan"),) * 3
    draws = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(axis=1), [(1 - share) / 2, (1 + share) / 2])
    return float(values.mean()), float(low), float(high)


def geometric(values: Iterable[float]) -> tuple[float, float, float]:
    """The geometric mean and its interval: the exponentials of :func:`interval` of the logarithms."""
    mean, low, high = interval(np.log(np.asarray(list(values), float)))
    return float(np.exp(mean)), float(np.exp(low)), float(np.exp(high))


def evaluations_to(points: Sequence[tuple[int, float, int]], target_ns: float) -> int | None:
    """Number of evaluations after which a search reached ``target_ns``; None if it never did.

    ``points`` are ``(evaluations, seconds, step_ns)``, as in a curve.
    """
    return next((used for used, _, step_ns in points if step_ns <= target_ns), None)


def best_at(points: Sequence[tuple[int, float, int]], evaluations: int) -> int | None:
    """Best step time in ns within the first ``evaluations``; None if no placement fitted by then."""
    return min((step_ns for used, _, step_ns in points if used <= evaluations), default=None)


def interval_text(mean_low_high: tuple[float, float, float], digits: int = 1) -> str:
    """A mean with its interval as text: ``12.3 [11.9, 12.8]``, or ``-`` without a mean."""
    mean, low, high = (f"{value:,.{digits}f}" for value in mean_low_high)
    return "-" if mean == "nan" else f"{mean} [{low}, {high}]"
