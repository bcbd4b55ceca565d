"""Does the plan that simdev ranks first win in reality? Measured training runs of one model on one machine, ranked.

A group holds the measured plans of one model on one number of GPUs of one machine with the same sequence length; in
vTrain's sets also with the same global batch, because a step of more sequences takes longer by itself. Plans are
compared by sequences per second. The *regret* of a choice is how much longer the chosen plan takes for a sequence than
the best measured one. The controls choose among the same plans: Megatron's rule (the least model parallelism, tensor
before pipeline, and the microbatch that is predicted to be quickest), the plan of median speed, and the best of three
plans drawn at random, on average.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from math import comb

import numpy as np

from simdev.studies.training_runs import Prediction, TrainingRun

LEAST = 4  # plans in a group
DRAWN = 3  # random plans of the control
BATCH_FIXED = ("vtrain-single", "vtrain-multi")


@dataclass(frozen=True)
class Ranking:
    """A group: number of plans, Kendall's tau between predicted and measured speed, and the regrets."""

    source: str
    group: str
    plans: int
    tau: float
    regret: float
    megatron_regret: float
    drawn_regret: float
    median_regret: float


def group_of(run: TrainingRun) -> tuple:
    """What the runs of a group have in common."""
    plan = run.plan
    batch = plan.sequences if run.source in BATCH_FIXED else 0
    return run.source, run.group, plan.cluster.name, plan.mesh.ranks, int(plan.parameters["length"]), batch


def grouped(runs: Iterable[TrainingRun], least: int = LEAST) -> list[list[TrainingRun]]:
    """The groups with at least ``least`` plans, largest first."""
    ordered = sorted(runs, key=group_of)
    found = [list(members) for _, members in groupby(ordered, key=group_of)]
    return sorted((members for members in found if len(members) >= least), key=lambda m: (-len(m), group_of(m[0])))


def rankings(predictions: Iterable[Prediction], least: int = LEAST) -> list[Ranking]:
    """One line for each group of at least ``least`` simulated plans."""
    by_run = {id(p.run): p for p in predictions}
    found = []
    for members in grouped((p.run for p in by_run.values()), least):
        found.append(_ranking([by_run[id(run)] for run in members]))
    return found


def _ranking(members: list[Prediction]) -> Ranking:
    from scipy.stats import kendalltau

    run = members[0].run
    measured = np.array([p.run.step_ns / p.run.plan.sequences for p in members])
    predicted = np.array([p.step_ns / p.run.plan.sequences for p in members])
    regret = measured / measured.min() - 1
    _, name, cluster, ranks, length, batch = group_of(run)
    text = f"{name}, {ranks} x {cluster}, length {length}" + (f", batch {batch}" if batch else "")
    return Ranking(
        run.source,
        text,
        len(members),
        float(kendalltau(predicted, measured)[0]),
        float(regret[int(predicted.argmin())]),
        float(regret[_megatron(members, predicted)]),
        _best_of(regret, DRAWN),
        float(np.median(regret)),
    )


def _megatron(members: list[Prediction], predicted: np.ndarray) -> int:
    """The plan that Megatron's rule takes."""

    def order(number: int) -> tuple:
        mesh = members[number].run.plan.mesh
        return mesh["tp"] * mesh["pp"], mesh["pp"], predicted[number]

    return min(range(len(members)), key=order)


def _best_of(regret: np.ndarray, draws: int) -> float:
    """Mean regret of the best of ``draws`` different plans drawn at random."""
    ordered, n = np.sort(regret), len(regret)
    weights = [comb(n - 1 - place, draws - 1) for place in range(n)]
    return float(np.dot(ordered, weights) / comb(n, draws))


HEADER = ["group", "plans", "Kendall tau", "regret %", "megatron %", f"best of {DRAWN} random %", "median plan %"]


def ranking_lines(found: list[Ranking]) -> list[list[str]]:
    """The table: a line for each group, and the means of each set."""
    lines = []
    for source in dict.fromkeys(row.source for row in found):
        mine = [row for row in found if row.source == source]
        lines += [_line(row.group, [row]) for row in mine]
        lines.append(_line(f"{source}: mean of {len(mine)} groups", mine))
    return lines


def _line(name: str, rows: list[Ranking]) -> list[str]:
    def mean(field: str, scale: float = 100) -> str:
        return f"{scale * np.mean([getattr(row, field) for row in rows]):.{1 if scale > 1 else 2}f}"

    plans = str(sum(row.plans for row in rows))
    shares = [mean(field) for field in ("regret", "megatron_regret", "drawn_regret", "median_regret")]
    return [name, plans, mean("tau", 1), *shares]
