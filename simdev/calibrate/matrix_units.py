"""Fit kernels on matrix units: one class for each precision, to several sources of equal weight.

The readings contain no timer: they are means over many consecutive launches, minus one launch. As in
:mod:`simdev.calibrate.fit`, the ratio of kernel time to physics is an efficiency times boosted trees. In
contrast to that module, every source has the same weight for any number of rows, and rows of small shapes have less
weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from simdev.calibrate.build import datasheets
from simdev.calibrate.fit import boosted
from simdev.calibrate.kernel_tables import fitted
from simdev.calibrate.observations import Observations
from simdev.problem.opcost.device import BACKWARD, Calibration, ClassFit, fitted_s, load_calibration
from simdev.problem.opcost.physics import PRODUCTS, Datasheet, baseline_s, features

# (number of trees, leaves of each, least number of rows in a leaf)
SIZES = {"product": (120, 12, 30), "attention": (100, 12, 20)}
LEARNING_RATE = 0.08
SHORT_S = 2e-6  # a kernel of this length has a quarter of the weight of a long one
MOST_ROWS = 12_000  # rows of one table; more rows change little
LARGE, SMALL_WEIGHT = 512, 1 / 3  # a product with a smaller side has a third of the weight
# Time of FlashAttention 2, PyTorch's default, relative to the vendor's kernels. On an A100 both are equal. On Hopper,
# FlashAttention 2 takes 1.5 to 2 times as long forward and 1.5 to 1.75 times backward (Shah et al. 2024, arXiv
# 2407.08608).
FLASH = {"h100": (1.75, 1.625), "h200": (1.75, 1.625)}
PRECISION = {"f16": "bf16"}  # the 16-bit formats are equally fast


def class_of(rows: Observations) -> str:
    """The class of a device file that ``rows`` belong to, such as ``product bf16``."""
    return f"{'product' if rows.name in PRODUCTS else rows.name} {PRECISION.get(rows.dtype, rows.dtype)}"


def on_model(tables: Iterable[Observations], model: str) -> list[Observations]:
    """The tables of the boards that use the device file ``model``."""
    sheets = datasheets()
    return [rows for rows in tables if rows.device in sheets and sheets[rows.device].model == model]


def fit_matrix_class(tables: Sequence[Observations], seed: int = 0) -> ClassFit:
    """Fit one class of one device model to ``tables``, all of that class."""
    xs, targets, weights = [], [], []
    for rows in tables:
        rows = _sampled(rows, seed)
        sheet, launch_s = datasheets()[rows.device].sheet, datasheets()[rows.device].launch_s
        physics = baseline_s(rows.name, rows.dims, sheet, rows.dtype)
        kernel = np.maximum(rows.seconds - launch_s, 0.1 * physics)
        share = np.minimum(1, kernel / (kernel + SHORT_S)) ** 2
        if rows.name in PRODUCTS:
            share = share * np.where(rows.dims[:, 1:].min(axis=1) >= LARGE, 1, SMALL_WEIGHT)
        xs.append(features(rows.name, rows.dims, sheet, rows.dtype))
        targets.append(np.log2(kernel / physics))
        weights.append(share / share.sum() * 1e4)
    x, target, weight = np.concatenate(xs), np.concatenate(targets), np.concatenate(weights)
    centre = float(np.average(target, weights=weight))
    sources = "; ".join(dict.fromkeys(f"{rows.source} on {rows.device}" for rows in tables))
    size = SIZES["attention" if tables[0].name == "attention" else "product"]
    trees = boosted(x, target - centre, weight, size, LEARNING_RATE, seed)
    return ClassFit(2.0**-centre, trees, sources, len(target))


def _sampled(rows: Observations, seed: int) -> Observations:
    """At most :data:`MOST_ROWS` of the rows, drawn at random."""
    if len(rows.seconds) <= MOST_ROWS:
        return rows
    chosen = np.random.default_rng(seed).choice(len(rows.seconds), MOST_ROWS, replace=False)
    return rows.where(np.isin(np.arange(len(rows.seconds)), chosen))


def predicted_s(calibration: Calibration, rows: Observations, sheet: Datasheet, launch_s: float) -> np.ndarray:
    """float64 ``(n,)``: the seconds of ``rows`` by a device file; NaN if the file lacks their class."""
    from simdev.problem.opcost.parts import KernelPart

    fit = calibration.fit_of(KernelPart(rows.name, tuple(rows.dims[0].tolist()), rows.dtype))
    if fit is None:
        return np.full(len(rows.seconds), np.nan)
    slower = calibration.steps.get(rows.dtype, 1.0)
    return launch_s + slower * fitted_s(fit, rows.name, rows.dims, sheet, rows.dtype)


def with_matrix_units(calibration: Calibration, tables: Sequence[Observations], seed: int = 0) -> Calibration:
    """``calibration`` with a class for every precision in the ``tables`` of its model. A class is fitted to the sources
    that :func:`~simdev.calibrate.kernel_tables.fitted` accepts; its errors are those on the other sources."""
    mine = [
        rows
        for rows in on_model(tables, calibration.name)
        if rows.name in (*PRODUCTS, "attention") and len(rows.seconds)
    ]
    classes = dict(calibration.classes)
    for name in sorted({class_of(rows) for rows in mine if fitted(rows)}):
        group = [rows for rows in mine if class_of(rows) == name]
        fit = fit_matrix_class([rows for rows in group if fitted(rows)], seed)
        classes[name] = _with_errors(fit, [rows for rows in group if not fitted(rows)])
    if calibration.name in FLASH and "attention bf16" in classes:
        classes |= _flash(classes["attention bf16"], *FLASH[calibration.name])
    return replace(calibration, classes=classes)


def bare(model: str) -> Calibration:
    """A device file without measured f32 kernels: it uses those of the A100, scaled by the board's own datasheet."""
    known = next(sheet for sheet in datasheets().values() if sheet.model == model)
    classes = {name: fit for name, fit in load_calibration("a100").classes.items() if " " not in name}
    return Calibration(
        model,
        known.sheet,
        round(1e9 * known.launch_s),
        classes,
        like="a100",
        watts=known.watts,
        capability=known.capability,
        vendor=known.vendor,
    )


def models_of(tables: Iterable[Observations]) -> list[str]:
    """The device models with products in ``tables``, sorted by name."""
    sheets = datasheets()
    return sorted({sheets[rows.device].model for rows in tables if rows.name in PRODUCTS and rows.device in sheets})


def _flash(attention: ClassFit, forward: float, backward: float) -> dict[str, ClassFit]:
    """The fit of FlashAttention 2: the fit of the vendor's kernels, slowed down by a factor."""
    source = "attention bf16, slower by the ratios of arXiv 2407.08608"
    one = ClassFit(attention.efficiency / forward, attention.trees, source, trees_of="attention bf16")
    other = replace(one, efficiency=attention.efficiency / (BACKWARD * backward))
    return {"flash_attention bf16": one, "flash_attention_backward bf16": other}


def _with_errors(fit: ClassFit, judges: Sequence[Observations]) -> ClassFit:
    """``fit`` with its errors on ``judges``."""
    errors = []
    for rows in judges:
        known = datasheets()[rows.device]
        predicted = known.launch_s + fitted_s(fit, rows.name, rows.dims, known.sheet, rows.dtype)
        errors.append(np.abs(predicted / rows.seconds - 1))
    if not errors:
        return fit
    both = np.concatenate(errors)
    return replace(fit, error_mean=float(both.mean()), error_median=float(np.median(both)))
