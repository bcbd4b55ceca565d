"""Fit the ratio of kernel times to their physics, for one class of kernels on one device.

A timer around a single call reads ``max(host, event + kernel)``: the host's issue time hides shorter kernels. ``event``
is the intercept of the elementwise tables' readings over bytes, minus a launch. ``host`` is the reading of rows whose
kernels are hidden. The fit of the ratio is its median times boosted regression trees (Friedman 2001) on its logarithm.
The weight of a row is the share of the kernel in its reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simdev.calibrate.manifest import held_out
from simdev.calibrate.observations import Observations
from simdev.errors import InvalidInput
from simdev.problem.opcost.device import ClassFit, fitted_s
from simdev.problem.opcost.physics import Datasheet, baseline_s, features
from simdev.problem.opcost.trees import UNIT, Trees

# (number of trees, leaves of each, least number of rows in a leaf)
SIZES = {
    "linear": (320, 31, 6),
    "gemm": (150, 8, 5),
    "bmm": (320, 31, 8),
    "conv3x3": (500, 24, 5),
    "vector": (60, 12, 30),
    "softmax": (120, 15, 8),
    "layer_norm": (120, 15, 8),
}
FEW = (80, 6, 6)
LEARNING_RATE = 0.06
TINY_S = 2e-6  # kernels with shorter physics are hidden from a timer around a call
HIDDEN_WEIGHT = 0.05  # of rows that the host's time hides; they bound the trees in ranges without other rows


@dataclass(frozen=True)
class Timer:
    """The parts of a table's readings that are not kernel time, in seconds."""

    event_s: float = 0.0
    host_s: float = 0.0

    def reading(self, kernel_s: np.ndarray) -> np.ndarray:
        return np.maximum(self.host_s, self.event_s + kernel_s)


def split(rows: Observations) -> np.ndarray:
    """bool ``(n,)``: the held-out rows, which give the errors and are never used in a fit."""
    return np.array([held_out(key) for key in rows.keys()], bool)


def event_seconds(tables: list[Observations], launch_s: float) -> float:
    """The cost of a pair of events on a device: the intercept of the elementwise tables over bytes, minus a launch. It
    is 0 without such tables."""
    intercepts = []
    for rows in tables:
        if rows.name != "vector" or not rows.host_floor:
            continue
        rows = rows.where(~split(rows))
        seen = rows.seconds > 1.5 * np.quantile(rows.seconds, 0.01)
        if seen.sum() < 20:
            continue
        size, seconds = rows.dims[seen].sum(axis=1), rows.seconds[seen]
        design = np.stack([1 / seconds, size / seconds], axis=1)  # least squares of relative errors
        intercepts.append(np.linalg.lstsq(design, np.ones(len(seconds)), rcond=None)[0][0])
    return max(0.0, float(np.median(intercepts)) - launch_s) if intercepts else 0.0


def timer_of(rows: Observations, event_s: float, sheet: Datasheet) -> Timer:
    """The timer of a table. Its host time is the median reading of kernels that are certainly hidden or, with fewer
    than ten such kernels, the least reading. Held-out rows are not used."""
    if not rows.host_floor:
        return Timer()
    seen = rows.where(~split(rows))
    rows = seen if len(seen.seconds) else rows
    tiny = baseline_s(rows.name, rows.dims, sheet) < TINY_S
    return Timer(event_s, float(np.median(rows.seconds[tiny]) if tiny.sum() >= 10 else rows.seconds.min()))


@dataclass(frozen=True)
class Sample:
    """A table with the datasheet of its device and the constants of its timer."""

    rows: Observations
    sheet: Datasheet
    timer: Timer
    launch_s: float
    weight: float = 1.0

    def kernel_s(self) -> np.ndarray:
        """Seconds of the kernels without event and launch, at least a tenth of their physics."""
        shortest = 0.1 * baseline_s(self.rows.name, self.rows.dims, self.sheet)
        return np.maximum(self.rows.seconds - self.timer.event_s - self.launch_s, shortest)

    def hidden(self) -> np.ndarray:
        return self.rows.seconds < 1.1 * self.timer.host_s


def fit_class(samples: list[Sample], *, seed: int, trees: bool = True, source: str = "") -> ClassFit:
    """Fit one class to all ``samples``. The rows that :func:`split` holds out are used only for the errors."""
    fitted, judged = zip(*(_halves(sample) for sample in samples), strict=True)
    efficiency = _efficiency(fitted)
    forest = _forest([(fitted, efficiency)], seed) if trees else None
    fit = ClassFit(efficiency, forest, source, sum(len(sample.rows.seconds) for sample in fitted))
    errors = np.concatenate([np.abs(relative_error(fit, sample)) for sample in judged])
    if not len(errors):
        return fit
    return ClassFit(efficiency, forest, source, fit.rows, float(errors.mean()), float(np.median(errors)))


def taught_class(teachers: Sequence[list[Sample]], efficiency: float, *, seed: int, source: str = "") -> ClassFit:
    """The fit of a class for a device without rows: trees fitted to other devices, and a given efficiency."""
    taught = [[_halves(sample)[0] for sample in device] for device in teachers]
    forest = _forest([(device, _efficiency(device)) for device in taught], seed)
    return ClassFit(efficiency, forest, source)


def relative_error(fit: ClassFit, sample: Sample) -> np.ndarray:
    """float64 ``(n,)``: the ratio of predicted to measured readings, minus one."""
    rows = sample.rows
    kernel = sample.launch_s + fitted_s(fit, rows.name, rows.dims, sample.sheet)
    return sample.timer.reading(kernel) / rows.seconds - 1


def shows_kernels(samples: list[Sample]) -> bool:
    """Whether any row that is not held out reads more than the host's time."""
    return any((~_halves(sample)[0].hidden()).any() for sample in samples)


def _halves(sample: Sample) -> tuple[Sample, Sample]:
    judge = split(sample.rows)

    def part(rows):
        return Sample(rows, sample.sheet, sample.timer, sample.launch_s, sample.weight)

    return part(sample.rows.where(~judge)), part(sample.rows.where(judge))


def _efficiency(samples) -> float:
    """The median ratio of physics to kernel time over the rows whose kernels are not hidden."""
    ratios = []
    for sample in samples:
        seen = ~sample.hidden() & (sample.rows.seconds > 3 * sample.timer.event_s)
        seen = seen if seen.any() else ~sample.hidden()
        physics = baseline_s(sample.rows.name, sample.rows.dims, sample.sheet)
        ratios.append((physics / sample.kernel_s())[seen])
    return float(np.median(np.concatenate(ratios)))


def _forest(groups: Sequence[tuple[Sequence[Sample], float]], seed: int) -> Trees:
    name = groups[0][0][0].rows.name
    x, target, weight = [], [], []
    for samples, efficiency in groups:
        for sample in samples:
            kernel, hidden = sample.kernel_s(), sample.hidden()
            x.append(features(name, sample.rows.dims, sample.sheet))
            over = np.log2(kernel * efficiency / baseline_s(name, sample.rows.dims, sample.sheet))
            target.append(np.where(hidden, np.minimum(over, 0), over))
            share = np.minimum(1, kernel / sample.rows.seconds) ** 2
            weight.append(sample.weight * np.where(hidden, HIDDEN_WEIGHT, share))
    arrays = np.concatenate(x), np.concatenate(target), np.concatenate(weight)
    return boosted(*arrays, SIZES.get(name, FEW), LEARNING_RATE, seed)


def boosted(
    x: np.ndarray, target: np.ndarray, weight: np.ndarray, size: tuple[int, int, int], rate: float, seed: int
) -> Trees:
    """Boosted trees of ``size`` (number, leaves of each, least rows in a leaf), fitted to ``target`` ``(n,)`` by the
    features ``x`` ``(n, f)``. One thread fits: the tables are small, and on a busy computer the threads of OpenMP wait
    for one another nearly all of the time."""
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
        from threadpoolctl import threadpool_limits
    except ImportError:
        raise InvalidInput("fits need scikit-learn: pip install 'simdev[calibrate]'", source="calibrate") from None
    count, leaves, smallest = size
    model = HistGradientBoostingRegressor(
        learning_rate=rate,
        max_iter=count,
        max_leaf_nodes=leaves,
        min_samples_leaf=smallest,
        l2_regularization=1.0,
        early_stopping=False,
        random_state=seed,
    )
    with threadpool_limits(1):
        model.fit(x.astype(np.float64), target, weight)
    return flatten(model)


def flatten(model) -> Trees:
    """The trees of a fitted ``HistGradientBoostingRegressor`` as plain arrays, with nodes in breadth-first order."""
    columns: dict[str, list] = {"feature": [], "threshold": [], "left": [], "value": []}
    roots = [0]
    _leaf(columns, float(np.ravel(model._baseline_prediction)[0]))
    for (predictor,) in model._predictors:
        nodes, start = predictor.nodes, len(columns["left"])
        roots.append(start)
        order, place = [0], 0
        while place < len(order):
            node = nodes[order[place]]
            if node["is_leaf"]:
                _leaf(columns, float(node["value"]))
            else:
                columns["feature"].append(int(node["feature_idx"]))
                columns["threshold"].append(float(node["num_threshold"]))
                columns["left"].append(start + len(order))
                columns["value"].append(0)
                order += [int(node["left"]), int(node["right"])]
            place += 1
    return Trees(
        np.array(columns["feature"], np.uint8),
        np.array(columns["threshold"], np.float32),
        np.array(columns["left"], np.int32),
        np.array(columns["value"], np.int16),
        np.array(roots, np.int32),
    )


def _leaf(columns: dict[str, list], value: float) -> None:
    columns["feature"].append(0)
    columns["threshold"].append(0.0)
    columns["left"].append(-1)
    columns["value"].append(int(np.clip(round(value * UNIT), -(1 << 15), (1 << 15) - 1)))
