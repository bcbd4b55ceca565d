"""Moirai's spreadsheets: the reader of .xls by small cases, the published files, the toy's optimum."""

import os
from pathlib import Path

import numpy as np
import pytest

from simdev.errors import InvalidInput
from simdev.exact.makespan import solve_makespan
from simdev.graphs.importers import import_graph, xls
from simdev.graphs.importers.moirai import read_problem
from simdev.placers.budget import Budget
from simdev.placers.registry import find_placer
from simdev.problem.placement import Placement
from simdev.sim import simulate, simulate_many

DATA = Path(os.environ.get("SIMDEV_DATA", Path(__file__).parents[3] / "shared" / "data")) / "moirai"
published = pytest.mark.skipif(not DATA.is_dir(), reason="SIMDEV_DATA names no folder with moirai")


def test_short_numbers_of_excel():
    assert xls._rk((7 << 2) | 2) == 7 and xls._rk((125 << 2) | 3) == 1.25
    assert xls._rk(((1 << 32) - (3 << 2)) | 2) == -3
    assert xls._rk(0x3FF00000) == 1.0 and xls._rk(0x40590000 | 1) == 1.0


@pytest.mark.parametrize("data", [xls.MAGIC, xls.MAGIC + bytes(600), b"PK\x03\x04" + bytes(40), b""])
def test_what_is_no_workbook_is_refused(data, tmp_path):
    with pytest.raises(InvalidInput, match="is no Excel 97 workbook, or is damaged"):
        xls.first_sheet(data, tmp_path / "a.xls")


@published
def test_damaged_spreadsheets_are_refused_with_a_sentence(tmp_path):
    data = (DATA / "example-1.xls").read_bytes()
    rng, path = np.random.default_rng(0), tmp_path / "a.xls"
    for _ in range(200):
        broken = bytearray(data[: int(rng.integers(8, len(data) + 1))])
        for at in rng.integers(8, len(broken), 6 if len(broken) > 8 else 0):
            broken[at] = int(rng.integers(256))
        path.write_bytes(bytes(broken))
        try:
            import_graph(path)
        except InvalidInput as error:
            assert "a.xls" in str(error)


@published
def test_the_published_files():
    problem = read_problem(DATA / "GoogLeNet.xls")
    assert problem.graph.n_ops == 140 and problem.topology.n_devices == 4
    single = [simulate(problem, Placement(np.full(140, d))).step_ns / 1e6 for d in range(4)]
    assert single == pytest.approx([2.336, 5.476, 5.547, 2.884], abs=1e-3)
    assert (problem.topology.memory_bytes / 1e9).round(1).tolist() == [62.0, 61.1, 18.0, 26.3]
    imported = import_graph(DATA / "transformer.xls")
    assert imported.graph.n_ops == 1373 and set(imported.measured) == {"p0", "p1", "p2", "p3"}


@published
@pytest.mark.parametrize("contention", ["fifo", "none"])
def test_the_example_of_the_paper(contention):
    """30.0 is the optimum if the order of the queues is free. With queues in order of arrival it is 31.0."""
    problem = read_problem(DATA / "example-1.xls", contention=contention)
    free = solve_makespan(problem, seconds=20)
    assert free.status == "optimal" and free.model_ns == free.bound_ns == pytest.approx(30e6, rel=1e-5)
    found, best, count = 0, None, 3**problem.graph.n_ops
    for first in range(0, count, 3**9):
        number = np.arange(first, first + 3**9)
        devices = np.stack([number // 3**op % 3 for op in range(problem.graph.n_ops)], axis=1).astype(np.int32)
        outcomes = simulate_many(problem, devices)
        found += int(outcomes.fits.sum())
        if outcomes.fits.any():
            step_ns = int(outcomes.step_ns[outcomes.fits].min())
            best = step_ns if best is None else min(best, step_ns)
    assert best == 31_000_000 and found == 2236  # of 531,441 placements
    spec, params = find_placer("portfolio")
    placement = spec.place(problem, rng=np.random.default_rng(0), budget=Budget(problem, evaluations=3000), **params)
    schedule = simulate(problem, placement)
    assert schedule.feasible and schedule.step_ns == best
