"""Import simdev's own graph files, so that ``import_graph`` reads every format that simdev reads."""

from __future__ import annotations

from simdev.graphs.importers import Imported, importer
from simdev.problem.graph_file import load_graph


@importer("npz", detects=lambda data, path: data.startswith(b"PK\x03\x04"))
def parse(data: bytes, path, *, format: str, device_kind: str) -> Imported:
    return Imported(load_graph(path))
