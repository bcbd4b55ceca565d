"""The list of files that break a rule of ruff only gets shorter: each entry is still needed."""

import fnmatch
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUFF = shutil.which("ruff", path=Path(sys.executable).parent) or shutil.which("ruff")


def test_each_exception_is_still_needed():
    if RUFF is None:
        pytest.skip("without the package ruff")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["lint"]
    command = [RUFF, "check", "--no-cache", "--output-format", "json", "--config", "lint.per-file-ignores={}", "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    broken = {(Path(one["filename"]).relative_to(ROOT).as_posix(), one["code"]) for one in json.loads(done.stdout)}
    stale = [
        f"{pattern}: {code}"
        for pattern, codes in settings["per-file-ignores"].items()
        for code in codes
        if not any(fnmatch.fnmatch(file, pattern) and rule == code for file, rule in broken)
    ]
    assert stale == []
