"""Does ``search`` find the best plan of small jobs, and do the bounds hold? Every plan is simulated.

``python tests/perf/brute_force.py [JOB...]`` from the root of a checkout prints a table. Of each job it simulates all
plans of the wide space, and all ways to divide the layers of pipelines with one stage on each rank; then it lets
``search`` choose with the simulations at hand. The last column is how much longer the best plan takes than the bound of
the job; the one before how many plans are quicker than their own bound or that of the job.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np

from simdev.cli.tables import print_table
from simdev.parallel import find_model, load_cluster
from simdev.planners import Choice, Evaluator, Job, Outcome, PlanBudget, find_planner
from simdev.planners.bounds import job_bound_ns
from simdev.planners.stage_bounds import any_plan_bound_ns

JOBS = {  # model, cluster, sequences in a step, GPUs
    "gpt": ("gpt[width=2048,layers=6,heads=16,length=2048,vocabulary=32000]", "dgx-a100", 32, 4),
    "llama": ("llama3-8b[layers=6,length=4096]", "hgx-h100-pcie", 16, 4),
    "mixtral": ("mixtral-8x7b[layers=6,width=2048,hidden=4096,length=2048]", "dgx-h100", 32, 4),
}
KINDS = ("none", "full")


def all_choices(job: Job) -> Iterator[Choice]:
    """Every plan of the job with one mesh: those of equal depth, and each other way to divide the layers."""
    for choice in job.choices():
        yield choice
        stages = choice.mesh["pp"]
        if stages == 1 or choice.stages_per_rank > 1 or choice.stage_layers:
            continue
        even = tuple(part.layers for part in job.plan(choice).parts)
        for cuts in combinations(range(1, job.layers), stages - 1):
            layers = tuple(b - a for a, b in pairwise((0, *cuts, job.layers)))
            if layers != even:
                yield replace(choice, stage_layers=layers)


def of_job(name: str) -> list[str]:
    """The row of a job."""
    entry, where, batch, ranks = JOBS[name]
    model, parameters = find_model(entry)
    job = Job(model, parameters, load_cluster(where), batch, ranks=ranks, microbatches=(1, 2), recomputes=KINDS,
              wide=True, memory="allocated")  # fmt: skip
    evaluator = Evaluator(job)
    choices = list(dict.fromkeys(all_choices(job)))
    found: dict[Choice, Outcome] = {choice: evaluator.outcome(choice, exact=False) for choice in choices}
    fitting = [one for one in found.values() if one.fits]
    best = min(fitting)
    below = max(job_bound_ns(evaluator), any_plan_bound_ns(evaluator))
    broken = sum(one.time_ns < max(one.bound_ns, below) for one in fitting)
    budget = PlanBudget(evaluator)
    spec, params = find_planner("search")
    chosen = spec.plan(job, rng=np.random.default_rng(0), budget=budget, **params)
    outcome = budget.tried[chosen]
    return [
        name,
        f"{len(choices):,}",
        f"{len(fitting):,}",
        str(best.choice),
        f"{best.time_ns / 1e6:.1f}",
        str(budget.used),
        str(chosen) if chosen != best.choice else "the same",
        f"{outcome.time_ns / best.time_ns - 1:+.2%}",
        str(broken),
        f"{best.time_ns / below - 1:.1%}" if below else "",
    ]


if __name__ == "__main__":
    names = sys.argv[1:] or list(JOBS)
    header = [
        "job",
        "plans",
        "fit",
        "best",
        "ms",
        "simulated by search",
        "its plan",
        "longer",
        "below a bound",
        "above it",
    ]
    print_table(header, [of_job(name) for name in names])
