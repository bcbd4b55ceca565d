"""Captured stages kept on disk, so that a plan that was captured once is simulated at once.

A stage is kept as JSON under the user's cache folder. Its name is the fingerprint of everything that the capture
depends on: the model's source file and the modules beside it that it imports, its parameters, the mesh of a stage, the
part, PyTorch's version and the code that captures. The file also holds a digest of this name and of its content; a file
whose digest differs is captured anew. The digest finds damage and files of other captures, not forgery: a folder that
other users can write to is refused, and verification captures everything itself (:func:`apart`).
"""

from __future__ import annotations

import ast
import contextlib
import gzip
import hashlib
import inspect
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cache, lru_cache
from importlib.metadata import version
from itertools import combinations, product
from pathlib import Path

from simdev import _cache
from simdev.errors import InvalidInput
from simdev.files import MIB, parse_json, private, read_zipped, replacing
from simdev.graphs.parallel_model import ParallelModel, Part
from simdev.parallel.mesh import Mesh
from simdev.parallel.program import Call, Segment

FORMAT = 3
MAX_CAPTURE = 512 * MIB  # of one stage; the largest so far has 20


APART = "SIMDEV_CAPTURES"  # names the folder of captures where it is not the user's


def folder() -> Path:
    """Where captures are kept. Raises :class:`InvalidInput` if others can write there."""
    own = os.environ.get(APART)
    return private(Path(own) if own else _cache.user_folder() / "captures")


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Inside the block, this process and those that it starts keep captures in a new folder of their own, so that
    nothing is loaded that was not captured inside the block."""
    before = os.environ.get(APART)
    with tempfile.TemporaryDirectory(prefix="simdev-") as own:
        os.environ[APART] = own
        try:
            yield
        finally:
            os.environ.pop(APART)
            if before is not None:
                os.environ[APART] = before


def fingerprint(model: ParallelModel, parameters: dict, mesh: Mesh, part: Part) -> str:
    """SHA-256 (hex, 32 characters) of what a capture depends on."""
    source = model.identity or _source(model.function)
    parts = [FORMAT, model.name, source, sorted(parameters.items()), str(mesh), asdict(part), _code()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def has(name: str) -> bool:
    """Whether a stage is kept."""
    return (folder() / f"{name}.json.gz").is_file()


def load(name: str) -> dict | None:
    """The kept figures and segments of a stage; None where there are none that can be read."""
    path = folder() / f"{name}.json.gz"
    try:
        digest, _, text = read_zipped(path, MAX_CAPTURE).partition("\n")
        if digest != _sum(name, text):
            return None
        document = parse_json(text, path)
        document["segments"] = [_segment(row) for row in document["segments"]]
        return document
    except (ValueError, KeyError, TypeError):
        return None


def save(name: str, segments: list[Segment], figures: dict[str, int]) -> None:
    """Keep a stage; nothing happens where the folder cannot be written to."""
    rows = [[s.name, s.live_bytes, [call.row() for call in s.calls]] for s in segments]
    where = folder()
    with contextlib.suppress(OSError, InvalidInput):
        where.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"segments": rows, **figures}, separators=(",", ":"))
        with replacing(where / f"{name}.json.gz") as file:
            file.write(packed(name, text))


def packed(name: str, text: str) -> bytes:
    """The content of the file of a capture: its digest and ``text``, a JSON object."""
    return gzip.compress(f"{_sum(name, text)}\n{text}".encode(), 6, mtime=0)


def _sum(name: str, text: str) -> str:
    """SHA-256 (hex) of a capture's name and content."""
    return hashlib.sha256(f"{name}\n{text}".encode()).hexdigest()


def _segment(row: list) -> Segment:
    name, live_bytes, rows = row
    return Segment(name, tuple(Call.of_row(values) for values in rows), live_bytes)


@cache
def _code() -> str:
    """Of PyTorch's version and of the files that decide what a capture holds."""
    here = Path(__file__).parent
    names = "record", "stage", "cut", "split", "kept", "ring", "packages", "blocks", "pieces", "tensor_rule", "fakes"
    files = [here / f"{name}.py" for name in names]
    files += [here.parent / f"{name}.py" for name in ("program", "hugging_face", "plain")]
    files += [here.parents[1] / "graphs" / "selective.py"]
    capturing = "trace", "attention", "rewrites", "packages", "vision_ops"
    files += [here.parents[1] / "graphs" / "capture" / f"{name}.py" for name in capturing]
    return _digest(files, version("torch"))


def _source(function) -> str:
    """Of the model's file, and of the modules in its folder that it imports, directly or through one another."""
    path = inspect.getsourcefile(function)
    if not path:
        return repr(function)
    found: set[Path] = set()
    left = [Path(path)]
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            left += _imported(file, {Path(path).parent, file.parent})
    return _digest(sorted(found))


def _imported(file: Path, folders: set[Path]) -> set[Path]:
    """The files in ``folders`` that import statements of ``file`` may mean, wherever in the file they stand."""
    found = set()
    for parts in _names(file.read_bytes()):
        for (first, last), folder in product(combinations(range(len(parts) + 1), 2), folders):
            place = folder.joinpath(*parts[first:last])
            found |= {path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()}
    return {path for path in found if "site-packages" not in path.parts}


@lru_cache(1024)
def _names(source: bytes) -> frozenset[tuple[str, ...]]:
    """The parts of each dotted name that a source file imports."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" if node.module else alias.name for alias in node.names]
    return frozenset(tuple(name.split(".")) for name in names)


def _digest(files: Iterable[Path], text: str = "") -> str:
    digest = hashlib.sha256(text.encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
