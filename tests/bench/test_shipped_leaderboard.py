"""The leaderboard in the repository still follows from the shipped graphs, machines, costs and engines."""

from pathlib import Path

import pytest

from simdev.bench import rows
from simdev.bench import score as leaderboard
from simdev.bench.verify import verify

FOLDER = Path(__file__).parents[2] / "leaderboard" / "standard"


def test_it_covers_eight_workloads_on_three_machines_with_every_classical_placer():
    found = rows.read_rows(FOLDER / "results.csv")
    assert len({row.workload for row in found}) >= 8 and len({row.topology for row in found}) >= 3
    placers = {row.placer for row in found}
    assert len(found) == len(placers) * len({(row.workload, row.topology) for row in found})
    assert {
        "single-cpu", "single-gpu", "random", "round-robin", "m-topo", "expert", "scotch", "min-cut", "heft", "peft",
        "m-etf", "m-sct", "critical-path", "local-search", "annealing", "genetic", "portfolio",
    } <= placers  # fmt: skip


def test_no_placement_beats_its_bound_and_every_placement_is_there():
    for row in rows.read_rows(FOLDER / "results.csv"):
        if row.status == "ok":
            assert rows.placement_path(FOLDER, row.placement).is_file()
            assert row.lower_bound_ns <= row.simulated_ns or not row.feasible


def test_the_readme_states_its_ranking():
    readme = (FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")
    for line in leaderboard.ranking(rows.read_rows(FOLDER / "results.csv")):
        table_line = next(text for text in readme.splitlines() if text.startswith(f"| `{line['placer']}` |"))
        mean = f"{float(line['geomean_ratio_to_best']):.3f}"
        assert f"| {mean} | {line['solved']}/{line['instances']} |" in table_line


@pytest.mark.slow
def test_a_sample_of_its_rows_holds():
    differences = verify(FOLDER, engine="fast", sample=24, jobs=2)
    assert not differences, [str(difference) for difference in differences]
