"""Verification of a planner's row: its plan is simulated again, its bound is recomputed, and all cells are compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from simdev.bench.check import Check, Difference, compare
from simdev.bench.plan_matrix import PlanRun, job_of
from simdev.bench.plan_rows import EXACT, FIGURES, PlanRow
from simdev.bench.plan_run import JobInstance, execute, score_plan
from simdev.bench.stored import kept_machine
from simdev.errors import UnknownName, Unsupported, shortened
from simdev.parallel.framework import framework_names
from simdev.parallel.plan import PlanReport
from simdev.planners import Evaluator, Job, PlannerSpec, find_planner, planners
from simdev.problem.topology import split_choices, topology_names

_EVALUATORS: dict[tuple, Evaluator] = {}  # of this process: of the job that it checked last


def check_plan(folder: Path, row: PlanRow, check: Check) -> tuple[list[Difference], str]:
    """The differences of one row, and the reason if a requested rerun was skipped.

    Only planners and models that are registered or named by ``check`` are run, and no file outside ``folder`` is read.
    """
    wrong = impossible(row)
    if wrong:
        return wrong, ""
    spec = _spec(row, check)
    if spec is not None and spec.version < row.version:  # an older planner's plan still counts
        raise Unsupported(f"made by version {row.version} of the planner; this is version {spec.version}")
    evaluator = _evaluator(folder, row, check)
    fresh = score_plan(row, evaluator, check.engine) if row.plan else row
    fresh = replace(fresh, plan=_as_written(row))
    if fresh.step_ns is not None and fresh.bound_ns is not None and fresh.step_ns < fresh.bound_ns:
        return [Difference(title(row), "", "", "its step time is below the lower bound of the job")], ""
    skipped = _why_not_again(row, spec) if check.rerun else ""
    if check.rerun and not skipped:
        instance = JobInstance(row.model, row.cluster, row.batch, row.framework, row.choices, n_ops=1)
        fresh = execute(PlanRun(*row.key), instance, evaluator.job).row
    return compare(title(row), row.cells(), fresh.cells(), EXACT), skipped


def _as_written(row: PlanRow) -> str:
    """The plan of a row as a bench writes it: without members that mean nothing, in the usual order."""
    if not row.plan:
        return ""
    whole, given = row.choice.to_json(), json.loads(row.plan)
    return json.dumps({name: whole[name] for name in given if name in whole}, sort_keys=True)


def report_of(folder: Path, row: PlanRow) -> PlanReport:
    """The simulation of a row's plan. No code that the row names is executed. Raises :class:`InvalidInput` or
    :class:`Unsupported` for a row whose job or plan is not known here."""
    return _evaluator(folder, row, Check("fast", False, frozenset(), True)).report(row.choice)


def impossible(row: PlanRow) -> list[Difference]:
    """The cells of a row that no run of a planner gives."""
    wrong = []
    if row.status == "ok":
        for name in ("plan", "step_ns", "peak_bytes", "evaluations", "program"):
            if getattr(row, name) in ("", None):
                wrong.append(Difference(title(row), "", "", f"the status is ok, but there is no {name}"))
        if row.error:
            wrong.append(Difference(title(row), "error", row.error, ""))
    else:
        wrong += [] if row.error else [Difference(title(row), "error", "", "a reason")]
        filled = [name for name in FIGURES if getattr(row, name) not in ("", None)]
        wrong += [Difference(title(row), "", "", f"the status is {row.status}, but {name} is given") for name in filled]
        if row.plan and row.status != "error":
            wrong.append(Difference(title(row), "", "", f"the status is {row.status}, but a plan is given"))
    if row.evaluations is not None and row.evaluations > row.budget:
        wrong.append(Difference(title(row), "evaluations", str(row.evaluations), f"at most {row.budget}"))
    return wrong


def title(row: PlanRow) -> str:
    """The run of the row as printable text."""
    return shortened(str(PlanRun(*row.key)), 300)


def _evaluator(folder: Path, row: PlanRow, check: Check) -> Evaluator:
    name = row.model, row.cluster, row.batch, row.framework, row.choices
    if name not in _EVALUATORS:
        _EVALUATORS.clear()  # the captures of another job may be large
        _EVALUATORS[name] = Evaluator(_job(folder, row, check))
    return _EVALUATORS[name]


def _job(folder: Path, row: PlanRow, check: Check) -> Job:
    base = row.model.partition("[")[0]
    if ".py" in row.model and not any(base == name or base.startswith(f"{name}-") for name in check.named):
        raise Unsupported("a model of the user's own file is not executed unless --placer names it (FILE.py:NAME)")
    if (base.endswith(".json") or Path(base).is_dir()) and base not in check.named:
        raise Unsupported("a configuration by its path is not opened unless --placer names it")
    if row.framework.partition("[")[0] not in framework_names():
        raise UnknownName("framework", row.framework, framework_names())  # a path of the row is not opened
    machine = None
    if split_choices(row.cluster)[0] not in topology_names():
        machine = kept_machine(folder, row.cluster)
        if not machine.is_file():
            raise UnknownName("cluster", row.cluster, topology_names())  # a path of the row is not opened
    return job_of(row.model, row.cluster, row.batch, row.framework, row.choices, machine=machine)


def _spec(row: PlanRow, check: Check) -> PlannerSpec | None:
    """The planner of a row, or None if it is code from a file that the user did not name."""
    if ".py" in row.planner:
        return find_planner(row.entry)[0] if row.planner in check.named else None
    if row.planner not in planners():
        if check.foreign:
            return None
        raise UnknownName("planner", row.planner, planners())
    return find_planner(row.entry)[0]


def _why_not_again(row: PlanRow, spec: PlannerSpec | None) -> str:
    """Why a rerun of the planner could give another row or is not allowed; empty if the rerun is possible."""
    if spec is None:
        return "its planner is not registered here"
    if row.version < spec.version:
        return f"made by version {row.version} of its planner, which is at version {spec.version}"
    if row.status not in ("ok", "skipped", "error"):
        return f"its status is {row.status}"
    return ""
