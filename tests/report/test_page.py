"""The leaderboard page in a real browser: sorts, filters, opens a case, fits a phone, logs no error."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from small_board import small_board

from simdev.errors import InvalidInput
from simdev.report import page

BOARD = Path(__file__).parents[2] / "leaderboard" / "standard"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "board.html"
    page.write_page(BOARD, out)
    return out


def test_page_needs_nothing_else(html):
    text = html.read_text(encoding="utf-8")
    links = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"'\s>)]+)""", text)
    assert not [link for link in links if not link.startswith("#")]
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert len(data["rows"]) == len((BOARD / "results.csv").read_text(encoding="utf-8").splitlines()) - 1
    assert all(
        len(lane[1]) == page.BINS for case in data["cases"].values() for g in case["gantts"] for lane in g["lanes"]
    )


def test_a_name_cannot_break_out_of_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(page.rows, "read_rows", lambda path: [None])
    monkeypatch.setattr(page, "page_data", lambda folder, found: {"summary": "</script><script>alert(1)</script>"})
    page.write_page(tmp_path, tmp_path / "page.html")
    assert "<script>alert" not in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_folder_without_rows_is_one_sentence(tmp_path):
    with pytest.raises(InvalidInput, match=r"results\.csv"):
        page.write_page(tmp_path, tmp_path / "page.html")


def test_lane_counts_what_runs():
    lane = page._lane("a", np.array([0, 500]), np.array([250, 1000]), 1000, 1, 0)
    assert lane[1] == "9" * 60 + "0" * 60 + "9" * 120 and lane[2] == 0.75


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as run:
        chromium = run.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def tab(browser, html):
    context = browser.new_context(offline=True)
    found, complaints = context.new_page(), []
    found.on("console", lambda message: complaints.append(message.text))
    found.on("pageerror", lambda error: complaints.append(str(error)))
    found.goto(html.as_uri())
    yield found
    context.close()
    assert complaints == []


def column(tab, table, number):
    return tab.locator(f"#{table} tbody tr td:nth-child({number})").all_inner_texts()


def test_ranking_agrees_with_the_derived_table(tab):
    lines = [line.split(",") for line in (BOARD / "ranking.csv").read_text(encoding="utf-8").splitlines()]
    place, placer, mean = (lines[0].index(name) for name in ("place", "placer", "geomean_ratio_to_best"))
    wanted = sorted(lines[1:], key=lambda line: int(line[place]))
    assert column(tab, "ranking", 1) == [line[placer] for line in wanted]
    shown = [float(text) for text in column(tab, "ranking", 3)]
    assert shown == pytest.approx([float(line[mean]) for line in wanted], abs=6e-4)  # three decimals


def test_sorts_both_ways_by_keyboard(tab):
    button = tab.get_by_role("button", name="step, ms")
    button.focus()
    tab.keyboard.press("Enter")
    first = [float(text.replace(",", "")) for text in column(tab, "rows", 3)]
    assert first == sorted(first) and tab.locator('th[aria-sort="ascending"]').count() == 2
    tab.keyboard.press("Enter")  # the focus stays on the heading
    second = [float(text.replace(",", "")) for text in column(tab, "rows", 3)]
    assert second == sorted(second, reverse=True) and second[0] > first[0]


def test_filters(tab):
    tab.get_by_label("Workload").select_option("nmt")
    tab.get_by_label("Machine").select_option("p100x4")
    assert set(column(tab, "rows", 1)) == {"nmt, p100x4"}
    tab.get_by_label("Find").fill("portfolio")
    assert column(tab, "rows", 2) == ["portfolio"]
    assert "1 of" in tab.get_by_role("status").inner_text()


def test_a_case_opens_and_closes(tab):
    tab.locator("#rows button.open").first.click()
    dialog = tab.get_by_role("dialog")
    assert dialog.is_visible() and dialog.locator("svg path").count() >= 5
    assert "simdev verify" in dialog.inner_text()
    tab.keyboard.press("Escape")
    assert not dialog.is_visible()


def test_fits_a_phone(tab):
    tab.set_viewport_size({"width": 390, "height": 844})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_everything_to_press_has_a_name(tab):
    nameless = tab.evaluate(
        """[...document.querySelectorAll("button, select, input, svg[role=img]")].filter((e) =>
        !(e.innerText || e.labels?.length || e.ariaLabel || e.querySelector?.("title"))).length"""
    )
    assert nameless == 0


HOSTILE = {
    "workload": "</script><script>window.pwned=1</script>'$(touch x)'.npz",
    "topology": '"><svg onload=window.pwned=1>.toml',
    "placers": ("<img src=x onerror=window.pwned=1>", "javascript:window.pwned=1"),
    "bound_method": "<b onmouseover=window.pwned=1>proven</b>",
}


def test_every_name_is_shown_as_text(browser, tmp_path):
    small_board(tmp_path / "<i>board</i>", **HOSTILE)
    page.write_page(tmp_path / "<i>board</i>", tmp_path / "page.html")
    context = browser.new_context(offline=True)
    tab, complaints = context.new_page(), []
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.goto((tmp_path / "page.html").as_uri())
    tab.locator("#rows button.open").first.click()
    tab.wait_for_timeout(200)
    shown = tab.locator("body").inner_text() + tab.get_by_role("dialog").inner_text()
    for name in (HOSTILE["workload"], HOSTILE["topology"], *HOSTILE["placers"], HOSTILE["bound_method"]):
        assert name in shown, name
    command = tab.get_by_role("dialog").locator("pre").inner_text()
    assert f"-t '{HOSTILE['topology']}'" in command and "'\\''$(touch x)'\\''" in command  # quoted for a shell
    assert tab.evaluate("window.pwned") is None and complaints == []
    assert tab.locator("main img, main script, dialog img, dialog i").count() == 0
    context.close()
