"""The site builds without a warning, has a page for everything that is registered, and the code on its pages runs. No
figure, table or picture of the pages is older than the board that it comes from."""

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs import facts
from simdev.parallel import parallel_models
from simdev.placers import registry
from simdev.planners import planners

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "pages"
ORDER = ("tutorial", "howto/model", "howto/machine", "howto/placer", "howto/apply", "howto/submit", "costs", "presets")
TORCH = importlib.util.find_spec("torch") is not None


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed")
def test_the_site_builds_without_a_warning(tmp_path):
    """.ci/run runs this test by name, where the packages are installed that CONTRIBUTING.md names."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    words = re.search(r"`pip install '\.\[docs\]' && (mkdocs build [^`]+)`", text)[1].split()
    command = [sys.executable, "-m", *words, "--strict", "-d", tmp_path / "site"]
    settings = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=settings)
    assert done.returncode == 0, done.stderr
    shelves = {
        "placers": registry.placers(),
        "planners": planners(),
        "models": parallel_models(),
        "workloads": registry.workloads(),
    }
    for shelf, names in shelves.items():
        for name in names:
            assert (tmp_path / "site" / shelf / f"{name}.html").is_file()
    for path in (tmp_path / "site").rglob("*.html"):
        roles = r":(?:func|class|meth|mod|data|attr|exc|obj):[`<]\S*"
        raw = re.findall(rf"{roles}|```.*|<td>``</td>", path.read_text(encoding="utf-8"))
        assert not raw, (path.name, raw[:3])
    text = (tmp_path / "site" / "execution-model.html").read_text(encoding="utf-8")
    assert "R12" in text


def blocks(page):
    """Kind, title and text of the fenced blocks of a page."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)


@pytest.mark.long
def test_what_the_pages_say_works_in_their_order(tmp_path):
    """Of the installed simdev: .ci/run runs this test by name, where simdev is not linked to the checkout."""
    ran = 0
    for page in ORDER:
        if page == "howto/submit":  # the results of the tutorial
            shutil.copytree(tmp_path / "first", tmp_path / "my-results")
        for kind, title, text in blocks(page):
            if title:
                (tmp_path / title).write_text(text, encoding="utf-8")
            if kind == "sh" or kind == "torch" and TORCH:
                for line in text.strip().splitlines():
                    command = re.sub(r"^simdev ", f"{sys.executable} -m simdev ", line)
                    assert command != line, line
                    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
                    assert done.returncode == 0, f"{line}\n{done.stderr}"
                    ran += 1
    assert ran >= 17 and (tmp_path / "first.html").is_file() and (tmp_path / "first.png").is_file()


@pytest.mark.parametrize("section", ["placer", pytest.param("planner", marks=pytest.mark.slow)])
def test_the_recipes_of_contributing_keep_the_rules(section, tmp_path, monkeypatch):
    if section == "planner":
        pytest.importorskip("torch")
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    found = re.findall(r'^```python(?: title="([^"]+)")?\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    written = {title: code for title, code in found if title}
    (name,) = (title for title, code in written.items() if f"@{section}(" in code)
    (tmp_path / name).write_text(written[name], encoding="utf-8")
    (check,) = (code for title, code in found if not title and f'"{name}:' in code)
    exec(compile(check, "CONTRIBUTING.md", "exec"), {})


@pytest.mark.parametrize("page", ["python-api", "agents"])
def test_the_python_of_a_page_runs(page):
    if page == "agents":
        pytest.importorskip("gymnasium", reason="needs gymnasium (extra env)")
    names: dict = {}
    found = [text for kind, _, text in blocks(page) if kind == "python"]
    assert found
    for text in found:
        exec(compile(text, f"{page}.md", "exec"), names)


def test_the_readme_is_short_and_shows_a_picture_of_simdev():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130
    picture = ROOT / re.search(r"!\[.+\]\((.+\.png)\)", text)[1]
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size <= 150_000
    assert f"-o {picture.relative_to(ROOT)}" in text  # the command that draws it


def test_links_to_files_of_the_repository_lead_somewhere():
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{path.name}: {target}"


def test_every_command_of_the_pages_exists():
    from simdev.cli.app import study
    from simdev.cli.main import app  # loads every command

    known = {entry.name for entry in app.registered_commands} | {f"study {e.name}" for e in study.registered_commands}
    known |= {"study"}
    for path in [*PAGES.rglob("*.md"), ROOT / "README.md"]:
        text = path.read_text(encoding="utf-8")
        fenced = "".join(re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL))
        word = r"simdev ((?:study )?[a-z-]+)"
        named = {*re.findall(f"^{word}", fenced, re.MULTILINE), *re.findall(f"`{word}", text)}
        assert named <= known, f"{path.name}: {sorted(named - known)}"


def test_every_new_name_of_the_migration_page_exists():
    moved = re.findall(r"^\| (`.+) \| (`.+) \|$", (PAGES / "migration.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(moved) >= 15
    for before, after in moved:
        olds, news = (re.findall(r"`(?:python -m )?([\w.]+)`", cell) for cell in (before, after))
        if "the same name" in after:  # of each module, behind the name of the package
            news = [news[0].rstrip(".") + "." + old.rpartition(".")[2] for old in olds]
        package = ""
        for new in news:  # ".score" lies in the package of the name before it
            name = package + new if new.startswith(".") else new
            package = name.rpartition(".")[0]
            found = importlib.util.find_spec(name) or hasattr(importlib.import_module(package), name.rpartition(".")[2])
            assert found, f"{before}: there is no {name}"


def test_every_helper_that_contributing_lists_exists():
    index = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Helpers")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(simdev[\w.]+)` \| (.+) \|$", index, re.MULTILINE)
    assert len(rows) >= 8
    for module, offers in rows:
        known = dir(importlib.import_module(module))
        for name in re.findall(r"`(\w+)(?:\([^`]*\))?`", offers):
            assert name in known, f"{module} has no {name}"
    for names in re.findall(r"^\| ((?:`_\w+`(?:, )?)+) \|", index, re.MULTILINE):
        for name in re.findall(r"`(_\w+)`", names):
            assert (ROOT / "baselines" / "rl" / f"{name}.py").is_file(), name


GENERATED = ("README.md", "docs/pages/results.md")  # pages on which no result is written by hand
# A result in prose: a share, a factor or a time with a fraction. Set-up minutes and sizes of machines are none.
FIGURE = re.compile(r"\d[\d,.]* %|\d\.\d+(?!\d*\.\d)(?= times| ms| s\b)")


@pytest.mark.parametrize("path", facts.PAGES, ids=lambda path: path.name)
def test_every_fact_of_a_page_is_that_of_today(path):
    _, stale = facts.refreshed(path.read_text(encoding="utf-8"))
    assert not stale, f"{stale} in {path.name}; bring them up to date: {facts.COMMAND}"


def test_pictures_show_the_board_of_today():
    assert not facts.stale_pictures(), f"bring them up to date: {facts.COMMAND}"


def test_notebooks_ran_on_the_tables_of_today():
    stale = [path.name for path in facts.stale_notebooks()]
    assert not stale, f"{stale}; bring them up to date: {facts.COMMAND}"


@pytest.mark.parametrize("name", GENERATED)
def test_no_result_is_written_by_hand(name):
    text = facts.FACT.sub("", (ROOT / name).read_text(encoding="utf-8"))
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"within\s+(10|20) %", "", text)  # levels, which are no results
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    assert not FIGURE.findall(prose)


def test_the_readme_has_at_most_600_words():
    text = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(re.findall(r"[\w'.-]+", text)) <= 600


@pytest.mark.parametrize("path", facts.PAGES, ids=lambda path: path.name)
def test_no_line_of_prose_begins_with_a_fact(path):
    """In Markdown, a line that begins with a comment ends the paragraph, and links in that line are not rendered."""
    text = path.read_text(encoding="utf-8")
    broken = [line for line in text.splitlines() if re.match(r" *<!-- = .*<!-- \. -->", line)]
    assert not broken, f"{path.name}: move the last word of the line before to the front of {broken}"


def test_a_stale_fact_is_named_and_mended():
    text = "a <!-- = count standard machines -->7<!-- . --> b"
    fresh, stale = facts.refreshed(text)
    assert fresh == "a <!-- = count standard machines -->3<!-- . --> b" and stale == [
        "count standard machines: '7' is now '3'"
    ]
    assert facts.refreshed(fresh) == (fresh, [])


def test_a_table_keeps_its_head_and_loses_its_stale_lines():
    head = "| placer | nmt | ratio | fit |\n|---|---:|---:|---:|"
    text = f"<!-- = table standard p100x4 heft,single-gpu -->\n{head}\n| `gone` | 1 | 1 | 1 |\n<!-- . -->"
    fresh, stale = facts.refreshed(text)
    lines = fresh.splitlines()
    assert stale and lines[1:3] == head.splitlines() and "gone" not in fresh
    assert [line.split("|")[1].strip() for line in lines[3:-1]] == ["`heft`", "`single-gpu`", "proven lower bound"]
    assert facts.ms("standard", "nmt", "p100x4", "heft") in lines[3]


@pytest.mark.parametrize(
    "text", ["<!-- = nothing -->1<!-- . -->", "<!-- = ms standard nmt p100x4 nobody -->1<!-- . -->"]
)
def test_a_fact_that_nobody_computes_is_an_error(text):
    with pytest.raises(KeyError):
        facts.refreshed(text)


def test_a_picture_without_a_sentence_is_stale(tmp_path):
    (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert facts.picture_sentence(tmp_path / "x.png") == ""


def test_a_notebook_names_what_it_reads(tmp_path):
    cells = [{"cell_type": "code", "source": ['x("../leaderboard/standard", "heft", "dgx-h100[nodes=8]")']}]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}}), encoding="utf-8")
    found = facts.read_boards(tmp_path / "n.ipynb")
    assert re.fullmatch("[0-9a-f]{16}", found["leaderboard/standard"]) and found["heft"].startswith("version ")
    assert re.fullmatch("[0-9a-f]{16}", found["h100.toml"]) and set(found) == {
        "leaderboard/standard",
        "h100.toml",
        "heft",
    }


def test_the_table_of_splits_agrees_with_the_report():
    """simdev/exact/README.md has the best of 200 s for each free split and of the report on Tarnawski et al."""
    text = (ROOT / "simdev" / "exact" / "README.md").read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    named = {"BERT-24": "bert24", "BERT-3": "bert_l-3", "BERT-6": "bert_l-6"}
    seen = 0
    for name, *rest in cells:
        found = re.fullmatch(r"([\w-]+) (layers|operators), (inference|training)", name)
        if not found:
            continue
        graph = named.get(found[1], found[1].lower().replace("-", ""))
        graph = f"{found[2].removesuffix('s').title()}Graphs/{graph}_{found[3]}"
        assert float(rest[2]) == pytest.approx(
            float(facts.reported("tarnawski", "throughput", "contiguous", f"graph={graph}")), rel=1e-5
        )
        if rest[5]:
            free, bound = map(float, re.findall(r"[\d.]+", rest[5]))
            report = [
                float(facts.reported("tarnawski", "throughput", of, f"graph={graph}")) for of in ("free", "bound")
            ]
            assert free <= report[0] * 1.0001 and bound >= report[1] * 0.9999
        seen += 1
    assert seen == 12


def test_a_cell_of_a_report_has_to_be_the_only_one():
    assert facts.reported("gdp", "large", "step time, ms", "placer=expert") == "1,290.3"
    with pytest.raises(KeyError, match="6 lines"):
        facts.reported("gdp", "large", "step time, ms")
