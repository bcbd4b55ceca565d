"""The speed table has a row per contender, size and kind of placement; no test here times anything."""

import csv

import numpy as np

from simdev.placers.testing import training_graph
from simdev.problem.problem import Problem
from simdev.problem.topology import load_topology
from simdev.studies import perf


def test_rows_and_files(tmp_path):
    rows = perf.measure([40], rounds=1)
    names = {row["contender"] for row in rows}
    assert {"fast", "fast, step time only", "fast, priority", "moves", "reference", "networkx longest path"} <= names
    assert len(rows) == 2 * len(names) and all(row["us"] > 0 for row in rows)
    perf.write(rows, tmp_path / "new")
    with open(tmp_path / "new" / "perf.csv", newline="", encoding="utf-8") as file:
        assert [row["contender"] for row in csv.DictReader(file)] == [row["contender"] for row in rows]
    assert (tmp_path / "new" / "perf.png").read_bytes()[:4] == b"\x89PNG"


def test_placements_leave_the_host_alone():
    problem = Problem.build(training_graph(np.random.default_rng(0), 4), load_topology("p100x4"))
    for how in ("random", "contiguous"):
        rows = perf.placements(np.random.default_rng(0), problem, how)
        assert rows.shape == (perf.PLACEMENTS, problem.graph.n_ops) and rows.dtype == np.int32
        assert set(np.unique(rows)) == {1, 2, 3, 4}
    assert (np.diff(rows, axis=1) != 0).mean() < 0.2
