"""The site builds without a warning, every placer and workload has a page, and what the pages tell to run does run."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from simdev.placers import registry

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "pages"
ORDER = ("tutorial", "howto/model", "howto/machine", "howto/placer", "howto/apply")
TORCH = importlib.util.find_spec("torch") is not None


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed")
def test_the_site_builds_without_a_warning(tmp_path):
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-f",
        ROOT / "docs" / "mkdocs.yml",
        "-d",
        tmp_path / "site",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    for shelf, names in (("placers", registry.placers()), ("workloads", registry.workloads())):
        for name in names:
            assert (tmp_path / "site" / shelf / f"{name}.html").is_file()
    text = (tmp_path / "site" / "execution-model.html").read_text(encoding="utf-8")
    assert "R12" in text


def blocks(page):
    """Kind, title and text of the fenced blocks of a page."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_what_the_pages_say_works_in_their_order(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = 0
    for page in ORDER:
        for kind, title, text in blocks(page):
            if title:
                (tmp_path / title).write_text(text, encoding="utf-8")
            if kind == "sh" or kind == "torch" and TORCH:
                for line in text.strip().splitlines():
                    command = re.sub(r"^simdev ", f"{sys.executable} -m simdev ", line)
                    assert command != line, line
                    done = subprocess.run(
                        command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
                    )
                    assert done.returncode == 0, f"{line}\n{done.stderr}"
                    ran += 1
    assert ran >= 12 and (tmp_path / "first.html").is_file() and (tmp_path / "first.png").is_file()


def test_every_command_of_the_pages_exists():
    from simdev.cli import commands  # noqa: F401
    from simdev.cli import main as cli  # noqa: F401

    known = {entry.name for entry in commands.app.registered_commands}
    for path in [*PAGES.rglob("*.md"), ROOT / "README.md"]:
        text = path.read_text(encoding="utf-8")
        fenced = "".join(re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL))
        told = {*re.findall(r"^simdev ([a-z-]+)", fenced, re.MULTILINE), *re.findall(r"`simdev ([a-z-]+)", text)}
        assert told <= known, f"{path.name}: {sorted(told - known)}"
