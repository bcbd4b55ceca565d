"""GDP (Zhou et al. 2019): compared with experts and HDP, convergence, and policies trained on other workloads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from simdev.placers import registry
from simdev.placers.policy_file import read_header
from simdev.studies.reproduce.lab import Case, Lab, RunResult, chosen
from simdev.studies.reproduce.picture import bars, learning_curves
from simdev.studies.reproduce.stats import evaluations_to, geometric, interval, interval_text

TITLE = "GDP: Generalized Device Placement for Dataflow Graphs (Zhou et al. 2019)"
LEARNED = ("gdp", "gdp-batch", "hdp")
REFERENCES = ("expert", "single-gpu", "scotch")
FOUR = ("rnnlm", "inception-v3", "transformer-xl-2", "wavenet-2x18")
FIVE = (*FOUR, "nasnet-a-mobile")
UPDATES = 50  # the paper fine-tunes in fewer than 50


@dataclass(frozen=True)
class Size:
    evaluations: int
    seeds: int
    workloads: tuple[str, ...]
    topology: str
    training_evaluations: int
    held_out: tuple[str, ...]
    large: str
    large_topology: str
    large_evaluations: int
    large_seeds: int


SIZES = {
    "tiny": Size(60, 2, FOUR[2:], "p100x4", 200, FOUR[2:3], "rnnlm", "p100x8", 40, 2),
    "small": Size(2000, 5, FIVE, "p100x4", 4800, FIVE, "gnmt-8", "p100x8", 200, 5),
    "full": Size(
        20_000,
        10,
        (*FIVE, "nmt", "transformer-xl-8", "wavenet-4x36", "amoebanet-d"),
        "p100x4",
        200_000,
        FIVE,
        "gnmt-8",
        "p100x8",
        20_000,
        10,
    ),
}


def run(lab: Lab) -> Iterator[list[str]]:
    """The parts of the report."""
    size = lab.size
    cases = [Case(workload, size.topology) for workload in size.workloads]
    alone = {case: lab.runs([case], (*LEARNED, *REFERENCES), size.evaluations, size.seeds) for case in cases}
    yield _one(lab, alone)
    yield _shipped(lab, alone)
    yield _large(lab)
    yield _hold_one_out(lab, alone)


def _one(lab: Lab, alone: dict[Case, list[RunResult]]) -> list[str]:
    """The section on ``gdp`` trained from scratch on each workload."""
    lines = [line for case, found in alone.items() for line in _compared(case, found, lab.size.evaluations)]
    learning_curves(lab.folder / "curves.png", {case.label: found for case, found in alone.items()}, REFERENCES)
    gains = {name: [gain for found in alone.values() for gain in _gains(found, name)] for name in ("expert", "hdp")}
    gain_text = {
        name: interval_text(interval(100 * gain for gain in each)) if each else "-" for name, each in gains.items()
    }
    return [
        "## One policy for each workload\n",
        "The paper claims steps 16 % faster on average than those of human experts and 9.2 % faster than those "
        "of HDP, with 15 times fewer samples. Here all placers have equally many evaluations. `gdp-batch` starts "
        "from the shipped policy and tunes it; `baselines/rl/policies/README.md` says what it was trained on. *Gain* "
        "is how much shorter the step is than that of the other placer: the mean over the seeds and its 95 % bootstrap "
        "interval. The last column is the number of evaluations until HDP's mean final step time.\n",
        lab.table("one", lines),
        f"The mean gain over all workloads and seeds is {gain_text['expert']} % on the expert and {gain_text['hdp']} % "
        "on HDP. A negative gain means a longer step. The intervals treat all runs as one sample.\n",
        "![learning curves](curves.png)\n",
    ]


def _gains(found: Sequence[RunResult], other: str) -> list[float]:
    """For each run of ``gdp`` that fits: 1 minus its step time over the mean step time of placer ``other``."""
    values = [run.step_ms for run in chosen(found, placer=other) if run.points]
    if not values:
        return []
    reference = sum(values) / len(values)
    return [1 - run.step_ms / reference for run in chosen(found, placer="gdp", params="{}") if run.points]


def _compared(case: Case, found: list[RunResult], budget: int) -> list[dict]:
    steps = {
        name: [run.step_ms for run in chosen(found, placer=name) if run.points]
        for name in ("expert", "single-gpu", "scotch", "hdp", "gdp", "gdp-batch")
    }
    line = {"workload": case.workload}
    line |= {
        name: (interval_text(interval(values)) if len(values) > 1 else f"{values[0]:,.1f}") if values else "OOM"
        for name, values in steps.items()
    }
    for other in ("expert", "hdp"):
        gains = _gains(found, other)
        line[f"gain on {other}, %"] = interval_text(interval(100 * gain for gain in gains)) if gains else "-"
    line["evaluations, gdp / hdp"] = "-"
    if steps["hdp"]:
        target = sum(steps["hdp"]) / len(steps["hdp"]) * 1e6
        used = [
            [evaluations_to(run.points, target) or budget for run in chosen(found, placer=name)]
            for name in ("gdp", "hdp")
        ]
        line["evaluations, gdp / hdp"] = " / ".join(interval_text(interval(values), 0) for values in used if values)
    return [line]


def _shipped(lab: Lab, alone: dict[Case, list[RunResult]]) -> list[str]:
    """The section on the shipped policy and the workloads that it was not trained on."""
    lines = []
    for case, found in alone.items():
        if case.problem().graph.fingerprint in _seen_by_the_shipped_policy():
            continue
        values = {
            "expert": chosen(found, placer="expert"),
            "zero-shot": lab.runs([case], ["gdp-batch"], 1, 1),
            "tuned": chosen(found, placer="gdp-batch"),
            "from scratch": chosen(found, placer="gdp"),
        }
        cells = {name: [run.step_ms for run in group if run.points] for name, group in values.items()}
        lines.append({"held out": case.workload} | {name: _cell(each) for name, each in cells.items()})
    updates = lab.size.evaluations // _samples()
    return [
        "## The shipped policy on unseen workloads\n",
        f"`gdp-batch` zero-shot (its first evaluation) and tuned in {updates} updates ({lab.size.evaluations} "
        "evaluations), compared with `gdp` from scratch with as many evaluations. Step times are in ms. The policy was "
        "trained once, and the seeds are those of the tuning. The intervals do not show how much one training "
        "differs from another.\n",
        lab.table("shipped", lines) if lines else "The policy has seen all workloads.\n",
    ]


def _seen_by_the_shipped_policy() -> set[str]:
    """Fingerprints of the graphs on which the shipped policy was trained."""
    import sys

    module = sys.modules[registry.find_placer("gdp-batch")[0].function.__module__]
    header = read_header(Path(module.__file__).parent / "policies" / module.SHIPPED)
    return {entry["fingerprint"] for entry in header["trained_on"]}


def _hold_one_out(lab: Lab, alone: dict[Case, list[RunResult]]) -> list[str]:
    """The section on policies that are trained on all workloads except one and tried on that one."""
    size, lines, pictured = lab.size, [], {}
    for case in [case for case in alone if case.workload in size.held_out]:
        found = alone[case]
        others = [other for other in alone if other is not case]
        runs: dict[str, list[RunResult]] = {"zero-shot": [], f"under {UPDATES} updates": []}
        for seed in range(size.seeds):
            policy = lab.policy(
                f"gdp-without-{case.workload}-{seed}",
                _training(size, len(others)),
                others,
                seed=seed,
                evaluations=size.training_evaluations,
            )
            entry = f"gdp[policy={policy}]"
            runs["zero-shot"] += lab.runs([case], [entry], 1, 1)
            runs[f"under {UPDATES} updates"] += lab.runs([case], [entry], _tuning_evaluations(size.evaluations), 1)
        scratch = chosen(found, placer="gdp")
        runs["from scratch, as many"] = _cut(scratch, _tuning_evaluations(size.evaluations))
        if size.evaluations > _tuning_evaluations(size.evaluations):
            runs["from scratch, all"] = scratch
        steps = {name: [run.step_ms for run in group if run.points] for name, group in runs.items()}
        expert = [run.step_ms for run in chosen(found, placer="expert") if run.points]
        line = {"held out": case.workload, "expert": f"{expert[0]:,.1f}" if expert else "OOM"}
        lines.append(
            line | {name: interval_text(interval(values)) if values else "OOM" for name, values in steps.items()}
        )
        best = min([value for values in steps.values() for value in values], default=1.0)
        pictured[case.workload] = {
            name: geometric(value / best for value in values) for name, values in steps.items() if values
        }
    bars(lab.folder / "hold-one-out.png", pictured, ylabel="step time over the best here", level=1.0)
    return [
        "## One workload held out\n",
        "The paper claims that a policy which was trained on other workloads places a new one well at once, and better "
        "than the expert after fewer than 50 updates. Here a policy for each held-out workload and seed is trained on "
        f"the other {len(alone) - 1} with {size.training_evaluations} evaluations in all, and fine-tuned with "
        f"{_tuning_evaluations(size.evaluations)} evaluations ({_samples()} a batch). Step times are in ms.\n",
        lab.table("hold-one-out", lines),
        "![hold one out](hold-one-out.png)\n",
    ]


def _training(size: Size, cases: int) -> str:
    """The placer, with the entropy schedule of the shipped policy stretched to the length of this training."""
    updates = max(1, size.training_evaluations // _samples() // cases)
    return f"gdp[entropy=0.7,entropy_end=0.1,entropy_updates={updates}]"


def _cell(values: Sequence[float]) -> str:
    """A cell of a table: one value, or the mean of several with its interval, or OOM if no run fits."""
    return interval_text(interval(values)) if len(values) > 1 else f"{values[0]:,.1f}" if values else "OOM"


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
        cut.append(RunResult(_at(run, points), points))
    return cut


def _at(run: RunResult, points):
    from dataclasses import replace

    return replace(run.row, step_ns=min((point[2] for point in points), default=None))


def _large(lab: Lab) -> list[str]:
    """The section on a graph of more than 50,000 ops: the 8-layer GNMT on eight GPUs."""
    size = lab.size
    case = Case(size.large, size.large_topology)
    found = lab.runs([case], (*LEARNED, *REFERENCES), size.large_evaluations, size.large_seeds)
    rows = {
        **{name: chosen(found, placer=name) for name in (*REFERENCES, "hdp", "gdp")},
        "gdp-batch, zero-shot": lab.runs([case], ["gdp-batch"], 1, 1),
        "gdp-batch, tuned": chosen(found, placer="gdp-batch"),
    }
    lines = []
    for name, group in rows.items():
        values = [run.step_ms for run in group if run.points]
        seconds = [run.row.place_seconds or 0.0 for run in group]
        lines.append(
            {
                "placer": name,
                "runs": len(group),
                "step time, ms": _cell(values),
                "evaluations": max(run.row.evaluations or 0 for run in group),
                "seconds": _cell(seconds),
            }
        )
    return [
        f"## {size.large} on {size.large_topology}\n",
        f"{case.problem().graph.n_ops:,} ops, {size.large_evaluations} evaluations. `gdp-batch` starts from the "
        "shipped policy, which has seen neither this graph nor this machine.\n",
        lab.table("large", lines),
    ]
