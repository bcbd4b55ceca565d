"""Does the plan that simdev ranks first win in reality? Measured training runs of one model on one machine, ranked.

A group holds the measured plans of one model on one number of GPUs of one machine with the same sequence length; in
vTrain's sets also with the same global batch, because a step of more sequences takes longer by itself. Plans are
compared by sequences per second. The *regret* of a choice is how much longer the chosen plan takes for a sequence than
the best measured one. The controls choose among the same plans: Megatron's rule (the least model parallelism, tensor
before pipeline, and the microbatch that is predicted to be quickest), the plan of median speed, and the best of three
plans drawn at random, on average.

:func:`chosen_beside` lets ``search`` choose a plan for the job of a measured run, and says how the choice differs from
the plan that people ran and what the simulation leaves out that may explain it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from math import comb

import numpy as np

from simdev.errors import SimdevError
from simdev.planners import Choice, Evaluator, Job, Outcome, PlanBudget, find_planner
from simdev.planners.job import RECOMPUTE
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


# What search chooses for the jobs of measured runs ---------------------------------------------------------------

CHOSEN = [
    "row", "GPUs", "plan that ran", "measured s", "simulated s", "GiB", "plan of search", "simulated s of search",
    "GiB of search", "quicker %", "differs", "left out of the simulation",
]  # fmt: skip
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
# What the simulation or the row leaves out that makes a choice look better than the plan that people ran.
WIDER = "the network between nodes carries what all adapters send, without congestion"
LIGHTER = "memory of the software beside PyTorch's allocator; its release may not have had this recomputation"
LARGER = "memory of the software beside PyTorch's allocator"
LOOPED = "its release may not have had so many stages on a rank"
GATHERED = "its release may not have kept parameters gathered"


@dataclass(frozen=True)
class Chosen:
    """The plan of a measured run as simulated, and what ``search`` chose for the same job after ``simulated`` plans."""

    run: TrainingRun
    ran: Outcome
    chosen: Outcome
    simulated: int

    @property
    def gain(self) -> float:
        """The share of the step time that the choice saves; negative if it is slower."""
        return 1 - self.chosen.time_ns / self.ran.time_ns


def job_of(run: TrainingRun) -> tuple[Job, Choice]:
    """The training job of a run in the wide space, with half, the same and twice the microbatch to choose from, and
    what was chosen for the run. Raises :class:`SimdevError` if planners cannot choose its plan."""
    plan, size = run.plan, int(run.plan.parameters["microbatch"])
    recompute = str(plan.parameters.get("recompute", "none"))
    job = Job(
        plan.model,
        plan.parameters,
        plan.cluster,
        plan.sequences,
        ranks=plan.mesh.ranks,
        framework=run.typed.framework,
        microbatches=tuple(sorted({max(1, size // 2), size, 2 * size})),
        recomputes=RECOMPUTE,
        wide=True,
    )
    choice = Choice(
        plan.mesh,
        size,
        recompute,
        plan.schedule,
        plan.stages_per_rank,
        plan.stage_layers,
        plan.reduce_each,
        reshard=plan.reshard,
    )
    job.plan(choice)
    return job, choice


def chosen_beside(run: TrainingRun, evaluations: int = 12, workers: int = 1) -> Chosen:
    """Let ``search`` choose for the job of a run. It does not see which plan ran. Raises :class:`SimdevError` if there
    is no such job or nothing fits."""
    job, choice = job_of(run)
    spec, params = find_planner("search")
    with Evaluator(job, workers) as evaluator:
        ran = evaluator.outcome(choice, always=True)
        if ran.step_ns is None:
            raise SimdevError(f"{run.name}: its plan has too many ops")
        budget = PlanBudget(evaluator, evaluations=evaluations, screen=True)
        found = spec.plan(job, rng=np.random.default_rng(0), budget=budget, **params)
        return Chosen(run, ran, evaluator.outcome(found, always=True), budget.used)


def differences(ran: Choice, chosen: Choice) -> list[str]:
    """What the choice has otherwise than the plan that ran: ``tp 8 -> 4``."""
    pairs = [(axis, ran.mesh[axis], chosen.mesh[axis]) for axis in AXES]
    pairs += [
        (name.replace("_", " "), getattr(ran, name), getattr(chosen, name))
        for name in ("microbatch", "recompute", "stages_per_rank", "reduce_each", "reshard")
    ]
    found = [f"{name} {before} -> {after}" for name, before, after in pairs if before != after]
    if chosen.stage_meshes:
        found.append("stages have meshes of their own")
    elif ran.stage_layers != chosen.stage_layers and ran.mesh["pp"] == chosen.mesh["pp"] > 1:
        found.append("other layers of stages")
    return found


def left_out(ran: Choice, chosen: Choice) -> list[str]:
    """What may explain that nobody ran the choice, of :data:`WIDER` and its like; empty if nothing listed does."""
    data = [one.mesh["dp_replicate"] * one.mesh["dp_shard"] for one in (ran, chosen)]
    lighter = RECOMPUTE.index(chosen.recompute) < RECOMPUTE.index(ran.recompute)
    holds = {
        WIDER: data[1] > data[0] and not chosen.stage_meshes,
        LIGHTER: lighter,
        LARGER: chosen.microbatch > ran.microbatch and not lighter,
        LOOPED: chosen.stages_per_rank > ran.stages_per_rank,
        GATHERED: chosen.reshard == "never" != ran.reshard,
    }
    return [text for text, given in holds.items() if given]


def chosen_lines(found: Iterable[Chosen]) -> list[list[str]]:
    """A line for each run; what is left out is named where the choice is simulated to be quicker by 1 % or more."""
    lines = []
    for one in found:
        ran, chosen = one.ran.choice, one.chosen.choice
        reasons = left_out(ran, chosen) if one.gain >= 0.01 else []
        lines.append(
            [
                one.run.name,
                str(ran.mesh.ranks),
                str(ran),
                f"{one.run.step_ns / 1e9:.3f}",
                f"{one.ran.time_ns / 1e9:.3f}",
                _gib(one.ran),
                str(chosen),
                f"{one.chosen.time_ns / 1e9:.3f}",
                _gib(one.chosen),
                f"{100 * one.gain:.1f}",
                "; ".join(differences(ran, chosen)) or "nothing",
                "; ".join(reasons),
            ]
        )
    return lines


def _gib(outcome: Outcome) -> str:
    """The memory of the fullest rank that decides whether a plan fits, with a mark if it does not."""
    peak = max(outcome.reserved_bytes or outcome.peak_bytes)
    return f"{peak / 2**30:.1f}{'' if outcome.fits else ' (!)'}"
