"""Ranking placements under other rules."""

import numpy as np
import pytest

from simdev.bench.rows import Row, write_rows
from simdev.errors import InvalidInput
from simdev.placers import registry
from simdev.problem.placement import Placement
from simdev.problem.placement_file import store_placement
from simdev.problem.problem import Problem
from simdev.problem.topology import load_topology
from simdev.sim import simulate
from simdev.sim.presets import PRESETS
from simdev.studies import physics as physics_report
from simdev.studies.physics import FULL, LEAST, CaseTimes, agreements, markdown, matrix, read_cases

TIMES = {FULL: [100, 120, 140, 300, 900]} | {
    "placeto": [10, 20, 30, 40, 50],
    "baechi": [50, 40, 30, 20, 10],
    "load": [20, 10, 30, 40, 50],
    "ideal-links": [7, 7, 7, 7, 7],
}
CASE = CaseTimes("w", "t", tuple("abcde"), {name: np.array(ns) for name, ns in TIMES.items()})


def test_agreement_is_by_rank_and_regret_by_the_full_rules():
    rows = {row.preset: row for row in agreements([CASE])}
    assert [rows["placeto"].kendall, rows["placeto"].spearman] == pytest.approx([1, 1]) and rows["placeto"].regret == 1
    assert [rows["baechi"].kendall, rows["baechi"].kendall_good] == pytest.approx([-1, -1]) and rows[
        "baechi"
    ].regret == 9
    assert rows["baechi"].favourite == "e"
    # one of ten pairs is turned around, one of the three good ones
    assert rows["load"].kendall == pytest.approx(0.8) and rows["load"].kendall_good == pytest.approx(1 / 3)
    assert rows["load"].regret == pytest.approx(1.2)
    assert np.isnan(rows["ideal-links"].kendall) and np.isnan(rows["ideal-links"].spearman)


def test_the_matrix_is_symmetric():
    pairs = matrix([CASE])
    assert pairs["placeto", "baechi"] == pairs["baechi", "placeto"] == pytest.approx(-1)
    text = markdown([CASE], ["w2 on t: too few"])
    assert all(name in text for name in PRESETS) and "too few" in text


def test_a_folder_of_rows_is_timed(tmp_path):
    made = Problem.build(registry.load_workload("inception-v3"), load_topology("p100x2"))
    (tmp_path / "placements").mkdir()
    step, found = {}, []
    for number in range(LEAST):
        devices = np.full(made.graph.n_ops, 1, np.int32)
        devices[made.graph.unit_of_op > made.graph.n_units - 50 * number] = 2
        placement = Placement(devices)
        store_placement(tmp_path, placement)
        schedule = simulate(made, placement)
        step[f"p{number}"] = schedule.step_ns
        key = dict(
            workload="inception-v3", topology="p100x2", rules="fifo/fifo/dataflow", placer=f"p{number}", version=1
        )
        more = dict(params="{}", budget="evaluations=1", seed=0, fingerprint=made.graph.fingerprint, cost_hash="")
        found.append(Row(**key, **more, status="ok", feasible=True, placement=placement.hash))
    write_rows(tmp_path / "results.csv", found)
    (case,), notes = read_cases(tmp_path)
    assert not notes and dict(zip(case.placers, case.ns[FULL].tolist(), strict=True)) == step
    assert (case.ns["ideal-links"] <= case.ns[FULL]).all() and set(case.ns) == {FULL, *PRESETS}


def test_a_folder_without_enough_is_refused(tmp_path):
    write_rows(tmp_path / "results.csv", [])
    with pytest.raises(InvalidInput, match="no case"):
        read_cases(tmp_path)


def test_writes_three_files(tmp_path):
    physics_report.write([CASE], [], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "physics.csv", "times.csv"}
    assert len((tmp_path / "times.csv").read_text().splitlines()) == 6
