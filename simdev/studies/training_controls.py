"""Two simple controls for predictions of training runs: a closed formula of ten constants for GPT (vTrain's rows) and a
constant MFU for each GPU and recomputation. Both are fitted to the given rows of all models but the one they judge, so
that the model is held out from them. A simulation that is not better than they are has explained nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simdev.parallel import Plan
from simdev.parallel.typed_plan import TypedPlan


@dataclass(frozen=True)
class TrainingRun:
    """One measured run: ``group`` is the model that it belongs to, ``typed`` what ``simdev simulate-plan`` is asked,
    ``step_ns`` its measured step time, ``peak_bytes`` the measured memory of the fullest rank (0: not measured), as
    reserved by the allocator or as allocated in it."""

    source: str
    name: str
    group: str
    typed: TypedPlan
    step_ns: float
    peak_bytes: float = 0.0
    reserved: bool = True

    @property
    def plan(self) -> Plan:
        return self.typed.plan


def constant_mfu(runs: list[TrainingRun], given: list[TrainingRun]) -> dict[int, float]:
    """Run number -> step time in ns by one MFU for each GPU and recomputation: the median over the rows in ``given``
    of other models. Runs without such rows are left out."""
    found = {}
    for number, run in enumerate(runs):
        others = [
            _work(other) / other.step_ns
            for other in given
            if other.group != run.group and _machine(other) == _machine(run)
        ]
        if others:
            found[number] = _work(run) / float(np.median(others))
    return found


def _machine(run: TrainingRun) -> tuple[str, object]:
    return run.plan.cluster.name, run.plan.parameters["recompute"]


def _work(run: TrainingRun) -> float:
    """Model FLOPs of a step on each rank."""
    return run.plan.model.flops(run.plan.parameters) * run.plan.sequences / run.plan.mesh.ranks


FORMULA = (
    "flop rate",
    "bytes per layer",
    "host forward",
    "host backward",
    "all-reduce latency",
    "all-reduce bandwidth",
    "gradient bandwidth",
    "optimizer bandwidth",
    "send",
    "step overhead",
)
START = (180e12, 60e-12, 0.8e6, 0.8e6, 40e3, 150e9, 150e9, 30e9, 50e3, 5e6)


def formula_ns(runs: list[TrainingRun], constants: np.ndarray) -> np.ndarray:
    """float64 ``(n,)``: step times by the closed formula, constants in the order of ``FORMULA``."""
    rate, per_byte, host, back, latency, band, gradient, optimizer, send, overhead = constants
    p = {
        name: np.array([run.plan.parameters[name] for run in runs], float)
        for name in ("width", "layers", "length", "microbatch", "vocabulary")
    }
    tp, pp, dp = (np.array([run.plan.mesh[axis] for run in runs], float) for axis in ("tp", "pp", "dp_replicate"))
    count = np.array([run.plan.microbatches for run in runs], float)
    tokens = p["microbatch"] * p["length"]
    flops = 24 * tokens * p["width"] ** 2 + 4 * tokens * p["length"] * p["width"]
    compute = flops / rate / tp * 1e9 + per_byte * tokens * p["width"] * 1e9 / tp
    wire = 2 * tokens * p["width"] * 2 * (tp - 1) / tp
    reduce = np.where(tp > 1, latency + wire / band * 1e9, 0)
    layer = 2 * (np.maximum(compute, host) + 2 * reduce) + np.maximum(2 * compute, back) + 2 * reduce
    head = 6 * tokens * p["width"] * p["vocabulary"] / rate / tp * 1e9
    stage = p["layers"] / pp * layer + head / pp + np.where(pp > 1, send, 0)
    weights = (12 * p["layers"] * p["width"] ** 2 + p["vocabulary"] * p["width"]) / tp / pp
    shared = np.where(dp > 1, 2 * weights * 2 * (dp - 1) / dp / gradient * 1e9, 0)
    return (count + pp - 1) * stage + shared + weights * 16 / optimizer * 1e9 + overhead


def fit_formula(runs: list[TrainingRun]) -> np.ndarray:
    """The ten constants that fit the step times of ``runs`` best (least squares of logarithms)."""
    from scipy.optimize import least_squares

    measured = np.log([run.step_ns for run in runs])

    def wrong(logs):
        return np.log(formula_ns(runs, np.exp(logs))) - measured

    return np.exp(least_squares(wrong, np.log(START), loss="soft_l1", f_scale=0.05).x)


def formula_left_out(runs: list[TrainingRun], given: list[TrainingRun]) -> dict[int, float]:
    """Run number -> step time in ns by the formula, fitted to the rows in ``given`` of other models. Runs are left out
    where fewer than two such rows are there for each constant."""
    found: dict[int, float] = {}
    for group in sorted({run.group for run in runs}):
        others = [run for run in given if run.group != group]
        mine = [number for number, run in enumerate(runs) if run.group == group]
        if len(others) >= 2 * len(FORMULA):
            times = formula_ns([runs[number] for number in mine], fit_formula(others))
            found.update(zip(mine, times.tolist(), strict=True))
    return found
