"""The leaderboard page in a real browser: it sorts, filters, links and downloads, on three screens and by keyboard."""

import csv
import gzip
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_board import small_board

from simdev.bench import score
from simdev.bench.plan_rows import PlanRow, as_row, read_folder, read_plan_rows, write_plan_rows
from simdev.bench.rows import read_rows, write_rows
from simdev.errors import InvalidInput
from simdev.parallel.mesh import Mesh
from simdev.placers.registry import load_workload
from simdev.planners.job import Choice
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.problem.topology import load_topology
from simdev.report import page
from simdev.sim import simulate

BOARD = Path(__file__).parents[2] / "leaderboard" / "standard"
CHECKS = Path(__file__).parent / "page_checks.js"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PATIENCE_MS = 600_000  # of a busy computer
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "board.html"
    page.write_page([BOARD], out)
    return out


def test_page_needs_nothing_else(tmp_path):
    small_board(tmp_path / "board")
    page.write_page([tmp_path / "board"], tmp_path / "board.html")
    text = (tmp_path / "board.html").read_text(encoding="utf-8")
    links = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"'\s>)]+)""", text)
    assert not [link for link in links if not link.startswith("#") and "data.beside" not in link]
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    (case,) = data["cases"].values()
    assert len(data["rows"]) == 2 and data["beside"] == "board.cases" and case["file"] == 0
    beside = (tmp_path / "board.cases" / "0.js").read_text(encoding="utf-8")
    more = json.loads(re.fullmatch(r"simdevCase\(0,(.*)\);\n", beside)[1])
    assert [found["placer"] for found in more["gantts"]] == ["single-gpu"]  # the best is the baseline
    assert all(len(lane[1]) == page.BINS for found in more["gantts"] for lane in found["lanes"])


def test_a_page_of_all_boards_is_light(html):
    assert len(gzip.compress(html.read_bytes())) <= 300_000


def test_a_name_cannot_break_out_of_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "page_data", lambda folders: {"summary": "</script><script>alert(1)</script>"})
    page.write_page([tmp_path], tmp_path / "page.html")
    assert "<script>alert" not in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_folder_without_rows_is_one_sentence(tmp_path):
    with pytest.raises(InvalidInput, match=r"results\.csv"):
        page.write_page([tmp_path], tmp_path / "page.html")


def test_lane_counts_what_runs():
    lane = page._lane("a", np.array([0, 500]), np.array([250, 1000]), 1000, 1, 0)
    assert lane[1] == "9" * 60 + "0" * 60 + "9" * 120 and lane[2] == 0.75


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as run:
        chromium = run.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=PATIENCE_MS)
        yield chromium
        chromium.close()


def new_context(browser):
    context = browser.new_context(offline=True)
    context.set_default_timeout(PATIENCE_MS)
    return context


def address(tab):
    """The address in the page. ``tab.url`` learns of a change later."""
    return tab.evaluate("location.href")


@pytest.fixture
def tab(browser, html):
    context = new_context(browser)
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
    tab.get_by_label("grouped by family").uncheck()
    check_ranking(tab, list(csv.DictReader(io.StringIO((BOARD / "ranking.csv").read_text(encoding="utf-8")))))


def check_ranking(tab, wanted):
    """Place, placer, ratio, cases, fit and wins are those of ``simdev.bench.score.ranking``."""
    assert column(tab, "ranking", 1) == [line["place"] for line in wanted]
    assert column(tab, "ranking", 2) == [line["placer"] for line in wanted]
    means = [float(text) for text in column(tab, "ranking", 4)]
    assert means == pytest.approx([float(line["geomean_ratio_to_best"]) for line in wanted], abs=6e-4)  # three decimals
    assert column(tab, "ranking", 5) == [f"{line['cases']}/{line['instances']}" for line in wanted]
    partial = len({line["cases"] for line in wanted}) > 1
    assert column(tab, "ranking", 6 + partial) == [f"{line['solved']}/{line['cases']}" for line in wanted]
    assert column(tab, "ranking", 7 + partial) == [line["wins"] for line in wanted]


def test_placers_of_a_family_stand_together(tab):
    names = tab.locator("#ranking tr.family").all_inner_texts()
    assert len(names) == len(set(names)) >= 5
    assert tab.locator("#ranking tbody tr").count() == len(names) + len(column(tab, "ranking", 2))


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
    tab.get_by_label("Find").fill("m-etf")
    assert column(tab, "rows", 2) == ["m-etf"]
    assert "1 of" in tab.get_by_role("status").inner_text()


def test_a_case_opens_and_closes(tab):
    tab.locator("#rows button.open").first.click()
    dialog = tab.get_by_role("dialog")
    dialog.locator("svg path").nth(4).wait_for(state="attached")
    assert dialog.is_visible() and dialog.locator("figure").count() == 2  # the best, and what it is set against
    assert "simdev verify" in dialog.inner_text()
    tab.keyboard.press("Escape")
    assert not dialog.is_visible()


WIDTHS = (390, 1280, 1920)  # a phone, a laptop, a large screen


@pytest.mark.parametrize("width", WIDTHS)
def test_fits_the_screen(tab, width):
    tab.set_viewport_size({"width": width, "height": 844})
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.locator("#rows button.open").first.click()
    tab.get_by_role("dialog").locator("svg path").nth(4).wait_for(state="attached")  # drawn anew with its pictures
    dialog = tab.get_by_role("dialog").bounding_box()
    assert dialog["x"] >= 0 and dialog["x"] + dialog["width"] <= width
    title, close = tab.locator("#details-title").bounding_box(), tab.get_by_role("button", name="Close").bounding_box()
    assert title["x"] + title["width"] <= close["x"] and close["x"] + close["width"] <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_labels_are_readable_and_never_collide(tab, width):
    tab.set_viewport_size({"width": width, "height": 844})
    tab.add_script_tag(path=CHECKS)
    labels = tab.locator("#cost text.label").count()
    assert tab.evaluate("collisions()") == [] and labels >= (12 if width < 500 else 24)
    assert tab.evaluate("clipped()") == []
    tab.locator("#rows button.open").first.click()
    tab.get_by_role("dialog").locator("svg path").nth(4).wait_for(state="attached")
    assert tab.evaluate("clipped()") == []
    heights = tab.evaluate("[...document.querySelectorAll('svg text')].map((e) => e.getBoundingClientRect().height)")
    assert min(height for height in heights if height) >= 12


def test_the_address_holds_what_is_shown(tab, browser):
    tab.get_by_label("Workload").select_option("nmt")
    tab.get_by_label("Find").fill("p100x4")
    tab.get_by_role("button", name="step, ms").click()
    tab.locator("#rows button.open").first.click()
    context = new_context(browser)
    other = context.new_page()
    other.goto(address(tab))
    other.get_by_role("dialog").get_by_role("heading", name="nmt, p100x4").wait_for()
    other.keyboard.press("Escape")
    assert column(other, "rows", 1) == column(tab, "rows", 1) and set(column(other, "rows", 1)) == {"nmt, p100x4"}
    assert other.locator('#rows th[data-key="step"]').get_attribute("aria-sort") == "ascending"
    context.close()
    tab.go_back()  # the case closes, the filters stay
    tab.get_by_role("dialog").wait_for(state="hidden")
    assert set(column(tab, "rows", 1)) == {"nmt, p100x4"}


def test_a_damaged_address_shows_the_whole_board(tab):
    everything = tab.get_by_role("status").inner_text()
    tab.goto(address(tab).split("#")[0] + "#workload=%3Cb%3E&case=nothing&sort-rows=x&track=%FF&fits=2")
    tab.reload()
    assert tab.get_by_role("status").inner_text() == everything and not tab.get_by_role("dialog").is_visible()


def test_marks_and_bars_open_what_they_show(tab):
    tab.locator('#cost [data-placer="portfolio"] .label').click()  # another mark may cover its own
    dialog = tab.get_by_role("dialog")
    runs = {(row.workload, row.topology) for row in read_rows(BOARD / "results.csv") if row.placer == "portfolio"}
    assert dialog.locator("h2").inner_text() == "portfolio" and dialog.locator("tbody tr").count() == len(runs)
    dialog.locator("button.open").first.click()  # from a placer to one of its cases
    dialog.locator("svg path").nth(4).wait_for(state="attached")
    tab.keyboard.press("Escape")
    tab.locator("#gap [role=button]").last.click()
    assert "Proven lower bound" in dialog.inner_text()


def test_downloads_the_runs_and_the_best_placement(tab, tmp_path):
    tab.get_by_label("Workload").select_option("inception-v3")
    with tab.expect_download() as found:
        tab.get_by_role("button", name="Download these runs as CSV").click()
    lines = list(csv.DictReader(io.StringIO(Path(found.value.path()).read_text(encoding="utf-8"))))
    rows = [line for line in read_rows(BOARD / "results.csv") if line.workload == "inception-v3"]
    assert len(lines) == len({(row.topology, row.entry) for row in rows})  # seeds are merged
    best = min(
        (line for line in lines if line["machine"] == "p100x4" and line["step_time_ns"]),
        key=lambda x: int(x["best_time_ns"]),
    )
    tab.locator("#rows button.open", has_text="p100x4").first.click()
    with tab.expect_download() as found:
        tab.get_by_role("button", name="Download the best placement").click()
    found.value.save_as(tmp_path / "best.json")
    problem = Problem.build(load_workload("inception-v3"), load_topology("p100x4"))
    found = simulate(problem, Placement.load(tmp_path / "best.json", problem))
    assert found.step_ns == int(best["best_time_ns"])


def test_bars_tell_certain_parts_of_a_gap_from_open_ones(tab):
    label = tab.locator("#gap [role=button]", has_text="nmt, p100x4").get_attribute("aria-label")
    found = re.findall(r"(open|beyond the bound|better known) ([\d.]+) %", label)
    total = float(re.search(r": ([\d.]+) % above", label)[1])
    assert found[0][0] == "open" and sum(float(share) for _, share in found) == pytest.approx(total, abs=0.2)
    rows = [row for row in read_rows(BOARD / "results.csv") if (row.workload, row.topology) == ("nmt", "p100x4")]
    best = min(row.step_ns for row in rows if row.step_ns) / max(
        row.lower_bound_ns for row in rows if row.lower_bound_ns
    )
    assert total == pytest.approx(100 * (best - 1), abs=0.06)  # of the best run, not of the best median


def test_works_with_the_keyboard_alone(tab):
    def tab_to(matching):
        for _ in range(200):
            tab.keyboard.press("Tab")
            if tab.evaluate(f"document.activeElement.matches({json.dumps(matching)})"):
                return
        raise AssertionError(f"Tab never reaches {matching}")

    tab_to("#workload")
    tab.keyboard.type("nmt")
    tab_to("#cost [role=button]")
    tab.keyboard.press("Enter")
    dialog = tab.get_by_role("dialog")
    assert dialog.is_visible()
    tab_to("dialog button.open")
    case = tab.evaluate("document.activeElement.textContent")
    tab.keyboard.press("Enter")
    assert dialog.locator("h2").first.inner_text() == case
    tab.keyboard.press("Escape")
    assert not dialog.is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(tab, scheme):
    tab.emulate_media(color_scheme=scheme)
    tab.locator("#rows button.open").first.click()
    tab.add_script_tag(path=CHECKS)
    assert tab.evaluate("poorContrast()") == []


@pytest.fixture
def several(browser, tmp_path):
    """A page of a board under the rules of arrival, one under priorities, and one of plans."""
    small_board(tmp_path / "first")
    small_board(tmp_path / "second", rules="priority/fifo/dataflow")
    plans = []
    for number, planner in enumerate(("megatron", "search"), 1):
        plan = json.dumps(Choice(Mesh({"tp": number, "dp_shard": 8})).to_json())
        choices = '{"microbatches": [1], "recomputes": ["none"]}'
        key = ("llama3-8b", "dgx-h100[nodes=2]", 64, "eager", choices, planner, 1, "{}", 100, 0)
        figures = {"step_ns": 10**9 * number, "bound_ns": 8 * 10**8, "peak_bytes": 2**36, "evaluations": 3}
        plans.append(PlanRow(*key, "ok", plan=plan, **figures))
    write_plan_rows(tmp_path / "plans", plans)
    page.write_page([tmp_path / name for name in ("first", "second", "plans")], tmp_path / "page.html")
    context = new_context(browser)
    tab = context.new_page()
    tab.goto((tmp_path / "page.html").as_uri())
    yield tab
    context.close()


def test_tracks_are_tabs_that_are_ranked_apart(several):
    tabs = several.get_by_role("tab")
    assert tabs.all_inner_texts() == ["One step", "One step, own order", "Whole training jobs"]
    first = several.get_by_role("status").inner_text()
    tabs.first.focus()
    several.keyboard.press("ArrowRight")
    assert tabs.nth(1).get_attribute("aria-selected") == "true" and several.get_by_role("status").inner_text() == first
    tabs.nth(2).click()
    assert "track=plan" in address(several) and column(several, "rows", 2) == ["megatron", "search"]
    several.locator("#rows button.open").first.click()
    shown = several.get_by_role("dialog").inner_text()
    assert "dp_shard=8" in shown and "planner" in shown and "simdev verify plans" in shown


def test_what_a_screen_reader_is_given(tab):
    found = tab.locator("body").aria_snapshot()
    for part in (
        'heading "simdev leaderboard"',
        'combobox "Workload"',
        'searchbox "Find"',
        'region "Ranking"',
        'columnheader "ratio to best"',
    ):
        assert part in found, part
    assert re.search(r'button "portfolio: [\d.]+ times the best', found)
    assert 'combobox "Baseline"' in found and 'columnheader "cases"' in found


def test_everything_to_press_has_a_name(tab):
    nameless = tab.evaluate(
        """[...document.querySelectorAll("button, select, input, svg[role=img]")].filter((e) =>
        !(e.innerText || e.labels?.length || e.ariaLabel || e.querySelector?.("title"))).length"""
    )
    assert nameless == 0


def test_an_objective_that_simdev_does_not_know_is_a_track_of_its_own(tmp_path):
    small_board(tmp_path / "board", objective="+1")
    (track,) = page.page_data([tmp_path / "board"])["tracks"]
    assert track == {"name": "+1", "label": "+1", "question": ""}


def test_processor_seconds_are_a_choice_of_boards_that_have_them(browser, tmp_path):
    context = new_context(browser)
    tab = context.new_page()
    for seconds, costs in ((None, ["simulations", "seconds"]), (1.5, ["simulations", "processor seconds", "seconds"])):
        small_board(tmp_path / str(seconds), cpu_seconds=seconds)
        page.write_page([tmp_path / str(seconds)], tmp_path / f"{seconds}.html")
        tab.goto((tmp_path / f"{seconds}.html").as_uri())
        assert tab.get_by_label("Cost in").locator("option").all_inner_texts() == costs
    tab.get_by_label("Cost in").select_option("processor seconds")
    assert tab.locator("#cost [data-placer]").first.get_attribute("aria-label").endswith(", 1.5 processor seconds")
    assert address(tab).endswith("#axis=cpu")
    context.close()


def test_a_long_name_and_a_case_of_one_placer_leave_the_page_whole(browser, tmp_path):
    """Of the standard board, with a placer of a long name that ran a case of its own besides those of the others."""
    rows = [row for row in read_rows(BOARD / "results.csv") if row.workload in ("nmt", "gnmt-4")]
    params, kept = json.dumps({"starts": "/a+board" * 12}), [row for row in rows if row.workload == "nmt"]
    kept += [replace(row, placer="long", params=params) for row in rows if row.placer == "heft"]
    (tmp_path / "board").mkdir()
    write_rows(tmp_path / "board" / "results.csv", kept)
    page.write_page([tmp_path / "board"], tmp_path / "page.html")
    context = new_context(browser)
    tab = context.new_page()
    tab.goto((tmp_path / "page.html").as_uri())
    wanted = score.ranking(read_rows(tmp_path / "board" / "results.csv"))
    assert all(line["place"] for line in wanted) and len(wanted) > 30 and {line["cases"] for line in wanted} == {"3"}
    tab.get_by_label("grouped by family").uncheck()
    check_ranking(tab, wanted)
    assert tab.locator("#cost [data-placer]").count() == len(wanted)
    for width in WIDTHS:
        tab.set_viewport_size({"width": width, "height": 844})
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
    context.close()


def test_planners_that_ran_other_jobs_have_no_place(browser, tmp_path):
    """Of the shipped board of planners, with one planner that ran only the first two of its jobs."""
    folder, rows = tmp_path / "board", read_plan_rows(BOARD.parent / "parallel")
    left_out = {row.key for row in [row for row in rows if row.planner == "megatron"][2:]}
    write_plan_rows(folder, [row for row in rows if row.key not in left_out])
    page.write_page([folder], tmp_path / "page.html")
    context = new_context(browser)
    tab = context.new_page()
    tab.goto((tmp_path / "page.html").as_uri())
    wanted = score.ranking(map(as_row, read_folder(folder)))
    assert [line["placer"] for line in wanted if not line["place"]] == ["megatron"]
    tab.get_by_label("grouped by family").uncheck()
    check_ranking(tab, wanted)
    shown = dict(zip(column(tab, "ranking", 2), column(tab, "ranking", 6), strict=True))
    for line in wanted:
        if not line["place"]:
            ratio = f"{float(line['ratio_to_first']):.3f}"
            assert shown[line["placer"]] == f"{ratio} (2)" == f"{ratio} ({line['common_with_first']})"
    context.close()


HOSTILE = {
    "workload": "</script><script>window.pwned=1</script>'$(touch x)'.npz",
    "topology": '"><svg onload=window.pwned=1>.toml',
    "placers": ("<img src=x onerror=window.pwned=1>", "javascript:window.pwned=1"),
    "bound_method": "<b onmouseover=window.pwned=1>proven</b>",
}


def test_every_name_is_shown_as_text(browser, tmp_path):
    small_board(tmp_path / "<i>board</i>", **HOSTILE)
    page.write_page([tmp_path / "<i>board</i>"], tmp_path / "page.html")
    context = new_context(browser)
    tab, complaints = context.new_page(), []
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.goto((tmp_path / "page.html").as_uri())
    tab.locator("#rows button.open").first.click()
    tab.wait_for_timeout(200)  # for whatever a name might do
    shown = tab.locator("body").inner_text() + tab.get_by_role("dialog").inner_text()
    for name in (HOSTILE["workload"], HOSTILE["topology"], *HOSTILE["placers"], HOSTILE["bound_method"]):
        assert name in shown, name
    command = tab.get_by_role("dialog").locator("pre").inner_text()
    assert f"-t '{HOSTILE['topology']}'" in command and "'\\''$(touch x)'\\''" in command  # quoted for a shell
    assert tab.evaluate("window.pwned") is None and complaints == []
    assert tab.locator("main img, main script, dialog img, dialog i").count() == 0
    context.close()
