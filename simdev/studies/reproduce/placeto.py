"""Placeto (Addanki et al. 2019): evaluations to a step time against RNN placers, and unseen graphs of a family."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from simdev.graphs.random_graphs import family_split
from simdev.studies.reproduce.lab import Case, Found, Lab, chosen
from simdev.studies.reproduce.picture import bars, learning_curves
from simdev.studies.reproduce.stats import evaluations_to, geometric, interval, told

TITLE = "Placeto: Learning Generalizable Device Placement Algorithms (Addanki et al. 2019)"
PLACERS = ("placeto", "colocrl", "hdp")
REFERENCES = ("single-gpu", "expert", "scotch")
FAMILIES = ("inception", "nasnet", "nmt")
TRAINED_BY = "placeto[from_best=false]"  # the paper's episodes, and what a policy meets that is tried at once


@dataclass(frozen=True)
class Size:
    evaluations: int
    seeds: int
    workloads: tuple[str, ...]
    topology: str
    families: tuple[str, ...]
    graphs_of_a_family: int
    training_evaluations: int
    per_graph_evaluations: int
    zero_shot_evaluations: int


SIZES = {
    "tiny": Size(60, 2, ("transformer-xl-2",), "p100x4", ("inception",), 5, 100, 60, 1),
    "small": Size(1000, 5, ("inception-v3", "nmt"), "p100x4", FAMILIES, 10, 4000, 200, 1),
    "full": Size(20_000, 10, ("inception-v3", "nmt", "nasnet-a-large"), "p100x4", FAMILIES, 32, 100_000, 20_000, 1),
}


def run(lab: Lab) -> Iterator[list[str]]:
    """The report's parts."""
    yield _efficiency(lab)
    yield from _generalisation(lab)


def _efficiency(lab: Lab) -> list[str]:
    size = lab.size
    panels = {}
    for workload in size.workloads:
        case = Case(workload, size.topology)
        panels[case.label] = lab.runs([case], (*PLACERS, *REFERENCES), size.evaluations, size.seeds)
    learning_curves(lab.folder / "curves.png", panels, REFERENCES)
    lines = [line for label, found in panels.items() for line in evaluations_needed(label, found, size.evaluations)]
    return [
        "## Evaluations to the same step time\n",
        "The paper: Placeto needs up to 6.1 times fewer placements than the RNN placer. Here the target of a case is "
        "the mean final step time of the slowest of the three placers, so that each has a chance to reach it; a run "
        "that does not counts with the whole budget. Means over the seeds, 95 % bootstrap intervals.\n",
        lab.table("evaluations", lines),
        "![learning curves](curves.png)\n",
    ]


def evaluations_needed(label: str, found: Sequence[Found], budget: int) -> list[dict]:
    """A line for each placer on a case: final step time, and evaluations until the target."""
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
        lines.append({
            "case": label, "placer": name, "final step time, ms": told(interval(values)),
            "target, ms": f"{target:,.1f}",
            "reached by": f"{sum(used is not None for used in needed[name])}/{len(needed[name])}",
            "evaluations": told(interval(counted[name]), 0),
            "times placeto's": f"{mean / (sum(base) / len(base)):.2f}" if base else "",
        })  # fmt: skip
    return lines


def _generalisation(lab: Lab) -> Iterator[list[str]]:
    size, pictured = lab.size, {}
    yield [
        "## Unseen graphs of a family\n",
        f"One policy for each family and seed is trained on 80 % of {size.graphs_of_a_family} graphs "
        f"({size.training_evaluations:,} evaluations in all, on `{size.topology}`, every episode from all groups on "
        "one GPU, as `from_best=false` has it) and tried on the other 20 %: at once "
        f"(*zero-shot*, {size.zero_shot_evaluations} evaluation), and with {size.per_graph_evaluations} evaluations of "
        "further training (*fine-tuned*). *Per graph* is trained on the test graph alone with as many, from scratch. "
        "Step time over the best known of the graph: geometric mean over the test graphs, then over the seeds, 95 % "
        "bootstrap interval over the seeds. A placement that does not fit counts 10 times.\n",
    ]
    for family in size.families:
        ratios = _family(lab, family)
        line = {"family": family, "test graphs": len(family_split(family, size.graphs_of_a_family)[1])}
        line |= {name: told(geometric(values), 3) if values else "-" for name, values in ratios.items()}
        pictured[family] = {name: geometric(values) for name, values in ratios.items() if values and name != "random"}
        bars(lab.folder / "generalisation.png", pictured, ylabel="step time over the best known", level=1.0)
        yield [lab.table(f"generalisation-{family}", [line])]
    yield ["![generalisation](generalisation.png)\n"]


def _family(lab: Lab, family: str) -> dict[str, list[float]]:
    """For each way of placing, the mean ratio to the best known of each seed."""
    size = lab.size
    training, test = family_split(family, size.graphs_of_a_family)
    seen = [_case(family, seed, size.topology) for seed in training]
    unseen = [_case(family, seed, size.topology) for seed in test]
    runs = {
        "per graph": lab.runs(unseen, ["placeto"], size.per_graph_evaluations, size.seeds),
        "random": lab.runs(unseen, ["random"], size.zero_shot_evaluations, size.seeds),
        **{name: lab.runs(unseen, [name], size.zero_shot_evaluations, 1) for name in ("single-gpu", "scotch")},
    }
    shot, tuned = [], []
    for seed in range(size.seeds):
        policy = lab.policy(
            f"placeto-{family}-{seed}", TRAINED_BY, seen, seed=seed, evaluations=size.training_evaluations
        )
        entry = f"placeto[policy={policy}]"
        shot += lab.runs(unseen, [entry], size.zero_shot_evaluations, 1)
        tuned += lab.runs(unseen, [entry], size.per_graph_evaluations, 1)
    return ratios_to_best({"zero-shot": shot, "fine-tuned": tuned, **runs})


def _case(family: str, seed: int, topology: str) -> Case:
    return Case(f"{family}-family[seed={seed}]", topology)


def ratios_to_best(runs: dict[str, list[Found]], cap: float = 10.0) -> dict[str, list[float]]:
    """For each name, a number per repetition: the geometric mean over the workloads of step time over the best that any
    run had there, at most ``cap``, which is also what a run without a score counts."""
    every = [run for group in runs.values() for run in group]
    best = {}
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
