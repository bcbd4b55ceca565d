"""Placeto (Addanki et al. 2019): evaluations until a step time, compared with RNN placers; unseen graphs of a
family."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simdev.graphs.random_graphs import family_split
from simdev.studies.reproduce.lab import (
    Lab,
    LabCase,
    RunResult,
    Size,
    chosen,
    evaluations_to,
    geometric,
    interval,
    interval_text,
    sizes,
)
from simdev.studies.reproduce.picture import bars, learning_curves

TITLE = "Placeto: Learning Generalizable Device Placement Algorithms (Addanki et al. 2019)"
PLACERS = ("placeto", "colocrl", "hdp")
REFERENCES = ("single-gpu", "expert", "scotch")
FAMILIES = ("inception", "nasnet", "nmt")
TRAINED_BY = "placeto[from_best=false]"  # the episodes of the paper, which start as a zero-shot placement does


SIZES = sizes(
    small=dict(
        evaluations=1000,
        seeds=5,
        workloads=("inception-v3", "nmt"),
        topology="p100x4",
        families=FAMILIES,
        graphs_of_a_family=10,
        training_evaluations=4000,
        per_graph_evaluations=200,
        zero_shot_evaluations=1,
    ),
    tiny=dict(
        evaluations=60,
        seeds=2,
        workloads=("transformer-xl-2",),
        families=("inception",),
        graphs_of_a_family=5,
        training_evaluations=100,
        per_graph_evaluations=60,
    ),
    # Small leaves open what two test graphs of a family cannot show, and whether a policy that was trained for longer
    # needs no training on the graph itself.
    full=dict(
        workloads=("inception-v3", "nmt", "nasnet-a-large"),
        graphs_of_a_family=32,
        training_evaluations=100_000,
        per_graph_evaluations=2000,
    ),
)


def run(lab: Lab) -> Iterator[list[str]]:
    """The parts of the report."""
    yield _efficiency(lab)
    yield from _generalisation(lab)


def _efficiency(lab: Lab) -> list[str]:
    size = lab.size
    panels = {}
    for workload in size.workloads:
        case = LabCase(workload, size.topology)
        panels[case.label] = lab.runs([case], (*PLACERS, *REFERENCES), size.evaluations, size.seeds)
    learning_curves(lab.folder / "curves.png", panels, REFERENCES)
    lines = [line for label, found in panels.items() for line in evaluations_needed(label, found, size.evaluations)]
    return [
        "## Evaluations to the same step time\n",
        "The paper claims that Placeto needs up to 6.1 times fewer placements than the RNN placer. Here the target of "
        "a case is the mean final step time of the slowest of the three placers, so that each placer has a chance to "
        "reach it. A run that does not reach it counts with the whole budget. The table shows means over the seeds "
        "with 95 % bootstrap intervals.\n",
        lab.table("evaluations", lines),
        "![learning curves](curves.png)\n",
    ]


def evaluations_needed(label: str, found: Sequence[RunResult], budget: int) -> list[dict]:
    """One line for each placer on a case: the final step time, and the evaluations until the target."""
    finals = {name: [run.step_ms for run in chosen(found, placer=name) if run.points] for name in PLACERS}
    finals = {name: values for name, values in finals.items() if values}
    if not finals:
        return []
    target = max(sum(values) / len(values) for values in finals.values())
    needed = {name: [evaluations_to(run.points, target * 1e6) for run in chosen(found, placer=name)] for name in finals}
    counted = {name: [budget if used is None else used for used in values] for name, values in needed.items()}
    base = counted.get("placeto")
    lines = []
    for name, values in finals.items():
        mean = sum(counted[name]) / len(counted[name])
        lines.append(
            {
                "case": label,
                "placer": name,
                "final step time, ms": interval_text(interval(values)),
                "target, ms": f"{target:,.1f}",
                "reached by": f"{sum(used is not None for used in needed[name])}/{len(needed[name])}",
                "evaluations": interval_text(interval(counted[name]), 0),
                "times placeto's": f"{mean / (sum(base) / len(base)):.2f}" if base else "",
            }
        )
    return lines


def _generalisation(lab: Lab) -> Iterator[list[str]]:
    size, pictured = lab.size, {}
    yield [
        "## Unseen graphs of a family\n",
        f"For each family and seed, one policy is trained on 80 % of {size.graphs_of_a_family} graphs, with "
        f"{size.training_evaluations:,} evaluations in all, on `{size.topology}`. Every episode starts with all groups "
        "on one GPU (`from_best=false`). The policy is tried on the other 20 % of the graphs: without further training "
        f"(*zero-shot*, {size.zero_shot_evaluations} evaluation) and with {size.per_graph_evaluations} evaluations of "
        "further training (*fine-tuned*). *Per graph* is trained from scratch on the test graph alone, with as many "
        "evaluations. The table shows the step time over the best known one: the geometric mean over the test graphs "
        "and seeds, with a 95 % bootstrap interval over the seeds. A placement that does not fit counts as 10.\n",
    ]
    for family in size.families:
        ratios = _family(lab, family)
        line = {"family": family, "test graphs": len(family_split(family, size.graphs_of_a_family)[1])}
        line |= {name: interval_text(geometric(values), 3) if values else "-" for name, values in ratios.items()}
        pictured[family] = {name: geometric(values) for name, values in ratios.items() if values and name != "random"}
        bars(lab.folder / "generalisation.png", pictured, ylabel="step time over the best known", level=1.0)
        yield [lab.table(f"generalisation-{family}", [line])]
    yield ["![generalisation](generalisation.png)\n"]


def _family(lab: Lab, family: str) -> dict[str, list[float]]:
    """For each way of placing, a mean ratio to the best known step time for each seed."""
    size = lab.size
    seen, unseen = family_cases(size, family)
    shot, tuned = lab.trained(
        TRAINED_BY,
        family,
        seen,
        unseen,
        seeds=size.seeds,
        evaluations=size.training_evaluations,
        zero_shot=size.zero_shot_evaluations,
        tuning=size.per_graph_evaluations,
    )
    return ratios_to_best(
        {
            "zero-shot": shot,
            "fine-tuned": tuned,
            "per graph": lab.runs(unseen, ["placeto"], size.per_graph_evaluations, size.seeds),
            "random": lab.runs(unseen, ["random"], size.zero_shot_evaluations, size.seeds),
            **{name: lab.runs(unseen, [name], size.zero_shot_evaluations, 1) for name in ("single-gpu", "scotch")},
        }
    )


def family_cases(size: Size, family: str) -> tuple[list[LabCase], list[LabCase]]:
    """The graphs of ``family`` to train on, and those to test."""
    seen, unseen = (
        [LabCase(f"{family}-family[seed={seed}]", size.topology) for seed in seeds]
        for seeds in family_split(family, size.graphs_of_a_family)
    )
    return seen, unseen


def ratios_to_best(runs: dict[str, list[RunResult]], cap: float = 10.0) -> dict[str, list[float]]:
    """For each name, one number per repetition: the geometric mean over the workloads of the ratio to the best run.

    A ratio is at most ``cap``, and a run without a score counts as ``cap``.
    """
    every = [run for group in runs.values() for run in group]
    best: dict[str, float] = {}
    for run in every:
        if run.points:
            best[run.row.workload] = min(best.get(run.row.workload, float("inf")), run.step_ms)
    found = {}
    for name, group in runs.items():
        repeats: dict[tuple, list[float]] = {}
        for run in group:
            ratio = min(cap, run.step_ms / best[run.row.workload]) if run.points else cap
            repeats.setdefault((run.row.params, run.row.seed), []).append(ratio)
        found[name] = [geometric(values)[0] for values in repeats.values()]
    return found
