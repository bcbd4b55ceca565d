"""The same placements ranked under each preset of :mod:`simdev.sim.presets`: which simulator would have picked which?

The placements are those of a result folder of ``simdev bench``. Every one that fits in memory is timed anew under the
rules of this project and under each preset; each case (a workload on a machine) is ranked by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from simdev.bench.rows import Row, read_rows, stored_placement
from simdev.errors import InvalidInput, SimdevError
from simdev.files import markdown_table, write_table, write_text
from simdev.placers import registry
from simdev.problem.problem import Problem
from simdev.problem.topology import load_topology
from simdev.sim import simulate
from simdev.sim.presets import PRESETS, step_ns

FULL = "simdev"
GOOD = 1.5  # placements within this factor of the best: telling these apart is what a simulator is for
LEAST = 5  # placements of a case


@dataclass(frozen=True, eq=False)
class CaseTimes:
    """One case: ``ns`` maps a preset, and :data:`FULL`, to int64 ``(k,)``, the times of the ``placers``' placements."""

    workload: str
    topology: str
    placers: tuple[str, ...]
    ns: dict[str, np.ndarray]


@dataclass(frozen=True)
class Agreement:
    """How one preset ranks one case, against the full rules: rank correlations over all placements and over the good
    ones (NaN where fewer than three are), the time of its favourite over the best, the middle ratio of its times."""

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
    """Time the placements of ``folder``; the cases, and what was left aside, one sentence each.

    Raises :class:`InvalidInput` where the folder has no case with :data:`LEAST` placements that fit.
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
                raise InvalidInput("the graph has changed since the placements were made")
            found = {row.placement: row for row in reversed(rows)}  # one of those that found the same
            if len(found) < LEAST:
                raise InvalidInput(f"only {len(found)} placements that fit")
            answer.append(_timed(folder, problem, workload, topology, list(found.values())))
        except SimdevError as error:
            notes.append(f"{workload} on {topology}: {error}")
    if not answer:
        raise InvalidInput(f"no case to rank ({'; '.join(notes[:3]) or 'no rows that fit'})", source=folder)
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
        case.workload, case.topology, preset, len(full), spearman(full, other), kendall(full, other),
        kendall(full[good], other[good]) if good.sum() >= 3 else float("nan"), case.placers[favourite],
        float(full[favourite] / full.min()), float(np.median(other / full)),
    )  # fmt: skip


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation of ``(k,)`` and ``(k,)``; NaN where one of them is constant."""
    from scipy.stats import spearmanr

    return float(spearmanr(a, b).statistic) if len(set(a.tolist())) > 1 and len(set(b.tolist())) > 1 else float("nan")


def kendall(a: np.ndarray, b: np.ndarray) -> float:
    """Kendall's tau-b of ``(k,)`` and ``(k,)``; NaN where one of them is constant."""
    from scipy.stats import kendalltau

    return float(kendalltau(a, b).statistic)


def matrix(cases: list[CaseTimes]) -> dict[tuple[str, str], float]:
    """The mean Kendall correlation of each two sets of rules over the cases that have one."""
    names = [FULL, *PRESETS]
    answer = {}
    for a in names:
        for b in names:
            known = [tau for tau in (kendall(case.ns[a], case.ns[b]) for case in cases) if not np.isnan(tau)]
            answer[a, b] = float(np.mean(known)) if known else float("nan")
    return answer


def write(cases: list[CaseTimes], notes: list[str], folder: Path) -> None:
    """``physics.csv`` (a row per case and preset), ``times.csv`` (a row per placement) and ``README.md``."""
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
    """A line per preset: its means over the cases."""
    rows = agreements(cases)
    lines = []
    for preset in PRESETS:
        mine = [row for row in rows if row.preset == preset]
        good = [row.kendall_good for row in mine if not np.isnan(row.kendall_good)]
        regret = np.array([row.regret for row in mine])
        lines.append([
            preset, f"{np.mean([row.spearman for row in mine]):.3f}", f"{np.mean([row.kendall for row in mine]):.3f}",
            f"{np.min([row.kendall for row in mine]):.3f}", f"{np.mean(good):.3f}" if good else "",
            f"{int((regret <= 1).sum())}/{len(mine)}", f"{100 * (np.exp(np.log(regret).mean()) - 1):.1f}",
            f"{100 * (regret.max() - 1):.1f}", f"{np.median([row.ratio for row in mine]):.2f}",
        ])  # fmt: skip
    return lines


SUMMARY = ["rules", "Spearman", "Kendall", "least Kendall", f"Kendall within {GOOD}x", "same best", "regret %",
           "largest regret %", "time ratio"]  # fmt: skip


def markdown(cases: list[CaseTimes], notes: list[str]) -> str:
    """The report as text: the summary, the matrix, and each case."""
    count = sum(len(case.placers) for case in cases)
    lines = ["# The same placements under other simulators' rules", ""]
    lines += [
        f"Written by `simdev physics-report`: {count} placements of {len(cases)} cases, each timed under the rules of"
    ]
    lines += [
        "`simdev/sim/MODEL.md` and under the presets of `simdev/sim/presets.py`. Correlations are of the ranks within a"
    ]
    lines += [
        "case, then meant over cases. *Regret*: by how much the placement that the preset likes best is slower than"
    ]
    lines += [
        "the best, under the full rules (geometric mean). *Time ratio*: the preset's time over the full rules'.",
        "",
    ]
    lines += markdown_table(SUMMARY, summary(cases))
    lines += ["", "Mean Kendall correlation of each two:", ""]
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
        lines += ["", "Left aside:", "", *(f"* {note}" for note in notes)]
    return "\n".join(lines) + "\n"
