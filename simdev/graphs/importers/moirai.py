"""Import the spreadsheets of Moirai (Zhang et al. 2023; moirai-placement/moirai): unequal devices, measured transfers.

A row is a task: its time on each device (``p0``, ``p1``, ... in ms), its successors, its weights (``mi``), and for each
ordered pair of devices the time of its transfer to each successor (``pc01``, ...). The first row is a virtual source
with the capacities (``m0``, ...); it is left out, and so is a virtual sink. Weights and capacities of real models are
in bits. The example of the paper has small numbers without a unit, which stand for bytes here.

Transfers have times, not sizes, so the tensors of the graph hold no bytes. :func:`read_problem` makes the whole
problem, with the devices and these times.
"""

from __future__ import annotations

import io
import os
import re

import numpy as np

from simdev.errors import InvalidInput, Unsupported
from simdev.graphs.importers import Imported, importer
from simdev.graphs.importers.reading import name_of, read_input
from simdev.problem.costs import CostTable
from simdev.problem.graph import ComputationGraph, GraphBuilder
from simdev.problem.problem import Problem, Rules
from simdev.problem.topology import Device, DeviceKind, Link, Topology

MAGIC = bytes.fromhex("d0cf11e0a1b11ae1")  # of the compound file that holds an Excel 97 workbook
NS = 1e6  # ms
BITS_FROM = 1e8  # capacities from here on are in bits


@importer("moirai", detects=lambda data, path: data.startswith(MAGIC))
def parse(data: bytes, path, *, format: str, device_kind: str) -> Imported:
    sheet = _Sheet(data, path)
    graph, tasks, _ = sheet.graph()
    measured = {
        f"p{device}": {str(task): sheet.tasks[task].times[device] * NS for task in tasks}
        for device in range(sheet.devices)
    }
    return Imported(graph, measured)


def read_problem(path: str | os.PathLike, *, contention: str = "fifo") -> Problem:
    """The placement problem of a spreadsheet: its tasks on its devices, with its transfer times.

    Of the transfers that leave or enter a device, one is under way at a time (the congestion of the paper); with the
    contention ``none``, they do not delay each other. Raises :class:`InvalidInput` naming the cell that is malformed.
    """
    sheet = _Sheet(read_input(path), path)
    graph, tasks, sends = sheet.graph()
    count = sheet.devices
    kinds = [
        DeviceKind(f"p{d}", max(1, size), {"f32": 1e9}, 1e12, granularity=1) for d, size in enumerate(sheet.memory)
    ]
    devices = tuple(Device(f"d{d}", kind) for d, kind in enumerate(kinds))
    links = tuple(Link((device.name, "switch"), 10**9, 0) for device in devices)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    pair_class = np.full((count, count), -1)
    for number, (a, b) in enumerate(pairs):
        pair_class[a, b] = number
    times = np.array([sheet.tasks[task].times for task in tasks]).T * NS
    transfer = np.array([[send[a][b] for send in sends] for a, b in pairs]) * NS
    costs = CostTable(
        np.maximum(1, np.round(times)).astype(np.int64),
        np.arange(count),
        np.maximum(1, np.round(transfer)).astype(np.int64),
        pair_class,
        np.zeros(graph.n_ops, np.int64),
    )
    return Problem(graph, Topology(name_of(path), devices, links, ("switch",)), costs, Rules(contention=contention))


def first_sheet(data: bytes, path) -> dict[tuple[int, int], str | float]:
    """The texts and numbers of the first sheet of an Excel 97 workbook by ``(row, column)``, both from 0.

    Raises :class:`InvalidInput` for a file that is no such workbook or is damaged, and :class:`Unsupported` without the
    package xlrd.
    """
    try:
        import xlrd
    except ImportError:
        raise Unsupported("reading .xls workbooks needs the package xlrd: pip install 'simdev[excel]'") from None
    try:
        book = xlrd.open_workbook(file_contents=data, logfile=io.StringIO(), ragged_rows=True, on_demand=True)
        rows = list(book.sheet_by_index(0).get_rows())
    except Exception:  # damaged bytes reach assertions, look-ups and unpacking all over xlrd
        raise InvalidInput("is no Excel 97 workbook, or is damaged", source=path) from None
    return {
        (row, column): cell.value
        for row, cells in enumerate(rows)
        for column, cell in enumerate(cells)
        if cell.ctype in (xlrd.XL_CELL_TEXT, xlrd.XL_CELL_NUMBER)
    }


class _Task:
    """A row: times per device, weights, and ``successors`` with ``sends[successor][a][b]`` in ms."""

    def __init__(self, times: list[float], weight: float):
        self.times, self.weight = times, weight
        self.sends: dict[int, list[list[float]]] = {}


class _Sheet:
    def __init__(self, data: bytes, path):
        self.path, self.cells = path, first_sheet(data, path)
        self.columns = {str(text): column for (row, column), text in self.cells.items() if row == 0}
        self.devices = sum(bool(re.fullmatch(r"p\d+", name)) for name in self.columns)
        needed = ["task", "dir_succ", "mi"]
        needed += [f"{name}{d}" for name in "pm" for d in range(self.devices)]
        needed += [f"pc{a}{b}" for a in range(self.devices) for b in range(self.devices) if a != b]
        missing = [name for name in needed if name not in self.columns]
        if missing or not 2 <= self.devices <= 9:
            what = f"has no column {missing[0]!r}" if missing else f"has {self.devices} devices"
            raise InvalidInput(f"{what}: no spreadsheet of Moirai", source=path)
        capacities = [self._number(1, f"m{d}") for d in range(self.devices)]
        scale = 8 if max(capacities) >= BITS_FROM else 1
        self.memory = [int(capacity // scale) for capacity in capacities]
        self.scale = scale
        self.tasks = self._tasks()

    def _tasks(self) -> dict[int, _Task]:
        tasks: dict[int, _Task] = {}
        row = 1
        while isinstance(self.cells.get((row, self.columns["task"])), float):
            number = int(self._number(row, "task"))
            if number in tasks:
                raise self._fail(row, "task", "is given twice")
            task = tasks[number] = _Task(
                [self._number(row, f"p{d}") for d in range(self.devices)], self._number(row, "mi")
            )
            readers = self._numbers(row, "dir_succ")
            for place, reader in enumerate(readers if row > 1 else []):
                task.sends[int(reader)] = [
                    [0.0 if a == b else self._send(row, a, b, place, len(readers)) for b in range(self.devices)]
                    for a in range(self.devices)
                ]
            row += 1
        del tasks[next(iter(tasks))]  # the virtual source
        sinks = [n for n, task in tasks.items() if not any(task.times) and not task.weight and not task.sends]
        for sink in sinks:
            del tasks[sink]
        for number, task in tasks.items():
            task.sends = {reader: times for reader, times in task.sends.items() if reader not in sinks}
            unknown = [reader for reader in task.sends if reader not in tasks]
            if unknown:
                raise InvalidInput(f"task {unknown[0]} does not exist", source=self.path, field=f"task {number}")
        if not tasks:
            raise InvalidInput("holds no task", source=self.path)
        return tasks

    def graph(self) -> tuple[ComputationGraph, list[int], list[list[list[float]]]]:
        """The graph, the task of each op, and the transfer times of each tensor."""
        builder, ops = GraphBuilder(name_of(self.path), meta={"source": "Moirai spreadsheet"}), {}
        for number, task in self.tasks.items():
            size = -int(-task.weight // self.scale)
            ops[number] = builder.op(str(number), "op", signature=str(number), persistent_bytes=size)
        for number, task in self.tasks.items():
            for reader in task.sends:
                builder.connect(builder.tensor(ops[number], 0), ops[reader])
        graph = builder.build()
        tasks = [int(name) for name in graph.op_names]
        ends = zip(graph.edge_source.tolist(), graph.consumers.tolist(), strict=True)
        return graph, tasks, [self.tasks[tasks[a]].sends[tasks[b]] for a, b in ends]

    def _send(self, row: int, a: int, b: int, place: int, count: int) -> float:
        times = self._numbers(row, f"pc{a}{b}") or [0.0] * count
        if len(times) != count:
            raise self._fail(row, f"pc{a}{b}", f"holds {len(times)} times for {count} successors")
        return times[place]

    def _number(self, row: int, column: str) -> float:
        found = self._numbers(row, column)
        if len(found) != 1:
            raise self._fail(row, column, "is not one number")
        return found[0]

    def _numbers(self, row: int, column: str) -> list[float]:
        value = self.cells.get((row, self.columns[column]), "")
        texts = [value] if isinstance(value, float) else [text for text in value.split(",") if text.strip()]
        try:
            found = [float(text) for text in texts]
        except ValueError:
            found = [-1.0]
        if not all(0 <= number < 1e15 for number in found):
            raise self._fail(row, column, "is not a number from 0 on")
        return found

    def _fail(self, row: int, column: str, message: str) -> InvalidInput:
        return InvalidInput(message, source=self.path, field=f"row {row + 1}: {column}")
