"""Importers read the graph files of other projects, one file here for each format.

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

import importlib
import os
import re
from dataclasses import dataclass

from simdev.errors import InvalidInput, UnknownName
from simdev.graphs.importers.onnx_payload import read_model
from simdev.graphs.importers.reading import read_input
from simdev.problem.graph import ComputationGraph

FORMATS = {
    "npz": "npz_file",
    "json": "plain",
    "csv": "plain",
    "networkx": "networkx_graph",
    "onnx": "onnx_model",
    "pipedream": "pipedream",
    "dnn-partitioning": "partitioning",
    "piper": "piper",
    "moirai": "moirai",
    "baechi": "baechi",
    "cost-graph": "cost_graph",
    "execution-trace": "execution_trace",
    "chakra": "chakra",
}


@dataclass(frozen=True)
class Imported:
    """The content of an imported file. ``measured`` maps a device kind to ``{op signature: ns}``, for
    :class:`simdev.problem.costs.CostModel`; it is None if the file has no times."""

    graph: ComputationGraph
    measured: dict[str, dict[str, float]] | None = None


def import_graph(
    path: str | os.PathLike, format: str | None = None, *, device_kind: str = "accelerator", fix_units: bool = False
) -> Imported:
    """Read a graph file in ``format``, or in the format that its content shows.

    Most profiles do not name the device of the measurement, so their times are stored under ``device_kind``.
    ``fix_units`` multiplies the edge costs of dnn-partitioning files by 1000 if they are too small for the node times
    by that factor. Raises :class:`InvalidInput`, which names the file and the field, if the file is malformed.
    """
    if format is not None and format not in FORMATS:
        raise UnknownName("format", format, FORMATS)
    large = format == "onnx" or (format is None and str(path).endswith(".onnx"))
    data = read_model(path) if large else read_input(path)
    format = format or detect_format(data, path)
    if fix_units and format != "dnn-partitioning":
        raise InvalidInput(f"only dnn-partitioning files have units to fix, this is {format}", source=path)
    options = {"fix_units": True} if fix_units else {}
    module = importlib.import_module(f"simdev.graphs.importers.{FORMATS[format]}")
    try:
        return module.parse(data, path, format=format, device_kind=device_kind, **options)
    except InvalidInput as error:
        if error.source == path:
            raise
        raise InvalidInput(error.message, source=path, field=error.field) from None  # name the file, not the graph


def detect_format(data: bytes, path: str | os.PathLike) -> str:
    """Detect the format of a file from its content. Raises :class:`InvalidInput` if it is none of :data:`FORMATS`."""
    if data.startswith(b"PK\x03\x04"):
        return "npz"
    if data.startswith(bytes.fromhex("d0cf11e0a1b11ae1")):
        return "moirai"
    if str(path).endswith(".et"):
        return "chakra"
    head = data[:65536].lstrip()
    if head.startswith((b"{", b"[")):
        return _detect_json(data, path)
    first = head.split(b"\n", 1)[0]
    if first.startswith(b"node") and b" -- " in first:
        return "pipedream"
    if re.match(rb"(#[^\n]*\n\s*)*(node|cost_graph)\s*:?\s*[{<]", head):
        return "cost-graph"
    if b"," in first and b"name" in first.replace(b'"', b"").split(b","):
        return "csv"
    if data.startswith(b"\x08") or str(path).endswith(".onnx"):  # protobuf: field 1, the version of a model
        return "onnx"
    raise InvalidInput(f"not a graph in any known format ({', '.join(FORMATS)})", source=path)


def _detect_json(data: bytes, path: str | os.PathLike) -> str:
    if b'_NODE"' in data[:65536]:
        return "chakra"
    if b'"schema"' in data[:65536] and b'"nodes"' in data[:65536]:
        return "execution-trace"
    for mark, format in (
        (b'"fpgaLatency"', "dnn-partitioning"),
        (b'"TMPCs"', "piper"),
        (b'"compute_us"', "baechi"),
        (b'"ops"', "json"),
    ):
        if mark in data:
            return format
    if b'"directed"' in data or b'"links"' in data:
        return "networkx"
    raise InvalidInput("JSON, but neither ops nor nodes of a known format", source=path)
