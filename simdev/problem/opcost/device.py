"""Device files: what was measured on one model of accelerator, fitted and tabulated (``simdev calibrate`` writes them).

A device file is a TOML document; the trees that correct the physics lie in an ``.npz`` archive beside it::

    format = 1
    name = "v100-pcie-32gb"
    launch_us = 2.7
    watts = 250                 # the board's power limit, CUDA's compute capability, and the vendor: by these
    capability = 7.0            # simdev.problem.opcost.stand_in finds the file for a board without one
    like = "a100"               # another device file, which serves the classes that this one lacks
    [datasheet]
    peak_tflops = 14.0          # f32
    memory_gb_per_s = 900
    multiprocessors = 80
    [rates]                     # TFLOP/s of other precisions
    bf16 = 312
    [steps]                     # measured over predicted time of whole steps, by precision: scales every fit
    bf16 = 1.03
    [class.gemm]                # see simdev.problem.opcost.parts
    efficiency = 0.83           # the physics over this, times the trees, is the prediction
    trees = true
    rows = 5168
    error_mean = 0.04           # on rows that were held out
    error_median = 0.03
    source = "..."
    [class."product bf16"]      # linear, gemm and bmm on matrix units, by precision: bf16 (f16 too), tf32, f8
    efficiency = 0.75
    [dispatch]                  # host time to issue an op, by kind: us (runtime eager)
    addmm = 31.5
    [table]                     # measured parts: ns
    "gemm(1,64,64,64) f32" = 12345
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np

from simdev.errors import InvalidInput, UnknownName, quoted
from simdev.files import read_toml
from simdev.problem.graph_file import read_npz
from simdev.problem.opcost.parts import DIMENSIONS, KernelPart
from simdev.problem.opcost.physics import PRODUCTS, Datasheet, baseline_s, features, on_matrix_units
from simdev.problem.opcost.tensor_cores import TENSOR_DTYPES
from simdev.problem.opcost.trees import Trees, trees_from

FORMAT = 1
NAME = re.compile(r"[\w.+-]+")  # of a device file; no path
SHELF = Path(__file__).parent.parent / "devices" / "calibrated"
# A part without a fit of its own is as far from its physics as another one: the same kernels, more passes.
LIKE = {"gemm": "linear", "softmax_backward": "softmax", "layer_norm_backward": "layer_norm"}
# On matrix units: a part without a fit of its own is so many times as far from its physics as the fit of another part.
BACKWARD = 1.16  # FlashAttention: 73 % of an A100's peak forward, 63 % backward (Dao 2023, arXiv 2307.08691)
LIKE_ON_MATRIX_UNITS = {
    "attention_backward": ("attention", BACKWARD),
    "flash_attention": ("attention", 1.0),
    "flash_attention_backward": ("flash_attention", BACKWARD),
    "conv3x3": ("conv", 1.0),
    "conv_dgrad": ("conv", 1.0),
    "conv_wgrad": ("conv", 1.0),
    "rnn": ("product", 1.0),
    "rnn_dgrad": ("product", 1.0),
    "rnn_wgrad": ("product", 1.0),
}
LIKE_DTYPE = {"f16": ("bf16",), "tf32": ("bf16",), "f8": ("bf16",)}  # whose fit serves, with the dtype's own peak
ANY_DTYPE = ("vector", "softmax", "softmax_backward", "layer_norm", "layer_norm_backward")  # bytes decide


@dataclass(frozen=True, eq=False)
class ClassFit:
    """How far the kernels of a class are from their physics on one device. ``trees_of`` names the class of the same
    device file whose trees serve this one."""

    efficiency: float
    trees: Trees | None = None
    source: str = ""
    rows: int = 0
    error_mean: float = 0.0
    error_median: float = 0.0
    trees_of: str = ""


@dataclass(frozen=True, eq=False)
class Calibration:
    """A device file in memory. ``steps`` maps a precision to the factor by which whole steps were measured to be slower
    than their fits say; it scales every fit of that precision. f16 and FP8 have the factor of bf16 without one of their
    own: gaps between kernels and clocks under lasting load are alike. ``own`` are the classes of the file itself,
    without those of ``like``. ``ops`` maps :attr:`Signature.key` to the ns of an op's kernels, and ``factors`` a class
    of ops or an optimizer to the ratio of its measured to its costed time: both come from traces of a user's board.
    ``watts`` is the board's power limit, ``capability`` that of CUDA (0: another vendor)."""

    name: str
    sheet: Datasheet
    launch_ns: int
    classes: Mapping[str, ClassFit] = field(default_factory=dict)
    table: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, object] = field(default_factory=dict)
    dispatch_ns: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[str, float] = field(default_factory=dict)
    like: str = ""
    watts: float = 0.0
    capability: float = 0.0
    vendor: str = "nvidia"
    own: frozenset[str] = frozenset()
    ops: Mapping[str, float] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)

    def fit_of(self, part: KernelPart) -> ClassFit | None:
        """The fit that serves ``part``; None if its class or dtype was not measured."""
        if on_matrix_units(part.name, part.dtype):
            return self._on_matrix_units(part.name, part.dtype)
        if part.dtype != "f32" and part.name not in ANY_DTYPE:
            return None
        return self.classes.get(part.name) or self.classes.get(LIKE.get(part.name, ""))

    def _on_matrix_units(self, name: str, dtype: str) -> ClassFit | None:
        name = "product" if name in PRODUCTS else name
        for precision in (dtype, *LIKE_DTYPE.get(dtype, ())):
            fit = self.classes.get(f"{name} {precision}")
            if fit is not None:
                return fit
        if name not in LIKE_ON_MATRIX_UNITS:
            return None
        other, slower = LIKE_ON_MATRIX_UNITS[name]
        fit = self._on_matrix_units(other, dtype)
        return replace(fit, efficiency=fit.efficiency / slower) if fit else None

    def durations(self, parts: Sequence[KernelPart], sheet: Datasheet, launch_ns: int) -> tuple[np.ndarray, list[str]]:
        """``(ns, source)`` of parts on a device with the datasheet ``sheet`` (another than the measured one: transfer).

        ``ns`` float64 ``(n,)``, NaN where nothing is known; ``source`` is ``table``, ``fit`` or empty. Table figures
        serve the measured device alone.
        """
        ns, source = np.full(len(parts), np.nan), [""] * len(parts)
        groups: dict[tuple[str, str], list[int]] = {}
        for number, part in enumerate(parts):
            if sheet == self.sheet and part.key in self.table:
                ns[number], source[number] = self.table[part.key], "table"
            elif self.fit_of(part) is not None:
                groups.setdefault((part.name, part.dtype), []).append(number)
        for (name, dtype), members in groups.items():
            dims = np.array([parts[number].dims for number in members], np.int64)
            fit = self.fit_of(parts[members[0]])
            assert fit is not None, "grouped above by its class"
            slower = self.steps.get(dtype, self.steps.get("bf16", 1.0) if dtype in ("f16", "f8") else 1.0)
            slower *= clock_ratio(self.watts, sheet.watts) if on_matrix_units(name, dtype) else 1.0
            ns[members] = launch_ns + 1e9 * fitted_s(fit, name, dims, sheet, dtype) * slower
            for number in members:
                source[number] = "fit"
        return ns, source


def clock_ratio(watts: float, limit: float) -> float:
    """How much slower a board with a power limit of ``limit`` W runs long kernels on matrix units than the same chip
    with ``watts``: power limits their clock, whose cube grows as the power, as frequency and voltage rise together. At
    least 1; 1 where a limit is not known (0).

    Products and fused attention gain alike where the limit is higher (:mod:`simdev.studies.fidelity.kernels`)."""
    return max(1.0, watts / limit) ** (1 / 3) if watts and limit else 1.0


def fitted_s(fit: ClassFit, name: str, dims: np.ndarray, sheet: Datasheet, dtype: str = "f32") -> np.ndarray:
    """float64 ``(n,)``: seconds of parts of class ``name`` by ``fit``, without the launch."""
    seconds = baseline_s(name, dims, sheet, dtype) / fit.efficiency
    if fit.trees is not None:
        seconds = seconds * fit.trees.factor(features(LIKE.get(name, name), dims, sheet, dtype))
    return seconds


def calibration_names() -> list[str]:
    """Names of the device files that ship with simdev."""
    return sorted(path.stem for path in SHELF.glob("*.toml"))


def load_calibration(name_or_path: str | Path) -> Calibration:
    """A shipped device file by name, or one by path (anything with a slash or ending in ``.toml``)."""
    text = str(name_or_path)
    if "/" in text or text.endswith(".toml"):
        return read_calibration(Path(text))
    if text not in calibration_names():
        raise UnknownName("calibrated device", text, calibration_names())
    return _shipped(text)


@cache
def _shipped(name: str) -> Calibration:
    return read_calibration(SHELF / f"{name}.toml")


def read_calibration(path: Path, *, shares: bool = True) -> Calibration:
    """Read a device file. Raises :class:`InvalidInput` naming the file and the field of what is wrong.

    ``shares`` is False for a file that another one is ``like``: it must hold its classes itself.
    """
    data = read_toml(path)
    if data.get("format") != FORMAT:
        raise InvalidInput(f"format {quoted(data.get('format'))}, expected {FORMAT}", source=path, field="format")
    classes = data.get("class", {})
    if not isinstance(classes, dict) or not all(isinstance(row, dict) for row in classes.values()):
        raise InvalidInput("expected a table of tables", source=path, field="class")
    wants_trees = any(row.get("trees") for row in classes.values())
    arrays = read_npz(path.with_suffix(".npz")) if wants_trees else {}
    datasheet = data.get("datasheet")
    if not isinstance(datasheet, dict):
        raise InvalidInput("missing", source=path, field="datasheet")
    old = "units" if "multiprocessors" not in datasheet else "multiprocessors"  # the key's name before format 1.1
    rates = {dtype: 1e12 * rate for dtype, rate in _table(data.get("rates", {}), path, "rates").items()}
    sheet = Datasheet(
        1e12 * _number(datasheet, "peak_tflops", path),
        1e9 * _number(datasheet, "memory_gb_per_s", path),
        int(_number(datasheet, old, path)),
        tuple(rates.items()),
    )
    like = data.get("like", "")
    if like and (not shares or not isinstance(like, str) or not NAME.fullmatch(like)):
        raise InvalidInput(f"{quoted(like)} is not the name of a device file with classes", source=path, field="like")
    notes = data.get("notes", {})
    if not isinstance(notes, dict):
        raise InvalidInput("expected a table", source=path, field="notes")
    shared = _beside(path, str(like)).classes if like else {}
    return Calibration(
        name=str(data.get("name", path.stem)),
        sheet=sheet,
        launch_ns=round(1e3 * _number(data, "launch_us", path)),
        classes={**shared, **{name: _class(name, row, sheet, arrays, path) for name, row in classes.items()}},
        steps=_table(data.get("steps", {}), path, "steps"),
        like=str(like),
        watts=_number(data, "watts", path) if "watts" in data else 0.0,
        capability=_number(data, "capability", path) if "capability" in data else 0.0,
        vendor=str(data.get("vendor", "nvidia")),
        own=frozenset(classes),
        table=_table(data.get("table", {}), path, "table"),
        notes=notes,
        ops=_table(data.get("ops", {}), path, "ops"),
        factors=_table(data.get("factors", {}), path, "factors"),
        dispatch_ns={kind: 1e3 * us for kind, us in _table(data.get("dispatch", {}), path, "dispatch").items()},
    )


def _beside(path: Path, name: str) -> Calibration:
    """The device file ``name`` in the folder of the one at ``path``, or the shipped one."""
    beside = path.with_name(f"{name}.toml")
    return (
        read_calibration(beside, shares=False) if beside.is_file() and path.parent != SHELF else load_calibration(name)
    )


def _class(name: str, row: dict, sheet: Datasheet, arrays: dict, path: Path) -> ClassFit:
    part, _, dtype = name.partition(" ")
    part = "gemm" if part == "product" else part
    if part not in DIMENSIONS or (dtype and dtype not in TENSOR_DTYPES):
        raise UnknownName("op class", name, DIMENSIONS, source=path, field="class")
    where = f"class.{name}"
    trees = None
    if row.get("trees"):
        probe = features(part, np.ones((1, DIMENSIONS[part]), np.int64), sheet, dtype or "f32")
        owner = name if row["trees"] is True else str(row["trees"])
        trees = trees_from(arrays, owner, probe.shape[1], path.with_suffix(".npz"))
    return ClassFit(
        efficiency=_number(row, "efficiency", path, where),
        trees=trees,
        source=str(row.get("source", "")),
        rows=int(_number(row, "rows", path, where, least=0)) if "rows" in row else 0,
        error_mean=_number(row, "error_mean", path, where, least=0) if "error_mean" in row else 0.0,
        error_median=_number(row, "error_median", path, where, least=0) if "error_median" in row else 0.0,
        trees_of=row["trees"] if isinstance(row.get("trees"), str) else "",
    )


def _table(table: object, path: Path, where: str) -> dict[str, float]:
    if not isinstance(table, dict):
        raise InvalidInput("expected a table of numbers", source=path, field=where)
    return {key: _number(table, key, path, where) for key in table}


def _number(row: Mapping, name: str, path: Path, where: str = "", least: float = 1e-18) -> float:
    value = row.get(name)
    field_name = f"{where}: {name}" if where else name
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < 1e18:
        sort = "a positive number" if least else "a number of 0 or more"
        raise InvalidInput(f"{quoted(value)} is not {sort}", source=path, field=field_name)
    return float(value)


def device_text(calibration: Calibration) -> str:
    """The TOML of a device file (without its trees)."""
    sheet = calibration.sheet
    lines = [f"format = {FORMAT}", f'name = "{calibration.name}"', f"launch_us = {calibration.launch_ns / 1e3:.10g}"]
    lines += [f"{key} = {getattr(calibration, key):g}" for key in ("watts", "capability") if getattr(calibration, key)]
    lines += [f"vendor = {_quoted(calibration.vendor)}"] if calibration.vendor != "nvidia" else []
    lines += [f"like = {_quoted(calibration.like)}"] if calibration.like else []
    lines += ["", "[datasheet]", f"peak_tflops = {sheet.flops / 1e12:.10g}"]
    lines += [f"memory_gb_per_s = {sheet.bandwidth / 1e9:.10g}", f"multiprocessors = {sheet.multiprocessors}"]
    for name, numbers in (("rates", {dtype: rate / 1e12 for dtype, rate in sheet.rates}), ("steps", calibration.steps)):
        rows = [f"{key} = {value:.6g}" for key, value in numbers.items()]
        lines += ["", f"[{name}]", *rows] if rows else []
    if calibration.notes:
        lines += ["", "[notes]", *(f"{_quoted(key)} = {_value(value)}" for key, value in calibration.notes.items())]
    shared = load_calibration(calibration.like).classes if calibration.like else {}
    for name, fit in calibration.classes.items():
        if shared.get(name) is fit:
            continue
        lines += ["", f"[class.{_key(name)}]", f"efficiency = {fit.efficiency:.6g}", f"rows = {fit.rows}"]
        lines += [f"error_mean = {fit.error_mean:.4f}", f"error_median = {fit.error_median:.4f}"]
        trees = _quoted(fit.trees_of) if fit.trees_of else str(fit.trees is not None).lower()
        lines += [f"trees = {trees}", f"source = {_quoted(fit.source)}"]
    if calibration.dispatch_ns:
        times = sorted(calibration.dispatch_ns.items())
        lines += ["", "[dispatch]", *(f"{_quoted(kind)} = {ns / 1e3:.10g}" for kind, ns in times)]
    for name, table in (("factors", calibration.factors), ("ops", calibration.ops), ("table", calibration.table)):
        rows = [f"{_quoted(key)} = {value:.10g}" for key, value in sorted(table.items())]
        lines += ["", f"[{name}]", *rows] if rows else []
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    """A key of TOML: quoted if it has a space."""
    return _quoted(name) if " " in name else name


def _quoted(text: object) -> str:
    escaped = "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or c in '"\\' else c for c in str(text))
    return f'"{escaped}"'


def _value(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, (int, float)) else _quoted(value)
