"""Read DeepBench's spreadsheets (baidu-research/DeepBench): matrix products, convolutions and recurrent layers.

The tables hold the forward pass and both gradients. Times are in milliseconds, as means over repeated calls without a
timer around each call.
"""

from __future__ import annotations

import re
import warnings
from math import isfinite
from pathlib import Path

import numpy as np

from simdev.calibrate.observations import Found, Observations
from simdev.errors import InvalidInput, Unsupported
from simdev.files import open_zip
from simdev.problem.opcost.parts import conv_name

SINGLE = re.compile(r"fp32", re.IGNORECASE)
HALF = re.compile(r"mixed", re.IGNORECASE)  # 16-bit inputs on tensor cores, 32-bit sums
DEVICE = re.compile(r"(?:^|_)([A-Za-z0-9]+)\.xlsx$")
LARGEST = 1 << 40
MAX_UNPACKED, MAX_CELLS = 16 << 20, 1 << 22  # bytes and cells of a workbook, with the gaps between its cells
GATES = {"Vanilla": 1, "GRU": 3, "LSTM": 4}
STEPS = (("rnn", "time forward"), ("rnn_dgrad", "time backward wrt inputs"), ("rnn_wgrad", "time backward wrt weights"))
GRADIENTS = (("conv", "forward ("), ("conv_dgrad", "wrt inputs"), ("conv_wgrad", "wrt parameters"))


def is_workbook(path: Path) -> bool:
    return path.name.endswith(".xlsx")


def sheet_rows(path: str | Path) -> list[tuple[str, dict[str, str | float]]]:
    """``(sheet, {column letters: value})`` of each row of an ``.xlsx`` workbook that is not empty. Values are texts and
    floats; of a formula, the stored result.

    Raises :class:`InvalidInput` if the file is not a workbook, is damaged, or is too large, and
    :class:`Unsupported` without the package openpyxl.
    """
    try:
        import openpyxl
    except ImportError:
        raise Unsupported("reading .xlsx workbooks needs the package openpyxl: pip install 'simdev[excel]'") from None
    from openpyxl.utils import get_column_letter

    found: list[tuple[str, dict[str, str | float]]] = []
    seen = 0
    try:
        with open_zip(path) as archive, warnings.catch_warnings(action="ignore"):
            if sum(part.file_size for part in archive.infolist()) > MAX_UNPACKED:  # zipfile unpacks no more than these
                raise InvalidInput(f"larger than {MAX_UNPACKED} bytes unpacked: refused", source=path)
            book = openpyxl.load_workbook(archive.fp, read_only=True, data_only=True)
            for sheet in book.worksheets:
                sheet.reset_dimensions()  # as the cells say, not as the file claims
                for row in sheet.iter_rows(values_only=True):
                    seen += 1 + len(row)
                    if seen > MAX_CELLS:
                        raise InvalidInput(f"more than {MAX_CELLS} cells: refused", source=path)
                    values = ((column, _value(value)) for column, value in enumerate(row, 1))
                    cells = {get_column_letter(column): value for column, value in values if value not in (None, "")}
                    if cells:
                        found.append((sheet.title, cells))
    except InvalidInput as error:
        raise InvalidInput(f"not a readable workbook ({error.message})", source=path) from None
    return found


def _value(value: object) -> str | float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not isfinite(value):
            raise ValueError(f"{value} is not a number")
        return float(value)
    return value if isinstance(value, str) else None


def read_workbook(path: Path, found: Found) -> None:
    """Add the tables of a results workbook to ``found``. Rows that cannot be used are counted by section."""
    match = DEVICE.search(path.name)
    device = match.group(1) if match else path.stem
    rows: dict[tuple[str, str], list[tuple[tuple[int, ...], float]]] = {}
    sheet: str | None = None
    section, header = "", dict[str, str]()
    for name, cells in sheet_rows(path):
        if name != sheet:
            sheet, section, header = name, "", {}
        dtype = "f32" if SINGLE.search(name) else "f16" if HALF.search(name) else None
        if dtype is None:
            continue
        if isinstance(title := cells.get("A"), str):
            section = title.strip()
        if isinstance(cells.get("C"), str):
            header = {str(text).strip().lower(): column for column, text in reversed(cells.items())}
        elif header and isinstance(cells.get("C"), float):
            for part, dims, milliseconds in _measured(section, _Row(cells, header), found, path):
                if not all(0 <= size <= LARGEST for size in dims):
                    found.problems[f"{path}: a row with a size that is out of range"] += 1
                    continue
                rows.setdefault((part, dtype), []).append((dims, milliseconds))
    for (part, dtype), measured in rows.items():
        dims = np.array([dims for dims, _ in measured], np.int64)
        seconds = np.array([milliseconds for _, milliseconds in measured]) / 1e3
        found.tables.append(Observations(device, part, dtype, dims, seconds, "DeepBench"))


class _Row:
    """The cells of a row by the header of the section."""

    def __init__(self, cells: dict, header: dict):
        self.cells, self.header = cells, header

    def find(self, *starts: str) -> float | None:
        """The number in the first column whose header begins with one of ``starts``."""
        for start in starts:
            for text, column in self.header.items():
                if text == start or (len(start) > 1 and text.startswith(start)):
                    value = self.cells.get(column)
                    return value if isinstance(value, float) else None
        return None

    def find_all(self, *columns: tuple[str, ...]) -> list[float]:
        """:meth:`find` for each of several columns; empty if one of them has no number."""
        numbers = [number for starts in columns if (number := self.find(*starts)) is not None]
        return numbers if len(numbers) == len(columns) else []


def _measured(section: str, row: _Row, found: Found, path: Path):
    if section.startswith("Dense Matrix"):
        dims = row.find_all(("m",), ("n",), ("k",))
        time = row.find("time")
        if dims and time:
            yield "gemm", (1, *map(int, dims)), time
            return
    elif section == "Convolution":
        names = [("n",), ("c",), ("k",), ("h",), ("w",), ("p",), ("q",), ("r", "r (filter"), ("s", "s (filter"),
                 ("vertical stride",)]  # fmt: skip
        dims = row.find_all(*names)
        if dims:
            sizes = (*_upright(list(map(int, dims))), 1)
            for part, text in GRADIENTS:
                time = row.find(text)
                if time:
                    yield conv_name(sizes) if part == "conv" else part, sizes, time
            return
    elif section.startswith("Recurrent Layers"):
        dims = row.find_all(("hidden units",), ("n",), ("timesteps",))
        times = [(part, row.find(text)) for part, text in STEPS]
        if dims and all(time for _, time in times):
            gates = GATES.get(section.split(" - ")[-1], 0)
            yield from ((part, (gates, *map(int, dims)), time) for part, time in times if gates)
            return
    found.problems[f"{path}: a row of {section!r} without its times, or that no class takes"] += 1


def _upright(dims: list[int]) -> list[int]:
    """The output's extents in the order of the image's, because some sheets give the width first."""
    h, w, p, q = dims[3:7]
    return [*dims[:5], q, p, *dims[7:]] if (h < w) != (p < q) and h != w else dims
