"""What measured placements say about a simulator, from the rows of a comparison alone: nothing is run here."""

from __future__ import annotations

import numpy as np

CALM = 0.05  # share of the cores' time that others may take while a placement is run


def over_rounds(rows: list[dict]) -> list[dict]:
    """One row per placement: that of its round of median length (of two the shorter), with the samples of its rounds,
    and in ``rounds_ns`` the median of each. Rounds that others disturbed are left out where there is a calm one."""
    found: dict[str, list[dict]] = {}
    for row in rows:
        found.setdefault(row["placement"], []).append(row)
    merged = []
    for group in found.values():
        calm = [row for row in group if row.get("disturbed", 0.0) <= CALM]
        used = sorted(calm or group, key=lambda row: row.get("round", 0))
        middle = sorted(used, key=lambda row: row["measured_ns"])[(len(used) - 1) // 2]
        merged.append({**middle, "samples_ns": sum((row["samples_ns"] for row in used), []),
                       "rounds_ns": [row["measured_ns"] for row in used]})  # fmt: skip
    return merged


def figures(rows: list[dict], predictor: str = "simulated_ns") -> dict:
    """How well ``predictor`` tells ``measured_ns``.

    ``error``: mean of \\|predicted / measured - 1\\|, ``worst`` its maximum, ``bias`` the mean with sign; ``tau``:
    Kendall's, ties counted (tau-b); ``pairs``: share of the pairs whose measured times are over 5 % apart that are
    ordered right; ``regret``: measured time of the placement predicted to be fastest over the fastest measured, less 1;
    ``tau_p10`` is the tau with the 10th percentile of the repeats, which other work on the machine disturbs less, and
    ``tau_noise`` that between the medians of the even and of the odd rounds (of one round: repeats): what noise
    leaves of it. ``noise``: mean over placements of (p90 - p10) / median of the repeats. Memory: ``peak_error`` mean
    relative error of the largest peak, and over capacities at each measured peak ``missed`` (predicted with 5 % in hand
    to fit, and does not) and ``false_alarms`` (the reverse), as shares of all cases.
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
    told = np.array([max(row["simulated_peak_bytes"]) for row in rows], float)
    fits, said = peak[:, None] <= peak[None], 1.05 * told[:, None] <= peak[None]
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
        "peak_error": float(np.abs(told / peak - 1).mean()),
        "missed": float((said & ~fits).mean()),
        "false_alarms": float((~said & fits).mean()),
    }


def _half(row: dict, half: int) -> float:
    rounds = row.get("rounds_ns", ())
    return float(np.median((rounds if len(rounds) > 1 else row["samples_ns"])[half::2]))


def error_parts(rows: list[dict]) -> dict[str, float]:
    """What the signed error of ``simulated_ns`` is made of: mean shares of the measured step that add up to the bias.

    ``ops``: the ops took another time than alone on one device (busy neighbours, tensors that lie in the other core's
    cache, noise); ``channel``: transfers took another time than alpha + bytes / beta; ``copies``: the sender's core
    makes the copies; ``dispatch``: the time between ops that is not in their costs; ``rest``: waking up, order.
    """
    names = ("simulated_ns", "ops_ns", "channel_ns", "copies_ns", "gaps_ns", "measured_ns")
    stages = [np.array([row[name] for row in rows], float) for name in names]
    parts = ("ops", "channel", "copies", "dispatch", "rest")
    return {
        part: float(((before - after) / stages[-1]).mean())
        for part, before, after in zip(parts, stages[:-1], stages[1:], strict=True)
    }
