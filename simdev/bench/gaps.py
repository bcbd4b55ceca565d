"""What the gap between a result and its bound consists of: what a better placement closes, what no bound of this kind
can close, and what is open.

The bounds (R12) are the same for every order of ops and without contention of links. So none of them can exceed the
time that a placement which fits takes under these lighter rules, its *relaxed time*; what lies between the relaxed time
of the best known placement and its step time is beyond them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from simdev.bench import stored
from simdev.bench.plan_rows import PlanRow, as_row, read_folder
from simdev.bench.rows import Row
from simdev.problem.placement import Placement
from simdev.problem.placement_file import stored_placement
from simdev.problem.problem import Problem, Rules

PARTS = ("best known ms", "relaxed ms", "placement weak", "bound weak", "open", "verdict")
CLOSED, MOST = 0.01, 0.5


@dataclass(frozen=True)
class Parts:
    """Three ratios, minus one: of the best result of a folder to the best known one, of this to its relaxed time, and
    of the relaxed time to the bound. Together they are the gap."""

    placement: float
    bound: float
    open: float

    @property
    def verdict(self) -> str:
        """Which part is the largest, or that the case is closed."""
        gap = (1 + self.placement) * (1 + self.bound) * (1 + self.open) - 1
        if gap <= CLOSED:
            return "closed"
        if self.placement > MOST * gap:
            return "placement weak"
        if self.bound > MOST * gap:
            return "bound weak"
        return "open"


def gap_parts(folder: Path, others: Iterable[Path] = ()) -> list[dict[str, str]]:
    """The lines of :func:`simdev.bench.score.gaps` for a result folder, with :data:`PARTS` for each case.

    The best known result is the best of the same case in ``folder`` and ``others``. A result under ``fifo`` counts for
    the order ``priority``, too: on devices of one slot, a placement repeats its schedule of ``fifo`` with the right
    priorities. Cells are empty for cases without a result or a bound, and for pipelines (the objectives throughput and
    serve). Of a job, whose gap is divided no further, "placement weak" says how far the folder's best plan is from the
    best known.
    """
    from simdev.bench.score import gaps  # it imports pandas

    found = read_folder(Path(folder))
    known = known_times(folder, others) if any(isinstance(row, Row) for row in found) else {}
    own = _best_plans([folder])
    best = _best_plans([folder, *others]) if own else {}
    lines = gaps(map(as_row, found))
    for line in lines:
        line |= dict.fromkeys(PARTS, "")
        case = tuple(line[name] for name in ("workload", "topology", "rules", "objective"))
        times = known.get(case)
        if case in own:
            line["best known ms"] = f"{best[case] / 1e6:.3f}"
            line["placement weak"] = f"{own[case] / best[case] - 1:.1%}"
        if times:
            parts = times.parts
            shares = (f"{share:.1%}" for share in (parts.placement, parts.bound, parts.open))
            milliseconds = (f"{times.best_ns / 1e6:.3f}", f"{times.relaxed_ns / 1e6:.3f}")
            line |= dict(zip(PARTS, (*milliseconds, *shares, parts.verdict), strict=True))
    return lines


@dataclass(frozen=True)
class Times:
    """What is known of a case, in ns: the best result of the folder, the best known result, its relaxed time, and the
    best bound. None is shorter than the next."""

    own_ns: int
    best_ns: int
    relaxed_ns: int
    bound_ns: int

    @property
    def parts(self) -> Parts:
        return Parts(
            self.own_ns / self.best_ns - 1, self.best_ns / self.relaxed_ns - 1, self.relaxed_ns / self.bound_ns - 1
        )


def known_times(folder: Path, others: Iterable[Path] = ()) -> dict[tuple[str, str, str, str], Times]:
    """The times of each case of ``folder``, by workload, topology, rules and objective, as :func:`gap_parts` explains.

    Cases without a result or a bound, and those of pipelines, are left out.
    """
    folders = [Path(folder), *map(Path, others)]
    found = [(place, row) for place in folders for row in read_folder(place) if isinstance(row, Row)]
    own = [row for place, row in found if place == folders[0]]
    known = {}
    for case in {row.case: row for row in own}.values():
        same = [(place, row) for place, row in found if _counts(row, case)]
        mine = min((row.step_ns for row in own if row.case == case.case and row.step_ns), default=None)
        bound_ns = max(row.lower_bound_ns or 0 for _, row in same) if same else 0
        if mine and bound_ns and case.objective in ("step", "latency"):
            place, best = min(same, key=lambda pair: (pair[1].step_ns, pair[1].key))
            relaxed = relaxed_ns(stored.stored_problem(place, best), best, place)
            known[case.case] = Times(mine, best.step_ns, relaxed, bound_ns)
    return known


def relaxed_ns(problem: Problem, row: Row, folder: Path) -> int:
    """The shortest step time of a row's placement without contention of links, under its own and the default orders.

    Runs that do not fit do not count. Under the contention ``fair`` or the runtime ``eager``, it is the step time.
    """
    from simdev.sim import simulate

    if problem.rules.contention == "fair" or problem.rules.runtime == "eager":
        return row.step_ns
    placement = stored_placement(folder, row.placement)
    times = [row.step_ns]
    for order, priority in (("priority", placement.priority), ("priority", None), ("fifo", None)):
        lighter = replace(problem, rules=Rules(order, "none"))
        schedule = simulate(lighter, Placement(placement.devices, priority))
        times += [int(schedule.step_ns)] * schedule.feasible
    return min(times)


def _best_plans(folders: Iterable[Path]) -> dict[tuple[str, str, str, str], int]:
    """The shortest step time of a plan for each job, in ns."""
    best: dict[tuple[str, str, str, str], int] = {}
    for row in [as_row(row) for place in folders for row in read_folder(Path(place)) if isinstance(row, PlanRow)]:
        if row.step_ns is not None:
            best[row.case] = min(row.step_ns, best.get(row.case, row.step_ns))
    return best


def _counts(row: Row, case: Row) -> bool:
    """Whether the step time of ``row`` can be reached in ``case``, too."""
    if row.step_ns is None or (row.fingerprint, row.cost_hash, row.objective) != (
        case.fingerprint,
        case.cost_hash,
        case.objective,
    ):
        return False
    return row.rules in (case.rules, case.rules.replace("priority/", "fifo/", 1))
