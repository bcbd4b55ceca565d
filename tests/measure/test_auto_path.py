"""``calibrated = "auto"`` is one path: the fidelity report, ``simulate`` and the bench cost a board alike."""

from dataclasses import replace

import numpy as np
import pytest

from simdev.calibrate.build import datasheets, save_calibration
from simdev.problem.opcost.parts import KernelPart
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.problem.topology import Device, Topology, load_kinds
from simdev.sim import simulate
from simdev.studies.fidelity.label_graph import graph_of, time_graph
from simdev.studies.fidelity.tables import teacher_of


def test_a_board_without_a_file_is_costed_alike_by_the_report_and_for_users(tmp_path):
    parts = [
        (KernelPart("linear", (1, 4096, 1024, 4096)), 3),
        (KernelPart("bmm", (64, 512, 512, 64)), 3),
        (KernelPart("softmax", (32768, 512)), 3),
        (KernelPart("vector", (1 << 26, 1 << 25)), 3),
        (KernelPart("gemm", (1, 4096, 4096, 4096), "bf16"), 2),
    ]
    graph, (known,) = graph_of("a model", parts), [sheet for sheet in datasheets().values() if sheet.model == "l4"]
    save_calibration(teacher_of(known), tmp_path / "stand-in.toml")
    reported_s = time_graph(graph, known, str(tmp_path / "stand-in.toml")).seconds
    kind = replace(load_kinds()["l4"], memory_bytes=1 << 50)
    assert kind.calibrated == "auto"
    problem = Problem.build(graph, Topology("one board", (Device("board0", kind),)))
    users_s = simulate(problem, Placement(np.zeros(graph.n_ops, np.int64))).step_ns / 1e9
    assert users_s == pytest.approx(reported_s, rel=1e-5)  # files round efficiencies to six digits
