"""Captured stages kept on disk, so that a plan that was captured once is simulated at once.

A stage is kept as JSON under the user's cache folder. Its name is the fingerprint of everything that the capture
depends on: the model's source file and the modules beside it that it imports, its parameters, the mesh of a stage, the
part, PyTorch's version and the code that captures. The file also holds a digest of this name and of its content; a file
whose digest differs is captured anew. The digest finds damage and files of other captures, not forgery: a folder that
other users can write to is refused, and verification captures everything itself (:func:`apart`).

The captures of a few jobs ship with simdev (:data:`SHIPPED`), under the same names: after a change of the code that
captures, or with another version of PyTorch, nobody asks for them.
"""

from __future__ import annotations

import ast
import contextlib
import gzip
import hashlib
import inspect
import json
import lzma
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from importlib.metadata import version
from itertools import combinations, product
from pathlib import Path
from typing import Any

from simdev import _cache
from simdev.errors import InvalidInput, Unsupported
from simdev.files import MIB, Bounded, open_zip, parse_json, private, read_zipped, replacing, text_of
from simdev.graphs.capture import need_torch
from simdev.graphs.parallel_model import ParallelModel, Part
from simdev.parallel.mesh import Mesh
from simdev.parallel.program import Call, Segment

FORMAT = 3
MAX_CAPTURE = 512 * MIB  # of one stage; the largest so far has 20


PACK = Path(__file__).parents[1] / "packed.zip"
SHIPPED = Path(__file__).parents[1] / "captures.zip"
INDEX = "index.json"  # the names of the captures in each member of SHIPPED
MAX_PACKED = 64 * MIB  # of one model, unpacked; the largest so far has 20
REMEDY = "pip install 'simdev[capture]'"

APART = "SIMDEV_CAPTURES"  # names the folder of captures where it is not the user's; nothing that ships is read then


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
    """SHA-256 (hex, 32 characters) of what a capture depends on. Raises :class:`Unsupported` without PyTorch."""
    need_to_capture()
    source = model.identity or _source(model.function)
    parts = [FORMAT, model.name, source, sorted(parameters.items()), str(mesh), asdict(part), _code()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def has(name: str) -> bool:
    """Whether a stage is kept, or ships."""
    return os.path.isfile(_file(name)) or _ships(name)


def need_to_capture(mib: int = 600) -> None:
    """:func:`~simdev.graphs.capture.need_torch`, with the models that are planned without PyTorch in the message."""
    try:
        need_torch(mib)
    except Unsupported as error:
        raise Unsupported(f"{error}; without it, plan one of {', '.join(packed_names())}") from None


def find(model: ParallelModel, parameters: dict, mesh: Mesh, part: Part) -> dict | None:
    """What :func:`load` returns for a stage, by what its capture depends on; for a packed model, what the archive
    holds. Raises :class:`InvalidInput` if the archive lacks the stage."""
    if isinstance(model.function, Packed):
        return _document(model.function.text(place(parameters, mesh, part)), PACK)
    return load(fingerprint(model, parameters, mesh, part))


def load(name: str) -> dict | None:
    """The kept figures and segments of a stage; None where there are none that can be read."""
    text = content(name)
    try:
        return None if text is None else _document(text, name)
    except (ValueError, KeyError, TypeError):
        return None


def content(name: str) -> str | None:
    """The text that is kept under a name, or that ships; None where there is none whose digest is right."""
    file = _file(name)
    if os.path.isfile(file):  # to open a pipe would wait for a writer; false in a folder that may not be searched
        with contextlib.suppress(ValueError):
            digest, _, text = read_zipped(file, MAX_CAPTURE).partition("\n")
            if digest == _sum(name, text):
                return text
    return _unpacked(_index()[name], SHIPPED)[1][name] if _ships(name) else None


def save(name: str, segments: list[Segment], figures: dict[str, object]) -> None:
    """Keep a stage; nothing happens where the folder cannot be written to."""
    write(name, stage_text(segments, figures))


def write(name: str, text: str) -> None:
    """Keep a text, which :func:`content` returns; nothing happens where the folder cannot be written to, or where
    something else than a file has its name."""
    file = _file(name)
    with contextlib.suppress(OSError, InvalidInput):
        if file.exists() and not file.is_file():
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as opened:
            opened.write(packed(name, text))


def _file(name: str) -> Path:
    return folder() / f"{name}.json.gz"


def _ships(name: str) -> bool:
    return APART not in os.environ and name in _index()


@cache
def _index() -> dict[str, str]:
    """The members of :data:`SHIPPED` by the names of captures."""
    if not SHIPPED.is_file():
        return {}
    with open_zip(SHIPPED) as archive:
        index = parse_json(archive.read(INDEX).decode(), f"{SHIPPED.name}, {INDEX}")
    return {name: member for member, names in index.items() for name in names}


def remembered(name: str, make: Callable[[], dict[str, object]]) -> dict[str, Any]:
    """What ``make`` returns, an object of JSON, kept under ``name`` from an earlier call or made now."""
    found = load(name)
    if found is None:
        found = make()
        save(name, [], found)
    return found


def packed(name: str, text: str) -> bytes:
    """The content of the file of a capture: its digest and ``text``, a JSON object."""
    return gzip.compress(f"{_sum(name, text)}\n{text}".encode(), 6, mtime=0)


def stage_text(segments: list[Segment], figures: dict[str, object]) -> str:
    """A stage as JSON, which :func:`load` reads."""
    rows = [[s.name, s.live_bytes, [call.row() for call in s.calls]] for s in segments]
    return json.dumps({"segments": rows, **figures}, separators=(",", ":"))


def _document(text: str, source: object) -> dict:
    document = parse_json(text, source)
    rows = document["segments"]
    segments: list[Segment] = []
    for number, row in enumerate(rows):  # a stage has one segment for several passes, and keeps it for each
        same = rows.index(row)
        segments.append(segments[same] if same < number else _segment(row))
    document["segments"] = segments
    return document


@dataclass(frozen=True)
class Packed:
    """Stands for the function of a model whose programs ship with simdev, where PyTorch cannot build it. ``name`` is
    that of the model in the archive :data:`PACK`."""

    name: str

    def __call__(self, *_args, **_parameters):
        raise Unsupported(f"{self.name}: only packed programs are here; building the model needs PyTorch: {REMEDY}")

    @property
    def header(self) -> dict[str, Any]:
        """What the archive says of the model beside its programs."""
        return _unpacked(self.name, PACK)[0]

    @property
    def accumulates(self) -> bool:
        """Whether ranks keep whole gradients until the last microbatch."""
        return bool(self.header["accumulates"])

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return int(self.header["elements"])

    def flops(self, parameters: Mapping[str, Any]) -> float:
        """Model FLOPs of one sequence, of the packed length."""
        return float(self.header["flops"])

    def has(self, name: str) -> bool:
        """Whether the program at a :func:`place` is packed."""
        return name in _unpacked(self.name, PACK)[1]

    def text(self, name: str) -> str:
        """The program at a :func:`place`. Raises :class:`InvalidInput` if it is not packed."""
        try:
            return _unpacked(self.name, PACK)[1][name]
        except KeyError:
            raise InvalidInput(lacks(self.name)) from None


def lacks(name: str) -> str:
    """That a packed model has no program for a plan, and what helps."""
    return f"{name}: the programs that ship without PyTorch do not cover this plan; to capture it: {REMEDY}"


def place(parameters: dict, mesh: Mesh, part: Part) -> str:
    """The name (hex, 16 characters) of a stage among the packed programs of its model."""
    text = json.dumps([sorted(parameters.items()), str(mesh), asdict(part)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def packed_names() -> tuple[str, ...]:
    """The models whose programs ship with simdev."""
    return _members(PACK) if PACK.is_file() else ()


@cache
def _members(path: Path) -> tuple[str, ...]:
    with open_zip(path) as archive:
        return tuple(sorted(name.removesuffix(".xz") for name in archive.namelist()))


@lru_cache(maxsize=2)
def _unpacked(name: str, path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The header of a packed model and its programs by place. Raises :class:`InvalidInput` for a damaged archive, or
    one of another format."""
    source = f"{path.name}, {name}"
    with open_zip(path) as archive, archive.open(f"{name}.xz") as member:
        reader = lzma.LZMADecompressor()
        data = reader.decompress(Bounded(member, MAX_PACKED, source).read(), MAX_PACKED)
        if not reader.eof:
            raise EOFError("it ends too early, or is too large")
    text = text_of(data, source)
    digest, _, text = text.partition("\n")
    if digest != _sum(name, text):
        raise InvalidInput("its digest differs: the archive is damaged; install simdev again", source=source)
    first, *lines = text.split("\n")
    header = parse_json(first, source)
    if header.get("format") != FORMAT:
        message = f"programs of format {header.get('format')}, not {FORMAT}; install simdev again"
        raise InvalidInput(message, source=source)
    programs = (line.split("\t", 1) for line in lines)
    return header, {place: program for place, program in programs}


def packed_model(name: str, header: dict[str, Any], programs: Mapping[str, str]) -> bytes:
    """The member of the archive that holds a model: the programs by :func:`place`, each one line of JSON."""
    lines = [json.dumps({"format": FORMAT, **header}, sort_keys=True)]
    lines += [f"{key}\t{programs[key]}" for key in programs]
    text = "\n".join(lines)
    return lzma.compress(f"{_sum(name, text)}\n{text}".encode(), preset=9 | lzma.PRESET_EXTREME)


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
    names = "record", "remembered", "stage", "cut", "split", "kept", "ring", "packages", "blocks", "pieces", "fakes"
    files = [here / f"{name}.py" for name in (*names, "tensor_rule", "reshard", "allocations")]
    files += [here.parent / f"{name}.py" for name in ("program", "passes", "hugging_face", "plain")]
    files += [here.parents[1] / "graphs" / "selective.py"]
    capturing = "trace", "attention", "rewrites", "vision_ops", "compiled_checkpoint"
    inputs = "packages", "readers", "diffusion_inputs", "documented_inputs", "joint_inputs", "transformers_inputs"
    files += [here.parents[1] / "graphs" / "capture" / f"{name}.py" for name in (*capturing, *inputs)]
    release, _, _ = version("torch").partition("+")  # of the same release, all builds run the same Python code
    return _digest(files, release)


def _source(function: Callable) -> str:
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
    return set(_places(_names(file.read_bytes()), frozenset(folders)))


@lru_cache(1024)
def _places(names: frozenset[tuple[str, ...]], folders: frozenset[Path]) -> frozenset[Path]:
    """The files in ``folders`` that dotted names may mean, as they were when first asked for: a plan asks hundreds of
    times, and to look for all of them takes longer than to read those that are there."""
    found = set()
    for parts in names:
        for (first, last), folder in product(combinations(range(len(parts) + 1), 2), folders):
            place = folder.joinpath(*parts[first:last])
            for path in (place.with_suffix(".py"), place / "__init__.py"):
                if "site-packages" not in path.relative_to(folder).parts and path.is_file():
                    found.add(path)
    return frozenset(found)


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
