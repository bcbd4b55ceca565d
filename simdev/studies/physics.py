"""Shows how the rules of other simulators would rank the same placements (``simdev study physics-report``).

The placements are those of a result folder of ``simdev bench``. Each placement that fits in memory is simulated under
the full rules and under each preset of :mod:`simdev.sim.presets`. Each case (a workload on a machine) is ranked
separately.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from simdev.bench.rows import Row, read_rows
from simdev.errors import InvalidInput, SimdevError
from simdev.files import markdown_table, write_table, write_text
from simdev.placers import registry
from simdev.problem.placement_file import stored_placement
from simdev.problem.problem import Problem
from simdev.problem.topology import load_topology
from simdev.sim import simulate
from simdev.sim.presets import PRESETS, step_ns

FULL = "simdev"
GOOD = 1.5  # good placements are within this factor of the best; a simulator must distinguish these
LEAST = 5  # a case needs this many placements


@dataclass(frozen=True, eq=False)
class CaseTimes:
    """The simulated times of one case: ``ns`` maps :data:`FULL` and each preset to int64 ``(k,)``, one per placer."""

    workload: str
    topology: str
    placers: tuple[str, ...]
    ns: dict[str, np.ndarray]


@dataclass(frozen=True)
class Agreement:
    """How well the ranking of one case by one preset agrees with the ranking by the full rules.

    ``spearman`` and ``kendall`` are rank correlations over all placements, ``kendall_good`` over the good ones (NaN if
    there are fewer than three). ``favourite`` is the placer that the preset ranks first, and ``regret`` the time of its
    placement over the best time. ``ratio`` is the median of the preset's times over the full rules' times.
    """

    workload: str
    topology: str
    preset: str
    placements: int
    spearman: float
    kendall: float
    kendall_good: float
    favourite: str
    regret: float
    ratio: float


def read_cases(folder: Path, on_case: Callable[[str], None] = lambda text: None) -> tuple[list[CaseTimes], list[str]]:
    """Simulate the placements of ``folder``: the cases, and a sentence for each case that was left out.

    Raises :class:`InvalidInput` if no case of the folder has :data:`LEAST` placements that fit.
    """
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in read_rows(folder / "results.csv"):
        if row.status == "ok" and row.feasible and row.rules == "fifo/fifo/dataflow":
            cases.setdefault((row.workload, row.topology), []).append(row)
    answer, notes = [], []
    for (workload, topology), rows in sorted(cases.items()):
        on_case(f"{workload} on {topology}")
        try:
            problem = Problem.build(registry.load_workload(workload), load_topology(topology))
            if problem.graph.fingerprint != rows[0].fingerprint:
                raise InvalidInput("the graph has changed since the placements were stored")
            found = {row.placement: row for row in reversed(rows)}  # one row for each different placement
            if len(found) < LEAST:
                raise InvalidInput(f"only {len(found)} placements fit")
            answer.append(_timed(folder, problem, workload, topology, list(found.values())))
        except SimdevError as error:
            notes.append(f"{workload} on {topology}: {error}")
    if not answer:
        raise InvalidInput(f"no case can be ranked ({'; '.join(notes[:3]) or 'no placement fits'})", source=folder)
    return answer, notes


def _timed(folder: Path, problem: Problem, workload: str, topology: str, rows: list[Row]) -> CaseTimes:
    placements = [stored_placement(folder, row.placement) for row in rows]
    ns = {FULL: [simulate(problem, placement).step_ns for placement in placements]}
    for preset in PRESETS:
        ns[preset] = [step_ns(problem, placement, preset) for placement in placements]
    names = tuple(row.entry for row in rows)
    return CaseTimes(workload, topology, names, {name: np.array(values, np.int64) for name, values in ns.items()})


def agreements(cases: list[CaseTimes]) -> list[Agreement]:
    """One row per case and preset."""
    return [_agreement(case, preset) for case in cases for preset in PRESETS]


def _agreement(case: CaseTimes, preset: str) -> Agreement:
    full, other = case.ns[FULL], case.ns[preset]
    good = full <= GOOD * full.min()
    favourite = int(np.argmin(other))
    return Agreement(
        case.workload,
        case.topology,
        preset,
        len(full),
        spearman(full, other),
        kendall(full, other),
        kendall(full[good], other[good]) if good.sum() >= 3 else float("nan"),
        case.placers[favourite],
        float(full[favourite] / full.min()),
        float(np.median(other / full)),
    )


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation of two arrays ``(k,)``; NaN if one of them is constant."""
    from scipy.stats import spearmanr

    return float(spearmanr(a, b).statistic) if len(set(a.tolist())) > 1 and len(set(b.tolist())) > 1 else float("nan")


def kendall(a: np.ndarray, b: np.ndarray) -> float:
    """Kendall's tau-b of two arrays ``(k,)``; NaN if one of them is constant."""
    from scipy.stats import kendalltau

    return float(kendalltau(a, b).statistic)


def matrix(cases: list[CaseTimes]) -> dict[tuple[str, str], float]:
    """The mean Kendall correlation of each pair of rule sets, over the cases in which it is defined."""
    names = [FULL, *PRESETS]
    answer = {}
    for a in names:
        for b in names:
            known = [tau for tau in (kendall(case.ns[a], case.ns[b]) for case in cases) if not np.isnan(tau)]
            answer[a, b] = float(np.mean(known)) if known else float("nan")
    return answer


def write(cases: list[CaseTimes], notes: list[str], folder: Path) -> None:
    """Write ``physics.csv`` (a row per case and preset), ``times.csv`` (a row per placement) and ``README.md``."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = agreements(cases)
    columns = list(Agreement.__dataclass_fields__)
    write_table(folder / "physics.csv", columns, [[getattr(row, name) for name in columns] for row in rows])
    lines = [
        [case.workload, case.topology, placer, *(int(case.ns[name][number]) for name in (FULL, *PRESETS))]
        for case in cases
        for number, placer in enumerate(case.placers)
    ]
    write_table(folder / "times.csv", ["workload", "topology", "placer", *(f"{n}_ns" for n in (FULL, *PRESETS))], lines)
    write_text(folder / "README.md", markdown(cases, notes))


def summary(cases: list[CaseTimes]) -> list[list[str]]:
    """One line for each preset: its means over the cases."""
    rows = agreements(cases)
    lines = []
    for preset in PRESETS:
        mine = [row for row in rows if row.preset == preset]
        good = [row.kendall_good for row in mine if not np.isnan(row.kendall_good)]
        regret = np.array([row.regret for row in mine])
        lines.append(
            [
                preset,
                f"{np.mean([row.spearman for row in mine]):.3f}",
                f"{np.mean([row.kendall for row in mine]):.3f}",
                f"{np.min([row.kendall for row in mine]):.3f}",
                f"{np.mean(good):.3f}" if good else "",
                f"{int((regret <= 1).sum())}/{len(mine)}",
                f"{100 * (np.exp(np.log(regret).mean()) - 1):.1f}",
                f"{100 * (regret.max() - 1):.1f}",
                f"{np.median([row.ratio for row in mine]):.2f}",
            ]
        )
    return lines


SUMMARY = [
    "rules",
    "Spearman",
    "Kendall",
    "least Kendall",
    f"Kendall within {GOOD}x",
    "same best",
    "regret %",
    "largest regret %",
    "time ratio",
]


def markdown(cases: list[CaseTimes], notes: list[str]) -> str:
    """The report as Markdown: the summary, the correlation matrix, and a table of the cases."""
    count = sum(len(case.placers) for case in cases)
    lines = [
        "# The same placements under other simulators' rules",
        "",
        f"`simdev study physics-report` wrote this page. It simulates {count} placements of {len(cases)} cases under",
        "the rules of `simdev/sim/MODEL.md` and the presets of `simdev/sim/presets.py`. Correlations are computed from",
        "the ranks within a case and then averaged over the cases. *Regret* is how much slower the placement that the",
        "preset ranks first is than the best one, under the full rules (geometric mean). *Time ratio* is the preset's",
        "time divided by the full rules' time.",
        "",
    ]
    lines += markdown_table(SUMMARY, summary(cases))
    lines += ["", "Mean Kendall correlation of each pair:", ""]
    names, pairs = [FULL, *PRESETS], matrix(cases)
    lines += markdown_table(["", *names], [[a, *(f"{pairs[a, b]:.3f}" for b in names)] for a in names])
    lines += ["", "## Cases", ""]
    header = ["workload", "topology", "placements", *(f"{name}: Kendall, favourite (regret %)" for name in PRESETS)]
    rows = agreements(cases)
    body = []
    for number, case in enumerate(cases):
        mine = rows[number * len(PRESETS) : (number + 1) * len(PRESETS)]
        cells = [f"{row.kendall:.2f}, `{row.favourite}` ({100 * (row.regret - 1):.1f})" for row in mine]
        body.append([case.workload, case.topology, str(len(case.placers)), *cells])
    lines += markdown_table(header, body)
    if notes:
        lines += ["", "Left out:", "", *(f"* {note}" for note in notes)]
    return "\n".join(lines) + "\n"
