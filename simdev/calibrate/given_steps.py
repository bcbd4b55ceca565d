"""Fit one factor for each precision to measurements of whole steps: a user's own (``simdev calibrate --steps``), or
published ones (F7 of ``simdev study fidelity``).

Kernels of a step take longer than alone: clocks fall under a lasting load, and there are gaps between kernels. A device
file holds one factor for each precision (``[steps]``), which multiplies the kernels of that precision. With ``T`` the
simulated step without a factor and ``B`` the part of it that the factor multiplies, a measured step ``M`` asks for the
factor ``1 + (M - T) / B``; the median over the given steps of a precision is taken.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from simdev.calibrate.build import save_calibration
from simdev.errors import InvalidInput, UnknownName
from simdev.files import open_text, table_errors
from simdev.placers.registry import load_workload
from simdev.problem.costs import calibration_of
from simdev.problem.graph import ComputationGraph
from simdev.problem.opcost.device import Calibration
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.problem.topology import Device, DeviceKind, Topology, load_kinds
from simdev.sim import simulate

PRECISIONS = ("f32", "tf32", "bf16", "f16", "f8")
BOUNDLESS = 1 << 50  # bytes
MOST_STEPS = 1000
LIMITS = (0.2, 5.0)  # a factor outside means that the graph is not what was measured


@dataclass(frozen=True)
class GivenStep:
    """A measured step of ``graph``: a workload or a graph file on one device, or a published job."""

    graph: str
    precision: str
    step_ns: float
    alone_ns: float = 0.0  # T
    scaled_ns: float = 0.0  # B

    @property
    def factor(self) -> float:
        return 1 + (self.step_ns - self.alone_ns) / self.scaled_ns

    def predicted_ns(self, factor: float) -> float:
        return self.alone_ns + (factor - 1) * self.scaled_ns


def read_steps(path: Path) -> list[GivenStep]:
    """Read a CSV file with the columns ``graph``, ``precision`` and ``step_ms``. Raises :class:`InvalidInput`."""
    steps = []
    with table_errors(path), open_text(path) as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            step_ms = float(row["step_ms"])
            if row["precision"] not in PRECISIONS:
                raise UnknownName("precision", row["precision"], PRECISIONS, source=path, field=f"line {number}")
            if not 0 < step_ms < 1e9:
                raise InvalidInput(f"expected ms above 0, got {step_ms}", source=path, field=f"line {number}, step_ms")
            steps.append(GivenStep(row["graph"], row["precision"], 1e6 * step_ms))
            if len(steps) > MOST_STEPS:
                raise InvalidInput(f"more than {MOST_STEPS} steps", source=path)
    if not steps:
        raise InvalidInput("holds no step", source=path)
    return steps


def fit_steps(steps: Sequence[GivenStep], kind: str) -> tuple[Calibration, list[GivenStep]]:
    """The device file of ``kind`` with factors fitted to ``steps``, and the steps with their predictions. Raises
    :class:`InvalidInput` for a step on which the factor has no influence or asks for an absurd one."""
    kinds = load_kinds()
    if kind not in kinds:
        raise UnknownName("device kind", kind, kinds)
    plain = replace(calibration_of(kinds[kind]), steps={})
    with TemporaryDirectory() as folder:
        known = [_predicted(step, plain, kinds[kind], Path(folder)) for step in steps]
    factors, notes = dict(calibration_of(kinds[kind]).steps), dict(plain.notes)
    for precision in dict.fromkeys(step.precision for step in known):
        mine = [step for step in known if step.precision == precision]
        factors[precision] = float(np.median([step.factor for step in mine]))
        notes[f"steps {precision}"] = f"median of {len(mine)} given steps"
    return replace(plain, steps=factors, notes=notes), known


def left_out_ns(steps: Sequence[GivenStep]) -> list[float]:
    """The prediction of each step by the factor of the other steps of its precision; NaN if it is the only one."""
    found = []
    for number, step in enumerate(steps):
        others = [s.factor for place, s in enumerate(steps) if place != number and s.precision == step.precision]
        found.append(step.predicted_ns(float(np.median(others))) if others else float("nan"))
    return found


def board_with(calibration: Calibration, kind: DeviceKind, folder: Path) -> DeviceKind:
    """A board as ``kind`` whose device file, written into ``folder``, is ``calibration``, and whose memory is endless:
    the step was measured, so it fits."""
    path = folder / f"board{len(list(folder.iterdir()))}.toml"
    save_calibration(calibration, path)
    return replace(kind, name="board", memory_bytes=BOUNDLESS, calibrated=str(path))


def _predicted(step: GivenStep, plain: Calibration, kind: DeviceKind, folder: Path) -> GivenStep:
    graph = load_workload(step.graph)
    alone, double = (
        _simulated_ns(graph, replace(plain, steps=steps), kind, folder) for steps in ({}, {step.precision: 2.0})
    )
    found = replace(step, alone_ns=alone, scaled_ns=double - alone)
    if found.scaled_ns <= 0:
        raise InvalidInput(f"no kernel of the graph is costed in {step.precision}", source=step.graph)
    if not LIMITS[0] <= found.factor <= LIMITS[1]:
        raise InvalidInput(
            f"simulated {alone / 1e6:.4g} ms, measured {step.step_ns / 1e6:.4g} ms: the kernels in {step.precision} "
            f"would need a factor of {found.factor:.3g}; is it the same model, batch and device?",
            source=step.graph,
        )
    return found


def _simulated_ns(graph: ComputationGraph, calibration: Calibration, kind: DeviceKind, folder: Path) -> float:
    """The step of ``graph`` alone on a board of ``kind`` with the device file ``calibration``."""
    board = board_with(calibration, kind, folder)
    problem = Problem.build(graph, Topology("one board", (Device("board0", board),)))
    return float(simulate(problem, Placement(np.zeros(graph.n_ops, np.int64))).step_ns)
