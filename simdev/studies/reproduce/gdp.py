"""GDP (Zhou et al. 2019) beside controls without learning, what matters in its search, and held-out families."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from simdev.placers import registry
from simdev.studies.reproduce.lab import (
    Lab,
    LabCase,
    RunResult,
    Size,
    cell,
    chosen,
    geometric,
    interval,
    interval_text,
    of_entry,
    sizes,
    steps_ms,
)
from simdev.studies.reproduce.picture import learning_curves

TITLE = "GDP: Generalized Device Placement for Dataflow Graphs (Zhou et al. 2019)"
CLIMB, UNTRAINED = "group-climb", "gdp[rate=0.0]"
REFERENCES = ("expert", "single-gpu", "scotch")
FIVE = ("rnnlm", "inception-v3", "transformer-xl-2", "wavenet-2x18", "nasnet-a-mobile")  # of five families
ABLATION = {
    "gdp": "gdp",
    "without learning": UNTRAINED,
    "edits of one group": "gdp[wide=false]",
    "no first placements": "gdp[starts=false]",
    "without edits": "gdp[edits=0.0]",
    "climb without a network": CLIMB,
}
UPDATES = 50  # the paper fine-tunes in fewer than 50


SIZES = sizes(
    small=dict(
        evaluations=500,
        seeds=5,
        workloads=FIVE,
        topology="p100x4",
        training_topologies=("k80x4", "v100x8-dgx1"),
        training_evaluations=2400,
        training_seeds=3,
        large="gnmt-8",
        large_topology="p100x8",
        large_evaluations=300,
        large_seeds=10,
    ),
    tiny=dict(
        evaluations=60,
        seeds=2,
        workloads=FIVE[2:4],
        training_topologies=("k80x4",),
        training_evaluations=100,
        training_seeds=1,
        large="rnnlm",
        large_evaluations=40,
        large_seeds=2,
    ),
    # Small leaves open whether a policy that was trained for longer places an unseen workload well at once.
    full=dict(evaluations=2000, seeds=10, training_evaluations=100_000, training_seeds=5, large_evaluations=2000),
)


def run(lab: Lab) -> Iterator[list[str]]:
    """The parts of the report."""
    size = lab.size
    cases = [LabCase(workload, size.topology) for workload in size.workloads]
    yield _large(lab)
    yield _ablation(lab, cases)
    alone = {case: lab.runs([case], ("gdp", CLIMB, *REFERENCES), size.evaluations, size.seeds) for case in cases}
    yield _hold_one_out(lab, alone)
    for case in cases:
        alone[case] += lab.runs([case], (UNTRAINED, "hdp"), size.evaluations, size.seeds)
    yield _one(lab, alone)


def _one(lab: Lab, alone: dict[LabCase, list[RunResult]]) -> list[str]:
    """The section on ``gdp`` trained from scratch on each workload."""
    lines = [_compared(case, found) for case, found in alone.items()]
    learning_curves(lab.folder / "curves.png", {case.label: found for case, found in alone.items()}, REFERENCES)
    names = {
        "the expert": "expert",
        "one GPU": "single-gpu",
        "HDP": "hdp",
        "the climb": CLIMB,
        "the untrained policy": UNTRAINED,
    }
    gains = {name: [gain for found in alone.values() for gain in _gains(found, entry)] for name, entry in names.items()}
    text = ", ".join(
        f"{interval_text(interval(100 * gain for gain in each))} % on {name}" for name, each in gains.items() if each
    )
    return [
        "## One policy for each workload\n",
        "The paper claims steps 16 % faster on average than those of human experts and 9.2 % faster than those of HDP. "
        f"Here all placers that search have {lab.size.evaluations:,} evaluations. *climb* is `{CLIMB}`, a hill climb "
        f"over the same groups without a network; *untrained* is `{UNTRAINED}`, the same search with a network that "
        "does not learn. Step times are in ms: means over the seeds with 95 % bootstrap intervals.\n",
        lab.table("one", lines),
        f"Over all workloads and seeds, the step of `gdp` is shorter by {text} on average. A negative number means a "
        "longer step. The intervals treat all runs as one sample.\n",
        "![learning curves](curves.png)\n",
    ]


def _gains(found: Sequence[RunResult], other: str) -> list[float]:
    """For each run of ``gdp`` that fits: 1 minus its step time over the mean step time of entry ``other``."""
    values = steps_ms(of_entry(found, other))
    if not values:
        return []
    reference = sum(values) / len(values)
    return [1 - step / reference for step in steps_ms(of_entry(found, "gdp"))]


def _compared(case: LabCase, found: list[RunResult]) -> dict:
    entries = {name: name for name in ("expert", "single-gpu", "scotch", "hdp")}
    entries |= {"climb": CLIMB, "untrained": UNTRAINED, "gdp": "gdp"}
    return {"workload": case.workload} | {
        name: cell(steps_ms(of_entry(found, entry))) for name, entry in entries.items()
    }


def _ablation(lab: Lab, cases: list[LabCase]) -> list[str]:
    """The section on which part of the search matters."""
    size, lines = lab.size, []
    found = {name: lab.runs(cases, [entry], size.evaluations, size.seeds) for name, entry in ABLATION.items()}
    base = {case: interval(steps_ms(chosen(found["gdp"], workload=case.workload)))[0] for case in cases}
    for name, runs in found.items():
        ratios = [step / base[case] for case in cases for step in steps_ms(chosen(runs, workload=case.workload))]
        line = {"search": name}
        line |= {case.workload: cell(steps_ms(chosen(runs, workload=case.workload))) for case in cases}
        lines.append(line | {"over gdp": interval_text(geometric(ratios), 3)})
    return [
        "## What matters in the search\n",
        f"Each line changes one thing of `gdp`. {size.evaluations:,} evaluations, {size.seeds} seeds; the last column "
        "is the geometric mean of the step time over that of `gdp`.\n",
        lab.table("ablation", lines),
    ]


def _hold_one_out(lab: Lab, alone: dict[LabCase, list[RunResult]]) -> list[str]:
    """The section on policies that are tried on a family and a machine that they were not trained on."""
    size, lines = lab.size, []
    tuning = _tuning_evaluations(size.evaluations)
    for case, found in alone.items():
        others = [
            LabCase(other.workload, machine)
            for other in alone
            if other is not case
            for machine in size.training_topologies
        ]
        shot, tuned = lab.trained(
            _training(size, len(others)),
            f"without-{case.workload}",
            others,
            [case],
            seeds=size.training_seeds,
            evaluations=size.training_evaluations,
            tuning=tuning,
        )
        untrained = lab.runs([case], ["gdp[starts=false]"], 1, size.training_seeds)
        cells = {
            "expert": of_entry(found, "expert"),
            "single-gpu": of_entry(found, "single-gpu"),
            "zero-shot": shot,
            "untrained, zero-shot": untrained,
            f"under {UPDATES} updates": tuned,
            "from scratch, as many": _cut(of_entry(found, "gdp"), tuning),
            "climb, as many": _cut(of_entry(found, CLIMB), tuning),
        }
        lines.append({"held out": case.workload} | {name: cell(steps_ms(group)) for name, group in cells.items()})
    return [
        "## A family and a machine held out\n",
        "The paper claims that a policy which was trained on other workloads places a new one well at once, and better "
        "than the expert after fewer than 50 updates. Here a policy for each held-out workload and seed is trained on "
        f"the other {len(alone) - 1}, which are of other families, on {', '.join(size.training_topologies)}, with "
        f"{size.training_evaluations:,} evaluations in all. It is tried on `{size.topology}` and fine-tuned with "
        f"{tuning} evaluations. *Untrained, zero-shot* is the most probable placement of a new network. Step times "
        "are in ms.\n",
        lab.table("hold-one-out", lines),
    ]


def _training(size: Size, cases: int) -> str:
    """The placer, with the entropy schedule of the shipped policy stretched to the length of this training."""
    updates = max(1, size.training_evaluations // _samples() // cases)
    return f"gdp[entropy=0.7,entropy_end=0.1,entropy_updates={updates}]"


def _samples() -> int:
    return int(registry.find_placer("gdp")[0].defaults["samples"])


def _tuning_evaluations(most: int) -> int:
    """Evaluations of a tuning: one for the zero-shot placement, then fewer than :data:`UPDATES` batches."""
    return min(most, 1 + (UPDATES - 1) * _samples())


def _cut(found: Sequence[RunResult], evaluations: int) -> list[RunResult]:
    """The results that the runs would have had after fewer evaluations, from their curves."""
    cut = []
    for run in found:
        points = tuple(point for point in run.points if point[0] <= evaluations)
        row = replace(run.row, step_ns=min((point[2] for point in points), default=None))
        cut.append(RunResult(row, points))
    return cut


def _large(lab: Lab) -> list[str]:
    """The section on a graph of more than 50,000 ops: the 8-layer GNMT on eight GPUs."""
    size = lab.size
    case = LabCase(size.large, size.large_topology)
    entries = ("gdp", CLIMB, UNTRAINED, *REFERENCES)
    found = lab.runs([case], entries, size.large_evaluations, size.large_seeds)
    rows = {name: of_entry(found, name) for name in (*REFERENCES, CLIMB, UNTRAINED, "gdp")}
    expert = min(steps_ms(rows["expert"]), default=float("nan"))
    lines = []
    for name, group in rows.items():
        values = steps_ms(group)
        seconds = [run.row.place_seconds or 0.0 for run in group]
        lines.append(
            {
                "placer": name,
                "runs": len(group),
                "step time, ms": cell(values),
                "faster than the expert": f"{sum(value < expert for value in values)}/{len(group)}",
                "evaluations": max(run.row.evaluations or 0 for run in group),
                "seconds": cell(seconds),
            }
        )
    return [
        f"## {size.large} on {size.large_topology}\n",
        f"{case.problem().graph.n_ops:,} ops, {size.large_evaluations} evaluations.\n",
        lab.table("large", lines),
    ]
