"""Anytime curves: the best feasible step time of each placer over its evaluations and over its seconds."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from simdev.bench.journal import KEYS, read_curves
from simdev.bench.plan_rows import as_row, full_name, read_folder
from simdev.bench.rows import Row
from simdev.errors import InvalidInput, UnknownName
from simdev.files import write_picture
from simdev.report.describe import plain
from simdev.sim.plot import hue, new_figure

MOST = 8  # placers of one picture: the best ones
FAR = 4.0  # the picture ends at this multiple of the best step time; slower runs appear only in the legend
HEADER = ("placer", "runs", "solved", "evaluations", "seconds", "improvements", "step_time_ms")


@dataclass(frozen=True)
class Search:
    """The progress of one run. ``points`` holds ``(evaluations, seconds, step_ns)`` of each improvement and of the end.

    The last point is the placement that the placer returned. That placement may be better than all that the placer
    simulated. A placer that simulates nothing has only this point.
    """

    placer: str
    seed: int
    step_ns: int | None
    evaluations: int
    seconds: float
    points: tuple[tuple[int, float, int], ...]


def searches(
    folder: str | os.PathLike,
    workload: str,
    topology: str,
    *,
    budget: str | None = None,
    placers: Iterable[str] = (),
) -> list[Search]:
    """The runs of a result folder on one workload and topology, sorted by placer and seed.

    ``budget`` selects the runs with one budget (default: the budget of most runs), and ``placers`` those of some entry
    ids (default: all). Raises :class:`InvalidInput` if the folder has no results, and :class:`UnknownName` if it has
    none for a given name.
    """
    folder = Path(folder)
    found = read_folder(folder)
    keys = {as_row(row).key: row.key for row in found}
    rows = [as_row(row) for row in found]
    rows = _chosen(rows, folder, workload=full_name(workload, rows), topology=topology)
    if budget is None:
        budgets = [row.budget for row in rows]
        budget = max(sorted(set(budgets)), key=budgets.count)
    rows = _chosen(rows, folder, budget=budget)
    wanted = set(placers)
    for placer in sorted(wanted):
        _chosen(rows, folder, entry=placer)
    rows = [row for row in rows if not wanted or row.entry in wanted]
    curves: dict[tuple, list[tuple[int, float, int]]] = {}
    for name in KEYS:
        if (folder / name).is_file():
            curves |= read_curves(folder / name)
    return [_search(row, curves.get(keys[row.key], [])) for row in sorted(rows, key=lambda row: (row.entry, row.seed))]


def _chosen(rows: list[Row], folder: Path, **wanted: str) -> list[Row]:
    for column, value in wanted.items():
        known = {getattr(row, column) for row in rows}
        rows = [row for row in rows if getattr(row, column) == value]
        if not rows:
            raise UnknownName("placer" if column == "entry" else column, value, known, source=folder)
    return rows


def _search(row: Row, curve: list) -> Search:
    evaluations, seconds = row.evaluations or 0, row.place_seconds or 0.0
    points = [tuple(point) for point in curve]
    if row.step_ns is not None:
        points.append((evaluations, max([seconds, *(point[1] for point in points)]), row.step_ns))
    return Search(row.entry, row.seed, row.step_ns, evaluations, seconds, tuple(points))


def table(found: list[Search]) -> list[dict[str, str]]:
    """A line for each placer, fastest first, with the columns :data:`HEADER`. The figures are those of the median run
    (of an even number of runs, the faster of the two in the middle)."""
    lines = []
    for placer, group in itertools.groupby(found, key=lambda run: run.placer):
        runs = sorted(group, key=lambda run: (run.step_ns is None, run.step_ns or 0, run.seed))
        median = runs[(len(runs) - 1) // 2]
        solved = sum(run.step_ns is not None for run in runs)
        lines.append(
            (
                median.step_ns is None,
                median.step_ns or 0,
                placer,
                {
                    "placer": placer,
                    "runs": str(len(runs)),
                    "solved": str(solved),
                    "evaluations": str(median.evaluations),
                    "seconds": f"{median.seconds:.2f}",
                    "improvements": str(max(0, len(median.points) - 1)),
                    "step_time_ms": "" if median.step_ns is None else f"{median.step_ns / 1e6:.3f}",
                },
            )
        )
    return [line for *_, line in sorted(lines, key=lambda entry: entry[:3])]


def draw(found: list[Search], title: str, out: str | os.PathLike) -> None:
    """Draw the step time over evaluations (left) and over seconds (right); the ending of ``out`` gives the format.

    The :data:`MOST` placers with the shortest step times are drawn. The line of a placer is the median over its seeds
    (:func:`median_curve`), and ends in a dot; the area around it reaches from the best seed to the worst. A placer that
    simulates nothing is a dot. Both axes are logarithmic. Fewer than one evaluation is drawn as one, and less than a
    millisecond as one millisecond.
    """
    solved: dict[str, list[Search]] = {}
    for run in found:
        if run.step_ns is not None:
            solved.setdefault(run.placer, []).append(run)
    if not solved:
        raise InvalidInput("no run has a score: nothing to draw", source=title)
    figure = new_figure(13, 6)
    panels = figure.subplots(1, 2, sharey=True)
    final = {name: _first(runs, name).step_ns or 0 for name, runs in solved.items()}
    shown = sorted(solved, key=lambda name: (final[name], name))
    best = min(run.step_ns or 0 for runs in solved.values() for run in runs)
    for number, name in enumerate(shown[:MOST]):
        label, colour = plain(_label(name, final[name], found)), hue(number)
        for axis, column, least in ((panels[0], 0, 1), (panels[1], 1, 1e-3)):
            at, low, middle, high = median_curve(solved[name], column, least)
            if len(solved[name]) > 1:
                axis.fill_between(at, low, high, step="post", color=colour, alpha=0.2, linewidth=0)
            axis.step(at, middle, where="post", linewidth=1.6, color=colour)
            near = final[name] <= FAR * best
            axis.plot(at[-1:], middle[-1:], marker="o" if near else "", markersize=6, label=label, color=colour)
    for axis, what in ((panels[0], "evaluations"), (panels[1], "seconds")):
        axis.set(xscale="log", yscale="log", xlabel=what)
        axis.grid(alpha=0.25, which="both")
    panels[0].set_ylim(best / 1e6 * 0.97, min(FAR * best, 1.1 * _worst(solved, shown[:MOST])) / 1e6)
    panels[0].set_ylabel("best step time so far (ms)")
    for which in (panels[0].yaxis.set_major_formatter, panels[0].yaxis.set_minor_formatter):
        which(lambda value, _: f"{value:,.4g}")
    handles, labels = panels[0].get_legend_handles_labels()
    more = f"\n(the best {MOST} of {len(shown)} placers)" if len(shown) > MOST else ""
    figure.legend(
        handles,
        labels,
        loc="outside right upper",
        fontsize="small",
        title=f"final step time, ms; median of the seeds{more}",
    )
    figure.suptitle(plain(f"{title}: {shown[0]} is best, {final[shown[0]] / 1e6:,.1f} ms"), fontweight="bold")
    write_picture(figure, out, dpi=120)


def median_curve(
    runs: list[Search], column: int, least: float
) -> tuple[list[float], list[float], list[float], list[float]]:
    """The seeds of a placer as one falling line: where it changes, and there the least, the median (of two in the
    middle, the lower one) and the largest best step time so far, in ms. It begins where every seed has a time.
    ``column`` is 0 for evaluations and 1 for seconds, which are ``least`` at least."""
    points = [[(max(point[column], least), point[2] / 1e6) for point in run.points] for run in runs if run.points]
    begin = max(mine[0][0] for mine in points)
    at = sorted({x for mine in points for x, _ in mine if x >= begin})
    times = [sorted([ms for x, ms in mine if x <= now][-1] for mine in points) for now in at]
    middle = (len(points) - 1) // 2
    return at, [row[0] for row in times], [row[middle] for row in times], [row[-1] for row in times]


def _worst(solved: dict[str, list[Search]], names: list[str]) -> float:
    """The longest step time, in ns, at which one of these placers began."""
    return max(run.points[0][2] for name in names for run in solved[name] if run.points)


def _first(runs: list[Search], placer: str) -> Search:
    """The run that the legend shows for a placer: the median of its runs with a score."""
    runs = sorted((run for run in runs if run.placer == placer), key=lambda run: (run.step_ns, run.seed))
    return runs[(len(runs) - 1) // 2]


def _label(placer: str, step_ns: int, found: list[Search]) -> str:
    missing = sum(run.step_ns is None for run in found if run.placer == placer)
    return f"{placer}  {step_ns / 1e6:,.1f}" + (f" ({missing} without a score)" if missing else "")
