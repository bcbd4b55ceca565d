"""Compare device files with measured op tables and whole models: the cases F3, F4 and F5 of the fidelity report.

* F5: rows of op tables that were held out of every fit. There is one case for each device and goal, whose error is the
  mean over all rows, and an informative row for each table. No fit used a file that the manifest does not list, so all
  its rows count, in a case of their own. If its device has no device file, one is fitted to the rows that are not held
  out.
* F3: whole models on a device that has a device file, or op tables for a fit. No fit used a whole model or its ops.
  However, the rule that products with a bias are a class of their own was found with the models of the P100 in view.
* F4: the same models as if the device had no device file. A stand-in replaces it, scaled by the device's datasheet. The
  stand-in of a training board is the newest other training board. An inference board has too little power to hold its
  clock; its stand-in is the next newer inference board. If there is none, it is the training board of its generation,
  with products slowed down by the ratio between older inference boards and their training boards. As if unknown, the T4
  has no such board: it is the only one with a device file. The rules were chosen with the cases of P100, V100 and T4 in
  view, and the last rule also with the op tables of T4 and P4. The op tables are predicted in the same way.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from simdev.calibrate.build import (
    Sheet,
    build_one,
    datasheets,
    read_tables,
    samples_by_model,
    save_calibration,
)
from simdev.calibrate.fit import Sample, fit_class, relative_error, shows_kernels, split
from simdev.calibrate.manifest import load_manifest, role_of
from simdev.errors import InvalidInput
from simdev.problem.opcost.device import Calibration, calibration_names, load_calibration
from simdev.problem.opcost.physics import moved_bytes, work_flops
from simdev.problem.opcost.stand_in import Board, stand_in
from simdev.studies.fidelity.label_graph import graph_of, time_graph
from simdev.studies.fidelity.labels import Label, find_labels, read_label, without_nodes

GOAL_OF = {
    **dict.fromkeys(("linear", "gemm", "bmm"), "F5 gemm"),
    **dict.fromkeys(("conv", "conv3x3", "conv_dgrad", "conv_wgrad"), "F5 conv"),
    **dict.fromkeys(("rnn", "rnn_dgrad", "rnn_wgrad"), "recurrent"),
    **dict.fromkeys(("vector", "softmax", "layer_norm"), "F5 other"),
}
CONTRADICTORY = 0.25  # a label is left out if the times of its nodes differ more from the time of the whole model


def op_cases(data: str | Path, notes: list[str] | None = None) -> list[dict]:
    """All cases under ``data``, one dictionary each; files that cannot be used are added to ``notes``.

    The keys are ``group``, ``case``, ``role``, ``noise``, ``measured_s``, ``predicted_s``, the shares of the predicted
    time by source (``table_share``, ``fit_share``, ``fallback_share``), ``sum_of_ops_s``, ``roofline_s`` and, if the
    case is a mean over rows, ``mean_error``.
    """
    notes = [] if notes is None else notes
    built: dict[str, Calibration] = {}
    return [*table_cases(Path(data), notes, built), *model_cases(Path(data), notes, built)]


def table_cases(data: Path, notes: list[str], built: dict[str, Calibration]) -> list[dict]:
    """F5: every op table under ``data``. The fits for devices without a device file are added to ``built``."""
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
    """The tables of one device model, predicted by its stand-in; one case for each goal."""
    stand_in = teacher_of(next(sheet for sheet in datasheets().values() if sheet.model == model))
    tables: dict[str, list[dict]] = {}
    if stand_in is None:
        return []
    for name, samples in sorted(classes.items()):
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
    """A row for each table of one device model, and one case for each goal."""
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
    """For classes with several tables on this device: all rows of each table, predicted by a fit to the other
    tables."""
    cases = []
    for name, samples in sorted(classes.items()):
        for sample in samples if len(samples) > 1 else ():
            rest = [other for other in samples if other is not sample]
            if shows_kernels(rest):
                alone = Calibration(model, sample.sheet, 0, {name: fit_class(rest, seed=0)})
                case = _table_case(model, alone, name, sample, "validate")
                if case:
                    group = f"{GOAL_OF[name].removeprefix('F5 ')} with one table left out, {model}"
                    cases.append(case | {"group": group})
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
    notes += [f"{path}: a whole model's time, but no list of its ops beside it" for path in without_nodes(data)]
    with TemporaryDirectory() as folder:
        files = _DeviceFiles(Path(folder), built)
        return [case for path in find_labels(data) for case in _cases_of_label(path, files, notes)]


class _DeviceFiles:
    """Finds device files by name or path: the shipped ones, and others that are written to ``folder``."""

    def __init__(self, folder: Path, built: dict[str, Calibration]):
        self.folder, self.built = folder, built

    def own(self, known: Sheet) -> str:
        """The device file of a board's model; empty if there is none."""
        if known.model in calibration_names():
            return known.model
        return self._written(known.model, self.built[known.model]) if known.model in self.built else ""

    def stand_in(self, known: Sheet) -> tuple[str, str]:
        """``(file, name)`` of the stand-in for a board; empty if there is none."""
        found = teacher_of(known)
        return (self._written(f"for {known.model}", found), found.name) if found else ("", "")

    def _written(self, name: str, calibration: Calibration) -> str:
        path = self.folder / f"{name}.toml"
        if not path.exists():
            save_calibration(calibration, path)
        return str(path)


def _cases_of_label(path: Path, files: _DeviceFiles, notes: list[str]) -> list[dict]:
    try:
        label = read_label(path)
    except InvalidInput as error:
        notes.append(str(error))
        return []
    known = datasheets().get(label.device)
    if known is None:
        notes.append(f"{path}: device {label.device!r} has no datasheet")
        return []
    notes += [f"{path}: {reason}: {count}" for reason, count in label.skipped.items()]
    own, (other, name) = files.own(known), files.stand_in(known)
    cases = _label_cases(f"F3, {known.model}", label, known, own) if own else []
    return cases + (_label_cases(f"F4, {known.model} from {name}", label, known, other) if other else [])


def teacher_of(known: Sheet) -> Calibration | None:
    """The stand-in for a device as if it had no device file, by the rule of ``calibrated = "auto"``."""
    matrix = dict(known.sheet.rates).get("bf16", 0.0)
    return stand_in(Board(known.watts, known.capability, known.vendor, matrix), without=known.model)


def _label_cases(group: str, label: Label, known: Sheet, device_file: str) -> list[dict]:
    """The training step or the inference of one label: its graph is costed and simulated as in the bench."""
    parts = label.forward + label.backward
    if not parts or not label.forward_s + label.backward_s:
        return []
    timing = time_graph(graph_of(label.case, parts), known, device_file)
    return [
        {
            "group": group,
            "case": label.case,
            "role": "validate",
            "noise": float("nan"),
            "measured_s": label.forward_s + label.backward_s,
            "predicted_s": timing.seconds,
            "table_share": timing.shares["table"],
            "fit_share": timing.shares["fit"],
            "fallback_share": timing.shares["roofline"],
            "sum_of_ops_s": label.nodes_s,
            "roofline_s": timing.roofline_s,
            "left_out": _reason(label),
        }
    ]


def _reason(label: Label) -> str:
    whole = label.forward_s + label.backward_s
    if label.nodes_s and abs(label.nodes_s / whole - 1) > CONTRADICTORY:
        return "its own ops' times contradict it by over 25 %"
    return ""
