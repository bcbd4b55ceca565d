"""Curves: points by hand, medians, pictures, and the command."""

import json

import pytest

from simdev.bench import rows, score
from simdev.bench.journal import CURVES
from simdev.bench.rows import Row
from simdev.errors import InvalidInput, UnknownName
from simdev.report import curve


def row(placer, step_ns, *, seed=0, evaluations=10, seconds=2.0, topology="t", budget="evaluations=10"):
    return Row(
        workload="w",
        topology=topology,
        rules="fifo/fifo/dataflow",
        placer=placer,
        version=1,
        params="{}",
        budget=budget,
        seed=seed,
        fingerprint="f",
        cost_hash="c",
        status="ok",
        feasible=step_ns is not None,
        step_ns=step_ns,
        evaluations=evaluations,
        place_seconds=seconds,
    )


def folder(tmp_path, found, curves):
    rows.write_rows(tmp_path / "results.csv", found)
    score.write(tmp_path, found)
    lines = [
        dict(zip(CURVES, (*key, used, f"{seconds:.3f}", rows.seconds_text(ns)), strict=True))
        for key, points in curves.items()
        for used, seconds, ns in points
    ]
    rows.write_csv(tmp_path / "curves.csv", CURVES, lines)
    return tmp_path


@pytest.fixture
def results(tmp_path):
    searcher = [row("search", ns, seed=seed) for seed, ns in enumerate((70_000_000, 60_000_000, 80_000_000))]
    found = [
        *searcher,
        row("rule", 90_000_000, evaluations=0, seconds=0.1),
        row("big", None),
        row("x", 1, topology="u"),
    ]
    curves = {run.key: [(1, 0.2, 100_000_000), (7, 1.5, run.step_ns)] for run in searcher}
    return folder(tmp_path, found, curves)


def test_points_end_with_what_was_returned(results):
    found = {(run.placer, run.seed): run for run in curve.searches(results, "w", "t")}
    assert found["search", 0].points == ((1, 0.2, 100_000_000), (7, 1.5, 70_000_000), (10, 2.0, 70_000_000))
    assert found["rule", 0].points == ((0, 0.1, 90_000_000),)
    assert found["big", 0].points == () and found["big", 0].step_ns is None
    assert len(found) == 5


def test_table_is_of_medians_fastest_first(results):
    lines = curve.table(curve.searches(results, "w", "t"))
    assert [line["placer"] for line in lines] == ["search", "rule", "big"]
    assert lines[0] == {
        "placer": "search",
        "runs": "3",
        "solved": "3",
        "evaluations": "10",
        "seconds": "2.00",
        "improvements": "2",
        "step_time_ms": "70.000",
    }
    assert (lines[2]["solved"], lines[2]["step_time_ms"]) == ("0", "")


def test_some_placers_only(results):
    assert {run.placer for run in curve.searches(results, "w", "t", placers=["rule"])} == {"rule"}


@pytest.mark.parametrize(
    "arguments, word",
    [
        (dict(workload="v", topology="t"), "workload"),
        (dict(workload="w", topology="v"), "topology"),
        (dict(workload="w", topology="t", budget="evaluations=3"), "budget"),
        (dict(workload="w", topology="t", placers=["serach"]), "did you mean 'search'"),
    ],
)
def test_what_the_folder_does_not_hold(results, arguments, word):
    with pytest.raises(UnknownName, match=word):
        curve.searches(results, **arguments)


def test_a_damaged_curve_names_its_line(results):
    path = results / "curves.csv"
    path.write_text(path.read_text().replace("0.200", "soon", 1))
    with pytest.raises(InvalidInput, match="curves.csv: line 2: not a number"):
        curve.searches(results, "w", "t")


def test_command_prints_and_draws(results, capsys, monkeypatch, tmp_path):
    import sys

    from simdev.cli import main as cli

    picture = tmp_path / "curve.svg"
    base = ["simdev", "curve", str(results), "-w", "w", "-t", "t"]
    for extra in (["-o", str(picture)], ["--json"]):
        monkeypatch.setattr(sys, "argv", base + extra)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code in (0, None)
        text = capsys.readouterr().out
        assert ("70.000" in text) if extra[0] == "-o" else json.loads(text)[0]["placer"] == "big"
    drawn = picture.read_text()
    assert drawn.startswith("<?xml") and len(drawn) > 5000


def test_seeds_are_one_line(results):
    """Each seed has 100 ms after one evaluation, and 60, 70 or 80 ms from the seventh on."""
    runs = [run for run in curve.searches(results, "w", "t") if run.placer == "search"]
    assert curve.median_curve(runs, 0, 1) == ([1, 7, 10], [100, 60, 60], [100, 70, 70], [100, 80, 80])


def test_at_most_eight_placers_are_drawn(tmp_path):
    found = [curve.Search(f"p{n}", 0, 10**6 + n, 1, 1.0, ((1, 1.0, 10**6 + n),)) for n in range(12)]
    curve.draw(found, "many", tmp_path / "many.svg")
    drawn = (tmp_path / "many.svg").read_text(encoding="utf-8")
    assert "p7  1.0" in drawn and "p8" not in drawn and "the best 8 of 12 placers" in drawn


def test_nothing_to_draw_and_unknown_formats(results, tmp_path):
    found = curve.searches(results, "w", "t")
    with pytest.raises(InvalidInput, match="no run has a score"):
        curve.draw([run for run in found if run.placer == "big"], "w", tmp_path / "a.png")
    with pytest.raises(InvalidInput, match="cannot draw 'txt'"):
        curve.draw(found, "w", tmp_path / "a.txt")
