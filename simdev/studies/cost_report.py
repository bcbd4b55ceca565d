"""Compare the bench before and after calibration: which placers trade places?

Each placer runs twice on each case: with roofline costs (*before*) and with the costs of the device files (*after*).
Each placement is simulated with the costs that its placer used. The first placement is also simulated with the costs
after calibration (*moved*).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from simdev.errors import InvalidInput, SimdevError
from simdev.files import markdown_table, write_table, write_text
from simdev.placers import registry
from simdev.placers.budget import Budget
from simdev.problem.costs import SOURCES, CostModel
from simdev.problem.problem import Problem
from simdev.problem.topology import load_kinds, load_topology
from simdev.sim import simulate
from simdev.studies.physics import kendall

WORKLOADS = ("inception-v3", "rnnlm", "nmt", "gnmt-4", "transformer-xl-2", "wavenet-2x18", "vit-l", "gpt2-medium")
TOPOLOGIES = ("p100x4", "v100x8-dgx1")
PLACERS = ("single-gpu", "single-cpu", "round-robin", "expert", "scotch", "min-cut", "critical-path", "heft", "peft",
           "m-topo", "m-etf", "m-sct", "pipedream", "dpl", "local-search")  # fmt: skip
KINDS = ("p100-pcie", "v100-sxm2-16gb", "a100-sxm4-80gb", "h100-sxm5-80gb")
LEAST = 5  # least number of placers whose placements both fit


@dataclass(frozen=True, eq=False)
class PlacerTimes:
    """The step times of ``placers`` on one case, int64 ``(k,)`` in ns.

    ``before``: placed and simulated with roofline costs. ``after``: placed and simulated with device files. ``moved``:
    placed with roofline costs and simulated with device files.
    """

    workload: str
    topology: str
    placers: tuple[str, ...]
    before: np.ndarray
    after: np.ndarray
    moved: np.ndarray

    @property
    def kendall(self) -> float:
        """The Kendall correlation of the ranks of the placers before and after calibration."""
        return kendall(self.before, self.after)

    @property
    def changed(self) -> int:
        """The number of pairs of placers whose order changes."""
        upper = np.triu_indices(len(self.placers), 1)
        signs = [np.sign(times[:, None] - times[None, :])[upper] for times in (self.before, self.after)]
        return int((signs[0] * signs[1] < 0).sum())

    @property
    def regret(self) -> float:
        """The relative step time that it costs, after calibration, to choose the placement that was best before it."""
        best = min(self.after.min(), self.moved.min())
        return float(self.moved[np.argmin(self.before)] / best - 1)


def compare(
    workloads: Iterable[str],
    topologies: Iterable[str],
    placers: Iterable[str],
    evaluations: int = 500,
    on_case: Callable[[str], None] = lambda text: None,
) -> tuple[list[PlacerTimes], list[str]]:
    """Run the placers on all cases. Returns the cases, and one sentence for each case or placer that is left out.

    Raises :class:`InvalidInput` if no case has :data:`LEAST` placers whose placements fit.
    """
    cases, notes = [], []
    topologies, placers = list(topologies), list(placers)
    for workload in workloads:
        for topology in topologies:
            on_case(f"{workload} on {topology}")
            problems = [
                Problem.build(registry.load_workload(workload), load_topology(topology), CostModel(calibrated=flag))
                for flag in (False, True)
            ]
            rows = {}
            for placer in placers:
                try:
                    rows[placer] = _times(problems, placer, evaluations)
                except SimdevError as error:
                    why = error.message if isinstance(error, InvalidInput) else error
                    notes.append(f"{placer}, {workload} on {topology}: {why}")
            if len(rows) < LEAST:
                notes.append(f"{workload} on {topology}: only {len(rows)} placers with placements that fit")
                continue
            times = np.array(list(rows.values()), np.int64).T
            cases.append(PlacerTimes(workload, topology, tuple(rows), *times))
    if not cases:
        raise InvalidInput(f"no case to compare ({'; '.join(notes[:3])})")
    return cases, notes


def _times(problems: list[Problem], placer: str, evaluations: int) -> tuple[int, int, int]:
    """``before``, ``after`` and ``moved`` of one placer. Raises :class:`InvalidInput` if a placement does not fit."""
    spec, params = registry.find_placer(placer)
    placements = [
        spec.place(problem, rng=np.random.default_rng(0), budget=Budget(problem, evaluations=evaluations), **params)
        for problem in problems
    ]
    before, after = (simulate(problem, placed) for problem, placed in zip(problems, placements, strict=True))
    moved = simulate(problems[1], placements[0])
    if not (before.feasible and after.feasible and moved.feasible):
        raise InvalidInput("a placement does not fit in memory")
    return before.step_ns, after.step_ns, moved.step_ns


HEADER = [
    "workload",
    "topology",
    "placers",
    "Kendall",
    "pairs changed",
    "best before",
    "best after",
    "regret %",
    "after / before",
]


def table(cases: list[PlacerTimes]) -> list[list[str]]:
    """A line per case."""
    return [
        [
            case.workload,
            case.topology,
            str(len(case.placers)),
            f"{case.kendall:.2f}",
            f"{case.changed} of {len(case.placers) * (len(case.placers) - 1) // 2}",
            case.placers[int(np.argmin(case.before))],
            case.placers[int(np.argmin(case.after))],
            f"{100 * case.regret:.1f}",
            f"{np.median(case.after / case.before):.2f}",
        ]
        for case in cases
    ]


def ranks(cases: list[PlacerTimes]) -> list[list[str]]:
    """A line for each placer with its mean ranks before and after, over its cases, sorted by the mean rank after."""
    found: dict[str, list[tuple[int, int]]] = {}
    for case in cases:
        places = [np.searchsorted(np.sort(times), times) + 1 for times in (case.before, case.after)]
        for number, placer in enumerate(case.placers):
            found.setdefault(placer, []).append((int(places[0][number]), int(places[1][number])))
    means = {placer: np.mean(rows, axis=0) for placer, rows in found.items()}
    return [
        [
            placer,
            str(len(found[placer])),
            f"{means[placer][0]:.1f}",
            f"{means[placer][1]:.1f}",
            f"{means[placer][0] - means[placer][1]:+.1f}",
        ]
        for placer in sorted(means, key=lambda name: (means[name][1], name))
    ]


SOURCES_HEADER = ["workload", "device", "table %", "fit %", "roofline %", "largest roofline costs"]


def sources(workloads: Iterable[str], kinds: Iterable[str] = KINDS) -> list[list[str]]:
    """A line for each workload and device kind: the share of the ops' time by source of the cost, and the kinds of op
    whose roofline costs are at least 1 % of that time."""
    lines, model, known = [], CostModel(), load_kinds()
    for workload in workloads:
        graph = registry.load_workload(workload)
        for name in kinds:
            ns, source = model.op_costs(graph, known[name])
            total = max(1, int(ns.clip(0).sum()))
            share = [ns[source == SOURCES.index(what)].clip(0).sum() / total for what in ("table", "fit", "roofline")]
            rough = np.flatnonzero(source == SOURCES.index("roofline"))
            by_kind = np.bincount(graph.op_kind[rough], ns[rough].clip(0), minlength=len(graph.kinds)) / total
            most = [f"{graph.kinds[k]} {100 * by_kind[k]:.0f}" for k in np.argsort(-by_kind) if by_kind[k] >= 0.01]
            lines.append([workload, name, *(f"{100 * value:.1f}" for value in share), ", ".join(most[:4])])
    return lines


def write(cases: list[PlacerTimes], notes: list[str], folder: Path, evaluations: int) -> None:
    """Write ``times.csv`` (a row for each placer and case) and ``README.md`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        [case.workload, case.topology, placer, *(int(times[k]) for times in (case.before, case.after, case.moved))]
        for case in cases
        for k, placer in enumerate(case.placers)
    ]
    write_table(folder / "times.csv", ["workload", "topology", "placer", "before_ns", "after_ns", "moved_ns"], rows)
    write_text(folder / "README.md", markdown(cases, notes, evaluations))


def markdown(cases: list[PlacerTimes], notes: list[str], evaluations: int) -> str:
    """The report as text."""
    pairs = sum(len(case.placers) * (len(case.placers) - 1) // 2 for case in cases)
    changed = sum(case.changed for case in cases)
    regrets = np.array([case.regret for case in cases])
    same = sum(np.argmin(case.before) == np.argmin(case.after) for case in cases)
    lines = ["# The bench before and after calibration", ""]
    lines += [
        f"`simdev study cost-report` wrote this report: {len(cases)} cases, at most {evaluations} evaluations per run."
    ]
    lines += ["Costs *before* calibration are rooflines, costs *after* it come from the device files. *Regret* is the"]
    lines += ["step time that it costs, after calibration, to choose the placement that was best before it."]
    lines += ["*After / before* is the median ratio of the step times over placers.", ""]
    lines += [f"{changed} of {pairs} pairs of placers ({100 * changed / pairs:.1f} %) trade places; the best placer is"]
    lines += [f"the same in {same} of {len(cases)} cases; the mean Kendall correlation of the ranks is"]
    lines += [f"{np.mean([case.kendall for case in cases]):.3f}, and the mean regret {100 * regrets.mean():.1f} %.", ""]
    lines += [*markdown_table(HEADER, table(cases)), "", "Mean rank of each placer:", ""]
    lines += markdown_table(["placer", "cases", "before", "after", "places won"], ranks(cases))
    if notes:
        lines += ["", "Left out:", "", *(f"* {note}" for note in notes)]
    lines += ["", "## Where the costs come from", "", "Shares of the time that all ops take in sequence.", ""]
    lines += markdown_table(SOURCES_HEADER, sources(dict.fromkeys(case.workload for case in cases)))
    return "\n".join(lines) + "\n"
