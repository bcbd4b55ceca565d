import math
from dataclasses import replace

import pytest
import small_board

from simdev.bench import rows, score
from simdev.errors import InvalidInput
from simdev.report import summary as board


def row(workload, placer, step_ns=None, *, status="ok", bound=50, **more):
    feasible = None if status != "ok" else step_ns is not None
    fields = {"workload": workload, "status": status, "feasible": feasible, "lower_bound_ns": bound}
    return small_board.row(placer, step_ns, **fields, **more)


TWO = [
    row("a", "single-gpu", 200),
    row("a", "expert", 100),
    row("a", "new", 80),
    row("b", "single-gpu"),
    row("b", "expert", 300),
    row("b", "new", status="timeout"),
]


def lines(found):
    return {(line["workload"], line["placer"]): line for line in score.leaderboard(found)}


def test_gap_ratios_and_ranks_by_hand():
    new = lines(TWO)["a", "new"]
    assert new["gap"] == "0.6000" and new["ratio_to_best"] == "1.0000" and new["rank"] == "1"
    assert new["speedup_vs_single_gpu"] == "2.5000" and new["speedup_vs_expert"] == "1.2500"
    assert new["step_time_s"] == new["best_known_s"] == "0.000000080" and new["lower_bound_s"] == "0.000000050"
    single = lines(TWO)["a", "single-gpu"]
    assert (single["ratio_to_best"], single["rank"]) == ("2.5000", "3")


def test_runs_without_a_score_have_no_numbers():
    oom, late = lines(TWO)["b", "single-gpu"], lines(TWO)["b", "new"]
    assert oom["status"] == "oom" and late["status"] == "timeout"
    for line in (oom, late):
        assert {line[name] for name in ("step_time_s", "gap", "ratio_to_best", "rank")} == {""}
    assert lines(TWO)["b", "expert"]["speedup_vs_single_gpu"] == ""


def test_gaps_by_hand():
    rows = [row("a", "x", 2_000_000, bound=1_000_000, bound_method="load"), row("a", "y", 1_500_000, bound=1_000_000)]
    rows += [row("b", "x", bound=3_000_000), row("b", "y", status="timeout", bound=None)]
    first, second = score.gaps(rows)
    assert list(first.values()) == ["a", "t", "fifo/fifo/dataflow", "step", "y", "1.500", "1.000", "load", "50.0%"]
    assert list(second.values()) == ["b", "t", "fifo/fifo/dataflow", "step", "", "", "3.000", "", ""]


def test_ranking_by_hand():
    found = {line["placer"]: line for line in score.ranking(TWO)}
    expected = {"expert": math.sqrt(1.25), "new": math.sqrt(10), "single-gpu": math.sqrt(2.5 * 10)}
    for placer, mean in expected.items():
        assert found[placer]["geomean_ratio_to_best"] == f"{mean:.4f}"
    assert [found[p]["place"] for p in ("expert", "new", "single-gpu")] == ["1", "2", "3"]
    assert (found["new"]["wins"], found["new"]["mean_rank"], found["new"]["solved"]) == ("1", "2.00", "1")
    assert found["expert"]["wins"] == "1" and found["expert"]["instances"] == "2"


@pytest.mark.parametrize("replacement", [row("b", "expert"), row("b", "expert", status="error")])
def test_failing_a_run_never_improves_a_mean(replacement):
    worse = [r for r in TWO if (r.workload, r.placer) != ("b", "expert")] + [replacement]
    mean = {line["placer"]: float(line["geomean_ratio_to_best"]) for line in score.ranking(TWO)}
    then = {line["placer"]: float(line["geomean_ratio_to_best"]) for line in score.ranking([*worse, TWO[0]])}
    assert then["expert"] > mean["expert"]


def test_a_ratio_of_ten_comes_last():
    found = [row("a", "best", 100), row("a", "middle", 250), row("a", "worst", 2000)]
    assert [line["placer"] for line in score.ranking(found)] == ["best", "middle", "worst"]


def test_a_run_that_was_never_made_counts_as_nothing_and_costs_the_place():
    """x: 10, 20 and 30; y: 20, 10 and 60; z runs the first two only: 10 and 20; w only the last: 30."""
    times = {"x": (10, 20, 30), "y": (20, 10, 60), "z": (10, 20), "w": (None, None, 30)}
    found = [row(w, p, ns) for p, all in times.items() for w, ns in zip("abc", all, strict=False) if ns]
    lines = score.ranking(found)
    assert [line["placer"] for line in lines] == ["x", "y", "w", "z"]
    assert [line["place"] for line in lines] == ["1", "2", "", ""]
    assert [line["cases"] for line in lines] == ["3", "3", "1", "2"] and {line["instances"] for line in lines} == {"3"}
    means = [2 ** (1 / 3), 2 ** (2 / 3), 1, 2 ** (1 / 2)]
    assert [line["geomean_ratio_to_best"] for line in lines] == [f"{mean:.4f}" for mean in means]
    assert [line["common_with_first"] for line in lines] == ["3", "3", "1", "2"]
    assert [line["ratio_to_first"] for line in lines] == ["1.0000", f"{2 ** (1 / 3):.4f}", "1.0000", "1.0000"]
    assert [line["wins"] for line in lines] == ["2", "1", "1", "1"]


def test_a_case_that_only_one_placer_ran_takes_no_place_from_the_others():
    """x and y run a and b; z runs c as well, where nobody competes: all are ranked over a and b."""
    times = {"x": (10, 20), "y": (20, 10), "z": (40, 40, 30)}
    lines = score.ranking([row(w, p, ns) for p, all in times.items() for w, ns in zip("abc", all, strict=False)])
    assert [(line["placer"], line["place"]) for line in lines] == [("x", "1"), ("y", "2"), ("z", "3")]
    assert {(line["cases"], line["solved"], line["instances"]) for line in lines} == {("2", "2", "3")}
    assert [line["geomean_ratio_to_best"] for line in lines] == [f"{2**0.5:.4f}", f"{2**0.5:.4f}", "4.0000"]
    assert [line["wins"] for line in lines] == ["1", "1", "0"]  # the case that it ran alone is no win
    assert [line["ratio_to_first"] for line in lines] == ["1.0000", "1.0000", f"{8**0.5:.4f}"]


def test_the_common_cases_are_those_of_the_largest_table_without_a_blank():
    """x and y run a to d, z one more; four others run a alone: three rows of four cases are more than seven of one."""
    times = {"x": "abcd", "y": "abcd", "z": "abcde", **dict.fromkeys("stuv", "a")}
    lines = score.ranking([row(w, p, 10) for p, names in times.items() for w in names])
    assert [(line["placer"], line["place"], line["cases"]) for line in lines[:3]] == [
        ("x", "1", "4"), ("y", "2", "4"), ("z", "3", "4"),
    ]  # fmt: skip
    assert {(line["place"], line["cases"]) for line in lines[3:]} == {("", "1")}


def test_placers_that_share_no_case_are_not_compared():
    lines = score.ranking([row("a", "x", 10), row("b", "x", 10), row("c", "y", 10)])
    assert [(line["place"], line["common_with_first"], line["ratio_to_first"]) for line in lines] == [
        ("1", "2", "1.0000"),
        ("", "0", ""),
    ]


def test_variants_are_placers_of_their_own(tmp_path):
    variant = replace(row("a", "x", 20), params='{"rate": 0.0}')
    for table in (score.leaderboard, score.ranking):
        named = [(line["placer"], line["variant_of"]) for line in table([row("a", "x", 10), variant])]
        assert sorted(named) == [("x", ""), ("x[rate=0.0]", "x")]
    rows.write_rows(tmp_path / "results.csv", [variant])
    text = (tmp_path / "results.csv").read_text()
    assert ",x[rate=0.0]," in text and rows.read_rows(tmp_path / "results.csv") == [variant]
    (tmp_path / "results.csv").write_text(text.replace(",x[rate=0.0],", ",x,"))  # as older versions wrote it
    assert rows.read_rows(tmp_path / "results.csv") == [variant]


def test_a_time_of_a_microbatch_stands_in_a_column_of_its_own(tmp_path):
    paced = row("a", "x", 10, objective="throughput/1f1b/32")
    (line,) = score.leaderboard([paced])
    assert (line["step_time_s"], line["microbatch_time_s"]) == ("", "0.000000010")
    path = tmp_path / "results.csv"
    rows.write_rows(path, [paced])
    (cells,) = (cells for _, cells in rows.read_csv(path, rows.COLUMNS))
    assert (cells["step_time_s"], cells["microbatch_time_s"]) == ("", "0.000000010")
    assert rows.read_rows(path) == [paced] and cells["digest"] == paced.digest
    text = path.read_text()
    path.write_text(text.replace("throughput/1f1b/32", "step"))
    with pytest.raises(InvalidInput, match="line 2: .*microbatch"):
        rows.read_rows(path)


def test_a_very_slow_run_counts_like_a_failure():
    slow, failed = ([row("a", "x", 10), row("a", "y", step)] for step in (10_000, None))
    means = [{line["placer"]: line["geomean_ratio_to_best"] for line in score.ranking(r)} for r in (slow, failed)]
    assert means[0] == means[1] == {"x": "1.0000", "y": "10.0000"}


def test_median_over_seeds_counts_failures_as_slowest():
    found = [row("a", "x", step, seed=seed) for seed, step in enumerate((30, None, 10, 20))]
    line = lines(found)["a", "x"]
    assert (line["step_time_s"], line["best_time_s"]) == ("0.000000020", "0.000000010")
    assert (line["runs"], line["solved"], line["status"]) == ("4", "3", "ok")
    mostly_failed = [row("a", "x", 10), row("a", "x", None, seed=1), row("a", "x", None, seed=2)]
    assert lines(mostly_failed)["a", "x"]["status"] == "oom"


def test_equal_times_share_a_rank():
    found = lines([row("a", "x", 10), row("a", "y", 10), row("a", "z", 11)])
    assert [found["a", placer]["rank"] for placer in "xyz"] == ["1", "1", "3"]


def test_budgets_rank_apart_but_share_the_best_known():
    found = score.leaderboard([row("a", "x", 10), row("a", "x", 5, budget="evaluations=2")])
    assert [(line["rank"], line["ratio_to_best"]) for line in found] == [("1", "2.0000"), ("1", "1.0000")]


def test_rows_round_trip_through_csv(tmp_path):
    path = tmp_path / "results.csv"
    full = row(
        "a,b",
        "x",
        123456789012,
        error='say "no"',
        simulated_ns=1,
        overflow="gpu0:3",
        peak_memory_bytes=1 << 50,
        comm_bytes=7,
        evaluations=3,
        placement="f00",
        place_seconds=0.25,
        machine="m",
        versions="v",
    )
    rows.write_rows(path, [*TWO, full])
    assert rows.read_rows(path) == sorted([*TWO, full], key=lambda r: r.key)
    assert "123.456789012" in path.read_text()


def test_times_are_nanoseconds_in_memory_and_seconds_in_the_file():
    one = row("a", "x", 123456789012, bound=7, simulated_ns=5)
    assert (one.step_ns, one.simulated_ns, one.lower_bound_ns) == (123456789012, 5, 7)
    cells = one.cells()
    assert [cells[name] for name in rows.FIELD] == ["123.456789012", "0.000000005", "0.000000007"]
    assert not {name for name in vars(one) if name.endswith("_s")}


def test_a_journal_of_the_first_version_is_read():
    old = {name: 9 for name in rows.FIELD}
    entry = {key: value for key, value in rows.RESULTS.to_json(TWO[0]).items() if not key.endswith("_ns")}
    assert rows.RESULTS.from_json({**entry, **old}, "journal").step_ns == 9


@pytest.mark.parametrize(
    "old, new, word",
    [
        (",ok,", ",fine,", "status"),
        (",true,", ",yes,", "feasible"),
        ("0.000000080", "0.0000000801", "step_time_s"),
        ("0.000000080", "fast", "step_time_s"),
        ("0.000000080", "0.000000081", "digest"),
        (",{},", ",[],", "params"),
        ("workload,", "work,", "header"),
    ],
)
def test_damaged_rows_are_named(tmp_path, old, new, word):
    path = tmp_path / "results.csv"
    rows.write_rows(path, TWO)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(InvalidInput, match=rf"results.csv: .*{word}"):
        rows.read_rows(path)


def test_the_same_run_twice_is_refused(tmp_path):
    path = tmp_path / "results.csv"
    rows.write_rows(path, [TWO[0], TWO[0]])
    with pytest.raises(InvalidInput, match="line 3: the same run twice"):
        rows.read_rows(path)


def test_compare_tells_better_from_worse(tmp_path):
    after = [
        row("a", "single-gpu", 200),
        row("a", "expert", 150),
        row("a", "new", 40),
        row("b", "single-gpu", 9),
        row("b", "expert"),
        row("c", "new", 1),
    ]
    for name, found in (("before", TWO), ("after", after)):
        (tmp_path / name).mkdir()
        rows.write_rows(tmp_path / name / "results.csv", found)
    found = score.compare(tmp_path / "before", tmp_path / "after")
    assert [(line["workload"], line["placer"], line["verdict"], line["change"]) for line in found] == [
        ("a", "expert", "worse", "0.5000"),
        ("a", "new", "better", "-0.5000"),
        ("b", "expert", "worse", ""),
        ("b", "new", "only before", ""),
        ("b", "single-gpu", "better", ""),
        ("c", "new", "only after", ""),
    ]


def test_the_board_marks_the_best_and_what_failed():
    ((title, header, table),) = board.board(TWO)
    assert "t, evaluations=1" in title and header == ["placer", "a", "b", "mean", "cases"]
    assert table[0] == ["expert", "0.000 (2.00x)", "*0.000", "1.118", "2"]
    assert table[1][:3] == ["new", "*0.000 (2.50x)", "timeout"]
    assert table[2][2] == "OOM"


def test_failures_are_told_once_each():
    found = [row(w, "x", status="skipped", error="no kernels") for w in "ab"]
    assert board.failures([*found, *TWO]) == ["new: timeout on b: ", "x: skipped on a, b: no kernels"]
