"""A captured program of the user's own step: what each pipeline rank executes, kept in a file.

The file is JSON, packed with gzip. It holds numbers and names alone; reading it executes nothing.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from simdev.errors import InvalidInput
from simdev.files import parse_json, read_zipped, replacing
from simdev.parallel.mesh import AXES, Mesh
from simdev.parallel.orders import Action
from simdev.parallel.program import Call, Segment

FORMAT = "simdev rank program 1"
SUFFIX = ".rank.json.gz"
MOST = 1 << 40  # of any number of bytes or FLOPs of one call, in units of 1,024
LETTERS = ("S", "F", "B", "I", "W", "U")


@dataclass(frozen=True)
class Piece:
    """One action of a pipeline rank: which segment it runs, and how many bytes it sends to the next stage (a forward
    pass) or to the one before (a backward pass)."""

    action: Action
    segment: int
    sent_bytes: int = 0


@dataclass(frozen=True, eq=False)
class RankProgram:
    """What the ranks of a step execute, as captured from ``make_step`` of a user.

    ``pieces`` are the actions of each pipeline rank in order: ``("S", 0, 0)`` is a whole step, ``F``, ``B``, ``I``,
    ``W`` are those of a pipeline schedule, ``U`` the end of the step. ``resident_bytes`` is the memory in use on each
    pipeline rank when the step begins. ``batch`` and ``length`` are the sequences that each replica processes in a step
    and the tokens of a sequence, 0 where nobody said.
    """

    name: str
    mesh: Mesh
    segments: tuple[Segment, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    resident_bytes: tuple[int, ...]
    batch: int = 0
    length: int = 0

    @property
    def stages(self) -> int:
        return 1 + max(piece.action[1] for pieces in self.pieces for piece in pieces)

    @property
    def microbatches(self) -> int:
        return 1 + max(piece.action[2] for pieces in self.pieces for piece in pieces)

    @property
    def flops(self) -> float:
        """FLOPs of a step on all ranks, without those of recomputed calls."""
        of = [sum(c.flops for c in s.calls if not (c.is_forward and c.in_backward)) for s in self.segments]
        return float(self.mesh.stage_ranks * sum(of[piece.segment] for pieces in self.pieces for piece in pieces))


def save_rank_program(program: RankProgram, path: str | PathLike) -> None:
    """Write a program. Raises :class:`InvalidInput` if the file cannot be written."""
    document = {
        "format": FORMAT,
        "name": program.name,
        "mesh": dict(program.mesh.sizes),
        "batch": program.batch,
        "length": program.length,
        "resident_bytes": program.resident_bytes,
        "pieces": [[[*p.action, p.segment, p.sent_bytes] for p in pieces] for pieces in program.pieces],
        "segments": [[s.name, s.live_bytes, [c.row() for c in s.calls]] for s in program.segments],
    }
    text = json.dumps(document, separators=(",", ":"))
    with replacing(path) as file:
        file.write(gzip.compress(text.encode(), 6, mtime=0))


def load_rank_program(path: str | PathLike) -> RankProgram:
    """Read a program. Raises :class:`InvalidInput` naming file and field for anything that is not one."""
    document = parse_json(read_zipped(path), path)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InvalidInput(f"expected a rank program ({FORMAT!r}), as simdev capture --mesh writes it", source=path)
    return _Reader(path, document).program()


def is_rank_program(text: str) -> bool:
    """Whether ``text`` names a rank program's file, not a model: a configuration of Hugging Face, a captured step, or a
    function of a file."""
    if text.endswith((SUFFIX, ".rank.json")):
        return True
    return ".py:" not in text and not text.endswith((".json", ".npz")) and Path(text).is_file()


class _Reader:
    """Checks a document field by field."""

    def __init__(self, path, document: dict):
        self.path, self.document = path, document

    def program(self) -> RankProgram:
        mesh = self._mesh()
        segments = tuple(self._segment(row, n) for n, row in enumerate(self._rows("segments")))
        pieces = tuple(self._pieces(row, rank, len(segments)) for rank, row in enumerate(self._rows("pieces")))
        resident = tuple(self._whole(value, "resident_bytes") for value in self._rows("resident_bytes"))
        name = self._text(self.document.get("name"), "name")
        batch, length = (self._whole(self.document.get(key), key) for key in ("batch", "length"))
        if not len(pieces) == len(resident) == mesh["pp"]:
            raise self._wrong("pieces", f"expected those of {mesh['pp']} pipeline ranks")
        known = {axis for axis, _ in mesh.inner}
        for segment in segments:
            for axes in {call.axes for call in segment.calls}:
                if not set(axes) <= known:
                    raise self._wrong("segments", f"{segment.name}: a collective along {'+'.join(axes)}, not of {mesh}")
        return RankProgram(name, mesh, segments, pieces, resident, batch, length)

    def _mesh(self) -> Mesh:
        sizes = self.document.get("mesh")
        if not isinstance(sizes, dict):
            raise self._wrong("mesh", "expected sizes of axes")
        try:
            return Mesh(sizes)
        except InvalidInput as error:
            raise self._wrong("mesh", error.message) from None

    def _segment(self, row, number: int) -> Segment:
        if not (isinstance(row, list) and len(row) == 3 and isinstance(row[2], list)):
            raise self._wrong("segments", f"segment {number} is no list of name, bytes and calls")
        name, live = self._text(row[0], "segments"), self._whole(row[1], "segments", signed=True)
        calls = []
        for place, values in enumerate(row[2]):
            try:
                call = Call.of_row(values)
                self._check(call)
            except (TypeError, ValueError, KeyError, AttributeError):
                raise self._wrong("segments", f"call {place} of segment {number} is malformed") from None
            calls.append(call)
        if not calls:
            raise self._wrong("segments", f"segment {number} has no calls")
        return Segment(name, tuple(calls), live)

    def _check(self, call: Call) -> None:
        texts = (call.stream, call.kind, call.signature, *(name for name, _ in call.waits))
        sizes = call.flops, call.bytes_read, call.bytes_written, call.payload_bytes, abs(call.live_bytes)
        backs = [back for _, back in call.waits]
        if not all(isinstance(text, str) and text for text in texts):
            raise ValueError
        if not all(type(size) is int and 0 <= size < MOST << 10 for size in (*sizes, *backs)):
            raise ValueError
        if not set(call.axes) <= set(AXES[1:]) or (call.axes and call.stream != "+".join(call.axes)):
            raise ValueError

    def _pieces(self, row, rank: int, segments: int) -> tuple[Piece, ...]:
        if not isinstance(row, list) or not row:
            raise self._wrong("pieces", f"pipeline rank {rank} has no actions")
        found = []
        for values in row:
            numbers = values[1:] if isinstance(values, list) and len(values) == 5 else [None]
            if not all(type(number) is int and 0 <= number < 1 << 40 for number in numbers):
                raise self._wrong("pieces", f"pipeline rank {rank}: expected action, stage, microbatch, segment, bytes")
            if values[0] not in LETTERS or values[3] >= segments:
                raise self._wrong("pieces", f"pipeline rank {rank}: no such action or segment: {values!r}")
            found.append(Piece((values[0], values[1], values[2]), values[3], values[4]))
        return tuple(found)

    def _rows(self, key: str) -> list:
        rows = self.document.get(key)
        if not isinstance(rows, list) or not rows:
            raise self._wrong(key, "expected a list")
        return rows

    def _whole(self, value, key: str, signed: bool = False) -> int:
        if type(value) is not int or not (-(1 << 50) if signed else 0) <= value < 1 << 50:
            raise self._wrong(key, f"expected a whole number, got {value!r:.40}")
        return value

    def _text(self, value, key: str) -> str:
        if not isinstance(value, str) or not value:
            raise self._wrong(key, "expected a name")
        return value

    def _wrong(self, field: str, message: str) -> InvalidInput:
        return InvalidInput(message, source=self.path, field=field)
