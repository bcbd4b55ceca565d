"""Rows that hold, kept in a file, so that an interrupted verification checks only the others."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from simdev.bench import provenance
from simdev.bench.check import Check
from simdev.bench.journal import Journal
from simdev.bench.plan_rows import PlanRow
from simdev.bench.rows import Row
from simdev.errors import InvalidInput
from simdev.files import files_below, writing

BEGIN = b'{"kind": "verification"'  # of a file; less where a crash cut its first line short


class KnownRows:
    """The rows of a folder that are known to hold.

    The file is a journal: its first line is a digest of all that decides whether a row holds (every file of the folder,
    this installation, versions of libraries, settings of the check), each further line a row. Another first line
    empties the file. Whoever can write the file decides what it says: it belongs to who verifies, not to the folder.
    """

    def __init__(self, path: str | os.PathLike | None, folder: Path, check: Check):
        """``path`` None keeps nothing. Raises :class:`InvalidInput` if it lies in ``folder`` or is another file."""
        self.path = None if path is None else Path(path)
        self._reasons: dict[str, str] = {}
        self._journal: Journal | None = None
        if self.path is None:
            return
        if self.path.resolve().is_relative_to(folder.resolve()):
            raise InvalidInput("lies in the folder that is verified: choose a file of your own", source=self.path)
        of = _state(folder, check)
        with writing(self.path):
            if self.path.exists() and not BEGIN.startswith(self._begin()):
                raise InvalidInput("is not a file that --resume has written", source=self.path)
            self._journal = Journal(self.path)
        entries = self._journal.entries
        if entries and entries[0]["of"] != of:
            self.close()
            self.path.unlink()
            self._journal, entries = Journal(self.path), []
        if not entries:
            self._journal.append({"kind": "verification", "of": of})
        self._reasons = {entry["row"]: entry["skipped"] for entry in entries[1:] if entry["kind"] == "held"}

    def _begin(self) -> bytes:
        with self.path.open("rb") as file:
            return file.read(len(BEGIN))

    def reason(self, row: Row | PlanRow) -> str | None:
        """Why a row that holds was not executed again (empty: it was, or nobody asked); None for an unknown row."""
        return self._reasons.get(_name(row))

    def add(self, row: Row | PlanRow, skipped: str) -> None:
        """Keep a row that holds."""
        if self._journal is not None and self.reason(row) is None:
            self._journal.append({"kind": "held", "row": _name(row), "skipped": skipped})
            self._reasons[_name(row)] = skipped

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()


def _name(row: Row | PlanRow) -> str:
    """SHA-256 (hex) of all cells: the digest of a row is so short that a forger may find two rows that share it."""
    return hashlib.sha256(json.dumps([type(row).__name__, row.cells()]).encode()).hexdigest()


def _state(folder: Path, check: Check) -> str:
    """SHA-256 (hex) of all that decides whether the rows of ``folder`` hold."""
    torch = ""
    with contextlib.suppress(PackageNotFoundError):
        torch = version("torch")
    settings = replace(check, limits=None)
    parts = [provenance.source_digest(), provenance.versions(), torch, provenance.machine(), repr(settings)]
    digest = hashlib.sha256(json.dumps(parts).encode())
    for name in files_below(folder):
        path = folder / name
        digest.update(os.fsencode(name) + b"\0")
        if path.is_symlink():
            digest.update(os.readlink(path).encode() + b"\0")
        elif path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
