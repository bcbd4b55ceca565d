"""The bench before and after calibration: which placers trade places."""

import numpy as np
import pytest

from simdev.errors import InvalidInput
from simdev.studies import cost_report
from simdev.studies.cost_report import PlacerTimes


def case(before, after, moved):
    return PlacerTimes("w", "t", tuple("abcde"[: len(before)]), *(np.array(times) for times in (before, after, moved)))


def test_pairs_that_trade_places_and_the_regret_of_the_old_favourite():
    one = case([10, 20, 30], [25, 20, 30], [24, 20, 31])
    assert one.changed == 1 and one.kendall == pytest.approx(1 / 3)
    assert one.regret == pytest.approx(0.2)  # a looked best before; its placement takes 24 now, the best 20
    assert case([10, 10, 30], [25, 20, 30], [25, 20, 30]).changed == 0  # a tie is nobody's place
    assert [row[:4] for row in cost_report.ranks([one])] == [
        ["b", "1", "2.0", "1.0"],
        ["a", "1", "1.0", "2.0"],
        ["c", "1", "3.0", "3.0"],
    ]


def test_a_case_of_the_bench(tmp_path):
    placers = ["single-gpu", "single-cpu", "round-robin", "heft", "m-topo", "expert"]
    cases, notes = cost_report.compare(["rnnlm"], ["p100x2"], placers, 1)
    (one,) = cases
    assert one.placers == tuple(placers) and notes == []
    assert [p for p, a, b in zip(placers, one.before, one.after, strict=True) if a == b] == [
        "single-cpu"
    ]  # no device file
    assert one.moved[0] == one.after[0]  # the same placement, whatever the costs
    cost_report.write(cases, ["n"], tmp_path, 1)
    assert "pairs of placers" in (tmp_path / "README.md").read_text() and "* n" in (tmp_path / "README.md").read_text()
    (p100,) = cost_report.sources(["rnnlm"], ["p100-pcie"])
    assert sum(map(float, p100[2:5])) == pytest.approx(100, abs=0.2) and float(p100[3]) > 95
    (k80,) = cost_report.sources(["rnnlm"], ["k80"])
    assert k80[2:5] == ["0.0", "0.0", "100.0"] and k80[5].startswith("mm ")
    assert len((tmp_path / "times.csv").read_text().splitlines()) == 7


def test_a_placer_that_refuses_is_left_out_with_its_reason(tmp_path):
    lines = [
        "from simdev import placer",
        "from simdev.errors import Unsupported",
        "@placer('no', version=1, family='f')",
    ]
    lines += ["def no(problem, *, rng, budget):", "    raise Unsupported('needs a torus')"]
    (tmp_path / "no.py").write_text("\n".join(lines))
    with pytest.raises(InvalidInput, match=r"no, rnnlm on p100x2: needs a torus"):
        cost_report.compare(["rnnlm"], ["p100x2"], [f"{tmp_path / 'no.py'}:no"], 1)


def test_too_few_placers_are_refused():
    with pytest.raises(InvalidInput, match="only 1 placers"):
        cost_report.compare(["rnnlm"], ["p100x2"], ["single-gpu"], 1)
