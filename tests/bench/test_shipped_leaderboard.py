"""The published boards are complete and keep to their bounds; tests/tools/boards.py recomputes all their rows."""

from pathlib import Path

import boards

from simdev.bench import rows
from simdev.bench.run import load_problem
from simdev.problem.placement_file import placement_file, stored_placement

FOLDER = Path(__file__).parents[2] / "leaderboard" / "standard"
ORDER, LONG = FOLDER.parent / "order", FOLDER.parent / "long"


def test_it_covers_eight_workloads_on_three_machines_with_every_classical_placer():
    found = rows.read_rows(FOLDER / "results.csv")
    assert len({row.workload for row in found}) >= 8 and len({row.topology for row in found}) >= 3
    placers = {row.placer for row in found}
    runs = {(row.workload, row.topology, row.placer) for row in found}
    assert len(runs) == len(placers) * len({(row.workload, row.topology) for row in found})
    assert {
        "single-cpu", "single-gpu", "random", "round-robin", "m-topo", "expert", "scotch", "min-cut", "heft", "peft",
        "m-etf", "m-sct", "critical-path", "local-search", "annealing", "genetic", "portfolio",
    } <= placers  # fmt: skip


def test_no_placement_beats_its_bound_and_every_placement_is_there():
    for row in rows.read_rows(FOLDER / "results.csv"):
        if row.status == "ok":
            assert placement_file(FOLDER, row.placement).is_file()
            assert row.lower_bound_ns <= row.simulated_ns or not row.feasible


def test_the_costs_of_each_machine_are_those_of_its_rows():
    for row in {row.topology: row for row in rows.read_rows(FOLDER / "results.csv") if row.workload == "dlrm"}.values():
        assert load_problem(row.workload, row.topology, row.rules).costs.hash == row.cost_hash, row.topology


def test_searched_boards_hold_feasible_placements_under_their_rules():
    for folder, rules in ((ORDER, "priority/fifo/dataflow"), (LONG, "fifo/fifo/dataflow")):
        found = rows.read_rows(folder / "results.csv")
        assert {row.rules for row in found} == {rules}
        for row in found:
            assert row.status == "ok" and row.feasible and row.lower_bound_ns <= row.step_ns, row
    found = rows.read_rows(ORDER / "results.csv")
    assert all(stored_placement(ORDER, row.placement).priority is not None for row in found)


def test_no_replay_beats_a_record():
    """A placement under ``fifo`` can be repeated under ``priority``, so ``order`` holds the best of all boards."""
    assert boards.slower_than(LONG, [FOLDER]) == []
    assert boards.slower_than(ORDER, [FOLDER, LONG]) == []
