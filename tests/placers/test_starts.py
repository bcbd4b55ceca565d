"""Starts from a result folder: the best placements of the same graph and costs, under any rules; nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from small_board import small_board

from simdev.bench.stored import stored_problem
from simdev.errors import InvalidInput
from simdev.placers.budget import Budget
from simdev.placers.registry import find_placer
from simdev.placers.starts import stored_starts
from simdev.problem.problem import Rules
from simdev.sim import simulate


def test_the_fastest_come_first_and_serve_other_rules(tmp_path):
    rows = small_board(tmp_path)
    problem = replace(stored_problem(tmp_path, rows[0]), rules=Rules("priority"))
    found = stored_starts(tmp_path, problem)
    steps = [simulate(problem, placement).step_ns for placement in found]
    assert len(found) == len({row.placement for row in rows}) and steps == sorted(steps)
    spec, params = find_placer(f"long-search[starts={tmp_path}]")
    budget = Budget(problem, evaluations=30)
    placement = spec.place(problem, rng=np.random.default_rng(0), budget=budget, **params)
    assert simulate(problem, placement).step_ns <= steps[0]


def test_starts_come_from_several_folders(tmp_path):
    rows = small_board(tmp_path / "one")
    small_board(tmp_path / "two")
    problem = stored_problem(tmp_path / "one", rows[0])
    once, twice = Budget(problem, evaluations=40), Budget(problem, evaluations=40)
    for folders, budget in ((f"{tmp_path}/one", once), (f"{tmp_path}/one+{tmp_path}/two", twice)):
        spec, params = find_placer(f"long-search[starts={folders}]")
        spec.place(problem, rng=np.random.default_rng(0), budget=budget, **params)
    fastest = min(row.step_ns for row in rows if row.step_ns)
    assert once.best_step_ns <= fastest and twice.best_step_ns <= fastest
    with pytest.raises(InvalidInput, match="three"):
        spec, params = find_placer(f"long-search[starts={tmp_path}/one+{tmp_path}/three]")
        spec.place(problem, rng=np.random.default_rng(0), budget=Budget(problem, evaluations=9), **params)


def test_a_folder_without_the_problem_or_with_a_damaged_file_is_refused(tmp_path):
    rows = small_board(tmp_path)
    problem = stored_problem(tmp_path, rows[0])
    table = tmp_path / "results.csv"
    text = table.read_text()
    table.write_text(text.replace(rows[0].cost_hash, "0" * 16))
    with pytest.raises(InvalidInput, match=r"results\.csv: no placement of"):
        stored_starts(tmp_path, problem)
    table.write_text(text.replace("placement,", "place,"))
    with pytest.raises(InvalidInput, match="column 'placement' is missing"):
        stored_starts(tmp_path, problem)
    table.write_text(text)
    path = tmp_path / "placements.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"|u1"', b'"|u2"'))
    with pytest.raises(InvalidInput, match="placements.jsonl"):
        stored_starts(tmp_path, problem)


def test_rows_of_throughput_are_no_starts(tmp_path):
    rows = small_board(tmp_path)
    path = tmp_path / "results.csv"
    path.write_text(path.read_text(encoding="utf-8").replace(",step,", ",throughput/1f1b/8,"), encoding="utf-8")
    with pytest.raises(InvalidInput, match="no placement of"):
        stored_starts(tmp_path, stored_problem(tmp_path, rows[0]))
