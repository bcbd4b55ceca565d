"""Importers read the graph files of other projects, one file here for each format, found by its presence.

:func:`import_graph` finds the format, or takes the given one, and returns a :class:`ComputationGraph` together with the
measured times that the file holds, if it holds any. An importer checks every field of its file and executes no code
from it. It builds the graph with :class:`simdev.problem.graph.GraphBuilder`.

==================  ==================================================================================================
format              content
==================  ==================================================================================================
npz                 a graph file of simdev
json, csv           ops and edges in plain text: :mod:`simdev.graphs.importers.plain` documents the fields
networkx            node-link JSON of a ``networkx.DiGraph``: :mod:`simdev.graphs.importers.networkx_graph`
onnx                an ONNX model: an inference graph with shapes inferred (needs the ``onnx`` extra)
pipedream           ``graph.txt`` profiles of PipeDream (Narayanan et al. 2019)
dnn-partitioning    JSON inputs of Tarnawski et al. 2020
piper               JSON inputs of Piper (Tarnawski et al. 2021)
baechi              JSON of Baechi's profile of a TensorFlow graph (Jeon et al. 2020)
cost-graph          TensorFlow's CostGraphDef in protobuf text form
execution-trace     JSON of PyTorch's ExecutionTraceObserver: :mod:`simdev.graphs.importers.execution_trace`
chakra              MLCommons Chakra traces, ``.et`` or jsonized: :mod:`simdev.graphs.importers.chakra`
==================  ==================================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simdev.errors import InvalidInput, UnknownName
from simdev.graphs.importers.reading import read_input
from simdev.problem.graph import ComputationGraph
from simdev.shelf import Shelf


@dataclass(frozen=True)
class Imported:
    """The content of an imported file. ``measured`` maps a device kind to ``{op signature: ns}``, for
    :class:`simdev.problem.costs.CostModel`; it is None if the file has no times."""

    graph: ComputationGraph
    measured: dict[str, dict[str, float]] | None = None


@dataclass(frozen=True)
class Importer:
    """A registered importer: ``function(data, path, format=..., device_kind=...)`` returns an :class:`Imported`.

    ``detects(data, path)`` says from the content of a file whether it has this format. Formats with ``general`` have
    no mark of their own; they are tried after the others. ``read(path)`` returns the content of files in this format
    and of those whose name ends in ``suffix``.
    """

    name: str
    function: Callable[..., Imported]
    detects: Callable[[bytes, str], bool]
    general: bool = False
    suffix: str = ""
    read: Callable[[str | os.PathLike], bytes] = read_input


SHELF: Shelf[Importer] = Shelf("format", "graphs.importers", "simdev.importers", "importer")


def importer(name: str, **fields: Any) -> Callable[[Callable[..., Imported]], Callable[..., Imported]]:
    """Register the decorated function for the format ``name``; the arguments are the fields of :class:`Importer`."""

    def register(function: Callable[..., Imported]) -> Callable[..., Imported]:
        SHELF.add(Importer(name, function, **fields))
        return function

    return register


def json_with(*marks: bytes, within: int | None = None) -> Callable[[bytes, str], bool]:
    """``detects`` of a JSON format: whether all ``marks`` are in the first ``within`` bytes (None: in the file)."""

    def detects(data: bytes, path: str) -> bool:
        return is_json(data) and all(mark in data[:within] for mark in marks)

    return detects


def is_json(data: bytes) -> bool:
    """Whether a file looks like JSON."""
    return data[:65536].lstrip().startswith((b"{", b"["))


def import_graph(
    path: str | os.PathLike,
    format: str | None = None,
    *,
    device_kind: str = "accelerator",
    fix_units: bool = False,
    sizes: dict[str, int] | None = None,
) -> Imported:
    """Read a graph file in ``format``, or in the format that its content shows.

    Most profiles do not name the device of the measurement, so their times are stored under ``device_kind``.
    ``fix_units`` multiplies the edge costs of dnn-partitioning files by 1000 if they are too small for the node times
    by that factor. ``sizes`` are those of the dynamic axes of an ONNX model, by name. Raises :class:`InvalidInput`,
    which names the file and the field, if the file is malformed.
    """
    formats = SHELF.load()
    if format is not None and format not in formats:
        raise UnknownName("format", format, formats)
    by_suffix = (one for one in formats.values() if one.suffix and str(path).endswith(one.suffix))
    reader = formats[format] if format else next(by_suffix, None)
    data = reader.read(path) if reader else read_input(path)
    format = format or detect_format(data, path)
    if fix_units and format != "dnn-partitioning":
        raise InvalidInput(f"only dnn-partitioning files have units to fix, this is {format}", source=path)
    if sizes and format != "onnx":
        raise InvalidInput(f"only ONNX models have dynamic axes, this is {format}", source=path)
    options: dict[str, Any] = {"fix_units": True} if fix_units else {"sizes": sizes} if sizes else {}
    try:
        return formats[format].function(data, path, format=format, device_kind=device_kind, **options)
    except InvalidInput as error:
        if error.source == path:
            raise
        raise InvalidInput(error.message, source=path, field=error.field) from None  # name the file, not the graph


def detect_format(data: bytes, path: str | os.PathLike) -> str:
    """Detect the format of a file from its content. Raises :class:`InvalidInput` if no importer detects it."""
    formats = SHELF.load()
    for one in sorted(formats.values(), key=lambda one: one.general):
        if one.detects(data, str(path)):
            return one.name
    if is_json(data):
        raise InvalidInput("JSON, but neither ops nor nodes of a known format", source=path)
    raise InvalidInput(f"not a graph in any known format ({', '.join(formats)})", source=path)
