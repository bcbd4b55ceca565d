"""Mirhoseini et al. 2017, table 1: RNNLM, NMT and Inception-V3 on two and four K80s, and which findings hold here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from simdev.placers import registry
from simdev.placers.budget import Budget
from simdev.sim import simulate
from simdev.studies.reproduce.lab import Case, Lab, RunResult, steps_ms
from simdev.studies.reproduce.picture import learning_curves
from simdev.studies.reproduce.stats import interval, interval_text

TITLE = "Device Placement Optimization with Reinforcement Learning (Mirhoseini et al. 2017), table 1"
EAGER = "fifo/fifo/eager"
DATAFLOW = "fifo/fifo/dataflow"
RULES = {"overlapped dispatch": DATAFLOW, "one dispatching host": EAGER}
BASELINES = ("single-cpu", "single-gpu", "scotch", "min-cut", "expert")
# Seconds per step in the paper: baselines in the order above, then the policy; None means out of memory.
PAPER = {
    ("rnnlm", 2): (6.89, 1.57, 13.43, 11.94, 3.81, 1.57),
    ("rnnlm", 4): (6.89, 1.57, 11.52, 10.44, 4.46, 1.57),
    ("nmt", 2): (10.72, None, 14.19, 11.54, 4.99, 4.04),
    ("nmt", 4): (10.72, None, 11.23, 11.78, 4.73, 3.92),
    ("inception-v3", 2): (26.21, 4.60, 25.24, 22.88, 11.22, 4.60),
    ("inception-v3", 4): (26.21, 4.60, 23.41, 24.52, 10.65, 3.85),
}
SAME = 0.01  # step times within 1 % count as equal


@dataclass(frozen=True)
class Size:
    evaluations: int
    seeds: int
    workloads: tuple[str, ...]
    transfer_factors: tuple[int, ...]
    learned_rules: tuple[str, ...]


SIZES = {
    "tiny": Size(30, 2, ("rnnlm",), (1, 10), (DATAFLOW, EAGER)),
    "small": Size(500, 5, ("rnnlm", "nmt", "inception-v3"), (1, 3, 10, 30, 100), (DATAFLOW,)),
    "full": Size(20_000, 10, ("rnnlm", "nmt", "inception-v3"), (1, 3, 10, 30, 100), (DATAFLOW, EAGER)),
}


def run(lab: Lab) -> Iterator[list[str]]:
    """The parts of the report."""
    yield [
        "The tables show step times on `k80x2` and `k80x4` in ms; for `colocrl`, the mean over the seeds with "
        "its 95 % bootstrap interval. *One dispatching host* is the runtime `eager`, in which one thread launches all "
        "ops in order; it approximates the time that TensorFlow needs to launch an op. *Overlapped dispatch* is the "
        "default. The speed-up is that of the paper: the best of the five baselines over `colocrl`, minus one.\n"
    ]
    for name, rules in RULES.items():
        found = {
            (workload, gpus): _case(lab, workload, gpus, rules) for workload in lab.size.workloads for gpus in (2, 4)
        }
        tag = rules.rpartition("/")[2]
        parts = [f"## Step times, {name}\n", lab.table(f"table1-{tag}", _times(found))]
        parts += ["Which findings of the paper hold here:\n", lab.table(f"signs-{tag}", signs(_numbers(found)))]
        panels = {f"{workload}, {gpus} GPUs": runs for (workload, gpus), runs in found.items()}
        if rules in lab.size.learned_rules:
            learning_curves(lab.folder / f"curves-{tag}.png", panels, BASELINES, title=f"colocrl, {name}")
            parts.append(f"![learning curves](curves-{tag}.png)\n")
        yield parts
    yield _slower_transfers(lab)


def _case(lab: Lab, workload: str, gpus: int, rules: str) -> list[RunResult]:
    case = Case(workload, f"k80x{gpus}", rules=rules)
    learned = ("colocrl",) if rules in lab.size.learned_rules else ()
    return lab.runs([case], (*BASELINES, *learned), lab.size.evaluations, lab.size.seeds)


def _times(found: dict[tuple[str, int], list[RunResult]]) -> list[dict]:
    lines = []
    for (workload, gpus), runs in found.items():
        cells = {name: steps_ms(runs, placer=name) for name in BASELINES}
        learned = steps_ms(runs, placer="colocrl")
        line = {"workload": workload, "GPUs": gpus}
        line |= {name: f"{values[0]:,.0f}" if values else "OOM" for name, values in cells.items()}
        best = min((values[0] for values in cells.values() if values), default=float("nan"))
        gains = [best / value - 1 for value in learned]
        if any(run.row.placer == "colocrl" for run in runs):
            line["colocrl"] = interval_text(interval(learned), 0) if learned else "OOM"
            line["speed-up %"] = interval_text(interval(100 * gain for gain in gains)) if gains else ""
        paper = PAPER[workload, gpus]
        line["paper, s"] = " / ".join("OOM" if value is None else f"{value:.2f}" for value in paper)
        lines.append(line)
    return lines


def _numbers(found: dict[tuple[str, int], list[RunResult]]) -> dict[tuple[str, int], tuple[float | None, ...]]:
    """Step times in the order of :data:`PAPER`; the last one, of the policy, is the mean over the seeds."""
    numbers = {}
    for case, runs in found.items():
        values = [steps_ms(runs, placer=name) for name in (*BASELINES, "colocrl")]
        numbers[case] = tuple(sum(each) / len(each) if each else None for each in values)
    return numbers


def _slower_transfers(lab: Lab) -> list[str]:
    """The section on the findings about baselines if every transfer takes a multiple of its time."""
    lines = []
    for factor in lab.size.transfer_factors:
        numbers = {
            (workload, gpus): _baselines(workload, gpus, factor) for workload in lab.size.workloads for gpus in (2, 4)
        }
        found = [line for line in signs(numbers) if line["holds"] != "-"]
        names = list(dict.fromkeys(line["finding"] for line in found))
        by_finding = {name: [line["holds"] == "yes" for line in found if line["finding"] == name] for name in names}
        lines.append({"transfers": f"x {factor}"} | {name: f"{sum(h)}/{len(h)}" for name, h in by_finding.items()})
    return [
        "## With slower transfers\n",
        "Every transfer takes a multiple of its time. The table counts the cases in which each finding about the "
        "baselines holds. It shows how far the paper's machine was from one whose links run at their rated speed.\n",
        lab.table("dearer-transfers", lines),
    ]


def _baselines(workload: str, gpus: int, factor: int) -> tuple[float | None, ...]:
    """Step times in ms of the baselines if transfers take ``factor`` times as long.

    The order is that of :data:`PAPER`; the entry of the policy is None.
    """
    problem = Case(workload, f"k80x{gpus}").problem()
    problem = replace(problem, costs=replace(problem.costs, transfer_ns=problem.costs.transfer_ns * factor))
    steps = []
    for name in BASELINES:
        spec, params = registry.find_placer(name)
        placement = spec.place(problem, rng=np.random.default_rng(0), budget=Budget(problem), **params)
        schedule = simulate(problem, placement)
        steps.append(schedule.step_ns / 1e6 if schedule.feasible else None)
    return (*steps, None)


def signs(numbers: dict[tuple[str, int], tuple[float | None, ...]]) -> list[dict]:
    """One line for each qualitative finding of the paper and each case of ``numbers``: does the finding hold there?

    ``numbers`` are step times in the order of :data:`PAPER`. A comparison with a placement that does not fit has no
    answer ("-").
    """
    lines = []

    def line(finding, case, holds):
        answer = "-" if holds is None else "yes" if holds else "no"
        lines.append({"finding": finding, "workload": case[0], "GPUs": case[1], "holds": answer})

    for case, (cpu, gpu, scotch, min_cut, expert, learned) in numbers.items():
        workload, gpus = case
        if workload == "nmt":
            line("does not fit one GPU", case, gpu is None)
            line("the policy beats the expert", case, _faster(learned, expert))
        else:
            line("Scotch is slower than one GPU", case, _faster(gpu, scotch))
            line("min-cut is slower than one GPU", case, _faster(gpu, min_cut))
            line("the expert is slower than one GPU", case, _faster(gpu, expert))
        if workload != "inception-v3":
            line("Scotch is slower than one CPU", case, _faster(cpu, scotch))
            line("min-cut is slower than one CPU", case, _faster(cpu, min_cut))
        if workload == "rnnlm" or case == ("inception-v3", 2):
            line("the policy ends at one GPU, which is best", case, _equal(gpu, learned))
        if case == ("inception-v3", 4):
            line("four GPUs beat one", case, _faster(learned, gpu))
    return lines


def _faster(one: float | None, other: float | None) -> bool | None:
    return None if one is None or other is None else one < other * (1 - SAME)


def _equal(one: float | None, other: float | None) -> bool | None:
    return None if one is None or other is None else abs(one - other) <= SAME * one
