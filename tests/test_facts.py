"""No figure, table or picture of the pages is older than the board that it comes from."""

import json
import re
from pathlib import Path

import pytest

from docs import facts

ROOT = Path(__file__).parents[1]
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
    text = re.sub(r"within (10|20) %", "", re.sub(r"within\s+10 % of it and\s+within 20 %", "", text))
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    assert not FIGURE.findall(prose.replace("within 20 %", "").replace("within\n20 %", ""))


def test_the_readme_has_at_most_600_words():
    text = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(re.findall(r"[\w'.-]+", text)) <= 600


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
    cells = [{"cell_type": "code", "source": ['x("../leaderboard/standard", "heft")']}]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}}), encoding="utf-8")
    found = facts.read_boards(tmp_path / "n.ipynb")
    assert re.fullmatch("[0-9a-f]{16}", found["leaderboard/standard"]) and found["heft"].startswith("version ")
