"""Build device files from measured data: read every table under the given paths and fit every class of each model."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from simdev.calibrate.deepbench import is_workbook, read_workbook
from simdev.calibrate.dispatch import EVERY, dispatch_ns, granularity
from simdev.calibrate.fit import Sample, event_seconds, fit_class, shows_kernels, split, taught_class, timer_of
from simdev.calibrate.neusight import is_op_table, read_op_table
from simdev.calibrate.observations import Found
from simdev.calibrate.traces import read_trace
from simdev.errors import InvalidInput
from simdev.files import write_text
from simdev.problem.graph_file import write_npz
from simdev.problem.opcost.device import Calibration, ClassFit, device_text, load_calibration
from simdev.problem.opcost.physics import Datasheet
from simdev.problem.opcost.trees import arrays_of

CLASSES = ("bmm", "linear", "gemm", "conv3x3", "conv", "conv_dgrad", "conv_wgrad", "rnn", "rnn_dgrad", "rnn_wgrad",
           "vector", "softmax", "layer_norm")  # fmt: skip
# If a device has no rows of a class, the trees come from other devices and the efficiency is scaled by this class.
BESIDE = {"conv": "conv3x3", "conv_dgrad": "conv3x3", "conv_wgrad": "conv3x3"}
# Tables that contradict other tables of the same board, with the reason. No fit uses them.
THROTTLED = {
    ("Tesla_P4", "linear"): "left out: at most 1.08 TFLOP/s, and 4.25 in the same authors' test table of this board",
}
# Some tables hold some dozens of real layers, others thousands of random shapes. A row of a small table has more
# weight.
FEW_ROWS, FEW_WEIGHT = 200, 8.0


@dataclass(frozen=True)
class Sheet:
    """The data of one device name of the measured files: datasheet, launch time, and the model of its device file."""

    model: str
    sheet: Datasheet
    launch_s: float
    watts: int
    capability: float
    vendor: str = "nvidia"


@cache
def datasheets() -> dict[str, Sheet]:
    """All known device names, from ``datasheets.toml``."""
    data = tomllib.loads((Path(__file__).parent / "datasheets.toml").read_text(encoding="utf-8"))
    return {
        name: Sheet(
            row["model"],
            Datasheet(
                row["peak_tflops"] * 1e12,
                row["memory_gb_per_s"] * 1e9,
                row["multiprocessors"],
                tuple((dtype, rate * 1e12) for dtype, rate in row.get("rates", {}).items()),
            ),
            row["launch_us"] * 1e-6,
            row["watts"],
            row["capability"],
            row.get("vendor", "nvidia"),
        )
        for name, row in data.items()
    }


def read_tables(paths: Iterable[str | os.PathLike]) -> Found:
    """Read all op tables and workbooks among ``paths``, which are files, or folders that are searched recursively.

    Profiler traces are read only if ``paths`` names them directly, because traces in a folder may be meant for
    validation. Files are read in order of name, and files of other kinds are ignored. ``problems`` counts unusable
    rows, devices and files of a folder. Raises :class:`InvalidInput` for a path that does not exist, for a damaged file
    that ``paths`` names directly, and if nothing could be read.
    """
    found = Found()
    for path in map(Path, paths):
        if not path.exists():
            raise InvalidInput("no such file or folder", source=path)
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            try:
                _read_file(file, found, named=file == path)
            except InvalidInput as error:
                if file == path:
                    raise
                found.problems[str(error)] += 1
    for rows in found.tables:
        if rows.device not in datasheets():
            found.problems[f"device {rows.device!r} has no datasheet: its tables are left out"] += 1
    found.tables = [rows for rows in found.tables if rows.device in datasheets()]
    if not found.tables:
        raise InvalidInput("no op table of a known kind and device", source=", ".join(map(str, paths)))
    return found


def has_op_tables(paths: Iterable[str | os.PathLike]) -> bool:
    """Whether :func:`read_tables` would find a table, or a directly named trace, among ``paths``."""
    files = [file for path in map(Path, paths) for file in (path.rglob("*") if path.is_dir() else [path])]
    return any(is_op_table(file) or is_workbook(file) for file in files if file.is_file())


def _read_file(file: Path, found: Found, named: bool) -> None:
    before = len(found.tables)
    if named and file.name.endswith((".json", ".json.gz")):
        trace = read_trace(file)
        device = trace.device_name.replace(" ", "_")
        times = dispatch_ns(trace).items()
        found.dispatch[device] = {kind: float(median) for kind, (_, median, _) in times if kind != EVERY}
        found.granularity[device] = granularity(trace)
    elif is_op_table(file):
        read_op_table(file, found)
    elif is_workbook(file):
        read_workbook(file, found)
    for rows in found.tables[before:]:
        rows.file = str(file)


def samples_by_model(found: Found) -> dict[str, dict[str, list[Sample]]]:
    """The f32 tables as ``{model: {class: samples}}``, with the timer constants of each device."""
    grouped: dict[str, dict[str, list[Sample]]] = {}
    for device in dict.fromkeys(rows.device for rows in found.tables):
        known = datasheets()[device]
        tables = [rows for rows in found.tables if rows.device == device]
        event = event_seconds(tables, known.launch_s) or _sister_event(found, known, device)
        for rows in tables:
            if rows.dtype != "f32" or (device, rows.name) in THROTTLED:
                continue
            weight = FEW_WEIGHT if len(rows.seconds) < FEW_ROWS and not rows.host_floor else 1.0
            sample = Sample(rows, known.sheet, timer_of(rows, event, known.sheet), known.launch_s, weight)
            grouped.setdefault(known.model, {}).setdefault(rows.name, []).append(sample)
    return grouped


def _sister_event(found: Found, known: Sheet, device: str) -> float:
    """The event cost of another device of the same model, for a device without elementwise tables."""
    sisters = {rows.device for rows in found.tables if datasheets()[rows.device].model == known.model} - {device}
    return max((event_seconds([r for r in found.tables if r.device == s], known.launch_s) for s in sisters), default=0)


def build(found: Found, models: Iterable[str] | None = None, seed: int = 0) -> dict[str, Calibration]:
    """Build the calibration of each device model that has op tables, or of ``models``."""
    grouped = samples_by_model(found)
    return {model: build_one(model, grouped, seed) for model in (models or sorted(grouped))}


def with_host(calibration: Calibration, found: Found) -> Calibration:
    """``calibration`` with the dispatch times of the host and the rounding of the allocator, from traces on its
    model."""
    devices = [name for name, sheet in datasheets().items() if sheet.model == calibration.name]
    times = next((found.dispatch[name] for name in devices if name in found.dispatch), {})
    sizes = {f"granularity of {name}": found.granularity[name] for name in devices if found.granularity.get(name)}
    return replace(calibration, dispatch_ns=times, notes={**calibration.notes, **sizes})


def build_one(model: str, grouped: dict[str, dict[str, list[Sample]]], seed: int = 0) -> Calibration:
    """Fit every class of ``model``. The trees of a class without rows come from other devices, if they have such
    rows."""
    own = grouped[model]
    classes: dict[str, ClassFit] = {}
    hidden = {f"class {name}": why for (device, name), why in THROTTLED.items() if datasheets()[device].model == model}
    for name in CLASSES:
        others = {
            other: classes_of[name] for other, classes_of in grouped.items() if other != model and name in classes_of
        }
        if name in own and not shows_kernels(own[name]):
            hidden[f"class {name}"] = "left out: the host's time hides every kernel"
        elif name in own:
            classes[name] = fit_class(own[name], seed=seed, source=_source(own[name]))
        elif name == "linear" and others and "bmm" in classes:
            classes[name] = _linear_as_bmm(classes["bmm"], grouped, others, seed)
        elif others and BESIDE.get(name) in classes:
            classes[name] = _borrowed(name, classes[BESIDE[name]], others, grouped, seed)
    known = next(sheet for sheet in datasheets().values() if sheet.model == model)
    first = min((s for samples in own.values() for s in samples), key=lambda s: not s.rows.host_floor)
    timers = {
        f"event_us of {s.rows.device}": 1e6 * s.timer.event_s for ss in own.values() for s in ss if s.timer.host_s
    }
    floors = {
        f"host_us of {s.rows.source} on {s.rows.device}": 1e6 * s.timer.host_s
        for samples in own.values()
        for s in samples
        if s.timer.host_s
    }
    table = measured_table((s for samples in own.values() for s in samples), first.sheet)
    notes = {**timers, **floors, **hidden}
    return Calibration(
        model,
        first.sheet,
        round(1e9 * first.launch_s),
        classes,
        table,
        notes,
        watts=known.watts,
        capability=known.capability,
        vendor=known.vendor,
    )


def measured_table(samples: Iterable[Sample], sheet: Datasheet) -> dict[str, float]:
    """``{part key: ns}``: the median of the readings that are not held out, from tables without a timer around each
    call and for devices with exactly the datasheet ``sheet``."""
    readings: dict[str, list[float]] = {}
    for sample in samples:
        if sample.sheet == sheet and not sample.rows.host_floor:
            rows = sample.rows.where(~split(sample.rows))
            for key, seconds in zip(rows.keys(), rows.seconds.tolist(), strict=True):
                readings.setdefault(key, []).append(1e9 * seconds)
    return {key: float(np.median(values)) for key, values in readings.items()}


def _linear_as_bmm(bmm: ClassFit, grouped: dict, others: dict, seed: int) -> ClassFit:
    """The class ``linear`` of a device without a usable table: the fit of its batched products, with the efficiency
    times the median ratio of ``linear`` to ``bmm`` on other devices."""
    efficiency = bmm.efficiency * _ratio("bmm", others, grouped, seed)
    return ClassFit(efficiency, bmm.trees, f"as bmm, times the ratio on {', '.join(sorted(others))}", trees_of="bmm")


def _borrowed(name: str, beside: ClassFit, others: dict, grouped: dict, seed: int) -> ClassFit:
    """The fit of a class without rows: the trees of the other devices, and the efficiency of ``beside`` times the
    median ratio of the two classes on those devices."""
    efficiency = beside.efficiency * _ratio(BESIDE[name], others, grouped, seed)
    return taught_class(list(others.values()), efficiency, seed=seed, source=f"taught by {', '.join(sorted(others))}")


def _ratio(beside: str, others: dict, grouped: dict, seed: int) -> float:
    """The median over other devices of the efficiency of a class, whose samples are ``others``, over that of the class
    ``beside``; 1 if no device has both."""
    ratios = []
    for other, samples in others.items():
        if near := grouped[other].get(beside):
            mine, theirs = (fit_class(s, seed=seed, trees=False).efficiency for s in (samples, near))
            ratios.append(mine / theirs)
    return float(np.median(ratios)) if ratios else 1.0


def _source(samples: list[Sample]) -> str:
    names = dict.fromkeys(f"{sample.rows.source} on {sample.rows.device}" for sample in samples)
    return "; ".join(names)


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write the device file ``path`` (``.toml``) and its trees (``.npz``, in the same folder)."""
    arrays: dict[str, np.ndarray] = {}
    shared = load_calibration(calibration.like).classes if calibration.like else {}
    for name, fit in calibration.classes.items():
        if fit.trees is not None and not fit.trees_of and shared.get(name) is not fit:
            arrays |= arrays_of(fit.trees, name)
    if arrays:
        write_npz(path.with_suffix(".npz"), arrays)
    write_text(path, device_text(calibration))
