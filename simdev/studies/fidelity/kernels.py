"""Cases of the fidelity report on matrix units: kernels of sources that no fit used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from simdev.calibrate.build import datasheets
from simdev.calibrate.kernel_tables import fitted, read_kernel_tables
from simdev.calibrate.matrix_units import predicted_s
from simdev.calibrate.observations import Observations
from simdev.errors import InvalidInput
from simdev.problem.opcost.device import Calibration, calibration_names, clock_ratio, load_calibration
from simdev.problem.opcost.physics import PRODUCTS, baseline_s

LARGE = 1024  # the least side of the products that the goal covers
VISIBLE_S = 50e-6  # other kernels below this time are not judged, because the launch dominates
# Timers around loops of eager calls: EleutherAI's products of 1,024 take 36 to 61 us each, which is the host's time.
HOST_TIMED, HOST_S = ("EleutherAI", "LLMCompass"), 100e-6
# A reading of OpenXLA's table is that of a timer around one kernel: it holds a constant, which its smallest products,
# far below the judged ones, show. On H100 and B200 it is 5 us.
KERNEL_TIMED, TINY_S, FEW = "OpenXLA", 0.5e-6, 4
# Pairs of boards of one chip and their limits in W, by aiconfigurator's own descriptions (systems/*.yaml); the higher
# limit first. Long kernels show the limit.
ONE_CHIP = (
    (("NVIDIA_GB200", 1200.0), ("NVIDIA_B200", 1000.0)),
    (("NVIDIA_GB300", 1400.0), ("NVIDIA_B300_SXM6_AC", 1100.0)),
)
LONG_S = 0.5e-3


def kernel_cases(data: Path, notes: list[str]) -> list[dict]:
    """A case for each table of kernels under ``data`` and each device file."""
    try:
        tables = read_kernel_tables([data])
    except InvalidInput as error:
        notes.append(f"kernel tables: {error}")
        return []
    return [case for rows in tables for case in _table_case(rows)] + power_cases(tables)


def _table_case(table: Observations) -> list[dict]:
    rows, known = table, datasheets().get(table.device)
    if known is None or known.model not in calibration_names() or not len(rows.seconds):
        return []
    large = rows.dims[:, 1:].min(axis=1) >= LARGE if rows.name in PRODUCTS else rows.seconds > VISIBLE_S
    if rows.source in HOST_TIMED:
        large &= rows.seconds > HOST_S
    if not large.any():
        return []
    rows = rows.where(large)
    alone = replace(load_calibration(known.model), steps={})  # kernels by themselves: the factor is one of whole steps
    predicted = predicted_s(alone, rows, known.sheet, _constant_s(alone, table))
    if np.isnan(predicted).any():
        return []
    rate = known.sheet.rate(rows.dtype)
    work = 2 * np.prod(rows.dims.astype(float), axis=1) if rows.name in PRODUCTS else np.zeros(len(predicted))
    impossible = float((work / rows.seconds).max()) > 1.02 * rate
    left_out = "fitted to" if fitted(rows) else "above the datasheet's peak" if impossible else ""
    what = "products" if rows.name in PRODUCTS else rows.name
    goal = f"F5 {rows.dtype if rows.dtype != 'f16' else 'bf16'} " if what == "products" else "other sources: "
    return [
        {
            "group": f"{goal}{what}, {known.model}",
            "case": f"{rows.source}: {rows.name} {rows.dtype}, {len(predicted)} shapes",
            "role": "calibrate" if fitted(rows) else "validate",
            "measured_s": float(rows.seconds.sum()),
            "predicted_s": float(predicted.sum()),
            "mean_error": float(np.abs(predicted / rows.seconds - 1).mean()),
            "roofline_s": float(baseline_s(rows.name, rows.dims, known.sheet, rows.dtype).sum()),
            "fit_share": 1.0,
            "left_out": left_out,
        }
    ]


def power_cases(tables: Iterable[Observations]) -> list[dict]:
    """What a higher power limit does to long kernels on matrix units, from boards of one chip (:data:`ONE_CHIP`).

    The readings of the board with the higher limit predict those of the other one: as they are, and slowed down by the
    rule of device files. Each case holds the median of a stack's ratios, with the lower board's at 1 ms.
    """
    readings: dict[tuple, dict[str, list[Observations]]] = {}
    for rows in tables:
        what = "products" if rows.name in PRODUCTS else rows.name
        readings.setdefault((what, rows.dtype, rows.source), {}).setdefault(rows.device, []).append(rows)
    cases = []
    for (high, high_watts), (low, low_watts) in ONE_CHIP:
        for (what, dtype, source), boards in sorted(readings.items()):
            of_high, of_low = (_by_shape(boards.get(device, ())) for device in (high, low))
            pairs = [(of_high[shape], of_low[shape]) for shape in of_high.keys() & of_low.keys()]
            ratios = [one / other for one, other in pairs if other >= LONG_S]
            rule = clock_ratio(high_watts, low_watts)
            for how, slower in (("as they are", 1.0), ("by the rule of power limits", rule)) if ratios else ():
                cases.append(
                    {
                        "group": f"{what} {dtype}, {_short(low)} from {_short(high)}, {how}",
                        "case": f"{source}: {len(ratios)} shapes",
                        "role": "validate",
                        "measured_s": 1e-3,
                        "predicted_s": 1e-3 * slower * float(np.median(ratios)),
                    }
                )
    return cases


def _short(device: str) -> str:
    return device.removeprefix("NVIDIA_").partition("_")[0].lower()


def _by_shape(tables: Iterable[Observations]) -> dict[tuple[int, ...], float]:
    """The median reading of each shape, in s."""
    found: dict[tuple[int, ...], list[float]] = {}
    for rows in tables:
        for shape, seconds in zip(map(tuple, rows.dims.tolist()), rows.seconds.tolist(), strict=True):
            found.setdefault(shape, []).append(seconds)
    return {shape: float(np.median(seconds)) for shape, seconds in found.items()}


def _constant_s(calibration: Calibration, table: Observations) -> float:
    """What a reading of ``table`` holds beside the kernel: a launch, or the constant of its timer. The constant is the
    median difference between readings and kernels of under :data:`TINY_S`, if there are at least :data:`FEW`."""
    known = datasheets()[table.device]
    tiny = baseline_s(table.name, table.dims, known.sheet, table.dtype) < TINY_S
    if not table.source.startswith(KERNEL_TIMED) or tiny.sum() < FEW:
        return known.launch_s
    rows = table.where(tiny)
    return float(np.median(rows.seconds - predicted_s(calibration, rows, known.sheet, 0.0)))
