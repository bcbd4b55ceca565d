"""NeuSight's op tables (sitar-lab/NeuSight, ``data/dataset/train/collect``): forward times by shape, fp32, PyTorch 2.1.

Times in milliseconds, taken by CUDA events around a single call: a reading is the kernels' time plus what the events
cost, and never less than the host takes to issue the call.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from simdev.calibrate.observations import Found, Observations
from simdev.errors import InvalidInput

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
    "linear": "BMNK", "bmm": "BMNK", "softmax": "BH", "layer_norm": "BH", "vector": "BH",
    "conv3x3": ("B", "Input_Channel", "Output_Channel", "Kernel_Szie", "Input_Size", "Stride", "Padding"),
}  # fmt: skip


def is_op_table(path: Path) -> bool:
    """True for ``.../<op>/<device>.csv[.gz]`` with an op that is known."""
    return path.parent.name in READERS and path.name.endswith((".csv", ".csv.gz"))


def read_op_table(path: Path, found: Found) -> None:
    """Add the table at ``path`` to ``found``. Rows that are cut off or hold no positive time are counted as problems.

    Raises :class:`InvalidInput` for a file that cannot be read at all, or lacks a column.
    """
    op = path.parent.name
    name, dims_of = READERS[op]
    dims, seconds = [], []
    for row in _records(path, [*COLUMNS[name], "Latency"], found):
        try:
            shape = {column: int(row[column]) for column in COLUMNS[name]}
            milliseconds = float(row["Latency"])
        except (TypeError, ValueError):
            found.problems[f"{path}: a row with a missing or malformed number"] += 1
            continue
        found_dims = dims_of(shape)
        if not 0 < milliseconds < 1e7 or min(found_dims) < 1 or max(found_dims) > 1 << 40:
            found.problems[f"{path}: a row with a time or size that is not positive"] += 1
            continue
        dims.append(found_dims)
        seconds.append(milliseconds / 1e3)
    if dims:
        device = path.name.removesuffix(".gz").removesuffix(".csv")
        found.tables.append(
            Observations(device, name, "f32", np.array(dims, np.int64), np.array(seconds), f"NeuSight {op}", True)
        )


def _records(path: Path, columns: list[str], found: Found) -> Iterator[dict[str, str]]:
    opener = gzip.open if path.name.endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            if missing:
                raise InvalidInput(f"column {missing[0]!r} is missing", source=path, field="line 1")
            yield from reader
    except EOFError:
        found.problems[f"{path}: the archive ends early; the rows before that were used"] += 1
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidInput(str(error), source=path) from None
