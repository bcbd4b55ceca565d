"""What the device files predict of measured op tables and whole models: the cases F3, F4 and F5 of the fidelity report.

* F5: rows of op tables that were held out of every fit; a case per device and goal over all its rows, its error their
  mean, and a row per table beside it. Of a file that the manifest does not list nothing was fitted to, so every row
  judges, apart from the others; where its device has no device file, one is fitted to the rows that are not held out.
* F3: whole models on a device that has a device file, or op tables to fit one to. No whole model and none of its ops
  was fitted to; that products with a bias are a class apart was found on P100's, though.
* F4: the same models as if the device had none. Another one stands in, with this device's datasheet: for a training
  board the newest other training board; for an inference board, which has not the power to hold its clock, the next
  newer one, or where there is none the training board of its generation, whose products are slowed as those of older
  inference boards are against theirs. The rules were settled with P100's, V100's and T4's cases in view, and the
  last with the op tables of T4 and P4. The tables of ops are judged so, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from simdev.errors import InvalidInput
from simdev.measure.calibrate.build import Sheet, build_one, datasheets, read_tables, samples_by_model
from simdev.measure.calibrate.fit import Sample, fit_class, relative_error, shows_kernels, split
from simdev.measure.calibrate.labels import Label, find_labels, read_label, without_nodes
from simdev.measure.calibrate.manifest import load_manifest, role_of
from simdev.problem.opcost.device import Calibration, calibration_names, load_calibration
from simdev.problem.opcost.parts import Part
from simdev.problem.opcost.physics import GEMM_LIKE, moved_bytes, work_flops

GOAL_OF = {
    **dict.fromkeys(("linear", "gemm", "bmm"), "F5 gemm"),
    **dict.fromkeys(("conv", "conv3x3", "conv_dgrad", "conv_wgrad"), "F5 conv"),
    **dict.fromkeys(("rnn", "rnn_dgrad", "rnn_wgrad"), "recurrent"),
    **dict.fromkeys(("vector", "softmax", "layer_norm"), "F5 other"),
}
SMALL_WATTS = 100
CONTRADICTORY = 0.25  # a label whose own nodes' times are so far from its whole is left out


def op_cases(data: str | Path, notes: list[str] | None = None) -> list[dict]:
    """A row for each case: ``group``, ``case``, ``role``, ``noise``, ``measured_s``, ``predicted_s``, the shares of
    predicted time by source (``table_share``, ``fit_share``, ``fallback_share``), ``sum_of_ops_s``, ``roofline_s``, and
    ``mean_error`` where the case is a mean over rows. What could not be used is added to ``notes``."""
    notes = [] if notes is None else notes
    built: dict[str, Calibration] = {}
    return [*table_cases(Path(data), notes, built), *model_cases(Path(data), notes, built)]


def table_cases(data: Path, notes: list[str], built: dict[str, Calibration]) -> list[dict]:
    """F5: every op table under ``data``; ``built`` takes what is fitted to those of other devices."""
    try:
        found = read_tables([data])
    except InvalidInput as error:
        notes.append(f"op tables: {error}")
        return []
    notes += found.report()
    grouped = samples_by_model(found)
    manifest = load_manifest()
    listed = {file: role_of(Path(file), data, manifest) == "split" for file in {rows.file for rows in found.tables}}
    cases = []
    for model, classes in sorted(grouped.items()):
        shipped = model in calibration_names()
        calibration = load_calibration(model) if shipped else built.setdefault(model, build_one(model, grouped))
        unseen = {file for file, known in listed.items() if shipped and not known}
        cases += _device_cases(model, calibration, classes, unseen)
        cases += _stand_in_cases(model, classes)
        cases += _left_out_cases(model, classes)
    return cases


def _stand_in_cases(model: str, classes: dict[str, list[Sample]]) -> list[dict]:
    """The tables of one device model by what would stand in for it, together for each goal."""
    stand_in = teacher_of(next(sheet for sheet in datasheets().values() if sheet.model == model))
    tables: dict[str, list[dict]] = {}
    for name, samples in sorted(classes.items()) if stand_in else ():
        for sample in samples:
            table = _table_case(model, stand_in, name, sample, "validate")
            if table:
                tables.setdefault(GOAL_OF[name].removeprefix("F5 "), []).append(table)
    return [
        _together(f"{goal} by a stand-in, {model} from {stand_in.name}", rows) for goal, rows in sorted(tables.items())
    ]


def _device_cases(
    model: str, calibration: Calibration, classes: dict[str, list[Sample]], unseen: set[str]
) -> list[dict]:
    """The tables of one device model, and what they make together for each goal."""
    tables: dict[tuple[str, str], list[dict]] = {}
    for name, samples in sorted(classes.items()):
        for sample in samples:
            role = "validate" if sample.rows.file in unseen else "split"
            table = _table_case(model, calibration, name, sample, role)
            if table:
                where = f"{model}, files not listed" if role == "validate" else model
                tables.setdefault((GOAL_OF[name], where), []).append(table)
    return [
        case for (goal, where), rows in sorted(tables.items()) for case in (_together(f"{goal}, {where}", rows), *rows)
    ]


def _left_out_cases(model: str, classes: dict[str, list[Sample]]) -> list[dict]:
    """Every table of a class that has several on this device, by a fit to the others; all its rows judge."""
    cases = []
    for name, samples in sorted(classes.items()):
        for sample in samples if len(samples) > 1 else ():
            rest = [other for other in samples if other is not sample]
            if shows_kernels(rest):
                alone = Calibration(model, sample.sheet, 0, {name: fit_class(rest, seed=0)})
                case = _table_case(model, alone, name, sample, "validate")
                cases.append(case | {"group": f"{GOAL_OF[name].removeprefix('F5 ')} with one table left out, {model}"})
    return cases


def _together(group: str, tables: list[dict]) -> dict:
    rows = sum(table["rows"] for table in tables)
    return {
        **tables[0],
        "group": group,
        "case": f"{rows} shapes of {len(tables)} tables",
        "rows": rows,
        "mean_error": sum(table["mean_error"] * table["rows"] for table in tables) / rows,
        **{key: sum(table[key] for table in tables) for key in ("measured_s", "predicted_s", "roofline_s")},
    }


def _table_case(model: str, calibration: Calibration, name: str, sample: Sample, role: str) -> dict | None:
    fit = calibration.classes.get(name)
    judged = np.ones(len(sample.rows.seconds), bool) if role == "validate" else split(sample.rows)
    if fit is None or not judged.any():
        return None
    rows = sample.rows.where(judged)
    error = relative_error(fit, Sample(rows, sample.sheet, sample.timer, sample.launch_s))
    roofline = np.maximum(work_flops(name, rows.dims) / sample.sheet.flops, _passes_s(name, rows.dims, sample))
    return {
        "group": f"op tables, {model}",
        "case": f"{rows.source} on {rows.device}: {name}, {len(rows.seconds)} shapes",
        "role": role,
        "noise": float("nan"),
        "rows": len(rows.seconds),
        "measured_s": float(rows.seconds.sum()),
        "predicted_s": float(((1 + error) * rows.seconds).sum()),
        "mean_error": float(np.abs(error).mean()),
        "table_share": 0.0,
        "fit_share": 1.0,
        "fallback_share": 0.0,
        "roofline_s": float(roofline.sum()),
    }


def _passes_s(name: str, dims: np.ndarray, sample: Sample) -> np.ndarray:
    return moved_bytes(name, dims) / sample.sheet.bandwidth


def model_cases(data: Path, notes: list[str], built: dict[str, Calibration]) -> list[dict]:
    """F3 and F4: every whole model under ``data``."""
    cases = []
    notes += [f"{path}: a whole model's time, but no list of its ops beside it" for path in without_nodes(data)]
    for path in find_labels(data):
        try:
            label = read_label(path)
        except InvalidInput as error:
            notes.append(str(error))
            continue
        known = datasheets().get(label.device)
        if known is None:
            notes.append(f"{path}: device {label.device!r} has no datasheet")
            continue
        notes += [f"{path}: {reason}: {count}" for reason, count in label.skipped.items()]
        own = load_calibration(known.model) if known.model in calibration_names() else built.get(known.model)
        if own is not None:
            cases += _label_cases(f"F3, {known.model}", label, known, own)
        stand_in = teacher_of(known)
        if stand_in is not None:
            cases += _label_cases(f"F4, {known.model} from {stand_in.name}", label, known, stand_in)
    return cases


def teacher_of(known: Sheet) -> Calibration | None:
    """What stands in for a device without measurements: for a training board the newest device file of another one;
    for a board of under :data:`SMALL_WATTS` the next newer one of its kind, or else :func:`_slowed`."""
    sheets = {sheet.model: sheet for sheet in reversed(datasheets().values())}
    others = [name for name in calibration_names() if name != known.model and name in sheets]
    others.sort(key=lambda name: sheets[name].capability)
    large = [name for name in others if sheets[name].watts > SMALL_WATTS]
    small = [name for name in others if name not in large]
    newer = [name for name in small if sheets[name].capability >= known.capability]
    if known.watts > SMALL_WATTS:
        return load_calibration(large[-1]) if large else None
    if newer or not large:
        return load_calibration((newer or small)[0]) if small else None
    return _slowed(_sister(known, large, sheets), {name: _sister(sheets[name], large, sheets) for name in small})


def _sister(known: Sheet, large: Sequence[str], sheets: dict[str, Sheet]) -> str:
    """The training board of a small board's generation: of equal major capability, or the newest before it."""
    return max(large, key=lambda name: (int(sheets[name].capability) <= int(known.capability), sheets[name].capability))


def _slowed(sister: str, small: dict[str, str]) -> Calibration:
    """The device file of ``sister``, for a newer small board than those of ``small`` (board: training board of its
    generation, oldest first): a small board has not the power to hold its clock in products, so they reach less of
    the peak, by the median over ``small`` of that class. All else is as on the newest of ``small``."""
    large = load_calibration(sister)
    classes = dict(large.classes)
    pairs = [(load_calibration(board).classes, load_calibration(other).classes) for board, other in small.items()]
    for name in classes:
        both = [(mine, theirs, name if name in mine and name in theirs else "linear") for mine, theirs in pairs]
        ratios = [mine[key].efficiency / theirs[key].efficiency for mine, theirs, key in both]
        if name in GEMM_LIKE and ratios:
            classes[name] = replace(classes[name], efficiency=classes[name].efficiency * float(np.median(ratios)))
        elif pairs and name in pairs[-1][0]:
            classes[name] = pairs[-1][0][name]
    return replace(large, name=" and ".join([sister, *small]), classes=classes, table={})


def _label_cases(group: str, label: Label, known: Sheet, calibration: Calibration) -> list[dict]:
    """The whole training step, or the inference, of one label."""
    parts = label.forward + label.backward
    seconds, source = predict_s(parts, known, calibration)
    counts = np.array([count for _, count in parts], np.float64)
    total = float((seconds * counts).sum())
    if not total or not label.forward_s + label.backward_s:
        return []
    share = {name: float((seconds * counts)[source == name].sum()) / total for name in ("table", "fit", "fallback")}
    return [
        {
            "group": group,
            "case": label.case,
            "role": "validate",
            "noise": float("nan"),
            "measured_s": label.forward_s + label.backward_s,
            "predicted_s": total,
            **{f"{name}_share": value for name, value in share.items()},
            "sum_of_ops_s": label.nodes_s,
            "roofline_s": float((roofline_s(parts, known) * counts).sum()),
            "left_out": _reason(label),
        }
    ]


def _reason(label: Label) -> str:
    whole = label.forward_s + label.backward_s
    if label.nodes_s and abs(label.nodes_s / whole - 1) > CONTRADICTORY:
        return "its own ops' times contradict it by over 25 %"
    return ""


def predict_s(
    parts: Sequence[tuple[Part, int]], known: Sheet, calibration: Calibration
) -> tuple[np.ndarray, np.ndarray]:
    """``(seconds, source)`` of each part; the physics alone (``fallback``) where the device file is silent."""
    ns, source = calibration.durations([part for part, _ in parts], known.sheet, round(1e9 * known.launch_s))
    physics = roofline_s(parts, known)
    seconds = np.where(np.isnan(ns), physics, ns / 1e9)
    return seconds, np.array([name or "fallback" for name in source])


def roofline_s(parts: Sequence[tuple[Part, int]], known: Sheet) -> np.ndarray:
    """Seconds of each part by the datasheet alone: the larger of its operations and its bytes."""
    seconds = []
    for part, _ in parts:
        dims = np.array([part.dims], np.int64)
        work = work_flops(part.name, dims)[0] / known.sheet.flops if part.name in GEMM_LIKE else 0.0
        seconds.append(max(work, moved_bytes(part.name, dims)[0] / known.sheet.bandwidth))
    return np.array(seconds)
