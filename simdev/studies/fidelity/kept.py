"""Cases of the fidelity report that are kept between runs: a JSON file for each measured file and state of simdev."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path

from simdev.calibrate.manifest import sha256_of
from simdev.files import read_json, write_text
from simdev.placers.registry import graph_path

PACKAGE = Path(__file__).parents[2]
PARALLEL = "parallel"  # among the sources: also the shipped models of training runs


class Kept:
    """Keeps cases, each an instance of the dataclass ``case``, in ``folder``. ``folder`` None: nothing is kept.
    ``sources`` are the files and folders of the package that the cases depend on."""

    def __init__(self, folder: Path | None, case: type, sources: Sequence[str]):
        self.folder, self.case, self.sources = folder, case, sources

    @cached_property
    def code(self) -> str:
        """SHA-256 (hex) of the sources and device files that cases depend on: other code may give other cases."""
        digest = hashlib.sha256()
        models = [_parallel_models()] if PARALLEL in self.sources else []
        for root in [*(PACKAGE / name for name in self.sources), *models]:
            for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
                if path.suffix in (".py", ".toml", ".npz", ".csv") and path.is_file():
                    digest.update(f"{path.relative_to(root.parent).as_posix()} {sha256_of(path)}\n".encode())
        return digest.hexdigest()

    def cases(self, name: str, files: Iterable[Path], make: Callable[[list[str]], Sequence], notes: list[str]) -> list:
        """What ``make(notes)`` gives (cases, and sentences added to ``notes``), from the folder if it has them."""
        if self.folder is None:
            return list(make(notes))
        content = "".join(f"{path} {sha256_of(path)}\n" for path in files)
        key = hashlib.sha256(f"{self.code}\n{name}\n{content}".encode()).hexdigest()[:32]
        path = self.folder / f"{key}.json"
        found = self._read(path)
        if found is None:
            said: list[str] = []
            made = list(make(said))
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps({"cases": [_without_nan(vars(case)) for case in made], "notes": said}))
            found = made, said
        notes += found[1]
        return found[0]

    def _read(self, path: Path) -> tuple[list, list[str]] | None:
        """The cases and notes of a kept file; None if it is absent or damaged."""
        try:
            document = read_json(path)
            rows = [{key: float("nan") if v is None else v for key, v in row.items()} for row in document["cases"]]
            return [self.case(**row) for row in rows], [str(note) for note in document["notes"]]
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def _parallel_models() -> Path:
    """The folder of the models of training runs, which may lie outside of the package's own folder."""
    return graph_path("any").parents[1] / "parallel"


def _without_nan(row: dict) -> dict:
    """``row`` with None in place of NaN, which JSON does not have."""
    return {key: None if value != value else value for key, value in row.items()}
