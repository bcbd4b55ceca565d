"""The cases of the fidelity report: predictions beside measurements, and the noise of the measurements.

A case is one measured figure that no fit used: a step of a profiled training run, a rank of an eight-GPU step, the time
of a link on unseen sizes, a peak of memory, or the time of a model predicted from op tables. :data:`GOALS` holds the
goals, and the report lists every case over its goal by name. :mod:`simdev.calibrate.manifest` fixes which files
fits may use.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from simdev import _cache
from simdev.calibrate.given_steps import left_out_ns
from simdev.calibrate.links import fit, fit_table, read_links
from simdev.calibrate.manifest import held_out, load_manifest, role_of
from simdev.calibrate.replay import Replay, as_one_step, replay, replay_ranks
from simdev.calibrate.traces import Trace, read_traces
from simdev.errors import InvalidInput
from simdev.problem.opcost.device import load_calibration
from simdev.studies.fidelity import resnet50
from simdev.studies.fidelity.kept import Kept
from simdev.studies.fidelity.memory import graph_peak, replay_memory

NOISE_LIMIT = 0.05  # a case whose measurement is noisier is listed, but left out of the means
BOOTSTRAP = 2000
# by goal: (description, limit of the mean error, limit of the error of one case); None: no limit
GOALS = {
    "F1": ("replayed single-GPU steps, host times of the other steps", 0.02, 0.05),
    "F2": ("eight ranks of one step, replayed together", 0.04, None),
    "F3": ("whole models on a known device, from op tables of other models", 0.05, None),
    "F4": ("a device held out", 0.08, None),
    "F5 gemm": ("matrix products of held-out shapes", 0.06, None),
    "F5 conv": ("convolutions of held-out shapes", 0.12, None),
    "F5 other": ("elementwise and reductions of held-out shapes", 0.03, None),
    "F5 bf16": ("16-bit products with sides of 1,024 and more, on sources that were not fitted to", 0.06, None),
    "F6": ("links on unseen sizes", 0.03, None),
    "F7 bf16": ("MPT on one node, by the factor of whole steps of the kind's other steps (llm-foundry)", 0.06, None),
    "F7 unseen": ("whole bf16 training steps on a board of which no step was given", 0.08, None),
    "F8 one node": ("GPT on one node, host times of the other models (vTrain)", 0.04, None),
    "F8 many nodes": ("GPT on many nodes (vTrain)", 0.10, None),
    "F8 FSDP": ("MPT on 8 to 512 boards (llm-foundry)", 0.08, None),
    "F8 torchtitan": ("Llama 3 on H100 (torchtitan)", 0.08, None),
    "F8 FP8": ("Llama 2, GPT-3 and Nemotron on H100 in FP8 (NeMo)", 0.08, None),
    "F8 published": ("published plans of papers and reports, those that can be typed", 0.08, None),
    "F8 host": ("GPT with one sequence in a microbatch: steps that the host limits (vTrain)", 0.10, None),
    "F9 replay": ("peak memory from replayed allocations", 0.02, None),
    "F9 graph": ("peak memory from the graph", 0.05, None),
    "F9 reserved": ("memory that a rank of a training job reserves, from its recorded allocations", 0.08, None),
}
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """One row of the report.

    ``goal`` is a key of :data:`GOALS`, or empty for an informative row. ``measured``, ``predicted`` and the three
    baselines are in ``unit``; a baseline that does not apply is NaN. The baselines are the sum of the ops, the
    datasheet's roofline, and the work without a host. The shares are parts of the predicted time by source; ``table``
    is the measured part. ``mean_error`` replaces the error if it is a mean over many points. ``left_out`` is the reason
    why a case does not count.
    """

    goal: str
    group: str
    case: str
    role: str
    unit: str
    noise: float
    measured: float
    predicted: float
    table: float = NAN
    fit: float = NAN
    fallback: float = NAN
    sum_of_ops: float = NAN
    roofline: float = NAN
    no_host: float = NAN
    mean_error: float = NAN
    left_out: str = ""

    @property
    def error(self) -> float:
        """The relative error; signed for a single figure."""
        return self.predicted / self.measured - 1 if np.isnan(self.mean_error) else self.mean_error

    @property
    def over(self) -> bool:
        """Whether the error is over the limit of one case or, without such a limit, over the limit of the mean."""
        if not self.goal or self.left_out:
            return False
        _, mean, worst = GOALS[self.goal]
        return abs(self.error) > (worst or mean)


def all_cases(
    data: Path,
    cache: Path | None = None,
    tell: Callable[[int, int, str], None] = lambda *_: None,
    jobs: int = 1,
) -> tuple[list[Case], list[str]]:
    """The cases of all measured files under ``data``, and one sentence for each file that could not be used.

    ``tell`` is called with the number of parts done, the number of all, and what comes next. ``cache`` is a folder in
    which the cases of a part are kept: they are computed again only if its files or simdev itself have changed.
    ``jobs`` parts are computed at the same time, each in a process of its own if there are several. Raises
    :class:`InvalidInput` if there is no folder ``data``.
    """
    if not data.is_dir():
        raise InvalidInput("no such folder: the report needs the public measured data", source=data)
    parts = _parts(data)
    cases: list[Case] = []
    notes: list[str] = []
    with _Workers(jobs) as workers:
        answers = [workers.submit(_part_cases, cache, part) for part in parts]
        for number, (part, answer) in enumerate(zip(parts, answers, strict=True)):
            tell(number, len(parts), part.title)
            found, said = answer()
            cases += found
            notes += said
    return cases, notes


# What the cases of a part can depend on beside this file; other files of simdev cannot change them.
BASE = ("errors.py", "files.py", "problem", "graphs", "sim", "calibrate", "studies/fidelity")
MEASURED = (*BASE, "measure")
PLANS = (*BASE, "parallel", "studies/training_runs.py")


@dataclass(frozen=True)
class _Part:
    """A part of the report: ``make(notes)`` gives its cases, which depend on ``files`` and on the ``sources`` of
    simdev."""

    name: str
    title: str
    files: tuple[Path, ...]
    sources: tuple[str, ...]
    make: Callable[[list[str]], list[Case]]


def _parts(data: Path) -> list[_Part]:
    """The parts, those that take longest first."""
    manifest, parts = load_manifest(), []
    files = sorted(path for path in data.rglob("*") if path.is_file())
    ends = (".csv", ".csv.gz", ".xlsx", ".out", ".parquet", ".json")
    tables = tuple(path for path in files if path.name.endswith(ends))
    runs = tuple(path for path in tables if path.parent.name == "training-runs")
    for source, goal in TRAINING.items() if runs else ():
        for number in range(WORKERS_OF_A_SET.get(source, 1)):
            name = f"training runs {source}" + (f", part {number + 1}" if source in WORKERS_OF_A_SET else "")
            parts.append(_Part(name, name, runs, PLANS, partial(_training_cases, data, source, goal, number)))
    parts.append(_Part("op tables", "op tables", tables, MEASURED, partial(_op_cases, data)))
    parts.append(_Part("matrix units", "matrix units", tables, MEASURED, partial(_matrix_cases, data)))
    for path in files:
        kind = _kind(path, data)
        if kind is not None:
            name, role = path.relative_to(data).as_posix(), role_of(path, data, manifest)
            make = partial(_file_cases, path, kind, name, role)
            parts.append(_Part(f"{name} {role}", name, (path,), MEASURED, make))
    return parts


def _part_cases(cache: Path | None, part: _Part) -> tuple[list[Case], list[str]]:
    notes: list[str] = []
    return Kept(cache, Case, part.sources).cases(part.name, part.files, part.make, notes), notes


class _Workers:
    """``jobs`` processes; none for one job, which runs when its answer is asked for."""

    def __init__(self, jobs: int):
        self.pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) if jobs > 1 else None

    def submit(self, function: Callable, *arguments) -> Callable:
        return self.pool.submit(function, *arguments).result if self.pool else partial(function, *arguments)

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_) -> None:
        if self.pool:
            self.pool.shutdown(cancel_futures=True)


TRAINING = {
    "vtrain-single": "F8 one node",
    "llm-foundry": "F8 FSDP",
    "vtrain-multi": "F8 many nodes",
    "megatron-bridge": "F8 FP8",
    "torchtitan": "F8 torchtitan",
    "published-plans": "F8 published",
}
WORKERS_OF_A_SET = {"vtrain-single": 3}  # a part each, of every third configuration
ROWS_OF_A_SET = {"llm-foundry": 24}  # judged here, spread over models and sizes; of the other sets, all rows


def _training_cases(data: Path, source: str, goal: str, number: int, notes: list[str]) -> list[Case]:
    """A set of public training runs, or the part ``number`` of it: step times, and the memory of runs that report
    it."""
    from simdev.studies import training_runs as study

    try:
        runs, refused = study.read_runs(data, source)
    except InvalidInput as error:
        notes += [f"{source}: {error.message}"] if not number else []
        return []
    notes += study.notes([source]) if not number else []
    if importlib.util.find_spec("torch") is not None:
        importlib.import_module("torch._dynamo")
        gc.freeze()  # each capture collects garbage: what is imported by now is none
    cases = _factor_cases(runs, notes) if source == "llm-foundry" else []
    runs = study.spread(runs, ROWS_OF_A_SET.get(source, len(runs)))
    mine = study.share(runs, number, WORKERS_OF_A_SET.get(source, 1))
    predictions, more = study.predict_all(mine)
    notes += [*(refused if not number else []), *more]
    role = "calibrate" if study.FITTED[source][0] == study.HERE else "validate"
    for p in predictions:
        name = f"{source} {p.run.name} {p.run.plan.mesh}"
        times = 1e-6 * p.run.step_ns, 1e-6 * p.step_ns
        cases.append(Case(goal, p.run.group, name, role, "ms", NAN, *times))
        if source == "vtrain-single" and p.run.plan.parameters["microbatch"] == 1:
            cases.append(Case("F8 host", p.run.group, name, role, "ms", NAN, *times))
        if source == "torchtitan":  # no step of its board was given, and it has no device file of its own
            cases.append(Case("F7 unseen", p.run.plan.cluster.kind.name, name, role, "ms", NAN, *times))
        if p.run.peak_bytes:
            sizes = p.run.peak_bytes / 2**20, p.peak_bytes / 2**20
            cases.append(Case("F9 reserved", p.run.group, name, role, "MiB", NAN, *sizes))
    return cases


def _factor_cases(runs: list, notes: list[str]) -> list[Case]:
    """F7: each step on one node, by the factor of whole steps of the kind's other steps, and without a factor. A note
    says what the odd rows, to which device files are fitted, ask for."""
    from simdev.studies.training_runs import asked_step

    single = [run for run in runs if run.plan.mesh.ranks == run.plan.cluster.gpus]
    kinds: dict[str, list] = {}
    for run in single:
        kinds.setdefault(run.plan.cluster.kind.name, []).append((run, asked_step(run)))
    cases = []
    for name, found in kinds.items():
        steps = [step for _, step in found]
        for (run, step), others in zip(found, left_out_ns(steps), strict=True):
            label = f"{run.name} {run.typed.model}"
            for goal, group, ns in (("F7 bf16", name, others), ("", f"F7 without a factor, {name}", step.alone_ns)):
                cases.append(Case(goal, group, label, "validate", "ms", NAN, step.step_ns / 1e6, ns / 1e6))
    files: dict[str, list[float]] = {}
    for run, step in (pair for found in kinds.values() for pair in found):
        if int(run.name.split()[1]) % 2:
            files.setdefault(run.plan.cluster.kind.calibrated, []).append(step.factor)
    for file, factors in files.items():
        has = load_calibration(file).steps["bf16"]
        notes.append(
            f"whole bf16 steps, {file}: {len(factors)} rows of llm-foundry with odd numbers ask for a factor of "
            f"{np.median(factors):.3f}; the device file has {has:g}"
        )
    return cases


def _file_cases(path: Path, kind: str, name: str, role: str, notes: list[str]) -> list[Case]:
    try:
        return link_cases(path, name, role) if kind == "links" else trace_cases(read_traces(path), name, role, notes)
    except InvalidInput as error:
        notes.append(f"{name}: {error.message}")
        return []


def _matrix_cases(data: Path, notes: list[str]) -> list[Case]:
    """The cases of kernels on matrix units, by sources that no fit used."""
    try:
        from simdev.studies.fidelity.kernels import kernel_cases
        from simdev.studies.fidelity.triosim import convolution_cases
    except ImportError:
        return []
    return [_op_case(row) for row in (*kernel_cases(data, notes), *convolution_cases(data))]


def _kind(path: Path, data: Path) -> str | None:
    folders = path.relative_to(data).parts[:-1]
    if "LICENSE" in path.name.upper() or re.search(r"_(pytorch_)?et\b", path.name):
        return None
    if "links" in folders or "send_recv" in path.name:
        return "links"
    is_json = re.search(r"\.(json|json\.gz|tar\.gz|tgz)$", path.name)
    known = {"kineto", "hta", "param", "traces", "tracelens", "triosim"} & set(folders)
    return "trace" if is_json and (known or "trace" in path.name) else None


def _op_cases(data: Path, notes: list[str]) -> list[Case]:
    """The cases of measured op tables; none if their packages are not installed."""
    try:
        from simdev.studies.fidelity.tables import op_cases
    except ImportError:
        notes.append("cases of op tables (F3, F4, F5): not available")
        return []
    found: list[str] = []
    cases = [_op_case(dict(row)) for row in op_cases(data, found)]
    notes += [note.replace(f"{data}{os.sep}", "").replace(str(data), "data") for note in found]
    return cases


def _op_case(row: dict) -> Case:
    """A case from a row of :mod:`simdev.studies.fidelity.tables`. Its ``group`` begins with the goal (``F5 gemm,
    v100``). Times in s are converted to ms."""
    goal = max((goal for goal in GOALS if row["group"].startswith(goal)), key=len, default="")
    table, fit, fallback = (float(row.get(f"{key}_share", NAN)) for key in ("table", "fit", "fallback"))
    sum_of_ops, roofline, no_host = (
        1e3 * float(row.get(f"{key}_s", NAN)) for key in ("sum_of_ops", "roofline", "no_host")
    )
    measured, predicted = (1e3 * float(row[f"{key}_s"]) for key in ("measured", "predicted"))
    group = row["group"][len(goal) :].strip(" ,:") or "all"
    return Case(
        goal=goal,
        group=group,
        case=row["case"],
        role=row.get("role", "validate"),
        unit="ms",
        noise=float(row.get("noise", NAN)),
        measured=measured,
        predicted=predicted,
        table=table,
        fit=fit,
        fallback=fallback,
        sum_of_ops=sum_of_ops,
        roofline=roofline,
        no_host=no_host,
        mean_error=float(row.get("mean_error", NAN)),
        left_out=row.get("left_out", ""),
    )


# Traces ---------------------------------------------------------------------------------------------------------------


def trace_cases(traces: list[Trace], name: str, role: str, notes: list[str]) -> list[Case]:
    """F1 for a trace, F2 for the ranks of one run, and F9 if the totals of the allocator are recorded."""
    for trace in traces:
        for what, count in trace.problems.items():
            notes.append(f"{name} ({trace.name}): {count} x {what}")
    cases = []
    try:
        cases += rank_cases(traces, name, role) if len(traces) > 1 else step_cases(traces[0], name, role)
    except InvalidInput as error:
        notes.append(f"{name}: {error.message}")
        for trace in traces if len(traces) > 1 else ():
            cases += step_cases(trace, f"{name} {trace.name}", role)
    for trace in traces:
        cases += memory_cases(trace, name, role)
    return cases


def step_cases(trace: Trace, name: str, role: str) -> list[Case]:
    """F1: the median step of a trace with several steps, and an informative row for each step. A trace without several
    steps is replayed as a whole with its own host times, which proves less."""
    if len(trace.steps) < 2:
        group = "one step, its own host times" if trace.steps else "a trace without steps, its own host times"
        result = replay(trace if trace.steps else as_one_step(trace), leave_one_out=False)
        return [_replayed("F1" if trace.steps else "", group, name, role, result, NAN, _unfit(role, trace))]
    result = replay(trace)
    left_out = f"noise {100 * result.noise:.1f} % is above {100 * NOISE_LIMIT:.0f} %"
    left_out = _unfit(role, trace) or (left_out if result.noise > NOISE_LIMIT else "")
    cases = [_replayed("F1", "median step of a trace", name, role, result, result.noise, left_out)]
    for step in range(len(result.measured_ns)):
        label, group = f"{name} step {step}", "each step of a trace"
        cases.append(_replayed("", group, label, role, result, result.noise, left_out, slice(step, step + 1)))
    return cases


def rank_cases(traces: list[Trace], name: str, role: str) -> list[Case]:
    """F2: replay the ranks with their own host times and with those of the other ranks; the median of several steps."""
    cases = []
    for group, leave_one_out in (("own host times", False), ("host times of the other ranks", True)):
        for trace, result in zip(traces, replay_ranks(traces, leave_one_out), strict=True):
            spread = result.noise if len(trace.steps) > 1 else NAN
            cases.append(_replayed("F2", group, f"{name} rank {trace.rank}", role, result, spread, _unfit(role, trace)))
    return cases


def _unfit(role: str, trace: Trace) -> str:
    return "listed as calibrate" if role == "calibrate" else "the file is cut off" if trace.cut else ""


def _replayed(
    goal: str, group: str, label: str, role: str, result: Replay, spread: float, left_out: str, steps=slice(None)
) -> Case:
    """The median of ``steps`` of a replay."""
    values = (result.measured_ns, result.predicted_ns, result.sum_ns, result.no_host_ns)
    measured, predicted, total, no_host = (float(np.median(value[steps])) / 1e6 for value in values)
    return Case(
        goal,
        group,
        label,
        role,
        "ms",
        spread,
        measured,
        predicted,
        1.0,
        0.0,
        0.0,
        total,
        NAN,
        no_host,
        left_out=left_out,
    )


def memory_cases(trace: Trace, name: str, role: str) -> list[Case]:
    """F9: compare the replayed peak with the allocator's own peak. For a trace of ResNet-50 at batch 32, also compare
    the peak of its captured graph, without the bytes that were allocated before the trace begins."""
    cases = []
    known = any(detail.startswith(resnet50.FIRST_CONVOLUTION) for detail in trace.details)
    for peak in replay_memory(trace):
        label = f"{name} GPU {peak.device}"
        if peak.measured_bytes > 0:
            measured, predicted = peak.measured_bytes / 2**20, peak.predicted_bytes / 2**20
            cases.append(
                Case(
                    "F9 replay",
                    "peak of allocations",
                    label,
                    role,
                    "MiB",
                    0.0,
                    measured,
                    predicted,
                    left_out=_unfit("", trace),
                )
            )
        elif known and not peak.unknown and "resnet50" in name:
            measured, predicted = peak.predicted_bytes / 2**20, graph_peak(resnet50.load()) / 2**20
            group = "ResNet-50, batch 32"
            cases.append(
                Case("F9 graph", group, label, role, "MiB", 0.0, measured, predicted, left_out=_unfit(role, trace))
            )
    return cases


# Links ----------------------------------------------------------------------------------------------------------------


def link_cases(path: Path, name: str, role: str) -> list[Case]:
    """F6: the mean error over the held-out sizes of each table. ``measured`` and ``predicted`` are means over these
    sizes.

    The roofline column holds the baseline of one latency and one bandwidth for all sizes.
    """
    cases = []
    for table in read_links(path):
        judged = np.array([held_out(f"{size} bytes") for size in table.bytes.tolist()])
        if not judged.any():
            continue
        link = fit_table(table)
        one = fit(table.bytes[~judged], table.ns[~judged], 1)
        line = one[0][1] + table.bytes[judged] * 1e9 / one[0][2]
        left_out = f"noise {100 * table.noise:.1f} %" if table.noise > NOISE_LIMIT else ""
        cases.append(
            Case(
                "F6",
                f"{table.operation}",
                f"{name} {table.name}",
                role,
                "us",
                table.noise,
                float(table.ns[judged].mean()) / 1e3,
                float(link.ns(table.bytes[judged]).mean()) / 1e3,
                0.0,
                1.0,
                0.0,
                roofline=float(line.mean()) / 1e3,
                mean_error=link.error,
                left_out=left_out,
            )
        )
    return cases


# Groups -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """The mean absolute error of the counted cases of a group with a bootstrap 95 % interval, the worst error, and the
    mean absolute error of each baseline (NaN if it does not apply)."""

    goal: str
    group: str
    cases: int
    left_out: int
    error: float
    low: float
    high: float
    worst: float
    limit: float
    met: str
    sum_of_ops: float
    roofline: float
    no_host: float


def groups(cases: list[Case]) -> list[Group]:
    """Group the cases by goal and group, in the order of :data:`GOALS`; rows without a goal come last."""
    order = [*GOALS, ""]
    keys = sorted({(order.index(case.goal), case.group) for case in cases})
    return [
        _group(order[number], group, [case for case in cases if (case.goal, case.group) == (order[number], group)])
        for number, group in keys
    ]


def _group(goal: str, group: str, cases: list[Case]) -> Group:
    counted = [case for case in cases if not case.left_out]
    errors = np.abs([case.error for case in counted])
    low, high = bootstrap(errors)
    mean = float(errors.mean()) if len(errors) else NAN
    worst = float(errors.max()) if len(errors) else NAN
    limit, one = GOALS[goal][1:] if goal else (NAN, None)
    met = ""
    if goal and len(errors):
        met = "yes" if mean <= limit and (one is None or worst <= one) else "no"
        if met == "yes" and all(case.role == "calibrate" for case in counted):
            met = "not tried"  # its constants were fitted to these rows
    base = {key: _baseline(counted, key) for key in ("sum_of_ops", "roofline", "no_host")}
    return Group(goal, group, len(counted), len(cases) - len(counted), mean, low, high, worst, limit, met, **base)


def _baseline(cases: list[Case], key: str) -> float:
    errors = [abs(getattr(case, key) / case.measured - 1) for case in cases if not np.isnan(getattr(case, key))]
    return float(np.mean(errors)) if errors else NAN


def bootstrap(errors: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the mean of ``errors`` ``(n,)``, by resampling; NaN for fewer than two."""
    if len(errors) < 2:
        return NAN, NAN
    rows = np.random.default_rng(seed).integers(len(errors), size=(BOOTSTRAP, len(errors)))
    low, high = np.percentile(np.asarray(errors)[rows].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def cache_folder() -> Path:
    """The default folder of the kept cases: ``simdev/fidelity`` in the user's cache."""
    return _cache.user_folder() / "fidelity"


def data_folder(given: Path | None) -> Path:
    """The folder that the user named, or else that in the environment variable ``SIMDEV_DATA``."""
    folder = given or os.environ.get("SIMDEV_DATA")
    if not folder:
        raise InvalidInput("name the folder of public measured data with --data, or in SIMDEV_DATA")
    return Path(folder)
