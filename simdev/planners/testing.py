"""A small training job and the conformance check of planners: for tests, also of your own planners."""

from __future__ import annotations

from typing import Any

import numpy as np

from simdev.errors import BudgetExhausted, InvalidInput, Unsupported
from simdev.parallel import find_model, load_cluster
from simdev.placers.testing import random_state, spec_faults
from simdev.planners.budget import PlanBudget
from simdev.planners.evaluate import Evaluator
from simdev.planners.job import Choice, Job
from simdev.planners.planner import PlannerSpec
from simdev.user_file import sentence


def small_job(**changes: Any) -> Job:
    """A job of four A100s and a model of four layers that PyTorch captures within seconds, to try planners on;
    ``changes`` are fields of :class:`simdev.planners.Job`."""
    model, parameters = find_model("gpt-3.6b[width=256,layers=4,heads=2,length=256,vocabulary=1024]")
    fields = {"ranks": 4, "framework": "megatron", "microbatches": (1, 2), "schedules": ("1f1b",), **changes}
    return Job(model, parameters, load_cluster("dgx-a100"), **{"batch": 8, **fields})


def check_planner(
    spec: PlannerSpec,
    job: Job,
    evaluator: Evaluator | None = None,
    *,
    evaluations: float = 60,
    seed: int = 7,
    **params: Any,
) -> Choice | None:
    """Check that a planner keeps the rules on ``job``; return its choice, or None if it raises :class:`Unsupported`
    with a reason or finds no plan that fits within ``evaluations``. Raises AssertionError with all that is missing.

    The rules: the planner is described (:func:`simdev.placers.testing.spec_faults`) cites a source and says in
    sentences how it departs from it; its choice suits the job; the job is unchanged; no more than ``evaluations`` are
    used, and none by a planner without ``searches``; one with ``searches`` returns a plan that fits; random numbers
    come only from ``rng``; and the same seed gives the same choice again after the same number of evaluations.

    An ``evaluator`` of the job that is given keeps what it has captured for the next check.
    """
    evaluator = evaluator or Evaluator(job)
    faults = spec_faults(spec) + ([] if spec.source else ["source is missing"])
    if not isinstance(spec.departures, tuple) or not all(isinstance(one, str) and one for one in spec.departures):
        faults.append("departures is not a tuple of sentences")
    before = _values(job)
    answers: list[tuple[Choice | None, int]] = []
    cause: Exception | None = None
    for _ in range(2):
        budget = PlanBudget(evaluator, evaluations=evaluations)
        choice, state = None, random_state()  # of the second run, which captures nothing: PyTorch may draw numbers
        try:
            choice = spec.plan(job, rng=np.random.default_rng(seed), budget=budget, **params)
        except Unsupported as error:
            faults += [] if str(error).strip() else ["is unsupported without a reason"]
        except BudgetExhausted:
            faults += [] if spec.searches else ["uses up a budget although it does not search"]
        except InvalidInput as error:
            faults.append(str(error).removeprefix(f"planner {spec.name}: "))
        except Exception as error:
            faults.append(f"raised {sentence(error)}")
            cause = error
        answers.append((choice, budget.used))
        if budget.used > evaluations:
            faults.append(f"used {budget.used} of {evaluations} evaluations")
        if budget.used and not spec.searches:
            faults.append(f"used {budget.used} evaluations although it does not search: searches=True is missing")
        if spec.searches and choice is not None and not evaluator.outcome(choice).fits:
            faults.append(f"returned {choice}, which does not fit")
    if _values(job) != before:
        faults.append("changed the job")
    if random_state() != state:
        faults.append("drew random numbers from another source than rng")
    (first, used), (second, used_again) = answers
    if first != second:
        faults.append(f"gave two choices for one seed: {first} and {second}")
    if used != used_again:
        faults.append(f"used {used}, then {used_again} evaluations for one seed")
    if faults:
        raise AssertionError(f"planner {spec.name}: " + "; ".join(dict.fromkeys(faults))) from cause
    return first


def _values(job: Job) -> str:
    """All fields of a job; a planner must not even change the dictionary of parameters."""
    return repr(job)
