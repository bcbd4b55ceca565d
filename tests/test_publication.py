"""What a release needs as files: addresses from one place, tested versions, a workflow that is well formed."""

import re
import tomllib
from pathlib import Path

import release

ROOT = Path(__file__).parents[1]
VALUES = {
    "repository": "https://code.example/simdev",
    "documentation": "https://docs.example",
    "doi": "10.1000/1",
    "authors": ["Doe, Jane"],
}


def test_the_files_hold_what_publication_says():
    texts, wanted = release.publication()
    assert texts == wanted, "python tests/tools/release.py --fill"


def test_values_are_written_and_taken_back():
    texts, _ = release.publication()
    there = release.filled(texts, VALUES)
    urls = tomllib.loads(there["pyproject.toml"])["project"]["urls"]
    assert urls == {"Repository": VALUES["repository"], "Documentation": VALUES["documentation"]}
    citation = there["CITATION.cff"]
    for line in ("doi: 10.1000/1", "repository-code: https://code.example/simdev", "  - family-names: Doe"):
        assert line in citation.splitlines()
    assert "site_url: https://docs.example" in there["docs/mkdocs.yml"].splitlines()
    nothing = {"repository": "", "documentation": "", "doi": "", "authors": []}
    assert release.filled(there, nothing) == release.filled(texts, nothing)


def test_the_versions_of_the_lock_file_meet_the_project():
    text = release.LOCK.read_text(encoding="utf-8")
    kept = dict(re.findall(r"^([a-z0-9.-]+)==([0-9][\w.!]*)$", text, re.MULTILINE))
    assert len(kept) == len([line for line in text.splitlines() if not line.startswith("#")])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["all"]]
    assert {re.match(r"[\w.-]+", need)[0].lower() for need in needs} <= kept.keys()


def test_the_workflow_runs_what_is_there():
    text = (ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8")
    for path in re.findall(r"(?:bash|python) ([\w./]+)", text):
        assert (ROOT / path).is_file(), path
