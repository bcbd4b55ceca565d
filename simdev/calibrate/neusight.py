"""Read NeuSight's op tables (sitar-lab/NeuSight, ``data/dataset/train/collect``): forward times by shape in fp32.

Times are in milliseconds, measured in PyTorch 2.1 by CUDA events around a single call. A reading is the time of the
kernels plus the cost of the events, and at least the time that the host needs to issue the call.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from simdev.calibrate.observations import Found, Observations
from simdev.errors import InvalidInput
from simdev.files import open_text

FLOAT = 4


def _vector(inputs: int) -> tuple[str, Callable[[dict], tuple[int, ...]]]:
    return "vector", lambda r: (inputs * FLOAT * r["B"] * r["H"], FLOAT * r["B"] * r["H"])


def _conv(r: dict) -> tuple[int, ...]:
    size, kernel, stride = r["Input_Size"], r["Kernel_Szie"], r["Stride"]
    out = (size + 2 * r["Padding"] - kernel) // stride + 1
    return (r["B"], r["Input_Channel"], r["Output_Channel"], size, size, out, out, kernel, kernel, stride, 1)


READERS = {
    "linear": ("linear", lambda r: (r["B"], r["M"], r["N"], r["K"])),
    "bmm": ("bmm", lambda r: (r["B"], r["M"], r["N"], r["K"])),
    "conv": ("conv3x3", _conv),
    "softmax": ("softmax", lambda r: (r["B"], r["H"])),
    "ln": ("layer_norm", lambda r: (r["B"], r["H"])),
    **dict.fromkeys(("add", "mul", "div", "pow"), _vector(2)),
    **dict.fromkeys(("addu", "mulu", "divu", "powu", "relu", "gelu", "tanh"), _vector(1)),
}
COLUMNS = {
    "linear": "BMNK",
    "bmm": "BMNK",
    "softmax": "BH",
    "layer_norm": "BH",
    "vector": "BH",
    "conv3x3": ("B", "Input_Channel", "Output_Channel", "Kernel_Szie", "Input_Size", "Stride", "Padding"),
}


def is_op_table(path: Path) -> bool:
    """True for a CSV file (``.csv`` or ``.csv.gz``) whose header has the columns of NeuSight's op tables."""
    if not path.name.endswith((".csv", ".csv.gz")):
        return False
    try:
        with open_text(path) as file:
            return {"OPName", "Latency", "Device"} <= set(file.readline(4096).strip().split(","))
    except InvalidInput:
        return False


def read_op_table(path: Path, found: Found) -> None:
    """Add the file ``path`` to ``found``, as one table for each op and device. Truncated rows, rows of unknown ops and
    rows without a positive time are counted as problems.

    The name of the folder or of the file gives the op, or else the row itself. Raises :class:`InvalidInput` if the file
    cannot be read or lacks a column.
    """
    named = next((name for name in (path.parent.name, path.name.split(".")[0]) if name in READERS), None)
    tables: dict[tuple[str, str], tuple[list, list]] = {}
    for row in _records(path, found):
        op = named or row.get("OPName") or ""
        if op not in READERS:
            found.problems[f"{path}: a row of the op {op!r}, which no class takes"] += 1
            continue
        measured = _measured(op, row)
        if measured is None:
            found.problems[f"{path}: a row with a number that is missing or not positive"] += 1
            continue
        device = re.sub(r"\s+", "_", (row.get("Device") or "").strip())
        dims, seconds = tables.setdefault((op, device), ([], []))
        dims.append(measured[0])
        seconds.append(measured[1])
    for (op, device), (dims, seconds) in tables.items():
        arrays = np.array(dims, np.int64), np.array(seconds)
        found.tables.append(Observations(device, READERS[op][0], "f32", *arrays, f"NeuSight {op}", True))


def _measured(op: str, row: dict[str, str]) -> tuple[tuple[int, ...], float] | None:
    name, dims_of = READERS[op]
    try:
        dims = dims_of({column: int(row[column]) for column in COLUMNS[name]})
        seconds = float(row["Latency"]) / 1e3
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):
        return None
    return (dims, seconds) if 0 < seconds < 1e4 and 0 < min(dims) and max(dims) <= 1 << 40 else None


def _records(path: Path, found: Found) -> Iterator[dict[str, str]]:
    with open_text(path) as file:
        try:
            reader = csv.DictReader(file)
            if "Latency" not in (reader.fieldnames or ()):
                raise InvalidInput("column 'Latency' is missing", source=path, field="line 1")
            yield from reader
        except EOFError:
            found.problems[f"{path}: the archive ends early; the rows before that were used"] += 1
