"""What a gap consists of: a better placement that is known, what lighter rules save, and the rest."""

from dataclasses import replace

import numpy as np
from small_board import small_board

from simdev.bench import rows
from simdev.bench.gaps import Parts, gap_parts
from simdev.bench.matrix import Run
from simdev.bench.run import Instance, blank_row, score
from simdev.bench.stored import stored_problem
from simdev.problem.placement import Placement
from simdev.problem.placement_file import store_placement
from simdev.problem.problem import Rules
from simdev.sim import simulate


def test_the_parts_of_a_gap_multiply_to_the_gap(tmp_path):
    small_board(tmp_path)
    (line,) = gap_parts(tmp_path)
    assert (
        float(line["best ms"]) == float(line["best known ms"]) >= float(line["relaxed ms"]) >= float(line["bound ms"])
    )
    shares = [1 + float(line[name].rstrip("%")) / 100 for name in ("placement weak", "bound weak", "open")]
    assert abs(np.prod(shares) - 1 - float(line["gap"].rstrip("%")) / 100) < 0.002
    assert line["verdict"] in ("closed", "open", "bound weak")


def test_a_better_result_elsewhere_shows_that_the_placement_is_weak(tmp_path):
    small_board(tmp_path / "slow", placers=("single-gpu",), step_ns=10**9, simulated_ns=10**9)
    small_board(tmp_path / "fast", placers=("single-gpu",))
    (alone,), (line,) = gap_parts(tmp_path / "slow"), gap_parts(tmp_path / "slow", [tmp_path / "fast"])
    assert alone["placement weak"] == "0.0%"
    assert float(line["best known ms"]) < 1000 and line["verdict"] == "placement weak"


def test_a_result_of_fifo_counts_for_the_order_track_and_not_the_reverse(tmp_path):
    (row,) = small_board(tmp_path / "fifo", placers=("single-gpu",))
    other = tmp_path / "order"
    (other / "placements").mkdir(parents=True)
    for name in ("graphs", "machines"):
        (tmp_path / "fifo" / name).rename(other / name)
        (tmp_path / "fifo" / name).symlink_to(other / name)
    problem = replace(stored_problem(other, row), rules=Rules("priority"))
    placement = Placement(np.array([0, 1, 0]), np.array([0, 1, 2]))
    instance = Instance(row.workload, row.topology, "priority/fifo/dataflow", row.fingerprint, row.cost_hash, 3)
    run = Run(row.workload, row.topology, instance.rules, "single-gpu", "{}", row.budget, 0)
    slow = score(blank_row(run, instance, row.version), problem, placement, simulate(problem, placement))
    slow = replace(slow, evaluations=0, lower_bound_ns=row.lower_bound_ns)
    assert slow.step_ns > row.step_ns
    rows.write_rows(other / "results.csv", [slow])
    store_placement(other, placement)
    (line,) = gap_parts(other, [tmp_path / "fifo"])
    assert line["verdict"] == "placement weak" and float(line["best known ms"]) == round(row.step_ns / 1e6, 3)
    (line,) = gap_parts(tmp_path / "fifo", [other])
    assert line["placement weak"] == "0.0%"


def test_verdicts():
    assert Parts(0.0, 0.002, 0.003).verdict == "closed"
    assert Parts(0.3, 0.1, 0.1).verdict == "placement weak"
    assert Parts(0.0, 0.3, 0.1).verdict == "bound weak"
    assert Parts(0.1, 0.1, 0.3).verdict == "open"
