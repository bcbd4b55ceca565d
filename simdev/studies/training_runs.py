"""Public measured training runs beside what simdev predicts for them, and beside two controls.

The runs are files of ``training-runs`` in the folder of measured data: vTrain's GPT runs on one node and many nodes,
MosaicML's MPT benchmarks and torchtitan's Llama 3 runs. The controls are a closed formula of ten constants (GPT) and a
constant MFU for each GPU and recomputation (MPT); they are fitted to the rows of all other models and judged on
the model that is left out. The simulation's host figures for Megatron (``simdev/parallel/hosts.py``) were chosen on
rows of all three one-node models, and its three factors for llm-foundry on 26 of that set's rows; nothing else in it
was fitted to training runs.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from simdev.errors import InvalidInput, SimdevError
from simdev.parallel import Mesh, Plan, find_model, load_cluster
from simdev.parallel.hosts import find_host, find_scale
from simdev.parallel.plan import prepare, simulate_program
from simdev.parallel.timing import Prices

SETS = ("vtrain-single", "vtrain-multi", "llm-foundry", "torchtitan")
FILES = {
    "vtrain-single": "vtrain_single.csv",
    "vtrain-multi": "vtrain_multi.csv",
    "llm-foundry": "llm_foundry.csv",
    "torchtitan": "torchtitan.csv",
}
GOALS = {"vtrain-single": 0.04, "vtrain-multi": 0.10, "llm-foundry": 0.08, "torchtitan": 0.08}
PUBLISHED = {"vtrain-single": 0.0837, "vtrain-multi": 0.1473}  # vTrain's own simulator
VTRAIN_ADAPTER = 12_500_000_000  # bytes/s: 800 Gbit/s between nodes of 8 (notes of the data)


@dataclass(frozen=True)
class Run:
    """One measured run: ``group`` is the model that it belongs to, ``step_ns`` its measured step time, ``peak_bytes``
    the measured memory of the fullest rank (0: not measured)."""

    source: str
    name: str
    group: str
    plan: Plan
    step_ns: float
    peak_bytes: float = 0.0


@dataclass(frozen=True)
class Prediction:
    run: Run
    step_ns: float
    peak_bytes: float

    @property
    def error(self) -> float:
        """Relative error of the step time; positive if the prediction is too long."""
        return self.step_ns / self.run.step_ns - 1


def read_runs(folder: Path, source: str) -> list[Run]:
    """The runs of one set. Raises :class:`InvalidInput` where the file is not there."""
    path = folder / "training-runs" / FILES[source]
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    except OSError as error:
        raise InvalidInput(error.strerror or str(error), source=path) from None
    reader = {"vtrain-single": _vtrain, "vtrain-multi": _vtrain, "llm-foundry": _foundry, "torchtitan": _titan}[source]
    runs = []
    for number, row in enumerate(rows):
        try:
            runs.append(reader(source, f"row {number + 1}", row))
        except KeyError as error:
            raise InvalidInput(f"column {error} is missing", source=path) from None
    return [run for run in runs if run is not None]


def predict(run: Run, prices: Prices | None = None) -> Prediction:
    """Simulate the plan of a run."""
    report = simulate_program(prepare(run.plan, prices))
    return Prediction(run, float(report.step_ns), float(report.peak_bytes.max()))


def predict_all(runs: list[Run], tell: Callable[[str], None] = lambda _: None) -> list[Prediction]:
    """Predictions of all runs that can be simulated; the others are named to ``tell``."""
    shared: dict = {}
    found = []
    for number, run in enumerate(runs):
        key = run.source, run.plan.cluster
        if key not in shared:
            shared[key] = Prices(run.plan.cluster, scale=find_scale(run.source))
        prices = shared[key]
        try:
            found.append(predict(run, prices))
            tell(f"{run.source} {number + 1}/{len(runs)}: {found[-1].error:+.1%}")
        except SimdevError as error:
            tell(f"{run.source} {run.name}: not simulated: {error}")
    return found


def spread(runs: list[Run], most: int) -> list[Run]:
    """``most`` of the runs, evenly taken over the list sorted by model and size."""
    if len(runs) <= most:
        return runs
    keep = np.linspace(0, len(runs) - 1, most).round().astype(int)
    ordered = sorted(runs, key=lambda run: (run.group, run.step_ns))
    return [ordered[place] for place in keep]


# Readers ---------------------------------------------------------------------------------------------------------


def _vtrain(source: str, name: str, row: dict) -> Run:
    model, parameters = find_model("gpt-3.6b")
    numbers = {key.strip(): value for key, value in row.items()}
    width, layers = int(numbers["hidden size"]), int(numbers["# layers"])
    micro = int(numbers.get("MicroBatchSize") or numbers["micro batch"])
    data, tensor, pipe = (int(numbers[f"{kind} parallelism"]) for kind in ("data", "tensor", "pipeline"))
    parameters |= {
        "width": width,
        "layers": layers,
        "heads": int(numbers["attention heads"]),
        "length": int(numbers["sequence length"]),
        "microbatch": micro,
    }
    cluster = replace(load_cluster("dgx-a100"), network_bytes_per_s=VTRAIN_ADAPTER, name="vtrain-a100")
    sizes = {axis: size for axis, size in (("pp", pipe), ("dp_replicate", data), ("tp", tensor)) if size > 1}
    microbatches = int(numbers["global batch"]) // (micro * data)
    plan = Plan(model, parameters, cluster, Mesh(sizes), microbatches, host=find_host("megatron"))
    group = f"gpt {width} x {layers}"
    return Run(source, name, group, plan, 1e6 * float(numbers["iteration time (ms)"]))


FOUNDRY = {"h100_80gb": "dgx-h100", "a100_80gb": "dgx-a100", "a100_40gb": "dgx-a100-40gb"}


def _foundry(source: str, name: str, row: dict) -> Run | None:
    if row["Precision"] not in ("amp_bf16", "bf16") or row["GPU"] not in FOUNDRY:
        return None  # FP8 is not simulated
    model, parameters = find_model(f"mpt-{row['Model']}")
    parameters |= {
        "length": int(row["SeqLen (T)"]),
        "microbatch": int(row["MicroBatchSize"]),
        "recompute": "full" if row["Activation Checkpointing"] == "True" else "none",
        "precision": row["Precision"],
    }
    ranks = int(row["# GPUs"])
    plan = Plan(
        model,
        parameters,
        load_cluster(FOUNDRY[row["GPU"]]),
        Mesh({"dp_shard": ranks}),
        int(row["GradAccum"]),
        host=find_host("llm-foundry"),
    )
    step_s = plan.sequences * parameters["length"] / (float(row["Throughput (T/s/GPU)"]) * ranks)
    return Run(source, name, f"mpt-{row['Model']}", plan, 1e9 * step_s)


def _titan(source: str, name: str, row: dict) -> Run | None:
    if row["compile"] != "no" or row["float8"] != "no" or row["cp"] != "1":
        return None
    size = row["model"].rpartition("-")[2]
    model, parameters = find_model(f"llama3-{size}")
    parameters |= {
        "length": int(row["sequence"]),
        "microbatch": int(row["local_batch"]),
        "recompute": row["recompute"] if row["recompute"] != "no" else "none",
    }
    sizes = {axis: int(row[axis]) for axis in ("pp", "dp_shard", "tp") if int(row[axis]) > 1}
    ranks = int(row["gpus"])
    plan = Plan(model, parameters, load_cluster("dgx-h100"), Mesh(sizes), 1, host=find_host("eager"))
    step_s = int(row["global_batch"]) * parameters["length"] / (float(row["tokens_per_s_per_gpu"]) * ranks)
    return Run(source, name, f"llama3-{size}", plan, 1e9 * step_s, float(row["memory_gib"]) * 2**30)


# Controls --------------------------------------------------------------------------------------------------------


def constant_mfu(runs: list[Run]) -> dict[int, float]:
    """Run number -> step time in ns by one MFU for each GPU and recomputation: the median over the other models'
    rows."""
    key = [(run.plan.cluster.name, run.plan.parameters["recompute"]) for run in runs]
    work = [run.plan.model.flops(run.plan.parameters) * run.plan.sequences / run.plan.mesh.ranks for run in runs]
    rate = [flops / run.step_ns for flops, run in zip(work, runs, strict=True)]
    found = {}
    for number, run in enumerate(runs):
        others = [rate[i] for i in range(len(runs)) if key[i] == key[number] and runs[i].group != run.group]
        if others:
            found[number] = work[number] / float(np.median(others))
    return found


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


def formula_ns(runs: list[Run], constants: np.ndarray) -> np.ndarray:
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


def fit_formula(runs: list[Run]) -> np.ndarray:
    """The ten constants that fit the step times of ``runs`` best (least squares of logarithms)."""
    from scipy.optimize import least_squares

    measured = np.log([run.step_ns for run in runs])

    def wrong(logs):
        return np.log(formula_ns(runs, np.exp(logs))) - measured

    return np.exp(least_squares(wrong, np.log(START), loss="soft_l1", f_scale=0.05).x)


def formula_left_out(runs: list[Run]) -> dict[int, float]:
    """Run number -> step time in ns by the formula, fitted to the rows of all other models."""
    found = {}
    for group in sorted({run.group for run in runs}):
        others = [run for run in runs if run.group != group]
        mine = [number for number, run in enumerate(runs) if run.group == group]
        if others:
            times = formula_ns([runs[number] for number in mine], fit_formula(others))
            found.update(zip(mine, times.tolist(), strict=True))
    return found


# The report ------------------------------------------------------------------------------------------------------

HEADER = ["set", "model", "rows", "mean %", "median %", "bias %", "Spearman", "control %", "control", "goal %", "met"]


def report_lines(predictions: list[Prediction]) -> list[list[str]]:
    """One line for each set and model, and one for each set: simulated errors beside those of the control."""
    lines = []
    for source in SETS:
        mine = [p for p in predictions if p.run.source == source]
        if not mine:
            continue
        runs = [p.run for p in mine]
        control, name = (
            (formula_left_out(runs), "formula") if source.startswith("vtrain") else (constant_mfu(runs), "MFU")
        )
        for group in [*sorted({run.group for run in runs}), ""]:
            rows = [n for n, run in enumerate(runs) if group in ("", run.group)]
            lines.append(_line(source, group, mine, rows, control, name))
    return lines


def _line(source: str, group: str, mine: list[Prediction], rows: list[int], control: dict[int, float], name: str):
    from scipy.stats import spearmanr

    errors = np.array([mine[n].error for n in rows])
    beside = [abs(control[n] / mine[n].run.step_ns - 1) for n in rows if n in control]
    order = (
        spearmanr([mine[n].step_ns for n in rows], [mine[n].run.step_ns for n in rows])[0] if len(rows) > 2 else np.nan
    )
    mean, goal = float(np.abs(errors).mean()), GOALS[source]
    return [
        source,
        group or "all",
        str(len(rows)),
        f"{mean:.1%}"[:-1],
        f"{np.median(np.abs(errors)):.1%}"[:-1],
        f"{errors.mean():+.1%}"[:-1],
        "" if np.isnan(order) else f"{order:.3f}",
        f"{np.mean(beside):.1%}"[:-1] if beside else "",
        name if beside else "",
        f"{goal:.0%}"[:-1],
        "yes" if mean <= goal else "**no**",
    ]
