"""The controls of the learned search: the tables by hand, and the smallest study from end to end."""

from test_reproduce import found

from simdev.studies.reproduce import learned, reproduce

SIZE = learned.Size(
    evaluations=9, seeds=1, workloads=("w",), workloads_of_all_seeds=("w",), topologies=("t",), checkpoints=(5, 9)
)


def test_the_tables_by_hand():
    runs = {
        learned.LEARNED: [found("learned-search", [(1, 0, 400), (6, 0, 100)])],
        "portfolio": [found("portfolio", [(1, 0, 200)])],
        "single-gpu": [found("single-gpu", [(0, 0, 300)])],
    }
    best = learned.best_known(runs)
    assert best == {("w", "t"): 100 / 1e6}
    mine, other = learned.ratios_of(runs, best, SIZE, "portfolio")
    assert mine["placer"] == "`learned-search`" and mine["ratio after 5"].startswith("4.000 ")
    assert mine["ratio after 9"].startswith("1.000 ")
    assert (mine["shorter than portfolio"], mine["longer"]) == ("1 of 1", 0)
    assert (other["shorter than portfolio"], other["longer"]) == ("0 of 1", 0)
    (line,) = learned.families(runs, best, SIZE)
    assert line == {
        "workload": "w",
        "worst after 5": "4.000",
        "worst after 9": "1.000",
        "least speedup over one GPU": "3.00",
    }


def test_what_does_not_fit_counts_as_ten():
    fits, never = found("a", [(1, 0, 100)]), found("b", [])
    best = learned.best_known({"a": [fits], "b": [never]})
    assert (
        learned.ratio(never, best, 9) == 10 and learned.ratio(fits, best, 0) == 10 and learned.ratio(fits, best, 1) == 1
    )
    runs = {learned.LEARNED: [fits], "single-gpu": [never]}
    assert learned.families(runs, best, SIZE)[0]["least speedup over one GPU"] == ""


def test_the_smallest_study_from_end_to_end(tmp_path):
    report = reproduce("learned", tmp_path, scale="tiny").read_text()
    assert "`learned-search[choice=untrained]`" in report and "| transformer-xl-2 |" in report
    for name in ("board.csv", "families.csv", "controls.csv"):
        assert (tmp_path / name).stat().st_size > 50
