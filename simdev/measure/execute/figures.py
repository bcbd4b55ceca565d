"""Computes how well a simulator predicts measured placements, from the rows of a comparison. Nothing is run here."""

from __future__ import annotations

import numpy as np

CALM = 0.05  # largest share of the cores' time that other processes may take during an undisturbed run


def over_rounds(rows: list[dict]) -> list[dict]:
    """Merge the rounds of each placement into one row.

    The row is that of the round with the (lower) median time. It gets the samples of all rounds, and ``rounds_ns``, the
    median of each round. Disturbed rounds are left out if the placement has an undisturbed one.
    """
    found: dict[str, list[dict]] = {}
    for row in rows:
        found.setdefault(row["placement"], []).append(row)
    merged = []
    for group in found.values():
        calm = [row for row in group if row.get("disturbed", 0.0) <= CALM]
        used = sorted(calm or group, key=lambda row: row.get("round", 0))
        middle = sorted(used, key=lambda row: row["measured_ns"])[(len(used) - 1) // 2]
        merged.append(
            {
                **middle,
                "samples_ns": sum((row["samples_ns"] for row in used), []),
                "rounds_ns": [row["measured_ns"] for row in used],
            }
        )
    return merged


def figures(rows: list[dict], predictor: str = "simulated_ns") -> dict:
    """How well ``predictor`` predicts ``measured_ns``, as a dictionary.

    Step time:

    * ``error`` is the mean of the absolute relative error, ``worst`` its maximum, ``bias`` the mean with its sign.
    * ``tau`` is Kendall's tau-b. ``pairs`` is the share of pairs in the right order, among pairs whose measured times
      differ by more than 5 %.
    * ``regret`` is how much slower, as measured, the placement predicted to be fastest is than the fastest one.
    * ``tau_p10`` is the tau with the 10th percentile of the repeats, which other processes disturb less.
    * ``tau_noise`` is the tau between the medians of the even and the odd rounds (or repeats, if there is one round).
      It is the agreement of the measurement with itself.
    * ``noise`` is the mean over placements of (p90 - p10) / median of the repeats.

    Memory: ``peak_error`` is the mean relative error of the largest peak. Each measured peak also serves as a capacity:
    ``missed`` is the share of cases that are predicted to fit with a margin of 5 % and do not fit, and
    ``false_alarms`` the share that are predicted not to fit and do.
    """
    from scipy.stats import kendalltau

    measured = np.array([row["measured_ns"] for row in rows], float)
    predicted = np.array([row[predictor] for row in rows], float)
    error = predicted / measured - 1
    a, b = np.triu_indices(len(rows), 1)
    apart = np.maximum(measured[a], measured[b]) > 1.05 * np.minimum(measured[a], measured[b])
    right = (measured[a] < measured[b]) == (predicted[a] < predicted[b])
    noise = [np.subtract(*np.percentile(row["samples_ns"], [90, 10])) / row["measured_ns"] for row in rows]
    halves = [[_half(row, half) for row in rows] for half in (0, 1)]
    peak = np.array([max(row["peak_bytes"]) for row in rows], float)
    predicted_peak = np.array([max(row["simulated_peak_bytes"]) for row in rows], float)
    fits, predicted_fit = peak[:, None] <= peak[None], 1.05 * predicted_peak[:, None] <= peak[None]
    return {
        "placements": len(rows),
        "error": float(np.abs(error).mean()),
        "worst": float(np.abs(error).max()),
        "bias": float(error.mean()),
        "tau": float(kendalltau(measured, predicted).statistic),
        "tau_p10": float(kendalltau([np.percentile(row["samples_ns"], 10) for row in rows], predicted).statistic),
        "tau_noise": float(kendalltau(*halves).statistic),
        "pairs": float(right[apart].mean()) if apart.any() else 1.0,
        "regret": float(measured[np.argmin(predicted)] / measured.min() - 1),
        "noise": float(np.mean(noise)),
        "peak_error": float(np.abs(predicted_peak / peak - 1).mean()),
        "missed": float((predicted_fit & ~fits).mean()),
        "false_alarms": float((~predicted_fit & fits).mean()),
    }


def _half(row: dict, half: int) -> float:
    rounds = row.get("rounds_ns", ())
    return float(np.median((rounds if len(rounds) > 1 else row["samples_ns"])[half::2]))


def error_parts(rows: list[dict]) -> dict[str, float]:
    """The parts of the signed error of ``simulated_ns``, as mean shares of the measured step; they add up to the bias.

    * ``ops``: ops took longer or shorter than alone on one device (busy neighbours, tensors in another core's cache,
      noise).
    * ``channel``: transfers took longer or shorter than alpha + bytes / beta.
    * ``copies``: the sender's core makes the copies.
    * ``dispatch``: the time between ops that their costs do not include.
    * ``rest``: everything else, such as wake-up times and another order.
    """
    names = ("simulated_ns", "ops_ns", "channel_ns", "copies_ns", "gaps_ns", "measured_ns")
    stages = [np.array([row[name] for row in rows], float) for name in names]
    parts = ("ops", "channel", "copies", "dispatch", "rest")
    return {
        part: float(((before - after) / stages[-1]).mean())
        for part, before, after in zip(parts, stages[:-1], stages[1:], strict=True)
    }
