"""One run of a planner: make the job, let the planner plan, simulate the plan, and note what happened as a row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from simdev.bench.plan_matrix import PlanRun, job_of
from simdev.bench.plan_rows import ANY_MESHES, ONE_MESH, PlanRow
from simdev.bench.provenance import Stopwatch, circumstances
from simdev.bench.stored import keep_machine
from simdev.bench.work import RunOutcome, Work, failure, one_line
from simdev.bench.workers import Limits, limit_process
from simdev.errors import BudgetExhausted, InvalidInput
from simdev.parallel.plan import PlanProgram
from simdev.planners import Evaluator, Job, PlanBudget, PlannerSpec, find_planner
from simdev.planners.bounds import job_bound_ns
from simdev.planners.stage_bounds import any_plan_bound_ns


@dataclass(frozen=True)
class JobInstance:
    """A job: what a run of a planner plans. ``n_ops`` is the number of layers, by which the time of runs is estimated;
    ``bound_ns`` holds for plans with one mesh for all stages."""

    model: str
    cluster: str
    batch: int
    framework: str
    choices: str
    n_ops: int
    bound_ns: int | None = None
    bound_method: str = ""

    @property
    def name(self) -> tuple[str, str, int, str, str]:
        """What :func:`job_of` takes."""
        return self.model, self.cluster, self.batch, self.framework, self.choices

    @property
    def problem(self) -> tuple[str, ...]:
        """The identity of the job in the journal."""
        return tuple(map(str, self.name))


def execute(run: PlanRun, instance: JobInstance, job: Job | None = None) -> RunOutcome:
    """Plan and simulate in this process, without limits. An exception of the planner becomes the row's status.

    ``job`` is the job of the run, if it is made already.
    """
    spec, params = find_planner(run.entry)
    blank, budget = blank_row(run, spec.version), None
    try:
        job = job or job_of(*run.instance)
        given, evaluator = repr(job), Evaluator(job)
        watch = Stopwatch()
        budget = PlanBudget(evaluator, evaluations=run.budget)  # its clock starts after that of the row
        choice = spec.plan(job, rng=np.random.default_rng(run.entropy), budget=budget, **params)
        seconds, processor = watch.read()
        if repr(job) != given:
            raise InvalidInput("the planner altered the job that it was given")
        row = replace(blank, plan=json.dumps(choice.to_json(), sort_keys=True), evaluations=budget.used)
        row = score_plan(row, evaluator, bound_ns=instance.bound_ns)
        row = replace(row, plan_seconds=seconds, cpu_seconds=processor)
        return RunOutcome(row, None, tuple(budget.curve))
    except BudgetExhausted as error:
        row = replace(blank, status="skipped", error=one_line(error))
    except (Exception, SystemExit, GeneratorExit) as error:
        row = failure(blank, error)
    return RunOutcome(replace(row, evaluations=budget.used if budget else None))


def blank_row(run: PlanRun, planner_version: int) -> PlanRow:
    """The row of a run before the run: an error without a message."""
    key = {name: getattr(run, name) for name in ("model", "cluster", "batch", "framework", "choices", "planner")}
    own = {name: getattr(run, name) for name in ("params", "budget", "seed")}
    return PlanRow(**key, **own, version=planner_version, status="error")


def score_plan(row: PlanRow, evaluator: Evaluator, engine: str = "fast", bound_ns: int | None = None) -> PlanRow:
    """The row with the figures of its plan. ``bound_ns`` is :func:`job_bound_ns` of the job, if it is known.

    A plan that does not fit has no figures: the row says why.
    """
    choice = row.choice
    outcome = evaluator.outcome(choice, engine=engine)
    if not outcome.fits:
        lacks = f"lacks {outcome.overflow_bytes} bytes of memory"
        message = lacks if outcome.overflow_bytes else "has too many ops to be simulated"
        figures = {"step_ns": None, "bound_ns": None, "peak_bytes": None, "program": ""}
        return replace(row, **figures, status="error", error=message)
    if choice.stage_meshes:
        bound_ns = bound_of(evaluator, any_plan_bound_ns)
    elif bound_ns is None:
        bound_ns = bound_of(evaluator, job_bound_ns)
    return replace(
        row,
        status="ok",
        error="",
        step_ns=outcome.step_ns,
        bound_ns=bound_ns,
        peak_bytes=max(outcome.peak_bytes),
        program=program_digest(evaluator.program(choice)),
    )


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
        others = (segment for _, segment in stage.others)
        for segment in (stage.forward, *stage.backward, *others, stage.finish):
            for call in segment.calls:
                text.update(repr((call, call.live_bytes)).encode())
        text.update(repr((stage.resident_bytes, stage.output_bytes)).encode())
    return text.hexdigest()[:16]


class Planning(Work):
    """Planners answer a job with a plan. Captured stages are kept on disk, so that runs in processes of their own share
    them."""

    name, run, instance = "planners", PlanRun, JobInstance

    def find(self, entry: str) -> tuple[PlannerSpec, dict]:
        return find_planner(entry)

    def load(self, name: tuple, out: str) -> JobInstance:
        job = job_of(*name)
        keep_machine(name[1], Path(out))
        return JobInstance(*name, n_ops=job.layers)

    def bound(self, instance: JobInstance, limits: Limits) -> tuple[int, str]:
        limit_process(limits)
        return job_bound_ns(Evaluator(job_of(*instance.name))), ONE_MESH

    def execute(self, run: PlanRun, instance: JobInstance) -> RunOutcome:
        return execute(run, instance)

    def blank(self, run: PlanRun, instance: JobInstance) -> PlanRow:
        return blank_row(run, find_planner(run.entry)[0].version)

    def holds(self, row: PlanRow, instance: JobInstance) -> bool:
        """Whether this version of the planner made the row, and the row has a bound or gets that of the job."""
        unbounded = row.bounded != ANY_MESHES and row.several_meshes
        return row.version == find_planner(row.entry)[0].version and not unbounded

    def rank(self, run: PlanRun, instance: JobInstance) -> tuple:
        """One cluster after another: jobs of a model need the same captures, which two processes would make twice."""
        *earlier, size = super().rank(run, instance)
        return *earlier, run.cluster, size

    def circumstances(self) -> dict[str, str]:
        try:
            torch = version("torch")
        except PackageNotFoundError:
            torch = ""
        return {**circumstances(), "torch": torch}


PLANNING = Planning()
