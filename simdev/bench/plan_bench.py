"""Runs planners on training jobs, writes their rows, and verifies them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import TimeoutError
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from simdev.bench import provenance, workers
from simdev.bench.plan_rows import (
    COLUMNS,
    FILE,
    PlanRow,
    cells,
    digest,
    read_plan_rows,
    write_plan_rows,
)
from simdev.bench.rows import read_csv
from simdev.bench.run import one_line
from simdev.bench.workers import Limits
from simdev.errors import BudgetExhausted, InvalidInput, SimdevError, UnknownName, Unsupported, shortened
from simdev.files import parse_json
from simdev.parallel import find_model, load_cluster
from simdev.parallel.framework import find_framework, framework_names
from simdev.parallel.plan import PlanProgram
from simdev.planners import Evaluator, Job, PlanBudget, find_planner
from simdev.planners.bounds import job_bound_ns
from simdev.planners.stage_bounds import any_plan_bound_ns
from simdev.problem.topology import split_nodes, topology_names

# Models and clusters of the board, with the sequences of a step and the microbatch sizes that planners may choose.
A100, A100S, H100S, MANY, L40S = (
    "dgx-a100", "dgx-a100[nodes=8]", "dgx-h100[nodes=8]", "dgx-h100[nodes=64]", "l40sx8-pcie"
)  # fmt: skip
BOARD = (
    ("llama3-70b", (H100S, A100S, MANY), 1024, (1,)),
    ("mpt-7b", (A100, A100S, H100S, L40S), 1024, (1, 4)),
    ("mpt-70b", (A100S, H100S, MANY), 1024, (1, 2)),
    ("gpt-1.3b", (A100, A100S, H100S, L40S), 512, (1, 4)),
    ("llama3-8b", (A100, A100S, H100S, L40S), 512, (1, 2)),
    ("bert-large", (A100, A100S, H100S, L40S), 4096, (8, 32)),
    ("vit-22b", (A100S, H100S, MANY), 4096, (4, 16)),
    ("mixtral-8x7b", (A100S, H100S, MANY), 1024, (1,)),
    ("deepseek-v2lite", (A100, A100S, H100S), 1024, (1,)),
    ("llama3-405b", (MANY,), 1024, (1,)),
)
LIMITS = Limits(seconds=1800, memory_bytes=16 << 30)  # of the check of one row, which may capture a model
_EVALUATORS: dict[Task, Evaluator] = {}  # of this process, which checks rows
RECOMPUTES = ("none", "selective", "full")


def choices_of(model: str) -> str:
    """The JSON of what planners may choose for a model: the board's own sizes, or microbatches of 1 and 2."""
    sizes = next((sizes for name, _, _, sizes in BOARD if name == model), (1, 2))
    return json.dumps({"microbatches": sizes, "recomputes": RECOMPUTES})


@dataclass(frozen=True)
class Task:
    """What the board is made of: models on clusters with a batch, and for each of them all planners."""

    model: str
    cluster: str
    batch: int
    framework: str = "eager"
    choices: str = ""

    def __post_init__(self):
        object.__setattr__(self, "choices", self.choices or choices_of(self.model))

    def job(self) -> Job:
        """The job. Raises :class:`InvalidInput` for a name or number that does not exist."""
        model, parameters = find_model(self.model)
        choices = parse_json(self.choices, FILE, "choices")
        if not isinstance(choices, dict) or set(choices) != {"microbatches", "recomputes"}:
            raise InvalidInput("expected an object with microbatches and recomputes", source=FILE, field="choices")
        return Job(
            model,
            find_framework(self.framework).parameters_of(model.name, parameters, self.model),
            load_cluster(self.cluster),
            self.batch,
            framework=self.framework,
            microbatches=tuple(choices["microbatches"]),
            recomputes=tuple(choices["recomputes"]),
            name=f"{self.model} on {self.cluster}",
        )


def bench_plans(
    tasks: Iterable[Task],
    planners: Iterable[str],
    folder: Path,
    *,
    evaluations: int = 60,
    seeds: int = 1,
    workers: int = 1,
    tell: Callable[[str], None] = lambda _: None,
) -> list[PlanRow]:
    """Run each planner on each task and write the rows to ``folder``; rows that are there are kept, unless an older
    version of the planner made them. A kept row without a bound gets one.

    Each finished row is written at once. A planner that cannot handle a job gives a row that says why.
    """
    tasks, planners = list(tasks), list(planners)
    found = {row.key: row for row in read_plan_rows(folder)} if (folder / FILE).is_file() else {}
    total, done = len(tasks) * len(planners) * seeds, 0
    for task in tasks:
        with Evaluator(task.job(), workers) as evaluator:
            for entry in planners:
                for seed in range(seeds):
                    row = _empty(task, entry, evaluations, seed)
                    done += 1
                    kept = found.get(row.key)
                    old = kept is None or kept.version < row.version
                    if old or (kept.step_ns and not kept.bound_ns):
                        found[row.key] = row = run_planner(row, evaluator) if old else scored_again(kept, evaluator)
                        write_plan_rows(folder, found.values())
                        figure = f"{row.step_ns / 1e9:.3f} s, {row.choice}" if row.step_ns else row.error
                        tell(f"[{done}/{total}] {row.title}: {figure}")
    return sorted(found.values(), key=lambda row: row.key)


def _empty(task: Task, entry: str, evaluations: int, seed: int) -> PlanRow:
    spec, params = find_planner(entry)
    name = entry.partition("[")[0].partition("@")[0]
    return PlanRow(
        task.model,
        task.cluster,
        task.batch,
        task.framework,
        task.choices,
        name,
        spec.version,
        json.dumps(params, sort_keys=True),
        evaluations,
        seed,
        "error",
    )


def run_planner(row: PlanRow, evaluator: Evaluator) -> PlanRow:
    """The row of a run: the planner's choice, simulated and bounded."""
    spec, params = find_planner(row.planner)
    entropy = int.from_bytes(hashlib.sha256(json.dumps(row.key).encode()).digest()[:8], "big")
    budget = PlanBudget(evaluator, evaluations=row.budget)
    begin = time.monotonic()
    around = _circumstances()
    try:
        rng = np.random.default_rng(entropy)
        choice = spec.plan(evaluator.job, rng=rng, budget=budget, **json.loads(row.params) | params)
    except (Unsupported, BudgetExhausted) as error:
        return replace(row, status="skipped", error=one_line(error), evaluations=budget.used, **around)
    except SimdevError as error:
        return replace(row, status="error", error=one_line(error), evaluations=budget.used, **around)
    spent = round(time.monotonic() - begin, 3)
    row = replace(row, plan=json.dumps(choice.to_json(), sort_keys=True), evaluations=budget.used)
    return replace(score_plan(row, evaluator), plan_seconds=spent, **around)


def score_plan(row: PlanRow, evaluator: Evaluator, engine: str = "fast") -> PlanRow:
    """The row with the figures of its plan."""
    outcome = evaluator.outcome(row.choice, engine=engine)
    if not outcome.fits:
        lacks = f"lacks {outcome.overflow_bytes} bytes of memory"
        message = lacks if outcome.overflow_bytes else "has too many ops to be simulated"
        return replace(row, status="error", error=message, peak_bytes=max(outcome.peak_bytes))
    return replace(
        row,
        status="ok",
        error="",
        step_ns=outcome.step_ns,
        bound_ns=bound_of(evaluator, any_plan_bound_ns if row.choice.stage_meshes else job_bound_ns),
        peak_bytes=max(outcome.peak_bytes),
        program=program_digest(evaluator.program(row.choice)),
    )


def scored_again(row: PlanRow, evaluator: Evaluator) -> PlanRow:
    """The row with the figures of its plan by this version of the code."""
    return replace(score_plan(row, evaluator), **_circumstances())


def bound_of(evaluator: Evaluator, bound_ns: Callable[[Evaluator], int]) -> int:
    """``bound_ns`` of the evaluator, remembered."""
    key = "bound", bound_ns.__name__
    if key not in evaluator.known:
        evaluator.known[key] = bound_ns(evaluator)
    return evaluator.known[key]


def program_digest(program: PlanProgram) -> str:
    """SHA-256 (hex, 16 characters) of all calls of the captured stages."""
    text = hashlib.sha256()
    for stage in program.stages:
        for segment in (stage.forward, *stage.backward, stage.finish):
            for call in segment.calls:
                text.update(repr((call, call.live_bytes)).encode())
        text.update(repr((stage.resident_bytes, stage.output_bytes)).encode())
    return text.hexdigest()[:16]


def verify_plans(
    folder: Path,
    *,
    engine: str = "reference",
    sample: int | None = None,
    on_row: Callable[[int, int, str, list[str]], None] = lambda *_: None,
) -> list[str]:
    """Simulate the stored plan of every row again and recompute its bound; a sentence for each cell that differs.

    No planner is run, and models from files of the user are refused: no code that a row names is executed.
    """
    rows = read_plan_rows(folder, check_digest=False)
    text = {row.key: line for row, line in zip(rows, _digests(folder), strict=True)}
    chosen = rows if sample is None else [rows[int(n)] for n in np.linspace(0, len(rows) - 1, min(sample, len(rows)))]
    differences = []
    pool = workers.worker_pool(1, tasks=len(chosen) or 1)  # rows of one job share its captures
    with workers.environment(), workers.running(pool):
        futures = [pool.schedule(_checked, (row, engine), timeout=LIMITS.seconds) for row in chosen]
        for number, (row, future) in enumerate(zip(chosen, futures, strict=True), 1):
            title = shortened(row.title, 300)
            wrong = [] if text[row.key] else [f"{title}: the digest does not fit the row"]
            try:
                wrong += future.result()
            except TimeoutError:
                wrong.append(f"{title}: no answer within {LIMITS.seconds:g} s")
            except MemoryError:
                wrong.append(f"{title}: needs more than {LIMITS.memory_bytes / 2**30:g} GiB")
            except Exception as error:
                kind = "" if isinstance(error, SimdevError) else f"{type(error).__name__}: "
                wrong.append(f"{title}: {kind}{one_line(error)}")
            differences += wrong
            on_row(number, len(chosen), title, wrong)
    return differences


def _checked(row: PlanRow, engine: str) -> list[str]:
    workers.limit_process(Limits(float("inf"), LIMITS.memory_bytes))
    return _differences(row, _EVALUATORS, engine)


def _differences(row: PlanRow, evaluators: dict[Task, Evaluator], engine: str) -> list[str]:
    if ".py" in row.model or ".py" in row.planner:
        raise Unsupported("a model or planner of the user's own file is not executed")
    if split_nodes(row.cluster)[0] not in topology_names():
        raise UnknownName("cluster", row.cluster, topology_names())  # a path is not opened
    if row.framework.partition("[")[0] not in framework_names():
        raise UnknownName("framework", row.framework, framework_names())
    spec, _ = find_planner(row.planner)
    if not row.plan:
        return []
    if spec.version < row.version:  # an older planner's plan still counts
        raise Unsupported(f"made by version {row.version} of the planner; this is version {spec.version}")
    task = Task(row.model, row.cluster, row.batch, row.framework, row.choices)
    if task not in evaluators:
        evaluators[task] = Evaluator(task.job())
    stored, found = cells(row), cells(score_plan(row, evaluators[task], engine))
    names = [column for column in stored if stored[column] != found[column]]
    title = shortened(row.title, 300)
    return [
        f"{title}: {name}: {shortened(stored[name], 60) or 'empty'}, recomputed {shortened(found[name], 60) or 'empty'}"
        for name in names
    ]


def _digests(folder: Path) -> list[bool]:
    """Whether the digest of each row of ``plans.csv`` fits."""
    return [digest(line) == line["digest"] for _, line in read_csv(folder / FILE, COLUMNS)]


def _circumstances() -> dict[str, str]:
    return {"torch": _torch(), "commit": provenance.commit(), "utc": provenance.circumstances()["utc"]}


def _torch() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
